r"""Scalings by a diagonal ``P`` that is learned from squared gradients: RMSprop, centred RMSprop, AdaGrad, AdaDelta and an
adaptive window.

Let ``g`` be the gradient, and ``<x>`` the running average ``<x> <- b <x> + (1 - b) x``. The update is ``u = P g`` with

    RMSprop   1 / P = sqrt(<g^2>) + eps                     (Tieleman and Hinton 2012)
    centred   1 / P = sqrt(<g^2> - <g>^2) + eps             (Graves 2013)
    AdaGrad   1 / P = sqrt(sum g^2) + eps                   (Duchi, Hazan and Singer 2011)
    AdaDelta  1 / P = sqrt((<g^2> + eps) / (<u^2> + eps))   (Zeiler 2012)

The averages contain clean gradients only. The noise, of covariance ``Psi P^-1``, is added after the averages are updated, since
otherwise ``P`` would depend on the noise that it scales. AdaDelta's ``P`` depends on its own updates and is refused in a chain
with noise.

For a frozen ``P`` the chain samples ``exp(-loss / T)`` exactly. While ``P`` follows the recent gradients, the chain samples
roughly ``P^-1 exp(-loss / T)``, and the smaller the learning rate, the larger is this error. The argument ``freeze_after``
stops ``P`` after a number of updates, which is the only exact cure. A frozen ``P`` does not get smaller where the loss is
steep, and the chain diverges where ``lr P curvature`` exceeds ``2 (1 + mu)``. An update does not know the curvature, but
:func:`bayesopt_chain.samplers.step_growth` measures whether the chain is stable.

A parameter whose gradient was always exactly zero (a dead unit, an unused row of an embedding) has ``P = 1 / eps`` and noise of
that strength. In a chain with noise choose a larger ``eps``, or leave such parameters out with ``masked``.

**A window that adapts** (Springenberg et al. 2016). The window ``tau``, in steps, gets longer where the gradients' mean ``m``
is small beside their root mean square ``V^(1/2)``:

    m <- m + (g - m) / (tau + 1),   V <- V + (g^2 - V) / (tau + 1),   tau <- 1 + tau (1 - m^2 / V),   P = 1 / (sqrt(V) + eps).

``P`` is learned during the first updates and then frozen. The noise, of covariance ``Psi P^-1``, is added after the averages
are updated, so that they contain clean gradients only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.checks import FROM_ZERO, MOMENTUM, POSITIVE, WHOLE, factory_takes, link_takes
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import PURE, Leaves, TensorOps
from bayesopt_chain.core.state import new_counts, zeros
from bayesopt_chain.engine.parts import Learns, Part
from bayesopt_chain.matching.response import Preconditioner, Refused
from bayesopt_chain.tracing import is_transformed


class RunningScaleState(NamedTuple):
    """The state of RMSprop's scaling.

    Attributes:
        mu: the average of the gradients, of the shape of each parameter; empty if the scaling is not centred.
        nu: the average of the squared gradients, of the shape of each parameter.
        count: how many updates each leaf has had, 0-d int64; empty if ``P`` is never frozen.
    """

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByRssState(NamedTuple):
    """The state of AdaGrad's scaling.

    Attributes:
        sum_of_squares: the sum of the squared gradients, of the shape of each parameter.
        count: how many updates each leaf has had, 0-d int64; empty if ``P`` is never frozen.
    """

    sum_of_squares: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


class ScaleByAdadeltaState(NamedTuple):
    """The state of AdaDelta's scaling.

    Attributes:
        mu: the average of the squared gradients, of the shape of each parameter.
        nu: the average of the squared updates, of the shape of each parameter.
    """

    mu: tuple[Tensor, ...]
    nu: tuple[Tensor, ...]


def averaged(
    old: Sequence[Sequence[Tensor]],
    new: Callable[[TensorOps], Sequence[Sequence[Tensor]]],
    count: Sequence[Tensor],
    freeze_after: int | None,
    op: TensorOps,
) -> list[tuple[Tensor, ...]]:
    """What a link has learned after this update.

    Args:
        old: the averages before the update, of each kind one for each leaf.
        new: computes the averages of an update with the given operations.
        count: how many updates each leaf has had.
        freeze_after: the number of updates after which the old averages are kept; ``None`` for never.
        op: the operations of this update.

    Returns:
        The new averages, or the old ones where they are frozen.
    """
    if freeze_after is None:
        return [*map(tuple, new(op))]
    # Both have to exist to be chosen from, so the new averages must not be written into the tensors of the old ones.
    return [
        tuple(op.put(before, [torch.where(c < freeze_after, n, o) for o, n, c in zip(before, after, count)]))
        for before, after in zip(old, new(PURE))
    ]


@dataclass(frozen=True)
class Learned(Link):
    """What links share that divide by a root which they learn from the gradients; the noise enters behind the learning.

    The last field of their state counts updates, and is empty if the averages are never frozen.

    Attributes:
        freeze_after: the number of updates after which the averages do not change any more; ``None`` for never.
    """

    freeze_after: int | None = field(default=None, kw_only=True)
    traits = Traits(on_shards="elementwise", response=Preconditioner(learns=True))

    def averages(self, g: Leaves, old: Sequence[Sequence[Tensor]], op: TensorOps) -> Sequence[Sequence[Tensor]]:
        """The averages after they have learned from these gradients, in the order of the state's fields."""
        raise NotImplementedError

    def denominators(self, state: Any) -> list[Tensor]:
        """``1 / P`` for each leaf."""
        raise NotImplementedError

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        *old, count = state
        new = averaged(old, lambda op: self.averages(g, old, op), count, self.freeze_after, op)
        state = type(state)(*new, op.count(count))
        d = self.denominators(state)
        return op.div(context.with_noise(lambda: d), d), state


