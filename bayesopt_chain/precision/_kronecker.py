"""A precision with one Kronecker product a parameter, so that a layer of I x O weights costs I^2 + O^2, not (I O)^2.

A leaf seen as a matrix ``[d0, d1]`` (a vector as ``[n, 1]``, a convolution as ``[O, I k k]``) has the block

    Lambda = c (L (x) R) / n + delta I,     L = left [d0, d0],  R = right [d1, d1],  n = data,  c = weight,

where L and R are *sums* over n data, which count by their weights: adding increments adds c L, c R, delta and c n, so that the
result does not depend on how the data was split. With ``L = U diag(l) U^T`` and ``R = V diag(r) V^T`` the eigenvalues are
``c l_i r_j / n + delta``; EKFAC (George et al. 2018) keeps U and V and replaces ``l_i r_j / n`` by the curvature measured
along ``u_i (x) v_j``. A factor of one axis ``[d]`` is a diagonal matrix (the one-hot inputs of an embedding).

A scale stays beside the factors, as c: the bases U and V do not depend on it, and a derivative in c that went through
them would divide by differences of eigenvalues, some of which are zero wherever inputs are constant.
K-FAC: Martens and Grosse 2015; Laplace with it: Ritter et al. 2018.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import (
    Diagonalised,
    LayerBases,
    Precision,
    like,
    require_same_structure,
)
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import Tree, paths, require_like, scaled, spectral, spread

FACTORS: list[tuple[str, Any]] = [("left", Tree), ("right", Tree), ("diagonal", Tree), ("like", Tree)]
AMOUNTS: list[tuple[str, Any]] = [("data", Tensor), ("weight", Tensor), ("seen", Tensor)]


class Kronecker(NamedTuple("_Kronecker", FACTORS + AMOUNTS), Precision):
    """Kronecker factors being accumulated.

    Attributes:
        left: a tree like the params with leaves ``[d0, d0]`` or ``[d0]``.
        right: the same with leaves ``[d1, d1]`` or ``[d1]``.
        diagonal: the same with 0-d leaves.
        like: the params' shapes.
        data: 0-d, how much the data in the factors count, the sum of their weights.
        weight: 0-d, what the factors are scaled by, 1 unless given.
        seen: 0-d, the number of data, those of weight 0 too, ``data`` unless given; ``count`` is ``weight * seen``.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Kronecker
        >>> like = torch.zeros(2, 3)
        >>> precision = Kronecker(2 * torch.eye(2), 3 * torch.eye(3), torch.tensor(1.0), like, torch.tensor(2.0))
        >>> precision.diag()[0]
        tensor([4., 4., 4.])
    """

    __slots__ = ()

    def __new__(
        cls,
        left: Tree,
        right: Tree,
        diagonal: Tree,
        like: Tree,
        data: Tensor,
        weight: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Kronecker:
        weight = torch.ones_like(data) if weight is None else weight
        return super().__new__(cls, left, right, diagonal, like, data, weight, data.clone() if seen is None else seen)

    @property
    def count(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """The number of data, 0-d: that of the factors times what they are scaled by."""
        return self.weight * self.seen

    def add(self, other: Kronecker) -> Kronecker:
        require_same_structure(self, other)
        require_like(other.like, self.like, "the increment")
        require_like(other.right, self.right, "the increment's Kronecker factor")

        @cache  # leaves of one layer may share a factor
        def weighted(a: Tensor, b: Tensor) -> Tensor:
            return torch.addcmul(a * self.weight.to(a), b, other.weight.to(b))  # one matrix less than a sum

        diagonal = optree.tree_map(torch.add, self.diagonal, other.diagonal)
        left, right = (optree.tree_map(weighted, a, b) for a, b in zip(self[:2], other[:2]))
        data = self.weight * self.data + other.weight * other.data
        return Kronecker(left, right, diagonal, self.like, data, seen=self.count + other.count)

    def scale(self, factor: float | Tensor) -> Kronecker:
        return self._replace(diagonal=scaled(self.diagonal, factor), weight=self.weight * factor)

    def add_diagonal(self, value: Any) -> Kronecker:
        leaves, structure = optree.tree_flatten(self.diagonal)
        sums = [leaf + d for leaf, d in zip(leaves, _scalars(value, self.like))]
        return self._replace(diagonal=optree.tree_unflatten(structure, sums))

    def eigenbasis(self) -> Eigenbasis:
        """Decompose every factor; unlike ``factorised``, a singular precision is accepted (a basis for EKFAC).

        Scales and diagonals can be added to the result at the price of a sum: tune hyperparameters on it.

        Returns:
            The same precision in the eigenbases of its factors.

        Example:
            >>> import torch
            >>> from bayesopt_chain.precision import Kronecker
            >>> k = Kronecker(2 * torch.eye(2), torch.eye(1), torch.tensor(0.0), torch.zeros(2), torch.tensor(1.0))
            >>> k.eigenbasis().values
            tensor([[2.],
                    [2.]])
        """
        decomposed = cache(_eigh)  # leaves of one layer may share a factor

        def eigenvalues(left: Tensor, right: Tensor, delta: Tensor) -> Tensor:
            products = torch.outer(decomposed(left)[0], decomposed(right)[0])
            return products * self._per_datum(products) + delta

        values = optree.tree_map(eigenvalues, *self[:3])
        left, right = (optree.tree_map(lambda factor: decomposed(factor)[1], factors) for factors in self[:2])
        return Eigenbasis(left, right, values, self.like, self.count)

    def factorised(self) -> Eigenbasis:
        return self.eigenbasis().factorised()

    def diag(self) -> Tree:
        def leaf(left: Tensor, right: Tensor, delta: Tensor, like: Tensor) -> Tensor:
            return (torch.outer(_diag(left), _diag(right)) * self._per_datum(left) + delta).reshape(like.shape)

        return optree.tree_map(leaf, *self[:4])

    def quad(self, tree: Tree) -> Tensor:
        return self.eigenbasis().quad(tree)

    def _per_datum(self, leaf: Tensor) -> Tensor:
        """Return c / n in a leaf's dtype."""
        return (self.weight / torch.where(self.data > 0, self.data, 1.0)).to(leaf.dtype)

    def to_dense(self) -> Tensor:
        return self.eigenbasis().to_dense()


