"""Leaves of many chains between their own layout and lanes, as C++ kernels.

In its own layout a leaf ``[chains, ...]`` has the numbers of a chain together. In lanes, of the same shape, the axis of the
chains is last in memory, so that those of neighbouring chains are together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.random import compiled

_SOURCE = Path(__file__).with_suffix(".cpp")
_pointer, _integer, _small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Leaf(ctypes.Structure):
    _fields_ = [("own", _pointer), ("lanes", _pointer), *[(name, _integer) for name in ("stride", "size", "bytes")]]


class _Gather(ctypes.Structure):
    _fields_ = [
        *[(name, _pointer) for name in ("table", "rows", "lanes")],
        *[(name, _integer) for name in ("length", "size", "bytes", "count", "total")],
    ]


@cache
def library() -> Any | None:
    """The kernels, or ``None`` where nothing compiles."""
    try:
        found = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    found.load_lanes.argtypes = [_pointer, _integer, _integer, _integer, _small]
    found.store_lanes.argtypes = [_pointer, _integer, _integer, _integer, _integer, _small]
    found.gather_lanes.argtypes = [_pointer, _integer, _integer, _integer, _small]
    found.number_lanes.argtypes = [_pointer, _small, _pointer, _integer, _integer, _integer, _pointer, _small]
    return found


def in_lanes(x: Tensor, n: int) -> Tensor:
    """Room for a leaf like ``x`` of ``n`` chains, in lanes."""
    return x.new_empty((*x.shape[1:], n)).movedim(-1, 0)


class Move:
    """Leaves of all chains, ``[chains, ...]`` with the numbers of a chain together, and those of a block of them, in lanes.

    The tensors are kept, and must keep their memory.
    """

    def __init__(self, own: Sequence[Tensor], lanes: Sequence[Tensor]) -> None:
        self.own, self.lanes = list(own), list(lanes)
        rows = [
            _Leaf(x.data_ptr(), y.data_ptr(), x.stride(0), x[0].numel(), x.element_size()) for x, y in zip(own, lanes)
        ]
        self.leaves, self.n = (_Leaf * len(rows))(*rows), len(rows)
        self.chains = len(lanes[0]) if rows else 0
        self.large = sum([x.numel() for x in lanes]) > _PARALLEL
        self.kernels: Any = library()

    def load(self, start: int) -> None:
        """Copy the chains from ``start`` on into the lanes."""
        if self.n:
            self.kernels.load_lanes(self.leaves, self.n, start, self.chains, _threads(self.large))

    def store(self, start: int, skip: int) -> None:
        """Copy the lanes back to the chains from ``start`` on, without the first ``skip`` of them."""
        if self.n:
            self.kernels.store_lanes(self.leaves, self.n, start, skip, self.chains, _threads(self.large))


class Rows:
    """Row numbers of each chain's own in lanes: int32, ``[..., chains]`` in memory.

    Attributes:
        lanes: the numbers.
        low, high: the least and the largest of them.
    """

    def __init__(self, like: Tensor) -> None:
        self.lanes = torch.empty((*like.shape[1:], len(like)), dtype=torch.int32)
        self.low = self.high = 0

    def read(self, rows: Tensor) -> None:
        """Take the numbers of a tensor ``[chains, ...]`` of int32 or int64."""
        rows, kernels = rows if rows[0].is_contiguous() else rows.contiguous(), library()
        given = (_integer * 2)(0, 0)
        wide, (size, stride) = rows.dtype == torch.int64, (rows[0].numel(), rows.stride(0))
        threads = _threads(rows.numel() > _PARALLEL)
        where = self.lanes.data_ptr()
        kernels.number_lanes(rows.data_ptr(), wide, where, stride, size, len(rows), given, threads)  # pyright: ignore[reportOptionalMemberAccess]
        self.low, self.high = given


class Gather:
    """``table[rows]`` for a block of chains, into ``lanes``."""

    def __init__(self, lanes: Tensor) -> None:
        self.lanes = lanes
        self.kernels: Any = library()

    def of(self, table: Tensor, rows: Rows) -> Callable[[int], None]:
        """What gathers from this table for the chains from a number on.

        Raises:
            IndexError: a row that the table does not have.
        """
        table, length = table.contiguous(), len(table)
        if rows.low < -length or rows.high >= length:
            wrong = rows.low if rows.low < -length else rows.high
            raise IndexError(f"capture: row {wrong} of the batch is out of range for a table of {length} rows")
        addresses = (table.data_ptr(), rows.lanes.data_ptr(), self.lanes.data_ptr())
        size, total = table[0].numel(), rows.lanes.shape[-1]
        entry = _Gather(*addresses, length, size, table.element_size(), rows.lanes.numel() // total, total)
        chains, threads = len(self.lanes), _threads(self.lanes.numel() > _PARALLEL)

        def gather(start: int, kept: tuple[Tensor, Rows] = (table, rows)) -> None:
            self.kernels.gather_lanes(ctypes.byref(entry), 1, start, chains, threads)

        return gather


_PARALLEL = 2**15  # elements below which threads cost more than they save


def _threads(large: bool) -> int:
    return torch.get_num_threads() if large else 1
