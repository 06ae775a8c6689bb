r"""A precision that keeps every correlation, for models small enough to hold ``P^2`` numbers.

Lambda = M = L L^T,    Lambda^-1 x = L^-T L^-1 x,    R = L^-T,    log |Lambda| = 2 sum_i log L_ii
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import Precision, require_same_structure
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import (
    Tree,
    as_tensor,
    flatten,
    paths,
    require_like,
    size,
    spectral,
    spread,
    unflatten,
    widened,
)


def lower_root(rows: Tensor) -> Tensor:
    """Return the lower triangular F, positive diagonal, with ``F F^T = rows^T rows``; rows is ``[M, P]``, M >= P."""
    return signed(torch.linalg.qr(rows, mode="r").R).mT


def signed(upper: Tensor) -> Tensor:
    """Return an upper triangular factor (columns beyond the square go along) with its rows' signs such that the
    diagonal is not negative.
    """
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    return torch.where(diagonal < 0, -1.0, 1.0).to(upper.dtype)[..., None] * upper


class Dense(NamedTuple("_Dense", [("matrix", Tensor), ("like", Tree), ("count", Tensor)]), Precision):
    """A dense precision.

    Attributes:
        matrix: ``[P, P]``, the leaves flattened in optree order.
        like: a tree of the params' shapes; its values are never read (``precision.shape_only(params)`` costs no
            memory).
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Dense
        >>> like = (torch.tensor(0.0), torch.zeros(1))
        >>> precision = Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), like, torch.tensor(1.0))
        >>> x = precision.solve((torch.tensor(3.0), torch.tensor([0.0])))
        >>> round(x[0].item(), 4), round(x[1].item(), 4)
        (2.0, -1.0)
    """

    __slots__ = ()

    def add(self, other: Dense | Cholesky) -> Dense:
        require_same_structure(self, other, Dense, Cholesky)
        require_like(other.like, self.like, "the increment")
        return Dense(self.matrix + other.to_dense(), self.like, self.count + other.count)

    def scale(self, factor: float | Tensor) -> Dense:
        return Dense(self.matrix * factor, self.like, self.count * factor)

    def add_diagonal(self, value: Any) -> Dense:
        pairs = zip(spread(value, self.like, "the diagonal"), optree.tree_leaves(self.like))
        entries = [d.expand(leaf.shape).reshape(-1).to(self.matrix.dtype) for d, leaf in pairs]
        return Dense(self.matrix + torch.diag(torch.cat(entries)), self.like, self.count)

    def factorised(self) -> Cholesky:
        factor, info = torch.linalg.cholesky_ex(self.matrix)
        if not is_hidden(info) and int(info) != 0:
            raise ValueError(
                f"the precision is singular or indefinite at {_leaf_at(int(info) - 1, self.like)}: "
                "pass a larger prior_precision, or use curvature.ggn, which is never indefinite but by rounding: in float32 a "
                "matrix keeps half the digits of its rows, all of which structure='root' keeps"
            )
        return Cholesky(factor, self.like, self.count)

    def diag(self) -> Tree:
        return unflatten(self.matrix.diagonal(), widened(self.like))

    def quad(self, tree: Tree) -> Tensor:
        x = flatten(tree, self.like)
        return ((x @ self.matrix) * x).sum(-1)

    def times(self, tree: Tree) -> Tree:
        return unflatten(flatten(tree, self.like) @ self.matrix, self.like)

    def as_rows(self) -> Tree:
        """Return rows with ``Lambda = rows^T rows``, by an eigendecomposition, which loses digits."""
        values, vectors = spectral(torch.linalg.eigh, self.matrix)
        tolerance = 1e3 * torch.finfo(values.dtype).eps
        if not is_hidden(values) and bool((values < -tolerance * values.abs().max()).any()):
            raise ValueError(f"the precision is indefinite (eigenvalue {values.min().item():.3g}): use curvature.ggn")
        return unflatten(values.clamp_min(0).sqrt()[:, None] * vectors.mT, widened(self.like))

    def to_dense(self) -> Tensor:
        return self.matrix


class Cholesky(NamedTuple("_Cholesky", [("factor", Tensor), ("like", Tree), ("count", Tensor)]), Precision):
    """A dense precision held by its lower Cholesky factor.

    Attributes:
        factor: ``[P, P]``.
        like, count: as in :class:`Dense`.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Cholesky
        >>> Cholesky(torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.zeros(2), torch.tensor(1.0)).logdet()
        tensor(1.3863)
    """

    __slots__ = ()

    def add(self, other: Dense | Cholesky) -> Dense:
        return Dense(self.to_dense(), self.like, self.count).add(other)

    def scale(self, factor: float | Tensor) -> Cholesky:
        root = as_tensor(factor, self.factor.dtype, self.factor.device).sqrt()
        return Cholesky(self.factor * root, self.like, self.count * factor)

    def add_diagonal(self, value: Any) -> Dense:
        return Dense(self.to_dense(), self.like, self.count).add_diagonal(value)

    def factorised(self) -> Cholesky:
        return self

    def solve(self, tree: Tree) -> Tree:
        x = flatten(tree, self.like)
        columns = x.reshape(-1, x.shape[-1]).mT.to(self.factor.dtype)
        return unflatten(torch.cholesky_solve(columns, self.factor).mT.reshape(x.shape), self.like)

    def sqrt_solve(self, tree: Tree) -> Tree:
        x = flatten(tree, self.like)
        columns = x.reshape(-1, x.shape[-1]).mT.to(self.factor.dtype)
        drawn = torch.linalg.solve_triangular(self.factor.mT, columns, upper=True)
        return unflatten(drawn.mT.reshape(x.shape), self.like)

    def lower_factor(self) -> Tensor:
        return self.factor

    def logdet(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()

    def diag(self) -> Tree:
        return unflatten(self.factor.square().sum(1), widened(self.like))

    def inverse_diag(self) -> Tree:
        identity = torch.eye(size(self.like), dtype=self.factor.dtype, device=self.factor.device)
        inverse = torch.linalg.solve_triangular(self.factor, identity, upper=False)
        return unflatten(inverse.square().sum(0), widened(self.like))

    def quad(self, tree: Tree) -> Tensor:
        return (flatten(tree, self.like) @ self.factor).square().sum(-1)

    def times(self, tree: Tree) -> Tree:
        return unflatten(flatten(tree, self.like) @ self.factor @ self.factor.mT, self.like)

    def as_rows(self) -> Tree:
        return unflatten(self.factor.mT, widened(self.like))

    def to_dense(self) -> Tensor:
        return self.factor @ self.factor.mT


def _leaf_at(index: int, like: Tree) -> str:
    """Name the leaf that holds the flat index."""
    ends = accumulate(leaf.numel() for leaf in optree.tree_leaves(like))
    return next(name for name, end in zip(paths(like), ends) if index < end)
