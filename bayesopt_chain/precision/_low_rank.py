"""A precision from a few directions, for models whose data determine far fewer directions than they have parameters.

    Root:     Lambda = V^T V,               V the rows J^T S of a batch, [M, P]
    LowRank:  Lambda = diag(d) + V^T V,     V of at most ``rank`` rows

With the whitened rows ``W = V diag(d)^-1/2``, rotated so that ``W W^T = diag(s)`` (Woodbury's identity),

    Lambda^-1  = d^-1/2 (I - W^T diag(1 / (1 + s)) W) d^-1/2
    R          = d^-1/2 (I - W^T diag(1 / (q (1 + q))) W),   q = sqrt(1 + s),   R R^T = Lambda^-1
    log |Lambda| = sum log d + sum log(1 + s)

Rows beyond the rank are *moved to the diagonal*: the rows are rotated to ``V V^T = diag(s)``, the ``rank`` longest are
kept and the squares of the others added to d, so that trace and diagonal stay exact (a streaming SVD).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import Precision, like, require_same_structure
from bayesopt_chain.precision._diagonal import Diagonal
from bayesopt_chain.trees import Tree, combine, first, flatten, gram, project, require_like, scaled, wide


class Root(NamedTuple("_Root", [("rows", Tree), ("count", Tensor)]), Precision):
    """The rows of a square root. Sums concatenate the rows.

    A root alone is singular wherever ``M < P``; ``add_diagonal`` makes it a :class:`LowRank`.

    Attributes:
        rows: a tree like the params of leaves ``[M, *leaf.shape]``.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Root
        >>> Root(torch.tensor([[1.0, 1.0], [0.0, 1.0]]), torch.tensor(2.0)).to_dense()
        tensor([[1., 1.],
                [1., 2.]])
    """

    __slots__ = ()

    def add(self, other: Root) -> Root:
        require_same_structure(self, other)
        require_like(first(other.rows), first(self.rows), "the increment")
        rows = optree.tree_map(lambda a, b: torch.cat([a, b]), self.rows, other.rows)
        return Root(rows, self.count + other.count)

    def scale(self, factor: float | Tensor) -> Root:
        root = factor.to(torch.float64).sqrt() if isinstance(factor, Tensor) else math.sqrt(factor)
        return Root(scaled(self.rows, root), self.count * factor)

    def add_diagonal(self, value: Any) -> LowRank:
        zeros = optree.tree_map(lambda row: torch.zeros_like(row[0]), self.rows)
        return LowRank(Diagonal(zeros, self.count).add_diagonal(value).values, self.rows, self.count)

    def factorised(self) -> Woodbury:
        raise ValueError("a root of data alone is singular: pass prior_precision (or add_diagonal) before solving")

    def diag(self) -> Tree:
        return optree.tree_map(lambda row: row.square().sum(0), self.rows)

    def quad(self, tree: Tree) -> Tensor:
        return project(self.rows, _wide(tree)).square().sum(-1)

    def as_rows(self) -> Tree:
        return self.rows

    def to_dense(self) -> Tensor:
        rows = flatten(self.rows, first(self.rows))
        return rows.mT @ rows


class LowRank(NamedTuple("_LowRank", [("diagonal", Tree), ("rows", Tree), ("count", Tensor)]), Precision):
    """Low rank plus diagonal. A sum is compressed back to the left operand's rank, the overflow into the diagonal.

    Attributes:
        diagonal: a tree like the params.
        rows: the same of leaves ``[rank, *leaf.shape]``.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import LowRank
        >>> precision = LowRank(torch.ones(3), torch.tensor([[1.0, 1.0, 1.0]]), torch.tensor(1.0))
        >>> round(precision.logdet().exp().item(), 4)
        4.0
    """

    __slots__ = ()

    def add(self, other: LowRank | Root) -> LowRank:
        require_same_structure(self, other, LowRank, Root, Woodbury)
        other = other.unfactorised() if isinstance(other, Woodbury) else other
        require_like(first(other.rows), self.diagonal, "the increment")
        rank = optree.tree_leaves(self.rows)[0].shape[0]
        rows = optree.tree_map(lambda a, b: torch.cat([a, b]), self.rows, other.rows)
        kept, overflow = compress(rows, rank)
        diagonal = optree.tree_map(torch.add, self.diagonal, overflow)
        if isinstance(other, LowRank):
            diagonal = optree.tree_map(torch.add, diagonal, other.diagonal)
        return LowRank(diagonal, kept, self.count + other.count)

    def scale(self, factor: float | Tensor) -> LowRank:
        diagonal = scaled(self.diagonal, factor)
        return LowRank(diagonal, Root(self.rows, self.count).scale(factor).rows, self.count * factor)

    def add_diagonal(self, value: Any) -> LowRank:
        return self._replace(diagonal=Diagonal(self.diagonal, self.count).add_diagonal(value).values)

    def factorised(self) -> Woodbury:
        Diagonal(self.diagonal, self.count).factorised()
        whitened = optree.tree_map(lambda row, d: row / d.sqrt(), self.rows, self.diagonal)
        strengths, rotation = torch.linalg.eigh(gram(whitened))
        return Woodbury(self.diagonal, combine(rotation.mT, whitened), strengths.clamp_min(0), self.count)

    def diag(self) -> Tree:
        return optree.tree_map(lambda d, row: d + row.square().sum(0), self.diagonal, self.rows)

    def quad(self, tree: Tree) -> Tensor:
        return Diagonal(self.diagonal, self.count).quad(tree) + project(self.rows, _wide(tree)).square().sum(-1)

    def to_dense(self) -> Tensor:
        return Diagonal(self.diagonal, self.count).to_dense() + Root(self.rows, self.count).to_dense()


class Woodbury(
    NamedTuple("_Woodbury", [("diagonal", Tree), ("rows", Tree), ("strengths", Tensor), ("count", Tensor)]), Precision
):
    """A low-rank precision decomposed for solving.

    Attributes:
        diagonal: d.
        rows: the whitened, rotated rows W, leaves ``[rank, *leaf.shape]``.
        strengths: s, ``[rank]``.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import LowRank
        >>> LowRank(torch.ones(2), torch.ones(1, 2), torch.tensor(1.0)).factorised().inverse_diag()
        tensor([0.6667, 0.6667])
    """

    __slots__ = ()

    def unfactorised(self) -> LowRank:
        """Return the diagonal and the rows of which it was made, rotated.

        Returns:
            The same precision, to which more can be added.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import LowRank
            >>> LowRank(torch.ones(2), torch.ones(1, 2), torch.tensor(1.0)).factorised().unfactorised().to_dense()
            tensor([[2., 1.],
                    [1., 2.]])
        """
        rows = optree.tree_map(lambda row, d: row * d.sqrt(), self.rows, self.diagonal)
        return LowRank(self.diagonal, rows, self.count)

    def add(self, other: LowRank | Root) -> LowRank:
        return self.unfactorised().add(other)

    def scale(self, factor: float | Tensor) -> Woodbury:
        diagonal = scaled(self.diagonal, factor)
        return self._replace(diagonal=diagonal, count=self.count * factor)

    def add_diagonal(self, value: Any) -> LowRank:
        return self.unfactorised().add_diagonal(value)

    def factorised(self) -> Woodbury:
        return self

    def solve(self, tree: Tree) -> Tree:
        return like(self._divide_root(self._shrink(self._divide_root(tree), 1 / (1 + self.strengths))), tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        q = (1 + self.strengths).sqrt()
        return like(self._divide_root(self._shrink(like(tree, self.diagonal), 1 / (q * (1 + q)))), tree)

    def logdet(self) -> Tensor:
        return Diagonal(self.diagonal, self.count).logdet() + self.strengths.log1p().sum()

    def diag(self) -> Tree:
        return self.unfactorised().diag()

    def inverse_diag(self) -> Tree:
        return optree.tree_map(
            lambda d, row: (1 - torch.tensordot(1 / (1 + self.strengths).to(row.dtype), row.square(), dims=1)) / d,
            self.diagonal,
            self.rows,
        )

    def quad(self, tree: Tree) -> Tensor:
        return self.unfactorised().quad(tree)

    def to_dense(self) -> Tensor:
        return self.unfactorised().to_dense()

    def _divide_root(self, tree: Tree) -> Tree:
        require_like(tree, self.diagonal, "the tree", batched=True)
        return optree.tree_map(lambda x, d: x / d.sqrt(), tree, self.diagonal)

    def _shrink(self, tree: Tree, weights: Tensor) -> Tree:
        along = project(self.rows, tree) * weights
        return optree.tree_map(torch.sub, tree, combine(along, self.rows))


def _wide(tree: Tree) -> Tree:
    """Bring a tree of low precision into that of the rows."""
    return optree.tree_map(lambda leaf: leaf.to(wide(leaf.dtype)), tree)


def compress(rows: Tree, rank: int) -> tuple[Tree, Tree]:
    """Rotate rows so that they are orthogonal, keep the ``rank`` longest and return the squares of the others, summed.

    Returns ``(kept, overflow)``: leaves ``[min(rank, M), *leaf.shape]`` and leaves ``[*leaf.shape]``. An eigenvector's sign is
    whatever the linear algebra library returns; here it is such that ``sum_m exp(-m / M) v_m`` is positive, so that the rows
    depend on neither the library nor the batching.
    """
    _, rotation = torch.linalg.eigh(gram(rows))
    m = torch.arange(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    sign = torch.where(torch.exp(-m / len(m)) @ rotation < 0, -1.0, 1.0).to(rotation.dtype)
    longest_first = (rotation * sign).mT.flip(0)
    kept = combine(longest_first[:rank], rows)
    overflow = optree.tree_map(lambda row: row.square().sum(0), combine(longest_first[rank:], rows))
    return kept, overflow
