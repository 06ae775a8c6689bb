r"""Preconditioning: ``u <- P u`` with a positive definite matrix ``P``.

``P`` is a number, a frozen diagonal, a diagonal computed from the running mean square of the gradients, or the inverse of a
precision matrix of any structure (Fisher information, Kronecker-factored, low rank).

In a chain with ``P`` the noise that is added to the gradient has the covariance ``Psi P^-1``, with ``Psi`` as in
:mod:`bayesopt_chain.matching.law`. For a frozen ``P`` the chain then samples ``exp(-loss / T)`` exactly, also where ``P`` and
the curvature do not commute. While ``P`` follows the gradients, the chain samples roughly ``P^-1 exp(-loss / T)``; the argument
``freeze_after`` ends that after a number of updates.

If ``P = Lambda^-1 = R R^T`` for a precision ``Lambda``, noise ``e`` matched to the rest of the chain enters behind the
preconditioner as ``R e``. A precision therefore needs the methods ``solve(x) = Lambda^-1 x`` and ``sqrt_solve(x) = R x``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import HoldsTree, Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.rms import LEARNS, RunningScale
from bayesopt_chain.matching.response import Preconditioner


class PreconditionerState(NamedTuple):
    """The state of a frozen diagonal preconditioner.

    Attributes:
        preconditioner: the diagonal of ``P``, of the shape of each parameter.
    """

    preconditioner: tuple[Tensor, ...]


@runtime_checkable
class SupportsSolve(Protocol):
    """The methods that a precision ``Lambda = (R R^T)^-1`` needs here. They take and return trees like the parameters."""

    def solve(self, tree: Any, /) -> Any:
        """Return ``Lambda^-1 x`` for a tree ``x``."""
        ...

    def sqrt_solve(self, tree: Any, /) -> Any:
        """Return ``R x`` for a tree ``x``, where ``R R^T = Lambda^-1``."""
        ...


@checks.link_takes(**LEARNS)
def running_rms(
    decay: float = 0.99, eps: float = 1e-8, *, initial_scale: float = 0.0, freeze_after: int | None = None
) -> RunningScale:
    """Make an estimator for :func:`scale_by_preconditioner` that follows the mean square of the gradients, as RMSprop does.

        nu <- decay nu + (1 - decay) g^2,        P = 1 / (sqrt(nu) + eps)

    Args:
        decay: the weight of the past in the average.
        eps: a positive number that bounds the denominator from below.
        initial_scale: the first value of ``nu``.
        freeze_after: the number of updates after which ``P`` does not change any more, so that sampling is exact (default:
            never).

    Returns:
        The estimator.

    Raises:
        ValueError: ``eps`` is negative, or ``freeze_after`` is below 1.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_preconditioner(bc.links.running_rms(0.9, freeze_after=100))
        scale_by_rms(decay=0.9, eps=1e-08, freeze_after=100)
    """
    return RunningScale(False, decay, eps, initial_scale, freeze_after=freeze_after)


@dataclass(frozen=True, eq=False)
class ScaleByPreconditioner(HoldsTree):
    """The link that multiplies by a frozen diagonal, which its state holds.

    Attributes:
        tree: the diagonal, a tree like the parameters or a prefix of one.
    """

    tree: Any = field(hash=False)
    name = "scale_by_preconditioner"
    traits = Traits(on_shards="elementwise", response=Preconditioner())

    def init(self, leaves: Leaves, context: LinkContext) -> PreconditionerState:
        given = context.broadcast(self.tree, "scale_by_preconditioner: preconditioner", detached=False)
        return PreconditionerState(tuple([_positive(x, p) for x, p in zip(given, leaves)]))

    def apply_power(self, e: Leaves, power: float, state: PreconditionerState, context: LinkContext) -> Leaves:
        # The draws of several leaves can be views of one tensor. Autograd forbids to write such views in place.
        return [x * p**power if p.requires_grad else x.mul_(p**power) for x, p in zip(e, state.preconditioner)]

    def update(
        self, g: Leaves, state: PreconditionerState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, PreconditionerState]:
        return op.mul(g, list(state.preconditioner)), state


def _positive(given: Tensor, p: Tensor) -> Tensor:
    """Copy a diagonal to the shape of its parameter ``p``; refuse entries that are not positive and finite."""
    out = given.expand(p.shape).clone()
    if not bool((torch.isfinite(out) & (out > 0)).all()):
        raise ValueError("scale_by_preconditioner: every entry of preconditioner must be positive and finite")
    return out


@dataclass(frozen=True)
class SolvePrecision(Link):
    """The link that multiplies by the inverse of a frozen precision, which may couple all parameters.

    Attributes:
        precision: the precision ``Lambda``.
    """

    precision: SupportsSolve = field(hash=False, compare=False)
    name = "scale_by_preconditioner"
    traits = Traits(
        response=Preconditioner(diagonal=False),
        checks_gradients=True,
        needs_all_gradients=True,
        refusal_hint="; a diagonal preconditioner is a tree like the parameters",
    )

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        try:  # a precision of other parameters is refused before the first update
            self.precision.solve(context.tree([torch.zeros_like(x, requires_grad=False) for x in leaves]))
        except ValueError as error:
            raise ValueError(
                f"scale_by_preconditioner: its precision is of other parameters ({error}). Behind a mask or in a partition "
                "it has to be over the whole tree, with () in the place of every leaf that is left out"
            ) from None
        return super().init(leaves, context)

    def apply_power(self, e: Leaves, power: float, state: Any, context: LinkContext) -> Leaves:
        # The power is 1/2 in any case: a chain refuses such a preconditioner behind the noise, where it would be -1/2.
        return [y.to(x.dtype) for x, y in zip(e, context.leaves(self.precision.sqrt_solve(context.tree(e))))]

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        return op.put(g, context.leaves(self.precision.solve(context.tree(g)))), state


def scale_by_preconditioner(preconditioner: Any) -> Chain:
    """Multiply the updates by a positive definite ``P``. The noise of the chain gets the covariance that belongs to ``P``.

    Args:
        preconditioner: ``P``, as one of the following.

            * A positive number.
            * A tree of positive numbers or of tensors that broadcast to the parameters, or a prefix of such a tree: the
              diagonal of ``P``.
            * An estimator such as :func:`running_rms`.
            * A precision ``Lambda`` with the methods ``solve(tree)`` and ``sqrt_solve(tree)``, for ``P = Lambda^-1``. It does
              not change and may couple all parameters. Factorise it first (``precision.factorised()``), so that no step does.
              In a chain with noise it must stand in front of the momentum.

    Returns:
        A link.

    Raises:
        TypeError: an entry that is neither a real number nor a real tensor.
        ValueError: an entry that is not positive and finite; at ``init``, a tree that does not fit the parameters; at
            ``update`` with a precision, a missing gradient.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_preconditioner({"w": torch.tensor([1.0, 4.0])})
        >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}), inplace=False)[0]
        {'w': tensor([1., 4.])}
    """
    if isinstance(preconditioner, RunningScale):
        return Chain((preconditioner,))
    if isinstance(preconditioner, (int, float)):
        checks.POSITIVE("scale_by_preconditioner: preconditioner", preconditioner)
        return Chain((Scale(float(preconditioner)),))
    if isinstance(preconditioner, SupportsSolve):
        return Chain((SolvePrecision(preconditioner),))
    wanted = checks.NUMBERS._replace(words="a positive number, a tree of such numbers and tensors, or an estimator")
    wanted("scale_by_preconditioner: preconditioner", preconditioner)
    return Chain((ScaleByPreconditioner(preconditioner),))
