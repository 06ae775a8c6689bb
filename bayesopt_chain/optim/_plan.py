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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesopt_chain.links.room import Room
from bayesopt_chain.optim._rule import Before, Linear, Noise

BLOCK = 2**18  # elements of a large leaf that are treated together, while they are in cache
# what the last step was, by names in ``optimizer.state[p]``
BEFORE = tuple([f"noise_{name}" for name in Before._fields])
_AGAIN = ("noise_at", "noise_of", "noise_direct_at", "noise_direct_of")  # which draws to make again
REMEMBERED = ("noise", "noise_direct", *_AGAIN, *BEFORE)
_NOT_SETTINGS = ("params", "param_names", "noise_count")  # entries of a group that say nothing about the step
_SWITCHES = ("noise_key", "dampening")  # numbers, but draws are made from one, and torch's fused kernel knows no other
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
        room: what is left to the noise of the batches; ``None`` where none is.
        param_groups, state: torch's.
    """

    room: Room | None
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

    def _form(self, group: dict[str, Any], updates: int) -> Form | None:
        """The step as the kernel of adaptive rules takes it, ``D`` being that of ``updates``; ``None`` where it knows none."""
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
        branches: for the noise of the velocity, and for that of the direct way, the step size and how much is added of the last
            draw and of this one.
        held: the update whose denominator counts, the last one before freezing; the current one where nothing is frozen.
        route: the way of the noise.
    """

    __slots__ = ("before", "branches", "clock", "group", "has_velocity", "held", "linear", "noise", "route")

    def __init__(self, group: dict[str, Any], clock: Clock, before: Before | None, has_velocity: bool) -> None:
        self.group, self.clock, self.before, self.has_velocity = group, clock, before, has_velocity

    def work_out(self, rule: Rule, temperature: float) -> Route:
        """Work out what depends on the numbers of the group, and return the way that the noise takes now."""
        group, updates = self.group, self.clock.updates
        self.linear = linear = rule._linear(group, self.clock)
        self.noise = rule._noise(linear, temperature, self.before) if temperature > 0.0 else Noise()
        self.held = min(updates, group.get("freeze_after") or updates)
        noise = self.noise
        self.branches = (
            (linear.step_size, noise.previous, noise.current),
            (linear.direct, noise.direct_previous, noise.direct),
        )
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


class Tensors(NamedTuple):
    """What noise is added to, and what it is made of, for some leaves or for a block of one.

    Attributes:
        params: parameters.
        velocities: those that the noise goes to; none where it goes to parameters only.
        roots: square roots of denominators; none where there are no denominators.
        draws: where the last draws lie, if they are kept, and where new ones are made; like parameters.
    """

    params: list[Tensor]
    velocities: list[Tensor]
    roots: list[Tensor]
    draws: list[Tensor]


class Batch(NamedTuple):
    """Small leaves with the same numbers.

    Attributes:
        work: the leaves.
        numbers: of their step.
        branch: 0 for the noise of the velocity, 1 for that of the gradient's direct way.
        tensors: theirs; no draws where draws are made again, and no denominators, which are made at every step.
        fill: ``fill()`` overwrites the draws with those of this step.
    """

    work: list[Work]
    numbers: Numbers
    branch: int
    tensors: Tensors
    fill: Callable[[], None]


class Place:
    """The noise that is added at one place in a step: in front of torch's step, or behind it.

    Attributes:
        large: the large leaves, each with the branch of its noise.
        small: by branch, the small leaves.
        batches: these in batches, made when a step first comes to them.

    Args:
        branches: by branch, the leaves.
        most: elements of the largest small leaf.
    """

    def __init__(self, *branches: list[Work], most: float) -> None:
        self.large = [(branch, w) for branch, leaves in enumerate(branches) for w in leaves if w.param.numel() > most]
        self.small = [
            (branch, [w for w in leaves if w.param.numel() <= most]) for branch, leaves in enumerate(branches)
        ]
        self.batches: list[Batch] | None = None


