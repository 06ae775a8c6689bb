"""One step of SGD, SGLD, momentum, Adam and RMSprop, with weight decay: its numbers, and the pass over memory.

Neighbouring links that say what part they play (:mod:`bayesopt_chain.engine.parts`) and the matched noise that enters them are
one :class:`Engine`: [decay] [learning] [momentum] [noise] scale, on the same leaves (:func:`engines`). A step has two halves.
:meth:`Engine.numbers` reads the numbers of this step, a :class:`Move`, from links, schedules and state, and changes nothing. Of
noise under a schedule these are the rate and the temperature alone, from which the kernel works out the others. Schedules of
this library are evaluated at many counts at once, among which the kernel finds that of the leaves.
:meth:`Engine.step` hands them with the tensors to the kernel of :mod:`bayesopt_chain.engine.sweep_cpu`, which draws and moves.
Each half may decline, with nothing changed; then the links act one by one, with the same bits. One engine serves ``tx.update``
(updates in the place of gradients) and ``make_step`` (parameters moved, in place or not).
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, cycle, islice
from operator import attrgetter, is_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks, schedules
from bayesopt_chain._torch import dispatch_modes
from bayesopt_chain.engine.parts import Accumulates, Decays, Learns, Scales
from bayesopt_chain.engine.sweep_cpu import (
    ADDS,
    DECAYS,
    DIVIDES,
    DRAWS,
    FLIPS,
    MOMENT,
    MOVES,
    NESTEROV,
    PARALLEL,
    address,
    addresses,
    numbers_of,
    sweep_kernel,
)
from bayesopt_chain.matching.filters import Filtered
from bayesopt_chain.random.compiled import integers
from bayesopt_chain.random.philox import has_triton
from bayesopt_chain.random.stream import draw_numbers
from bayesopt_chain.tracing import is_traced, is_transformed
from bayesopt_chain.trees import leaves_of

_KINDS = frozenset((Tensor, torch.nn.Parameter))  # subclasses may keep their numbers elsewhere
_DTYPES = (torch.float32, torch.float64)
_FORM, _GRAD = attrgetter("shape", "dtype", "is_cpu"), attrgetter("requires_grad")
CONDITIONS = 5  # numbers of a leaf in LangevinNoiseState.conditions
_IS_CPU = attrgetter("is_cpu")
_BLOCK = 1024  # counts at which a schedule is evaluated at once


class Move(NamedTuple):
    """The numbers of one step of one leaf, in the order of the kernel (the formulas: :mod:`bayesopt_chain.engine.sweep_cpu`).

    Attributes:
        factor: ``f``, the signed learning rate.
        momentum: ``mu``.
        decay: of the parameters, in front.
        current, previous: the factors of this draw and of what is remembered of the last one.
        head: the factor of their sum.
        deferred: the part of the noise that the velocity keeps for the next step.
        velocity_scale: what the velocity is multiplied by before the step.
        remembers: 0 for ``current xi``, 1 for ``xi``, 2 for what was remembered before.
    """

    factor: float
    momentum: float = 0.0
    decay: float = 0.0
    current: float = 0.0
    previous: float = 0.0
    head: float = 1.0
    deferred: float = 0.0
    velocity_scale: float = 1.0
    remembers: float = 0.0


class Learned(NamedTuple):
    """The numbers by which a leaf learns in one step, in the order of the kernel.

    Attributes:
        square_decay, square_gain: of the mean square.
        eps, eps_root: outside and inside of its root.
        gain: of the gradient in the first moment.
        correction, square_correction: by which the two moments are divided.
        learns: 0 where the mean square stays as it is.
    """

    square_decay: float
    square_gain: float
    eps: float
    eps_root: float
    gain: float
    correction: float = 1.0
    square_correction: float = 1.0
    learns: float = 1.0


class Numbers(NamedTuple):
    """The numbers of one step.

    Attributes:
        stride: 0 where there is one rate for all leaves, 1 for each.
        adds: whether the noise is added to the gradient; false where the temperature is 0 now.
        rates: the rate of all leaves or of each, as doubles; ``None`` where it never changes.
        temperature: of noise under a schedule, whose numbers the kernel works out of rate and temperature.
        first, length: where ``rates`` are those at so many counts, from ``first`` on, among which the kernel finds that of all
            leaves by their counters; a length of 0 elsewhere.
        live: of ``rates``, for each leaf whether it has a gradient; ``None`` for all.
        learned: a :class:`Learned` as doubles, one for all leaves or one for each; ``None`` where nothing learns.
        learned_stride: 0 for all, 1 for each.
        root: the address of the function that takes roots, 0 for that of C++.
    """

    stride: int = 0
    adds: bool = True
    rates: Any = None
    temperature: float = 0.0
    first: int = 0
    length: int = 0
    live: Any = None
    learned: Any = None
    learned_stride: int = 0
    root: int = 0


class _Tensors(NamedTuple):
    """What a step reads besides the gradients, in the order of the kernel: parameters, and the state of the links.

    Each is a tensor for each leaf, or none; of the noise there is one key, one step, and conditions if its numbers change.
    """

    theta: Sequence[Any]
    centre: Sequence[Tensor]
    key: Sequence[Tensor]
    trace: Sequence[Tensor]  # and from here on what every step writes anew
    square: Sequence[Tensor]
    memory: Sequence[Tensor]
    counts: Sequence[Tensor]  # of every link that counts
    step: Sequence[Tensor]
    conditions: Sequence[Tensor]


class _Known(NamedTuple):
    """The job of a step in place, and the tensors that it was made for and found fit."""

    tensors: tuple[Tensor, ...]
    views: list[Tensor]  # of the same storages, which show whether a ``.data`` was replaced
    addresses: list[int]  # which show whether a storage has moved, as ``share_memory_`` moves it
    present: Sequence[int] | None
    moves: bool
    written: list[Tensor]
    job: array[int]
    starts: Sequence[int]  # where in it the addresses of the gradients begin


class Engine:
    """Neighbouring links that act as one.

    Attributes:
        run: the numbers of the links, in the order in which they act.
        where: the numbers of their leaves.
        noise: the number of the noise link whose draws the engine makes, or ``None``.
        is_whole: whether there is nothing else in the chain, so that a step may move the parameters at once.
    """

    # places in the state; none of them is read where there is no such link
    noise: Any
    temperature: Any = 0.0
    draws: Any = None
    of_chains: Engine | None = None  # the last result of :meth:`stacked`
    velocity: Any = None
    trace: str = "trace"  # the field of the velocity
    learner: Any = None
    rate: Any

    def __init__(self, links: Sequence[Any], plan: Any, run: Sequence[int], noise: int | None) -> None:
        layout = plan.layout
        self.run, self.noise, self.where = tuple(run), noise, plan.where[run[-1]]
        shapes, dtypes = [layout.shapes[j] for j in self.where], {layout.dtypes[j] for j in self.where}
        self.sizes = integers(tuple([shape.numel() for shape in shapes]))
        self.dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.forms = [(shape, self.dtype, True) for shape in shapes]
        self.memory_forms = [((1, *shape), self.dtype, True) for shape in shapes]
        self.is_everything = self.where == tuple(range(len(layout.shapes)))
        leaves = tuple([j for j, shape in enumerate(layout.shapes) if shape is not None])
        self.is_whole = self.where == leaves and {*run, *([noise] if noise is not None else [])} == {*range(len(links))}
        self.has_scalars = not all(shapes)
        self.centre: tuple[int, str] | None = None
        self.flags, given = 0, dict[str, float]()
        for i in run:
            match links[i].part:
                case Decays(weight_decay, flips, centre):
                    self.flags |= DECAYS * (weight_decay != 0) | FLIPS * flips
                    self.centre, given["decay"] = (i, centre) if centre else None, float(weight_decay)
                case Accumulates(momentum, nesterov):
                    self.flags |= NESTEROV * nesterov
                    self.velocity, given["momentum"] = i, float(momentum)
                case Learns() as learns:
                    self.learner, self.learns = i, learns
                    self.flags |= DIVIDES
                    if learns.momentum is not None:
                        self.flags |= MOMENT
                        self.velocity, self.trace, given["momentum"] = i, "mu", learns.momentum
                case Scales(step_size, sign):
                    self.rate, self.step_size, self.sign = i, step_size, sign
                case _:  # the noise, which enters here
                    pass
        self.is_counted = schedules.is_schedule(self.step_size)
        self.counted = [self.rate] * self.is_counted + [self.learner] * (
            self.learner is not None and self.learns.counts
        )
        self.remembers = self.changes = False
        if noise is not None:
            self._take_noise(plan.noise[noise], given)
        is_number = isinstance(self.step_size, (int, float))
        # its factor is that of a learning rate of 1 where the rate may change
        self.move = Move(self.sign * (self.step_size if is_number else 1.0), **given)
        self.constant = Numbers() if is_number and not self.changes else None
        self.constant_packed = self._packed(Numbers())  # read where numbers are constant, and then without an address
        self.chains, self.axes, self.is_large = 1, (), sum(self.sizes) > PARALLEL[noise is not None]
        self.known: _Known | None = None
        self.block: Numbers | None = None  # of the steps around the last one, at which a schedule was evaluated at once

    def stacked(self, n: int) -> Engine:
        """The engine of ``n`` chains with equal numbers, whose tensors are stacked on axis 0."""
        if self.of_chains is None or self.of_chains.chains != n:
            self.of_chains = copy.copy(self)
            self.of_chains.chains, self.of_chains.axes = n, (n,)
            self.of_chains.known = self.of_chains.block = None
            self.of_chains.forms = [((n, *shape), *layout) for shape, *layout in self.forms]
            self.of_chains.memory_forms = [((n, *shape), *layout) for shape, *layout in self.memory_forms]
            self.of_chains.is_large = n * sum(self.sizes) > PARALLEL[self.noise is not None]
        return self.of_chains

    def _take_noise(self, injection: Any, given: dict[str, float]) -> None:
        (noise_input,), process = injection.noise_inputs, injection.drawn_by_kernel
        self.flags |= DRAWS
        self.draws = integers(draw_numbers(injection.variables.numbers, (1,) * len(self.where)))
        self.remembers, self.changes = process.memory > 0, noise_input.changes
        self.temperature = injection.link.temperature
        if isinstance(process, Filtered):
            given |= {"current": process.c[0], "previous": float(self.remembers), "deferred": noise_input.deferred_gain}
            return
        ((gain, mu),), is_behind = process.branches, float(noise_input.rates[1] != ())
        rule = (self.sign, given.get("momentum", 0.0), given.get("decay", 0.0), gain, mu)
        deferred = noise_input.deferred_gain
        self.rule = array("d", (*rule, process.head, process.decay, process.order, is_behind, deferred))

    # the numbers of one step

    def numbers(self, entries: Sequence[Any], gradients: Sequence[Any]) -> Numbers | None:
        """The numbers of this step; nothing is changed.

        Args:
            entries: the state of every link of the chain.
            gradients: of all leaves of the chain, ``None`` for a missing one.

        Returns:
            The numbers, or ``None`` where the kernel cannot act or one of the numbers cannot be read now.

        Raises:
            ValueError: a learning rate or temperature that is negative or not finite.
        """
        if self.dtype not in _DTYPES or is_transformed() or is_traced() or dispatch_modes():
            return None  # a mode that watches operations must see them
        kernel = sweep_kernel()
        if kernel is None or (self.flags & (DECAYS | NESTEROV | DIVIDES) and not kernel.rounds_alike):
            return None
        present = _present(gradients if self.is_everything else [gradients[j] for j in self.where])
        found = None if present == [] else self.constant or self._moves(entries, present, self.block)
        if found is None or self.learner is None:
            return found
        root = kernel.roots[self.dtype]
        return None if root is None else self._with_learned(found._replace(root=root), entries, present)

    def _with_learned(self, numbers: Numbers, entries: Sequence[Any], present: Sequence[int] | None) -> Numbers | None:
        """The numbers of this step with those by which leaves learn; ``None`` where they cannot be read."""
        part, state = self.learns, entries[self.learner]
        if part.corrections and self.has_scalars and self.dtype != torch.get_default_dtype():
            return None  # which is that of the corrections, and torch divides a narrower 0-d leaf in it
        gain = 1.0 if part.momentum is None else 1.0 - part.momentum
        every = Learned(part.square_decay, 1.0 - part.square_decay, part.eps, part.eps_root, gain)
        if not part.counts:
            return numbers._replace(learned=_doubles([every]))
        if (at := self._counts(state.count, present)) is None:
            return None
        known = {n: self._at_count(every, n) for n in {*at}}
        rows = (
            [*known.values()]
            if len(known) == 1
            else _spread([known[n] for n in at], present, [every] * len(self.where))
        )
        return numbers._replace(learned=_doubles(rows), learned_stride=int(len(rows) > 1))

    def _at_count(self, numbers: Learned, n: int) -> Learned:
        """The numbers of a leaf that has had ``n`` updates."""
        part, count = self.learns, torch.full((), n + 1, dtype=torch.int64, device="cpu")
        learns = float(part.freeze_after is None or n < part.freeze_after)
        first, second = [float(f(count)) for f in part.corrections] or (1.0, 1.0)
        return numbers._replace(correction=first, square_correction=second, learns=learns)

    def _moves(self, entries: Sequence[Any], present: Sequence[int] | None, block: Numbers | None) -> Numbers | None:
        """The numbers of this step for a rate or a temperature that may change; ``None`` where one cannot be read.

        ``block``: those at many counts, which serve where all leaves have gradients. Another thread may change
        :attr:`block` meanwhile.
        """
        noise = entries[self.noise] if self.changes else None
        if noise is not None and not (noise.conditions and _is_readable(noise.conditions[0])):
            return None
        if block is not None and present is None:
            return block  # the kernel reads the counters
        if noise is not None and self.axes and not (_are_equal(noise.conditions[0]) and _are_equal(noise.step)):
            return None
        rates, wide = self._rates(entries, present)
        if not rates or (wide and self.has_scalars and self.dtype != torch.float64):
            return None
        temperature, is_constant = self.temperature, schedules.is_number(self.temperature)
        if noise is not None and not is_constant:
            temperature = self._value(temperature, (noise.step[0] if self.axes else noise.step).item())[0]
            if temperature is None:
                return None
            checks.at_this_step("temperature", temperature)
        for rate in rates if self.changes else ():
            if not 0.0 <= rate < torch.inf:
                checks.at_this_step("lr", rate)
        is_one = len(rates) == 1 and present is None and not self.axes
        if is_one and is_constant and schedules.is_elementwise(self.step_size):
            k = entries[self.rate].count[0].item() // _BLOCK
            block = self.block = Numbers(0, True, _values(self.step_size, k), temperature, k * _BLOCK, _BLOCK)
            return block
        every = rates if len(rates) == 1 else _spread(rates, present, [0.0] * len(self.where))
        live = None if present is None else array("B", [k in present for k in range(len(self.where))])
        stride, adds = int(len(every) > 1), is_constant or temperature != 0
        return Numbers(stride, adds, array("d", every), temperature, live=live)

    def _rates(self, entries: Sequence[Any], present: Sequence[int] | None) -> tuple[list[float], bool]:
        """The learning rate of each leaf that is present, or one for all; none if it cannot be read. And whether it is wide."""
        at = self._counts(entries[self.rate].count, present) if self.is_counted else [0]
        if at is None:
            return [], False
        known = {n: self._value(self.step_size, n) for n in {*at}}
        if any([value is None for value, _ in known.values()]):
            return [], False
        values: Any = [known[n][0] for n in (at if len(known) > 1 else at[:1])]
        return values, any([wide for _, wide in known.values()])

    def _counts(self, counts: Sequence[Tensor], present: Sequence[int] | None) -> list[int] | None:
        """The counter of each leaf that is present; ``None`` where one cannot be read, or differs between chains."""
        here = counts if present is None else [counts[k] for k in present]
        if not all(map(_IS_CPU, here)):
            return None
        if self.axes:
            if not all(map(_are_equal, here)):
                return None
            here = [c[0] for c in here]
        at: list[Any] = [*map(Tensor.item, here)]
        return at

    def _value(self, value: Any, n: Any) -> tuple[float | None, bool]:
        """A hyperparameter at a count as a number, and whether it is a float64 tensor; ``None`` where it cannot be read."""
        if isinstance(value, (int, float)):
            return float(value), False
        if not isinstance(value, Tensor):
            if schedules.is_elementwise(value):
                return _values(value, n // _BLOCK)[n % _BLOCK], True
            value = value(torch.full((), n, dtype=torch.int64, device="cpu"))
            if not isinstance(value, Tensor):
                return float(schedules.returned(value)), False
        if value.ndim or value.is_complex() or value.requires_grad or not _is_readable(value):
            return None, False
        return float(value), value.dtype == torch.float64

    # the pass over memory

    def act(self, update: Any, numbers: Numbers) -> bool:
        """Take the turn of the links in an update, or decline: then only the noise of other links has entered."""
        if update.noises:
            update.enter(self.run[0])
        g = update.g if self.is_everything else [update.g[j] for j in self.where]
        p = None if update.params is None else [update.params[j] for j in self.where]
        if (new := self.step(g, p, update.entries, numbers, update.op.inplace, moves=False)) is None:
            return False
        for j, y in zip(self.where, new):
            update.g[j] = y
        for i in self.run if update.noises else ():
            update.carry(i)
        return True

    def step(
        self, g: list[Any], p: Sequence[Any] | None, entries: list[Any], numbers: Numbers, inplace: bool, moves: bool
    ) -> list[Any] | None:
        """Make the step.

        Args:
            g: gradients of the leaves, ``None`` for a missing one. They are overwritten by the updates, if ``inplace`` and not
                ``moves``.
            p: parameters, needed for ``moves`` and weight decay.
            entries: the state of every link, of which those of the engine's links are replaced.
            numbers: what :meth:`numbers` returned for this state.
            inplace: whether the state is overwritten, and with ``moves`` the parameters.
            moves: whether the parameters are moved, rather than the updates returned.

        Returns:
            Updates or parameters; ``None``, with nothing changed, where the kernel cannot take these tensors.
        """
        found = self._tensors(p, entries, moves)
        if found.theta and moves and inplace and self._moves_on_device(g, found, numbers):
            return list(found.theta)
        present = _present(g)
        if (moves or self.flags & DECAYS) and not found.theta:
            return None
        if not (_are_like(g, self.forms, present) or (moves and _are_like(g := _dense(g), self.forms, present))):
            return None
        tensors = tuple(chain.from_iterable(found)) if inplace else ()
        known = self._same(tensors, present, moves) if inplace else None
        if known is None and not self._fit(found, present, inplace or not torch.is_grad_enabled()):
            return None
        flags = self.flags | MOVES * moves | ADDS * numbers.adds
        if not inplace:
            return self._into_new(g, found, entries, numbers, flags)
        if known is None:
            known = self.known = self._known(tensors, g, found, present, moves)
        gradients = array("q", addresses(g))
        for start in known.starts:
            known.job[start : start + len(g)] = gradients
        overwritten = () if moves else g if present is None else [g[k] for k in present]
        torch.autograd.graph.increment_version([*known.written, *overwritten])
        self._run(known.job, numbers, flags, entries)
        return list(found.theta) if moves else g

    def _tensors(self, p: Sequence[Any] | None, entries: Sequence[Any], moves: bool) -> _Tensors:
        noise, counts = None if self.noise is None else entries[self.noise], ()
        for i in self.counted:
            counts += entries[i].count
        return _Tensors(
            theta=p or () if moves or self.flags & DECAYS else (),
            centre=() if self.centre is None else getattr(entries[self.centre[0]], self.centre[1]),
            key=() if noise is None else (noise.key,),
            trace=() if self.velocity is None else getattr(entries[self.velocity], self.trace),
            square=() if self.learner is None else entries[self.learner].nu,
            memory=noise.memory if noise is not None and self.remembers else (),
            counts=counts,
            step=() if noise is None else (noise.step,),
            conditions=() if noise is None else noise.conditions,
        )

    def _same(self, tensors: tuple[Tensor, ...], present: Sequence[int] | None, moves: bool) -> _Known | None:
        """The last step in place if this one gets its tensors, and nobody has moved or replaced their memory."""
        known = self.known
        is_same = (
            known is not None
            and len(tensors) == len(known.tensors)
            and all(map(is_, tensors, known.tensors))
            and (present, moves) == known[3:5]
            and all(map(Tensor.is_set_to, tensors, known.views))
            and [*map(Tensor.data_ptr, tensors)] == known.addresses
        )
        return known if is_same else None

    def _fit(self, found: _Tensors, present: Sequence[int] | None, own: bool) -> bool:
        """Whether the kernel may run over the memory of all tensors but the gradients."""
        n, counters = len(self.where), [*found.key, *found.step, *found.counts]
        noted = (*self.axes, n, CONDITIONS), torch.float64, True
        lists = (
            (found.centre, self.forms if self.centre is not None else []),
            (found.trace, self.forms if self.velocity is not None else []),
            (found.square, self.forms if self.learner is not None else []),
            (found.memory, self.memory_forms if self.remembers else []),
        )
        return (
            len(counters) == 2 * (self.noise is not None) + n * len(self.counted)
            and {*map(_FORM, counters)} <= {(self.axes, torch.int64, True)}
            and (not self.axes or all(map(Tensor.is_contiguous, counters)))
            and (not found.conditions or _are_like(found.conditions, [noted], None))
            and all([_are_like(xs, forms, present) for xs, forms in lists if xs or forms])
            and (not found.theta or _are_like(found.theta, self.forms, present, own))
        )

    def _known(
        self, tensors: tuple[Tensor, ...], g: Sequence[Any], found: _Tensors, present: Sequence[int] | None, moves: bool
    ) -> _Known:
        """The job of a step in place, which the next step uses again if its tensors are the same."""
        out, kept = found.theta if moves else g, [*chain.from_iterable(found[3:])]
        job = self._job(found, g, [*kept, *out])
        starts = [len(job) - len(kept) - 2 * len(g)] + [len(job) - len(g)] * (not moves)
        written = [*found.theta, *kept] if moves else kept
        return _Known(tensors, [x.detach() for x in tensors], addresses(tensors), present, moves, written, job, starts)

    def _into_new(
        self, g: Sequence[Any], found: _Tensors, entries: list[Any], numbers: Numbers, flags: int
    ) -> list[Any]:
        """The step with its results in new tensors; a leaf without a gradient keeps its own, and copies of its state."""
        into, kept = found.theta if flags & MOVES else g, [*chain.from_iterable(found[3:])]
        if NoneType in map(type, g):
            out = [y if x is None else torch.empty_like(y) for x, y in zip(g, into)]
            # a tensor for each leaf, list behind list; the kernel writes all of the step and the conditions at the end
            new = [y.clone() if x is None else torch.empty_like(y) for x, y in zip(cycle(g), kept)]
        else:
            out, new = [*map(torch.empty_like, into)], [*map(torch.empty_like, kept)]
        self._run(self._job(found, g, [*new, *out]), numbers, flags, entries)
        rest = iter(new)
        if found.trace:
            entries[self.velocity] = entries[self.velocity]._replace(**{self.trace: tuple(islice(rest, len(g)))})
        if found.square:
            entries[self.learner] = entries[self.learner]._replace(nu=tuple(islice(rest, len(g))))
        memory = tuple(islice(rest, len(found.memory)))
        for i in self.counted:
            entries[i] = entries[i]._replace(count=tuple(islice(rest, len(g))))
        if self.noise is not None:
            step, *conditions = rest
            given = {"memory": memory} if memory else {}
            # a key of its own: whoever overwrites one state must not change the other
            given |= {"key": found.key[0].clone(), "step": step, "conditions": tuple(conditions)}
            entries[self.noise] = entries[self.noise]._replace(**given)
        return out

    def _job(self, found: _Tensors, g: Sequence[Any], into: Sequence[Any]) -> array[int]:
        """A job without the numbers of the step, as the kernel reads it.

        Args:
            found: what is read.
            g: gradients, ``None`` for a missing one.
            into: the tensors into which go what is kept, and then parameters or updates.
        """
        lists = *found, g
        head = address(self.sizes), self.chains, address(self.draws), *map(len, lists)
        return array("q", [*head, *addresses([*chain.from_iterable(lists), *into])])

    def _packed(self, numbers: Numbers) -> bytes:
        """The numbers as the kernel reads them, good as long as their arrays live."""
        rule = address(self.rule if self.changes else None)
        where = address(numbers.rates), address(numbers.live), numbers.stride, numbers.first, numbers.length
        learned = address(numbers.learned), numbers.learned_stride, numbers.root
        return numbers_of(*self.move, numbers.temperature, rule, *where, *learned)

    def _run(self, job: array[int], numbers: Numbers, flags: int, entries: Sequence[Any]) -> None:
        """Do a job with the numbers of this step."""
        packed = self.constant_packed if numbers is self.constant else self._packed(numbers)
        threads = torch.get_num_threads() if self.is_large else 1
        kernel: Any = sweep_kernel()
        if kernel.sweep[self.dtype](address(job), packed, flags, threads):
            self.block = None  # the counters are not in it, or differ; nothing is done yet
            now: Any = self._moves(entries, None, None)
            now = now._replace(learned=numbers.learned, learned_stride=numbers.learned_stride, root=numbers.root)
            self._run(job, now, flags, entries)

    def _moves_on_device(self, g: Sequence[Any], found: _Tensors, numbers: Numbers) -> bool:
        """Move parameters and state in place by the Triton kernel, if it knows this step and these tensors."""
        is_known = found.key and not found.centre and not self.flags & (NESTEROV | FLIPS | DIVIDES)
        if not is_known or numbers is not self.constant or not _has_device_kernel(found.theta[0]):
            return False
        (key,), (step,), move = found.key, found.step, self.move
        kept = found.trace or [m[0] for m in found.memory]
        places = [k for k, x in enumerate(g) if x is not None]
        lists = [[xs[k] for k in places] for xs in (found.theta, g, kept)] if len(kept) == len(g) else [[]]
        if not lists[0] or not all([_has_device_kernel(x) for xs in lists for x in xs]):
            return False
        from bayesopt_chain.engine.langevin_cuda import langevin_step_  # here, since it needs Triton

        keep, momentum = (1.0, 0.0) if self.velocity is None else (move.momentum, 1.0)
        given: dict[str, Any] = {
            "lr": -move.factor,
            "weight_decay": move.decay,
            "keep": keep,
            "momentum": momentum,
            "level": move.current,
            "deferred": 1.0 if self.velocity is None else move.deferred,
        }
        with torch.cuda.device_of(key):
            for k, x, y, s in zip(places, *lists):
                draw = self.draws[k]  # Triton takes the 32 bits as a signed number
                langevin_step_(x.detach(), y, s, key, step, draw=draw - (draw >> 31 << 32), **given)
        step.add_(1)
        return True


def _are_like(xs: Sequence[Any], forms: Sequence[Any], present: Sequence[int] | None, own: bool = False) -> bool:
    """Whether the kernel, which checks nothing, may run over the memory of these tensors.

    Args:
        xs: a tensor for each leaf.
        forms: shape, dtype and whether it is on a CPU, for each of them.
        present: the leaves that count.
        own: whether tensors that require gradients are taken.
    """
    if present is not None and len(xs) == len(forms):
        xs, forms = [xs[k] for k in present], [forms[k] for k in present]
    return (
        _KINDS.issuperset(map(type, xs))
        and [*map(_FORM, xs)] == forms
        and all(map(Tensor.is_contiguous, xs))
        and (own or not any(map(_GRAD, xs)))
    )


def _present(g: Sequence[Any]) -> list[int] | None:
    """Which leaves have a gradient; ``None`` for all."""
    return [k for k, x in enumerate(g) if x is not None] if NoneType in map(type, g) else None


def _are_equal(xs: Tensor) -> bool:
    """Whether what several chains have of a tensor is the same."""
    return _is_readable(xs) and bool((xs == xs[:1]).all())


def _is_readable(x: Any) -> bool:
    """Whether a tensor has numbers in the host's memory, where nothing is being traced."""
    return type(x) in _KINDS and x.is_cpu


