r"""Stochastic gradient Fisher scoring (Ahn, Korattikara and Welling, 2012): the minibatch's own noise counts as Langevin noise.

With ``V`` the covariance of the gradients of single data, a batch of ``n`` gives the mean gradient noise ``V / n``. With
``(2 T / lr) I`` injected besides, and ``V`` also in the place of the Hessian of the mean loss, which it is near a posterior
mode of ``N = 1 / T`` data (the paper's ``gamma = (n + N) / n`` counts both),

    theta <- theta - D (g + sqrt(2 T / lr) xi),      D = (I / lr + V / (2 T n) + V / 2)^-1.

The noise of a step has the covariance ``2 T D - T D V D``, so that on a quadratic loss of curvature ``k`` the stationary
variance is ``T / k (2 - D V) / (2 - D k)``: exact for every lr and batch where ``V = k``. For small lr this is SGLD. For large
lr no noise is injected and the step is set by the Fisher information alone; a step then contracts by ``2 n / (N + n)``.

``V`` is a bias-corrected running average of what ``update`` receives as ``gradient_variance=``: the variance of each
parameter's gradient across single data (per datum, not divided by the batch size), a tree like the parameters, so that ``D``
is diagonal.

At T = 0 the step vanishes wherever gradients are noisy, so that no optimizer is the limit: temperature 0 is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import zeros
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.schedules import ScalarOrSchedule, now, root


class FisherState(NamedTuple):
    """What :func:`sgfs` remembers.

    Attributes:
        key, count: of the random stream, 0-d int64.
        variance: the running average of the gradients' variance, one tensor for each leaf.
    """

    key: Tensor
    step: Tensor
    variance: Any


@dataclass(frozen=True)
class FisherScoring(Keyed):
    """The link behind :func:`sgfs`."""

    lr: float
    temperature: ScalarOrSchedule
    batch_size: int
    decay: float
    name = "sgfs"
    traits = replace(
        Keyed.traits,
        extra_kwargs=frozenset({"gradient_variance"}),
        required_kwargs=frozenset({"gradient_variance"}),
    )

    def init(self, leaves: Leaves, context: LinkContext) -> FisherState:
        return FisherState(*self.start(leaves, context), zeros(leaves))

    def update(self, g: Leaves, state: FisherState, op: TensorOps, context: LinkContext) -> tuple[Leaves, FisherState]:
        given = context.extra.get("gradient_variance")
        if given is None:
            raise ValueError(
                "sgfs: update needs gradient_variance=, the variance of single-datum gradients; "
                "pass make_step(..., keywords={'gradient_variance': fn})"
            )
        temperature: Any = checks.at_this_step("temperature", now(self.temperature, state.step))
        inject = root(2.0 * temperature / self.lr)
        corrected = 1.0 / (1.0 - self.decay ** (state.step + 1).to(torch.float64))  # the average starts at 0
        xi = self.normals(state, g, context)
        variance = [self.decay * v + (1.0 - self.decay) * x for v, x in zip(state.variance, context.leaves(given))]
        counted = corrected * (0.5 / (temperature * self.batch_size) + 0.5)  # for the noise, and for the curvature
        steps = [1.0 / (1.0 / self.lr + v * counted) for v in variance]
        moves = [-step * (x + inject * e) for step, x, (e,) in zip(steps, g, xi)]
        count = op.next_count(state.step)
        return op.put(g, moves), FisherState(state.key, count, tuple(op.put(state.variance, variance)))


@checks.factory_takes(
    lr=checks.POSITIVE,
    batch_size=checks.WHOLE,
    decay=checks.MOMENTUM,
    temperature=checks.number(
        "(0, inf)",
        tensor=True,
        schedule=True,
        hint="its step is 2 T / (noise) and vanishes there; use bc.sgd to optimise",
    ),
)
def sgfs(
    lr: float,
    *,
    temperature: ScalarOrSchedule,
    batch_size: int,
    decay: float = 0.95,
    generator: torch.Generator | None = None,
) -> Chain:
    """Stochastic gradient Fisher scoring (Ahn, Korattikara and Welling, 2012) with a diagonal step.

    ``update`` takes ``gradient_variance=``: the variance of each parameter's gradient across single data as a tree like the
    parameters. :func:`bayesopt_chain.make_step` passes what its argument of that name returns.

    Args:
        lr: learning rate where the gradients have no noise; the step is never longer.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data. A step
            remembers nothing of the last one but the variance of the gradients, whatever the temperature was.
        batch_size: ``n``, data in a batch.
        decay: weight of the past in the average of ``gradient_variance=``, in [0, 1).
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter.

    Raises:
        ValueError: temperature 0, or another argument out of range; at ``update``, a missing ``gradient_variance=``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.sgfs(0.1, temperature=1 / 500, batch_size=50), torch.zeros(2)
        >>> updates, state = tx.update(torch.ones(2), tx.init(params), params=params, gradient_variance=torch.ones(2))
    """
    return Chain((FisherScoring(lr, temperature, batch_size, decay, generator=generator),))
