r"""Scalings by a diagonal ``P`` learned from squared gradients: RMSprop's, centred or not, AdaGrad's and AdaDelta's.

With ``g`` the gradient and ``<x>`` the average ``b <x> + (1 - b) x``, ``1 / P`` is

    RMSprop    sqrt(<g^2>) + eps          centred    sqrt(<g^2> - <g>^2) + eps          AdaGrad   sqrt(sum g^2) + eps

``P`` is made of the clean gradient, and noise of covariance ``Psi P^-1`` enters behind what it is made of: noise that reached
the mean of squares would heat itself.

For a frozen ``P`` this samples ``exp(-loss / T)`` exactly. While ``P`` follows the recent gradients the target is roughly
``P^-1 exp(-loss / T)``, and worse as lr falls; ``freeze_after`` stops ``P`` after so many updates, which is the only exact
cure. Once frozen, ``P`` no longer shrinks where the loss is steep: beyond ``lr P curvature = 2 (1 + mu)`` the chain
diverges. No update knows the curvature; :func:`bayesopt_chain.samplers.step_growth` measures it. A parameter
whose gradient has always been exactly zero (a dead unit, an unused embedding) has ``P = 1 / eps`` and the
noise that goes with it: raise ``eps`` at T > 0, or leave such parameters out with ``masked``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ELEMENTWISE, Link, LinkContext
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.links.leaves import new_counts, zeros
from bayesopt_chain.matching.response import Preconditioner, Refused, Response


class RunningScaleState(NamedTuple):
    """Averages that make ``P``, like each parameter; ``count`` is empty where ``P`` is never frozen."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByRssState(NamedTuple):
    """Sum of squares of each leaf; ``count`` is empty where it is never frozen."""

    sum_of_squares: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByAdadeltaState(NamedTuple):
    """Mean squares of each leaf's gradients and updates."""

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]


def averaged(
    old: Sequence[Tensor],
    new: Callable[[TensorOps], Sequence[Tensor]],
    count: Sequence[Tensor],
    freeze_after: int | None,
    op: TensorOps,
) -> tuple[Tensor, ...]:
    """The averages after this update: ``new(op)``, or from update ``freeze_after`` on the ``old`` ones.

    Averages that may have to stay are computed by pure operations, so that the old ones are still there to be chosen.
    """
    if freeze_after is None:
        return tuple(new(op))
    return tuple(op.put(old, [torch.where(c < freeze_after, n, o) for o, n, c in zip(old, new(PURE), count)]))


def frozen_note(freeze_after: int | None) -> str:
    """What ``repr`` adds where ``P`` is frozen: from then on sampling is exact."""
    return f", freeze_after={freeze_after}" if freeze_after is not None else ""


@dataclass(frozen=True)
class RunningScale(Link):
    """Divide by a running estimate of the gradient's size: RMSprop's, or its centred form."""

    centred: bool = False
    decay: float = 0.9
    eps: float = 1e-8
    initial_scale: float = 0.0
    freeze_after: int | None = None
    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Preconditioner(learns=True)

    def init(self, leaves: Leaves, context: LinkContext) -> RunningScaleState:
        return RunningScaleState(
            zeros(leaves) if self.centred else (),
            zeros(leaves, self.initial_scale),
            new_counts(leaves) if self.freeze_after is not None else (),
        )

    def learned(self, g: Leaves, state: RunningScaleState, op: TensorOps) -> RunningScaleState:
        """The state that has seen these gradients."""

        def average(old: Sequence[Tensor], square: bool) -> tuple[Tensor, ...]:
            def new(op: TensorOps) -> Leaves:
                return op.average(old, self.decay, g, 1 - self.decay, square)

            return averaged(old, new, state.count, self.freeze_after, op)

        mu = average(state.mu, False) if self.centred else ()
        nu = average(state.nu, True)
        return RunningScaleState(mu, nu, op.count(state.count))

    def denominators(self, state: RunningScaleState) -> list[Tensor]:
        """``1 / P``."""
        if not self.centred:
            return [n.sqrt().add(self.eps) for n in state.nu]
        # rounding may leave less than 0, of which TorchOpt makes NaN
        return [n.addcmul(m, m, value=-1.0).clamp(min=0.0).sqrt().add(self.eps) for n, m in zip(state.nu, state.mu)]

    def update(
        self, g: Leaves, state: RunningScaleState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, RunningScaleState]:
        state = self.learned(g, state, op)
        d = self.denominators(state)
        return op.div(context.with_noise(lambda: d), d), state

    def __str__(self) -> str:
        name = "stddev" if self.centred else "rms"
        return f"scale_by_{name}(decay={self.decay}, eps={self.eps}{frozen_note(self.freeze_after)})"


