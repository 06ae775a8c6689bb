"""What links hold: tensors of the shape of each leaf, a counter for each leaf, and trees that users gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.link import Link
from bayesopt_chain.trees import flattened


@dataclass(frozen=True, eq=False)
class HoldsTree(Link):
    """A link with arguments that are trees of tensors, of which a dataclass would ask the truth value to compare them."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = (flattened([getattr(x, f.name) for f in fields(self)]) for x in (self, other))
        return mine[1] == theirs[1] and all(map(_are_equal, mine[0], theirs[0]))

    __hash__ = Link.__hash__


def _are_equal(x: object, y: object) -> bool:
    """Whether two leaves, tensors or anything else, are equal."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.equal(torch.as_tensor(x, device="cpu"), torch.as_tensor(y, device="cpu"))
    return x == y


def require_numbers(who: str, tree: Any, wanted: str) -> None:
    """Refuse a tree whose leaves are not all real numbers or real tensors.

    Args:
        who: the function and its argument, with which the message begins.
        tree: the argument.
        wanted: what the argument must be.

    Raises:
        TypeError: a leaf is something else.
    """
    for leaf in optree.tree_leaves(tree, none_is_leaf=True):
        real = isinstance(leaf, Tensor) and not leaf.is_complex() and leaf.dtype != torch.bool
        if not real and (isinstance(leaf, bool) or not isinstance(leaf, Real)):
            raise TypeError(f"{who} must be {wanted}, got {checks.short(leaf)}")


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