@dataclass(frozen=True)
class RunningScale(Learned):
    """The link of RMSprop's scaling and of its centred form.

    Attributes:
        centred: whether the square of the mean gradient is subtracted from the mean square.
        decay: the weight of the past in the averages.
        eps: the number that is added to the root.
        initial_scale: the first mean square.
    """

    centred: bool = field(default=False, repr=False)  # the name says it
    decay: float = 0.9
    eps: float = 1e-8
    initial_scale: float = 0.0

    @property
    def name(self) -> str:
        return "scale_by_stddev" if self.centred else "scale_by_rms"

    @property
    def part(self) -> Part | None:
        return None if self.centred else Learns(self.decay, self.eps, freeze_after=self.freeze_after)

    def init(self, leaves: Leaves, context: LinkContext) -> RunningScaleState:
        return RunningScaleState(
            zeros(leaves) if self.centred else (),
            zeros(leaves, self.initial_scale),
            new_counts(leaves) if self.freeze_after is not None else (),
        )

    def averages(self, g: Leaves, old: Sequence[Sequence[Tensor]], op: TensorOps) -> list[Leaves]:
        return [op.average(x, self.decay, g, 1 - self.decay, square) for x, square in zip(old, (False, True))]

    def denominators(self, state: RunningScaleState) -> list[Tensor]:
        if not self.centred:
            return [root(n).add(self.eps) for n in state.nu]
        # Rounding errors can make the difference negative, whose root would be NaN (as it is in TorchOpt).
        return [root(n.addcmul(m, m, value=-1.0).clamp(min=0.0)).add(self.eps) for n, m in zip(state.nu, state.mu)]


@dataclass(frozen=True)
class RootSumOfSquares(Learned):
    """The link of AdaGrad's scaling, which is zero where every gradient so far was zero.

    Attributes:
        initial_accumulator_value: the first sum of squares.
        eps: the number that is added to the root.
    """

    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    name = "scale_by_rss"

    def init(self, leaves: Leaves, context: LinkContext) -> ScaleByRssState:
        count = new_counts(leaves) if self.freeze_after is not None else ()
        return ScaleByRssState(zeros(leaves, self.initial_accumulator_value), count)

    def averages(self, g: Leaves, old: Sequence[Sequence[Tensor]], op: TensorOps) -> list[Leaves]:
        return [op.average(old[0], 1.0, g, 1, True)]

    def denominators(self, state: ScaleByRssState) -> list[Tensor]:
        return [root(n).add(self.eps) for n in state.sum_of_squares]

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        moves, state = super().update(g, state, op, context)
        return [torch.where(n == 0.0, 0.0, x) for x, n in zip(moves, state.sum_of_squares)], state


