"""The plan of a step at temperature > 0: which leaves get noise, at which place in the step, and with which coefficients.

A leaf is one parameter. The switches in the parameter groups, the presence of gradients and the tensors of the state decide
which leaves there are, which of them share their numbers, and where their noise is added. A :class:`Plan` is kept while none
of these change. :meth:`Plan.holds` compares them by identity before every step, so that a replaced tensor of the state, a
gradient that is missing or has come back, or a changed switch leads to a new plan. The numbers (learning rate, momentum,
temperature, numbers of the last step) are in :class:`Numbers`, one object for all leaves that share them.
:meth:`Plan.renew` computes them again if they may have changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from bayesopt_chain.engine.optimizer_cpu import Job
from bayesopt_chain.optim._rule import Before, Linear, Noise

_KINDS = (Tensor, torch.nn.Parameter)
KERNEL_DTYPES = (torch.float32, torch.float64)
_gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_SHAPE, _LAYOUT = attrgetter("shape"), attrgetter("dtype", "is_cpu", "layout")
BLOCK = 2**18  # elements of a block of a large leaf, few enough for a block and its draws to stay in a CPU's cache
# names in ``optimizer.state[p]`` under which the numbers of the last step are kept
BEFORE = tuple([f"noise_{name}" for name in Before._fields])
_AGAIN = ("noise_at", "noise_of", "noise_direct_at", "noise_direct_of")  # count and key from which a draw is made again
REMEMBERED = ("noise", "noise_direct", *_AGAIN, *BEFORE)
_NOT_SETTINGS = ("params", "param_names", "noise_count")  # entries of a group on which no plan depends
_SWITCHES = ("noise_key",)  # numbers whose change needs a new plan: fillers of draws hold the key
_SWITCH_TYPES = (bool, str, type(None))
LEAST_MOMENTUM = 1 / 16  # below it noise is not added before torch's step, where it is divided by the momentum


class Clock(NamedTuple):
    """The number of an update, counted from 1, and the product of NAdam's momenta of all earlier updates."""

    updates: int
    mu_product: float = 1.0


