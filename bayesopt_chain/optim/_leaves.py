r"""Make the steps of leaves at temperature > 0: by one kernel, or by torch's step to which noise is added.

A leaf is one parameter, and :class:`Leaves` are those of a group whose numbers are equal. The optimizer keeps them from step to
step while groups, parameters and state hold the same objects, and these the same memory (:meth:`Leaves.holds`); the numbers are
read anew in every step.

With ``e`` and ``e_1`` of :mod:`bayesopt_chain.optim._rule` and the denominator ``D`` of an adaptive rule (``D = 1`` for SGD),
the noise that follows torch's step is

    V += D^(1/2) e,          theta -= D^(-1/2) (h e + h_1 e_1)

If the velocity averages ``g / D`` (RMSprop), its part is ``V += D^(-1/2) e``. ``e`` is ``current xi_t + previous xi_{t-1}``,
with the standard normals ``xi_t`` of step ``t``. The last draw ``xi_{t-1}`` is kept in ``optimizer.state[p]["noise"]``. Its
term is added first, and then the new draw overwrites it. If the group has ``noise_kept=False``, the last draw is not kept:
Philox makes it again, bit for bit, from its key ``state[p]["noise_of"]`` and its count ``state[p]["noise_at"]``.

On a CPU :mod:`bayesopt_chain.engine.optimizer_cpu` makes torch's step, draws and noise in one pass, with the same draws. A draw
is a function of key, leaf number, element and count, so that it does not depend on how leaves are cut into blocks.

A denominator ``D`` that no longer learns makes the step momentum with a fixed preconditioner, which torch does not have:

    V' = mu V + b g,        theta' = (1 - s) theta - (h V' + h_1 g) / D

or, if the velocity averages ``g / D`` (RMSprop), ``V' = mu V + g / D`` and ``theta' = theta - h V'``.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import (
    dispatch_modes,
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_copy_,
    foreach_mul_,
    is_dtensor,
    local,
    local_parts,
)
from bayesopt_chain.distributed.parts import elements_of, is_part
from bayesopt_chain.engine.optimizer_cpu import Counter, Job, kernels
from bayesopt_chain.optim._checks import KINDS
from bayesopt_chain.optim._rule import Before, Linear, Noise, noise_of
from bayesopt_chain.random.philox import Runs, draw_elements, parts_of_leaves
from bayesopt_chain.random.stream import draw_number

# names in ``optimizer.state[p]`` of the numbers of the last step, and by branch (0 momentum, 1 direct) of the last draw and of
# its key and count
_BEFORE = tuple([f"noise_{name}" for name in Before._fields])
_DRAWS = ("noise", "noise_direct")
_AGAIN = ("noise_of", "noise_at", "noise_direct_of", "noise_direct_at")
_NO_NUMBERS = (math.nan,) * len(_BEFORE)  # before the first draw
_HALF, _MOMENTUM = map(Before._fields.index, ("half", "momentum"))
_NEVER = (-1,) * 4  # for each branch key and count of a last draw that is kept, or that was never made
NOTHING = _NO_NUMBERS, _NEVER  # what :func:`remembered` reads before the first draw
NUMBERS = (*_BEFORE, *_AGAIN)  # 0-d tensors
REMEMBERED = (*_DRAWS, *NUMBERS)
_LEAST_MOMENTUM = 1 / 16  # below it noise is not added before torch's step, where it is divided by the momentum
BLOCK = 2**18  # elements of a block of a large leaf, few enough for a block and its draws to stay in a CPU's cache
_FORM = attrgetter("shape", "dtype", "is_cpu", "layout")
gradient: Callable[[Tensor], Tensor | None] = attrgetter("grad")


class Leaves:
    """Leaves of one group, dtype and device whose step has equal numbers.

    Attributes:
        group: their parameter group.
        counts: what ``rule._counts`` reads from their state.
        memory: the numbers of the last step that drew noise, in the order of :class:`Before`, NaN before the first one.
        again: for each branch key and count of the last draw, from which it is made again where it is not kept.
        params, states: the parameters, and their entries of ``optimizer.state``.
        numbers: the leaves' numbers in the random stream.
        linear, temperature: the numbers of torch's step, and the temperature.
        layout: what has to stay the same for the job and the batches to hold.
        job: the :class:`Job` of the kernel; ``None`` until a step makes it.
        batches: the leaves in batches for tensor operations; empty until a step makes them.
        tensors: the parameters and the tensors of their state, but for the 0-d ones that are :attr:`memory` and :attr:`again`.
    """

    linear: Linear
    temperature: float
    layout: tuple[Any, ...]

    def __init__(
        self,
        group: dict[str, Any],
        counts: tuple[float, ...],
        before: Sequence[float],
        last: Sequence[int],
    ) -> None:
        self.group, self.counts = group, counts
        self.memory, self.again = array("d", before), array("q", last)
        self.params: list[Any] = []
        self.states: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.batches: list[_Batch] = []
        self.job: Any = None
        self.counter: Counter | None = None

    def read(self, rule: Any) -> tuple[object, ...]:
        """Read the numbers of a step; return its layout.

        Raises:
            ValueError: numbers for which no noise is known.
        """
        group, linear = self.group, rule._linear(self.group, self.counts)
        self.linear, self.temperature = linear, float(group["temperature"])  # a step has checked it
        kind = None
        if self.temperature > 0.0:
            if not linear.momentum and abs(self.memory[_MOMENTUM]) > 0.0:  # NaN before the first draw
                raise ValueError(
                    f"{rule._name}: a momentum that falls to 0 cannot be followed at temperature > 0; keep it above 0"
                )
            if not (0.0 <= linear.step_size < math.inf and 0.0 <= linear.direct < math.inf):
                raise ValueError(
                    f"{rule._name}: lr must be non-negative and finite at temperature > 0, got a step size of "
                    f"{linear.step_size}"
                )
            asks_for_torch = group.get("foreach") is not None or group.get("fused") is False
            # at an lr of 0 there is noise if the last step has left some to the velocity
            draws = linear.step_size > 0.0 or (self.memory[_HALF] > 0.0 and linear.momentum > 0.0)
            kind = linear.kind if draws and not asks_for_torch else None
        return self.temperature > 0.0, kind, linear.velocity, linear.direct > 0.0, group["noise_kept"]

    def holds(self, rule: Any) -> bool:
        """Whether the tensors, which are those of the last step, are where they were, and the layout is that of this step."""
        here = _here(self.tensors) if self.is_spread else self.tensors  # the parameters first, as the views of them
        if not all(map(Tensor.is_set_to, here, self.views)) or [*map(Tensor.data_ptr, here)] != self.addresses:
            return False
        if rule.adaptive:  # they share their numbers while they have made equally many updates
            counts = {*map(rule._counts, self.states)} if self.counter is None else {(self.counter.add(0) + 1.0,)}
            self.counts = counts.pop()
            if counts or math.isnan(self.counts[0]):
                return False
        return self.read(rule) == self.layout

    def make_draws(self) -> None:
        """Let the state have the last draws of all branches, zeros before the first ones, if they are kept."""
        for name in _DRAWS[: self.linear.branches] if self.group["noise_kept"] else ():
            for p, state in zip(self.params, self.states):
                if name not in state:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format, requires_grad=False)

    @property
    def before(self) -> Before | None:
        """The numbers of the last step that drew noise; ``None`` before the first one."""
        return None if math.isnan(self.memory[0]) else Before(*self.memory)

    def remember(self) -> None:
        """After the first step, note what :meth:`holds` compares before each other; write what the state lacks.

        A leaf that has drawn nothing yet, since lr is 0, gets all its entries: ``torch.distributed.checkpoint`` makes a step at
        lr = 0 to find out which entries a state has, and loads only these.
        """
        written: dict[str, Tensor] = {}  # 0-d tensors that are memory and again, which the kernel writes
        if self.temperature > 0.0:
            written |= zip(_BEFORE, torch.frombuffer(self.memory, dtype=torch.float64).unbind())
            if not self.group["noise_kept"]:
                names = _AGAIN[: 2 * self.linear.branches]
                written |= zip(names, torch.frombuffer(self.again, dtype=torch.int64).unbind())
            self.make_draws()
        self.tensors = [*self.params]
        for state in self.states:
            state.update(written)
            self.tensors += [x for name, x in state.items() if isinstance(x, Tensor) and name not in written]
        # these tell whether ``.data`` was replaced or resized, which a kernel that takes addresses does not see
        self.is_spread, here = any(map(is_dtensor, self.params)), _here(self.tensors)
        self.views, self.addresses = here[: len(self.params)], [*map(Tensor.data_ptr, here)]

    # the step by the kernel

    def has_job(self) -> bool:
        """Whether the kernel can make this step; makes its call, if there is none yet.

        It cannot if the group asks for another implementation, if a tensor is not contiguous, not on a CPU or neither float32
        nor float64, if this rank has a part of a leaf, or if torch has not yet made the state, as it does in the first step.
        """
        if self.layout[1] is None or dispatch_modes() or (self.job is None and not self._made_job()):
            return False
        self.gradients: list[Any] = [*map(gradient, self.params)]
        return self._is_fit(self.gradients)

    def _is_fit(self, tensors: Sequence[Any]) -> bool:
        """Whether the kernel, which checks nothing, may read tensors: contiguous ones like the parameters."""
        return [*map(_FORM, tensors)] == self.forms and all(map(Tensor.is_contiguous, tensors))

    def _made_job(self) -> bool:
        params, states, linear = self.params, self.states, self.linear
        like, self.forms = params[0], [*map(_FORM, params)]
        if not like.is_cpu or like.dtype not in kernels():
            return False
        lists = [params, *([s.get(n) for s in states] if n else [] for n in (linear.velocity, linear.square))]
        steps: list[Any] = [state.get("step") for state in states] if linear.square else []
        # no entry of the state is made before torch has made its own; the kernel draws whole leaves
        if not all([KINDS.issuperset(map(type, xs)) for xs in (*lists, steps)]) or any(map(is_part, params)):
            return False
        self.make_draws()
        direct = linear.direct > 0.0
        lists += [[s[n] for s in states if n in s] if used else [] for n, used in zip(_DRAWS, (True, direct))]
        if not all([self._is_fit(xs) for xs in lists if xs]) or (steps and not Counter.can_count(steps)):
            return False
        draws = tuple(self.numbers), tuple([draw_number(n, 1) for n in self.numbers]) if direct else ()
        self.moved = [y for ys in (*lists, steps) for y in ys]
        self.counter = Counter(steps) if steps else None
        sizes = tuple([p.numel() for p in params])
        self.job = Job(self.layout[1], like.dtype, sizes, lists, draws, (self.memory, self.again))
        return True

    def move(self) -> None:
        """Make the step by the kernel."""
        group, linear = self.group, self.linear
        sign, eps = -1.0 if group["maximize"] else 1.0, float(group.get("eps", 0.0))
        decay = 0.0 if group.get("decoupled_weight_decay") else float(group["weight_decay"])
        # the kernel writes by addresses, and autograd has to know that the tensors changed
        torch.autograd.graph.increment_version(self.moved)
        if self.counter is not None:
            self.counter.add()
        numbers = (sign, decay, eps, *linear[:7], self.temperature)
        self.job.run(self.gradients, numbers, group["noise_key"], group["noise_count"])


# torch's step, and the noise by tensor operations


def step_by_operations(rule: Any, work: Sequence[Leaves], others: list[Tensor]) -> None:
    """Make torch's step, and that of leaves whose denominator no longer learns, and add the noise.

    Noise of SGD's velocity is added before torch's step, as ``V += e / mu``: torch's step multiplies the velocity by ``mu`` and
    moves the parameter by ``-h V``, which adds ``e`` to both. All other noise is added after the step.

    Args:
        rule: the optimizer.
        work: the leaves that need more than torch's step.
        others: parameters that do not take part in this step.
    """
    early: list[Leaves] = []
    noises = [(x, noise_of(x.linear, x.temperature, x.before)) for x in work if x.temperature > 0.0]
    for x, noise in noises:
        name = x.linear.velocity or ""
        velocities = [local(v) for v in [state.get(name) for state in x.states] if v is not None]
        if velocities and noise.velocity_scale != 1.0:  # momentum and noise are of the rescaled velocity
            foreach_mul_(velocities, noise.velocity_scale)
        moves_by_velocity = x.linear.step_size > 0.0 and x.linear.momentum >= _LEAST_MOMENTUM
        if not rule.adaptive and moves_by_velocity and len(velocities) == len(x.params):
            early.append(x)
            _add_noise(rule, x, noise, 0, early=True)
    # those whose denominator no longer learns
    frozen = [x for x in work if x.counts and rule._learned(x.group, x.counts) < x.counts[0]]
    left_out = [(p, p.grad) for p in (*others, *(p for x in frozen for p in x.params))]
    for p, _ in left_out:  # torch's step leaves out what has no gradient
        p.grad = None
    try:
        rule._torch_step(None)
    finally:
        for p, gradient in left_out:
            p.grad = gradient
    for x in frozen:
        _move_frozen(rule, x)
    for x, noise in noises:
        for branch in (1,) if x in early else (0, 1):
            _add_noise(rule, x, noise, branch, early=False)
        x.memory[:] = array("d", noise.before or _NO_NUMBERS)


class _Batch(NamedTuple):
    """Small leaves, or a block of a large one, whose tensors stay in cache and need little scratch memory.

    Attributes:
        params: the parameters.
        state: by name the tensors of their state that have the shape of the parameter.
        runs, numbers: which elements of which leaf in the random stream each of them is.
    """

    params: list[Tensor]
    state: dict[str, list[Tensor]]
    runs: list[Runs]
    numbers: list[int]

    def row_of(self, name: str) -> Tensor:
        """The elements of all leaves of a tensor of the state, as one vector."""
        return torch.cat([x.reshape(-1) for x in self.state[name]])

    def draw(self, branch: int, at: Sequence[int]) -> list[Tensor]:
        """The draws of a branch, by their key and count."""
        like = self.params[0]
        key, count = (torch.full((), n, dtype=torch.int64, device=like.device) for n in at)
        elements = parts_of_leaves(tuple(self.runs), tuple([draw_number(n, branch) for n in self.numbers]))
        return [y.view(p.shape) for y, p in zip(draw_elements(key, count, elements, like.dtype), self.params)]


def _batches(x: Leaves) -> list[_Batch]:
    """Put small leaves together, and cut large ones that lie in one piece."""
    # on a GPU blocks need not fit a cache, and larger ones mean fewer kernel launches
    limit, room = BLOCK if x.params[0].is_cpu else 64 * BLOCK, 0
    batches = list[_Batch]()
    for p, state, number in zip(x.params, x.states, x.numbers):
        names = [name for name, y in state.items() if isinstance(y, Tensor) and y.shape == p.shape]
        alike, runs = _here([p, *(state[name] for name in names)]), elements_of(p)
        n = alike[0].numel()
        whole = n <= limit or len(runs) != 1 or not all([y.is_contiguous() for y in alike])
        most = max(n, 1) if whole else limit
        for at in range(0, n, most):
            size = min(most, n - at)
            if not batches or room < size:  # a batch of several leaves is to need little memory for its draws
                batches.append(_Batch([], {}, [], []))
                room = BLOCK
            params, *entries = alike if whole else [y.view(-1)[at : at + size] for y in alike]
            batches[-1].params.append(params)
            batches[-1].runs.append(runs if whole else ((runs[0][0] + at, size),))
            batches[-1].numbers.append(number)
            for name, y in zip(names, entries):
                batches[-1].state.setdefault(name, []).append(y)
            room -= size
    return batches


def _here(xs: Iterable[Any]) -> list[Tensor]:
    """This rank's parts of tensors, which share their memory."""
    return local_parts([x.detach() for x in xs])


