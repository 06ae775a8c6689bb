r"""``inject_langevin_noise``: the link that turns an optimizer into a sampler.

Its noise is matched to the chain around it (:mod:`bayesopt_chain.matching.noise_inputs`), so that the parameters sample
``exp(-loss / temperature)``. The state holds the key and step count of the random stream, the draws that the next step
still needs and, where they change with time, the temperature and gains of the last step and the noise's surplus.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.arguments import ORDER, checked_as
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import Layout
from bayesopt_chain.core.update import Injected, Injection, Rates, Update
from bayesopt_chain.links.filtered_noise import FilteredNoise, FilteredNoiseState
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.links.room import Room, room_of
from bayesopt_chain.matching import law
from bayesopt_chain.matching.filters import Conditions, Filtered, Process, pick
from bayesopt_chain.matching.noise_inputs import NoiseInput
from bayesopt_chain.matching.response import Linear, Noise, Response, SelfContainedSampler
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.random.stream import STREAMS, Stream
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero
from bayesopt_chain.schedules import now as value_at
from bayesopt_chain.tracing import is_plain, is_readable

LOW = (torch.bfloat16, torch.float16)
CONDITIONS = 5  # numbers that are remembered for each leaf where rates or temperature change


class LangevinNoiseState(NamedTuple):
    """``key`` and ``step`` (0-d, int64) of the stream; the remembered draws of each leaf, stacked on axis 0.

    ``conditions`` holds, where temperature or gains can change (else it is empty), float64 ``[leaves, 5]``: the last step's
    temperature, the product of its changing gains (negative if the step moved nothing; then that of the last one that did),
    those in front of the noise, and the surplus of each branch (:func:`bayesopt_chain.matching.law.scheduled_noise`).
    """

    key: Tensor
    step: Tensor
    memory: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]
    begins_anew = True  # at a warm start: the noise is matched to its own chain


@dataclass(frozen=True)
class LangevinNoise(Keyed):
    """The link behind :func:`inject_langevin_noise`: its temperature, order and kind of increments. The chain does the rest."""

    temperature: ScalarOrSchedule
    order: int = 2
    noise: str = "gaussian"
    room: Room | None = None

    @property
    def is_static(self) -> bool:
        """Whether the temperature is a number."""
        return isinstance(self.temperature, (int, float))

    @property
    def response(self) -> Response:
        temperature = self.temperature if isinstance(self.temperature, (int, float)) else None
        if temperature == 0:
            return Linear()
        return Noise(self.order, temperature)

    def injection(self, noise_inputs: Sequence[NoiseInput], layout: Layout, links: Sequence[Any]) -> Injection:
        """Make what draws the noise of these noise inputs, in a chain of these links over leaves of this layout."""
        if self.room is not None:
            _check_room(self.room, self, noise_inputs, layout, links)
        return LangevinInjection(self, noise_inputs, layout)

    def __str__(self) -> str:
        return _shown(self, self.order, *([f"room_for={self.room.order} batches"] if self.room else []))


def _check_room(
    room: Room, link: LangevinNoise, noise_inputs: Sequence[NoiseInput], layout: Layout, links: Sequence[Any]
) -> None:
    """Refuse a chain or parameters for which the room was not measured."""
    who = "inject_langevin_noise: room_for"
    if any(noise_input.changes for noise_input in noise_inputs):
        raise ValueError(
            f"{who}: a learning rate or temperature that is a schedule or a tensor changes how much room there is; give "
            "numbers, and make a report for them"
        )
    room.require_of(links, link)
    if len(noise_inputs) != 1 or len(noise_inputs[0].leaves) != len(layout.shapes):
        raise ValueError(
            f"{who}: noise enters at {len(noise_inputs)} places or not in all leaves, and a report is of one place: one "
            "learning rate and momentum for all parameters, weight decay in front of the momentum"
        )
    if layout.pieces is not None:
        raise ValueError(f"{who}: its directions are of whole parameters, and these are sharded: leave room_for out")
    room.require_leaves(who, layout.paths, list(zip(layout.shapes, layout.dtypes)))


def _shown(link: LangevinNoise | ExplicitLangevinNoise, order: int, *more: str) -> str:
    words = [checks.show(link.temperature), *([f"order={order}"] if order != 2 else []), *more]
    words += [f"noise={link.noise!r}"] if link.noise != "gaussian" else []
    words += [f"stream={link.stream!r}"] if link.stream is not None else []
    return f"inject_langevin_noise({', '.join(words)})"


@dataclass(frozen=True)
class ExplicitLangevinNoise(FilteredNoise):
    """Noise matched to the learning rate and momentum that its caller states, where its neighbours cannot be seen."""

    lr: float = 1.0
    momentum: float = 0.0

    @property
    def response(self) -> Response:
        return SelfContainedSampler(
            hint="lr= and momentum= are for plain torchopt.chain, whose links cannot see each other; here the noise is "
            "matched to its neighbours: leave them out"
        )

    def init(self, leaves: Leaves, context: LinkContext) -> FilteredNoiseState:
        state = super().init(leaves, context)
        scale, gain = self.scale(state.step), self.lr * sum(map(abs, (*self.current, *self.later)))
        for j, leaf in zip(context.index, leaves):
            plain = is_plain(leaf, *([scale] if isinstance(scale, Tensor) else []))
            if plain and leaf.dtype in LOW and _rounds_away(j, leaf, float(scale) * gain):
                break
        return state

    def __str__(self) -> str:
        return _shown(self, 2 if self.later else 1, f"lr={self.lr}, momentum={self.momentum}")


class Strength(NamedTuple):
    """What is known of a step before anything is drawn: the temperature; for each noise input the coefficients and the velocity
    scale of each leaf; and the conditions that the step leaves behind."""

    temperature: float | Tensor
    by_input: list[tuple[Sequence[Any], Sequence[Tensor | float] | None, Tensor | None]]


def constant(i: int, leaves: Sequence[int]) -> Tensor:
    """The rates of a chain in which none changes."""
    raise NotImplementedError


class LangevinInjection:
    """A noise link with its noise inputs, and the places of their leaves in its state: input by input, leaf by leaf."""

    def __init__(self, link: LangevinNoise, noise_inputs: Sequence[NoiseInput], layout: Layout) -> None:
        self.link, self.noise_inputs, known = link, noise_inputs, keyed_stream.leaf_numbers(layout.paths)
        places = sorted((j, n) for n, noise_input in enumerate(noise_inputs) for j in noise_input.leaves)
        row = {place: k for k, place in enumerate(places)}
        self.rows = [[row[j, n] for j in noise_input.leaves] for n, noise_input in enumerate(noise_inputs)]
        numbers = tuple([keyed_stream.draw_number(known[j], 2 * n) for j, n in places])
        self.leaves: Sequence[int] = [j for j, _ in places]
        self.by_leaf: Mapping[str, Sequence[int]] = {"memory": self.leaves}
        runs = None if layout.pieces is None else tuple([layout.pieces[j] for j in self.leaves])
        self.processes = [noise_inputs[n].process for _, n in places]
        each = tuple([process.draws for process in self.processes])
        lone = noise_inputs[0].process if len(noise_inputs) == 1 and not noise_inputs[0].changes else None
        # of white noise, which is scaled while it is drawn
        self.level = lone.c[0] if isinstance(lone, Filtered) and not lone.memory else None
        scale = 1.0 if self.level is None else self.level
        self.variables = keyed_stream.Variables(numbers, each, link.noise, link.stream, scale, runs)

    def start(self, params: Sequence[Any]) -> LangevinNoiseState:
        """The first state, for the parameters of all leaves."""
        device = params[self.leaves[0]].device if self.leaves else torch.device("cpu")
        memory = [params[j].new_zeros((p.memory, *params[j].shape)) for j, p in zip(self.leaves, self.processes)]
        changes = any(noise_input.changes for noise_input in self.noise_inputs)
        conditions = (torch.zeros(len(memory), CONDITIONS, dtype=torch.float64, device=device),) if changes else ()
        key = keyed_stream.new_key(self.link.generator, device)
        return LangevinNoiseState(key, torch.zeros_like(key), tuple(memory), conditions)

    def strength(self, state: LangevinNoiseState, rates: Rates = constant) -> Strength:
        """That of this step; refuses a temperature out of range before anything is changed."""
        if not state.conditions and any(noise_input.changes for noise_input in self.noise_inputs):
            raise ValueError(
                "state: its temperature and lr were constant, here one changes; call init(params, like=state)"
            )
        if state.conditions and state.conditions[0].shape[-1] != CONDITIONS:
            raise ValueError(
                f"state: conditions hold {state.conditions[0].shape[-1]} numbers a leaf, not {CONDITIONS}: it was saved by a "
                "version whose schedules were not exact; start a sampler from the parameters by init(params), or "
                "init(params, like=state) to keep the velocity"
            )
        temperature = value_at(self.link.temperature, state.step)
        if not self.link.is_static:
            checks.at_this_step("temperature", temperature)
        by_input: list[Any] = [
            _coefficients(
                noise_input, temperature, state.conditions[0][torch.tensor(rows, device=state.key.device)], rates
            )
            if noise_input.changes
            else ([None] * len(rows), None, None)
            for noise_input, rows in zip(self.noise_inputs, self.rows)
        ]
        return Strength(temperature, by_input)

    def draw(
        self, state: LangevinNoiseState, strength: Strength, g: Sequence[Any], op: TensorOps
    ) -> tuple[list[Injected], LangevinNoiseState]:
        """Draw the noise of every noise input. A leaf without a gradient keeps its memory.

        Returns:
            The noise, and the next state.
        """
        key, step = state.key, state.step
        checks.own_key(key, [x for x in g if x is not None])
        xi = self.variables.draw(key, step, state.memory)
        if self.link.room is not None:
            if any([x is None for x in g]):
                raise ValueError(
                    "inject_langevin_noise: with room_for= every leaf needs a gradient, since the directions of the batches' "
                    "noise couple them"
                )
            xi = [list(of) for of in zip(*[self.link.room.leave(one) for one in zip(*xi)])]
        is_positive_temperature = None if isinstance(strength.temperature, float) else strength.temperature != 0
        out: list[Injected] = []
        memory, conditions = list(state.memory), list(state.conditions)
        for noise_input, rows, (c, scale, after) in zip(self.noise_inputs, self.rows, strength.by_input):
            live = [n for n, j in enumerate(noise_input.leaves) if g[j] is not None]
            e: Leaves = []
            for n in live:
                if self.level is not None:
                    e += xi[rows[n]]
                    continue
                kept = memory[rows[n]]
                y, new = noise_input.process.step(xi[rows[n]], list(kept), c[n])
                e.append(y if y.dtype == kept.dtype else y.to(kept.dtype))
                if new:
                    (memory[rows[n]],) = op.put([kept], [torch.stack(new) if len(new) > 1 else new[0].unsqueeze(0)])
            if after is not None:
                at = torch.tensor([rows[n] for n in live], dtype=torch.int64, device=after.device)
                after = after if len(live) == len(rows) else after[live]
                conditions = op.put(conditions, [conditions[0].index_copy(0, at, after)])
                scale = None if scale is None else [scale[n] for n in live]
            out.append(Injected(noise_input, [noise_input.leaves[n] for n in live], e, scale, is_positive_temperature))  # pyright: ignore[reportArgumentType]
        return out, LangevinNoiseState(key, op.next_count(step), tuple(memory), tuple(conditions))

    def started(self, state: LangevinNoiseState, update: Update) -> None:
        """Say so where the first step's noise is smaller than half the spacing of the parameters' numbers.

        Learned preconditioners are not known yet and count as one.
        """
        leaves = update.params or []
        for noise_input, (coefficients, _, after) in zip(
            self.noise_inputs, self.strength(state, update.rates).by_input
        ):
            low = [(n, j) for n, j in enumerate(noise_input.leaves) if leaves[j].dtype in LOW and is_plain(leaves[j])]
            for n, j in low[:1]:
                ones = [torch.ones((), device="cpu").double() for _ in range(noise_input.process.draws)]
                e, _ = noise_input.process.step(
                    ones, [torch.zeros((), device="cpu").double()] * noise_input.process.memory, coefficients[n]
                )
                (e,) = update.apply_powers(noise_input, [j], [e.float().expand(leaves[j].shape).clone()])
                # what a unit of noise moves in one step
                gain = noise_input.transfer.b[0] / noise_input.transfer.a[0] / noise_input.transfer.head
                behind = 1.0 if after is None else float((after[n, 1] / after[n, 2]).abs().nan_to_num())
                if _rounds_away(j, leaves[j], float(e.float().abs().mean()) * gain * behind):
                    return


def _rounds_away(j: int, leaf: Tensor, step: float) -> bool:
    """Whether a step's noise of this size is smaller than half the spacing of a leaf's numbers; then with a warning."""
    size = float(leaf.detach().abs().float().mean())
    if not 0 < step < torch.finfo(leaf.dtype).eps * size / 2:
        return False
    warnings.warn(
        f"inject_langevin_noise: leaf {j} is {leaf.dtype} with entries near {size:.2g}, and a step's "
        f"noise of about {step:.2g} would round away; keep float32 master parameters",
        stacklevel=4,
    )
    return True


def _coefficients(noise_input: NoiseInput, temperature: Any, before: Tensor, rates: Rates) -> Any:
    """By leaf, the weights of its noise and the velocity's scale; and the conditions that this step leaves behind.

    In numbers where all can be read for nothing, once for leaves whose numbers are the same; else in tensors.
    """
    n = len(noise_input.leaves)
    gains = [[rates(i, noise_input.leaves) for i in part] for part in noise_input.rates]
    told = [before, *gains[0], *gains[1], *([temperature] if isinstance(temperature, Tensor) else [])]
    if all([is_readable(x) and not x.requires_grad for x in told]):
        heat, known = float(temperature), dict[tuple[float, ...], Any]()
        last = before.T.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        rows: list[tuple[float, ...]] = list(zip(*_products(gains, n), *last))  # pyright: ignore[reportUnknownArgumentType]
        for row in rows:
            if row not in known:
                known[row] = _one_leaf(noise_input.process, heat, *row)
        values, scales, after = zip(*(known[row] for row in rows))
        scale = None if all([x is None or x == 1.0 for x in scales]) else scales
        return values, scale, torch.tensor(after, dtype=torch.float64, device="cpu")
    one = torch.ones_like(before[..., 0])
    front, behind = (math.prod(part, start=one) for part in gains)
    values, scale, after = _one_leaf(noise_input.process, one * temperature, front, behind, *before.unbind(-1))
    numbers: list[Tensor]
    numbers, structure = optree.tree_flatten(values)
    by_leaf = [structure.unflatten(x) for x in zip(*[v.unbind() for v in numbers])]
    return by_leaf, None if scale is None else scale.unbind(), torch.stack(after, -1)


def _products(gains: Sequence[Sequence[Tensor]], n: int) -> list[list[float]]:
    """The product of the gains in front of the noise, and behind it, of each of ``n`` leaves."""
    parts: Any = [[gain.tolist() for gain in part] for part in gains]  # pyright: ignore[reportUnknownMemberType]
    return [[math.prod(x) for x in zip(*part)] if part else [1.0] * n for part in parts]


def _one_leaf(
    process: Process, heat: Any, front: Any, behind: Any, last_heat: Any, last_rate: Any, last_front: Any, *surplus: Any
) -> tuple[Any, Any, tuple[Any, ...]]:
    """The same for the numbers of one leaf, or for tensors of all; the rest are the conditions that the last step left."""
    rate, known = front * behind, abs(last_rate)
    moves = rate != 0
    rate = pick(moves, rate, known)
    if process.velocity:  # behind a gain of 0 a velocity would go on moving: the chain stops, and begins anew
        rate = pick(front != 0, rate, 0.0)
    now = Conditions(heat, rate, front, moves)
    values, scale, left = process.coefficients(now, Conditions(last_heat, known, last_front, last_rate >= 0, surplus))
    if scale is not None:  # at temperature 0 the velocity is the optimizer's own, and is not rescaled
        scale = pick((heat != 0) | (last_heat != 0), scale, 1.0)
    after = heat, pick(moves, rate, -rate), pick(front != 0, front, last_front), *left, *surplus[len(left) :]
    return values, scale, after


@checked_as(order=ORDER)
def inject_langevin_noise(
    temperature: ScalarOrSchedule,
    *,
    order: int = 2,
    lr: float | None = None,
    momentum: float | None = None,
    generator: torch.Generator | None = None,
    noise: str = "gaussian",
    stream: Stream | None = None,
    room_for: Any = None,
) -> Chain:
    r"""Inject the noise that makes the chain sample ``exp(-loss / temperature)``.

    Compose with ``bc.chain``: inside plain ``torchopt.chain`` no link sees another, and what stands beside the noise there,
    other than ``lr=`` and ``momentum=`` say, changes what is sampled without anybody noticing.

    With a loss that is a mean over ``N`` data, ``temperature = 1 / N`` samples the Bayesian posterior; an unnormalised
    loss takes ``temperature = 1``. The noise is derived from the links around it when ``init`` is called, so the
    position among linear links does not matter; it must stand behind non-linear ones (clipping, Adam's scaling). Along a
    learning rate that falls it is exact on quadratic losses at every step, at a rise it is not (docs/theory.md).

    Args:
        temperature: number, 0-d tensor (read at every update) or schedule ``count -> temperature``. The number 0 makes
            this the identity, without state or draw; a tensor or schedule that is 0 leaves the gradient's bits alone.
        order: 2 (default): exact for quadratic losses at every stable lr, bias of second order in lr otherwise. 1: white
            noise of the same level (SGLD, SGHMC), bias of first order.
        lr: only inside plain ``torchopt.chain``, whose links cannot see each other: the chain's learning rate. The
            noise then acts where it is written, which must be before the momentum.
        momentum: likewise, the momentum that follows; to be given with ``lr``, 0 where none follows.
        generator: source of the stream's key, drawn once by ``init`` (default: torch's global generator).
        noise: ``"gaussian"``; ``"three_point"`` (0 or +-sqrt(3), keeps order 2); or ``"rademacher"`` (signs,
            cheapest, keeps order 1; with ``order=2`` still exact in mean and covariance on quadratic losses).
        stream: ``"philox"`` draws counter-based noise on every device, the same in eager, compiled, captured and stacked
            steps, a function of each leaf's path; Gaussian noise then costs about a third of torch's generator where a C++
            compiler is found, and many times as much where none is. ``"generator"`` is torch's (CPU only): leaves draw one
            after the other, and the engine keeps 32 bits of each step's seed, so that among a million steps (of all chains
            together) about a hundred pairs draw the same normals; take ``"philox"`` for so many. Default: the generator on a
            CPU, Philox elsewhere.
        room_for: a report of :func:`bayesopt_chain.diagnostics.heating`, made for this chain without ``room_for``. The draws
            then leave room for the noise that minibatches bring, of the order, size and strength that the report is of: the
            variance is that of full gradients, in the directions looked at. It costs ``4 r P`` operations a step for ``r``
            directions. Batches of another order or size make the variance wrong. At temperature 0 nothing is drawn, and it
            does nothing.

    Returns:
        A link. With ``order=2`` its state holds one draw for each parameter, or none where heavy-ball momentum (of 1/16
        and more) follows at constant lr and temperature: there the velocity carries the half of the noise that acts in
        the next step.

    Raises:
        TypeError: ``room_for`` that is no report.
        ValueError: negative, NaN or infinite temperature; an order other than 1 or 2; a report that found too much noise to
            leave room for, or noise whose directions change between two draws. At ``init``, a report for another chain, a
            learning rate or temperature that is no number, or groups of parameters.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
        >>> tx
        chain(
            inject_langevin_noise(0.5),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """
    named = isinstance(noise, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not named or noise not in ("gaussian", "rademacher", "three_point"):
        raise ValueError(
            f"inject_langevin_noise: noise must be 'gaussian', 'three_point' or 'rademacher', got {noise!r}"
        )
    if lr is not None:
        if momentum is None:
            raise ValueError(
                "inject_langevin_noise: lr= needs momentum= beside it, the momentum that follows (0 where none does): inside "
                "plain torchopt.chain nobody can see it, and the noise would be wrong by a factor of up to 1 / (1 - momentum)"
            )
        checks.positive("inject_langevin_noise: lr", lr)
        checks.momentum("inject_langevin_noise: momentum", momentum)
    elif momentum is not None:
        raise ValueError("inject_langevin_noise: momentum= goes with lr=, both for plain torchopt.chain only")
    known = isinstance(stream, str) and stream in STREAMS  # pyright: ignore[reportUnnecessaryIsInstance]
    if stream is not None and not known:
        raise ValueError(f"inject_langevin_noise: stream must be one of {STREAMS} or None, got {stream!r}")
    room = room_of(room_for)
    if room is not None and lr is not None:
        raise ValueError(
            "inject_langevin_noise: room_for goes with bc.chain, where the noise sees its neighbours, not with lr="
        )
    if isinstance(temperature, Real):
        temperature = float(temperature)
    if lr is None or momentum is None:
        return Chain((LangevinNoise(temperature, order, noise, room, generator=generator, stream=stream),))
    if is_zero(temperature):
        return Chain(())
    c, _ = law.noise_filter(law.spectrum((lr,), (1.0, -momentum)), (lr,), order)
    told = ExplicitLangevinNoise(
        temperature, c[:1], c[1:], noise=noise, lr=lr, momentum=momentum, generator=generator, stream=stream
    )
    return Chain((told,))
