r"""Preconditioning by a positive diagonal ``P``: a number, a frozen tree, or a running RMS of the gradients.

Noise in a chain with ``P`` has covariance ``Psi P^-1`` at the head. For a frozen ``P`` that is exact, also where ``P`` and
the curvature do not commute. A running ``P`` samples, while it follows the gradients, roughly ``P^-1 exp(-loss / T)``;
``freeze_after`` makes it exact from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.leaves import each
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Elementwise, Response
from bayesopt_chain.links.adaptive import RunningScale, _rms
from bayesopt_chain.links.learning_rate import Scale


class PreconditionerState(NamedTuple):
    """The diagonal of ``P``, like each parameter."""

    preconditioner: tuple[Tensor, ...]


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

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.scale_by_preconditioner(bc.running_rms(0.9, freeze_after=100))
        scale_by_rms(decay=0.9, eps=1e-08, freeze_after=100)
    """
    if freeze_after is not None and freeze_after < 1:
        raise ValueError(f"running_rms: freeze_after must be at least 1, got {freeze_after}")
    return RunningRMS(decay, eps, initial_scale, freeze_after)


@dataclass(frozen=True)
class Precondition(Rule):
    """Multiply by a frozen diagonal, kept in the state."""

    tree: Any = field(hash=False)
    on_trees = True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Precondition):
            return NotImplemented
        (a, spec_a), (b, spec_b) = (optree.tree_flatten(rule.tree) for rule in (self, other))
        return spec_a == spec_b and all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip(a, b))

    @property
    def response(self) -> Response:
        return Elementwise()

    def init_tree(self, params) -> PreconditionerState:
        def like(p: Tensor, value) -> Tensor:
            out = torch.as_tensor(value, dtype=p.dtype, device=p.device).expand(p.shape).clone()
            if not bool((torch.isfinite(out) & (out > 0)).all()):
                raise ValueError("scale_by_preconditioner: every entry of preconditioner must be positive and finite")
            return out

        leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
        try:
            values = (
                optree.tree_leaves(
                    optree.tree_broadcast_prefix(self.tree, params, none_is_leaf=True), none_is_leaf=True
                )
                if not torch.is_tensor(self.tree)
                else [self.tree] * len(leaves)
            )
        except ValueError:
            try:
                values = spec.flatten_up_to(self.tree)
            except ValueError as err:
                raise ValueError(
                    f"scale_by_preconditioner: preconditioner is not a tree like the parameters, nor a prefix of one: {err}"
                ) from None
        return PreconditionerState(tuple(torch.empty(0) if p is None else like(p, v) for p, v in zip(leaves, values)))

    def preconditioner(self, state: PreconditionerState) -> tuple[Tensor, ...]:
        """The diagonal for each leaf."""
        return state.preconditioner

    def update(self, g, state, params, ctx):
        return each(Tensor.mul_ if ctx.inplace else Tensor.mul, g, state.preconditioner), state

    def __str__(self) -> str:
        return "scale_by_preconditioner(...)"


def scale_by_preconditioner(preconditioner: Any) -> Chain:
    """Multiply gradients by a positive diagonal ``P``; noise is shaped to fit.

    Args:
        preconditioner: a positive number; a tree of positive numbers or tensors that broadcast to the parameters (or a
            prefix of the parameter tree); or an estimator such as :func:`running_rms`.

    Raises:
        ValueError: an entry that is not positive and finite; a tree that does not fit the parameters (at ``init``).

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_preconditioner({"w": torch.tensor([1.0, 4.0])})
        >>> tx.update({"w": torch.ones(2)}, tx.init({"w": torch.zeros(2)}), inplace=False)[0]
        {'w': tensor([1., 4.])}
    """
    if isinstance(preconditioner, RunningRMS):
        est = preconditioner
        return Chain((RunningScale(_rms, est.decay, est.eps, est.initial_scale, est.freeze_after),))
    if isinstance(preconditioner, (int, float)):
        checks.positive("scale_by_preconditioner: preconditioner", preconditioner)
        return Chain((Scale(float(preconditioner)),))
    for leaf in optree.tree_leaves(preconditioner, none_is_leaf=True):
        real = isinstance(leaf, Tensor) and not leaf.is_complex()
        if not real and (isinstance(leaf, bool) or not isinstance(leaf, Real)):
            raise TypeError(
                f"scale_by_preconditioner: preconditioner must be a positive number, a tree of such numbers and tensors, or "
                f"an estimator, got {checks.short(leaf)}"
            )
    return Chain((Precondition(preconditioner),))
