"""A Gaussian whose *covariance* is low rank plus diagonal, as variational families and SWAG have it.

    Sigma = B B^T + D = D^1/2 (I + W^T W) D^1/2,    W W^T = diag(s),    R = D^1/2 (I + W^T W)^1/2

    Lambda = Sigma^-1 = D^-1/2 (I - W^T diag(1 / (1 + s)) W) D^-1/2,    log |Lambda| = -sum log d - sum log(1 + s)

The rows of W are those of B^T, whitened and rotated to be orthogonal, once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.precision._algebra import Precision, require_positive
from bayesopt_chain.trees import Tree, combine, flatten, gram, inner, paths, project, require_like, scaled


@kinds.takes(diagonal=kinds.TREE, rows=kinds.TREE)
def low_rank_covariance(diagonal: Tree, rows: Tree, count: Tensor) -> LowRankCovariance:
    """Return the precision whose inverse is ``diag(diagonal) + rows^T rows``.

    Args:
        diagonal: a tree like the params, positive.
        rows: leaves ``[rank, *leaf.shape]``.
        count: 0-d, the number of data.

    Returns:
        The precision, decomposed.

    Raises:
        ValueError: a variance that is not positive (names the leaf).

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import low_rank_covariance
        >>> low_rank_covariance(torch.ones(2), torch.tensor([[1.0, 0.0]]), torch.tensor(1.0)).inverse_diag()
        tensor([2., 1.])
    """
    for name, leaf in zip(paths(diagonal), optree.tree_leaves(diagonal)):
        require_positive(leaf, f"{name} (a variance)")
    whitened = optree.tree_map(lambda row, d: row / d.sqrt(), rows, diagonal)
    strengths, rotation = torch.linalg.eigh(gram(whitened))
    return LowRankCovariance(diagonal, combine(rotation.mT, whitened), strengths.clamp_min(0), count)


class LowRankCovariance(
    NamedTuple("_LowRankCovariance", [("diagonal", Tree), ("rows", Tree), ("strengths", Tensor), ("count", Tensor)]),
    Precision,
):
    """The inverse of a low-rank plus diagonal covariance; made by :func:`low_rank_covariance`.

    Sums with other precisions leave the structure and are refused.

    Attributes:
        diagonal: d, the covariance's.
        rows: W, leaves ``[rank, *leaf.shape]``.
        strengths: s, ``[rank]``.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import low_rank_covariance
        >>> precision = low_rank_covariance(torch.ones(2), torch.ones(1, 2), torch.tensor(1.0))
        >>> precision.solve(torch.tensor([1.0, 0.0]))
        tensor([2., 1.])
    """

    __slots__ = ()

    def add(self, other: Any) -> Any:
        raise TypeError(
            "a low-rank covariance cannot take up further precision: its inverse is not low rank; "
            "use a Dense precision (to_dense), or a low-rank precision (bc.ekf.low_rank, bc.laplace)"
        )

    def add_diagonal(self, value: Any) -> Any:
        return self.add(value)

    def scale(self, factor: float | Tensor) -> LowRankCovariance:
        diagonal = scaled(self.diagonal, 1 / factor)
        return self._replace(diagonal=diagonal, count=self.count * factor)

    def factorised(self) -> LowRankCovariance:
        return self

    def solve(self, tree: Tree) -> Tree:
        return self._root_times(self._stretch(self._root_times(tree), torch.ones_like(self.strengths)))

    def sqrt_solve(self, tree: Tree) -> Tree:
        return self._root_times(self._stretch(tree, 1 / (1 + (1 + self.strengths).sqrt())))

    def times(self, tree: Tree) -> Tree:
        """Return ``Lambda x``."""
        return self._root_divide(self._stretch(self._root_divide(tree), -1 / (1 + self.strengths)))

    def logdet(self) -> Tensor:
        return -sum(d.log().sum() for d in optree.tree_leaves(self.diagonal)) - self.strengths.log1p().sum()

    def diag(self) -> Tree:
        weights = 1 / (1 + self.strengths)
        return optree.tree_map(lambda d, row: (1 - _weigh(weights, row)) / d, self.diagonal, self.rows)

    def inverse_diag(self) -> Tree:
        ones = torch.ones_like(self.strengths)
        return optree.tree_map(lambda d, row: (1 + _weigh(ones, row)) * d, self.diagonal, self.rows)

    def quad(self, tree: Tree) -> Tensor:
        white = self._root_divide(tree)
        along = project(self.rows, white)
        return inner(white, white, self.diagonal) - (along.square() / (1 + self.strengths)).sum(-1)

    def to_dense(self) -> Tensor:
        rows = flatten(self.rows, self.diagonal)
        white = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device) - rows.mT @ (
            rows / (1 + self.strengths.to(rows.dtype))[:, None]
        )
        root = flatten(self.diagonal, self.diagonal).sqrt()
        return white / root / root[:, None]

    def _root_times(self, tree: Tree) -> Tree:
        require_like(tree, self.diagonal, "the tree", batched=True)
        return optree.tree_map(lambda x, d: x * d.sqrt(), tree, self.diagonal)

    def _root_divide(self, tree: Tree) -> Tree:
        require_like(tree, self.diagonal, "the tree", batched=True)
        return optree.tree_map(lambda x, d: x / d.sqrt(), tree, self.diagonal)

    def _stretch(self, tree: Tree, weights: Tensor) -> Tree:
        return optree.tree_map(torch.add, tree, combine(project(self.rows, tree) * weights, self.rows))


def _weigh(weights: Tensor, row: Tensor) -> Tensor:
    return torch.tensordot(weights.to(row.dtype), row.square(), dims=1)
