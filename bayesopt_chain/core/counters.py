"""Step counters: one 0-d int64 tensor for each leaf.

Counting by leaf is what TorchOpt does (a leaf without a gradient does not age). What depends on a count is computed once for
all leaves that are known to have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_plain

Counts = tuple[Tensor, ...]


def zeros(params: list) -> Counts:
    """A counter for each leaf, at zero."""
    return tuple(
        torch.zeros((), dtype=torch.int64, device=p.device if p is not None else torch.device("cpu")) for p in params
    )


def increment(counts: Counts, g: list, inplace: bool) -> Counts:
    """Counts one higher wherever there is a gradient."""
    return tuple(c if x is None else c.add_(1) if inplace else c + 1 for c, x in zip(counts, g))


def each(fn: Callable[[Tensor], Any], counts: Counts, g: list | None = None) -> list:
    """``fn`` of every counter, computed once for those known to be equal; ``None`` for leaves without a gradient in ``g``."""
    seen: dict[Hashable, Any] = {}
    out: list = []
    for i, c in enumerate(counts):
        if g is not None and g[i] is None:
            out.append(None)
            continue
        k = value_key(c)
        if k not in seen:
            seen[k] = fn(c)
        out.append(seen[k])
    return out


def readable(t: Tensor) -> bool:
    """Whether reading the tensor's value costs nothing: on the CPU, outside transformations and compilation."""
    return t.device.type == "cpu" and is_plain(t)


def scalar(value: Any, device: torch.device) -> Tensor:
    """What a schedule returned, 0-d, float64; a number is filled in on the device, which a graph can record."""
    if torch.is_tensor(value):
        return value.to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def value_key(t: Tensor) -> Hashable:
    """A key that equal tensors share where their value can be read for nothing; else one for each tensor object."""
    return (str(t.device), str(t.tolist())) if readable(t) else id(t)
