"""What a step at temperature > 0 does to each leaf: leaves are sorted once, their numbers worked out as often as needed.

Which leaves there are, which of them share their numbers and which way their noise takes depends on the switches in the
parameter groups, on which parameters have a gradient and on the tensors of the state. A :class:`Plan` is kept while none of
these change, which :meth:`Plan.holds` looks at in front of every step, by identity: whoever replaces a tensor of the state,
removes a gradient or sets a switch gets a new plan. The numbers (learning rate, momentum, temperature, what the last step
was) are in :class:`Numbers`, once for all leaves that share them, and :meth:`Plan.renew` works them out anew where they may
have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import is_, itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesopt_chain.optim._rule import Before, Linear, Noise

BLOCK = 2**18  # elements of a large leaf that are treated together, while they are in cache
BEFORE = tuple(
    [f"noise_{name}" for name in Before._fields]
)  # what the last step was, by names in ``optimizer.state[p]``
_AGAIN = ("noise_at", "noise_of", "noise_direct_at", "noise_direct_of")  # which draws to make again
REMEMBERED = ("noise", "noise_direct", *_AGAIN, *BEFORE)
_NOT_SETTINGS = ("params", "param_names", "noise_count")  # entries of a group that say nothing about the step
_SWITCHES = ("noise_key",)  # a number, but one that draws are made from
_SWITCH_TYPES = (bool, str, type(None))
LEAST_MOMENTUM = 1 / 16  # below it noise is not sent through the velocity, which would divide by the momentum


class Clock(NamedTuple):
    """The number of an update, the first one 1, and NAdam's product of the momenta before it."""

    updates: int
    mu_product: float = 1.0


class Rule(Protocol):
    """What a class of :mod:`bayesopt_chain.optim` says of torch's step, from which its noise follows.

    Attributes:
        adaptive: whether the step divides by a denominator ``D`` that it makes of the gradients.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        timeless: whether the numbers of a step are those of its group, whatever the count of steps.
        param_groups, state: torch's.
    """

    adaptive: ClassVar[bool]
    averages_scaled: ClassVar[bool]
    timeless: ClassVar[bool]
    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def _name(self) -> str:
        """The optimizer in messages."""
        ...

    def _clock(self, state: dict[str, Any]) -> Clock:
        """What the numbers of a leaf's next step depend on besides its group."""
        ...

    def _linear(self, group: dict[str, Any], clock: Clock) -> Linear:
        """The linear part of torch's step in a group at that update."""
        ...

    def _noise(self, linear: Linear, temperature: float, before: Before | None) -> Noise:
        """The noise that goes with it; refuses numbers that no noise is matched to."""
        ...

    def _temperature(self, group: dict[str, Any]) -> float:
        """The temperature of a group, whose options are refused where it is above 0 and no noise is matched to them."""
        ...

    def _denominator(self, group: dict[str, Any], updates: int, get: Callable[[str], Tensor]) -> Tensor:
        """``D`` behind torch's step, newly made; ``get(name)`` gives a tensor of the leaf's state."""
        ...

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Count an update of a leaf that torch's step did not make."""
        ...


class Route(NamedTuple):
    """Which way the noise of a leaf takes. Leaves of a kept plan stay on theirs.

    Attributes:
        is_noisy: whether there is any.
        is_early: whether it goes through the velocity, in front of torch's step.
        is_late: whether it goes to parameter and velocity behind torch's step; neither where nothing is added, at lr = 0.
        velocity: the name of the velocity in the leaf's state.
        has_direct: whether the gradient's direct way has a noise of its own.
        is_frozen: whether the denominator no longer learns.
    """

    is_noisy: bool
    is_early: bool
    is_late: bool
    velocity: str | None
    has_direct: bool
    is_frozen: bool


