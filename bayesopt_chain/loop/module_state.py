"""The state of a step over a module: the transformation's, the module's buffers, and a stream for what the module draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from bayesopt_chain.random.stream import new_key


class Memory(Protocol):
    """What a step remembers besides the transformation's state: the buffers of a module, or the reference of an estimator.

    Attributes:
        kind: the class of the step's state. It has the fields ``inner``, the transformation's state, and ``carried``, what
            the gradient source carries from step to step, and a method ``advanced``.
        option: the argument of ``make_step`` that asked for it.
    """

    kind: ClassVar[type]
    option: ClassVar[str]

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> Any:
        """Make the first state of the step around that of the transformation."""
        ...


class Stream(NamedTuple):
    """What the module's random draws follow: ``key`` and ``step``, the number of steps so far, both 0-d int64."""

    key: Tensor
    step: Tensor


class ModuleState(NamedTuple):
    """``inner``: the state of the transformation; ``buffers``: the module's, by name; ``stream``: for what it draws.

    Pass ``state.inner`` to whatever reads the transformation's state, such as ``swag.posterior(state.inner, params)``.
    """

    inner: Any
    buffers: dict[str, Tensor]
    stream: Stream

    @property
    def carried(self) -> dict[str, Tensor]:
        """The buffers, as the loss receives them."""
        return self.buffers

    def advanced(self, inner: Any, carried: Mapping[str, Tensor], skipped: Tensor | None, inplace: bool) -> ModuleState:
        """Make the state after a step.

        Args:
            inner: the transformation's new state.
            carried: the new buffers.
            skipped: the number of steps that :func:`skip_nonfinite` had left out before this one; a step that it leaves out
                changes neither buffers nor stream. ``None`` for any other transformation.
            inplace: whether to write into this state's tensors.
        """
        made: Any = 1
        if skipped is not None:
            made = inner.skipped == skipped
            carried = {name: torch.where(made, x, self.buffers[name]) for name, x in carried.items()}
        if not inplace:
            return ModuleState(inner, dict(carried), Stream(self.stream.key.clone(), self.stream.step + made))
        for name, old in self.buffers.items():
            old.copy_(carried[name])
        self.stream.step.add_(made)
        return ModuleState(inner, self.buffers, self.stream)


@dataclass(frozen=True)
class ModuleMemory:
    """A module's buffers, from which each state starts with copies of its own."""

    kind: ClassVar[type] = ModuleState
    option: ClassVar[str] = "buffers="
    buffers: Mapping[str, Tensor] = field(compare=False)

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> ModuleState:
        """Copy the buffers (those of ``like``, where it has some), draw a key, and count from zero."""
        buffers = like.buffers if isinstance(like, ModuleState) else self.buffers
        leaves: list[Any] = optree.tree_leaves(params)
        key = new_key(generator, leaves[0].device if leaves else torch.device("cpu"))
        own = {name: x.detach().clone() for name, x in buffers.items()}
        return ModuleState(inner, own, Stream(key, torch.zeros_like(key)))


def is_keyed(entry: Any) -> bool:
    """Whether it is a state with a random stream."""
    return {"key", "step"} <= set(getattr(entry, "_fields", ())) and isinstance(entry.key, Tensor)


def keyed(tree: Any) -> list[Any]:
    """The states in a tree that have a random stream, or many of them stacked."""
    return [entry for entry in optree.tree_leaves(tree, is_leaf=is_keyed) if is_keyed(entry)]


def buffers_of(state: Any) -> dict[str, Tensor]:
    """The module's buffers in a step's state; none where it has none."""
    return state.buffers if isinstance(state, ModuleState) else {}
