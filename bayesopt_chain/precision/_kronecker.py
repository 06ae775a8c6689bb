"""A precision with one Kronecker product a parameter, so that a layer of I x O weights costs I^2 + O^2, not (I O)^2.

A leaf seen as a matrix `[d0, d1]` (a vector as `[n, 1]`, a convolution as `[O, I k k]`) has the block

    Lambda = (L (x) R) / n + delta I,     L = left [d0, d0],  R = right [d1, d1],  n = count,

where L and R are *sums* over the data: adding increments adds L, R, delta and n, so that the result does not
depend on how the data was split. With `L = U diag(l) U^T` and `R = V diag(r) V^T` the eigenvalues are `l_i r_j / n +
delta`; EKFAC (George et al. 2018) keeps U and V and replaces `l_i r_j / n` by the curvature measured along `u_i (x)
v_j`. A factor of one axis `[d]` is a diagonal matrix (the one-hot inputs of an embedding).
K-FAC: Martens and Grosse 2015; Laplace with it: Ritter et al. 2018.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision._algebra import Precision, require_positive, require_same_structure
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import Tree, paths, require_like, scaled, spread


class _Kronecker(NamedTuple):
    left: Tree
    right: Tree
    diagonal: Tree
    like: Tree
    count: Tensor


class _Eigenbasis(NamedTuple):
    left: Tree
    right: Tree
    values: Tree
    like: Tree
    count: Tensor


class Kronecker(_Kronecker, Precision):
    """Kronecker factors being accumulated. Trees like the params: `left` with leaves `[d0, d0]` or `[d0]`,
    `right` with leaves `[d1, d1]` or `[d1]`, `diagonal` with 0-d leaves; `like`: the params' shapes; `count`: 0-d.

    >>> import torch
    >>> from bayesopt_chain.precision import Kronecker
    >>> like = torch.zeros(2, 3)
    >>> precision = Kronecker(2 * torch.eye(2), 3 * torch.eye(3), torch.tensor(1.0), like, torch.tensor(2.0))
    >>> precision.diag()[0]
    tensor([4., 4., 4.])
    """

    __slots__ = ()

    def add(self, other: Kronecker) -> Kronecker:
        require_same_structure(self, other)
        require_like(other.like, self.like, "the increment")
        require_like(other.right, self.right, "the increment's Kronecker factor")
        trees = [optree.tree_map(torch.add, a, b) for a, b in zip(self[:3], other[:3])]
        return Kronecker(*trees, self.like, self.count + other.count)

    def scale(self, factor: float | Tensor) -> Kronecker:
        trees = [scaled(tree, factor) for tree in self[:3]]
        return Kronecker(*trees, self.like, self.count * factor)

    def add_diagonal(self, value: Any) -> Kronecker:
        leaves, structure = optree.tree_flatten(self.diagonal)
        total = [leaf + d for leaf, d in zip(leaves, _scalars(value, self.like))]
        return self._replace(diagonal=optree.tree_unflatten(structure, total))

    def eigenbasis(self) -> Eigenbasis:
        """Decompose every factor; unlike `factorised`, a singular precision is accepted (a basis for EKFAC)."""
        structure = optree.tree_structure(self.like)
        n = torch.where(self.count > 0, self.count, 1.0)
        lefts, rights, values = [], [], []
        for left, right, delta in zip(*map(optree.tree_leaves, self[:3])):
            (l, u), (r, v) = _eigh(left), _eigh(right)
            lefts.append(u)
            rights.append(v)
            values.append(torch.outer(l, r) / n.to(l.dtype) + delta)
        trees = [optree.tree_unflatten(structure, leaves) for leaves in (lefts, rights, values)]
        return Eigenbasis(*trees, self.like, self.count)

    def factorised(self) -> Eigenbasis:
        return self.eigenbasis().factorised()

    def diag(self) -> Tree:
        return optree.tree_map(
            lambda left, right, delta, like: (torch.outer(_diag(left), _diag(right)) / self._n(left) + delta).reshape(
                like.shape
            ),
            *self[:4],
        )

    def quad(self, tree: Tree) -> Tensor:
        return _sum_leaves(
            lambda x, left, right, delta: (x * (_times(left, _times(right, x.mT).mT) / self._n(left) + delta * x)).sum(
                (-2, -1)
            ),
            _as_matrices(tree, self),
            *self[:3],
        )

    def _n(self, leaf: Tensor) -> Tensor:
        return torch.where(self.count > 0, self.count, 1.0).to(leaf.dtype)

    def to_dense(self) -> Tensor:
        def block(left: Tensor, right: Tensor, delta: Tensor) -> Tensor:
            product = _kron(_matrix(left), _matrix(right)) / self._n(left)
            return product + delta * torch.eye(product.shape[0], dtype=product.dtype, device=product.device)

        return torch.block_diag(*map(block, *map(optree.tree_leaves, self[:3])))


class Eigenbasis(_Eigenbasis, Precision):
    """A Kronecker precision in its eigenbasis, decomposed once. Trees like the params: `left`, `right` hold
    orthogonal matrices (one axis: the identity), `values` the eigenvalues `[d0, d1]`; `like`, `count`: as in
    `Kronecker`.

    Sums are exact between precisions in the same basis (EKFAC increments); another basis is refused.

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
        for mine, its in zip(optree.tree_leaves(self[:2]), optree.tree_leaves(other[:2])):
            if mine is not its and not is_hidden(mine) and not torch.equal(mine, its):
                raise ValueError(
                    "the two precisions live in different eigenbases: build all EKFAC increments with one basis=, "
                    "and for Kronecker factors carry the accumulating state on instead of adding posteriors"
                )
        values = optree.tree_map(torch.add, self.values, other.values)
        return self._replace(values=values, count=self.count + other.count)

    def scale(self, factor: float | Tensor) -> Eigenbasis:
        return self._replace(values=scaled(self.values, factor), count=self.count * factor)

    def add_diagonal(self, value: Any) -> Eigenbasis:
        leaves, structure = optree.tree_flatten(self.values)
        total = [leaf + d for leaf, d in zip(leaves, _scalars(value, self.like))]
        return self._replace(values=optree.tree_unflatten(structure, total))

    def factorised(self) -> Eigenbasis:
        for name, leaf in zip(paths(self.values), optree.tree_leaves(self.values)):
            require_positive(leaf, name)
        return self

    def solve(self, tree: Tree) -> Tree:
        return self._apply(lambda x, v: x / v, tree)

    def sqrt_solve(self, tree: Tree) -> Tree:
        """Return `(U (x) V) values^-1/2 x`, which needs no rotation of the white noise that comes in."""
        matrices = optree.tree_map(lambda x, v: x / v.sqrt(), _as_matrices(tree, self), self.values)
        rotated = optree.tree_map(lambda x, u, v: _times(u, _times(v, x.mT).mT), matrices, self.left, self.right)
        return _as_leaves(rotated, self.like)

    def logdet(self) -> Tensor:
        return sum(leaf.log().sum() for leaf in optree.tree_leaves(self.values))

    def diag(self) -> Tree:
        return self._diagonal_of(self.values)

    def inverse_diag(self) -> Tree:
        return self._diagonal_of(optree.tree_map(torch.reciprocal, self.values))

    def quad(self, tree: Tree) -> Tensor:
        rotated = optree.tree_map(
            lambda x, u, v: _times(u.mT if u.ndim > 1 else u, _times(v.mT if v.ndim > 1 else v, x.mT).mT),
            _as_matrices(tree, self),
            self.left,
            self.right,
        )
        return _sum_leaves(lambda x, v: (x.square() * v).sum((-2, -1)), rotated, self.values)

    def to_dense(self) -> Tensor:
        def block(u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            basis = _kron(_matrix(u), _matrix(v))
            return basis * values.reshape(-1) @ basis.mT

        return torch.block_diag(*map(block, *map(optree.tree_leaves, self[:3])))

    def _apply(self, function: Any, tree: Tree) -> Tree:
        def leaf(x: Tensor, u: Tensor, v: Tensor, values: Tensor) -> Tensor:
            inside = _times(u.mT if u.ndim > 1 else u, _times(v.mT if v.ndim > 1 else v, x.mT).mT)
            return _times(u, _times(v, function(inside, values).mT).mT)

        return _as_leaves(optree.tree_map(leaf, _as_matrices(tree, self), *self[:3]), self.like)

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
    values, vectors = torch.linalg.eigh(factor)
    return values.clamp_min(0), vectors


def _times(factor: Tensor, x: Tensor) -> Tensor:
    return factor[:, None] * x if factor.ndim == 1 else factor @ x


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


def _sum_leaves(function: Any, *trees: Tree) -> Tensor:
    return sum(map(function, *map(optree.tree_leaves, trees)))
