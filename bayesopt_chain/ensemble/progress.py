"""One progress bar for all stages, whose total is what the plan foresees."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


class Progress:
    """A callback of runs that counts their steps; without tqdm, or turned off, it does nothing."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.bar: Any = None
        if shown:
            with suppress(ImportError):
                from tqdm.auto import tqdm

                self.bar = tqdm(total=steps, unit="step")

    def stage(self, name: str) -> None:
        """Say which stage is under way."""
        if self.bar is not None:
            self.bar.set_description(name)

    def __call__(self, it: Any) -> None:
        """Count a step."""
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()
