"""What a step at temperature > 0 does to each leaf, worked out once for as long as nothing of it changes.

A plan is a function of the numbers in the parameter groups, of which parameters have a gradient, and of what is remembered of
them. It is kept where the next step would be planned alike: where no number of a step depends on the count of steps, and this
step's noise was that of the one before. :meth:`Plan.holds` looks at all of this again in front of a step, by identity, so that
whoever sets a number, replaces a tensor of the state or removes a gradient gets a new plan.
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
SURPLUSES = (Before._fields.index("surplus"), Before._fields.index("direct_surplus"))
_AGAIN = ("noise_at", "noise_of", "noise_direct_at", "noise_direct_of")  # which draws to make again
REMEMBERED = ("noise", "noise_direct", *_AGAIN, *BEFORE)
_NOT_SETTINGS = ("params", "param_names", "noise_count")  # entries of a group that are no numbers of the step


class Clock(NamedTuple):
    """The number of an update, the first one 1, and NAdam's product of the momenta before it."""

    updates: int
    mu_product: float = 1.0


class Rule(Protocol):
    """What a class of :mod:`bayesopt_chain.optim` says of torch's step, from which its noise follows.

    Attributes:
        adaptive: whether the step divides by a denominator ``D`` that it makes of the gradients.
        averages_scaled: whether the velocity averages ``g / D`` rather than ``g``.
        param_groups, state: torch's.
    """

    adaptive: ClassVar[bool]
    averages_scaled: ClassVar[bool]
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

    def _denominator(self, group: dict[str, Any], updates: int, get: Callable[[str], Tensor]) -> Tensor:
        """``D`` behind torch's step, newly made; ``get(name)`` gives a tensor of the leaf's state."""
        ...

    def _count_update(self, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Count an update of a leaf that torch's step did not make."""
        ...


class Work(NamedTuple):
    """One leaf in one step.

    Attributes:
        group: the leaf's parameter group.
        param: the leaf.
        state: its entry of ``optimizer.state``.
        number: by which its draws are told from those of other leaves.
        linear: what torch's step does to it.
        noise: what follows; ``None`` at temperature 0.
        before: the numbers of the last step that drew, in the order of :class:`Before`; ``None`` where there was none.
        updates: of this leaf, this one included.
        held: the update whose denominator counts, the last one before freezing; ``updates`` where nothing is frozen.
        early: whether the noise goes through the velocity, in front of torch's step.
    """

    group: dict[str, Any]
    param: Tensor
    state: dict[str, Any]
    number: int
    linear: Linear
    noise: Noise | None
    before: tuple[float, ...] | None
    updates: int
    held: int
    early: bool

    @property
    def redraws(self) -> bool:
        """Whether the last draw is made again from its key and count, and not kept."""
        return not self.group.get("noise_kept", True)

    @property
    def is_frozen(self) -> bool:
        """Whether the denominator no longer learns."""
        return self.held < self.updates

    def denominator(self, rule: Rule, block: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """``D`` of the leaf, or of a block of it."""
        return rule._denominator(self.group, self.held, lambda name: block(self.state[name]))


class Noisy(NamedTuple):
    """A leaf that gets noise."""

    work: Work
    noise: Noise


class Batch(NamedTuple):
    """Small leaves whose noise has the same numbers.

    Attributes:
        group: whose count of steps numbers the draws.
        noise: the numbers.
        targets: lists of tensors that the noise is added to, each with a factor.
        draws: the last draw of each leaf; none where draws are made again.
        fill: ``fill(count)`` overwrites the draws with those of that step.
        work: the leaves.
    """

    group: dict[str, Any]
    noise: Noise
    targets: list[tuple[list[Tensor], float]]
    draws: list[Tensor]
    fill: Callable[[int], None]
    work: list[Work]


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
    """The leaves of a step, sorted by the way that their noise takes."""

    def __init__(self, work: list[Work]) -> None:
        self.noisy = noisy = [Noisy(w, w.noise) for w in work if w.noise is not None]
        self.frozen = [w for w in work if w.is_frozen]
        self.groups = list({id(w.group): w.group for w, _ in noisy}.values())
        self.rescaled = [x for x in noisy if x.noise.velocity_scale != 1.0]
        self.coasting = [x for x in noisy if x.noise.coasts]
        self.redrawn = [x for x in noisy if x.work.redraws]
        self.direct = [x for x in noisy if x.work.linear.direct > 0.0]
        late = [x for x in noisy if (x.noise.current or x.noise.previous) and not x.work.early]
        self.late_large, self.late_small = _by_size(late)
        self.early_large, self.early_small = _by_size([x for x in noisy if x.work.early])
        self.early: list[Batch] | None = None  # of the small ones; made when a step first comes to them
        self.late: list[Batch] | None = None
        self.moves: list[FusedMove] | None = None
        self.kept = self.changes = False

    def keep(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take note of what the plan was made of, after its step; false if the next step would be planned otherwise.

        Only surpluses may go on changing; :meth:`follow` keeps up with them.
        """
        if self.frozen or self.rescaled or self.coasting:
            return False
        alike = {id(x.noise): x for x in self.noisy}  # leaves share their noise where the steps before were alike
        if any([_settled(x.noise.before) != _settled(x.work.before) for x in alike.values()]):
            return False
        self.state, self.settings = optimizer.state, []
        for group in optimizer.param_groups:
            read = itemgetter(*(name for name in group if name not in _NOT_SETTINGS))
            if not all(map(_is_fixed, read(group))):
                return False
            self.settings.append((group, read, read(group), list(group["params"])))
        self.remembered = []
        for w, _ in self.noisy:
            names = ("noise", *BEFORE, *([w.linear.velocity] if w.linear.velocity else []))
            self.remembered.append((w.param, w.state, names, [w.state.get(name) for name in names]))
        mine = {id(w.param) for w, _ in self.noisy}
        groups = {id(group) for group in self.groups}
        self.absent = [p for g in optimizer.param_groups if id(g) in groups for p in g["params"] if id(p) not in mine]
        self.changes = any([x.noise.before and any(x.noise.before[n] for n in SURPLUSES) for x in alike.values()])
        self.kept = True
        return True

    def follow(self) -> None:
        """Go on to the next step's noise, where surpluses of earlier steps are still running out."""
        rules = {id(x.noise): x for x in self.noisy}
        for work, noise in rules.values():
            noise.follow(work.linear)
        remember(self.noisy)
        for _, state, names, values in self.remembered:
            values[:] = map(state.get, names)

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


def has_drawn(state: dict[str, Any]) -> bool:
    """Whether a leaf's entry knows of a draw: the draw itself, or the count that makes it again."""
    return "noise" in state or "noise_at" in state


def last_step(name: str, state: dict[str, Any]) -> tuple[float, ...] | None:
    """Read what a leaf's entry remembers of the last step that drew; ``None`` where there was none.

    Args:
        name: of the optimizer, for messages.
        state: the leaf's entry of the optimizer's state.

    Returns:
        The numbers, in the order of :class:`Before`.

    Raises:
        ValueError: the entry is of a version that remembered less.
    """
    if not has_drawn(state):
        return None
    try:
        numbers = _numbers(state)
    except KeyError as absent:
        raise ValueError(
            f"{name}: optimizer.state[p] has 'noise' but no {absent}: it was saved by a version whose noise was not exact "
            "along schedules; delete 'noise' and 'noise_direct' from it to go on from its parameters and velocities"
        ) from None
    return None if math.isnan(numbers[0]) else numbers


_numbers: Callable[[dict[str, Any]], tuple[float, ...]] = itemgetter(*BEFORE)
UNKNOWN = dict.fromkeys(BEFORE, math.nan)  # of a leaf that has drawn nothing yet, by the names of one that has


def remember(noisy: Iterable[Noisy]) -> None:
    """Write what this step was: a float by a name of its own for each number, since torch can flatten floats and no tuples.

    What is not known is left as it is.
    """
    entries: dict[int, dict[str, float]] = {}  # made once for leaves that share their noise
    for work, noise in noisy:
        if noise.before is None:
            continue
        entry = entries.get(id(noise))
        if entry is None:
            entry = entries[id(noise)] = dict(zip(BEFORE, noise.before))
        work.state.update(entry)


def _settled(before: tuple[float, ...] | None) -> Any:
    """What is remembered of a step, but for its surpluses."""
    return before and Before(*before)._replace(surplus=0.0, direct_surplus=0.0)


def _by_size(leaves: list[Noisy]) -> tuple[list[Noisy], list[Noisy]]:
    """The leaves that are treated block after block, and the small ones."""
    return [x for x in leaves if x.work.param.numel() > BLOCK], [x for x in leaves if x.work.param.numel() <= BLOCK]


def _is_fixed(value: Any) -> bool:
    """Whether a setting cannot change while it is the same object."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, (bool, int, float, str))


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
    tensors = [param, *(x for x in state.values() if torch.is_tensor(x) and x.shape == param.shape)]
    n = param.numel()
    if not splits or n <= size or torch.is_grad_enabled() or not all(x.is_contiguous() for x in tensors):
        return [lambda x: x]
    # torch draws fewer than 16 elements by another method, so that a short rest joins the block before it
    starts = range(0, n - n % size if n % size >= 16 else n - size - n % size + 1, size)
    edges = [*starts, *([n - n % size] if n % size >= 16 else []), n]
    return [lambda x, a=a, b=b: x.view(-1)[a:b] for a, b in pairwise(edges)]
