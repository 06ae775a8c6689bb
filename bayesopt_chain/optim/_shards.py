"""Optimizers on parameters that are spread over ranks (DTensors, as ``fully_shard`` and ``parallelize_module`` leave them).

For the time of a step the optimizer holds this rank's own tensors in the place of its DTensors, so that torch's step and
the noise run as they do in one process, with the noise numbered by the elements of the whole parameter.
``optimizer.state`` keeps DTensors, which share the local tensors' memory, so that checkpoints know how it is spread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, local_of, spec_of, stacked_spec
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.random.pieces import Runs


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


class Shards:
    """This rank's parts of an optimizer's parameters and state.

    Attributes:
        runs: by local tensor, the elements of the whole parameter that it holds.
    """

    def __init__(self) -> None:
        self.parts: dict[Tensor, tuple[Tensor, Any]] = {}  # by DTensor, the local tensor and how it lies
        self.runs: dict[Tensor, Runs] = {}
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.pairs: dict[
            Tensor, dict[str, tuple[Any, Any]]
        ] = {}  # by local tensor and name, what is outside and inside

    @contextmanager
    def entered(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Put the parts in the place of the DTensors, where gradients are not recorded; what the step made goes back spread.

        Raises:
            ValueError: a plain gradient or state of a DTensor.
        """
        outside, groups = optimizer.state, optimizer.param_groups
        params = [group["params"] for group in groups]
        parts = [[self.part(p) for p in ps] for ps in params]
        every = [(p, q) for ps, qs in zip(params, parts) for p, q in zip(ps, qs)]
        try:
            for p, q in every:
                self.take(p, q, outside)
                if p is not q and p.grad is not None:
                    q.grad = self.gradient(p)
            for group, qs in zip(groups, parts):
                group["params"] = qs
            optimizer.state = self.state  # pyright: ignore[reportAttributeAccessIssue]
            yield
        finally:
            optimizer.state = outside
            for group, ps in zip(groups, params):
                group["params"] = ps
            for p, q in every:
                if p is not q:
                    q.grad = None
                self.give(p, q, outside)

    def runs_of(self, q: Tensor) -> Runs:
        """The elements that a parameter's part holds; all of a plain one."""
        return self.runs[q] if q in self.runs else runs_of(q)

    def part(self, p: Tensor) -> Tensor:
        """The local tensor of a parameter; its elements are worked out when it is met first."""
        if not is_dtensor(p):
            return p
        part, spec = local_of(p), spec_of(p)
        before = self.parts.get(p)
        if before is None or before[0] is not part or before[1] is not spec:
            self.parts[p], self.runs[part] = (part, spec), runs_of(p)
        return part

    def gradient(self, p: Tensor) -> Tensor:
        """The local gradient, brought to the parameter's placements first."""
        g: Any = p.grad
        _, spec = self.parts[p]
        if not is_dtensor(g):
            raise ValueError(
                f"bc.optim: a parameter is a DTensor spread as {spec.placements}, its gradient a plain tensor of shape "
                f"{tuple(g.shape)}; make it by loss.backward()"
            )
        if spec_of(g) is not spec and (g.placements != spec.placements or g.device_mesh != spec.mesh):
            g = g.redistribute(spec.mesh, spec.placements)
        return local_of(g)

    def take(self, p: Tensor, q: Tensor, outside: Any) -> None:
        """What is remembered of a parameter, this rank's part of it."""
        theirs = outside.get(p)
        if not theirs or p is q:
            self.pairs.pop(q, None)
            self.state.pop(q, None)
            if theirs is not None:
                self.state[q] = theirs if p is q else {}
            return
        mine, known = self.state[q], self.pairs.setdefault(q, {})
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

    def give(self, p: Tensor, q: Tensor, outside: Any) -> None:
        """The same, back."""
        mine = self.state.get(q)
        if mine is None or (not mine and p not in outside):
            return
        if p is q:
            outside[p] = mine
            return
        theirs, known = outside[p], self.pairs.setdefault(q, {})
        for name in [name for name in theirs if name not in mine]:
            del theirs[name]
            known.pop(name, None)
        for name, value in mine.items():
            if name not in known or known[name][1] is not value:
                known[name] = (self.spread(name, value, p, q), value)
                theirs[name] = known[name][0]

    def spread(self, name: str, value: Any, p: Tensor, q: Tensor) -> Any:
        """A tensor like the local parameter as one like the parameter; anything else as it is."""
        if name == "step" or not isinstance(value, Tensor) or value.shape != q.shape:
            return value
        return dtensor_of(value, stacked_spec(self.parts[p][1], value, 0))
