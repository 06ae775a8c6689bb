"""Gradients that may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_plain


def owned(g: Sequence[Any]) -> list[Any]:
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

    return [None if x is None else own(x) for x in g]


def repeats(g: Sequence[Any]) -> bool:
    """Whether one tensor stands at two leaves."""
    ids = [id(x) for x in g if x is not None]
    return len(set(ids)) < len(ids)