class Rule(Protocol):
    """An optimizer of :mod:`bayesopt_chain.optim`: its groups and state, and the numbers of torch's step that fix the noise.

    Attributes:
        adaptive: whether the step divides by a denominator ``D`` that it computes from the gradients.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        timeless: whether the numbers of a step depend on its group only, and not on the count of steps.
        counters: the names in a leaf's state of the numbers that its clock is read from.
        param_groups, state: as in ``torch.optim.Optimizer``.
    """

    adaptive: ClassVar[bool]
    averages_scaled: ClassVar[bool]
    timeless: ClassVar[bool]
    counters: ClassVar[tuple[str, ...]]
    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def _name(self) -> str:
        """The name of the optimizer in messages."""
        ...

    def _clock(self, state: dict[str, Any]) -> Clock:
        """Return the clock of a leaf's next step, from the leaf's entry of the optimizer's state."""
        ...

    def _linear(self, group: dict[str, Any], clock: Clock) -> Linear:
        """Return the numbers of torch's step for the leaves of a group at an update."""
        ...

    def _noise(self, linear: Linear, temperature: float, before: Before | None) -> Noise:
        """Return the coefficients of the noise that matches a step; raise ValueError if there are none."""
        ...

    def _temperature(self, group: dict[str, Any]) -> float:
        """Return the temperature of a group; raise ValueError if it is above 0 and no noise matches the group's options."""
        ...

    def _denominator(self, group: dict[str, Any], updates: int, get: Callable[[str], Tensor]) -> Tensor:
        """Return ``D`` as torch's step left it, in a new tensor.

        Args:
            group: the leaf's parameter group.
            updates: the number of the last update in which ``D`` learned, counted from 1.
            get: ``get(name)`` returns a tensor of the leaf's state.
        """
        ...

    def _form(self, group: dict[str, Any], updates: int) -> Form | None:
        """Return the step in the form that the kernel of one pass takes; ``None`` if the kernel cannot make it.

        Args:
            group: the leaf's parameter group.
            updates: the number of the last update in which ``D`` learned, counted from 1.
        """
        ...

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Advance a leaf's own count of updates, after an update that torch's step did not make."""
        ...


class Route(NamedTuple):
    """Where in a step the noise of a leaf is added. A plan is kept only while the routes of its leaves stay the same.

    Attributes:
        is_noisy: whether the temperature is above 0.
        is_early: whether the noise is added to the velocity before torch's step.
        is_late: whether the noise is added to the parameter and the velocity after torch's step. Both ``is_early`` and
            ``is_late`` are false if all coefficients are 0, as they may be at lr = 0.
        velocity: the name of the velocity in the leaf's state; ``None`` without a velocity.
        has_direct: whether the step has a direct branch (``h_1 > 0``), which has a noise of its own.
        is_frozen: whether the denominator no longer learns.
    """

    is_noisy: bool
    is_early: bool
    is_late: bool
    velocity: str | None
    has_direct: bool
    is_frozen: bool


class Numbers:
    """The numbers of one step for leaves of one group whose numbers are equal.

    Attributes:
        group: the parameter group of the leaves.
        clock: the number of their update.
        has_velocity: whether they had a momentum buffer before the step.
        before: the numbers of the last step that drew noise; ``None`` before the first draw.
        linear: the numbers of torch's step.
        noise: the coefficients of the noise; all 0 at temperature 0.
        branches: for the momentum branch and for the direct branch, the tuple ``(step size, coefficient of the last draw,
            coefficient of this draw)``.
        learned_until: the number of the last update in which the denominator learned; the current one if it is not frozen.
        route: where the noise is added.
    """

    __slots__ = ("before", "branches", "clock", "group", "has_velocity", "learned_until", "linear", "noise", "route")

    def __init__(self, group: dict[str, Any], clock: Clock, before: Before | None, has_velocity: bool) -> None:
        self.group, self.clock, self.before, self.has_velocity = group, clock, before, has_velocity

    def work_out(self, rule: Rule, temperature: float) -> Route:
        """Compute ``linear``, ``noise``, ``branches``, ``learned_until`` and ``route`` from the numbers of the group.

        Returns:
            The route.
        """
        group, updates = self.group, self.clock.updates
        self.linear = linear = rule._linear(group, self.clock)
        self.noise = rule._noise(linear, temperature, self.before) if temperature > 0.0 else Noise()
        self.learned_until = min(updates, group.get("freeze_after") or updates)
        noise = self.noise
        self.branches = (
            (linear.step_size, noise.previous, noise.current),
            (linear.direct, noise.direct_previous, noise.direct),
        )
        adds = noise.current > 0.0 or noise.previous != 0.0
        # adaptive rules make D in torch's step, and noise that is added before it would have to know D
        before_step = not rule.adaptive and self.has_velocity and linear.momentum >= LEAST_MOMENTUM
        is_early = adds and before_step and linear.step_size > 0.0
        self.route = Route(
            is_noisy=temperature > 0.0,
            is_early=is_early,
            is_late=adds and not is_early,
            velocity=linear.velocity,
            has_direct=linear.direct > 0.0,
            is_frozen=self.learned_until < updates,
        )
        return self.route

    def stepped(self, state: dict[str, Any]) -> None:
        """Make the numbers of this step those of the last one; ``state`` is the state entry of any of the leaves."""
        self.before = self.noise.before
        self.has_velocity = "momentum_buffer" in state


class Work(NamedTuple):
    """One leaf of a step.

    Attributes:
        numbers: the numbers of its step, shared with the leaves for which they are equal.
        param: the parameter.
        state: its entry of ``optimizer.state``.
        number: the leaf's number in the random stream, which makes its draws independent of those of other leaves.
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
        """Whether the last draw is made again from its key and count instead of being kept in the state."""
        return not self.numbers.group.get("noise_kept", True)

    def denominator(self, rule: Rule, block: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Return ``D`` of the leaf, or of the block of it that ``block`` selects from a tensor."""
        return rule._denominator(self.group, self.numbers.learned_until, lambda name: block(self.state[name]))


class Tensors(NamedTuple):
    """The tensors that noise is added to and computed from, for several leaves or for a block of one leaf.

    Attributes:
        params: the parameters.
        velocities: their velocities; empty if noise is added to the parameters only.
        roots: the square roots ``D^(1/2)`` of their denominators; empty for rules without a denominator.
        draws: tensors of the parameters' shapes. They hold the last draws, if these are kept, and are overwritten by new ones.
    """

    params: list[Tensor]
    velocities: list[Tensor]
    roots: list[Tensor]
    draws: list[Tensor]


class Batch(NamedTuple):
    """Small leaves with the same numbers, whose noise is added in one call.

    Attributes:
        work: the leaves.
        numbers: the numbers of their step.
        branch: 0 for the noise of the momentum branch, 1 for that of the direct branch.
        tensors: the tensors of the leaves. ``roots`` is empty, since denominators are computed at every step, and ``draws`` is
            empty if the last draws are not kept.
        fill: ``fill()`` overwrites the draws with those of this step.
    """

    work: list[Work]
    numbers: Numbers
    branch: int
    tensors: Tensors
    fill: Callable[[], None]


class Place:
    """The leaves that get noise at one place in a step: before torch's step, or after it.

    Attributes:
        large: the large leaves, as tuples of the branch (0 momentum, 1 direct) and the leaf.
        small: tuples of a branch and the list of its small leaves.
        batches: the small leaves in batches; ``None`` until the first step makes them.

    Args:
        branches: for each branch, the leaves that get its noise here.
    """

    def __init__(self, *branches: list[Work]) -> None:
        self.large = [(branch, w) for branch, leaves in enumerate(branches) for w in leaves if w.param.numel() > BLOCK]
        self.small = [
            (branch, [w for w in leaves if w.param.numel() <= BLOCK]) for branch, leaves in enumerate(branches)
        ]
        self.batches: list[Batch] | None = None


def are_plain(tensors: Sequence[Tensor], dtype: torch.dtype, shapes: Sequence[torch.Size]) -> bool:
    """Whether a kernel that checks nothing may read tensors by their addresses.

    Args:
        tensors: at least one tensor.
        dtype, shapes: what the kernel expects of them.

    Returns:
        Whether all are dense and contiguous, on a CPU, of this dtype and of these shapes.
    """
    plain = {*map(_LAYOUT, tensors)} == {(dtype, True, torch.strided)} and all(map(Tensor.is_contiguous, tensors))
    return plain and [*map(_SHAPE, tensors)] == shapes


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


@dataclass(eq=False)
class Piece:
    """Leaves that the kernel moves in one call.

    Attributes:
        work: the leaves.
        numbers: of their step.
        params, shapes: their parameters, and the shapes of these.
        tensors: all tensors that the kernel writes. :meth:`Plan.holds` makes sure that they are the same objects, at the same
            places in memory.
        job: the call of the kernel.
        count: advances the leaves' counts of updates; ``None`` if they have none.
        gradients: of this step.
    """

    work: list[Work]
    numbers: Numbers
    params: list[Tensor]
    shapes: list[torch.Size]
    tensors: list[Tensor]
    job: Job
    count: Callable[[], None] | None
    gradients: list[Any] = field(default_factory=list[Any])

    def has_gradients(self) -> bool:
        """Read the gradients of this step, and return whether the kernel can take them."""
        self.gradients = [*map(_gradient, self.params)]
        return are_plain(self.gradients, self.job.dtype, self.shapes)


class Settings:
    """The entries of a parameter group: switches, whose change needs a new plan, and numbers, which are read at every step.

    Attributes:
        group: the group.
        is_noisy: whether its temperature is above 0.
        are_stale: whether a number may have changed since the plan computed its coefficients; set by :meth:`are_of`.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self.group, self._params = group, list(group["params"])
        self.is_noisy = float(group["temperature"]) > 0.0
        # an entry that this library does not know counts as a number, and its value is compared at every step
        names = [name for name in group if name not in _NOT_SETTINGS]
        numbers = [name for name in names if name not in _SWITCHES and not isinstance(group[name], _SWITCH_TYPES)]
        self._switch = _entries([name for name in names if name not in numbers])
        self._number = _entries(numbers)
        self._switches = self._switch(group)
        self._take(self._number(group))
        self.are_stale = False

    def _take(self, numbers: tuple[Any, ...]) -> None:
        """Store the numbers, and whether all of them are immutable; a tensor may change without being replaced."""
        self._numbers, self._are_fixed, self.are_stale = numbers, all(map(_is_fixed, numbers)), True

    def are_of(self, group: dict[str, Any]) -> bool:
        """Return whether the group's parameters and switches are the ones stored here.

        Changed numbers do not matter for the result. They are stored, and ``are_stale`` is set.
        """
        if group is not self.group:
            return False
        numbers = self._number(group)
        if not (self._are_fixed and all(map(is_, numbers, self._numbers))):
            self._take(numbers)
        return _same(group["params"], self._params) and _same(self._switch(group), self._switches)


_are_stale: Callable[[Settings], bool] = attrgetter("are_stale")


def _same(xs: Collection[Any], ys: Collection[Any]) -> bool:
    """Whether two collections hold the same objects, in the same order."""
    return len(xs) == len(ys) and all(map(is_, xs, ys))


def _entries(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Read entries of a dictionary as a tuple."""
    return itemgetter(*names) if len(names) > 1 else lambda group: tuple([group[name] for name in names])


class Plan:
    """The leaves of a step, sorted by where in the step their noise is added.

    Args:
        work: the leaves.

    Attributes:
        work: the leaves.
        alike: lists of leaves that share one :class:`Numbers`.
        noisy, frozen, redrawn: the leaves that get noise, whose denominator no longer learns, whose last draw is made again.
        groups: the parameter groups of the noisy leaves.
        before_step, after_step: the leaves that get noise before torch's step, and after it.
        pieces: the calls of the kernel that makes a whole step; ``None`` until a step makes them.
        one_pass: whether that kernel made the last step.
        settled: whether, at equal numbers in the groups, the next step has the coefficients of the last one.
        repeats: whether this step has the coefficients of the last one.
        rescaled, discarding: lists of leaves whose velocities are multiplied before torch's step, or moved along after it.
    """

    def __init__(self, work: list[Work]) -> None:
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
        self.before_step = Place([w for w in noisy if w.numbers.route.is_early])
        self.after_step = Place(
            [w for w in noisy if w.numbers.route.is_late],
            [w for w in noisy if w.numbers.route.has_direct],
        )
        self.pieces: list[Piece] | None = None
        self.one_pass = False
        self.kept = self.settled = self.repeats = False

    def keep(self, rule: Rule) -> None:
        """Store, after a step, the tensors and settings that :meth:`holds` compares before the next step."""
        alike = [leaves[0] for leaves in self.alike]
        self.settled = rule.timeless and all([w.numbers.before == w.numbers.noise.before for w in alike])
        for w in alike:
            w.numbers.stepped(w.state)
        if self.kept:  # the objects are those of the plan's first step, as ``holds`` has seen
            return
        self.kept = True
        self.state, self.entries = rule.state, dict(rule.state)
        self.settings = [Settings(group) for group in rule.param_groups]
        self.remembered = []
        for w in self.work:
            route, form = w.numbers.route, rule._form(w.group, w.numbers.learned_until)
            names = [
                "noise",
                *([form.square] if form is not None and form.square else []),
                *(["noise_direct"] if route.has_direct else []),
                *([route.velocity] if route.velocity else []),
                *([] if rule.timeless else rule.counters),
            ]
            self.remembered.append((w.param, w.state, w.numbers, names, [w.state.get(name) for name in names]))
        # views tell whether ``.data`` of a tensor was replaced or resized since, which kernels that take addresses do not see
        held = [x for p, *_, values in self.remembered for x in (p, *values)]
        self.tensors = [x for x in held if type(x) in _KINDS and x.device.type in ("cpu", "cuda")]
        self.views = [x.detach() for x in self.tensors]
        # parameters of any group without a gradient, also of one at temperature 0: the calls that move the others leave them
        # out, so that their next gradient needs a new plan
        self.absent = [p for group in rule.param_groups for p in group["params"] if p.grad is None]

    def holds(self, rule: Rule) -> bool:
        """Return whether the plan is right for the next step.

        It is right if the leaves, tensors and switches are the same objects, if no tensor has other memory or another shape
        than before, and if the state of every leaf still holds the numbers of the last step that this plan wrote there.
        """
        groups, state, entries = rule.param_groups, rule.state, self.entries
        # the whole state is compared at once, since looking up each parameter would hash it, which is slower
        if state is not self.state or not (_same(state, entries) and _same(state.values(), entries.values())):
            return False
        if len(groups) != len(self.settings) or not all(map(Settings.are_of, self.settings, groups)):
            return False
        if not all(map(Tensor.is_set_to, self.tensors, self.views)):
            return False
        try:
            for p, state, numbers, names, values in self.remembered:
                if p.grad is None or not all(map(is_, map(state.get, names), values)):
                    return False
                if numbers.before is not None and _read_numbers(state) != numbers.before:
                    return False
        except KeyError:  # a number was removed from the state
            return False
        return not self.absent or all([p.grad is None for p in self.absent])

    def renew(self, rule: Rule) -> bool:
        """Compute the numbers of the next step, unless they are those of the last one.

        Returns:
            Whether the plan can be used; false if noise is added at another place now, so that a new plan is needed.

        Raises:
            ValueError: no noise matches the numbers.
        """
        self.repeats = self.settled and not any(map(_are_stale, self.settings))
        return self.repeats or self._work_out(rule)

    def _work_out(self, rule: Rule) -> bool:
        """Compute all numbers; return false if the noise of a leaf is added at another place now."""
        temperatures: dict[int, float] = {}
        for settings in self.settings:
            settings.are_stale = False
            temperatures[id(settings.group)] = temperature = rule._temperature(settings.group)
            if (temperature > 0.0) != settings.is_noisy:
                return False
        for leaves in self.alike:
            numbers = leaves[0].numbers
            if not rule.timeless:  # leaves share their numbers only while they have made equally many updates
                for name in rule.counters:
                    if len({*map(float, [w.state.get(name, 0.0) for w in leaves])}) > 1:
                        return False
                numbers.clock = rule._clock(leaves[0].state)
            route = numbers.route
            if numbers.work_out(rule, temperatures[id(numbers.group)]) != route:
                return False
        self._sort()
        return True

    def _sort(self) -> None:
        """Find the leaves whose velocities need more than torch's step does to them."""
        self.rescaled = [leaves for leaves in self.alike if leaves[0].numbers.noise.velocity_scale != 1.0]
        self.discarding = [leaves for leaves in self.alike if leaves[0].numbers.noise.discarded]


def has_drawn(state: dict[str, Any]) -> bool:
    """Whether a leaf's state entry holds its last draw, or the count from which the draw is made again."""
    return "noise" in state or "noise_at" in state


def last_step(name: str, state: dict[str, Any]) -> Before | None:
    """Read the numbers of the last step that drew noise from a leaf's state entry.

    Args:
        name: the name of the optimizer in messages.
        state: the leaf's entry of the optimizer's state.

    Returns:
        The numbers; ``None`` if nothing was drawn yet.

    Raises:
        ValueError: the entry was saved by a version that kept fewer numbers.
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
UNKNOWN = dict.fromkeys(BEFORE, math.nan)  # the numbers in the state entry of a leaf that has drawn nothing yet


def _is_fixed(value: Any) -> bool:
    """Whether a value is immutable: a Python number, or a tuple of these."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return isinstance(value, (float, int))


def edges_of(n: int, size: int = BLOCK) -> list[int]:
    """Return the indices at which blocks of about ``size`` elements begin, followed by ``n``, the end of the last block.

    A rest of fewer than 16 elements joins the block before it, since torch's generator draws so few elements by another
    method, and a draw in blocks has to be equal to a draw of the whole leaf.
    """
    starts = range(0, n - n % size if n % size >= 16 else n - size - n % size + 1, size)
    return [*starts, *([n - n % size] if n % size >= 16 else []), n]


def blocks_of(
    param: Tensor, state: dict[str, Any], splits: bool, size: int = BLOCK
) -> Iterable[Callable[[Tensor], Tensor]]:
    """Return one function for each block of a leaf, which selects the block from a tensor of the leaf's shape.

    Args:
        param: the leaf.
        state: its entry of the optimizer's state.
        splits: whether its draw may be made block by block.
        size: the number of elements of a block.

    Returns:
        The functions. The identity alone, if the leaf is small, if its draw may not be split, if gradients are recorded, or if
        the leaf or its state is not contiguous.
    """
    n = param.numel()
    if not splits or n <= size or torch.is_grad_enabled():
        return [lambda x: x]
    tensors = [param, *(x for x in state.values() if torch.is_tensor(x) and x.shape == param.shape)]
    if not all(x.is_contiguous() for x in tensors):
        return [lambda x: x]
    return [lambda x, a=a, b=b: x.view(-1)[a:b] for a, b in pairwise(edges_of(n, size))]