def _dense(g: Sequence[Any]) -> list[Any]:
    """The gradients, those that are strided made contiguous."""
    return [x.contiguous() if isinstance(x, Tensor) and x.layout is torch.strided else x for x in g]


def _has_device_kernel(x: Any) -> bool:
    """Whether :mod:`bayesopt_chain.engine.langevin_cuda` takes this tensor."""
    return isinstance(x, Tensor) and x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and has_triton()


def _spread(values: Sequence[Any], present: Sequence[int] | None, others: list[Any]) -> list[Any]:
    """The values of the leaves that are present, ``None`` for all, among those of the others."""
    for k, value in zip(range(len(others)) if present is None else present, values):
        others[k] = value
    return others


def _doubles(rows: Sequence[Learned]) -> Any:
    return array("d", [x for row in rows for x in row])


@lru_cache(maxsize=64)
def _values(schedule: Any, block: int) -> array[float]:
    """The values of an elementwise schedule at ``_BLOCK`` counts, with the bits of one count at a time."""
    return array("d", schedule(torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device="cpu")).tolist())


def moved(
    plan: Any, params: Any, grads: Any, state: Any, inplace: bool, engine: Engine | None = None
) -> tuple[Any, Any] | None:
    """Move parameters in one pass over memory, with the bits of ``update`` and ``apply_updates``.

    Args:
        plan: of the chain, for this state.
        params, grads: trees of one structure; gradients may be missing, and are left alone.
        state: of the chain.
        inplace: whether parameters and state are overwritten.
        engine: the plan's, or one of several chains (:meth:`Engine.stacked`). Default: the plan's.

    Returns:
        Parameters and state; ``None``, with nothing done, where the chain is more than one engine knows, or the kernel cannot
        take these tensors.
    """
    engine, spec, entries = engine or plan.engine, plan.spec, list(state)
    if engine is None or spec is None:
        return None
    try:
        g = spec.flatten_up_to(grads)
        p, structure = (spec.flatten_up_to(params), spec) if inplace else leaves_of(params)
    except ValueError:
        return None
    if structure != spec:
        return None
    numbers = engine.numbers(entries, g)
    here = (g, p) if engine.is_everything else [[xs[j] for j in engine.where] for xs in (g, p)]
    if numbers is None or (new := engine.step(here[0], here[1], entries, numbers, inplace, moves=True)) is None:
        return None
    if inplace:
        return params, state
    for j, x in zip(engine.where, new):
        p[j] = x
    return spec.unflatten(p), type(state)(entries, state.layout)