def _add_noise(rule: Any, x: Leaves, noise: Noise, branch: int, early: bool) -> None:
    """Add ``previous xi_{t-1} + current xi_t`` of one branch to parameters and velocities."""
    step_size = (x.linear.step_size, x.linear.direct)[branch]
    factors = (noise.momentum, noise.direct)[branch]
    if not any(factors):
        return
    learned = rule._learned(x.group, x.counts)
    if x.before is None and x.params[0].dtype in (torch.bfloat16, torch.float16):
        for p, state in zip(x.params, x.states):
            step = x.linear.step_size * max(*noise.momentum, *noise.direct)
            if rule.adaptive:  # the noise of the parameter is divided by D^(1/2)
                step /= float(local(rule._denominator(x.group, learned, state.__getitem__)).float().mean().sqrt())
            checks.rounds_away(f"{rule._name}: a parameter", local(p), step, "keep float32 parameters and use autocast")
    if not x.batches:
        x.make_draws()
        x.batches = _batches(x)
    last, now = x.again[2 * branch : 2 * branch + 2], (x.group["noise_key"], x.group["noise_count"])
    for batch in x.batches:
        params, kept, roots = batch.params, batch.state.get(_DRAWS[branch], []), []
        velocities = batch.state.get(x.linear.velocity or "", []) if branch == 0 else []
        if rule.adaptive:
            row = rule._denominator(x.group, learned, batch.row_of)
            roots = [r.view(p.shape) for r, p in zip(row.sqrt_().split([p.numel() for p in params]), params)]
        for size, at in zip(factors, (last, now)):
            if at is last and not (size and (kept or last[1] >= 0)):
                continue
            draws = kept if at is last and kept else batch.draw(branch, at)
            if early:
                foreach_add_(velocities, draws, alpha=size / x.linear.momentum)
            elif not roots:
                foreach_add_(params, draws, alpha=-step_size * size)
                foreach_add_(velocities, draws, alpha=size) if velocities else None
            else:
                foreach_addcdiv_(params, draws, roots, value=-step_size * size)
                if velocities:
                    (foreach_addcdiv_ if rule.averages_scaled else foreach_addcmul_)(
                        velocities, draws, roots, value=size
                    )
            if at is now and kept:
                foreach_copy_(kept, draws)
    x.again[2 * branch : 2 * branch + 2] = array("q", now)


