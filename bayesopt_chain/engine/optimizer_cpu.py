"""A step of SGD, Adam, AdamW or RMSprop with its draws and its noise as one C++ pass over all leaves on a CPU.

For every element, ``g`` the gradient, ``x`` the last draw, ``y`` that of this step, ``V`` the velocity, ``v`` the square:

    g' = sign g + decay theta,     v <- square_decay v + (1 - square_decay) g'^2,     D = correction v^(1/2) + eps
    e = previous x + current y,    x <- y

    V <- velocity_scale V first, and then

    SGD                            u = g' + e
    SGD with momentum              V <- momentum V + gain g' + e,             u = V
    Adam, AdamW                    V <- momentum V + gain g' + D^(1/2) e,     u = V / D
    RMSprop                        u = (g' + D^(1/2) e) / D
    RMSprop with momentum          V <- momentum V + (g' + D^(1/2) e) / D,     u = V

    theta <- (1 - shrink) theta - step_size u

With Nesterov's momentum ``theta`` moves by ``-direct (g' + e_1)`` too, where ``e_1`` is of draws of its own. Noise of
``D^(1/2) e`` in the velocity and ``D^(-1/2) e`` in the displacement is one square root more than the step alone. ``D`` is made
of the clean gradient; ``square_decay = 1`` leaves it as it is. The results are those of the operations
one by one, up to rounding. Draws are made by Philox in rows of 256 elements that stay in first-level cache.
Compiled at its first use and kept, or came with the wheel (:mod:`bayesopt_chain.random.compiled`).
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.engine.sweep_cpu import address, pointers
from bayesopt_chain.random import compiled
from bayesopt_chain.random.compiled import integers

_SOURCE = Path(__file__).with_suffix(".cpp")
_PARALLEL = 2**15  # elements below which threads cost more than they save
MOMENT, SCALED, SCALED_MOMENTUM, PLAIN, MOMENTUM = range(5)  # the ways to move: Adam, RMSprop (two), SGD (two)
# ``Job`` of the source, and its end, which is of a step: its numbers, key and count of the draws, threads
_tensors_of, _now = Struct("13q").pack, Struct("11d3q").pack


@cache
def kernels() -> dict[torch.dtype, tuple[Any, Any]]:
    """For each dtype the functions that make a step and that count; none where nothing compiles."""
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):  # tensor operations do the same, more slowly
        return {}
    found = {
        torch.float32: (library.step_float, library.count_float),
        torch.float64: (library.step_double, library.count_double),
    }
    for step, count in found.values():
        step.restype, count.restype = None, ctypes.c_double
        step.argtypes, count.argtypes = [ctypes.c_void_p], [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    return found


class Job:
    """A call of the kernel, made once for its leaves and given numbers and gradients at every step. It checks nothing.

    Args:
        kind: one of the ways to move of this module.
        dtype: of all tensors, one of :func:`kernels`.
        sizes: elements of every leaf.
        tensors: lists of contiguous tensors, empty for what is not there: parameters, velocities, squares, and the last draws
            of the two branches, over which those of a step are written. They have to stay where they are in memory.
        draws: the leaves' numbers in the random stream, for each branch; empty for a branch that is not there.
        remembered: what :class:`bayesopt_chain.optim._rule.Before` has of the last step, NaN if there was none, over which
            that of a step is written; and key and count of each branch's last draws, -1 before the first, which are written
            too, and read where draws are not kept.
    """

    def __init__(
        self,
        kind: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        tensors: Sequence[Sequence[Tensor]],
        draws: Sequence[tuple[int, ...]],
        remembered: tuple[Any, Any],
    ) -> None:
        self._step, self._is_large = kernels()[dtype][0], sum(sizes) > _PARALLEL
        self._gradients = array("q", bytes(8 * len(sizes)))
        theta, *state = (pointers(xs) if xs else None for xs in tensors)
        # alive as long as the job, which holds their addresses
        self._arrays = (integers(sizes), theta, self._gradients, *state, *(integers(x) if x else None for x in draws))
        self._arrays += remembered
        self._job = _tensors_of(kind, len(sizes), *map(address, self._arrays))

    def run(self, gradients: Sequence[Tensor], numbers: Sequence[float], key: int, count: int) -> None:
        """Move parameters and state in place.

        Args:
            gradients: contiguous ones.
            numbers: sign, decay, eps, step_size, momentum, gain, direct, shrink, square_decay, correction, the temperature.
            key, count: of the draws.
        """
        self._gradients[:] = array("q", [*map(Tensor.data_ptr, gradients)])  # of a list it is quicker
        threads = torch.get_num_threads() if self._is_large else 1
        self._step(self._job + _now(*numbers, key, count, threads))


class Counter:
    """Counters of updates on a CPU, all float32 or all float64, read and advanced in one call.

    Addresses are read once, so that it may be used only as long as the counters stay where they are.
    """

    def __init__(self, steps: list[Tensor]) -> None:
        self._places = pointers(steps)
        self._call = partial(kernels()[steps[0].dtype][1], len(steps), address(self._places))

    def add(self, n: int = 1) -> float:
        """Add to each counter; return what all of them were before, NaN if they differ."""
        return self._call(n)

    @staticmethod
    def can_count(steps: list[Tensor]) -> bool:
        """Whether these tensors are counters that can be read so."""
        dtype, *others = {x.dtype for x in steps}
        return not others and dtype in kernels() and all([x.is_cpu and not x.ndim for x in steps])
