"""The row numbers of many chains by one C++ kernel: those of :mod:`bayesopt_chain.data.index_stream`, all of them equal.

5,000 chains that reshuffle 768 rows sort 5,000 times an epoch; a call of torch for each would take longer than their steps.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.random import compiled
from bayesopt_chain.random.compiled import require_memory

_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def _library() -> Any | None:
    try:
        found = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    for kernel, counts in ((found.permutations, 4), (found.subsets, 3)):
        kernel.restype = None
        kernel.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * counts, *[ctypes.c_uint64] * 2, ctypes.c_int]
    return found


def available() -> bool:
    """Whether there is a kernel: where nothing compiles there is none."""
    return _library() is not None


def permutations(
    chains: int, n: int, batches: int, size: int, number: int, seed: int, memory: Tensor | None = None
) -> Tensor:
    """For each of so many chains the first batches of permutation ``number`` of ``n`` rows: int32 ``[batches, chains, size]``.

    The numbers of one batch lie together, since a step reads those of all chains. They are written into ``memory``, if that
    has their shape: memory that is new every time would cost a fifth of the time in page faults.
    """
    shape = (batches, chains, size)
    out = (
        memory if memory is not None and memory.shape == shape else torch.empty(shape, dtype=torch.int32, device="cpu")
    )
    _fill("permutations", out, chains, n, batches, size, number, seed & 2**64 - 1)
    return out


def subsets(chains: int, n: int, wanted: int, number: int, seed: int) -> Tensor:
    """For each of so many chains the first ``wanted`` different ones of its keys modulo ``n``: int32 ``[chains, wanted]``."""
    out = torch.empty(chains, wanted, dtype=torch.int32, device="cpu")
    _fill("subsets", out, chains, n, wanted, number, seed & 2**64 - 1)
    return out


def _fill(kernel: str, out: Tensor, chains: int, n: int, *numbers: int) -> None:
    """Call a kernel with several threads if there are many chains.

    Raises:
        ValueError: more rows of a chain than there are, or memory of another kind.
    """
    if not out.numel() <= chains * n < chains * 2**31:
        raise ValueError(
            f"row_numbers: {out.numel() // max(1, chains)} of {n} rows cannot be had, nor those of 2^31 or more"
        )
    require_memory("row_numbers", torch.device("cpu"), {"memory": (out, torch.int32, out.numel())})
    getattr(_library(), kernel)(out.data_ptr(), chains, n, *numbers, torch.get_num_threads() if chains > 64 else 1)
