"""What the steps of an optimizer at temperature > 0 have in common: which leaves get noise, and with which numbers.

A leaf is one parameter. :class:`Leaves` are those whose numbers are equal, and a :class:`Plan` holds all that a step needs more
than torch's step for. It is kept while parameters, gradients and state are the same tensors at the same places in memory, which
:meth:`Plan.holds` finds out before every step; then only the numbers are read again, if they may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.optim._rule import Before, Clock, Linear, Noise

KINDS = frozenset((Tensor, torch.nn.Parameter))
# names in ``optimizer.state[p]`` of the numbers of the last step, and by branch (0 momentum, 1 direct) of the last draw and of
# its key and count
_BEFORE = tuple([f"noise_{name}" for name in Before._fields])
_DRAWS = ("noise", "noise_direct")
_AGAIN = (("noise_of", "noise_at"), ("noise_direct_of", "noise_direct_at"))
REMEMBERED = (*_DRAWS, *_AGAIN[0], *_AGAIN[1], *_BEFORE)
_UNKNOWN = dict.fromkeys(_BEFORE, math.nan)  # the numbers in the state entry of a leaf that has drawn nothing yet
NEVER = ((-1, -1),) * 2  # for each branch key and count of a last draw that is kept, or that was never made
_LEAST_MOMENTUM = 1 / 16  # below it noise is not added before torch's step, where it is divided by the momentum
_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_params: Callable[[dict[str, Any]], list[Any]] = itemgetter("params")
_read: Callable[[dict[str, Any]], tuple[float, ...]] = itemgetter(*_BEFORE)


class Form(NamedTuple):
    """The step of a rule in the form that :mod:`bayesopt_chain.engine.optimizer_cpu` takes.

    Attributes:
        kind: the kernel's number for the kind of step.
        square: the name of the averaged squared gradient in the leaf's state; ``None`` for SGD.
        square_decay: the decay of that average.
        correction: the factor of the root of the average that corrects its bias in the first updates.
    """

    kind: int
    square: str | None = None
    square_decay: float = 0.0
    correction: float = 1.0


class Leaves:
    """Leaves of one group, dtype and device whose step has equal numbers.

    Attributes:
        group: their parameter group.
        clock: the number of their update.
        before: the numbers of the last step that drew noise; ``None`` before the first draw.
        last: for each branch key and count of the last draw, if it is made again.
        params, states: the parameters, and their entries of ``optimizer.state``.
        numbers: the leaves' numbers in the random stream.
        chunks, job: what the two ways to make a step keep; empty and ``None`` until a step makes them.
        linear: the numbers of torch's step.
        noise: the coefficients of the noise; ``None`` at temperature 0.
        branches: for both branches the tuple ``(step size, factor of the last draw, of this one)``; ``None`` if it rests.
        learned_until: the number of the last update in which the denominator learned.
        is_frozen: whether it no longer learns.
        is_early: whether noise may be added to the velocity before torch's step, which then moves the parameter by it.
        form: the step in the form that the kernel takes; ``None`` if it cannot make it.
        fits: whether the kernel can make a step with these numbers.
        shapes, tensors, count: of the kernel's call: the shapes of the parameters, all tensors that it writes, and a function
            that advances the leaves' counts of updates.
    """

    shapes: list[torch.Size]
    tensors: list[Tensor]
    count: Callable[[], None] | None

    def __init__(self, group: dict[str, Any], clock: Clock, before: Before | None, last: Any) -> None:
        self.group, self.clock, self.before, self.last = group, clock, before, last
        self.params: list[Any] = []
        self.states: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.chunks: dict[int, Any] = {}
        self.job: Any = None

    def read(self, rule: Any, temperature: float) -> tuple[object, ...]:
        """Read the numbers of a step; return what has to stay the same for chunks and job to hold."""
        group, updates = self.group, self.clock.updates
        self.linear: Linear = rule._linear(group, self.clock)
        self.noise: Noise | None = rule._noise(self.linear, temperature, self.before) if temperature > 0.0 else None
        self.learned_until = min(updates, group.get("freeze_after") or updates)
        self.is_frozen = self.learned_until < updates
        asks_for_torch = group.get("foreach") is not None or group.get("fused") is False or group.get("differentiable")
        is_spread = rule._cache.runs is not None  # the kernel draws whole leaves
        self.form: Form | None = None if asks_for_torch or is_spread else rule._form(group, self.learned_until)
        linear, noise = self.linear, self.noise or Noise()
        has_velocities = all([state.get("momentum_buffer") is not None for state in self.states])
        is_first = linear.step_size > 0.0 and linear.momentum >= _LEAST_MOMENTUM
        self.is_early = not rule.adaptive and has_velocities and is_first
        self.branches = [
            (linear.step_size, noise.previous, noise.current) if noise.current > 0.0 or noise.previous else None,
            (linear.direct, noise.direct_previous, noise.direct) if linear.direct > 0.0 else None,
        ]
        self.fits = self.form is not None and self.branches[0] is not None and not noise.discarded
        form = self.form and self.form.kind
        rests = [branch is None for branch in self.branches]
        return self.noise is None, self.is_frozen, form, *rests, linear.velocity, group.get("noise_kept", True)

    def draws(self, branch: int) -> list[Tensor]:
        """The last draws of a branch, zeros before the first one; empty if they are not kept."""
        if not self.group.get("noise_kept", True):
            return []
        name = _DRAWS[branch]
        for p, state in zip(self.params, self.states):
            if name not in state:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)
        return [state[name] for state in self.states]

    def remember(self, branches: int) -> None:
        """Write the numbers of this step into the state, and key and count of draws that are not kept.

        A leaf that has drawn nothing yet, since lr is 0, gets all its entries: ``torch.distributed.checkpoint`` makes a step at
        lr = 0 to find out which entries a state has, and loads only these.

        Args:
            branches: how many branches of the step have a noise of their own.
        """
        before, kept = self.noise and self.noise.before, self.group.get("noise_kept", True)
        entry: dict[str, Any] = {}
        if before is None:
            entry = dict(_UNKNOWN)
            for branch in range(branches):
                self.draws(branch)
                entry |= {} if kept else dict(zip(_AGAIN[branch], (self.group["noise_key"], -1)))
        elif before != self.before:
            # a name for each number, since ``torch.distributed.checkpoint`` can flatten floats, but not tuples
            entry = dict(zip(_BEFORE, before))
        if not kept and before is not None:
            now = self.group["noise_key"], self.group["noise_count"]
            self.last = tuple([last if branch is None else now for last, branch in zip(self.last, self.branches)])
            entry |= {n: x for names, last in zip(_AGAIN, self.last) for n, x in zip(names, last) if last[1] >= 0}
        for state in self.states if entry else ():
            state.update(entry)
        self.before = before


class Plan:
    """The leaves that need more than torch's step.

    Attributes:
        work: all of them.
        noisy, groups: those that get noise, and their parameter groups.
        is_whole: whether every parameter that has a gradient gets noise.
        in_one_pass: whether the kernel made the last step.
        repeats: whether this step has the numbers of the last one.
    """

    def __init__(self, rule: Any, work: list[Leaves], temperatures: list[float]) -> None:
        self.work, self.is_hot = work, [t > 0.0 for t in temperatures]
        self.patterns = self._read(rule, temperatures)
        self.noisy = [x for x in work if x.noise is not None]
        params = [p for group in rule.param_groups for p in group["params"]]
        self.absent = [p for p in params if p.grad is None]
        self.groups = [group for group in rule.param_groups if any([x.group is group for x in self.noisy])]
        self.present = [p for x in work for p in x.params]
        self.is_whole = sum([len(x.params) for x in self.noisy]) + len(self.absent) == len(params)
        self.redraws = any([x.last is not NEVER for x in self.noisy])
        self.in_one_pass = self.repeats = False
        self.objects: list[Any] = []

    def _read(self, rule: Any, temperatures: list[float]) -> list[tuple[object, ...]]:
        by_group = {id(group): t for group, t in zip(rule.param_groups, temperatures)}
        return [x.read(rule, by_group[id(x.group)]) for x in self.work]

    def keep(self, rule: Any) -> None:
        """After a step, write its numbers into the state, and store what :meth:`holds` compares before the next one."""
        if self.repeats and not self.redraws:
            return
        self.settled = not rule.counters and all([x.before == x.noise.before for x in self.noisy if x.noise])
        for x in self.noisy:
            x.remember(rule._branches(x.group))
        first = not self.objects
        self.objects, self.settings = _objects(rule), _settings(rule)
        self.settled = self.settled and all(map(_is_fixed, self.settings))
        if first:  # later on they are the same
            tensors = [x for x in self.objects if type(x) in KINDS and x.device.type in ("cpu", "cuda")]
            self.tensors = list({id(x): x for x in tensors}.values())
            # views tell whether ``.data`` was replaced or resized, which a kernel that takes addresses does not see
            self.views = [x.detach() for x in self.tensors]

    def holds(self, rule: Any) -> bool:
        """Return whether leaves, tensors and their memory are those of the last step, and read the numbers of this one.

        Raises:
            ValueError: no noise matches the numbers. Nothing has moved then.
        """
        if not (_same(_objects(rule), self.objects) and all(map(Tensor.is_set_to, self.tensors, self.views))):
            return False
        if NoneType in map(type, map(_gradient, self.present)):
            return False
        if self.absent and any([p.grad is not None for p in self.absent]):
            return False
        self.repeats = self.settled and _same(_settings(rule), self.settings)
        if self.repeats:
            return True
        temperatures = [*map(rule._temperature, rule.param_groups)]
        if self.is_hot != [t > 0.0 for t in temperatures]:
            return False
        for x in (
            self.work if rule.counters else ()
        ):  # they share their numbers while they have made equally many updates
            if max([len({*map(float, [s.get(name, 0.0) for s in x.states])}) for name in rule.counters]) > 1:
                return False
            x.clock = rule._clock(x.states[0])
        return self._read(rule, temperatures) == self.patterns


def _objects(rule: Any) -> list[Any]:
    """All objects of an optimizer on which a plan depends; whatever is replaced shows in their identities."""
    state, groups = rule.state, rule.param_groups
    values = chain.from_iterable(map(dict.values, state.values()))
    return [state, *state, *values, *groups, *chain.from_iterable(map(_params, groups))]


def _settings(rule: Any) -> list[Any]:
    """All values of the parameter groups on which the numbers of a step depend."""
    settings: list[Any] = []
    for group in rule.param_groups:
        for name, value in group.items():
            if name != "params" and name != "noise_count":
                settings.append(value)
    return settings


def _same(xs: Collection[Any], ys: Collection[Any]) -> bool:
    """Whether two collections hold the same objects, in the same order."""
    return len(xs) == len(ys) and all(map(is_, xs, ys))


def _is_fixed(value: Any) -> bool:
    """Whether a value can only change by being replaced."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (float, int, str, type(None)))


def last_step(state: dict[str, Any]) -> Before | None:
    """Read the numbers of the last step that drew noise from a leaf's state entry; ``None`` if nothing was drawn yet.

    Raises:
        ValueError: the entry has a draw, and lacks a number.
    """
    if "noise" not in state and "noise_at" not in state:
        return None
    if lost := [name for name in _BEFORE if name not in state]:
        raise ValueError(
            f"bc.optim: optimizer.state[p] has a last draw but no {lost[0]}, without which no noise matches it; delete 'noise' "
            "and 'noise_direct' from it to go on from its parameters and velocities"
        )
    before = Before(*_read(state))
    return None if math.isnan(before.temperature) else before


def last_draws(state: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Read, for each branch, key and count of the last draw; ``(-1, -1)`` if there was none."""
    return tuple([(state.get(of, -1), state.get(at, -1)) for of, at in _AGAIN])