class Numbers:
    """What leaves of one group that are alike have in common, at one step.

    Attributes:
        group: their parameter group.
        clock: their count of updates.
        has_velocity: whether they had a momentum buffer in front of the step.
        before: what they remember of the last step that drew; ``None`` where there was none.
        linear: what torch's step does to them.
        noise: what follows; all 0 at temperature 0.
        held: the update whose denominator counts, the last one before freezing; the current one where nothing is frozen.
        route: the way of the noise.
    """

    __slots__ = ("before", "clock", "group", "has_velocity", "held", "linear", "noise", "route")

    def __init__(self, group: dict[str, Any], clock: Clock, before: Before | None, has_velocity: bool) -> None:
        self.group, self.clock, self.before, self.has_velocity = group, clock, before, has_velocity

    def work_out(self, rule: Rule, temperature: float) -> Route:
        """Work out what depends on the numbers of the group, and return the way that the noise takes now."""
        group, updates = self.group, self.clock.updates
        self.linear = linear = rule._linear(group, self.clock)
        self.noise = rule._noise(linear, temperature, self.before) if temperature > 0.0 else Noise()
        self.held = min(updates, group.get("freeze_after") or updates)
        noise = self.noise
        adds = noise.current > 0.0 or noise.previous != 0.0
        in_front = not rule.adaptive and self.has_velocity and linear.momentum >= LEAST_MOMENTUM
        is_early = adds and in_front and linear.step_size > 0.0
        self.route = Route(
            is_noisy=temperature > 0.0,
            is_early=is_early,
            is_late=adds and not is_early,
            velocity=linear.velocity,
            has_direct=linear.direct > 0.0,
            is_frozen=self.held < updates,
        )
        return self.route

    def stepped(self, state: dict[str, Any]) -> None:
        """Go on behind the step; ``state`` is the entry of one of the leaves."""
        self.before = self.noise.before
        self.has_velocity = "momentum_buffer" in state


