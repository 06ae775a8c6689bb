"""Run the kernels of a compiled step for blocks of chains, and copy leaves of chains between two memory layouts, in C++.

A leaf has the shape ``[chains, ...]``. In its own layout the numbers of one chain are contiguous. In the layout called *lanes*
it has the same shape, and the axis of the chains is last in memory, so that the same number of neighbouring chains is
contiguous, and a vector instruction can compute several chains at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
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


def _struct(name: str, pointers: str, integers: str = "") -> Any:
    """A struct of the kernels: its fields that are addresses, then those that are integers of 64 bits."""
    fields = [*[(field, _pointer) for field in pointers.split()], *[(field, _integer) for field in integers.split()]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


# of the same names in the source, which says what the fields are
Leaf = _struct("Leaf", "own", "stride size bytes next")
Table = _struct("Gather", "table rows", "length size bytes count total")
Kernel = _struct("Kernel", "at", "arguments")
Thread = _struct("Thread", "chains batch tables report arguments")
Given = _struct("Given", "batch tables shared")
_COUNTS = "n_chains n_report n_batch n_tables n_kernels n_shared n_given all block"
Plan = _struct("Plan", "chains report kernels shared", _COUNTS)


@cache
def library() -> Any | None:
    """Compile and load the kernels once; ``None`` if that fails."""
    try:
        found = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    found.run_blocks.argtypes = [_pointer, _pointer, _pointer, _integer, _integer, _small, ctypes.c_char_p]
    found.number_lanes.argtypes = [_pointer, _small, _pointer, _integer, _integer, _integer, _pointer, _small]
    return found


def in_lanes(x: Tensor, n: int) -> Tensor:
    """Allocate a leaf in lanes, with the dtype of ``x`` and its shape for ``n`` chains."""
    return x.new_empty((*x.shape[1:], n)).movedim(-1, 0)


def addresses(xs: Sequence[Tensor]) -> Any:
    """An array of the addresses of tensors."""
    return (_pointer * len(xs))(*map(Tensor.data_ptr, xs))


def array(kind: Any, entries: Sequence[Any]) -> Any:
    """An array of structs."""
    return (kind * len(entries))(*entries)


def leaves(own: Sequence[Tensor], lanes: Sequence[Tensor]) -> Any:
    """Describe leaves of all chains, ``[chains, ...]`` with the numbers of a chain contiguous, to be copied to and from lanes.

    Args:
        own: the leaves.
        lanes: those of one block of chains, in lanes.

    Raises:
        ValueError: memory that the kernels could not copy.
    """
    of_lanes = {
        f"leaf {i} in lanes": (y.movedim(0, -1), x.dtype, x[0].numel() * len(y))
        for i, (x, y) in enumerate(zip(own, lanes, strict=True))
    }
    require_memory("lanes", _CPU, of_lanes)
    for i, x in enumerate(own):  # one by one, since a batch may hold one tensor twice
        require_memory("lanes", _CPU, {f"a chain of leaf {i}": (x[0], x.dtype, x[0].numel())})
    return array(Leaf, [Leaf(x.data_ptr(), x.stride(0), x[0].numel(), x.element_size(), 0) for x in own])


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
        threads = torch.get_num_threads() if rows.numel() > _PARALLEL else 1
        where = self.lanes.data_ptr()
        kernels.number_lanes(rows.data_ptr(), wide, where, stride, size, len(rows), given, threads)  # pyright: ignore[reportOptionalMemberAccess]
        self.low, self.high = given


def gather(table: Tensor, rows: Rows, lanes: Tensor) -> Any:
    """Describe ``table[rows]``, to be written into lanes.

    Args:
        table: contiguous.
        rows: the row numbers of all chains.
        lanes: the leaf in lanes of one block of chains.

    Raises:
        IndexError: a row number is out of range for the table.
        ValueError: memory that the kernel could not read or write.
    """
    length = len(table)
    if rows.low < -length or rows.high >= length:  # negative numbers count from the end, as in torch
        wrong = rows.low if rows.low < -length else rows.high
        raise IndexError(f"capture: row {wrong} of the batch is out of range for a table of {length} rows")
    size, total = table[0].numel(), rows.lanes.shape[-1]
    count = rows.lanes.numel() // total
    block = {"table": (table, lanes.dtype, table.numel())}
    block["result"] = (lanes.movedim(0, -1), lanes.dtype, len(lanes) * count * size)
    require_memory("lanes", _CPU, block)
    return Table(table.data_ptr(), rows.lanes.data_ptr(), length, size, table.element_size(), count, total)


_PARALLEL = 2**13  # number of elements up to which one thread is faster than several
