"""What a step at temperature > 0 does to each leaf, worked out once for as long as nothing of it changes.

A plan is a function of the parameter groups' numbers, of which parameters have a gradient, and of what is remembered of
them. It is kept where the next step's would be the same: where no number of a step depends on its count, and the noise of
this step was that of the one before. :meth:`Plan.holds` looks at all of this again before a step, by identity, so that
whoever sets a number, replaces a tensor of the state or removes a gradient gets a new plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.optim._rule import Linear, Noise

BLOCK = 2**18  # elements of a large leaf that are treated together, while they are in cache
_COUNTS = ("params", "param_names", "noise_count")  # what of a group is no number of the step


class Work(NamedTuple):
    """One leaf of one step: what torch does to it, and the noise that follows (``None`` at temperature 0)."""

    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]
    number: int
    linear: Linear
    noise: Noise | None
    updates: int  # this one included
    frozen: bool
    early: bool  # whether the noise goes through the velocity, in front of torch's step


class Batch(NamedTuple):
    """Small leaves whose noise has the same numbers: the lists of tensors it goes to, each with a factor; the draws."""

    group: dict[str, Any]
    noise: Noise
    targets: list[tuple[list[Tensor], float]]
    draws: list[Tensor]
    fill: Callable[[int], None]


class FusedMove(NamedTuple):
    """A group's part of torch's fused SGD kernel, which checks nothing."""

    params: list[Tensor]
    velocities: list[Tensor]
    numbers: dict[str, Any]

    def takes(self, grads: list[Any]) -> bool:
        """Whether all tensors are dense and contiguous, on a CPU and of one dtype."""
        dtype = self.params[0].dtype
        return dtype in (torch.float32, torch.float64) and all(
            [
                x is not None and x.layout is torch.strided and x.dtype is dtype and x.is_cpu and x.is_contiguous()
                for xs in (self.params, grads, self.velocities)
                for x in xs
            ]
        )


class Plan:
    """The leaves of a step, by the way their noise takes."""

    def __init__(self, work: list[Work]) -> None:
        self.noisy = noisy = [w for w in work if w.noise is not None]
        self.frozen = [w for w in work if w.frozen]
        self.groups = list({id(w.group): w.group for w in noisy}.values())
        self.before = [w.state.get("noise_before") for w in noisy]
        self.rescaled = [w for w in noisy if w.noise.velocity_scale != 1.0]  # pyright: ignore[reportOptionalMemberAccess]
        self.direct = [w for w in noisy if w.linear.direct > 0.0]
        late = [w for w in noisy if w.linear.step_size > 0.0 and not w.early]
        self.late_large, self.late_small = _by_size(late)
        self.early_large, self.early_small = _by_size([w for w in noisy if w.early])
        self.early: list[Batch] | None = None  # of the small ones, made when they are met first
        self.late: list[Batch] | None = None
        self.moves: list[FusedMove] | None = None
        self.kept = False

    def keep(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take note of what the plan was made of, behind its step; false if the next step's would be another."""
        if self.frozen or any(w.noise.before != before for w, before in zip(self.noisy, self.before)):  # pyright: ignore[reportOptionalMemberAccess]
            return False
        self.state, self.settings = optimizer.state, []
        for group in optimizer.param_groups:
            read = itemgetter(*(name for name in group if name not in _COUNTS))
            if not all(map(_is_fixed, read(group))):
                return False
            self.settings.append((group, read, read(group), list(group["params"])))
        self.remembered = []
        for w in self.noisy:
            names = ("noise", "noise_before", *([w.linear.velocity] if w.linear.velocity else []))
            self.remembered.append((w.param, w.state, names, [w.state.get(name) for name in names]))
        mine = {id(w.param) for w in self.noisy}
        noisy = {id(group) for group in self.groups}
        self.absent = [p for g in optimizer.param_groups if id(g) in noisy for p in g["params"] if id(p) not in mine]
        self.kept = True
        return True

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a plan made now would be this one."""
        groups = optimizer.param_groups
        if optimizer.state is not self.state or len(groups) != len(self.settings):
            return False
        for group, (mine, read, values, params) in zip(groups, self.settings):
            if group is not mine or len(group["params"]) != len(params):
                return False
            if not (all(map(is_, read(group), values)) and all(map(is_, group["params"], params))):
                return False
        for p, state, names, values in self.remembered:
            if p.grad is None or self.state.get(p) is not state or not all(map(is_, map(state.get, names), values)):
                return False
        return all([p.grad is None for p in self.absent])


def _by_size(work: list[Work]) -> tuple[list[Work], list[Work]]:
    """The leaves that are treated block after block, and the small ones."""
    return [w for w in work if w.param.numel() > BLOCK], [w for w in work if w.param.numel() <= BLOCK]


def _is_fixed(value: Any) -> bool:
    """Whether a setting cannot change while it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (bool, int, float, str))


def blocks_of(param: Tensor, state: dict[str, Any], splits: bool) -> Iterable[Callable[[Tensor], Tensor]]:
    """Views that take a leaf to pieces; one, the identity, where it is small or not contiguous."""
    tensors = [param, *(x for x in state.values() if torch.is_tensor(x) and x.shape == param.shape)]
    n = param.numel()
    if not splits or n <= BLOCK or torch.is_grad_enabled() or not all(x.is_contiguous() for x in tensors):
        return [lambda x: x]
    starts = range(0, n - n % BLOCK if n % BLOCK >= 16 else n - BLOCK - n % BLOCK + 1, BLOCK)
    edges = [*starts, *([n - n % BLOCK] if n % BLOCK >= 16 else []), n]
    return [lambda x, a=a, b=b: x.view(-1)[a:b] for a, b in pairwise(edges)]
