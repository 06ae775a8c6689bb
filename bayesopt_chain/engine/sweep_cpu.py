r"""One step of a run of links on a CPU: draws and a single pass over memory, with the bits of the links one by one.

For every element, where each operation is rounded by itself except the two of torch's ``add(..., alpha=)``, which rounds once:

    x = +-g (+ decay (theta - centre))
    q <- square_decay q + square_gain x^2, or q;   d = (q / c_2 + eps_root)^(1/2) + eps
    n = head (current xi + previous m) d^(1/2);    x <- x + n;   m <- xi, or current xi, or m
    v = mu (scale s) + x;                          y = v, or x + mu v (Nesterov), or x (no momentum);   s <- v + deferred n
    u = f y, or theta + f y

Where nothing learns there is no ``d``. Elsewhere ``x`` is divided by it in front of the velocity, or, for Adam, the velocity
``v = mu (scale s) + gain x`` behind it, ``y = v / c_1 / d``.

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
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from struct import Struct
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.random import compiled

_SOURCE = Path(__file__).with_suffix(".cpp")
MOVES, DECAYS, FLIPS, ADDS, DRAWS, NESTEROV, DIVIDES, MOMENT = (2**k for k in range(8))
# elements below which threads cost more than they save, with draws and without
PARALLEL = {True: 2**15, False: 2**17}

# ``Job`` of the source is an array of addresses (0 for none) and integers: sizes, chains, draws; the lengths of the lists p, c,
# key, s, q, m, counts, step, conditions and g; the addresses in these lists, and of what replaces those from s on.
# ``Numbers`` of the source: a move, the temperature, and addresses (0 for none) and integers: rule, rates, live, stride, first,
# length, learned, learned_stride, root
numbers_of = Struct("10d9q").pack


class Sweep(NamedTuple):
    """The functions of the library.

    Attributes:
        sweep: for each dtype, a function of the address of a job, of what :data:`numbers_of` packed, of flags and of
            the number of threads, which checks nothing. It returns 1, with nothing done, where the counters of the leaves
            differ or have no rate in the table; 0 elsewhere.
        rounds_alike: whether its ``a + k b`` has the bits of torch's.
        roots: for each dtype the address of the function that takes roots, 0 for that of C++; ``None`` if it is not as torch's.
    """

    sweep: dict[torch.dtype, Callable[[int, bytes, int, int], int]]
    rounds_alike: bool
    roots: dict[torch.dtype, int | None]


def addresses(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of contiguous tensors, -1 for a missing one; that of a tensor without elements is 0."""
    if NoneType in map(type, tensors):
        return [-1 if x is None else x.data_ptr() for x in tensors]
    return [*map(Tensor.data_ptr, tensors)]  # pyright: ignore[reportArgumentType]


def pointers(tensors: Sequence[Tensor]) -> array[int]:
    """The addresses of contiguous tensors as an array that the kernels take."""
    return array("q", addresses(tensors))  # of a list, which takes half the time of an iterator


def address(numbers: array[Any] | None) -> int:
    """Where an array lies, 0 for none; it has to live, and to keep its length, as long as a kernel reads it."""
    return 0 if numbers is None else numbers.buffer_info()[0]


@cache
def sweep_kernel() -> Sweep | None:
    """The library, or ``None`` where nothing compiles; then the links act one by one, more slowly."""
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):
        return None
    sweeps: dict[torch.dtype, Any] = {torch.float32: library.sweep_float, torch.float64: library.sweep_double}
    for kernel in sweeps.values():
        kernel.restype = ctypes.c_int
        kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    roots = {torch.float32: library.roots_float, torch.float64: library.roots_double}
    found = {dtype: _root_of(dtype, function) for dtype, function in roots.items()}
    return Sweep(sweeps, bool(library.fuses()) == _torch_fuses(), found)


def _torch_fuses() -> bool | None:
    """Whether torch rounds ``add`` with alpha and ``addcmul`` once; ``None`` if only for some elements."""
    one = 1.0 + 2.0**-12  # the square, 1 + 2^-11 + 2^-24, loses its last part where it is rounded
    x, less = torch.tensor([[one] * 37, [-(1.0 + 2.0**-11)] * 37], dtype=torch.float32, device="cpu")
    found = {*torch.cat([less.add(x, alpha=one), less.addcmul(x, x)]).bool().tolist()}
    return found.pop() if len(found) == 1 else None


def _root_of(dtype: torch.dtype, roots: Any) -> int | None:
    """The address of the function by which torch takes roots, 0 for that of C++; ``None`` if it has other bits than torch's.

    Torch takes them by MKL, whose root is not always the nearest number, and which is a part of torch's own library.

    Args:
        dtype: of the numbers.
        roots: the kernel's loop over roots.
    """
    names = {torch.float32: "vmsSqrt", torch.float64: "vmdSqrt"}
    roots.restype, roots.argtypes = None, [ctypes.c_int64, *[ctypes.c_void_p] * 3]
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        mkl = ctypes.cast(getattr(library, names[dtype]), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        mkl = 0
    x = torch.linspace(0.0, 4.0, 4099, dtype=dtype, device="cpu")
    y = torch.empty_like(x)
    roots(len(x), x.data_ptr(), y.data_ptr(), mkl)
    return mkl if torch.equal(y, x.sqrt()) else None