class FusedMove(NamedTuple):
    """A group's part of torch's fused SGD kernel, which checks nothing."""

    group: dict[str, Any]
    params: list[Tensor]
    velocities: list[Tensor]

    def gradients(self) -> list[Any] | None:
        """The gradients; ``None`` unless all tensors are dense and contiguous, on a CPU and of one dtype."""
        dtype, grads = self.params[0].dtype, list(map(_gradient, self.params))
        fit = [
            x is not None and x.layout is torch.strided and x.dtype is dtype and x.is_cpu and x.is_contiguous()
            for x in (*self.params, *grads, *self.velocities)
        ]
        return grads if dtype in (torch.float32, torch.float64) and all(fit) else None


class Form(NamedTuple):
    """What an adaptive rule says of its step for :mod:`bayesopt_chain.fused.adaptive_cpu`.

    Attributes:
        kind: the way to move, by the kernel's number.
        square: the name of the averaged square in the leaf's state.
        square_decay: by which it decays.
        correction: of its root, for the first updates.
    """

    kind: int
    square: str
    square_decay: float
    correction: float = 1.0


@dataclass(eq=False)
class Piece:
    """Small leaves that are moved in one call, or one large leaf, which is moved block by block.

    Attributes:
        work: the leaves.
        sizes: their elements.
        is_large: whether it is one large leaf.
        fresh: scratch memory for their draws, of a large leaf for those of a block.
        last: scratch memory for the last draws where these are made again; ``None`` where they are kept.
        fill: overwrites ``fresh`` with the draws of small leaves.
        fill_last: overwrites ``last`` with theirs.
        known: what the kernel was found to take in the last step, gradients left out: lists of tensors of which
            :meth:`Plan.holds` has seen that they are the same, and where they lie in memory.
    """

    work: list[Work]
    sizes: tuple[int, ...]
    is_large: bool
    fresh: Tensor
    last: Tensor | None
    fill: Callable[[], None]
    fill_last: Callable[[], None]
    known: tuple[list[list[Tensor]], list[Any], list[int]] | None = None


class Settings:
    """The entries of a parameter group: switches, of which a plan is made, and numbers, which are read at every step.

    Attributes:
        group: the group.
        is_noisy: whether its temperature is above 0.
        are_stale: whether a number may be another one than the plan was made with; :meth:`are_of` finds out.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self._params = group, list(group["params"])
        self.is_noisy = float(group["temperature"]) > 0.0
        names = [name for name in group if name not in _NOT_SETTINGS]
        numbers = [name for name in names if name not in _SWITCHES and not isinstance(group[name], _SWITCH_TYPES)]
        self._switch = _entries([name for name in names if name not in numbers])
        self._number = _entries(numbers)
        self._switches = self._switch(group)
        self._take(self._number(group))
        self.are_stale = False

    def _take(self, numbers: tuple[Any, ...]) -> None:
        """Remember other numbers. One in a tensor may change without being replaced."""
        self._numbers, self._are_fixed, self.are_stale = numbers, all(map(_is_fixed, numbers)), True

    def are_of(self, group: dict[str, Any]) -> bool:
        """Whether these are the group's parameters and switches. Its numbers may be others, of which note is taken."""
        if group is not self.group:
            return False
        numbers = self._number(group)
        if not (self._are_fixed and all(map(is_, numbers, self._numbers))):
            self._take(numbers)
        return _same(group["params"], self._params) and _same(self._switch(group), self._switches)


_are_stale: Callable[[Settings], bool] = attrgetter("are_stale")
_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def _same(xs: Collection[Any], ys: Collection[Any]) -> bool:
    """Whether two collections hold the same objects, in the same order."""
    return len(xs) == len(ys) and all(map(is_, xs, ys))


