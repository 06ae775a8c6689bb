"""What a parameter's gradient looks like for one kind of use, so that each kind is reduced at its own price.

With the output gradients g (one for each of K factors and b data) and what the layer saw, x, a datum's gradient is

    Matrix      dW = sum_t g_t x_t^T            x [b, T, I],  g [K, b, T, O]    linear layers, convolutions
    Grouped     dW_j = sum_t g_tj x_tj^T        x [b, T, G, I],  g [K, b, T, G, O]    convolutions in G groups
    Embedding   dW_v = sum_{t: x_t = v} g_t     x [b, T],     g [K, b, T, D]
    Vector      dw = g                          g [K, b, n]                     biases, norms, anything else

(t runs over the positions at which a datum uses the weight)

and every kind gives its rows (the gradients themselves), its squares (their sum of squares over K and b, the
diagonal) and its Kronecker factors. Sums take the ``total`` so far, None before the first, and add to it in place.
Without sharing (T = 1) the squares are one product, ``(sum_k g^2)^T x^2``: no gradient is ever formed. Kronecker factors
of shared weights follow Eschenhagen et al. (2023): "expand" treats positions as data, "reduce" sums them. A weight that is used
several times in one way has the positions of all its uses. The groups of a convolution count as positions too: at each of them
only one group's outputs (in a transposed convolution: inputs) take part.

Where targets have weights, so have the positions: ``weights [b, T]``, whose sum over T is the datum's weight. A datum of
weight 2 is then two data in both factors, and one of weight 0, or a position that no target depends on, is in neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_wrapped

GRAM_BLOCK = 256  # columns of a Gram matrix computed at once, so that its lower half need not be
BLOCK_ENTRIES = 2**19  # per-datum gradients formed at once: 2 MB in float32, which stays in cache


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of use.

    Attributes:
        shape: of the leaf seen as a matrix, ``[d0, d1]``.
        transposed: whether d0 counts inputs and d1 outputs.
    """

    shape: tuple[int, int]
    transposed: bool = False

    @property
    def inputs(self) -> int:
        """How many numbers the leaf multiplies at a position; of one in groups, in one of them."""
        return self.shape[not self.transposed]

    @property
    def outputs(self) -> int:
        """How many numbers it makes of them."""
        return self.shape[self.transposed]

    @abstractmethod
    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradients ``[K, b, d0, d1]``."""

    @abstractmethod
    def squares(self, x: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        """Add the gradients' squares, summed over factors and data, to ``total``, ``[d0, d1]``."""

    def summed_squares(self, x: Tensor, d: Tensor, total: Tensor | None) -> Tensor:
        """Add the squares of gradients of which each stays within one position, for ``d = sum_k g_k^2``."""
        raise NotImplementedError(f"a parameter of kind {type(self).__name__} is never in the last layer")

    @abstractmethod
    def input_factor(self, x: Tensor, sharing: str, total: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """Add ``sum x x^T``, ``[I, I]``, over the data.

        A datum's ``x x^T`` is the mean of it over the positions (expand), or that of the mean x (reduce).
        """

    def output_factor(self, g: Tensor, sharing: str, total: Tensor | None) -> Tensor:
        """Add ``sum g g^T``, ``[O, O]``, over factors, data and (expand) positions."""
        if sharing == "expand" and g.stride(-1) != 1:  # a convolution's: channels come first in memory
            each = g.flatten(0, 1)
            return _plus(total, torch.bmm(each.mT, each).sum(0))
        return plus_gram(total, (g if sharing == "expand" else g.sum(2)).reshape(-1, g.shape[3]))

    def covariance(self, x: Tensor, g: Tensor, variance: Tensor) -> Tensor:
        """Return ``sum_ij r_kij v_ij r_lij`` of the gradients r for given variances v ``[d0, d1]``: ``[b, K, K]``."""
        rows = self.rows(x, g)
        return torch.einsum("kbij,lbij->bkl", rows * variance, rows)

    def factors(self) -> list[tuple[int, int]]:
        """Return the shapes of the two Kronecker factors."""
        return [(n, n) for n in self.shape]

    def order(self, of_input: Tensor, of_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right) from what belongs to inputs and to outputs: factors, bases, or sides of a product."""
        return (of_input, of_output) if self.transposed else (of_output, of_input)

    @abstractmethod
    def rotated(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> tuple[Kind, Tensor, Tensor]:
        """Return x and g in the eigenbases of the Kronecker factors, and the kind that they have there."""


@dataclass(frozen=True)
class Matrix(Kind):
    """A weight that multiplies its input; the leaf seen as a matrix is ``[O, I]``, or ``[I, O]`` where ``transposed``."""

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        if self.transposed:
            return torch.einsum("bti,kbto->kbio", x, g)
        return torch.einsum("kbto,bti->kboi", g, x)

    def squares(self, x: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        if x.shape[1] > 1:
            summed = _shared_squares(x, g)
            return _plus(total, summed.mT if self.transposed else summed)
        left, right = self.order(x[:, 0].square(), _summed_squares(g[:, :, 0]))
        return _plus_product(total, left.mT, right)

    def summed_squares(self, x: Tensor, d: Tensor, total: Tensor | None) -> Tensor:
        left, right = self.order(x.square().flatten(0, 1), d[0].flatten(0, 1))
        return _plus_product(total, left.mT, right)

    def input_factor(self, x: Tensor, sharing: str, total: Tensor | None, weights: Tensor | None = None) -> Tensor:
        if weights is not None:
            return plus_gram(total, _weighted_rows(x, sharing, weights).flatten(0, 1))
        if sharing == "expand":
            return plus_gram(total, x.flatten(0, 1), 1 / x.shape[1])
        return plus_gram(total, x.mean(1))

    def covariance(self, x: Tensor, g: Tensor, variance: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return super().covariance(x, g, variance)
        of_output = x[:, 0].square() @ (variance if self.transposed else variance.mT)
        rows = g[:, :, 0].transpose(0, 1)
        return (rows * of_output[:, None]) @ rows.mT

    def rotated(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> tuple[Kind, Tensor, Tensor]:
        of_input, of_output = self.order(left, right)
        return self, turned(x, of_input), turned(g, of_output)


@dataclass(frozen=True)
class Grouped(Kind):
    """A weight in groups, each of which multiplies its own part of the input.

    The leaf seen as a matrix ``[d0, d1]`` has the groups one below the other, d0 = G m: ``[G O, I]``, or ``[G I, O]`` where
    ``transposed``. The factor of d0 has a block a group; the factor of d1 is that of all groups' inputs (outputs) together.
    """

    groups: int = 1

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        rows = torch.einsum("btgi,kbtgo->kbgio" if self.transposed else "btgi,kbtgo->kbgoi", x, g)
        return rows.reshape(*rows.shape[:2], *self.shape)

    def squares(self, x: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        summed = x.new_zeros(self.groups, self.shape[0] // self.groups, self.shape[1])
        block = max(1, BLOCK_ENTRIES // summed.numel())
        inputs = x.transpose(1, 2)
        for start in range(0, x.shape[0], block):
            some = slice(start, start + block)
            for one in g[:, some].transpose(2, 3):
                left, right = self.order(inputs[some], one)
                summed = summed + (left.mT @ right).square_().sum(0)
        return _plus(total, summed.reshape(self.shape))

    def input_factor(self, x: Tensor, sharing: str, total: Tensor | None, weights: Tensor | None = None) -> Tensor:
        if weights is None:
            x = x if sharing == "expand" else x.mean(1, keepdim=True)
            weight = 1 / (x.shape[1] * self.groups)
        else:
            x, weight = _weighted_rows(x, sharing, weights), 1 / self.groups
        return self._blocks(x, total, weight) if self.transposed else plus_gram(total, x.flatten(0, 2), weight)

    def output_factor(self, g: Tensor, sharing: str, total: Tensor | None) -> Tensor:
        g = (g if sharing == "expand" else g.sum(2, keepdim=True)).flatten(0, 1)
        return plus_gram(total, g.flatten(0, 2)) if self.transposed else self._blocks(g, total)

    def _blocks(self, some: Tensor, total: Tensor | None, weight: float = 1.0) -> Tensor:
        """Add the block-diagonal ``[d0, d0]`` of every group's Gram matrix, for ``[n, T, G, m]``, times ``weight``."""
        each = some.flatten(0, 1).transpose(0, 1)
        return _plus(total, weight * torch.block_diag(*(each.mT @ each)))

    def rotated(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> tuple[Kind, Tensor, Tensor]:
        """Return x and g of one matrix: in the basis of d0 a group's part reaches all of it."""
        split = left.reshape(self.groups, -1, left.shape[1])  # a group's rows of the basis
        of_input, of_output = (split, right) if self.transposed else (right, split)
        x, g = (x[..., None, :] @ of_input)[..., 0, :], (g[..., None, :] @ of_output)[..., 0, :]
        return Matrix(self.shape, self.transposed), x.flatten(1, 2), g.flatten(2, 3)


@dataclass(frozen=True)
class Embedding(Kind):
    """A table ``[V, D]`` that is looked up."""

    transposed: bool = True

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        k, b = g.shape[:2]
        table = g.new_zeros((k, b, *self.shape))
        index = x[None, :, :, None].expand(k, b, x.shape[1], self.shape[1])
        return table.scatter_add(2, index, g)

    def sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of the gradients that are not zero: their data and table entries, ``[R]`` each, and values ``[K, R, D]``."""
        data = torch.arange(x.shape[0], device=x.device)[:, None]
        pairs, where = torch.unique(x + data * self.shape[0], return_inverse=True)
        sums = g.new_zeros(g.shape[0], pairs.numel(), g.shape[3]).index_add_(1, where.reshape(-1), g.flatten(1, 2))
        return pairs // self.shape[0], pairs % self.shape[0], sums

    def squares(self, x: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        _, entries, sums = self.sums(x, g)
        total = g.new_zeros(self.shape) if total is None else total
        return total.index_add_(0, entries, _summed_squares(sums))

    def input_factor(self, x: Tensor, sharing: str, total: Tensor | None, weights: Tensor | None = None) -> Tensor:
        """Add the diagonal of ``sum x x^T`` for one-hot x, ``[V]``; under expand the matrix has no other entries."""
        positions = x.shape[1]
        if weights is not None:
            hot = weights.new_zeros(x.shape[0], self.shape[0]).scatter_add(1, x, weights)
            of_datum = weights.sum(1, keepdim=True)
            return _plus(total, (hot if sharing == "expand" else hot.square() / _or_one(of_datum)).sum(0))
        hot = torch.zeros(x.shape[0], self.shape[0], device=x.device)  # counts are exact in float32
        hot = hot.scatter_add(1, x, torch.ones_like(x, dtype=hot.dtype))
        return _plus(total, (hot / positions if sharing == "expand" else (hot / positions).square()).sum(0))

    def covariance(self, x: Tensor, g: Tensor, variance: Tensor) -> Tensor:
        data, entries, sums = self.sums(x, g)
        each = torch.einsum("krd,lrd->rkl", sums * variance[entries], sums)
        return each.new_zeros(x.shape[0], *each.shape[1:]).index_add_(0, data, each)

    def factors(self) -> list[tuple[int, int]]:
        return [(self.shape[0], 1), (self.shape[1], self.shape[1])]

    def rotated(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> tuple[Kind, Tensor, Tensor]:
        return self, x, g @ right


@dataclass(frozen=True)
class Vector(Kind):
    """A parameter of ``n`` numbers whose gradients are formed outright; ``x`` only says how many data there are."""

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        return g[..., None]

    def squares(self, x: Tensor, g: Tensor, total: Tensor | None) -> Tensor:
        return _plus(total, _summed_squares(g.flatten(0, 1))[:, None])

    def summed_squares(self, x: Tensor, d: Tensor, total: Tensor | None) -> Tensor:
        return _plus(total, d.sum((0, 1))[:, None])

    def input_factor(self, x: Tensor, sharing: str, total: Tensor | None, weights: Tensor | None = None) -> Tensor:
        return _plus(total, x.new_full((1, 1), x.shape[0]) if weights is None else weights.sum().to(x).reshape(1, 1))

    def output_factor(self, g: Tensor, sharing: str, total: Tensor | None) -> Tensor:
        return plus_gram(total, g.flatten(0, 1))

    def rotated(self, x: Tensor, g: Tensor, left: Tensor, right: Tensor) -> tuple[Kind, Tensor, Tensor]:
        return self, x, turned(g, left)


def turned(x: Tensor, basis: Tensor) -> Tensor:
    """In a basis; one axis: the identity."""
    return x @ basis if basis.ndim > 1 else x


def joined_inputs(kind: Kind, xs: list[Tensor]) -> Tensor:
    """Return what all uses of a parameter saw as what one saw: their positions one after the other."""
    return xs[0] if len(xs) == 1 or isinstance(kind, Vector) else torch.cat(xs, 1)


def joined_outputs(kind: Kind, gs: list[Tensor]) -> Tensor:
    """Return the output gradients of all uses of a parameter as those of one."""
    if len(gs) == 1:
        return gs[0]
    return torch.stack(gs).sum(0) if isinstance(kind, Vector) else torch.cat(gs, 2)


def _weighted_rows(x: Tensor, sharing: str, weights: Tensor) -> Tensor:
    """Return rows ``[b, T, *]`` (reduce: ``[b, 1, *]``) whose products ``r r^T`` add up to the weighted input factor."""
    weights = weights.to(x).reshape(*weights.shape, *[1] * (x.ndim - 2))
    if sharing == "expand":
        return x * weights.sqrt()
    of_datum = weights.sum(1, keepdim=True)
    return (x * weights).sum(1, keepdim=True) / _or_one(of_datum).sqrt()


def _or_one(weight: Tensor) -> Tensor:
    return torch.where(weight > 0, weight, 1)


def _shared_squares(x: Tensor, g: Tensor) -> Tensor:
    """Square the gradients of shared weights, a block of data and one factor at a time: ``[O, I]``."""
    total = g.new_zeros(g.shape[3], x.shape[2])
    block = max(1, BLOCK_ENTRIES // total.numel())
    for start in range(0, x.shape[0], block):
        some = slice(start, start + block)
        for one in g[:, some]:
            total = total + torch.bmm(one.mT, x[some]).square_().sum(0)
    return total


def _summed_squares(g: Tensor) -> Tensor:
    """Sum the squares of ``[K, ...]`` over K, a quarter of K at a time: only a quarter of the squares is held at once."""
    first, *rest = g.split(max(1, -(-g.shape[0] // 4)))
    total = first.square().sum(0)
    for some in rest:
        total.add_(some.square().sum(0))
    return total


def _plus(total: Tensor | None, new: Tensor) -> Tensor:
    return new if total is None else total.add_(new)


def _plus_product(total: Tensor | None, a: Tensor, b: Tensor, weight: float = 1.0) -> Tensor:
    if total is None:
        return a @ b if weight == 1 else (a @ b).mul_(weight)
    return total.addmm_(a, b, alpha=weight)


def plus_gram(total: Tensor | None, rows: Tensor, weight: float = 1.0) -> Tensor:
    """Add ``weight rows^T rows``, ``[n, n]``, to ``total``: only the blocks on and above the diagonal, until ``mirrored``."""
    n = rows.shape[1]
    if n <= GRAM_BLOCK or is_wrapped(rows):
        return _plus_product(total, rows.mT, rows, weight)
    total = rows.new_zeros((n, n)) if total is None else total
    for start in range(0, n, GRAM_BLOCK):
        block = slice(start, start + GRAM_BLOCK)
        total[block, start:].addmm_(rows[:, block].mT, rows[:, start:], alpha=weight)
    return total


def mirrored(total: Tensor) -> Tensor:
    """Copy the blocks above the diagonal to those below it."""
    n = total.shape[-1]
    if n > GRAM_BLOCK and total.ndim == 2 and not is_wrapped(total):
        for start in range(GRAM_BLOCK, n, GRAM_BLOCK):
            block = slice(start, start + GRAM_BLOCK)
            total[block, :start] = total[:start, block].mT
    return total
