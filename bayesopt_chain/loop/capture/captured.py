"""The callable that ``capture`` returns: it replays the recorded program, and refuses calls that a replay would get wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bayesopt_chain.checks import short
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.loop.capture.buffers import Body
from bayesopt_chain.loop.capture.errors import CaptureError
from bayesopt_chain.loop.loss import Info
from bayesopt_chain.tracing import is_plain

Backend = Literal["cuda", "inductor", "eager"]
_is_training = attrgetter("training")


class Modes:
    """The modules that were called within :meth:`watching`, and whether each of them was in training mode."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.training: list[bool] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Store every module that is called within this context, and its mode."""
        seen: dict[int, nn.Module] = {}
        hook = register_module_forward_pre_hook(lambda module, args: seen.update({id(module): module}))
        try:
            yield
        finally:
            hook.remove()
            self.modules = list(seen.values())
            self.training = list(map(_is_training, self.modules))

    def check(self) -> None:
        """Compare the modes of the modules with those when the step was recorded.

        Raises:
            CaptureError: a module is in another mode; the message names the first one.
        """
        if list(map(_is_training, self.modules)) != self.training:
            changed = next(m for m, was in zip(self.modules, self.training) if m.training != was)
            now, then = ("train", "eval") if changed.training else ("eval", "train")
            raise CaptureError(
                f"capture: the step was captured with {type(changed).__name__} in {then} mode, and it is in {now} mode now; "
                f"call .{then}() before the replay, or capture the step again"
            )


class Program(NamedTuple):
    """The recording of a step for one shape of batches.

    Attributes:
        body: the step on flat lists of tensors. The bodies of all programs of a step share their static buffers.
        modes: the train or eval mode of the modules that the step called.
        replay: runs the program: a function of the tensors of a batch that returns those of the report.
    """

    body: Body
    modes: Modes
    replay: Callable[[list[Tensor]], Sequence[Tensor]]


class Captured:
    """A captured step; made by :func:`capture` and called like the step.

    All calls share one set of static buffers, which they return. A call from a second thread would overwrite them while the
    first thread uses them, so that only the first thread that calls the step may call it, as long as that thread is alive.

    Attributes:
        step: the step that was captured.
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"``.
    """

    def __init__(
        self,
        step: Callable,
        body: Body,
        record: Callable[[Body], Program],
        backend: Backend,
        signatures: int,
        data: Epochs | None,
    ) -> None:
        self.step = step
        self._data = data  # the epochs from which the step takes its batches, or None
        self.backend: Backend = backend
        self._record, self._signatures = record, signatures
        self._program = record(body)  # the program of the last call
        self._programs = [self._program]
        self._lock = threading.Lock()  # held during a call
        self._owner: threading.Thread | None = None  # the only thread that may call

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        """Replay the step.

        Args:
            params, state: trees with the structure, shapes, dtypes and devices that were captured. They are copied into the
                static buffers, unless they are the trees that the last call returned.
            batch: the ``bc.epochs`` that was captured, whose position moves on. Otherwise a batch like the one that was
                captured, or one with other lengths, if ``signatures`` allows it; the step is then recorded for these lengths
                once.

        Returns:
            ``(params, state, info)``. Parameters and state are the static buffers, which the next call overwrites. ``info`` is
            not overwritten.

        Raises:
            CaptureError: a module is in another mode than when the step was captured; a call is made during a call, inside of
                vmap or of another capture, or from a second thread.
            ValueError: an argument has another structure, shape, dtype or device.
        """
        # under vmap or in another trace there are no numbers to write into the static buffers
        if not is_plain() or not self._lock.acquire(blocking=False):
            raise CaptureError(
                "capture: the step is called during another call of it, or inside of vmap, torch.compile or another capture; "
                "capture one step for each call, and transform the step that was captured (captured.step)"
            )
        try:
            owner = self._owner
            thread = threading.current_thread()
            if owner is not None and owner is not thread and owner.is_alive():
                raise CaptureError(
                    f"capture: this step returns its static buffers, and thread {owner.name!r} holds them; the call comes from "
                    f"{thread.name!r}. Capture one step for each thread"
                )
            self._owner = thread
            return self._run(params, state, batch)
        finally:
            self._lock.release()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: always; the message says what to copy instead.
        """
        raise TypeError(
            "capture: a captured step is a program of this process, which can be neither copied nor pickled: copy the step "
            "that was captured (captured.step), and capture that again"
        )

    def _run(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info]:
        """Copy the arguments into the static buffers, replay, and collect the results."""
        self._program.modes.check()
        if self._data is not None:
            if batch is not self._data:
                raise ValueError(
                    f"capture: the step takes its batches from {self._data!r}, and was given {short(batch)}; give it that one, "
                    "which knows the position, or capture again"
                )
            batch = rows_ahead(self._data, self._program.body.steps)
        inputs = self._inputs_of(batch)  # before parameters are copied in, so that a refused batch changes nothing
        body = self._program.body
        body.params.copy_in(params, "params")
        body.state.copy_in(state, "state")
        info = body.info(self._program.replay(inputs))
        if self._data is not None:
            self._data.skip(body.steps)
        return body.params.as_tree(), body.state.as_tree(), info

    def _inputs_of(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch, and choose the program for its shape, which is recorded when it comes first.

        Raises:
            ValueError: the batch differs in more than lengths, or ``signatures`` shapes were recorded.
        """
        body = self._program.body
        try:
            return body.batch.tensors_of(batch)
        except ValueError:
            for program in self._programs:
                with suppress(ValueError):
                    inputs = program.body.batch.tensors_of(batch)
                    program.modes.check()
                    self._program = program
                    return inputs
            if len(self._programs) >= self._signatures:
                raise
        body.batch.checked(batch, lengths=False)
        self._program = self._record(body.with_batch(batch))
        self._programs.append(self._program)
        return self._program.body.batch.tensors_of(batch)


def rows_ahead(data: Epochs, steps: int) -> Tensor:
    """Return the row numbers of the next batch; with ``steps > 1``, of the next batches, stacked on axis 0."""
    numbers = data.ahead(steps)
    return (numbers[0] if steps == 1 else torch.stack(numbers)).to(data.leaves[0].device if data.leaves else None)
