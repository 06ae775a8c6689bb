"""Remembers what has been checked, so that an estimator pays for it once and not at every batch.

A check holds for another batch if trees, shapes and dtypes are those of the batch that was checked, and if the forward pass is
the same program: it calls the same torch functions in the same order, with the same arguments apart from the tensors. A check
that could not have failed, because a gradient was zero or not finite, is not remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import optree
from torch import Tensor

from bayesopt_chain.tracing import is_transformed
from bayesopt_chain.trees import Tree

REMEMBERED = 8  # for how many shapes of batches a check is remembered
LARGEST = 2**18  # a plan holds the outputs of one datum: it is remembered if there are no more numbers than this

Program = list[Any]
Result = TypeVar("Result")


class ProgramChangedError(Exception):
    """The forward pass calls other functions than when it was checked."""


class Check:
    """What one pass over a batch has shown.

    Attributes:
        is_done: whether everything was checked before, so that this pass need not compare.
        could_fail: whether every comparison so far could have failed; one of zeros with zeros could not.
        plan: the plan with which the pass ended.
        programs: the functions that the forward pass called, by the number of data in the chunk.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.could_fail = True
        self.plan: Any = None
        self.programs: dict[int, Program] = {}

    def see(self, data: int, program: Program) -> None:
        """Record a program, or compare it with the one that was checked.

        Raises:
            ProgramChangedError: the program is another than the one that was checked.
        """
        if self.programs.setdefault(data, program) != program:
            if self.is_done:
                raise ProgramChangedError
            self.could_fail = False  # chunks of one length ran two programs, of which only one was compared


class Checks:
    """The plans of batches that have been checked, by their shapes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Check]] = {}

    def __reduce__(self) -> Any:
        return Checks, ()  # what has been checked is not handed on with a pickle

    def run(
        self, params: Tree, batch: Any, make_plan: Callable[[], Any], work: Callable[[Any, Check], Result]
    ) -> Result:
        """Call ``work(plan, check)`` and return its result.

        For a batch like an earlier one the plan and the check are those of the earlier one; else they are new, and remembered.
        """
        key = shapes_of(params, batch)
        if key in self._known and not is_transformed():
            try:
                return work(*self._known[key])
            except ProgramChangedError:
                del self._known[key]
        check = Check()
        result = work(make_plan(), check)
        plan = check.plan
        if plan.direct is not None and check.could_fail and plan.probe.numel() <= LARGEST:
            check.is_done = True
            if len(self._known) == REMEMBERED:
                del self._known[next(iter(self._known))]
            # Without the graph of the direct backward pass, which would keep the batch's activations alive.
            self._known[key] = plan._replace(direct=None, probe_outputs=[]), check
        return result


def shapes_of(params: Tree, batch: Any) -> Hashable:
    """The structures, shapes, dtypes and devices of parameters and batch: what a check depends on beside the program."""
    parts = [optree.tree_flatten(tree) for tree in (params, batch)]
    return tuple((structure, tuple(map(_shape, leaves))) for leaves, structure in parts)


def _shape(leaf: Any) -> Hashable:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def constants(value: Any) -> Any:
    """An argument of a torch function in which each tensor is replaced by the class ``Tensor``, so that programs compare."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(constants, value))
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, dict):
        return tuple((name, constants(entry)) for name, entry in value.items())
    return repr(value)
