"""The vocabulary that links are written in: lists of leaves in, lists of leaves out.

A link says what happens to its leaves; the chain says where the results go: :data:`PURE` makes new tensors, which can be
differentiated, and :data:`IN_PLACE` writes into those of the first argument. Both round alike. In place, leaves that are
small on average are treated a list at a time, where calls cost more than arithmetic; large ones one by one, the whole
formula while a leaf is in cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_, foreach_copy_, foreach_mul_
from bayesopt_chain.tracing import is_transformed

Leaves = list[Tensor]
Factor = float | Tensor
WIDE = (torch.float32, torch.float64)  # list functions round a factor to the dtype first, which in others changes bits
SMALL = 2**15  # elements of an average leaf below which lists are treated at once


class Op:
    """What both dialects answer."""

    inplace: bool

    def mul(self, xs: Sequence[Tensor], by: Factor | Sequence[Factor]) -> Leaves:
        """``x f``, with one factor for all or one for each."""
        raise NotImplementedError

    def div(self, xs: Sequence[Tensor], by: Sequence[Tensor]) -> Leaves:
        """``x / f``."""
        raise NotImplementedError

    def add(self, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1) -> Leaves:
        """``x + alpha y``."""
        raise NotImplementedError

    def average(
        self, ts: Sequence[Tensor], decay: float, xs: Sequence[Tensor], weight: float = 1, square: bool = False
    ) -> Leaves:
        """``decay t + weight x``, or ``decay t + weight x^2``."""
        raise NotImplementedError

    def put(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        """``new``, fresh results that nothing else holds, in the place of ``old``; float64 factors promote nothing."""
        raise NotImplementedError

    def copy(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        """``new``, which something else may hold, in the place of ``old``."""
        raise NotImplementedError

    def count(self, counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Counters one higher."""
        raise NotImplementedError

    def keep(self, old: Any, new: Any) -> Any:
        """The next value of a whole state; what has outgrown its tensors gets new ones."""
        raise NotImplementedError


class Pure(Op):
    """New tensors."""

    inplace = False

    def mul(self, xs: Sequence[Tensor], by: Factor | Sequence[Factor]) -> Leaves:
        return [_times(x, f) for x, f in zip(xs, _spread(by, len(xs)))]

    def div(self, xs: Sequence[Tensor], by: Sequence[Tensor]) -> Leaves:
        return [x.div(f) for x, f in zip(xs, by)]

    def add(self, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1) -> Leaves:
        return [x.add(y, alpha=alpha) for x, y in zip(xs, ys)]

    def average(
        self, ts: Sequence[Tensor], decay: float, xs: Sequence[Tensor], weight: float = 1, square: bool = False
    ) -> Leaves:
        if square:
            if decay == 1.0:
                return [t.addcmul(x, x, value=weight) for t, x in zip(ts, xs)]
            return [_like(t.mul(decay).addcmul(x, x, value=weight), t) for t, x in zip(ts, xs)]
        if is_transformed():  # a product of the state alone may lack the axis that the gradients are mapped over
            return [t.mul(decay).add(x, alpha=weight) for t, x in zip(ts, xs)]
        return [t.mul(decay).add_(x, alpha=weight) for t, x in zip(ts, xs)]

    def put(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        return [_like(y, x) if y.dtype == torch.float64 else y for x, y in zip(old, new)]

    def copy(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        return [y.clone() for y in new]

    def count(self, counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple([c + 1 for c in counts])

    def keep(self, old: Any, new: Any) -> Any:
        return new


class InPlace(Op):
    """The tensors of the first argument, overwritten."""

    inplace = True

    def mul(self, xs: Sequence[Tensor], by: Factor | Sequence[Factor]) -> Leaves:
        one = _one(by)
        if not isinstance(one, (list, tuple)) and are_small(xs) and all([x.dtype in WIDE for x in xs]):
            foreach_mul_(list(xs), one)
            return list(xs)
        return [x.mul_(f) for x, f in zip(xs, _spread(by, len(xs)))]

    def div(self, xs: Sequence[Tensor], by: Sequence[Tensor]) -> Leaves:
        return [x.div_(f) for x, f in zip(xs, by)]

    def add(self, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1) -> Leaves:
        if are_small(xs):
            foreach_add_(list(xs), list(ys), alpha)
            return list(xs)
        return [x.add_(y, alpha=alpha) for x, y in zip(xs, ys)]

    def average(
        self, ts: Sequence[Tensor], decay: float, xs: Sequence[Tensor], weight: float = 1, square: bool = False
    ) -> Leaves:
        if square:
            return [(t if decay == 1.0 else t.mul_(decay)).addcmul_(x, x, value=weight) for t, x in zip(ts, xs)]
        if are_small(ts):
            return self.add(self.mul(ts, decay), xs, weight)
        return [t.mul_(decay).add_(x, alpha=weight) for t, x in zip(ts, xs)]

    def put(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> Leaves:
        if are_small(old):
            foreach_copy_(list(old), list(new))
            return list(old)
        return [x.copy_(y) for x, y in zip(old, new)]

    copy = put

    def count(self, counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple([c.add_(1) for c in counts])

    def keep(self, old: Any, new: Any) -> Any:
        olds, structure = optree.tree_flatten(old)
        news, grown = optree.tree_flatten(new)
        if structure != grown or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(olds, news)):
            return optree.tree_map(torch.clone, new)
        return structure.unflatten([a if a is b else a.copy_(b) for a, b in zip(olds, news)])


PURE, IN_PLACE = Pure(), InPlace()


def are_small(xs: Sequence[Tensor]) -> bool:
    """Whether calls cost more than arithmetic, and torch's list functions may be used (vmap has no rule for them)."""
    return len(xs) > 1 and not is_transformed() and sum(map(Tensor.numel, xs)) < len(xs) * SMALL


def _times(x: Tensor, f: Any) -> Tensor:
    """The product, in the dtype of ``x`` where a float64 schedule would promote a 0-d parameter."""
    y = x.mul(f)
    return y.to(x.dtype) if x.ndim == 0 and isinstance(f, Tensor) and f.dtype == torch.float64 else y


def _like(y: Tensor, x: Tensor) -> Tensor:
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _spread(by: Factor | Sequence[Factor], n: int) -> Sequence[Factor]:
    return by if isinstance(by, (list, tuple)) else [by] * n  # pyright: ignore[reportReturnType]


def _one(by: Any) -> Any:
    """The one factor of a list that repeats it."""
    return by[0] if isinstance(by, (list, tuple)) and all(f is by[0] for f in by) else by
