"""A step of SGD, Adam, AdamW or RMSprop with its draws and its noise as one C++ pass over all leaves on a CPU.

For every element, ``g`` the gradient, ``x`` the last draw, ``y`` that of this step, ``V`` the velocity, ``v`` the square:

    g' = sign g + decay theta,     v <- square_decay v + square_gain g'^2,     D = correction v^(1/2) + eps
    e = previous x + current y,    x <- y

    SGD                            u = g' + e
    SGD with momentum              V <- momentum V + gain g' + e,             u = V
    Adam, AdamW                    V <- momentum V + gain g' + D^(1/2) e,     u = V / D
    RMSprop                        u = (g' + D^(1/2) e) / D
    RMSprop with momentum          V <- momentum V + (g' + D^(1/2) e) / D,     u = V

    theta <- keep theta - step_size u

With Nesterov's momentum ``theta`` moves by ``-direct (g' + e_1)`` too, where ``e_1`` is of draws of its own. Noise of
``D^(1/2) e`` in the velocity and ``D^(-1/2) e`` in the displacement is one square root more than the step alone. ``D`` is made
of the clean gradient; ``square_decay = 1`` and ``square_gain = 0`` leave it as it is. The results are those of the operations
one by one, up to rounding. Draws are made by Philox in rows of 256 elements that stay in first-level cache.
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
from bayesopt_chain.engine.sweep_cpu import integers, pointers
from bayesopt_chain.random import compiled

_SOURCE = Path(__file__).with_suffix(".cpp")
_PARALLEL = 2**15  # elements below which threads cost more than they save
MOMENT, SCALED, SCALED_MOMENTUM, PLAIN, MOMENTUM = range(5)  # the ways to move: Adam, RMSprop (two), SGD (two)
_Job: Any = ctypes.c_int64 * 19  # ``Job`` of the source
_NOW, _AGAIN, _THREADS = 12, 14, 18  # key and count of the draws, key and count of the last draws of both branches
_address = ctypes.addressof


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
    direct: float = 0.0
    direct_previous: float = 0.0
    direct_current: float = 0.0


class _Kernels(NamedTuple):
    """The kernels of one dtype."""

    step: Any
    count: Any


@cache
def _kernels() -> dict[torch.dtype, _Kernels] | None:
    try:
        library = compiled.load(_SOURCE)
    except (compiled.CompileError, OSError):  # tensor operations do the same, more slowly
        return None
    kernels = {
        torch.float32: _Kernels(library.step_float, library.count_float),
        torch.float64: _Kernels(library.step_double, library.count_double),
    }
    for step, count in kernels.values():
        step.restype = count.restype = None
        step.argtypes, count.argtypes = [ctypes.c_void_p], [ctypes.c_int64, ctypes.c_void_p]
    return kernels


def has_kernel() -> bool:
    """Whether the pass can be made here: it came with the wheel, or there is a compiler."""
    return _kernels() is not None


class Job:
    """A call of the kernel, made once for its leaves and given new numbers and gradients at every step. It checks nothing.

    Args:
        kind: one of the ways to move of this module.
        dtype: float32 or float64, of all tensors.
        sizes: elements of every leaf.
        tensors: lists of contiguous tensors, empty for what is not there: parameters, velocities, squares, and the last draws
            of the two branches, over which those of a step are written. They have to stay where they are in memory.
        draws: the leaves' numbers in the random stream, for each branch; empty for a branch that is not there.
    """

    def __init__(
        self,
        kind: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        tensors: Sequence[Sequence[Tensor]],
        draws: Sequence[tuple[int, ...]],
    ) -> None:
        kernels = _kernels()
        assert kernels is not None
        self.dtype, self._step, self._is_large = dtype, kernels[dtype].step, sum(sizes) > _PARALLEL
        self._gradients = (ctypes.c_int64 * len(sizes))()
        self._numbers = (ctypes.c_double * len(Coefficients._fields))()
        theta, *state = (pointers(xs) if xs else None for xs in tensors)
        # alive as long as the job, which holds their addresses
        self._arrays = (integers(sizes), theta, self._gradients, *state, *(integers(x) if x else None for x in draws))
        addresses = [0 if x is None else _address(x) for x in (*self._arrays, self._numbers)]
        self._job = _Job(kind, len(sizes), *addresses, 0, 0, *(-1, -1) * 2, 1)

    def set_numbers(self, numbers: Coefficients) -> None:
        """Set the numbers of the next step."""
        self._numbers[:] = numbers

    def set_last_drawn(self, last: tuple[int, int], direct: tuple[int, int]) -> None:
        """Set key and count of each branch's last draws, if these are made again; a negative count if there are none."""
        self._job[_AGAIN : _AGAIN + 4] = (*last, *direct)

    def run(self, gradients: Sequence[Tensor], key: int, count: int) -> None:
        """Move parameters and state in place by these contiguous gradients, with the draws of a key and a count."""
        self._gradients[:] = [*map(Tensor.data_ptr, gradients)]
        self._job[_NOW : _NOW + 2] = key, count
        self._job[_THREADS] = torch.get_num_threads() if self._is_large else 1
        self._step(self._job)


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
