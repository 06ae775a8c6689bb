"""Run an optimizer on parameters that are sharded over ranks (DTensors, as ``fully_shard`` and ``parallelize_module`` make).

During a step the optimizer holds this rank's local tensors in place of its DTensors, so that torch's step and the noise run as
in one process. The noise of an element is numbered by its index in the whole parameter, so that it does not depend on how the
parameter is sharded. ``optimizer.state`` holds DTensors that share the memory of the local tensors, so that checkpoints know
how the state is sharded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor, local_parts, specs_of
from bayesopt_chain.distributed.parts import elements_of
from bayesopt_chain.distributed.shards import cut_like, local, local_gradients, memory_of
from bayesopt_chain.random.philox import Runs
from bayesopt_chain.trees import are_same


class Leaf:
    """A parameter with this rank's part of it and of its state.

    Attributes:
        p: the parameter.
        part: this rank's local tensor of it; the parameter itself if it is no DTensor.
        spec: the mesh and the placements of a DTensor; ``None`` for a plain tensor.
        mine: the state entry that the optimizer uses during a step, with local tensors.
    """

    __slots__ = ("mine", "p", "part", "spec")

    def __init__(self, p: Any, part: Any, spec: Any) -> None:
        self.p, self.part, self.spec = p, part, spec
        self.mine: dict[str, Any] = {}

    def read_state(self, theirs: dict[str, Any] | None) -> None:
        """Read this rank's part of the parameter's state from the optimizer's state entry, which holds DTensors.

        A plain tensor of the shape of the whole parameter, as in a full state dict, is sharded like the parameter.

        Args:
            theirs: the entry; ``None`` if the parameter has none.

        Raises:
            ValueError: a plain tensor has another shape.
        """
        self.mine.clear()
        for name, value in list((theirs or {}).items()):
            if isinstance(value, Tensor) and value.ndim and not is_dtensor(value):
                value = (theirs or {})[name] = self.cut(name, value)
            self.mine[name] = local(value)

    def cut(self, name: str, value: Tensor) -> Any:
        """Shard a plain tensor like the parameter.

        Args:
            name: the name of the tensor in messages.
            value: a tensor of the whole parameter's shape, which is equal on every rank.

        Raises:
            ValueError: the tensor has another shape than the whole parameter.
        """
        if value.shape != self.p.shape:
            raise ValueError(
                f"bc.optim: {name} of a parameter that is a DTensor of shape {tuple(self.p.shape)} is a plain tensor of shape "
                f"{tuple(value.shape)}; give whole tensors on every rank, or load the state by "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
        return cut_like(value, self.p)

    def write_back(self, outside: Any) -> None:
        """Write this rank's state back into the optimizer's state as DTensors."""
        if not self.mine and self.p not in outside:
            return
        theirs = outside[self.p]
        for name in theirs.keys() - self.mine.keys():
            del theirs[name]
        for name, value in self.mine.items():
            if name not in theirs or local(theirs[name]) is not value:
                # the count of steps is no part of the parameter, even where a 0-d parameter has the same shape
                theirs[name] = value if name == "step" else memory_of(value, self.part, self.spec)


class Shards:
    """This rank's parts of an optimizer's parameters and state.

    Attributes:
        leaves: all parameters with their parts.
        specs: mesh and placements of each parameter; ``None`` for plain tensors.
        alike: mesh and placements of the last gradients that were sharded like their parameters.
        runs: by local tensor, the ranges of elements of the whole parameter that it holds.
        state: the state that the optimizer uses during a step, by local tensor.
        outside, inside: all objects in the optimizer's own state, and in ``state``, after the last step. They are compared by
            identity, so that nothing is copied when nothing was replaced.
    """

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.specs: list[Any] = []
        self.alike: list[Any] = []
        self.runs: dict[Tensor, Runs] = {}
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.outside: list[Any] = []
        self.inside: list[Any] = []

    @contextmanager
    def entered(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Replace the DTensors of an optimizer by local tensors during a step, which must not record gradients.

        Afterwards the optimizer holds its DTensors again, and the state that the step made is written back as DTensors.

        Args:
            optimizer: the optimizer, whose parameters and state are replaced.

        Raises:
            ValueError: the gradient or the state of a DTensor is a plain tensor.
        """
        outside, groups = optimizer.state, optimizer.param_groups
        params = [group["params"] for group in groups]
        whole = [p for ps in params for p in ps]
        parts, given = self.parts_of(whole), [p.grad for p in whole]
        spread = [leaf for leaf in self.leaves if leaf.spec is not None]
        try:
            grads = local_gradients(given, local_parts(given), self.specs, self.alike, self.refuse)
            # torch's step reads the gradient from the parameter that it is given, the local tensor
            for leaf, g in zip(self.leaves, grads):
                if leaf.spec is not None and g is not None:
                    leaf.part.grad = g
            if not are_same(_held(outside.values()), self.outside):
                self.read_state(outside)
            at = iter(parts)
            for group, ps in zip(groups, params):
                group["params"] = [next(at) for _ in ps]
            optimizer.state = self.state  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:  # after an error too, since the caller holds an optimizer of DTensors
            optimizer.state = outside
            for group, ps in zip(groups, params):
                group["params"] = ps
            for leaf in spread:
                leaf.part.grad = None
            if not are_same(_held(self.state.values()), self.inside):
                self.write_back(outside)

    def refuse(self, j: int) -> None:
        """Raise ValueError if parameter ``j`` is a DTensor; its gradient then is a plain tensor."""
        if self.specs[j] is not None:
            raise ValueError(
                f"bc.optim: a parameter is a DTensor spread as {self.specs[j].placements}, its gradient a plain tensor of "
                f"shape {tuple(self.leaves[j].p.grad.shape)}; make it by loss.backward()"
            )

    def read_state(self, outside: Any) -> None:
        """Read this rank's part of the state of every parameter."""
        for leaf in self.leaves:
            if leaf.spec is not None:
                leaf.read_state(outside.get(leaf.p))
            elif leaf.p in outside:
                self.state[leaf.p] = outside[leaf.p]
            else:
                self.state.pop(leaf.p, None)

    def write_back(self, outside: Any) -> None:
        """Write the state of every parameter back into the optimizer's own state."""
        for leaf in self.leaves:
            if leaf.spec is not None:
                leaf.write_back(outside)
            elif self.state.get(leaf.p):
                outside[leaf.p] = self.state[leaf.p]
        self.outside, self.inside = _held(outside.values()), _held(self.state.values())

    def parts_of(self, whole: list[Any]) -> list[Any]:
        """Return the local tensor of each parameter, and update ``leaves`` and ``runs`` if a parameter was replaced."""
        parts, specs = local_parts(whole), specs_of(whole)
        same = len(parts) == len(self.leaves) and all(
            [
                x.p is p and x.part is part and x.spec is spec
                for x, p, part, spec in zip(self.leaves, whole, parts, specs)
            ]
        )
        if not same:
            self.leaves = [Leaf(*x) for x in zip(whole, parts, specs)]
            self.specs, self.alike = specs, list(specs)
            self.outside, self.inside = [None], [None]  # equal to no state, so that all of it is read and written back
            self.runs = {leaf.part: elements_of(leaf.p) for leaf in self.leaves}
            self.state = defaultdict(dict, {leaf.part: leaf.mine for leaf in self.leaves if leaf.spec is not None})
        return parts


def _held(entries: Iterable[dict[str, Any]]) -> list[Any]:
    """List the entries of a state and the objects in them."""
    return [x for entry in entries for x in (entry, *entry.values())]
