"""Refuses matrices that cannot fit into memory before they are allocated.

dense 8 P^2 bytes in float64 (4 P^2 in float32);   low_rank (rank + 1) P;   diagonal P
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

SMALL = 2**26  # bytes; for a factor that needs less the free memory is not looked up, which takes time


def available_bytes(device: torch.device) -> float:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_of_machine(), _of_group())


def _of_machine() -> int:
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_group() -> float:
    """Return what the control group of a container still allows, infinity without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return math.inf if limit == "max" else int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return math.inf


def require_dense_fits(parameters: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``MemoryError`` unless two ``[P, P]`` matrices (the sum and its Cholesky factor) fit."""
    item = dtype.itemsize
    needed, free = 2 * parameters**2 * item, available_bytes(device)
    if needed <= free:
        return
    fitting = [
        f"structure={name!r} ({_readable(numbers * item)})"
        for name, numbers in (("low_rank", 11 * parameters), ("diagonal", parameters))
        if numbers * item <= free
    ]
    raise MemoryError(
        f"a dense precision over {parameters:,} parameters and its factor need {_readable(needed)}, {device} has "
        f"{_readable(free)} free: use {' or '.join(fitting)} or 'kronecker', or curvature.subset for fewer parameters"
    )


def require_factor_fits(name: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``MemoryError`` unless a Kronecker factor of the named parameter and its decomposition fit.

    Held at once are the factor, its eigenvectors and a workspace of twice its size.
    """
    needed = 4 * rows * columns * dtype.itemsize
    if needed > SMALL and needed > (free := available_bytes(device)):
        raise MemoryError(
            f"a Kronecker precision needs {_readable(needed)} for a factor [{rows:,}, {columns:,}] of the parameter "
            f"{name} and its decomposition, {device} has {_readable(free)} free: leave the parameter out with "
            "curvature.subset, or use structure='diagonal' or 'low_rank'"
        )


def _readable(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
