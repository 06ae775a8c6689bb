"""Step counters: one 0-d int64 tensor for each leaf, the same object for leaves that have taken the same steps.

Counting by leaf is what TorchOpt does (a leaf without a gradient does not age); sharing the object lets everything that
depends on a count be computed once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Counts = tuple[Tensor, ...]


def zeros(params: list) -> Counts:
    """A counter for each leaf, at zero."""
    by_device: dict[torch.device, Tensor] = {}
    out = []
    for p in params:
        device = p.device if p is not None else torch.device("cpu")
        if device not in by_device:
            by_device[device] = torch.zeros((), dtype=torch.int64, device=device)
        out.append(by_device[device])
    return tuple(out)


def increment(counts: Counts, g: list, inplace: bool) -> Counts:
    """Counts one higher wherever there is a gradient."""
    idle = {id(c) for c, x in zip(counts, g) if x is None}
    new: dict[int, Tensor] = {}
    for c, x in zip(counts, g):
        if x is not None and id(c) not in new:
            new[id(c)] = c.add_(1) if inplace and id(c) not in idle else c + 1
    return tuple(new[id(c)] if x is not None else c for c, x in zip(counts, g))


def each(fn: Callable[[Tensor], Tensor], counts: Counts) -> list:
    """``fn`` of every counter, computed once for each distinct one."""
    seen: dict[int, Tensor] = {}
    for c in counts:
        if id(c) not in seen:
            seen[id(c)] = fn(c)
    return [seen[id(c)] for c in counts]
