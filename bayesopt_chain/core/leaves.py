"""Elementary maps over leaves, written once for gradients that may be ``None`` and for both in-place modes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_plain


def each(fn: Callable, g: list, *others) -> list:
    """``fn`` of every gradient and what goes with it; ``None`` where there is no gradient."""
    return [None if x is None else fn(x, *rest) for x, *rest in zip(g, *others)]


def keep(fn: Callable, g: list, state: tuple, *others) -> tuple:
    """The next value ``fn(s, g, ...)`` of a state with one tensor for each leaf; unchanged without a gradient."""
    return tuple(s if x is None else fn(s, x, *rest) for x, s, *rest in zip(g, state, *others))


def owned(g: list) -> list:
    """Gradients that may be overwritten one by one: what shares memory with an earlier one, or within itself, is copied.

    Autograd hands out one tensor twice, as for ``(a + b).square().sum()``, and expanded scalars, as for ``a.sum()``.
    """
    seen: set[int] = set()
    plain = is_plain(*(x for x in g if x is not None))  # vmap does not tell where a tensor lies

    def own(x: Tensor) -> Tensor:
        if x.layout is not torch.strided:
            return x
        where = x.untyped_storage().data_ptr() if plain else id(x)
        if where in seen or (0 in x.stride() and x.numel() > 1):
            return x.clone(memory_format=torch.contiguous_format)
        if where:
            seen.add(where)
        return x

    return each(own, g)


def repeats(g: list) -> bool:
    """Whether one tensor stands at two leaves."""
    ids = [id(x) for x in g if x is not None]
    return len(set(ids)) < len(ids)


def zeros_like(params: list, value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """A tensor filled with ``value`` for each leaf; an empty one for an absent leaf, since states hold no ``None``."""
    return tuple(
        torch.empty(0) if p is None else torch.full_like(p, value, requires_grad=requires_grad) for p in params
    )


def moment(g: list, state: tuple, decay: float, order: int, inplace: bool) -> tuple[Tensor, ...]:
    """Exponential moving average of ``g ** order``; ``decay = 1`` sums squares."""

    def step(t: Tensor, x: Tensor) -> Tensor:
        if decay == 1.0:
            return t.addcmul_(x, x) if inplace else t.addcmul(x, x)
        t = t.mul_(decay) if inplace else t.mul(decay)
        if order == 1:
            return t.add_(x, alpha=1 - decay)
        return t.addcmul_(x, x, value=1 - decay) if inplace else t.addcmul(x, x, value=1 - decay).to(t.dtype)

    return keep(step, g, state)
