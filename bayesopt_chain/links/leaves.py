"""The parts of which the states of links are made: tensors of the shape of each leaf, and a counter for each leaf."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(leaves: Sequence[Tensor], value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """For each leaf a tensor of its shape, dtype and device.

    Args:
        leaves: the leaves.
        value: the value of every entry.
        requires_grad: whether autograd records what is done to the tensors, for meta-learning.

    Example:
        >>> zeros([torch.ones(2)], 0.5)
        (tensor([0.5000, 0.5000]),)
    """
    return tuple([torch.full_like(p, value, requires_grad=requires_grad) for p in leaves])


def new_counts(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each leaf a counter at zero, 0-d int64 on the device of the leaf.

    A counter belongs to its leaf, because a leaf without a gradient does not take part in an update.

    Example:
        >>> new_counts([torch.ones(2)])
        (tensor(0),)
    """
    return tuple([torch.zeros((), dtype=torch.int64, device=p.device) for p in leaves])