@dataclass(frozen=True)
class AdaDelta(Link):
    """The link of AdaDelta's scaling.

    Attributes:
        rho: the weight of the past in both averages.
        eps: the number that is added to both averages.
        moment_requires_grad: whether the averages are created with ``requires_grad=True``.
    """

    rho: float = 0.9
    eps: float = 1e-6
    moment_requires_grad: bool = False
    name = "scale_by_adadelta"
    traits = Traits(
        on_shards="elementwise",
        response=Refused("its scale is fed by its own updates, so the noise would set it; use bc.rmsprop or bc.adam"),
    )

    def init(self, leaves: Leaves, context: LinkContext) -> ScaleByAdadeltaState:
        return ScaleByAdadeltaState(*(zeros(leaves, requires_grad=self.moment_requires_grad) for _ in range(2)))

    def update(
        self, g: Leaves, state: ScaleByAdadeltaState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ScaleByAdadeltaState]:
        mu = op.average(state.mu, self.rho, g, 1 - self.rho, True)
        # The scale needs the average of the updates before this one, so that it is updated last.
        g = op.mul(g, [v.add(self.eps).div_(m.add(self.eps)).sqrt_() for m, v in zip(mu, state.nu)])
        nu = op.average(state.nu, self.rho, g, 1 - self.rho, True)
        return g, ScaleByAdadeltaState(tuple(mu), tuple(nu))


# the ranges of what all scalings here have, at any temperature
LEARNS = {"eps": FROM_ZERO, "freeze_after": WHOLE.or_none()}


