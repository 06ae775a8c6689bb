r"""Cyclical stochastic-gradient MCMC (Zhang, Li, Zhang, Chen and Wilson, 2020): explore, then sample, then start again.

Within a cycle of ``C`` updates, ``t`` being the count,

    lr(t) = lr / 2 (1 + cos(pi (t mod C) / C)),      T(t) = 0 while t mod C < burn_in, else T:

a large step at T = 0 finds a new mode, the small steps after ``burn_in`` sample around it. Two noise rules:

* ours, the default: matched noise (``matching.law.scheduled_noise``), whose variance is exact while lr falls. A restart
  brings the thermal velocity to the new lr's scale; that step has no limit as T -> 0, where the velocity is kept.
* the paper's, ``lr_inside=True``: lr inside the momentum and white noise of the level ``lr(t)`` would have for ever,

      v <- mu v - lr(t) g + N(0, 2 (1 - mu) lr(t) T(t)),      theta <- theta + v.

  As lr falls the velocity still holds noise of the earlier, larger steps, so that this samples at too high a temperature, and
  more so the longer the velocity remembers.

At a restart the noise is not exact; :func:`bayesopt_chain.schedules.cosine_restarts` says by how much. The chain has forgotten
the error by the end of the burn-in that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesopt_chain import checks, schedules
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.links.keyed import inject_filtered_noise
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.links.momentum import add_momentum
from bayesopt_chain.samplers.langevin import sghmc
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now


@dataclass(frozen=True)
class sampling_phase:
    """Temperature schedule of a cycle: 0 for ``burn_in`` updates, then ``temperature``.

    Args:
        temperature: number, 0-d tensor or schedule.
        cycle: updates in a cycle.
        burn_in: updates of exploration in each, fewer than ``cycle``.

    Raises:
        ValueError: a cycle that is no longer than its burn-in.

    Example:
        >>> from bayesopt_chain.samplers.cyclical import sampling_phase
        >>> [sampling_phase(0.5, cycle=10, burn_in=8)(t).item() for t in (0, 7, 8, 10)]
        [0.0, 0.0, 0.5, 0.0]
    """

    temperature: ScalarOrSchedule
    cycle: int
    burn_in: int

    def __post_init__(self) -> None:
        _check(self.cycle, self.burn_in)
        checks.TEMPERATURE("temperature", self.temperature)

    def __call__(self, count) -> Tensor:
        t = schedules.tensor_of(count)
        hot = torch.remainder(t, self.cycle) >= self.burn_in
        return hot.to(torch.float64) * now(self.temperature, t)


@checks.factory_takes(lr=checks.POSITIVE, momentum=checks.MOMENTUM)
def cyclical(
    lr: float,
    cycle: int,
    burn_in: int,
    momentum: float = 0.9,
    *,
    temperature: ScalarOrSchedule,
    order: int | None = None,
    lr_inside: bool = False,
    generator: torch.Generator | None = None,
) -> Chain:
    """Cyclical SGHMC (Zhang et al., 2020). At ``temperature=0`` it is SGD with momentum under a cosine with restarts.

    Args:
        lr: learning rate at the start of each cycle.
        cycle: updates in a cycle.
        burn_in: updates at T = 0 at the start of each cycle, fewer than ``cycle``. Collect samples after them.
        momentum: in [0, 1); 0 gives cyclical SGLD.
        temperature: of the sampling phase: number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data.
        order: 2 (default) or 1, as for :func:`bayesopt_chain.sghmc`; 1 only with ``lr_inside``.
        lr_inside: the paper's rule, lr inside the momentum and white noise of the current lr's level; it samples too warm as lr
            falls, and is here for comparison.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds two tensors for each parameter, one with ``lr_inside``.

    Raises:
        ValueError: a cycle that is no longer than its burn-in; ``order=2`` with ``lr_inside``; an argument out of range.

    Example:
        >>> import bayesopt_chain as bc
        >>> tx = bc.samplers.cyclical(0.1, cycle=1000, burn_in=800, temperature=1 / 500)
        >>> bc.samplers.cyclical(0.1, cycle=100, burn_in=100, temperature=1.0)
        Traceback (most recent call last):
            ...
        ValueError: cyclical: burn_in must be shorter than the cycle (100 updates), got 100; no update would sample
    """
    _check(cycle, burn_in)
    schedule = schedules.cosine_restarts(lr, cycle)
    phase = 0.0 if is_zero(temperature) else sampling_phase(temperature, cycle, burn_in)
    if not lr_inside:
        return sghmc(schedule, momentum, temperature=phase, order=2 if order is None else order, generator=generator)
    if order not in (None, 1):
        raise ValueError(f"cyclical: order must be 1 with lr_inside=True, whose noise is white, got {order!r}")
    level = (2.0 * (1.0 - momentum)) ** 0.5
    return chain(
        scale_by_neg_lr(schedule),
        inject_filtered_noise(
            phase, (level,), beside=(1, 1 if momentum else 0), gain=_Root(schedule), generator=generator
        ),
        add_momentum(momentum),
    )


@dataclass(frozen=True)
class _Root:
    """Square root of a schedule."""

    schedule: schedules.Schedule

    def __call__(self, count) -> Tensor:
        return torch.sqrt(self.schedule(count))


def _check(cycle: int, burn_in: int) -> None:
    checks.WHOLE("cyclical: cycle", cycle)
    checks.whole(0)("cyclical: burn_in", burn_in)
    if burn_in >= cycle:
        raise ValueError(
            f"cyclical: burn_in must be shorter than the cycle ({cycle} updates), got {burn_in}; no update would sample"
        )
