"""Ctrl-C during a run: the first one ends it after the step under way, a second one ends that step, none ends a commit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """The handler of ``SIGINT`` while a run makes its steps and commits its draws.

    Attributes:
        asked: whether Ctrl-C came.
        raises: whether a second one raises ``KeyboardInterrupt``: while code runs that may take long and that commits nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self.raises = False

    def handle(self, number: int, frame: Any) -> None:
        """Take note; raise if asked before, once."""
        if self.asked and self.raises:
            self.raises = False  # what is rescued now is not to be interrupted
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def interrupts() -> Iterator[Interrupts]:
    """Handle ``SIGINT`` until the block ends; only the main thread gets signals."""
    out = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield out
        return
    before = signal.signal(signal.SIGINT, out.handle)
    try:
        yield out
    finally:
        out.raises = False
        signal.signal(signal.SIGINT, before)
