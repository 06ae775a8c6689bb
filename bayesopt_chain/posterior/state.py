"""What the transforms that carry a posterior share: finding their state in a chain's, reading a dial, writing in place.

Their states are NamedTuples of tensors, with one tensor for each parameter that is present, in optree order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

State = TypeVar("State")
Dial = float | Tensor | Callable[[Tensor], Any]


def present(leaves: Sequence[Tensor | None]) -> list[Tensor]:
    """The leaves that are there."""
    return [leaf for leaf in leaves if leaf is not None]


def spread_over(values: Sequence[Any], leaves: Sequence[Any]) -> list:
    """``values`` in the places of the leaves that are there, ``None`` in the others."""
    rest = iter(values)
    return [None if leaf is None else next(rest) for leaf in leaves]


def find(state: Any, kind: type[State], maker: str) -> State:
    """The one state of class ``kind`` in a chain's state."""
    if isinstance(state, kind):
        return state
    found = [entry for entry in state if isinstance(entry, kind)] if isinstance(state, tuple) else []
    if len(found) != 1:
        raise ValueError(
            f"state holds {len(found)} states of {maker}, not one: pass what init of this transformation, or of a chain "
            "with it, returned"
        )
    return found[0]


def require_these(shapes: list | int, params: Any, who: str) -> None:
    """Refuse parameters of other shapes, or of another total size, than a state was made for."""
    leaves = optree.tree_leaves(params)
    mine = sum(p.numel() for p in leaves) if isinstance(shapes, int) else [p.shape for p in leaves]
    if mine != shapes:
        shown = shapes if isinstance(shapes, int) else [tuple(s) for s in shapes]
        came = mine if isinstance(shapes, int) else [tuple(s) for s in mine]
        raise ValueError(
            f"{who}: the state is over parameters of {shown}, params has {came}: pass the tree that init was given "
            "(behind a mask, the leaves it selects)"
        )


def written(old: State, new: State) -> State:
    """``new`` in the tensors of ``old``, where the two are alike; what has outgrown its tensor gets one of its own."""
    olds, structure = optree.tree_flatten(old)
    news, grown = optree.tree_flatten(new)
    if structure != grown or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(olds, news)):
        return optree.tree_map(torch.clone, new)
    return optree.tree_unflatten(structure, [a if a is b else a.copy_(b) for a, b in zip(olds, news)])


def now(dial: Dial, count: Tensor) -> float | Tensor:
    """The value of a number, a 0-d tensor or a schedule of the update count, at this count."""
    if torch.is_tensor(dial):
        return dial.detach()
    return dial(count) if callable(dial) else dial


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """``x`` times a number or a 0-d tensor, in the dtype of ``x`` also where that is 0-d too."""
    return x * (factor.to(x.dtype) if torch.is_tensor(factor) else factor)


def tensor_on(value: float | Tensor, device: torch.device) -> Tensor:
    """A float64 0-d tensor on a device, made there: a copy from the host could not be captured."""
    if torch.is_tensor(value):
        return value.to(device=device, dtype=torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def device_of(leaves: Sequence[Tensor]) -> torch.device:
    """Where the first leaf is."""
    return leaves[0].device if leaves else torch.device("cpu")