class Work(NamedTuple):
    """One leaf.

    Attributes:
        numbers: of its step, shared with leaves that are alike.
        param: the leaf.
        state: its entry of ``optimizer.state``.
        number: by which its draws are told from those of other leaves.
    """

    numbers: Numbers
    param: Tensor
    state: dict[str, Any]
    number: int

    @property
    def group(self) -> dict[str, Any]:
        """The leaf's parameter group."""
        return self.numbers.group

    @property
    def redraws(self) -> bool:
        """Whether the last draw is made again from its key and count, and not kept."""
        return not self.numbers.group.get("noise_kept", True)

    def denominator(self, rule: Rule, block: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """``D`` of the leaf, or of a block of it."""
        return rule._denominator(self.group, self.numbers.held, lambda name: block(self.state[name]))


class Batch(NamedTuple):
    """Small leaves with the same numbers.

    Attributes:
        work: the leaves.
        branch: 0 for the noise of the velocity, 1 for that of the gradient's direct way.
        params: their tensors.
        velocities: theirs; none where there are none, or the noise goes past them.
        draws: the last draw of each leaf; none where draws are made again.
        fill: ``fill(count)`` overwrites the draws with those of that step.
    """

    work: list[Work]
    branch: int
    params: list[Tensor]
    velocities: list[Tensor]
    draws: list[Tensor]
    fill: Callable[[int], None]


class FusedMove(NamedTuple):
    """A group's part of torch's fused SGD kernel, which checks nothing."""

    group: dict[str, Any]
    params: list[Tensor]
    velocities: list[Tensor]

    def takes(self, grads: list[Any]) -> bool:
        """Whether all tensors are dense and contiguous, on a CPU and of one dtype, and the gradient is not dampened."""
        dtype = self.params[0].dtype
        return (
            not self.group["dampening"]
            and dtype in (torch.float32, torch.float64)
            and all(
                [
                    x is not None and x.layout is torch.strided and x.dtype is dtype and x.is_cpu and x.is_contiguous()
                    for xs in (self.params, grads, self.velocities)
                    for x in xs
                ]
            )
        )


class Settings:
    """The entries of a parameter group: switches, of which a plan is made, and numbers, which are read at every step.

    Attributes:
        group: the group.
        is_noisy: whether its temperature is above 0.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self._params = group, list(group["params"])
        self.is_noisy = float(group["temperature"]) > 0.0
        names = [name for name in group if name not in _NOT_SETTINGS]
        numbers = [name for name in names if name not in _SWITCHES and not isinstance(group[name], _SWITCH_TYPES)]
        self._switch = _entries([name for name in names if name not in numbers])
        self._number = _entries(numbers)
        self._switches, self._numbers = self._switch(group), self._number(group)
        self._are_fixed = all(map(_is_fixed, self._numbers))

    def are_of(self, group: dict[str, Any]) -> bool:
        """Whether these are the group's parameters and switches."""
        params = group["params"]
        return (
            group is self.group
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
            and all(map(is_, self._switch(group), self._switches))
        )

    def changed(self) -> bool:
        """Whether a number may have changed since this was last asked, such as one in a tensor."""
        last, self._numbers = self._numbers, self._number(self.group)
        same = self._are_fixed and all(map(is_, self._numbers, last))
        if not same:
            self._are_fixed = all(map(_is_fixed, self._numbers))
        return not same


def _entries(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Read entries of a dictionary as a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda group: tuple([group[name] for name in names])


class Plan:
    """The leaves of a step, sorted by the way that their noise takes."""

    def __init__(self, work: list[Work]) -> None:
        self.work = work
        alike: dict[int, list[Work]] = {}
        for w in work:
            alike.setdefault(id(w.numbers), []).append(w)
        self.alike = list(alike.values())
        self.noisy = noisy = [w for w in work if w.numbers.route.is_noisy]
        self.frozen = [w for w in work if w.numbers.route.is_frozen]
        self.groups = list({id(w.group): w.group for w in noisy}.values())
        self.redrawn = [w for w in noisy if w.redraws]
        self.early_large, self.early_small = _by_size([w for w in noisy if w.numbers.route.is_early])
        self.late_large, self.late_small = _by_size([w for w in noisy if w.numbers.route.is_late])
        self.direct_large, self.direct_small = _by_size([w for w in noisy if w.numbers.route.has_direct])
        self.early: list[Batch] | None = None  # of the small ones; made when a step first comes to them
        self.late: list[Batch] | None = None
        self.moves: list[FusedMove] | None = None
        self.kept = self.settled = self.repeats = False

    def keep(self, rule: Rule) -> None:
        """Take note of what the plan was made of, after a step by it."""
        alike = [leaves[0] for leaves in self.alike]
        self.settled = rule.timeless and all([w.numbers.before == w.numbers.noise.before for w in alike])
        for w in alike:
            w.numbers.stepped(w.state)
        if self.kept:
            return
        self.kept = True
        self.state, self.entries = rule.state, dict(rule.state)
        self.settings = [Settings(group) for group in rule.param_groups]
        self.remembered = []
        for w in self.work:
            route = w.numbers.route
            names = [
                "noise",
                *(["noise_direct"] if route.has_direct else []),
                *([route.velocity] if route.velocity else []),
            ]
            self.remembered.append((w.param, w.state, w.numbers, names, [w.state.get(name) for name in names]))
        mine, groups = {id(w.param) for w in self.work}, {id(w.group) for w in self.work}
        self.absent = [p for g in rule.param_groups if id(g) in groups for p in g["params"] if id(p) not in mine]

    def holds(self, rule: Rule) -> bool:
        """Whether the next step has the same leaves, tensors and switches, and every leaf remembers this plan's last step."""
        groups, state = rule.param_groups, rule.state
        if state is not self.state or len(state) != len(self.entries) or len(groups) != len(self.settings):
            return False
        # of the whole state at once, since looking up a parameter hashes it
        if not (all(map(is_, state, self.entries)) and all(map(is_, state.values(), self.entries.values()))):
            return False
        if not all([settings.are_of(group) for group, settings in zip(groups, self.settings)]):
            return False
        try:
            for p, state, numbers, names, values in self.remembered:
                if p.grad is None or not all(map(is_, map(state.get, names), values)):
                    return False
                if numbers.before is not None and _read_numbers(state) != numbers.before:
                    return False
        except KeyError:  # somebody removed a number
            return False
        return all([p.grad is None for p in self.absent])

    def renew(self, rule: Rule) -> bool:
        """Work out the numbers of the next step; false if its noise takes another way, so that it needs a plan of its own.

        Raises:
            ValueError: numbers that no noise is matched to.
        """
        changed = [settings.changed() for settings in self.settings]
        self.repeats = self.settled and not any(changed)
        if self.repeats:
            return True
        temperatures: dict[int, float] = {}
        for settings in self.settings:
            temperatures[id(settings.group)] = temperature = rule._temperature(settings.group)
            if (temperature > 0.0) != settings.is_noisy:
                return False
        for leaves in self.alike:
            numbers = leaves[0].numbers
            if not rule.timeless:
                numbers.clock = rule._clock(leaves[0].state)
                if any([rule._clock(w.state) != numbers.clock for w in leaves[1:]]):
                    return False
            route = numbers.route
            if numbers.work_out(rule, temperatures[id(numbers.group)]) != route:
                return False
        return True


def has_drawn(state: dict[str, Any]) -> bool:
    """Whether a leaf's entry knows of a draw: the draw itself, or the count that makes it again."""
    return "noise" in state or "noise_at" in state


def last_step(name: str, state: dict[str, Any]) -> Before | None:
    """Read what a leaf's entry remembers of the last step that drew; ``None`` where there was none.

    Args:
        name: of the optimizer, for messages.
        state: the leaf's entry of the optimizer's state.

    Returns:
        Its numbers.

    Raises:
        ValueError: the entry is of a version that remembered less.
    """
    if not has_drawn(state):
        return None
    try:
        before = Before(*_read_numbers(state))
    except KeyError as absent:
        raise ValueError(
            f"{name}: optimizer.state[p] has 'noise' but no {absent}: it was saved by a version whose noise was not exact "
            "along schedules; delete 'noise' and 'noise_direct' from it to go on from its parameters and velocities"
        ) from None
    return None if math.isnan(before.temperature) else before


_read_numbers: Callable[[dict[str, Any]], tuple[float, ...]] = itemgetter(*BEFORE)
UNKNOWN = dict.fromkeys(BEFORE, math.nan)  # of a leaf that has drawn nothing yet, by the names of one that has


def _by_size(leaves: list[Work]) -> tuple[list[Work], list[Work]]:
    """The leaves that are treated block after block, and the small ones."""
    return [w for w in leaves if w.param.numel() > BLOCK], [w for w in leaves if w.param.numel() <= BLOCK]


def _is_fixed(value: Any) -> bool:
    """Whether a number cannot change while it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (float, int))


def blocks_of(
    param: Tensor, state: dict[str, Any], splits: bool, size: int = BLOCK
) -> Iterable[Callable[[Tensor], Tensor]]:
    """Functions that give a block of a leaf, and of what lies like it; one, the identity, where it is small or not contiguous.

    Args:
        param: the leaf.
        state: its entry of the optimizer's state.
        splits: whether its draw may be made block by block.
        size: elements of a block.
    """
    n = param.numel()
    if not splits or n <= size or torch.is_grad_enabled():
        return [lambda x: x]
    tensors = [param, *(x for x in state.values() if torch.is_tensor(x) and x.shape == param.shape)]
    if not all(x.is_contiguous() for x in tensors):
        return [lambda x: x]
    # torch draws fewer than 16 elements by another method, so that a short rest joins the block before it
    starts = range(0, n - n % size if n % size >= 16 else n - size - n % size + 1, size)
    edges = [*starts, *([n - n % size] if n % size >= 16 else []), n]
    return [lambda x, a=a, b=b: x.view(-1)[a:b] for a, b in pairwise(edges)]