@link_takes(**LEARNS)
def scale_by_rms(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of the running mean square of the gradients (RMSprop; Tieleman and Hinton 2012).

    Args:
        alpha: the weight of the past in the mean.
        eps: a number that is added to the root, not negative.
        initial_scale: the first mean square.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has one tensor of the shape of each parameter.

    Raises:
        ValueError: ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_rms(alpha=0.0)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((RunningScale(False, alpha, eps, initial_scale, freeze_after=freeze_after),))


@link_takes(**LEARNS)
def scale_by_stddev(
    alpha: float = 0.9, eps: float = 1e-8, initial_scale: float = 0.0, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the running standard deviation of the gradients (centred RMSprop; Graves 2013).

    Args:
        alpha: the weight of the past in both means.
        eps: a number that is added to the standard deviation, not negative.
        initial_scale: the first mean square.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has two tensors of the shape of each parameter.

    Raises:
        ValueError: ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_stddev(0.5)
        scale_by_stddev(decay=0.5, eps=1e-08)
    """
    return Chain((RunningScale(True, alpha, eps, initial_scale, freeze_after=freeze_after),))


@link_takes(**LEARNS)
def scale_by_rss(
    initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, freeze_after: int | None = None
) -> Chain:
    """Divide by the root of the sum of all squared gradients so far (AdaGrad; Duchi, Hazan and Singer 2011).

    Args:
        initial_accumulator_value: the first sum of squares.
        eps: a number that is added to the root, not negative.
        freeze_after: the number of updates, at least 1, after which the scale does not change any more (default: never). From
            then on sampling is exact if the chain is stable with that scale, which
            :func:`bayesopt_chain.samplers.step_growth` measures.

    Returns:
        A link; its state has one tensor of the shape of each parameter. A parameter whose gradient was always zero does not
        move.

    Raises:
        ValueError: ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_rss()
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((RootSumOfSquares(initial_accumulator_value, eps, freeze_after=freeze_after),))


@link_takes(rho=MOMENTUM, eps=FROM_ZERO)
def scale_by_adadelta(rho: float = 0.9, eps: float = 1e-6, moment_requires_grad: bool = False) -> Chain:
    """Multiply by the ratio of the running root mean squares of updates and gradients (AdaDelta; Zeiler 2012).

    A chain with noise refuses this link: the scale depends on the link's own updates, so that the noise would determine it.

    Args:
        rho: the weight of the past in both means, in [0, 1).
        eps: a number that is added to both means, not negative.
        moment_requires_grad: whether the means are created with ``requires_grad=True``, for meta-learning.

    Returns:
        A link; its state has two tensors of the shape of each parameter.

    Raises:
        ValueError: ``rho`` is outside [0, 1), or ``eps`` is negative; at ``init``, the chain has a noise link.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.links.scale_by_adadelta()
        scale_by_adadelta(rho=0.9, eps=1e-06)
    """
    return Chain((AdaDelta(rho, eps, moment_requires_grad),))


class AdaptiveWindowState(NamedTuple):
    """The state of the scaling.

    Attributes:
        tau: the window in steps, of the shape of each parameter.
        mean: the mean ``m`` of the gradients over the window, of the shape of each parameter.
        square: the mean square ``V`` of the gradients over the window, of the shape of each parameter.
        count: how many updates each leaf has had, 0-d int64.
    """

    tau: tuple[Tensor, ...]
    mean: tuple[Tensor, ...]
    square: tuple[Tensor, ...]
    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class AdaptiveWindow(Learned):
    """The link that :func:`scale_by_adaptive_window` returns, with the same arguments."""

    eps: float = 1e-8
    name = "scale_by_adaptive_window"

    def init(self, leaves: Leaves, context: LinkContext) -> AdaptiveWindowState:
        return AdaptiveWindowState(zeros(leaves), zeros(leaves), zeros(leaves), new_counts(leaves))

    def averages(self, g: Leaves, old: Sequence[Sequence[Tensor]], op: TensorOps) -> list[Leaves]:
        tau, mean, square = list[Tensor](), list[Tensor](), list[Tensor]()
        for x, t, m, v in zip(g, *old):
            mean.append(m + (x - m) / (t + 1.0))
            square.append(v + (x * x - v) / (t + 1.0))
            positive = square[-1] > 0  # false where every gradient was 0 or its square underflows: no 0/0 there
            signal = torch.where(positive, mean[-1] * mean[-1] / torch.where(positive, square[-1], 1.0), 0.0)
            tau.append(1.0 + t * (1.0 - signal.clamp(max=1.0)))
        return [tau, mean, square]

    def denominators(self, state: AdaptiveWindowState) -> list[Tensor]:
        return [root(v).add(self.eps) for v in state.square]


@factory_takes(freeze_after=WHOLE._replace(hint="nothing is learned without a burn-in"), eps=POSITIVE)
def scale_by_adaptive_window(freeze_after: int, eps: float = 1e-8) -> Chain:
    """Divide by the root of the gradients' mean square over a window that adapts (Springenberg et al. 2016).

    Args:
        freeze_after: the number of updates, at least 1, after which the scale does not change any more. They are burn-in.
        eps: a positive number that is added to the root. If the gradient of a parameter is always 0, its scale is ``1 / eps``,
            and the variance of its noise is multiplied by ``1 / eps``.

    Returns:
        A link; its state has three tensors of the shape of each parameter.

    Raises:
        ValueError: ``freeze_after`` is below 1, or ``eps`` is not positive.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.scale_by_adaptive_window(10)
        >>> tx.update([torch.tensor([2.0])], tx.init([torch.zeros(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((AdaptiveWindow(float(eps), freeze_after=freeze_after),))


def root(x: Tensor, inplace: bool = False) -> Tensor:
    """``sqrt(x)``, with the derivative 0 at 0, where that of the root is infinite and times a derivative of 0 would be NaN."""
    if not (torch.is_grad_enabled() and (x.requires_grad or is_transformed())):
        return x.sqrt_() if inplace else x.sqrt()
    return torch.where(x == 0.0, 0.0, torch.where(x == 0.0, 1.0, x).sqrt())
