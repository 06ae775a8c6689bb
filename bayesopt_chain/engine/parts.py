"""What a link says of itself so that an engine may act in its place: the part that it plays in a step."""

from __future__ import annotations

from typing import Any, NamedTuple


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


Part = Decays | Accumulates | Scales
