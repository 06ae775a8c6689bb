"""The arithmetic behind a draw as one C++ pass over many leaves on a CPU, with the bits of tensor operations.

For every element, ``e`` being the noise of this step, each operation rounded by itself:

    v = mu s + g,            u = f v,    s <- v                   momentum and a constant factor behind it
    v = mu s + (g + e),      u = f v,    s <- v + deferred e      with noise, a part of which the next step adds
    x = g + (e + m),         u = f x,    m <- e                   no momentum: the noise remembers its draw

and ``theta + u`` in the place of ``u`` if asked. With tensor operations every one of these is a pass over memory and a call
for each leaf; here all leaves are one call. Results may be written over ``g`` and ``s`` or into new tensors.
The kernel came with the wheel, or is compiled at its first use and kept (:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from bayesopt_chain.random import compiled
from bayesopt_chain.random.stream import Span

_SOURCE = Path(__file__).with_suffix(".cpp")
_PARALLEL = 2**17  # elements below which threads cost more than they save
Sweep = Callable[..., None]
Pointers = ctypes.Array[ctypes.c_void_p]


def pointers(tensors: Sequence[Tensor], span: Span | None = None) -> Pointers:
    """The addresses of contiguous tensors, or of the pieces that lie in a span, as an array that the kernel takes."""
    if span is None or (len(span.leaves) == len(tensors) and not any(span.starts)):
        return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))
    step = tensors[0].element_size()
    places = [tensors[i].data_ptr() + step * a for i, a in zip(span.leaves, span.starts)]
    return (ctypes.c_void_p * len(places))(*places)


@cache
def sweep_kernel() -> Sweep | None:
    """``sweep(dtype, sizes, g, s, u, t, f, mu, e, deferred, onto)``, or ``None`` where nothing compiles.

    ``g``, ``s``, ``u``, ``t`` are :func:`pointers` to contiguous tensors of one dtype, float32 or float64, and of these sizes,
    ``u`` and ``t`` are written, and may be ``g`` and ``s`` themselves; ``e`` is ``None`` or one tensor, leaf behind leaf. Where
    ``mu`` is ``None``, ``s`` is the draw that the noise remembers. With pointers ``onto`` parameters, their sums with the
    updates are written to ``u``, which may be the parameters themselves.
    """
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):  # tensor operations do the same, more slowly
        return None
    kernels = {torch.float32: library.sweep_float, torch.float64: library.sweep_double}
    integer, pointer, real, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_int
    for kernel in kernels.values():
        kernel.restype = None
        kernel.argtypes = [integer, *[pointer] * 7, small, real, real, real, small]

    @cache
    def integers(sizes: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
        return (integer * len(sizes))(*sizes), sum(sizes)

    def sweep(
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        g: Pointers,
        s: Pointers,
        u: Pointers,
        t: Pointers,
        f: float,
        mu: float | None,
        e: Tensor | None = None,
        deferred: float = 0.0,
        onto: Pointers | None = None,
    ) -> None:
        numbers, total = integers(sizes)
        noise = None if e is None else e.data_ptr()
        threads = torch.get_num_threads() if total > _PARALLEL else 1
        kernels[dtype](len(sizes), numbers, onto, g, s, noise, u, t, mu is not None, mu or 0.0, f, deferred, threads)

    return sweep
