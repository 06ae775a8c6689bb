r"""How parameters move between batches: theta <- F theta + w, w ~ N(0, Q), and what is forgotten on the way.

A transition is a number, a tree of numbers that broadcasts to the parameters, a matrix ``[P, P]`` over the flattened
parameters, or a function of the tree, whose derivative at the mean is F. A noise is a variance in the first three forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import optree
import torch
from torch import Tensor

from bayesopt_chain.schedules import is_number
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import Tree, common_dtype, flatten, paths, require_like, size, spread, unflatten


class Motion(NamedTuple):
    """How the parameters move before one update.

    Attributes:
        transition: F, a matrix ``[P, P]``, or its diagonal like the leaves; ``None`` for the identity.
        noise: a root s of Q, ``[P, K]``, or the diagonal of Q like the leaves; ``None`` for no noise.
        forgetting: in (0, 1].
    """

    transition: Tensor | list[Tensor] | None
    noise: Tensor | list[Tensor] | None
    forgetting: float | Tensor

    @property
    def forgets_nothing(self) -> bool:
        return is_number(self.forgetting) and self.forgetting == 1


def is_matrix(value: Any, params: Tree) -> TypeGuard[Tensor]:
    """Whether a value is a matrix over all parameters, and not a tree that broadcasts to them."""
    n = size(params)
    if not isinstance(value, Tensor) or value.shape != (n, n) or n == 1:
        return False
    leaves = optree.tree_leaves(params)
    return not (len(leaves) == 1 and leaves[0].ndim >= 2 and leaves[0].shape[-2:] == value.shape)


def transition_at(
    value: Any, params: Tree, mixes: bool, who: str, check: bool = False
) -> tuple[list[Tensor], Tensor | list[Tensor] | None]:
    """Where a mean moves to, as leaves, and F there.

    With ``check`` it is refused where F is singular; that costs as much as all the rest, so that only ``init`` asks for it.

    Raises:
        ValueError: a matrix or a function where no correlations are kept, a transition that loses a parameter (0, or a
            singular matrix), or one that does not fit the parameters.
    """
    leaves, structure = optree.tree_flatten(params)
    if value is None:
        return leaves, None
    if (is_matrix(value, params) or callable(value)) and not mixes:
        raise ValueError(
            f"{who}: transition is a {'matrix' if isinstance(value, Tensor) else 'function'}, which correlates parameters, and "
            "this filter cannot hold that: pass a number or a tree of numbers, or use bc.ekf.dense"
        )
    if is_matrix(value, params):
        matrix = value
        _require(_has_full_rank(matrix) if check else None, matrix, who)
        return _unflattened(matrix.to(common_dtype(leaves)) @ flatten(params, params), leaves), matrix
    if callable(value) and not isinstance(value, Tensor):
        return _along(value, leaves, structure, who, check)
    factors = [a.expand(p.shape) for a, p in zip(spread(value, params, f"{who}: transition"), leaves)]
    for path, a in zip(paths(params), factors):
        _require(None if is_hidden(a) else (a.isfinite() & (a != 0)).all(), path, who)
    return [(a * p).to(p.dtype) for a, p in zip(factors, leaves)], factors


def _along(
    function: Callable[[Tree], Tree], leaves: list[Tensor], structure: Any, who: str, check: bool
) -> tuple[list[Tensor], Tensor]:
    """A function's value and derivative at the mean."""

    def moved(flat: Tensor) -> tuple[Tensor, Tensor]:
        tree = function(optree.tree_unflatten(structure, _unflattened(flat, leaves)))
        require_like(tree, like, f"{who}: the result of transition")
        out = flatten(tree, like)
        return out, out

    like = optree.tree_unflatten(structure, leaves)
    matrix, value = torch.func.jacrev(moved, has_aux=True)(flatten(like, like).detach())
    _require(_has_full_rank(matrix) if check else None, function, who)
    return _unflattened(value.detach(), leaves), matrix.detach()


def _unflattened(flat: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return optree.tree_leaves(unflatten(flat, leaves))


def _has_full_rank(matrix: Tensor) -> Tensor | None:
    return None if is_hidden(matrix) else torch.linalg.matrix_rank(matrix) == len(matrix)


def _require(fine: Any, what: Any, who: str) -> None:
    if fine is None or bool(fine):
        return
    where = f"at {what}" if isinstance(what, str) else "as a matrix"
    raise ValueError(
        f"{who}: transition is zero, singular or not finite {where}: what it loses cannot be held as information; start that "
        "parameter anew (init with a wide prior), or move it by a factor above 0"
    )


def noise_of(value: Any, params: Tree, mixes: bool, who: str) -> Tensor | list[Tensor] | None:
    """The noise of a :class:`Motion`.

    Raises:
        ValueError: negative or not finite (names the leaf), a matrix that is not symmetric positive semidefinite, a matrix
            where no correlations are kept, or one that does not fit the parameters.
    """
    if is_number(value) and value == 0:
        return None
    if is_matrix(value, params):
        if not mixes:
            raise ValueError(
                f"{who}: transition_noise is a matrix, and this filter keeps no correlations: pass variances, or use "
                "bc.ekf.dense"
            )
        return _root(value, who)
    leaves = optree.tree_leaves(params)
    out = [v.expand(p.shape) for v, p in zip(spread(value, params, f"{who}: transition_noise"), leaves)]
    for path, v in zip(paths(params), out):
        if not is_hidden(v) and not bool((v.isfinite() & (v >= 0)).all()):
            raise ValueError(
                f"{who}: transition_noise is negative or not finite at {path} (smallest entry {v.min().item():.3g}): pass "
                "variances of at least 0"
            )
    return out


def _root(covariance: Tensor, who: str) -> Tensor:
    """A root of a covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance.detach())
    if not is_hidden(values):
        tolerance = 1e3 * torch.finfo(values.dtype).eps * values.abs().max()
        if not bool(values.min() >= -tolerance) or not torch.allclose(covariance, covariance.mT):
            raise ValueError(
                f"{who}: transition_noise is no covariance (eigenvalue {values.min().item():.3g}): pass a symmetric positive "
                "semidefinite matrix"
            )
    return vectors * values.clamp_min(0).sqrt()
