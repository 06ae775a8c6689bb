r"""The scalings of Adam, AdaMax and RAdam: the update is ``P <g>_b1 / (1 - b1^t)``, with a diagonal ``P`` that is learned.

Let ``g`` be the gradient, ``t`` the number of updates, and ``<x>_b`` the running average ``<x>_b <- b <x>_b + (1 - b) x``.

    Adam     1 / P = sqrt(<g^2>_b2 / (1 - b2^t) + eps_root) + eps         (Kingma and Ba 2014)
    AdaMax   1 / P = n,  n <- max(b2 n, |g| + eps)                        (Kingma and Ba 2014)
    RAdam    1 / P = (sqrt(<g^2>_b2) + eps) / (r_t sqrt(1 - b2^t)), or 1  (Liu et al. 2019; see ``ScaleByRAdam``)

With a learning rate ``lr`` the response is ``F = lr P (1 - b1) / (1 - b1 / z)``. The noise, of covariance ``Psi P^-1``, is
added to the gradients of the first moment only. The second moment has clean gradients, since otherwise ``P`` would depend on
the noise that it scales. :mod:`bayesopt_chain.links.rms` tells what is sampled while ``P`` is still learned, and why
``freeze_after`` makes sampling exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.checks import MOMENTUM, link_takes
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import new_counts, zeros
from bayesopt_chain.engine.parts import Learns, Part
from bayesopt_chain.links.rms import LEARNS, averaged, root
from bayesopt_chain.matching.response import Preconditioner, Response
from bayesopt_chain.schedules import by_count
from bayesopt_chain.tracing import is_readable


class ScaleByAdamState(NamedTuple):
    """The state of Adam's scaling, by the name that it has in TorchOpt: ``init(params, like=state)`` compares names.

    Attributes:
        mu: the first moment, of the shape of each parameter.
        nu: the second moment, of the shape of each parameter.
        count: how many updates each leaf has had, 0-d int64.
    """

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByAdamaxState(ScaleByAdamState):
    """The same of AdaMax, with the running maximum as ``nu``: no other scaling can go on from it."""


class ScaleByRAdamState(ScaleByAdamState):
    """The same of RAdam."""


@dataclass(frozen=True)
class TwoMoments(Link):
    """What the three scalings share: a first moment, which the noise enters, and a second moment of clean gradients.

    Attributes:
        b1: the weight of the past in the first moment.
        b2: the weight of the past in the second moment.
        eps: the number that is added to the root.
        moment_requires_grad: whether the moments are created with ``requires_grad=True``.
        freeze_after: the number of updates after which the second moment does not change any more; ``None`` for never.
        name: the name of the link in ``repr``.
        state: the class of the state.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    moment_requires_grad: bool = False
    freeze_after: int | None = None

    traits = Traits(on_shards="elementwise", velocity="mu")
    name: ClassVar[str]
    state: ClassVar[type[ScaleByAdamState]] = ScaleByAdamState

    @property
    def response(self) -> Response:
        return Preconditioner((1.0 - self.b1,), (1.0, -self.b1) if self.b1 else (1.0,), learns=True)

    def init(self, leaves: Leaves, context: LinkContext) -> ScaleByAdamState:
        mu, nu = (zeros(leaves, requires_grad=self.moment_requires_grad) for _ in range(2))
        return self.state(mu, nu, new_counts(leaves))

    def update(
        self, g: Leaves, state: ScaleByAdamState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ScaleByAdamState]:
        # First the second moment learns from the clean gradients, then the noise enters, then the first moment averages both.
        (nu,) = averaged([state.nu], lambda op: [self.second(g, state.nu, op)], state.count, self.freeze_after, op)
        count = op.count(state.count)
        scales = self.scales(nu, count, op)
        g = context.with_noise(lambda: self.denominators(scales))
        mu = tuple(op.average(state.mu, self.b1, g, 1 - self.b1))
        return self.moves(mu, scales, count, op), self.state(mu, nu, count)

    def second(self, g: Leaves, nu: Sequence[Tensor], op: TensorOps) -> Leaves:
        """The second moments after this update."""
        return op.average(nu, self.b2, g, 1 - self.b2, True)

    def scales(self, nu: Sequence[Tensor], count: Sequence[Tensor], op: TensorOps) -> Sequence[Any]:
        """For each leaf the values from which both :meth:`denominators` and :meth:`moves` compute ``P``."""
        return nu

    def denominators(self, scales: Sequence[Any]) -> Sequence[Tensor]:
        """``1 / P`` for each leaf, which determines the covariance of the noise."""
        return scales

    def moves(self, mu: Sequence[Tensor], scales: Sequence[Any], count: Sequence[Tensor], op: TensorOps) -> Leaves:
        """The updates: ``P`` times the first moments, corrected for their start at zero."""
        raise NotImplementedError

    def learned_updates(self, count: Tensor) -> Tensor:
        """The number of updates from which the second moment was computed, at most ``freeze_after``."""
        return count if self.freeze_after is None else count.clamp(max=self.freeze_after)


