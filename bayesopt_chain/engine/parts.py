"""What a link says of itself so that an engine may act in its place: the part that it plays in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Decays(NamedTuple):
    """``g <- +-g + weight_decay (theta - centre)``, where ``centre`` is a field of the link's state, or 0 without a name."""

    weight_decay: float
    flips: bool = False
    centre: str = ""


class Accumulates(NamedTuple):
    """``v <- momentum v + g``, and ``v`` or (Nesterov) ``g + momentum v`` goes on; the state has ``v`` as its ``trace``."""

    momentum: float
    nesterov: bool = False


class Scales(NamedTuple):
    """``u <- sign step_size g``, with a number, a tensor or a schedule, whose counts are the field ``count`` of the state."""

    step_size: Any
    sign: int


class Learns(NamedTuple):
    """``v <- square_decay v + (1 - square_decay) g^2`` of clean gradients, and a quotient.

    The divisor is ``d = (v / c_2 + eps_root)^(1/2) + eps``. The noise enters behind the learning, times ``d^(1/2)``.
    The quotient is ``g / d``, or with a ``momentum`` ``m / c_1 / d`` of a first moment ``m <- momentum m + (1 - momentum) g``.
    The state has ``v`` as its ``nu``, ``m`` as its ``mu``, and the number of updates of each leaf as its ``count`` if needed.

    Attributes:
        corrections: functions of the count after this update, which give ``c_1`` and ``c_2``, 0-d; empty if both are 1.
        freeze_after: the number of updates after which ``v`` stays as it is.
    """

    square_decay: float
    eps: float
    eps_root: float = 0.0
    momentum: float | None = None
    corrections: tuple[Callable[[Tensor], Tensor], ...] = ()
    freeze_after: int | None = None

    @property
    def counts(self) -> bool:
        """Whether the state counts updates."""
        return bool(self.corrections) or self.freeze_after is not None


Part = Decays | Accumulates | Learns | Scales