def _entries(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Read entries of a dictionary as a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda group: tuple([group[name] for name in names])


class Plan:
    """The leaves of a step, sorted by the way that their noise takes.

    Args:
        work: the leaves.
        together: whether the draws of all of them are made together, however large they are.
    """

    def __init__(self, work: list[Work], together: bool = False) -> None:
        self.work = work
        alike: dict[int, list[Work]] = {}
        for w in work:
            alike.setdefault(id(w.numbers), []).append(w)
        self.alike = list(alike.values())
        self._sort()
        self.noisy = noisy = [w for w in work if w.numbers.route.is_noisy]
        self.frozen = [w for w in work if w.numbers.route.is_frozen]
        self.groups = list({id(w.group): w.group for w in noisy}.values())
        self.redrawn = [w for w in noisy if w.redraws]
        most = math.inf if together else BLOCK
        self.in_front = Place([w for w in noisy if w.numbers.route.is_early], most=most)
        self.behind = Place(
            [w for w in noisy if w.numbers.route.is_late],
            [w for w in noisy if w.numbers.route.has_direct],
            most=most,
        )
        self.moves: list[FusedMove] | None = None
        self.pieces: list[Piece] | None = None  # of a step in one pass over memory
        self.one_pass = False  # whether the last step was made like that
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
            route, form = w.numbers.route, rule._form(w.group, w.numbers.held)
            names = [
                "noise",
                *([form.square] if form is not None else []),
                *(["noise_direct"] if route.has_direct else []),
                *([route.velocity] if route.velocity else []),
            ]
            self.remembered.append((w.param, w.state, w.numbers, names, [w.state.get(name) for name in names]))
        mine, groups = {id(w.param) for w in self.work}, {id(w.group) for w in self.work}
        self.absent = [p for g in rule.param_groups if id(g) in groups for p in g["params"] if id(p) not in mine]

    def holds(self, rule: Rule) -> bool:
        """Whether the next step has the same leaves, tensors and switches, and every leaf remembers this plan's last step."""
        groups, state, entries = rule.param_groups, rule.state, self.entries
        # of the whole state at once, since looking up a parameter hashes it
        if state is not self.state or not (_same(state, entries) and _same(state.values(), entries.values())):
            return False
        if len(groups) != len(self.settings) or not all(map(Settings.are_of, self.settings, groups)):
            return False
        try:
            for p, state, numbers, names, values in self.remembered:
                if p.grad is None or not all(map(is_, map(state.get, names), values)):
                    return False
                if numbers.before is not None and _read_numbers(state) != numbers.before:
                    return False
        except KeyError:  # somebody removed a number
            return False
        return not (self.absent and any(p.grad is not None for p in self.absent))

    def renew(self, rule: Rule) -> bool:
        """Work out the numbers of the next step; false if its noise takes another way, so that it needs a plan of its own.

        Raises:
            ValueError: numbers that no noise is matched to.
        """
        self.repeats = self.settled and not any(map(_are_stale, self.settings))
        return self.repeats or self._work_out(rule)

    def _work_out(self, rule: Rule) -> bool:
        """Work out all numbers anew; false if the noise takes another way."""
        temperatures: dict[int, float] = {}
        for settings in self.settings:
            settings.are_stale = False
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
        self._sort()
        return True

    def _sort(self) -> None:
        """Find the leaves whose velocities are more than torch's step makes of them."""
        self.rescaled = [leaves for leaves in self.alike if leaves[0].numbers.noise.velocity_scale != 1.0]
        self.coasting = [leaves for leaves in self.alike if leaves[0].numbers.noise.coasts]


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


def _is_fixed(value: Any) -> bool:
    """Whether a number cannot change while it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (float, int))


def edges_of(n: int, size: int = BLOCK) -> list[int]:
    """Where blocks of about ``size`` elements begin, and ``n``, where the last one ends.

    torch draws fewer than 16 elements by another method, so that a short rest joins the block before it.
    """
    starts = range(0, n - n % size if n % size >= 16 else n - size - n % size + 1, size)
    return [*starts, *([n - n % size] if n % size >= 16 else []), n]


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
    return [lambda x, a=a, b=b: x.view(-1)[a:b] for a, b in pairwise(edges_of(n, size))]
