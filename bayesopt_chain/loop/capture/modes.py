"""Check that modules are in the mode (train or eval) in which a step was recorded, since a replay cannot change its mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bayesopt_chain.loop.capture.errors import CaptureError

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
