r"""One step of a run of links on a CPU: draws and a single pass over memory, with the bits of the links one by one.

For every element, where each operation is rounded by itself except the two of torch's ``add(..., alpha=)``, which rounds once:

    x = +-g (+ decay (theta - centre))
    n = head (current xi + previous m);   x <- x + n;   m <- xi, or current xi, or m
    v = mu (scale s) + x;                 y = v, or x + mu v (Nesterov), or x (no momentum);   s <- v + deferred n
    u = f y, or theta + f y

``xi`` is drawn by Philox (:mod:`bayesopt_chain.random.philox`) in rows of 256 elements that stay in first-level cache. The
numbers of the step are :class:`bayesopt_chain.engine.engine.Move`. The library also computes these numbers for matched noise
under a schedule, in the arithmetic of :mod:`bayesopt_chain.matching.law`, and it counts the step.

With tensor operations every line is a pass over memory and a call for each leaf; here all leaves are one call. Results may be
written over ``g``, ``s``, ``m`` and ``theta``, or into new tensors. A leaf without a gradient is left as it is. Several chains
whose numbers are equal are one call too: all their tensors have the chains on axis 0, and each chain has its own key and step.
The kernel came with the wheel, or is compiled at its first use and kept (:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.random import compiled

_SOURCE = Path(__file__).with_suffix(".cpp")
MOVES, DECAYS, FLIPS, ADDS, DRAWS, NESTEROV, INPLACE = (2**k for k in range(7))
# elements below which threads cost more than they save, with draws and without
PARALLEL = {True: 2**15, False: 2**17}
Pointers = ctypes.Array[ctypes.c_int64]

# ``Job`` of the source, addresses of arrays (0 for none) and integers: leaves, sizes, p, g, s, m, c, u, t, w, numbers, stride,
# key, draws, step, counts, after, conditions, flags, threads, chains
Job: Any = ctypes.c_int64 * 21
NUMBERS, STRIDE, AFTER, FLAGS, THREADS = 10, 11, 16, 18, 19


class Sweep(NamedTuple):
    """The functions of the library.

    Attributes:
        sweep: for each dtype, a function of the address of a :data:`Job`; it checks nothing.
        numbers: the numbers of a step of matched noise under a schedule.
        fuses: whether its ``a + k b`` rounds once.
    """

    sweep: dict[torch.dtype, Callable[..., None]]
    numbers: Callable[..., None]
    fuses: bool


def pointers(tensors: Sequence[Tensor | None]) -> Pointers:
    """The addresses of contiguous tensors, 0 for a missing one, as an array that the kernels take."""
    if NoneType in map(type, tensors):
        return (ctypes.c_int64 * len(tensors))(*[0 if x is None else x.data_ptr() for x in tensors])
    return (ctypes.c_int64 * len(tensors))(*map(Tensor.data_ptr, tensors))  # pyright: ignore[reportArgumentType]


@cache
def sweep_kernel() -> Sweep | None:
    """The library, or ``None`` where nothing compiles; then the links act one by one, more slowly."""
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    sweeps: dict[torch.dtype, Any] = {torch.float32: library.sweep_float, torch.float64: library.sweep_double}
    for kernel in sweeps.values():
        kernel.restype, kernel.argtypes = None, [ctypes.c_void_p]
    integer, pointer, numbers = ctypes.c_int64, ctypes.c_void_p, library.numbers
    numbers.restype = None
    numbers.argtypes = [pointer, integer, pointer, pointer, integer, ctypes.c_double, pointer, pointer, pointer]
    return Sweep(sweeps, numbers, bool(library.fuses()))


@cache
def integers(values: tuple[int, ...]) -> Pointers:
    """The numbers as the kernel takes them, made once."""
    return (ctypes.c_int64 * len(values))(*values)
