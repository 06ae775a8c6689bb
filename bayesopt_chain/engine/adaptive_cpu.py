"""A step of Adam, AdamW or RMSprop and the noise behind it as one C++ pass over many leaves on a CPU.

For every element, ``g`` the gradient, ``x`` the last draw, ``y`` that of this step, ``V`` the velocity, ``v`` the square:

    g' = sign g + decay theta,     v <- square_decay v + square_gain g'^2,     D = correction v^(1/2) + eps
    e = previous x + current y,    x <- y

    Adam, AdamW                    V <- momentum V + gain g' + D^(1/2) e,     u = V / D
    RMSprop                        u = (g' + D^(1/2) e) / D
    RMSprop with momentum          V <- momentum V + (g' + D^(1/2) e) / D,     u = V

    theta <- keep theta - step_size u

Noise of ``D^(1/2) e`` in the velocity and ``D^(-1/2) e`` in the displacement is thus one square root more than the step alone.
``D`` is made of the clean gradient; ``square_decay = 1`` and ``square_gain = 0`` leave it as it is. The results are those of
the operations one by one, up to rounding.
Compiled at its first use and kept, or came with the wheel (:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import foreach_add_
from bayesopt_chain.engine.sweep_cpu import Pointers, pointers
from bayesopt_chain.random import compiled

_SOURCE = Path(__file__).with_suffix(".cpp")
_PARALLEL = 2**17  # elements below which threads cost more than they save
MOMENT, SCALED, SCALED_MOMENTUM = 0, 1, 2  # the three ways to move, in the order of the note above


class Coefficients(NamedTuple):
    """The numbers of one step, by the names of the module's note, in the order in which the kernel takes them."""

    sign: float
    decay: float
    keep: float
    momentum: float
    gain: float
    square_decay: float
    square_gain: float
    correction: float
    eps: float
    step_size: float
    previous: float
    current: float


class _Kernels(NamedTuple):
    """The kernels of one dtype."""

    sweep: Any
    count: Any


@cache
def _kernels() -> dict[torch.dtype, _Kernels] | None:
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):  # tensor operations do the same, more slowly
        return None
    kernels = {
        torch.float32: _Kernels(library.sweep_float, library.count_float),
        torch.float64: _Kernels(library.sweep_double, library.count_double),
    }
    for sweep, count in kernels.values():
        sweep.restype = count.restype = None
        sweep.argtypes = [ctypes.c_int, ctypes.c_int64, *[ctypes.c_void_p] * 8, ctypes.c_int]
        count.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    return kernels


def has_kernel() -> bool:
    """Whether the pass can be made here: it came with the wheel, or there is a compiler."""
    return _kernels() is not None


@cache
def _integers(sizes: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_int64], int]:
    return (ctypes.c_int64 * len(sizes))(*sizes), sum(sizes)


def adaptive_step_(
    kind: int,
    sizes: tuple[int, ...],
    places: Sequence[Pointers | None],
    fresh: Tensor,
    numbers: Coefficients,
) -> None:
    """Move parameters and their state in place. Nothing is checked; :func:`has_kernel` comes first.

    Args:
        kind: ``MOMENT``, ``SCALED`` or ``SCALED_MOMENTUM``.
        sizes: elements of every leaf.
        places: addresses of parameters, gradients, velocities (``None`` for ``SCALED``), squares and last draws, contiguous
            tensors of the dtype of ``fresh`` and of these sizes. The draws of this step are written over the last ones.
        fresh: the draws of this step, leaf behind leaf, float32 or float64.
        numbers: of the step.
    """
    kernels, (count, total) = _kernels(), _integers(sizes)
    assert kernels is not None
    threads = torch.get_num_threads() if total > _PARALLEL else 1
    values = (ctypes.c_double * len(numbers))(*numbers)
    kernels[fresh.dtype].sweep(kind, len(sizes), count, *places, fresh.data_ptr(), values, threads)


def counter(steps: list[Tensor]) -> Callable[[], None]:
    """Make a function that adds 1 to each of these counters in one call; torch's list function makes a call for each.

    Args:
        steps: 0-d tensors. Where all are float32 or all float64 and on a CPU, their addresses are read once, here, so that the
            function may be called only as long as they stay where they are.
    """
    kernels, (dtype, *others) = _kernels(), {x.dtype for x in steps}
    if kernels is None or others or dtype not in kernels or not all([x.is_cpu and x.numel() == 1 for x in steps]):
        return partial(foreach_add_, steps, 1)
    return partial(kernels[dtype].count, len(steps), pointers(steps))
