"""The state of a step over a module: the transformation's, the module's buffers, and a stream for what the module draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.links.skip_nonfinite import SkipState
from bayesopt_chain.random.stream import new_key


class Stream(NamedTuple):
    """``key`` and ``count``, 0-d int64: which numbers the module draws, and the number of steps so far."""

    key: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class ModuleState(NamedTuple):
    """``inner``: the state of the transformation; ``buffers``: the module's, by name; ``stream``: for what it draws.

    Pass ``state.inner`` to whatever reads the transformation's state, such as ``swag.posterior(state.inner, params)``.
    """

    inner: Any
    buffers: dict[str, Tensor]
    stream: Stream

    def advanced(self, inner: Any, buffers: Mapping[str, Tensor], skipped: Any, inplace: bool) -> ModuleState:
        """The state after a step. One that :func:`skip_nonfinite` left out (of which there were ``skipped`` before) leaves
        buffers and stream as they were."""
        made: Any = 1
        if skipped is not None:
            made = inner.skipped == skipped
            buffers = {name: torch.where(made, x, self.buffers[name]) for name, x in buffers.items()}
        if not inplace:
            return ModuleState(inner, dict(buffers), Stream(self.stream.key.clone(), self.stream.count + made))
        for name, old in self.buffers.items():
            old.copy_(buffers[name])
        self.stream.count.add_(made)
        return ModuleState(inner, self.buffers, self.stream)


def started(inner: Any, buffers: Mapping[str, Tensor], params: Any, like: Any, generator: Any) -> ModuleState:
    """The first state: buffers of its own (those of ``like``, where that has some), a fresh key, a count of zero."""
    buffers = like.buffers if isinstance(like, ModuleState) else buffers
    key = new_key(generator, params[0].device if params else torch.device("cpu"))
    own = {name: x.detach().clone() for name, x in buffers.items()}
    return ModuleState(inner, own, Stream(key, torch.zeros_like(key)))


def stream_of(state: Any) -> tuple[Tensor, Tensor] | None:
    """Key and count that the module's draws follow: its own stream, else the first one among the links' states."""
    if isinstance(state, ModuleState):
        return state.stream
    if isinstance(state, SkipState):
        state = state.inner
    if isinstance(state, tuple):
        for entry in (state, *state):
            key, count = getattr(entry, "key", None), getattr(entry, "count", None)
            if isinstance(key, Tensor) and isinstance(count, Tensor) and key.ndim == count.ndim == 0:
                return key, count
    return None


def is_keyed(entry: Any) -> bool:
    """Whether it is a state with a random stream."""
    return {"key", "count"} <= set(getattr(entry, "_fields", ())) and isinstance(entry.key, Tensor)


def keyed(tree: Any) -> list[Any]:
    """The states in a tree that have a random stream, or many of them stacked."""
    return [entry for entry in optree.tree_leaves(tree, is_leaf=is_keyed) if is_keyed(entry)]


def buffers_of(state: Any) -> dict[str, Tensor]:
    """The module's buffers in a step's state; none where it has none."""
    return state.buffers if isinstance(state, ModuleState) else {}
