"""The operations that links are written in: lists of leaves in, lists of leaves out.

A link says what happens to its leaves; the chain says where the results go. :data:`PURE` makes new tensors, which can be
differentiated. :data:`IN_PLACE` writes the results into the tensors of the first argument. Both give the same bits.

In place there are two ways through a list of leaves. Where the average leaf is small, calls cost more than arithmetic, and
torch's list functions treat all leaves in one call. Where it is large, memory costs more, and leaves are treated one by one, so
that the whole formula runs while a leaf is in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_, foreach_copy_, foreach_mul_
from bayesopt_chain.tracing import is_plain, is_transformed

Leaves = list[Tensor]
Factor = float | Tensor
# In narrower dtypes list functions round a factor to that dtype first, which changes the bits of the result.
WIDE = (torch.float32, torch.float64)
SMALL = 2**15  # elements of an average leaf below which lists are treated at once


class TensorOps:
    """The operations, all pure or all in place.

    Args:
        inplace: whether results are written into the tensors of the first argument.
    """

    def __init__(self, inplace: bool) -> None:
        self.inplace = inplace
        self._mul, self._div = (Tensor.mul_, Tensor.div_) if inplace else (Tensor.mul, Tensor.div)
        self._add, self._addcmul = (Tensor.add_, Tensor.addcmul_) if inplace else (Tensor.add, Tensor.addcmul)

    def mul(self, xs: Sequence[Tensor], by: Factor | Sequence[Factor]) -> Leaves:
        """``x f``, with one factor for all or one for each."""
        factors: list[Any] = [*by] if isinstance(by, (list, tuple)) else [by] * len(xs)
        first = factors[0] if factors else 1.0
        if self.inplace and are_small(xs) and all([f is first for f in factors]) and all([x.dtype in WIDE for x in xs]):
            foreach_mul_(list(xs), first)
            return list(xs)
        # a 0-d leaf keeps its dtype beside a 0-d float64 factor, such as a schedule's; others widen it, as in TorchOpt
        return [_like(y, x) if y.dtype == torch.float64 else y for x, y in zip(xs, map(self._mul, xs, factors))]

    def div(self, xs: Sequence[Tensor], by: Sequence[Tensor]) -> Leaves:
        """``x / f``."""
        return [self._div(x, f) for x, f in zip(xs, by)]

    def add(self, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1) -> Leaves:
        """``x + alpha y``."""
        if self.inplace and are_small(xs):
            foreach_add_(list(xs), list(ys), alpha=alpha)
            return list(xs)
        return [self._add(x, y, alpha=alpha) for x, y in zip(xs, ys)]

    def average(
        self, ts: Sequence[Tensor], decay: float, xs: Sequence[Tensor], weight: float = 1, square: bool = False
    ) -> Leaves:
        """``decay t + weight x``, or ``decay t + weight x^2``."""
        if square:
            return [
                _like(self._addcmul(t if decay == 1.0 else self._mul(t, decay), x, x, value=weight), t)
                for t, x in zip(ts, xs)  # one by one, while a leaf is in cache
            ]
        if self.inplace and are_small(ts):
            return self.add(self.mul(ts, decay), xs, weight)
        # a new product is written into, unless it may lack the axis that the gradients are mapped over
        add = self._add if is_transformed() else Tensor.add_
        return [add(self._mul(t, decay), x, alpha=weight) for t, x in zip(ts, xs)]

    def put(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        """``new`` in the place of ``old``, where nothing else holds the tensors of ``new``, so that they need no copy.

        A 0-d leaf times a float64 factor is float64; the result has the dtype of ``old`` again.
        """
        if not self.inplace:
            return [_like(y, x) if y.dtype == torch.float64 else y for x, y in zip(old, new)]
        if are_small(old):
            foreach_copy_(list(old), list(new))
            return list(old)
        return [x.copy_(y) for x, y in zip(old, new)]

    def copy(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        """``new`` in the place of ``old``, where something else may hold the tensors of ``new``, so that they are copied."""
        return self.put(old, new) if self.inplace else [y.clone() for y in new]

    def next_count(self, count: Tensor) -> Tensor:
        """The counter plus 1."""
        return self._add(count, 1)

    def count(self, counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The counters of all leaves, each plus 1."""
        return tuple([self._add(c, 1) for c in counts])

    def keep(self, old: Any, new: Any) -> Any:
        """The state ``new``, in the tensors of ``old`` where all shapes and dtypes are the same, else in tensors of its own.

        Leaves that are no tensors, such as a number that a transformation of TorchOpt counts in, are those of ``new``.
        """
        if not self.inplace:
            return new
        olds, structure = optree.tree_flatten(old)
        news, grown = optree.tree_flatten(new)
        if structure != grown or any(
            getattr(a, of, None) != getattr(b, of, None) for a, b in zip(olds, news) for of in ("shape", "dtype")
        ):
            return grown.unflatten([b.clone() if isinstance(b, Tensor) else b for b in news])
        return structure.unflatten(
            [a.copy_(b) if isinstance(b, Tensor) and a is not b else b for a, b in zip(olds, news)]
        )


PURE, IN_PLACE = TensorOps(inplace=False), TensorOps(inplace=True)


def are_small(xs: Sequence[Tensor]) -> bool:
    """Whether torch's list functions are the faster way through these leaves, and may be used: vmap has no rule for them."""
    return len(xs) > 1 and not is_transformed() and sum(map(Tensor.numel, xs)) < len(xs) * SMALL


def owned(g: Sequence[Any]) -> list[Any]:
    """The gradients, with a copy of each one that could not be overwritten without changing another element.

    Autograd returns the same tensor for two leaves, as for ``(a + b).square().sum()``, and expanded scalars, all of whose
    elements are one number in memory, as for ``a.sum()``.
    """
    seen, out = set[int](), list[Any]()
    plain = is_plain(*(x for x in g if x is not None))  # vmap does not tell where a tensor lies
    for x in g:
        if x is not None and x.layout is torch.strided:
            where = (x.untyped_storage().data_ptr() if plain else 0) or id(x)
            if where in seen or (0 in x.stride() and x.numel() > 1):
                x = x.clone(memory_format=torch.contiguous_format)
            seen.add(where)
        out.append(x)
    return out


def _like(y: Tensor, x: Tensor) -> Tensor:
    return y if y.dtype == x.dtype else y.to(x.dtype)
