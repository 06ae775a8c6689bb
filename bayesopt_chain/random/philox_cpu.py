"""The normals of the Philox stream (:mod:`bayesopt_chain.random.philox`) on a CPU, as one C++ kernel.

Written as tensor operations Philox needs 64-bit words and over 200 passes; here 64 neighbouring blocks stay in registers and
first-level cache from counter to normal (the row ``noise`` of the benchmarks compares them). The integers are the stream's;
float32 logarithm, sine and cosine are polynomials good to a unit in the last place, so that the normals are within 1e-6 of
every other back end's; in float64 they are libm's. The kernel is compiled at the first draw and kept, or came with the wheel
(:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.random import compiled
from bayesopt_chain.random.compiled import integers, require_memory

_SOURCE = Path(__file__).with_suffix(".cpp")
_CPU = torch.device("cpu")
_PARALLEL = 2**15  # normals below which threads cost more than they save


@cache
def total_of(starts: tuple[int, ...], lengths: tuple[int, ...], draws: tuple[int, ...]) -> int:
    """The elements of all runs of a draw.

    Raises:
        ValueError: runs without a number of their draw, or negative ones.
    """
    if len(lengths) != len(draws) or len(starts) not in (0, len(lengths)) or min((*starts, *lengths), default=0) < 0:
        raise ValueError(f"philox: each run has a start, a length and a draw, got {starts}, {lengths} and {draws}")
    return sum(lengths)


class NormalsKernel:
    """The kernel: called with tensors it fills the first of them; bound to tensors it is a call to be made again and again.

    ``out`` is contiguous, float32 or float64, ``[..., sum(lengths)]``; ``keys`` and ``steps`` are int64, 0-d or one for each
    row of it. The rest are tuples with one entry a run, or no entries where all ``starts`` are 0.
    """

    def __init__(self, library: Any) -> None:
        self.kernels = {torch.float32: library.normals_float, torch.float64: library.normals_double}
        self.of_lanes = {torch.float32: library.lanes_float, torch.float64: library.lanes_double}
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        for kernel in self.kernels.values():
            kernel.restype = None
            kernel.argtypes = [
                *(pointer, pointer, integer, pointer, integer, integer),
                *(pointer, pointer, integer, pointer, integer),
            ]

    def __call__(
        self,
        out: Tensor,
        keys: Tensor,
        steps: Tensor,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        draws: tuple[int, ...],
    ) -> None:
        """Fill ``out``."""
        self.bound(out, keys, steps, starts, lengths, draws)()

    def bound(
        self,
        out: Tensor,
        keys: Tensor,
        steps: Tensor,
        starts: tuple[int, ...],
        lengths: tuple[int, ...],
        draws: tuple[int, ...],
    ) -> partial[None]:
        """The call, once its arguments fit each other; these very tensors have to stay where they are."""
        rows = out.shape[:-1].numel()
        dtype = out.dtype if out.dtype in self.kernels else torch.float32
        memory, shapes = {"out": (out, dtype, rows * total_of(starts, lengths, draws))}, ((), (rows,))
        require_memory("philox", _CPU, memory, keys=(keys, shapes), steps=(steps, shapes))
        keyed = keys.data_ptr(), keys.stride(0) if keys.ndim else 0
        stepped = steps.data_ptr(), steps.stride(0) if steps.ndim else 0
        runs = _address(starts), _address(lengths), len(lengths), _address(draws)
        threads = torch.get_num_threads() if out.numel() > _PARALLEL else 1
        return partial(self.kernels[dtype], out.data_ptr(), *keyed, *stepped, rows, *runs, threads)

    def in_lanes(
        self, out: Tensor, keys: Tensor, steps: Tensor, lengths: tuple[int, ...], draws: tuple[int, ...]
    ) -> partial[None]:
        """The call that fills these very tensors with whole leaves of many chains.

        ``out`` is ``[sum(lengths), chains]``: the same element of all chains lies together, for vector units.
        """
        dtype, chains = out.dtype if out.dtype in self.of_lanes else torch.float32, out.shape[-1]
        memory = {
            "out": (out, dtype, total_of((), lengths, draws) * chains),
            "keys": (keys, torch.int64, chains),
            "steps": (steps, torch.int64, chains),
        }
        require_memory("philox in lanes", _CPU, memory)
        where = out.data_ptr(), keys.data_ptr(), steps.data_ptr()
        return partial(self.of_lanes[dtype], *where, chains, _address(lengths), len(lengths), _address(draws))


def _address(numbers: tuple[int, ...]) -> int:
    return integers(numbers).buffer_info()[0]


@cache
def normals_kernel() -> NormalsKernel | None:
    """The kernel, or ``None``, with one warning that says why, where nothing compiles."""
    try:
        return NormalsKernel(compiled.load(_SOURCE))
    except (compiled.CompileError, OSError) as err:
        checks.warn(
            f"the Philox stream runs as tensor operations, about 14 times slower than its C++ kernel: {err}. "
            "Install g++ or clang, or set CXX"
        )
    return None
