r"""Preconditioning by a positive definite ``P``: a number, a frozen diagonal, a running RMS of the gradients, or the inverse
of a precision of any structure (Fisher, K-FAC, low rank).

Noise in a chain with ``P`` has covariance ``Psi P^-1`` at the head. For a frozen ``P`` that is exact, also where ``P`` and
the curvature do not commute. A running ``P`` samples, while it follows the gradients, roughly ``P^-1 exp(-loss / T)``;
``freeze_after`` makes it exact from there on.

With ``P = Lambda^-1 = R R^T`` noise ``e`` of the rest of the chain enters behind it as ``R e``: a precision answers
``solve(tree) = Lambda^-1 x`` and ``sqrt_solve(tree) = R x``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ELEMENTWISE, Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.rms import RunningScale
from bayesopt_chain.matching.response import Preconditioner, Response


class PreconditionerState(NamedTuple):
    """The diagonal of ``P``, like each parameter."""

    preconditioner: tuple[Tensor, ...]


@runtime_checkable
class SupportsSolve(Protocol):
    """What a preconditioner needs of a precision; arguments and results are trees like the parameters."""

    def solve(self, tree: Any, /) -> Any:
        """``Lambda^-1 x``."""
        ...

    def sqrt_solve(self, tree: Any, /) -> Any:
        """``R x`` with ``R R^T = Lambda^-1``."""
        ...


@dataclass(frozen=True)
class RunningRMS:
    """Estimator ``P = 1 / (sqrt(average of g^2) + eps)``, as RMSprop has it; made by :func:`running_rms`."""

    decay: float = 0.99
    eps: float = 1e-8
    initial_scale: float = 0.0
    freeze_after: int | None = None


@checked_types
def running_rms(
    decay: float = 0.99, eps: float = 1e-8, *, initial_scale: float = 0.0, freeze_after: int | None = None
) -> RunningRMS:
    """Estimator for :func:`scale_by_preconditioner`: ``P = 1 / (sqrt(nu) + eps)``, ``nu`` averaging ``g^2``.

    Args:
        decay: weight of the past in the average.
        eps: keeps the denominator positive.
        initial_scale: first value of ``nu``.
        freeze_after: number of updates after which ``P`` stays as it is. From there on sampling is exact.

    Returns:
        The estimator.

    Raises:
        ValueError: ``freeze_after`` below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_preconditioner(bc.links.running_rms(0.9, freeze_after=100))
        scale_by_rms(decay=0.9, eps=1e-08, freeze_after=100)
    """
    if freeze_after is not None and freeze_after < 1:
        raise ValueError(f"running_rms: freeze_after must be at least 1, got {freeze_after}")
    return RunningRMS(decay, eps, initial_scale, freeze_after)


@dataclass(frozen=True)
class ScaleByPreconditioner(Link):
    """Multiply by a frozen diagonal, kept in the state."""

    tree: Any = field(hash=False)
    traits = ELEMENTWISE

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScaleByPreconditioner) or self.masks != other.masks:
            return NotImplemented if not isinstance(other, ScaleByPreconditioner) else False
        (a, spec_a), (b, spec_b) = (optree.tree_flatten(x.tree) for x in (self, other))
        return spec_a == spec_b and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b))

    __hash__ = Link.__hash__

    @property
    def response(self) -> Response:
        return Preconditioner()

    def init(self, leaves: Leaves, context: LinkContext) -> PreconditionerState:
        given = context.broadcast(self.tree, "scale_by_preconditioner: preconditioner", detached=False)
        return PreconditionerState(tuple([_positive(x, p) for x, p in zip(given, leaves)]))

    def apply_power(self, e: Leaves, power: float, state: PreconditionerState, context: LinkContext) -> Leaves:
        # views of one draw must not be written into where the result has a derivative
        return [x * p**power if p.requires_grad else x.mul_(p**power) for x, p in zip(e, state.preconditioner)]

    def update(
        self, g: Leaves, state: PreconditionerState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, PreconditionerState]:
        return op.mul(g, list(state.preconditioner)), state

    def __str__(self) -> str:
        return "scale_by_preconditioner(...)"


def _positive(given: Tensor, p: Tensor) -> Tensor:
    out = given.expand(p.shape).clone()
    if not bool((torch.isfinite(out) & (out > 0)).all()):
        raise ValueError("scale_by_preconditioner: every entry of preconditioner must be positive and finite")
    return out


@dataclass(frozen=True)
class SolvePrecision(Link):
    """Multiply by the inverse of a frozen precision, which may couple all parameters."""

    precision: SupportsSolve = field(hash=False, compare=False)
    traits = Traits(
        checks_gradients=True,
        needs_all_gradients=True,
        refusal_hint="; a diagonal preconditioner is a tree like the parameters",
    )

    @property
    def response(self) -> Response:
        return Preconditioner(diagonal=False)

    def apply_power(self, e: Leaves, power: float, state: Any, context: LinkContext) -> Leaves:
        return [y.to(x.dtype) for x, y in zip(e, context.leaves(self.precision.sqrt_solve(context.tree(e))))]

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        return op.put(g, context.leaves(self.precision.solve(context.tree(g)))), state

    def __str__(self) -> str:
        return f"scale_by_preconditioner({type(self.precision).__name__})"


def scale_by_preconditioner(preconditioner: Any) -> Chain:
    """Multiply gradients by a positive definite ``P``; noise is shaped to fit.

    Args:
        preconditioner: a positive number; a tree of positive numbers or tensors that broadcast to the parameters (or a
            prefix of the parameter tree); an estimator such as :func:`running_rms`; or a precision ``Lambda``, which answers
            ``solve(tree)`` and ``sqrt_solve(tree)``, for ``P = Lambda^-1``: it is frozen, and may couple all parameters.
            Decompose it first (``precision.factorised()``) so that steps only solve. At T > 0 it stands before the momentum.

    Returns:
        A link.

    Raises:
        ValueError: an entry that is not positive and finite; a tree that does not fit the parameters (at ``init``); at
            ``update``, a missing gradient beside a precision.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_preconditioner({"w": torch.tensor([1.0, 4.0])})
        >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}), inplace=False)[0]
        {'w': tensor([1., 4.])}
    """
    if isinstance(preconditioner, RunningRMS):
        est = preconditioner
        return Chain((RunningScale(False, est.decay, est.eps, est.initial_scale, est.freeze_after),))
    if isinstance(preconditioner, (int, float)):
        checks.positive("scale_by_preconditioner: preconditioner", preconditioner)
        return Chain((Scale(float(preconditioner)),))
    if isinstance(preconditioner, SupportsSolve):
        return Chain((SolvePrecision(preconditioner),))
    for leaf in optree.tree_leaves(preconditioner, none_is_leaf=True):
        real = isinstance(leaf, Tensor) and not leaf.is_complex()
        if not real and (isinstance(leaf, bool) or not isinstance(leaf, Real)):
            raise TypeError(
                f"scale_by_preconditioner: preconditioner must be a positive number, a tree of such numbers and tensors, or "
                f"an estimator, got {checks.short(leaf)}"
            )
    return Chain((ScaleByPreconditioner(preconditioner),))