@dataclass(frozen=True)
class RootSumOfSquares(Link):
    """AdaGrad's scaling: divide by the root of the summed squares; zero where no gradient has come yet."""

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    freeze_after: int | None = None
    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Preconditioner(learns=True)

    def init(self, leaves: Leaves, context: LinkContext) -> ScaleByRssState:
        count = new_counts(leaves) if self.freeze_after is not None else ()
        return ScaleByRssState(zeros(leaves, self.initial_accumulator_value), count)

    def update(
        self, g: Leaves, state: ScaleByRssState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ScaleByRssState]:
        old = state.sum_of_squares
        nu = averaged(old, lambda op: op.average(old, 1.0, g, 1, True), state.count, self.freeze_after, op)
        d = [n.sqrt().add(self.eps) for n in nu]
        moves = [torch.where(n == 0.0, 0.0, x) for x, n in zip(op.div(context.with_noise(lambda: d), d), nu)]
        return moves, ScaleByRssState(nu, op.count(state.count))

    def __str__(self) -> str:
        return f"scale_by_rss(eps={self.eps}{frozen_note(self.freeze_after)})"


@dataclass(frozen=True)
class AdaDelta(Link):
    """AdaDelta: gradients scaled by the ratio of running root-mean-squares of updates and gradients."""

    rho: float = 0.9
    eps: float = 1e-6
    moment_requires_grad: bool = False
    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Refused("its scale is fed by its own updates, so the noise would set it; use bc.rmsprop or bc.adam")

    def init(self, leaves: Leaves, context: LinkContext) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(*(zeros(leaves, requires_grad=self.moment_requires_grad) for _ in range(2)))

    def update(
        self, g: Leaves, state: ScaleByAdadeltaState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ScaleByAdadeltaState]:
        mu = op.average(state.mu, self.rho, g, 1 - self.rho, True)
        g = op.mul(g, [v.add(self.eps).div_(m.add(self.eps)).sqrt_() for m, v in zip(mu, state.nu)])
        nu = op.average(state.nu, self.rho, g, 1 - self.rho, True)
        return g, ScaleByAdadeltaState(tuple(mu), tuple(nu))

    def __str__(self) -> str:
        return f"scale_by_adadelta(rho={self.rho}, eps={self.eps})"


def require_decay(name: str, value: float) -> None:
    """Refuse weights of the past outside [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"Invalid {name} parameter: {value}; it must lie in [0, 1)")


def require_settings(eps: float, freeze_after: int | None) -> None:
    """Refuse a negative ``eps``, and a ``freeze_after`` below 1."""
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}; it must not be negative")
    if freeze_after is not None and not freeze_after >= 1:
        raise ValueError(f"Invalid freeze_after value: {freeze_after}; it must be None or at least 1")


@checked_types
def scale_by_rms(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of a running mean of squares (RMSprop; Tieleman and Hinton, 2012).

    Args:
        alpha: weight of the past.
        eps: added to the root, not negative.
        initial_scale: first mean of squares.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.

    Returns:
        A link; its state holds one tensor for each parameter.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_rms(alpha=0.0)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    require_settings(eps, freeze_after)
    return Chain((RunningScale(False, alpha, eps, initial_scale, freeze_after),))


@checked_types
def scale_by_stddev(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by a running standard deviation (centred RMSprop; Graves, 2013).

    Args:
        alpha: weight of the past in both means.
        eps: added to the deviation, not negative.
        initial_scale: first mean of squares.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.

    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_stddev(0.5)
        scale_by_stddev(decay=0.5, eps=1e-08)
    """
    require_settings(eps, freeze_after)
    return Chain((RunningScale(True, alpha, eps, initial_scale, freeze_after),))


@checked_types
def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of the sum of squares so far (AdaGrad; Duchi, Hazan and Singer, 2011).

    Args:
        initial_accumulator_value: first sum of squares.
        eps: added to the root, not negative.
        freeze_after: number of updates, at least 1, after which the scale stays as it is (default: never). Sampling is exact
            from there on, if the chain is stable with that scale: :func:`bayesopt_chain.samplers.step_growth` tells.

    Returns:
        A link; its state holds one tensor for each parameter. A parameter that never had a gradient does not move.

    Raises:
        ValueError: negative ``eps``; ``freeze_after`` below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_rss()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    require_settings(eps, freeze_after)
    return Chain((RootSumOfSquares(initial_accumulator_value, eps, freeze_after),))


@checked_types
def scale_by_adadelta(rho: float = 0.9, eps: float = 1e-6, moment_requires_grad: bool = False) -> Chain:
    """Multiply by the ratio of running root mean squares of updates and gradients (AdaDelta; Zeiler, 2012).

    Refused at T > 0: its scale is fed by its own updates, so that the noise would set it.

    Args:
        rho: weight of the past in both means, in [0, 1).
        eps: added to both means, not negative.
        moment_requires_grad: create the means with ``requires_grad=True``.

    Returns:
        A link; its state holds two tensors for each parameter.

    Raises:
        ValueError: ``rho`` outside [0, 1); negative ``eps``; at ``init`` of a chain with a noise link, this link beside it.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_adadelta()
        scale_by_adadelta(rho=0.9, eps=1e-06)
    """
    require_decay("rho", rho)
    require_settings(eps, None)
    return Chain((AdaDelta(rho, eps, moment_requires_grad),))
