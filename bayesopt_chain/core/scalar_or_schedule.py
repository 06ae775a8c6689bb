"""A hyperparameter: a number, a 0-d tensor that is read at every update, or a schedule of the update count.

Counts are 0-d int64 tensors, one for each leaf as in TorchOpt (a leaf without a gradient does not age). What depends on a
count is computed once for all leaves that are known to have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from bayesopt_chain.tracing import is_readable

ScalarOrSchedule = float | Tensor | Callable[[Tensor], Any]


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a Python number, which never changes."""
    return isinstance(value, (int, float))


def is_zero(value: Any) -> bool:
    """Whether it is the Python number 0."""
    return is_number(value) and value == 0


def is_schedule(value: Any) -> TypeGuard[Callable[[Tensor], Any]]:
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


def by_count(fn: Callable[[Tensor], Any], counts: Sequence[Tensor]) -> list[Any]:
    """``fn`` of every counter, computed once for those known to be equal."""
    values: dict[Any, Any] = {}
    keys = [(c.device, c.item()) if is_readable(c) else id(c) for c in counts]
    for key, c in zip(keys, counts):
        if key not in values:
            values[key] = fn(c)
    return [values[key] for key in keys]
