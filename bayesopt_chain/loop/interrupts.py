"""Hold back Ctrl-C while a step overwrites parameters and state, so that no step is left half written."""

from __future__ import annotations

# the module signal wraps these functions, and converts to enumerations, which takes ten times as long as the calls
import _signal as signal  # pyright: ignore[reportMissingImports]
import threading
from types import FrameType
from typing import Any


class uninterrupted:
    """Hold back ``SIGINT`` (Ctrl-C) until the block ends, and then call the handler that was in place before.

    Python runs signal handlers in the main thread only. In other threads, and where the signal has no Python handler, this
    block does nothing. It is meant for short work, since Ctrl-C waits for the end of the block. Entering and leaving takes
    about 1 microsecond.

    Example:
        >>> with uninterrupted():
        ...     pass  # write
    """

    __slots__ = ("came", "old")  # the arguments of the handler if the signal came, and the handler from before

    def __enter__(self) -> None:
        self.old: Any = None
        self.came: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self.old = signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = number, frame

    def __exit__(self, *error: object) -> None:
        if self.old is not None:
            signal.signal(signal.SIGINT, self.old)
            if self.came is not None:
                self.old(*self.came)
