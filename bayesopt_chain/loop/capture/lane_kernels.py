"""Copy leaves of many chains between two memory layouts, by C++ kernels.

A leaf has the shape ``[chains, ...]``. In its own layout the numbers of one chain are contiguous. In the layout called *lanes*
it has the same shape, and the axis of the chains is last in memory, so that the same number of neighbouring chains is
contiguous, and a vector instruction can compute several chains at once.
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
from bayesopt_chain.random.compiled import require_memory

_SOURCE = Path(__file__).with_suffix(".cpp")
_CPU = torch.device("cpu")
_pointer, _integer, _small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class _Leaf(ctypes.Structure):
    """The struct ``Leaf`` of the kernels: one leaf in both layouts."""

    _fields_ = [("own", _pointer), ("lanes", _pointer), *[(name, _integer) for name in ("stride", "size", "bytes")]]


class _Gather(ctypes.Structure):
    """The struct ``Gather`` of the kernels: a table, row numbers, and the leaf in lanes for the result."""

    _fields_ = [
        *[(name, _pointer) for name in ("table", "rows", "lanes")],
        *[(name, _integer) for name in ("length", "size", "bytes", "count", "total")],
    ]


@cache
def library() -> Any | None:
    """Compile and load the kernels once; ``None`` if that fails."""
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
    """Allocate a leaf in lanes, with the dtype of ``x`` and its shape for ``n`` chains."""
    return x.new_empty((*x.shape[1:], n)).movedim(-1, 0)


class Move:
    """Copies blocks of chains between leaves in their own layout and leaves in lanes.

    Args:
        own: leaves of all chains, ``[chains, ...]`` with the numbers of a chain contiguous.
        lanes: leaves of one block of chains, in lanes.

    The addresses of all tensors are read here once, so that they must not change.
    """

    def __init__(self, own: Sequence[Tensor], lanes: Sequence[Tensor]) -> None:
        self.own, self.lanes = list(own), list(lanes)
        of_lanes = {
            f"leaf {i} in lanes": (y.movedim(0, -1), x.dtype, x[0].numel() * len(y))
            for i, (x, y) in enumerate(zip(own, lanes, strict=True))
        }
        require_memory("lanes", _CPU, of_lanes)
        for i, x in enumerate(own):  # one by one, since a batch may hold one tensor twice
            require_memory("lanes", _CPU, {f"a chain of leaf {i}": (x[0], x.dtype, x[0].numel())})
        rows = [
            _Leaf(x.data_ptr(), y.data_ptr(), x.stride(0), x[0].numel(), x.element_size()) for x, y in zip(own, lanes)
        ]
        self.leaves, self.n = (_Leaf * len(rows))(*rows), len(rows)
        self.chains, self.all = (len(lanes[0]), min(map(len, own))) if rows else (0, 0)
        self.large = sum([x.numel() for x in lanes]) > _PARALLEL
        self.kernels: Any = library()

    def load(self, start: int) -> None:
        """Copy the block of chains that begins at chain ``start`` into the lanes."""
        if self.n:
            _require_block(start, self.chains, self.all)
            self.kernels.load_lanes(self.leaves, self.n, start, self.chains, _threads(self.large))

    def store(self, start: int, skip: int) -> None:
        """Copy the lanes back to the block of chains that begins at ``start``, except to its first ``skip`` chains."""
        if self.n:
            _require_block(start, self.chains, self.all)
            self.kernels.store_lanes(self.leaves, self.n, start, skip, self.chains, _threads(self.large))


class Rows:
    """The row numbers that each chain reads from a table, in lanes.

    Attributes:
        lanes: the numbers, int32 ``[..., chains]``.
        low, high: the smallest and the largest number.
    """

    def __init__(self, like: Tensor) -> None:
        self.lanes = torch.empty((*like.shape[1:], len(like)), dtype=torch.int32, device="cpu")
        self.low = self.high = 0

    def read(self, rows: Tensor) -> None:
        """Read the numbers from a tensor ``[chains, ...]`` of int32 or int64."""
        # the kernel reads contiguous numbers of each chain, and any stride between chains
        rows, kernels = rows if rows[0].is_contiguous() else rows.contiguous(), library()
        wanted = (self.lanes.shape[-1], *self.lanes.shape[:-1])
        if rows.shape != wanted or rows.dtype not in (torch.int32, torch.int64) or not rows.is_cpu:
            raise ValueError(
                f"lanes: row numbers must be int32 or int64 of shape {tuple(wanted)} on the CPU, got {rows.dtype} of shape "
                f"{tuple(rows.shape)} on {rows.device}"
            )
        given = (_integer * 2)(0, 0)
        wide, (size, stride) = rows.dtype == torch.int64, (rows[0].numel(), rows.stride(0))
        threads = _threads(rows.numel() > _PARALLEL)
        where = self.lanes.data_ptr()
        kernels.number_lanes(rows.data_ptr(), wide, where, stride, size, len(rows), given, threads)  # pyright: ignore[reportOptionalMemberAccess]
        self.low, self.high = given


class Gather:
    """Computes ``table[rows]`` for a block of chains, and writes it into ``lanes``."""

    def __init__(self, lanes: Tensor) -> None:
        self.lanes = lanes
        self.kernels: Any = library()

    def of(self, table: Tensor, rows: Rows) -> Callable[[int], None]:
        """Make a function that gathers from a table for one block.

        Returns:
            A function of the number of the first chain of the block.

        Raises:
            IndexError: a row number is out of range for the table.
        """
        table, length = table.contiguous(), len(table)
        if rows.low < -length or rows.high >= length:  # negative numbers count from the end, as in torch
            wrong = rows.low if rows.low < -length else rows.high
            raise IndexError(f"capture: row {wrong} of the batch is out of range for a table of {length} rows")
        block = {"table": (table, self.lanes.dtype, table.numel())}
        elements = len(self.lanes) * (rows.lanes.numel() // rows.lanes.shape[-1]) * table[0].numel()
        block["result"] = (self.lanes.movedim(0, -1), self.lanes.dtype, elements)
        require_memory("lanes", _CPU, block)
        addresses = (table.data_ptr(), rows.lanes.data_ptr(), self.lanes.data_ptr())
        size, total = table[0].numel(), rows.lanes.shape[-1]
        entry = _Gather(*addresses, length, size, table.element_size(), rows.lanes.numel() // total, total)
        chains, threads = len(self.lanes), _threads(self.lanes.numel() > _PARALLEL)

        # the default keeps both tensors alive, whose addresses are in ``entry``
        def gather(start: int, kept: tuple[Tensor, Rows] = (table, rows)) -> None:
            _require_block(start, chains, total)
            self.kernels.gather_lanes(ctypes.byref(entry), 1, start, chains, threads)

        return gather


_PARALLEL = 2**13  # number of elements up to which one thread is faster than several


def _require_block(start: int, chains: int, total: int) -> None:
    """Refuse a block that reaches beyond the chains."""
    if not 0 <= start <= total - chains:
        raise ValueError(f"lanes: chains {start} to {start + chains} are not among {total}")


def _threads(large: bool) -> int:
    """Return the number of threads for a copy."""
    return torch.get_num_threads() if large else 1
