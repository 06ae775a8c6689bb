"""A captured step as its caller sees it: it replays the recorded program, and refuses calls that a replay would get wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from bayesopt_chain.loop.capture.buffers import Body, Steps
from bayesopt_chain.loop.capture.errors import CaptureError
from bayesopt_chain.loop.capture.modes import Modes
from bayesopt_chain.loop.loss import Info

Backend = Literal["cuda", "inductor", "eager"]


class Captured:
    """A captured step; made by :func:`capture` and called like the step.

    All calls share one set of static buffers. With ``clone=True`` every call returns copies, and calls from several threads
    wait for each other. Without, the buffers themselves are returned, and a call from another thread would change them in the
    hands of the first; so the step belongs to the first thread that calls it, as long as that thread lives.

    Attributes:
        backend: ``"cuda"``, ``"inductor"`` or ``"eager"``.
    """

    def __init__(
        self,
        body: Body,
        replay: Callable[[list[Tensor]], Sequence[Tensor]],
        backend: Backend,
        clone: bool,
        modes: Modes,
    ) -> None:
        self.backend: Backend = backend
        self._body = body
        self._replay = replay
        self._clone = clone
        self._modes = modes
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None  # whose call is running or, without clone, whose step this is

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info | Steps]:
        """Replay the step.

        Args:
            params, state: of the structure, shapes, dtypes and devices that were captured; copied into the static buffers
                unless they are what the last call returned.
            batch: likewise.

        Returns:
            ``(params, state, info)``. Parameters and state alias the static buffers, which the next call overwrites, unless
            ``clone`` was asked for; the info is the call's own.

        Raises:
            CaptureError: a module's mode is another than when the step was captured; a call from within a call or, without
                ``clone``, from a second thread.
            ValueError: another structure, shape, dtype or device.
        """
        thread = threading.current_thread()
        if self._owner is not thread:
            self._refuse_a_second(thread)
        if not self._lock.acquire(blocking=self._clone and self._owner is not thread):
            raise CaptureError("capture: the step is called from within a call of itself; capture one step for each")
        try:
            self._owner = thread
            return self._run(params, state, batch)
        finally:
            if self._clone:
                self._owner = None
            self._lock.release()

    def _refuse_a_second(self, thread: threading.Thread) -> None:
        owner = self._owner
        if not self._clone and owner is not None and owner.is_alive():
            raise CaptureError(
                f"capture: this step returns its static buffers, and thread {owner.name!r} holds them; the call comes from "
                f"{thread.name!r}. Capture one step for each thread, or capture with clone=True, for calls that take turns"
            )

    def _run(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Info | Steps]:
        self._modes.check()
        body = self._body
        inputs = body.batch.tensors_of(batch)
        body.params.copy_in(params, "params")
        body.state.copy_in(state, "state")
        info = body.info(self._replay(inputs))
        made: Any = (body.params.as_tree(), body.state.as_tree())
        if self._clone:
            made = optree.tree_map(torch.clone, made)
        return *made, info
