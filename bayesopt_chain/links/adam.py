r"""Adam's scaling and its kin, AdaMax and RAdam: ``P`` times a first moment, ``F = lr P (1 - b1) / (1 - b1 / z)``.

With ``g`` the gradient, ``t`` the number of updates and ``<x>_b`` the average ``b <x>_b + (1 - b) x``, ``1 / P`` is

    Adam      sqrt(<g^2>_b2 / (1 - b2^t) + eps_root) + eps
    AdaMax    n <- max(b2 n, |g| + eps)
    RAdam     (sqrt(<g^2>_b2) + eps) / (r_t sqrt(1 - b2^t)), or 1: see ScaleByRAdam

``P`` is made of the clean gradient. The noise, of covariance ``Psi P^-1``, is added to what the first moment averages and to
nothing else: noise that reached the second moment would heat itself. What is sampled, and the cure: see
:mod:`bayesopt_chain.links.rms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.leaves import new_counts, zeros
from bayesopt_chain.links.rms import averaged, frozen_note, require_decay, require_settings
from bayesopt_chain.matching.response import Preconditioner, Response
from bayesopt_chain.schedules import by_count
from bayesopt_chain.tracing import is_readable


class ScaleByAdamState(NamedTuple):
    """First and second moment of each leaf, and the updates it has seen."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByAdamaxState(NamedTuple):
    """First moment and running maximum of each leaf, and the updates made."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByRAdamState(NamedTuple):
    """First and second moment of each leaf, and the updates made."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class TwoMoments(Link):
    """What Adam and its kin share: a first moment that the noise enters, over a second made of the clean gradient."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    moment_requires_grad: bool = False
    freeze_after: int | None = None

    traits = Traits(on_shards="elementwise", velocity="mu")
    name: ClassVar[str]
    state: ClassVar[Any]

    @property
    def response(self) -> Response:
        return Preconditioner((1.0 - self.b1,), (1.0, -self.b1) if self.b1 else (1.0,), learns=True)

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        moments = [zeros(leaves, requires_grad=self.moment_requires_grad) for _ in range(2)]
        return self.state(*moments, new_counts(leaves))

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        nu = averaged(state.nu, lambda op: self.second(g, state.nu, op), state.count, self.freeze_after, op)
        count = op.count(state.count)
        made = self.made_of(nu, count)
        g = context.with_noise(lambda: self.denominators(made))
        mu = tuple(op.average(state.mu, self.b1, g, 1 - self.b1))
        return self.moves(mu, made, count), self.state(mu, nu, count)

    def second(self, g: Leaves, nu: Sequence[Tensor], op: TensorOps) -> Leaves:
        """The next second moments."""
        return op.average(nu, self.b2, g, 1 - self.b2, True)

    def made_of(self, nu: Sequence[Tensor], count: Sequence[Tensor]) -> Sequence[Any]:
        """For each leaf the numbers from which ``denominators`` and ``moves`` compute ``P``."""
        return nu

    def denominators(self, made: Sequence[Any]) -> Sequence[Tensor]:
        """``1 / P`` for each leaf, by which the noise is shaped."""
        return made

    def moves(self, mu: Sequence[Tensor], made: Sequence[Any], count: Sequence[Tensor]) -> Leaves:
        """``P`` times the first moments, corrected for their start at zero, of the gradients with their noise."""
        raise NotImplementedError

    def steady(self, count: Tensor) -> Tensor:
        """The updates that the second moment has learned from: those up to ``freeze_after``."""
        return count if self.freeze_after is None else count.clamp(max=self.freeze_after)

    def __str__(self) -> str:
        return f"{self.name}(b1={self.b1}, b2={self.b2}, eps={self.eps}{frozen_note(self.freeze_after)})"


@dataclass(frozen=True)
class ScaleByAdam(TwoMoments):
    """Adam's scaling: a first moment over the root of a second, both corrected for their start at zero."""

    eps: float = 1e-8
    eps_root: float = 0.0

    name = "scale_by_adam"
    state = ScaleByAdamState

    def made_of(self, nu: Sequence[Tensor], count: Sequence[Tensor]) -> list[Tensor]:
        correct = by_count(lambda c: 1 - pow(self.b2, self.steady(c)), count)
        return [n.div(c).add_(self.eps_root).sqrt_().add(self.eps) for n, c in zip(nu, correct)]

    def moves(self, mu: Sequence[Tensor], made: Sequence[Tensor], count: Sequence[Tensor]) -> Leaves:
        correct = by_count(lambda c: 1 - pow(self.b1, c), count)
        return [m.div(c).div(d) for m, c, d in zip(mu, correct, made)]


@dataclass(frozen=True)
class ScaleByAdaMax(TwoMoments):
    """AdaMax: Adam with a running maximum in place of the second moment."""

    name = "scale_by_adamax"
    state = ScaleByAdamaxState

    def second(self, g: Leaves, nu: Sequence[Tensor], op: TensorOps) -> Leaves:
        return op.put(nu, [torch.max(n.mul(self.b2), x.abs().add_(self.eps)) for n, x in zip(nu, g)])

    def moves(self, mu: Sequence[Tensor], made: Sequence[Tensor], count: Sequence[Tensor]) -> Leaves:
        correct = by_count(lambda c: 1 - _power(self.b1, c), count)
        return [m.div(n).div_(c) for m, n, c in zip(mu, made, correct)]


