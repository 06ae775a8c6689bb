"""What the states of links are made of: tensors like the leaves, and counters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(leaves: Sequence[Tensor], value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """A tensor filled with ``value`` like each leaf."""
    return tuple([torch.full_like(p, value, requires_grad=requires_grad) for p in leaves])


def new_counts(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A counter for each leaf, at zero."""
    return tuple([torch.zeros((), dtype=torch.int64, device=p.device) for p in leaves])