class Eigenbasis(
    NamedTuple("_Eigenbasis", [("left", Tree), ("right", Tree), ("values", Tree), ("like", Tree), ("count", Tensor)]),
    Diagonalised,
):
    """A Kronecker precision in its eigenbasis, decomposed once.

    Sums are exact between precisions in the same basis (EKFAC increments); another basis is refused.

    Attributes:
        left, right: trees like the params of orthogonal matrices (one axis: the identity).
        values: the same of the eigenvalues ``[d0, d1]``.
        like: the params' shapes.
        count: 0-d, the number of data.

    Example:
        >>> import torch
        >>> from bayesopt_chain.precision import Kronecker
        >>> k = Kronecker(2 * torch.eye(2), torch.eye(1), torch.tensor(0.0), torch.zeros(2), torch.tensor(1.0))
        >>> k.factorised().add_diagonal(2.0).inverse_diag()
        tensor([0.2500, 0.2500])
    """

    __slots__ = ()

    def add(self, other: Eigenbasis) -> Eigenbasis:
        require_same_structure(self, other)
        require_like(other.like, self.like, "the increment")
        bases: list[list[Tensor]] = [optree.tree_leaves(x.left) + optree.tree_leaves(x.right) for x in (self, other)]
        for mine, its in zip(*bases):
            if mine is not its and not is_hidden(mine) and not torch.equal(mine, its):
                raise ValueError(
                    "the two precisions live in different eigenbases: build all EKFAC increments with one basis=, "
                    "and for Kronecker factors carry the accumulating state on instead of adding posteriors"
                )
        return super().add(other)

    def _spread(self, value: Any) -> list[Tensor]:
        return _scalars(value, self.like)

    def solve(self, tree: Tree) -> Tree:
        def leaf(x: Tensor, u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            return _into(u, v, _out_of(u, v, x.to(values.dtype)) / values)

        return like(_as_leaves(optree.tree_map(leaf, _as_matrices(tree, self), *self[:3]), self.like), tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        """Return ``(U (x) V) values^-1/2 x``, which needs no rotation of the white noise that comes in."""

        def leaf(x: Tensor, u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            return _into(u, v, x / values.sqrt())

        return like(_as_leaves(optree.tree_map(leaf, _as_matrices(tree, self), *self[:3]), self.like), tree)

    def diag(self) -> Tree:
        return self._diagonal_of(self.values)

    def inverse_diag(self) -> Tree:
        return self._diagonal_of(optree.tree_map(torch.reciprocal, self.values))

    def quad(self, tree: Tree) -> Tensor:
        def leaf(x: Tensor, u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            return (_out_of(u, v, x.to(values.dtype)).square() * values).sum((-2, -1))

        return reduce(torch.add, map(leaf, *map(optree.tree_leaves, (_as_matrices(tree, self), *self[:3]))))

    def layer_bases(self) -> list[LayerBases]:
        return [LayerBases(*leaves) for leaves in zip(*map(optree.tree_leaves, self[:3]))]

    def to_dense(self) -> Tensor:
        def block(u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            basis = _kron(_matrix(u), _matrix(v))
            return basis * values.reshape(-1) @ basis.mT

        return torch.block_diag(*map(block, *map(optree.tree_leaves, self[:3])))

    def _diagonal_of(self, values: Tree) -> Tree:
        def leaf(u: Tensor, v: Tensor, values: Tensor, like: Tensor) -> Tensor:
            return _times(u.square(), _times(v.square(), values.mT).mT).reshape(like.shape)

        return optree.tree_map(leaf, self.left, self.right, values, self.like)


def _scalars(value: Any, like: Tree) -> list[Tensor]:
    """Spread a diagonal that must be one number a leaf: no other one commutes with the eigenbasis."""
    entries = spread(value, like, "the diagonal")
    for name, entry in zip(paths(like), entries):
        if entry.ndim:
            raise ValueError(
                f"a Kronecker precision takes one number a parameter, but the diagonal at {name} has shape "
                f"{tuple(entry.shape)}: pass a number or a tree of numbers, or use structure='diagonal'"
            )
    return entries


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose a positive semidefinite factor; rounding below zero is set to zero."""
    if factor.ndim == 1:
        return factor.clamp_min(0), torch.ones_like(factor)
    values, vectors = spectral(torch.linalg.eigh, factor)
    return values.clamp_min(0), vectors


def _times(factor: Tensor, x: Tensor) -> Tensor:
    return factor[:, None] * x if factor.ndim == 1 else factor @ x


def _into(u: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return ``U x V^T``: from the eigenbasis to the parameters."""
    return _times(u, _times(v, x.mT).mT)


def _out_of(u: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Return ``U^T x V``: from the parameters to the eigenbasis."""
    return _into(u.mT if u.ndim > 1 else u, v.mT if v.ndim > 1 else v, x)


def _diag(factor: Tensor) -> Tensor:
    return factor if factor.ndim == 1 else factor.diagonal()


def _matrix(factor: Tensor) -> Tensor:
    return torch.diag(factor) if factor.ndim == 1 else factor


def _kron(left: Tensor, right: Tensor) -> Tensor:
    """Return the Kronecker product; torch.kron fails on matrices that eigh returns in column order."""
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1])


def _as_matrices(tree: Tree, precision: Any) -> Tree:
    require_like(tree, precision.like, "the tree", batched=True)

    def leaf(x: Tensor, like: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return x.reshape(*x.shape[: x.ndim - like.ndim], left.shape[0], right.shape[0])

    return optree.tree_map(leaf, tree, precision.like, precision.left, precision.right)


def _as_leaves(tree: Tree, like: Tree) -> Tree:
    return optree.tree_map(lambda x, other: x.reshape((*x.shape[:-2], *other.shape)), tree, like)
