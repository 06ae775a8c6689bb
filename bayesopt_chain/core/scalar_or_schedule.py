"""A hyperparameter: a number, a 0-d tensor that is read at every update, or a schedule of the update count.

Counts are 0-d int64 tensors, one for each leaf as in TorchOpt (a leaf without a gradient does not age). What depends on a
count is computed once for all leaves that are known to have the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_plain

ScalarOrSchedule = float | Tensor | Callable[[Tensor], Any]


def is_number(value: Any) -> bool:
    """Whether it is a Python number, which never changes."""
    return isinstance(value, (int, float))


def is_zero(value: Any) -> bool:
    """Whether it is the Python number 0."""
    return isinstance(value, (int, float)) and value == 0


def is_schedule(value: Any) -> bool:
    """Whether it is a function of the count."""
    return callable(value) and not isinstance(value, Tensor)


def now(value: ScalarOrSchedule, count: Tensor) -> float | Tensor:
    """The value at a count: a number as it is, anything else 0-d, float64, on the count's device."""
    if isinstance(value, (int, float)):
        return float(value)
    return scalar(value if isinstance(value, Tensor) else value(count), count.device)


def root(value: Any) -> Any:
    """Square root of a number or a tensor."""
    return value.sqrt() if isinstance(value, Tensor) else value**0.5


def scalar(value: Any, device: torch.device) -> Tensor:
    """What a schedule returned, 0-d, float64; a number is filled in on the device, which a graph can record."""
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), float(value), dtype=torch.float64, device=device)


def require_valid(name: str, value: float | Tensor) -> None:
    """Refuse what cannot be a rate or a temperature, where reading it costs nothing; elsewhere it turns to NaN.

    Raises:
        ValueError: negative, NaN or infinite, not a scalar, or complex.
    """
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            raise ValueError(f"{name}: must be a real scalar, got shape {tuple(value.shape)}, {value.dtype}")
        if not readable(value):
            return
        value = value.item()
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name}: its value at this step is {value}, but it must be finite and not negative (the sign of the descent is "
            "scale_by_neg_lr's); nothing was changed"
        )


def new_counts(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A counter for each leaf, at zero."""
    return tuple([torch.zeros((), dtype=torch.int64, device=p.device) for p in leaves])


def by_count(fn: Callable[[Tensor], Any], counts: Sequence[Tensor]) -> list[Any]:
    """``fn`` of every counter, computed once for those known to be equal."""
    seen: dict[Hashable, Any] = {}
    out: list[Any] = []
    for c in counts:
        k = (c.device, c.item()) if readable(c) else id(c)
        if k not in seen:
            seen[k] = fn(c)
        out.append(seen[k])
    return out


def readable(t: Tensor) -> bool:
    """Whether reading the tensor's value costs nothing: on a CPU, outside transformations and compilation."""
    return t.device.type == "cpu" and is_plain(t)
