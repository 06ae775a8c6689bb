"""A transform as the laws see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Order:
    """Bias of order ``slope`` in the step that ``probe`` takes, fitted over ``steps``.

    ``in_time`` says that the step is a time, whose square is a learning rate.
    """

    slope: float
    probe: Callable[[float], Any]
    steps: tuple[float, ...]
    degree: int = 16
    in_time: bool = False


@dataclass(frozen=True)
class Transform:
    """One row of the registry.

    ``name`` begins with the public name in ``namespace``, up to the first comma. ``build(temperature)`` makes the transform,
    dressed as one that asks for nothing but gradients. ``limit`` makes the optimizer it is at T = 0, and
    ``cold(temperature)`` the transform that has this limit, where ``build`` freezes a preconditioner in between.
    ``power`` is that of the temperature with which it departs from the limit. ``skip`` names the laws that cannot hold, with
    the reason; the tests require that they do fail. ``settings`` draws arguments of TorchOpt's function with this name, to
    compare with it.
    """

    name: str
    build: Callable[[Any], Any]
    limit: Callable[[], Any] | None = None
    order: Order | None = None
    cold: Callable[[Any], Any] | None = None
    power: float | None = 0.5
    skip: tuple[str, ...] = ()
    why: str = ""
    namespace: str = ""
    settings: st.SearchStrategy | None = None

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}" if self.namespace else self.name

    @property
    def function(self) -> str:
        """The public name of what makes it."""
        return self.name.split(",")[0]
