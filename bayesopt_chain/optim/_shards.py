"""Optimizers on parameters that are spread over ranks (DTensors, as ``fully_shard`` and ``parallelize_module`` leave them).

For the time of a step the optimizer holds this rank's own tensors in the place of its DTensors, so that torch's step and
the noise run as they do in one process, with the noise numbered by the elements of the whole parameter.
``optimizer.state`` keeps DTensors, which share the local tensors' memory, so that checkpoints know how it is spread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, local_of, local_parts, specs_of, stacked_spec
from bayesopt_chain.distributed.parts import elements_of
from bayesopt_chain.random.philox import Runs


def are_spread(groups: list[dict[str, Any]]) -> bool:
    """Whether any parameter is a DTensor."""
    return any(is_dtensor(p) for group in groups for p in group["params"])


def agreed_key(key: int, groups: list[dict[str, Any]]) -> int:
    """The first rank's key, on all ranks that hold parts of the same parameters."""
    meshes = dict.fromkeys(p.device_mesh for group in groups for p in group["params"] if is_dtensor(p))
    for mesh in meshes:
        sent = torch.tensor(key, dtype=torch.int64, device=mesh.device_type)
        for axis in range(mesh.ndim):
            dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
        key = int(sent)
    return key


class Leaf:
    """A parameter, this rank's part of it, and the states of both: the optimizer's, of DTensors, and ours, of local tensors."""

    __slots__ = ("came", "known", "mine", "p", "part", "spec")

    def __init__(self, p: Any, part: Any, spec: Any) -> None:
        self.p, self.part, self.spec = p, part, spec  # ``spec`` says how a DTensor lies
        self.came = spec  # and how its last gradient lay that lay so
        self.mine: dict[str, Any] = {}  # inside
        self.known: dict[str, tuple[Any, Any]] = {}  # by name, what is outside and inside

    def gradient(self, g: Any, part: Any, came: Any) -> Tensor:
        """The local gradient, redistributed to the parameter's placements first if it has others."""
        spec = self.spec
        if came is not None and came.placements == spec.placements and came.mesh == spec.mesh:
            self.came = came
            return part
        if came is None:
            raise ValueError(
                f"bc.optim: a parameter is a DTensor spread as {spec.placements}, its gradient a plain tensor of shape "
                f"{tuple(g.shape)}; make it by loss.backward()"
            )
        return local_of(g.redistribute(spec.mesh, spec.placements))

    def read_state(self, theirs: dict[str, Any] | None) -> None:
        """Read this rank's part of the parameter's state, which the optimizer holds as DTensors.

        Raises:
            ValueError: a plain tensor of several elements.
        """
        mine, known = self.mine, self.known
        theirs = theirs or {}
        for name in [name for name in mine if name not in theirs]:
            del mine[name], known[name]
        for name, value in theirs.items():
            if name not in known or known[name][0] is not value:
                if isinstance(value, Tensor) and value.ndim and not is_dtensor(value):
                    raise ValueError(
                        f"bc.optim: {name} of a parameter that is a DTensor is a plain tensor of shape {tuple(value.shape)}; "
                        "load states of spread parameters by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                    )
                known[name] = (value, local_of(value) if is_dtensor(value) else value)
            mine[name] = known[name][1]

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
                known[name] = (self.spread(name, value), value)
                theirs[name] = known[name][0]

    def spread(self, name: str, value: Any) -> Any:
        """A DTensor, if the value is shaped like the local parameter; anything else as it is."""
        if name == "step" or not isinstance(value, Tensor) or value.shape != self.part.shape:
            return value
        return dtensor_of(value, stacked_spec(self.spec, value, 0))


class Shards:
    """This rank's parts of an optimizer's parameters and state."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
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
            for leaf, g, x, came in zip(self.leaves, given, local_parts(given), specs_of(given)):
                if leaf.spec is not None and g is not None:
                    leaf.part.grad = x if came is leaf.came else leaf.gradient(g, x, came)
            if not _same(_held(outside.values()), self.outside):
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
            if not _same(_held(self.state.values()), self.inside):
                self.write_back(outside)

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
            self.outside, self.inside = [None], [None]
            self.runs = {leaf.part: elements_of(leaf.p) for leaf in self.leaves}
            self.state = defaultdict(dict, {leaf.part: leaf.mine for leaf in self.leaves if leaf.spec is not None})
        return parts


def _held(entries: Iterable[dict[str, Any]]) -> list[Any]:
    """The entries of a state and all that they hold."""
    return [x for entry in entries for x in (entry, *entry.values())]


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))