@dataclass(frozen=True)
class ScaleByAdam(TwoMoments):
    """The link of Adam's scaling.

    Attributes:
        eps_root: the number that is added inside the root.
    """

    eps: float = 1e-8
    eps_root: float = 0.0

    name = "scale_by_adam"

    @property
    def part(self) -> Part | None:
        corrections = self.first_correction, self.second_correction
        learns = Learns(self.b2, self.eps, self.eps_root, self.b1, corrections, self.freeze_after)
        return None if self.moment_requires_grad else learns

    def first_correction(self, count: Tensor) -> Tensor:
        """The divisor of the first moment that corrects for its start at zero."""
        return 1 - pow(self.b1, count)

    def second_correction(self, count: Tensor) -> Tensor:
        """The same of the second moment."""
        return 1 - pow(self.b2, self.learned_updates(count))

    def scales(self, nu: Sequence[Tensor], count: Sequence[Tensor], op: TensorOps) -> list[Tensor]:
        correct = by_count(self.second_correction, count)
        roots = [root(n.div(c).add_(self.eps_root), inplace=True) for n, c in zip(nu, correct)]
        # a new tensor of each leaf costs more than the arithmetic; the derivative of a root needs the root as it is
        return [x.add_(self.eps) if op.inplace else x.add(self.eps) for x in roots]

    def moves(self, mu: Sequence[Tensor], scales: Sequence[Tensor], count: Sequence[Tensor], op: TensorOps) -> Leaves:
        correct = by_count(self.first_correction, count)
        return op.div([m.div(c) for m, c in zip(mu, correct)], scales)


@dataclass(frozen=True)
class ScaleByAdaMax(TwoMoments):
    """The link of AdaMax's scaling, which has a running maximum in the place of the second moment."""

    name = "scale_by_adamax"
    state = ScaleByAdamaxState

    def second(self, g: Leaves, nu: Sequence[Tensor], op: TensorOps) -> Leaves:
        return op.put(nu, [torch.max(n.mul(self.b2), x.abs().add_(self.eps)) for n, x in zip(nu, g)])

    def moves(self, mu: Sequence[Tensor], scales: Sequence[Tensor], count: Sequence[Tensor], op: TensorOps) -> Leaves:
        correct = by_count(lambda c: 1 - _power(self.b1, c), count)
        return [m.div(n).div_(c) for m, n, c in zip(mu, scales, correct)]


class _Factors(NamedTuple):
    """RAdam's scalars after ``t`` updates.

    Attributes:
        rectified: whether the update is rectified, that is divided by the root of the second moment.
        rectify: ``r_t sqrt(1 - b2^t)``.
        gain: ``rectify / correct``.
        correct: ``1 - b1^t``, by which the first moment is corrected for its start at zero.
    """

    rectified: Any
    rectify: Any
    gain: Any
    correct: Any


