r"""Langevin dynamics whose clock slows down where gradients are large: SamAdams (Leimkuhler, Lohmann and Whalley, 2025).

A step lasts ``dt = h psi(zeta)`` instead of ``h``. The monitor ``zeta`` is a running mean of the length of the gradient (over
all parameters) in units of ``gradient_scale``, and with ``m <= M``

    psi(zeta) = m + (M - m) / (1 + zeta),        M on flat ground, m on a wall, half way where |g| = gradient_scale.

With the gradient ``g`` at the parameters, ``mu = exp(-gamma dt)`` and ``r = exp(-alpha h / 2)`` a step is ZBAOABZ:

    Z  zeta <- r zeta + (1 - r) |g| / gradient_scale,   dt = h psi(zeta)
    B  p <- p - (dt / 2) g                     A  theta <- theta + (dt / 2) p
    O  p <- mu p + sqrt(T (1 - mu^2)) xi       A again;  B and Z again, with the gradient at the new parameters.

The last B and Z wait for the next update, which has their gradient: one gradient a step.

**Why draws need weights.** Whatever slows the clock, the path of ``(theta, p)`` is that of Langevin dynamics, if ``dt``
follows from the past alone. Time averages over that path are averages over the target; a mean over *steps* counts each
place by how slowly it was passed. So with ``psi_n = psi(zeta)`` behind the last Z of the step that arrived at ``theta_n``

    E f(theta) = lim  sum_n psi_n f(theta_n) / sum_n psi_n,

with a bias of second order in ``h``, as BAOAB's. Where ``m = M`` the clock does not change, all weights are equal, and this is
:func:`bayesopt_chain.samplers.baoab` with the step ``h m``: exact on quadratic losses. At T = 0 it is SGD with momentum
whose learning rate ``dt^2 (1 + mu) / 2`` and momentum ``mu`` follow the monitor.

The paper's monitor is ``zeta' = m zeta`` with ``psi = m (zeta' + M) / (zeta' + m)``, the same function; its
``Omega alpha m`` is ``gradient_scale``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import zeros
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.wrapper import Weighted
from bayesopt_chain.matching.response import Refused, SelfContainedSampler
from bayesopt_chain.samplers._in_front import require_all_parameters
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now, root
from bayesopt_chain.trees import wide


class ClockState(NamedTuple):
    """What momentum along the clock remembers.

    Attributes:
        step: updates made, 0-d int64.
        velocity: ``p`` behind O, one tensor for each parameter.
        monitor: ``zeta`` behind the first Z of the last step, 0-d, float32 at least.
        elapsed: ``dt`` of the last step, 0-d; 0 before the first.
        weight: ``psi_n`` of the parameters that the last step started from, 0-d; 0 before the first.
    """

    step: Tensor
    velocity: tuple[Tensor, ...]
    monitor: Tensor
    elapsed: Tensor
    weight: Tensor


class SamAdamsState(NamedTuple):
    """The same of the sampler, and the key of its stream, 0-d int64."""

    key: Tensor
    step: Tensor
    velocity: tuple[Tensor, ...]
    monitor: Tensor
    elapsed: Tensor
    weight: Tensor


AnyState = TypeVar("AnyState", ClockState, SamAdamsState)


@dataclass(frozen=True)
class Clock:
    """How long a step lasts.

    Attributes:
        step_size: ``h``.
        friction: ``gamma``.
        gradient_scale: the length of the gradient that is one unit of the monitor.
        slowest, fastest: ``m`` and ``M``.
        kept: ``r``, what half a step keeps of the monitor.
    """

    step_size: float
    friction: float
    gradient_scale: float
    slowest: float
    fastest: float
    kept: float

    def start(self, leaves: Leaves) -> ClockState:
        """The state before the first step."""
        zero = torch.zeros((), dtype=wide(leaves[0].dtype), device=leaves[0].device)
        count = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
        return ClockState(count, zeros(leaves), zero, zero.clone(), zero.clone())

    def factor(self, monitor: Tensor) -> Tensor:
        """``psi(zeta)``; ``m`` where the monitor is infinite."""
        return self.slowest + (self.fastest - self.slowest) / (1.0 + monitor)

    def kicked(
        self, g: Leaves, state: ClockState | SamAdamsState, context: LinkContext
    ) -> tuple[Leaves, Tensor, Tensor, Tensor]:
        """The velocities behind the kicks of two steps, that which ends here and that which begins; and of the clock the
        monitor, the length of the new step, and the weight of where both meet."""
        squares = [(x * x).sum(dtype=state.monitor.dtype) for x in g]
        steep = context.total(squares).sqrt() / self.gradient_scale
        is_first = state.step == 0  # it knows no other gradient, and gets a whole kick, as SGD's first step
        middle = torch.where(is_first, steep, self.kept * state.monitor + (1.0 - self.kept) * steep)
        monitor = self.kept * middle + (1.0 - self.kept) * steep
        dt = self.step_size * self.factor(monitor)
        half = (torch.where(is_first, dt, state.elapsed) + dt) / 2.0
        p = [v - half.to(x.dtype) * x for v, x in zip(state.velocity, g)]
        return p, monitor, dt, self.factor(middle)


@dataclass(frozen=True)
class RescaledDescent(Link):
    """What :func:`samadams` is at temperature 0: momentum along a clock."""

    clock: Clock
    name = "samadams"
    traits = Traits(
        response=Refused("samadams at temperature 0 is an optimizer; give it the temperature, which it holds itself"),
        on_shards="elementwise",
        needs_all_gradients=True,
    )

    def init(self, leaves: Leaves, context: LinkContext) -> ClockState:
        return self.clock.start(leaves)

    def update(self, g: Leaves, state: ClockState, op: TensorOps, context: LinkContext) -> tuple[Leaves, ClockState]:
        before, *clock = self.clock.kicked(g, state, context)
        mu = torch.exp(-self.clock.friction * clock[1])
        return _moved(g, state, op, before, [mu.to(x.dtype) * x for x in before], clock)


@dataclass(frozen=True)
class TimeRescaledLangevin(Keyed, Weighted):
    """The link behind :func:`samadams`."""

    clock: Clock
    temperature: ScalarOrSchedule
    name = "samadams"
    traits = Traits(
        response=SelfContainedSampler(), on_shards="elementwise", checks_gradients=True, needs_all_gradients=True
    )

    def init(self, leaves: Leaves, context: LinkContext) -> SamAdamsState:
        require_all_parameters(self, "samadams", "all have to share the clock, or their weights would be wrong")
        key, _ = self.start(leaves, context)
        return SamAdamsState(key, *self.clock.start(leaves))

    def update(
        self, g: Leaves, state: SamAdamsState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, SamAdamsState]:
        temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
        xi = [x for (x,) in self.normals(state, g, context)]
        before, *clock = self.clock.kicked(g, state, context)
        decay = self.clock.friction * clock[1]
        mu, strength = torch.exp(-decay), root(temperature) * torch.expm1(-2.0 * decay).neg().sqrt()
        after = [mu.to(x.dtype) * x for x in before]
        noisy = [x + strength.to(x.dtype) * e for x, e in zip(after, xi)]
        if isinstance(temperature, Tensor):
            noisy = [torch.where(temperature > 0, x, y) for x, y in zip(noisy, after)]
        return _moved(g, state, op, before, noisy, clock)


def _moved(
    g: Leaves, state: AnyState, op: TensorOps, before: Leaves, after: Leaves, clock: list[Tensor]
) -> tuple[Leaves, AnyState]:
    """The two drifts of a step, with the velocities in front of O and behind it, and the state behind the step."""
    half = clock[1] / 2.0
    moves = [half.to(x.dtype) * (x + y) for x, y in zip(before, after)]
    velocity = tuple(op.put(list(state.velocity), after))
    monitor, elapsed, weight = op.put([state.monitor, state.elapsed, state.weight], clock)
    after_step = state._replace(
        step=op.next_count(state.step), velocity=velocity, monitor=monitor, elapsed=elapsed, weight=weight
    )
    return op.put(g, moves), after_step


@checks.factory_takes(
    step_size=checks.POSITIVE,
    friction=checks.POSITIVE,
    gradient_scale=checks.POSITIVE,
    slowest=checks.POSITIVE,
    fastest=checks.POSITIVE,
    alpha=checks.number("(0, inf]"),
)
def samadams(
    step_size: float,
    friction: float,
    *,
    temperature: ScalarOrSchedule,
    gradient_scale: float,
    slowest: float = 0.1,
    fastest: float = 1.0,
    alpha: float = 1.0,
    generator: torch.Generator | None = None,
) -> Chain:
    """Langevin dynamics with steps that shorten where gradients are large (SamAdams, Leimkuhler et al., 2025).

    **Its draws have weights**: ``info.weight`` of a step belongs to the parameters which the step *started from*, as
    ``info.loss`` does, and means are ``sum weight * f / sum weight``. :func:`bayesopt_chain.sample` keeps those parameters with
    their weights (``draws.weights``). It buys stability, on walls where a fixed step diverges, not accuracy elsewhere.
    Minibatches heat it as they heat :func:`bayesopt_chain.samplers.baoab`, and the monitor counts their noise.

    Args:
        step_size: ``h``, a time, positive, as :func:`bayesopt_chain.samplers.baoab` has it.
        friction: ``gamma``, an inverse time, positive.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data, 1 for an unnormalised loss. At 0 it is momentum along
            the same clock, without noise and without weights. Along a schedule the variance stays between the old and the
            new value.
        gradient_scale: the length of the gradient of all parameters together at which the clock runs half way between
            ``fastest`` and ``slowest``. Several times ``info.gradient_norm`` (``make_step(..., monitor=True)``) of a usual step
            leaves the usual steps alone.
        slowest: the least factor of the step, positive.
        fastest: the largest, at least ``slowest``; both equal: the clock does not change.
        alpha: how fast the monitor forgets, an inverse time of the clock ``h``; infinite: it is the last gradient's length.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain; its state holds one tensor for each parameter. All parameters share the clock, so that it samples alone: masks
        and groups are refused, and a gradient for every parameter is needed.

    Raises:
        ValueError: an argument out of range, ``slowest`` above ``fastest``; at ``init``, a mask or a group; at ``update``, a
            missing gradient.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.samadams(0.1, 1.0, temperature=0.5, gradient_scale=10.0)
        >>> step, params = bc.make_step(lambda p, batch: (p**4).sum() / 4, tx), torch.ones(2)
        >>> state, total, weights = tx.init(params), 0.0, 0.0
        >>> for _ in range(10):
        ...     before = params
        ...     params, state, info = step(params, state, ())
        ...     total, weights = total + info.weight * before.square().mean(), weights + info.weight
        >>> mean_square = total / weights
        >>> mean_square.shape
        torch.Size([])
    """
    if slowest > fastest:
        raise ValueError(f"samadams: slowest must not exceed fastest, got {slowest!r} and {fastest!r}")
    kept = 0.0 if math.isinf(alpha) else math.exp(-alpha * step_size / 2.0)
    clock = Clock(step_size, friction, gradient_scale, slowest, fastest, kept)
    if is_zero(temperature):
        return Chain((RescaledDescent(clock),))
    return Chain((TimeRescaledLangevin(clock, temperature, generator=generator),))