class _Factors(NamedTuple):
    """RAdam's scalars at one count.

    ``rectified``: whether updates are rectified; ``rectify``: ``r_t sqrt(1 - b2^t)``; ``gain``: that over ``correct``;
    ``correct``: the bias correction ``1 - b1^t`` of the first moment.
    """

    rectified: Any
    rectify: Any
    gain: Any
    correct: Any


@dataclass(frozen=True)
class ScaleByRAdam(TwoMoments):
    r"""RAdam: Adam whose second moment counts only once its variance is finite (``rho_t > 5``).

    With ``rho = 2 / (1 - b2) - 1`` and ``rho_t = rho - 2 t b2^t / (1 - b2^t)``, which grows with ``t``: while ``rho_t
    <= 5`` the update is the corrected first moment, ``P = 1``; from then on ``P = r_t sqrt(1 - b2^t) / (sqrt(nu) +
    eps)``. Noise matched to ``P = 1`` would kick the parameters by ``sqrt(2 T lr)``, which on a curvature ``k`` with
    ``lr k > 1`` is more than the ``sqrt(T / k)`` of the target and in an unstable step: it is held back until the
    rectified updates begin, and the start is the optimizer's. Where they never begin (``rho <= 5``, or a
    ``freeze_after`` before them) ``P`` is 1 for ever and the noise is that of momentum, from the first update on.
    """

    name = "scale_by_radam"
    state = ScaleByRAdamState

    def made_of(self, nu: Sequence[Tensor], count: Sequence[Tensor]) -> list[Any]:
        factors = by_count(self._factors, count)
        return [(n.sqrt().add(self.eps), f) for n, f in zip(nu, factors)]

    def denominators(self, made: Sequence[Any]) -> list[Tensor]:
        start = 0.0 if self.rectifies else 1.0
        return [_choose(f, n.div(f.rectify), torch.full_like(n, start)) for n, f in made]

    def moves(self, mu: Sequence[Tensor], made: Sequence[Any], count: Sequence[Tensor]) -> Leaves:
        return [_choose(f, m.mul(f.gain).div(n), m.div(f.correct)).to(m.dtype) for m, (n, f) in zip(mu, made)]

    @property
    def rectifies(self) -> bool:
        """Whether rectified updates begin at some count."""
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
        steady = self.steady(count)
        t, power = _number(steady), _power(self.b2, steady)
        rho = limit - 2 * t * power / (1 - power)
        squared = (1 - power) * (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        rectified: Any = rho > 5
        if isinstance(rho, Tensor):
            root: Any = torch.where(rectified, squared, torch.ones_like(rho)).sqrt()
        else:
            root = math.sqrt(squared) if rectified else 1.0
        return _Factors(rectified, root, root / correct, correct)


def _choose(f: _Factors, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(f.rectified, yes, no) if isinstance(f.rectified, Tensor) else (yes if f.rectified else no)


def _number(count: Tensor) -> int | Tensor:
    """A counter as a Python number where reading it costs nothing (CPU, untransformed), else in float64."""
    return int(count) if is_readable(count) else count.to(torch.float64)


def _power(decay: float, count: Tensor) -> Any:
    return decay ** _number(count)


@checked_types
def scale_by_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """First moment over the root of the second (Adam; Kingma and Ba, 2014).

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: weight of the past in the second moment, in [0, 1).
        eps: added to the root, not negative.
        eps_root: added inside the root.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_adam()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    require_decay("b1", b1)
    require_decay("b2", b2)
    require_settings(eps, freeze_after)
    return Chain((ScaleByAdam(b1, b2, eps, moment_requires_grad, freeze_after, eps_root),))


@checked_types
def scale_by_adamax(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """First moment over a running maximum of the gradient's size (AdaMax; Kingma and Ba, 2014).

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: what the maximum is multiplied by in each update, in [0, 1).
        eps: added to the gradient's size, not negative.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_adamax()
        scale_by_adamax(b1=0.9, b2=0.999, eps=1e-06)
    """
    require_decay("b1", b1)
    require_decay("b2", b2)
    require_settings(eps, freeze_after)
    return Chain((ScaleByAdaMax(b1, b2, eps, moment_requires_grad, freeze_after),))


@checked_types
def scale_by_radam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    moment_requires_grad: bool = False,
    *,
    freeze_after: int | None = None,
) -> Chain:
    """Adam whose second moment counts only once its variance is finite (RAdam; Liu et al., 2019).

    The first updates (five at the default ``b2``) are the bare first moment: where ``lr * curvature`` exceeds about 2
    they diverge, at any temperature, until the second moment counts. Noise starts with the rectified updates.

    Args:
        b1: weight of the past in the first moment, in [0, 1).
        b2: weight of the past in the second moment, in [0, 1); up to 2/3 the second moment never counts.
        eps: added to the root, not negative.
        moment_requires_grad: create the moments with ``requires_grad=True``.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.
    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``b1`` or ``b2`` outside [0, 1); negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_radam()
        scale_by_radam(b1=0.9, b2=0.999, eps=1e-06)
    """
    require_decay("b1", b1)
    require_decay("b2", b2)
    require_settings(eps, freeze_after)
    return Chain((ScaleByRAdam(b1, b2, eps, moment_requires_grad, freeze_after),))