@dataclass(frozen=True)
class ScaleByRAdam(TwoMoments):
    r"""The link of RAdam's scaling, which uses the second moment only once its variance is finite (Liu et al. 2019).

    With ``rho = 2 / (1 - b2) - 1``, ``rho_t = rho - 2 t b2^t / (1 - b2^t)`` grows with the number ``t`` of updates. While
    ``rho_t <= 5``, the update is the corrected first moment, that is ``P = 1``. From then on updates are rectified:

        P = r_t sqrt(1 - b2^t) / (sqrt(nu) + eps),    r_t^2 = (rho_t - 4) (rho_t - 2) rho / ((rho - 4) (rho - 2) rho_t).

    Until rectified updates begin, no noise is added. Noise matched to ``P = 1`` would move a parameter by about
    ``sqrt(2 T lr)`` in a step. At a curvature ``k`` with ``lr k > 1`` this is more than the standard deviation ``sqrt(T / k)``
    of the target, and such steps can be unstable. If rectified updates never begin (because ``rho <= 5``, or because of a
    small ``freeze_after``), then ``P`` is 1 at all times, and the noise of momentum is added from the first update on.
    """

    name = "scale_by_radam"
    state = ScaleByRAdamState

    def scales(self, nu: Sequence[Tensor], count: Sequence[Tensor], op: TensorOps) -> list[Any]:
        factors = by_count(self._factors, count)
        return [(root(n).add(self.eps), f) for n, f in zip(nu, factors)]

    def denominators(self, scales: Sequence[Any]) -> list[Tensor]:
        start = 0.0 if self.rectifies else 1.0  # noise of covariance Psi / P vanishes where 1 / P is 0
        return [_choose(f, n.div(f.rectify), torch.full_like(n, start)) for n, f in scales]

    def moves(self, mu: Sequence[Tensor], scales: Sequence[Any], count: Sequence[Tensor], op: TensorOps) -> Leaves:
        return [_choose(f, m.mul(f.gain).div(n), m.div(f.correct)).to(m.dtype) for m, (n, f) in zip(mu, scales)]

    @property
    def rectifies(self) -> bool:
        """Whether updates are ever rectified."""
        limit, t = 2 / (1 - self.b2) - 1, self.freeze_after
        if t is None:
            return limit > 5
        power = self.b2**t
        return limit - 2 * t * power / (1 - power) > 5

    def _factors(self, count: Tensor) -> _Factors:
        correct = 1 - _power(self.b1, count)
        if not self.rectifies:
            return _Factors(False, 1.0, 1.0 / correct, correct)
        limit = 2 / (1 - self.b2) - 1
        learned = self.learned_updates(count)
        t, power = _number(learned), _power(self.b2, learned)
        rho = limit - 2 * t * power / (1 - power)
        squared = (1 - power) * (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        rectified: Any = rho > 5
        if isinstance(rho, Tensor):
            # Where updates are not rectified yet ``squared`` can be negative, and the derivative of its root would be NaN.
            root: Any = torch.where(rectified, squared, torch.ones_like(rho)).sqrt()
        else:
            root = math.sqrt(squared) if rectified else 1.0
        return _Factors(rectified, root, root / correct, correct)


def _choose(f: _Factors, yes: Tensor, no: Tensor) -> Tensor:
    """``yes`` if the update is rectified, else ``no``."""
    return torch.where(f.rectified, yes, no) if isinstance(f.rectified, Tensor) else (yes if f.rectified else no)


def _number(count: Tensor) -> int | Tensor:
    """A counter as a Python number if it can be read at once (on a CPU, outside of ``vmap`` and tracing), else in float64."""
    return int(count) if is_readable(count) else count.to(torch.float64)


def _power(decay: float, count: Tensor) -> Any:
    """``decay^count``, as a Python number or in float64: float32 would be inaccurate for a decay near 1."""
    return decay ** _number(count)


@link_takes(b1=MOMENTUM, b2=MOMENTUM, **LEARNS)
def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """Divide the first moment by the root of the second moment (Adam; Kingma and Ba 2014).

    Args:
        b1: the weight of the past in the first moment, in [0, 1).
        b2: the weight of the past in the second moment, in [0, 1).
        eps: a number that is added to the root, not negative.
        eps_root: a number that is added inside the root.
        moment_requires_grad: whether the moments are created with ``requires_grad=True``, for meta-learning.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has two tensors of the shape of each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` is outside [0, 1), ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_adam()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((ScaleByAdam(b1, b2, eps, moment_requires_grad, freeze_after, eps_root),))


@link_takes(b1=MOMENTUM, b2=MOMENTUM, **LEARNS)
def scale_by_adamax(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """Divide the first moment by a running maximum of the gradient's absolute value (AdaMax; Kingma and Ba 2014).

    Args:
        b1: the weight of the past in the first moment, in [0, 1).
        b2: the factor by which each update multiplies the maximum, in [0, 1).
        eps: a number that is added to the absolute value, not negative.
        moment_requires_grad: whether the moments are created with ``requires_grad=True``, for meta-learning.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has two tensors of the shape of each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` is outside [0, 1), ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_adamax()
        scale_by_adamax(b1=0.9, b2=0.999, eps=1e-06)
    """
    return Chain((ScaleByAdaMax(b1, b2, eps, moment_requires_grad, freeze_after),))


@link_takes(b1=MOMENTUM, b2=MOMENTUM, **LEARNS)
def scale_by_radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """Scale as Adam does, once the variance of the second moment is finite (RAdam; Liu et al. 2019).

    The first updates (five at the default ``b2``) are the first moment without a scale. If ``lr * curvature`` exceeds about 2,
    they diverge at any temperature until the second moment is used. Noise is added from the first scaled update on.

    Args:
        b1: the weight of the past in the first moment, in [0, 1).
        b2: the weight of the past in the second moment, in [0, 1); with 2/3 or less the second moment is never used.
        eps: a number that is added to the root, not negative.
        moment_requires_grad: whether the moments are created with ``requires_grad=True``, for meta-learning.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has two tensors of the shape of each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` is outside [0, 1), ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_radam()
        scale_by_radam(b1=0.9, b2=0.999, eps=1e-06)
    """
    return Chain((ScaleByRAdam(b1, b2, eps, moment_requires_grad, freeze_after),))
