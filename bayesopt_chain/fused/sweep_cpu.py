r"""The arithmetic behind a draw as one C++ pass over many leaves on a CPU, with the bits of tensor operations.

For every element, ``e`` being the noise of this step, each operation rounded by itself:

    v = mu s + g,            u = f v,    s <- v                   momentum and a constant factor behind it
    v = mu s + (g + e),      u = f v,    s <- v + deferred e      with noise, a part of which the next step adds
    x = g + (e + m),         u = f x,    m <- e                   no momentum: the noise remembers its draw

and ``theta <- theta + u`` in the same pass if asked. With tensor operations every one of these is a pass over memory and a
call for each leaf; here all leaves are one call. Results may be written over ``g`` and ``s`` or into new tensors.
Compiled at its first use and kept (:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from bayesopt_chain.random import compiled
from bayesopt_chain.random.stream import Span

_SOURCE = r"""
#include <cstdint>

namespace {

template <bool MOVES, class Real>
void put(Real& u, Real move) {
  if constexpr (MOVES)
    u += move;
  else
    u = move;
}

template <bool MOVES, class Real>
void without_noise(int64_t n, const Real* g, const Real* s, Real* u, Real* t, Real mu, Real f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real v = mu * s[j] + g[j];
    put<MOVES>(u[j], f * v);
    t[j] = v;
  }
}

template <bool MOVES, class Real>
void with_velocity(int64_t n, const Real* g, const Real* s, const Real* e, Real* u, Real* t, Real mu, Real f, Real deferred) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real v = mu * s[j] + (g[j] + e[j]);
    put<MOVES>(u[j], f * v);
    t[j] = v + deferred * e[j];
  }
}

template <bool MOVES, class Real>
void with_memory(int64_t n, const Real* g, const Real* m, const Real* e, Real* u, Real* t, Real f) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const Real noise = e[j];
    put<MOVES>(u[j], f * (g[j] + (noise + m[j])));
    t[j] = noise;
  }
}

template <bool MOVES, class Real>
void sweep(int64_t leaves, const int64_t* sizes, const Real** g, const Real** s, const Real* e, Real** u, Real** t,
           int velocity, double mu, double f, double deferred, int threads) {
  constexpr int64_t BLOCK = 1 << 14;
#pragma omp parallel num_threads(threads) firstprivate(e) if (threads > 1)
  for (int64_t i = 0; i < leaves; e += e ? sizes[i] : 0, ++i) {
    const int64_t blocks = (sizes[i] + BLOCK - 1) / BLOCK;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t a = b * BLOCK, n = sizes[i] - a < BLOCK ? sizes[i] - a : BLOCK;
      if (!e)
        without_noise<MOVES>(n, g[i] + a, s[i] + a, u[i] + a, t[i] + a, Real(mu), Real(f));
      else if (velocity)
        with_velocity<MOVES>(n, g[i] + a, s[i] + a, e + a, u[i] + a, t[i] + a, Real(mu), Real(f), Real(deferred));
      else
        with_memory<MOVES>(n, g[i] + a, s[i] + a, e + a, u[i] + a, t[i] + a, Real(f));
    }
  }
}

}  // namespace

#define EXPORT(name, Real)                                                                                          \
  extern "C" void name(int64_t leaves, const int64_t* sizes, const Real** g, const Real** s, const Real* e, Real** u, \
                       Real** t, int moves, int velocity, double mu, double f, double deferred, int threads) {       \
    (moves ? sweep<true, Real> : sweep<false, Real>)(leaves, sizes, g, s, e, u, t, velocity, mu, f, deferred, threads); \
  }
EXPORT(sweep_float, float)
EXPORT(sweep_double, double)
"""

_PARALLEL = 2**17  # elements below which threads cost more than they save
Sweep = Callable[..., None]
Pointers = ctypes.Array[ctypes.c_void_p]


def pointers(tensors: Sequence[Tensor], span: Span | None = None) -> Pointers:
    """The addresses of contiguous tensors, or of the pieces of them that a span names, in the form that the kernel takes."""
    if span is None or (len(span.leaves) == len(tensors) and not any(span.starts)):
        return (ctypes.c_void_p * len(tensors))(*map(Tensor.data_ptr, tensors))
    step = tensors[0].element_size()
    places = [tensors[i].data_ptr() + step * a for i, a in zip(span.leaves, span.starts)]
    return (ctypes.c_void_p * len(places))(*places)


@cache
def sweep_kernel() -> Sweep | None:
    """``sweep(dtype, sizes, g, s, u, t, f, mu, e, deferred, moves)``, or ``None`` where nothing compiles.

    ``g``, ``s``, ``u``, ``t`` are :func:`pointers` to contiguous tensors of one dtype, float32 or float64, and of these sizes,
    ``u`` and ``t`` written and perhaps the same as ``g`` and ``s``; ``e`` is ``None`` or one tensor, leaf behind leaf. Where
    ``mu`` is ``None``, ``s`` is what the noise remembers. ``moves``: ``u`` are parameters, to which the updates are added.
    """
    try:
        library = compiled.load(_SOURCE, "sweep")
    except (compiled.CompileError, OSError):  # tensor operations do the same, more slowly
        return None
    kernels = {torch.float32: library.sweep_float, torch.float64: library.sweep_double}
    integer, pointer, real, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_int
    for kernel in kernels.values():
        kernel.restype = None
        kernel.argtypes = [integer, *[pointer] * 6, small, small, real, real, real, small]

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
        moves: bool = False,
    ) -> None:
        numbers, total = integers(sizes)
        noise = None if e is None else e.data_ptr()
        threads = torch.get_num_threads() if total > _PARALLEL else 1
        kernels[dtype](len(sizes), numbers, g, s, noise, u, t, moves, mu is not None, mu or 0.0, f, deferred, threads)

    return sweep
