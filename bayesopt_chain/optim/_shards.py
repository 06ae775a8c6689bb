"""Optimizers on parameters that are spread over ranks (DTensors, as ``fully_shard`` and ``parallelize_module`` leave them).

For the time of a step the optimizer holds this rank's own tensors in the place of its DTensors, so that torch's step and
the noise run as they do in one process, with the noise numbered by the elements of the whole parameter.
``optimizer.state`` keeps DTensors, which share the local tensors' memory, so that checkpoints know how it is spread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain._torch import is_dtensor, local_of, local_parts, specs_of
from bayesopt_chain.distributed.parts import elements_of
from bayesopt_chain.distributed.shards import cut_like, local_gradients, memory_of
from bayesopt_chain.random.philox import Runs
from bayesopt_chain.trees import are_same


class Leaf:
    """A parameter, this rank's part of it, and the states of both: the optimizer's, of DTensors, and ours, of local tensors."""

    __slots__ = ("known", "mine", "p", "part", "spec")

    def __init__(self, p: Any, part: Any, spec: Any) -> None:
        self.p, self.part, self.spec = p, part, spec  # ``spec`` says how a DTensor lies
        self.mine: dict[str, Any] = {}  # inside
        self.known: dict[str, tuple[Any, Any]] = {}  # by name, what is outside and inside

    def read_state(self, theirs: dict[str, Any] | None) -> None:
        """Read this rank's part of the parameter's state, which the optimizer holds as DTensors.

        A plain tensor of the shape of the whole parameter, as a full state dict holds it, is cut as the parameter is.

        Raises:
            ValueError: a plain tensor of another shape.
        """
        mine, known = self.mine, self.known
        theirs = theirs or {}
        for name in [name for name in mine if name not in theirs]:
            del mine[name], known[name]
        for name, value in list(theirs.items()):
            if name not in known or known[name][0] is not value:
                if isinstance(value, Tensor) and value.ndim and not is_dtensor(value):
                    value = theirs[name] = self.cut(name, value)
                known[name] = (value, local_of(value) if is_dtensor(value) else value)
            mine[name] = known[name][1]

    def cut(self, name: str, value: Tensor) -> Any:
        """Make a DTensor like the parameter of a plain tensor that is the same, and whole, on every rank.

        Raises:
            ValueError: a tensor of another shape than the whole parameter's.
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
        mine, known = self.mine, self.known
        if not mine and not known:
            return
        theirs = outside[self.p]
        for name in [name for name in known if name not in mine]:
            del theirs[name], known[name]
        for name, value in mine.items():
            if name not in known or known[name][1] is not value:
                # of a parameter without axes the count of steps has its shape
                known[name] = (value if name == "step" else memory_of(value, self.part, self.spec), value)
                theirs[name] = known[name][0]


class Shards:
    """This rank's parts of an optimizer's parameters and state."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.specs: list[Any] = []  # how each parameter lies
        self.alike: list[Any] = []  # how the last gradients lay that lay as their parameters
        self.runs: dict[Tensor, Runs] = {}  # by local tensor, the elements of the whole parameter that it holds
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.outside: list[Any] = []  # all that the optimizer's state held behind the last step
        self.inside: list[Any] = []

    @contextmanager
    def entered(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Put the local tensors in the place of the DTensors for the time of a step, which must not record gradients.

        Behind it the optimizer has its DTensors again, and the state that the step made is written back as DTensors.

        Raises:
            ValueError: a plain gradient or state of a DTensor.
        """
        outside, groups = optimizer.state, optimizer.param_groups
        params = [group["params"] for group in groups]
        whole = [p for ps in params for p in ps]
        parts, given = self.parts_of(whole), [p.grad for p in whole]
        spread = [leaf for leaf in self.leaves if leaf.spec is not None]
        try:
            grads = local_gradients(given, local_parts(given), self.specs, self.alike, self.refuse)
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
        finally:
            optimizer.state = outside
            for group, ps in zip(groups, params):
                group["params"] = ps
            for leaf in spread:
                leaf.part.grad = None
            if not are_same(_held(self.state.values()), self.inside):
                self.write_back(outside)

    def refuse(self, j: int) -> None:
        """Refuse a gradient that is a plain tensor while its parameter is a DTensor."""
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
        """Write the state of every parameter back into the optimizer's state."""
        for leaf in self.leaves:
            if leaf.spec is not None:
                leaf.write_back(outside)
            elif self.state.get(leaf.p):
                outside[leaf.p] = self.state[leaf.p]
        self.outside, self.inside = _held(outside.values()), _held(self.state.values())

    def parts_of(self, whole: list[Any]) -> list[Any]:
        """The local tensor of each parameter; its elements are worked out when it is met first."""
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
            self.outside, self.inside = [None], [None]
            self.runs = {leaf.part: elements_of(leaf.p) for leaf in self.leaves}
            self.state = defaultdict(dict, {leaf.part: leaf.mine for leaf in self.leaves if leaf.spec is not None})
        return parts


def _held(entries: Iterable[dict[str, Any]]) -> list[Any]:
    """The entries of a state and all that they hold."""
    return [x for entry in entries for x in (entry, *entry.values())]
