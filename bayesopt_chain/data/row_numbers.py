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

_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def _library() -> Any | None:
    try:
        found = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    for kernel in (found.permutations, found.subsets):
        kernel.restype = None
        kernel.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_uint64] * 2, ctypes.c_int]
    return found


def available() -> bool:
    """Whether there is a kernel: where nothing compiles there is none."""
    return _library() is not None


def permutations(chains: int, n: int, wanted: int, number: int, seed: int) -> Tensor:
    """For each of so many chains the first ``wanted`` of permutation ``number`` of ``n`` rows: int32 ``[chains, wanted]``."""
    return _filled("permutations", chains, n, wanted, number, seed)


def subsets(chains: int, n: int, wanted: int, number: int, seed: int) -> Tensor:
    """For each of so many chains the first ``wanted`` different ones of its keys modulo ``n``: int32 ``[chains, wanted]``."""
    return _filled("subsets", chains, n, wanted, number, seed)


def _filled(kernel: str, chains: int, n: int, wanted: int, number: int, seed: int) -> Tensor:
    out, threads = torch.empty(chains, wanted, dtype=torch.int32), torch.get_num_threads() if chains > 64 else 1
    getattr(_library(), kernel)(out.data_ptr(), chains, n, wanted, number, seed & 2**64 - 1, threads)
    return out
