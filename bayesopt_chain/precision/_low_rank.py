"""A precision from a few directions, for models whose data determine far fewer directions than they have parameters.

    Root:                Lambda = V^T V,               V the rows J^T S of a batch, [M, P]
    LowRank, Woodbury:   Lambda = diag(d) + V^T V,     V of at most ``rank`` rows
    LowRankCovariance:   Lambda^-1 = diag(d) + V^T V,  of variational families and SWAG

With the whitened rows ``W = V diag(d)^-1/2``, rotated so that ``W W^T = diag(s)``, and M the sum (Woodbury's identity),

    M            = d^1/2 (I + W^T W) d^1/2
    M^-1         = d^-1/2 (I - W^T diag(1 / (1 + s)) W) d^-1/2
    R            = d^-1/2 (I - W^T diag(1 / (q (1 + q))) W),   q = sqrt(1 + s),   R R^T = M^-1
    log |M|      = sum log d + sum log(1 + s)

What data determine is a difference of ones in ``M^-1``, ``1 - s / (1 + s)``, of which float32 leaves nothing from s of 10^7 on:
so that it is decomposed in float64, whatever dtype the parameters have.

Rows beyond the rank are *moved to the diagonal*: the rows are rotated to ``V V^T = diag(s)``, the ``rank`` longest are
kept and the squares of the others added to d, so that trace and diagonal stay exact (a streaming SVD).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.precision._algebra import Diagonal, Precision, like, require_same_structure
from bayesopt_chain.trees import (
    Tree,
    combine,
    first,
    flatten,
    gram,
    inner,
    paths,
    project,
    require_like,
    require_positive,
    scaled,
    spectral,
    upcast,
)


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
        return project(self.rows, upcast(tree)).square().sum(-1)

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
        return Woodbury(self.diagonal, *_whitened(self.diagonal, self.rows), self.count)

    def diag(self) -> Tree:
        return optree.tree_map(lambda d, row: d + row.square().sum(0), self.diagonal, self.rows)

    def quad(self, tree: Tree) -> Tensor:
        return Diagonal(self.diagonal, self.count).quad(tree) + project(self.rows, upcast(tree)).square().sum(-1)

    def to_dense(self) -> Tensor:
        return Diagonal(self.diagonal, self.count).to_dense() + Root(self.rows, self.count).to_dense()


class _Spiked(
    NamedTuple("_Spiked", [("diagonal", Tree), ("rows", Tree), ("strengths", Tensor), ("count", Tensor)]), Precision
):
    """``M^power`` for ``M = D^1/2 (I + W^T W) D^1/2``, W's rows orthogonal, so that ``(I + W^T W)^p = I + W^T diag(g_p) W``
    with ``g_p = ((1 + s)^p - 1) / s``, which for p of 1, -1, 1/2 and -1/2 needs no division by s."""

    __slots__ = ()
    power = 1

    def scale(self, factor: float | Tensor) -> Any:
        diagonal = scaled(self.diagonal, factor if self.power > 0 else 1 / factor)
        return self._replace(diagonal=diagonal, count=self.count * factor)

    def factorised(self) -> Any:
        return self

    def solve(self, tree: Tree) -> Tree:
        return self._raised(tree, -self.power)

    def times(self, tree: Tree) -> Tree:
        return self._raised(tree, self.power)

    def sqrt_solve(self, tree: Tree) -> Tree:
        return like(self._stretched(self._bent(like(tree, self.diagonal), -self.power / 2), -self.power), tree)

    def logdet(self) -> Tensor:
        return self.power * (Diagonal(self.diagonal, self.count).logdet() + self.strengths.log1p().sum())

    def diag(self) -> Tree:
        return self._diagonal_of(self.power)

    def inverse_diag(self) -> Tree:
        return self._diagonal_of(-self.power)

    def quad(self, tree: Tree) -> Tensor:
        white = like(self._stretched(tree, self.power), self.rows)
        along = project(self.rows, white).square() * self._gains(self.power)
        return inner(white, white, self.diagonal) + along.sum(-1)

    def to_dense(self) -> Tensor:
        rows, root = flatten(self.rows, self.diagonal), flatten(self.diagonal, self.diagonal) ** (self.power / 2)
        bent = rows.mT @ (rows * self._gains(self.power).to(rows.dtype)[:, None])
        whole = (torch.eye(len(root), dtype=rows.dtype, device=rows.device) + bent) * root * root[:, None]
        return whole.to(root.dtype)

    def _gains(self, power: float) -> Tensor:
        """``g_power``, ``[rank]``."""
        s, q = self.strengths, (1 + self.strengths).sqrt()
        return {1: torch.ones_like(s), -1: -1 / (1 + s), 0.5: 1 / (1 + q), -0.5: -1 / (q * (1 + q))}[power]

    def _raised(self, tree: Tree, power: int) -> Tree:
        """``M^power x``."""
        return like(self._stretched(self._bent(self._stretched(tree, power), power), power), tree)

    def _stretched(self, tree: Tree, power: int) -> Tree:
        """``D^(power / 2) x``."""
        require_like(tree, self.diagonal, "the tree", batched=True)
        return optree.tree_map(lambda x, d: x * d.sqrt() if power > 0 else x / d.sqrt(), tree, self.diagonal)

    def _bent(self, tree: Tree, power: float) -> Tree:
        """``(I + W^T W)^power x``."""
        tree = like(tree, self.rows)
        along = project(self.rows, tree) * self._gains(power)
        return optree.tree_map(torch.add, tree, combine(along, self.rows))

    def _diagonal_of(self, power: int) -> Tree:
        def leaf(d: Tensor, row: Tensor) -> Tensor:
            bent = 1 + torch.tensordot(self._gains(power).to(row.dtype), row.square(), dims=1)
            return (bent * d if power > 0 else bent / d).to(d.dtype)

        return optree.tree_map(leaf, self.diagonal, self.rows)


class Woodbury(_Spiked):
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
        rows = optree.tree_map(lambda row, d: (row * d.sqrt()).to(d.dtype), self.rows, self.diagonal)
        return LowRank(self.diagonal, rows, self.count)

    def add(self, other: LowRank | Root) -> LowRank:
        return self.unfactorised().add(other)

    def add_diagonal(self, value: Any) -> LowRank:
        return self.unfactorised().add_diagonal(value)


class LowRankCovariance(_Spiked):
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
    power = -1

    def add(self, other: Any) -> Any:
        raise TypeError(
            "a low-rank covariance cannot take up further precision: its inverse is not low rank; "
            "use a Dense precision (to_dense), or a low-rank precision (bc.ekf.low_rank, bc.laplace)"
        )

    def add_diagonal(self, value: Any) -> Any:
        return self.add(value)


@checks.takes(diagonal=checks.TREE, rows=checks.TREE)
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
    return LowRankCovariance(diagonal, *_whitened(diagonal, rows), count)


def _whitened(diagonal: Tree, rows: Tree) -> tuple[Tree, Tensor]:
    """W and s in float64: rows over the root of the diagonal, rotated so that ``W W^T = diag(s)``."""
    whitened = optree.tree_map(lambda row, d: row.double() / d.double().sqrt(), rows, diagonal)
    strengths, rotation = torch.linalg.eigh(gram(whitened))
    return combine(rotation.mT, whitened), strengths.clamp_min(0)


def compress(rows: Tree, rank: int) -> tuple[Tree, Tree]:
    """Rotate rows so that they are orthogonal, keep the ``rank`` longest and return the squares of the others, summed.

    Returns ``(kept, overflow)``: leaves ``[min(rank, M), *leaf.shape]`` and leaves ``[*leaf.shape]``. An eigenvector's sign is
    whatever the linear algebra library returns; here it is such that ``sum_m exp(-m / M) v_m`` is positive, so that the rows
    depend on neither the library nor the batching.
    """
    # NaN would be refused here, and the rows hand it on
    _, rotation = spectral(torch.linalg.eigh, gram(rows).nan_to_num(0.0, 0.0, 0.0))
    m = torch.arange(rotation.shape[-1], dtype=rotation.dtype, device=rotation.device)
    sign = torch.where(torch.exp(-m / len(m)) @ rotation < 0, -1.0, 1.0).to(rotation.dtype)
    longest_first = (rotation * sign).mT.flip(0)
    kept = combine(longest_first[:rank], rows)
    overflow = optree.tree_map(lambda row: row.square().sum(0), combine(longest_first[rank:], rows))
    return kept, overflow