def engines(links: Sequence[Any], plan: Any) -> dict[int, Engine]:
    """Find the engines of a chain.

    Args:
        links: the links of the chain.
        plan: its plan, of which layout, order and noise are read.

    Returns:
        The engines, each by the number of its first link.
    """
    found, taken = dict[int, Engine](), set[int]()
    for last in plan.order:
        if not isinstance(links[last].part, Scales) or not plan.where[last] or last in plan.entering:
            continue
        if None in [plan.layout.shapes[j] for j in plan.where[last]]:
            continue
        run, noise = _run(links, plan, last, taken)
        engine = Engine(links, plan, run, noise)
        if len(run) > 1 or engine.is_whole:
            found[run[0]] = engine
            taken |= {*run}
    return found


def _run(links: Sequence[Any], plan: Any, last: int, taken: set[int]) -> tuple[list[int], int | None]:
    """The run that ends with the scale ``last``, and the noise link whose draws the engine makes."""
    where, run, turn, noise = plan.where[last], [last], 3, None
    for i in sorted({*plan.order, *plan.entering}, reverse=True):
        if i >= last or set(plan.where[i]).isdisjoint(where):
            continue
        # noise that enters neither a momentum nor a link that learns is in no chain behind a momentum, and has its turn
        mine = 2 if i in plan.noise else _turn(links[i].part)
        if plan.where[i] != where or i in taken or mine >= turn:
            break
        entering = [n for n, x in plan.noise.items() if any(y.entry_link == i for y in x.noise_inputs)]
        drawn = [n for n in entering if mine in (1, 2) and _is_drawn(plan, n, [i, *run])]
        if (i in plan.noise or (i in plan.learning and entering)) and not drawn:  # its own link adds it
            break
        run.insert(0, i)
        if entering and not drawn:
            break
        turn, noise = mine, drawn[0] if drawn else noise
    return run, noise


def _turn(part: Any) -> int:
    """Where in a run a part may stand; 4, which is nowhere, for a link that plays none."""
    match part:
        case Decays():
            return 0
        case Learns(momentum=None):
            return 1
        case Learns() | Accumulates():
            return 2
        case Scales():
            return 3
        case _:
            return 4


def _is_drawn(plan: Any, n: int, run: Sequence[int]) -> bool:
    """Whether an engine can draw noise ``n``: of this chain's rates it depends on the engine's own alone."""
    if getattr(plan.noise[n], "drawn_by_kernel", None) is None:
        return False
    (x,) = plan.noise[n].noise_inputs
    front, behind = x.rates
    has_pole = x.transfer.pole_link is None or x.transfer.pole_link in run
    is_shaped = all([m in run and m in plan.learning for m, _ in x.powers])
    return x.leaves == plan.where[run[-1]] and not front and {*behind} <= {run[-1]} and is_shaped and has_pole