def _move_frozen(rule: Any, x: Leaves) -> None:
    """Make the step of leaves whose denominator no longer learns, in place of torch's step."""
    group, linear, learned = x.group, x.linear, rule._learned(x.group, x.counts)
    for p, state in zip(x.params, x.states):
        # as in torch: the sign of maximize first, then the coupled weight decay
        g = -p.grad if group["maximize"] else p.grad
        if group["weight_decay"] and not group.get("decoupled_weight_decay", False):
            g = g.add(p, alpha=group["weight_decay"])
        denominator = rule._denominator(group, learned, state.__getitem__)
        scaled = g / denominator if rule.averages_scaled or linear.velocity is None else g
        p.mul_(1.0 - linear.shrink)
        if linear.direct:
            p.addcdiv_(g, denominator, value=-linear.direct)
        if linear.velocity is not None:
            scaled = state[linear.velocity].mul_(linear.momentum).add_(scaled, alpha=linear.gain)
        if rule.averages_scaled or linear.velocity is None:
            p.add_(scaled, alpha=-linear.step_size)
        else:
            p.addcdiv_(scaled, denominator, value=-linear.step_size)
        rule._count_update(state, group)


def remembered(group: dict[str, Any], state: dict[str, Any]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Read from a leaf's state the numbers of the last step that drew noise, and key and count of draws that are made again.

    Returns:
        The numbers in the order of :class:`Before`, NaN if nothing was drawn yet; for each branch key and count, -1 if there
        was no draw, or if draws are kept.

    Raises:
        ValueError: the state has a draw, and lacks a number; the last draw was kept and is to be made again, or the other way
            round.
    """
    kept, was_kept, was_not = group["noise_kept"], "noise" in state, state.get("noise_at", -1) >= 0
    if (was_kept or "noise_at" in state) and (lost := [name for name in _BEFORE if name not in state]):
        raise ValueError(
            f"bc.optim: optimizer.state[p] has a last draw but no {lost[0]}, without which no noise matches it; delete 'noise' "
            "and 'noise_direct' from it to go on from its parameters and velocities"
        )
    if was_not if kept else was_kept:
        raise ValueError(
            f"bc.optim: keep_draws (group['noise_kept']) was {not kept} at the last draw and is {kept} now, so that this draw "
            "would be lost; set it back, or make a step at temperature 0 first, which forgets the draw"
        )
    before = tuple([float(state.get(name, math.nan)) for name in _BEFORE]) if was_kept or was_not else _NO_NUMBERS
    last = _NEVER if kept else tuple([int(state.get(name, -1)) for name in _AGAIN])
    return _NO_NUMBERS if math.isnan(before[0]) else before, last
