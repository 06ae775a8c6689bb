"""The state of a step of a module: the state of the transformation, the module's buffers, and its random stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import optree
import torch
from torch import Tensor

from bayesopt_chain.random.stream import new_key


class Memory(Protocol):
    """Makes the state of a step that holds more than the state of the transformation.

    :class:`ModuleMemory` adds the buffers of a module, and :class:`bayesopt_chain.loop.gradients.EstimatorMemory` the reference
    of a gradient estimator.

    Attributes:
        kind: the class of the step's state. It has the attributes ``inner``, the transformation's state, and ``carried``, which
            the gradient source gets and renews in every step, and a method ``advanced`` that makes the next state.
        option: the argument of ``make_step`` that asked for it, for messages.
    """

    kind: ClassVar[type]
    option: ClassVar[str]

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> Any:
        """Make the first state of the step.

        Args:
            inner: the first state of the transformation.
            params: the parameters to start from.
            like: a state to take the memory from, or ``None``.
            generator: source of a key (default: torch's global generator).
        """


class Stream(NamedTuple):
    """The random stream of a module: its draws are a function of ``key`` and of the count ``step`` of steps, both 0-d int64."""

    key: Tensor
    step: Tensor


class ModuleState(NamedTuple):
    """The state of a step that was made with ``buffers=``.

    Functions that read the state of a transformation take ``state.inner``, as ``swag.posterior(state.inner, params)``.

    Attributes:
        inner: the state of the transformation.
        buffers: the module's buffers, by name.
        stream: the random stream of the module, for dropout and the like.
    """

    inner: Any
    buffers: dict[str, Tensor]
    stream: Stream

    @property
    def carried(self) -> dict[str, Tensor]:
        """The buffers, which the loss gets as its third argument."""
        return self.buffers

    def advanced(self, inner: Any, carried: Mapping[str, Tensor], skipped: Tensor | None, inplace: bool) -> ModuleState:
        """Make the state after a step.

        Args:
            inner: the transformation's new state.
            carried: the new buffers.
            skipped: the number of steps that :func:`skip_nonfinite` had left out before this step; a step that it leaves out
                changes neither buffers nor stream. ``None`` for any other transformation.
            inplace: whether to write into this state's tensors.

        Returns:
            The new state; with ``inplace`` it holds this state's tensors.
        """
        made: Any = 1  # what is added to the count of steps; 0 if this step was skipped
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
    """The buffers of a module, which each new state copies; see :class:`Memory`."""

    kind: ClassVar[type] = ModuleState
    option: ClassVar[str] = "buffers="
    buffers: Mapping[str, Tensor] = field(compare=False)

    def start(self, inner: Any, params: Any, like: Any, generator: torch.Generator | None) -> ModuleState:
        """Make a state with copies of the buffers (of ``like``, if it has buffers), a new key and a count of zero."""
        buffers = like.buffers if isinstance(like, ModuleState) else self.buffers
        leaves: list[Any] = optree.tree_leaves(params)
        # the key is on the parameters' device, since a captured step cannot copy it from the host
        key = new_key(generator, leaves[0].device if leaves else torch.device("cpu"))
        own = {name: x.detach().clone() for name, x in buffers.items()}
        return ModuleState(inner, own, Stream(key, torch.zeros_like(key)))
