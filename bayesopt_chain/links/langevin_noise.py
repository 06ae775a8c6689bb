r"""``inject_langevin_noise``: the link whose noise makes a chain sample ``exp(-loss / temperature)``.

The noise is matched to the chain (:mod:`bayesopt_chain.matching.noise_inputs`). Its state has the key and the step count of the
random stream, and the draws that the next step still needs. If the temperature or a learning rate can change, the state also
has their values at the last step, because the rule for schedules
(:func:`bayesopt_chain.matching.law.scheduled_noise`) compares two steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import Layout
from bayesopt_chain.core.update import Injected, Rates, Update
from bayesopt_chain.engine.engine import CONDITIONS
from bayesopt_chain.links.keyed import FilteredNoise, FilteredNoiseState, Keyed
from bayesopt_chain.matching import law
from bayesopt_chain.matching.filters import Conditions, Filtered, Process, pick
from bayesopt_chain.matching.noise_inputs import NoiseInput
from bayesopt_chain.matching.response import Linear, Noise, Response, SelfContainedSampler
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.schedules import ScalarOrSchedule, is_number, is_zero
from bayesopt_chain.schedules import now as value_at
from bayesopt_chain.tracing import is_plain, is_readable

LOW = (torch.bfloat16, torch.float16)  # dtypes in which a step's noise can be lost to rounding
LEAF = "inject_langevin_noise: leaf {}"
CURE = "wrap the chain, bc.with_master_weights(tx), or keep float32 parameters"


class LangevinNoiseState(NamedTuple):
    """The state of the noise.

    Attributes:
        key: the key of the random stream, 0-d int64.
        step: how many updates were made, 0-d int64.
        memory: for each leaf the remembered tensors, ``[remembered, *leaf.shape]``.
        conditions: one tensor, float64 ``[leaves, 5]``; empty if neither the temperature nor a gain can change. A row has the
            temperature of the last step; the product of its changing gains; the product of those in front of the noise; and the
            surplus of each of two branches. If the last step did not move the parameters, the second number is negative, and
            its magnitude is the product at the last step that did.
        begins_anew: whether ``init(params, like=...)`` makes this state new; true, since the noise belongs to its own chain.
    """

    key: Tensor
    step: Tensor
    memory: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]
    begins_anew = True


@dataclass(frozen=True)
class LangevinNoise(Keyed):
    """The link that :func:`inject_langevin_noise` returns.

    It has no ``update`` of its own. The chain calls :class:`LangevinInjection`, and adds the noise where it has to enter.

    Attributes:
        temperature: the temperature, in units of the loss.
        order: 2 for matched noise, 1 for white noise.
    """

    temperature: ScalarOrSchedule
    order: int = 2

    @property
    def response(self) -> Response:
        if is_zero(self.temperature):
            return Linear()
        return Noise(self.order, self.temperature if is_number(self.temperature) else None)

    def injection(self, noise_inputs: Sequence[NoiseInput], layout: Layout) -> LangevinInjection:
        return LangevinInjection(self, noise_inputs, layout)

    def __str__(self) -> str:
        return _shown(self.temperature, self.order)


def _shown(temperature: ScalarOrSchedule, order: int, *more: str) -> str:
    """The ``repr`` of a noise link, with the arguments that differ from their defaults."""
    words = [checks.show(temperature), *([f"order={order}"] if order != 2 else []), *more]
    return f"inject_langevin_noise({', '.join(words)})"


@dataclass(frozen=True)
class ExplicitLangevinNoise(FilteredNoise):
    """Noise for plain ``torchopt.chain``, in which the links cannot see each other.

    Attributes:
        lr: the learning rate of the chain, as its caller states it.
        momentum: the momentum of the chain, as its caller states it.
    """

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
        # ``scale`` times ``gain`` is about the size of the step that the noise makes in a parameter.
        scale, gain = self.scale(state.step), self.lr * sum(map(abs, (*self.current, *self.later)))
        for j, leaf in zip(context.scope.index, leaves):
            plain = is_plain(leaf, *([scale] if isinstance(scale, Tensor) else []))
            if plain and leaf.dtype in LOW and checks.rounds_away(LEAF.format(j), leaf, float(scale) * gain, CURE):
                break
        return state

    def __str__(self) -> str:
        return _shown(self.temperature, 2 if self.later else 1, f"lr={self.lr}, momentum={self.momentum}")


class Strength(NamedTuple):
    """The coefficients of one step's noise, which are computed before anything is drawn or changed.

    Attributes:
        temperature: the temperature of this step, a number or 0-d.
        by_input: for each noise input, the coefficients of each leaf; the factor by which the velocity of each leaf is
            multiplied before the step, or ``None``; and the conditions ``[leaves, 5]`` for the next step, or ``None`` if
            nothing changes with time.
    """

    temperature: float | Tensor
    by_input: list[tuple[Sequence[Any], Sequence[Tensor | float] | None, Tensor | None]]


class LangevinInjection:
    """A noise link in one chain: it draws the noise of every noise input.

    A leaf of two noise inputs gets two independent noises, and has two entries in the state, one behind the other.

    Attributes:
        link: the noise link.
        noise_inputs: where in the chain the noise enters.
        rows: for each noise input, the place of each of its leaves in the state.
        leaves: the leaf of each entry of the state.
        processes: the process that makes the noise of each entry.
        variables: the random variables of one step.
    """

    def __init__(self, link: LangevinNoise, noise_inputs: Sequence[NoiseInput], layout: Layout) -> None:
        self.link, self.noise_inputs, leaf_numbers = link, noise_inputs, keyed_stream.leaf_numbers(layout.paths)
        places = sorted((j, n) for n, noise_input in enumerate(noise_inputs) for j in noise_input.leaves)
        row = {place: k for k, place in enumerate(places)}
        self.rows = [[row[j, n] for j in noise_input.leaves] for n, noise_input in enumerate(noise_inputs)]
        # Every noise input has two numbers of its own in the stream, for the two draws that a process may take. The noises of
        # one leaf are therefore independent.
        numbers = tuple([keyed_stream.draw_number(leaf_numbers[j], 2 * n) for j, n in places])
        self.leaves: Sequence[int] = [j for j, _ in places]
        runs = None if layout.pieces is None else tuple([layout.pieces[j] for j in self.leaves])
        self.processes = [noise_inputs[n].process for _, n in places]
        each = tuple([process.draws for process in self.processes])
        self.variables = keyed_stream.Variables(numbers, each, runs=runs)

    @cached_property
    def drawn_by_kernel(self) -> Process | None:
        """The process whose noise an engine makes of draws in its own pass; ``None`` where :meth:`draw` has to make it."""
        (noise_input, *more), process = self.noise_inputs, self.noise_inputs[0].process
        if more or self.variables.runs is not None or self.variables.numbers is None:
            return None
        if isinstance(process, Filtered):
            c = process.c
            return process if not noise_input.changes and process.d == (1.0,) and c in ((c[0],), (c[0], c[0])) else None
        return process if len(process.branches) == 1 else None

    def start(self, params: Sequence[Any]) -> LangevinNoiseState:
        """Make the first state, with a new key.

        Args:
            params: the parameters, one for each leaf of the chain.
        """
        device = params[self.leaves[0]].device if self.leaves else torch.device("cpu")
        memory = [params[j].new_zeros((p.memory, *params[j].shape)) for j, p in zip(self.leaves, self.processes)]
        changes = any(noise_input.changes for noise_input in self.noise_inputs)
        conditions = (torch.zeros(len(memory), CONDITIONS, dtype=torch.float64, device=device),) if changes else ()
        key = keyed_stream.new_key(self.link.generator, device)
        return LangevinNoiseState(key, torch.zeros_like(key), tuple(memory), conditions)

    def strength(self, state: LangevinNoiseState, rates: Rates) -> Strength:
        """Compute the coefficients of this step's noise.

        Args:
            state: the state of the noise.
            rates: returns the gains of a link at this step, for given leaves.

        Raises:
            ValueError: a temperature that is negative or not finite; a state of a chain in which nothing changed with time.
        """
        if not state.conditions and any(noise_input.changes for noise_input in self.noise_inputs):
            raise ValueError(
                "state: its temperature and lr were constant, here one changes; call init(params, like=state)"
            )
        temperature = value_at(self.link.temperature, state.step)
        if not is_number(self.link.temperature):
            checks.at_this_step("temperature", temperature)
        by_input: list[Any] = [
            _coefficients(noise_input, temperature, _taken(state.conditions[0], rows), rates)
            if noise_input.changes
            else ([None] * len(rows), None, None)
            for noise_input, rows in zip(self.noise_inputs, self.rows)
        ]
        return Strength(temperature, by_input)

    def draw(
        self, state: LangevinNoiseState, strength: Strength, g: Sequence[Any], op: TensorOps
    ) -> tuple[list[Injected], LangevinNoiseState]:
        """Draw the noise of every noise input.

        Args:
            state: the state of the noise.
            strength: the coefficients of this step.
            g: the gradients, one for each leaf of the chain, ``None`` where a leaf has none. Such a leaf gets no noise, and its
                entries of the state stay as they are.
            op: the operations of this update.

        Returns:
            The noise, and the next state.

        Raises:
            ValueError: gradients with an axis of ``vmap`` that the key lacks.
        """
        key, step = state.key, state.step
        checks.own_key(key, [x for x in g if x is not None])
        xi = self.variables.draw(key, step, state.memory)
        is_positive_temperature = None if isinstance(strength.temperature, float) else strength.temperature != 0
        out: list[Injected] = []
        memory, conditions = list(state.memory), list(state.conditions)
        for noise_input, rows, (c, scale, after) in zip(self.noise_inputs, self.rows, strength.by_input):
            live = [n for n, j in enumerate(noise_input.leaves) if g[j] is not None]
            e: Leaves = []
            for n in live:
                kept = memory[rows[n]]
                y, new = noise_input.process.step(xi[rows[n]], list(kept), c[n])
                e.append(y if y.dtype == kept.dtype else y.to(kept.dtype))
                if new:
                    (memory[rows[n]],) = op.put([kept], [torch.stack(new) if len(new) > 1 else new[0].unsqueeze(0)])
            if after is not None:
                at = [rows[n] for n in live]
                conditions = op.put(conditions, [_written(conditions[0], at, _taken(after, live))])
                scale = None if scale is None else [scale[n] for n in live]
            shares = [c[n][0].share for n in live] if getattr(noise_input.process, "defers", False) else None
            leaves = [noise_input.leaves[n] for n in live]
            out.append(Injected(noise_input, leaves, e, scale, is_positive_temperature, shares))  # pyright: ignore[reportArgumentType]
        return out, LangevinNoiseState(key, op.next_count(step), tuple(memory), tuple(conditions))

    def started(self, state: LangevinNoiseState, update: Update) -> None:
        """Warn if the noise of the first step is so small that adding it to the parameters would round to no change.

        Only float16 and bfloat16 are checked. Preconditioners that learn are not known yet, and are taken to be 1.

        Args:
            state: the first state of the noise.
            update: the update that ``init`` uses to ask for rates and preconditioners.
        """
        leaves = update.params or []
        for noise_input, (coefficients, _, after) in zip(
            self.noise_inputs, self.strength(state, update.rates).by_input
        ):
            low = [(n, j) for n, j in enumerate(noise_input.leaves) if leaves[j].dtype in LOW and is_plain(leaves[j])]
            for n, j in low[:1]:
                # The noise of a draw of 1 for every variable and a memory of 0 has about the size of the first step's noise.
                ones = [torch.ones((), device="cpu").double() for _ in range(noise_input.process.draws)]
                e, _ = noise_input.process.step(
                    ones, [torch.zeros((), device="cpu").double()] * noise_input.process.memory, coefficients[n]
                )
                (e,) = update.apply_powers(noise_input, [j], [e.float().expand(leaves[j].shape).clone()])
                # By how much noise of size 1 at its place of entry moves a parameter in the same step.
                gain = noise_input.transfer.b[0] / noise_input.transfer.a[0] / noise_input.transfer.head
                behind = 1.0 if after is None else float((after[n, 1] / after[n, 2]).abs().nan_to_num())
                step = float(e.float().abs().mean()) * gain * behind
                if checks.rounds_away(LEAF.format(j), leaves[j], step, CURE):
                    return


def _taken(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of a tensor ``[leaves, 5]``, in this order.

    A tensor of row numbers would be copied from the host, which a CUDA graph refuses.
    """
    return x if [*rows] == [*range(len(x))] else torch.cat([x[:0], *[x[row : row + 1] for row in rows]])


def _written(x: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """A tensor ``[leaves, 5]`` that is ``x`` with other values in some rows."""
    new = dict(zip(rows, values.unbind()))
    return torch.stack([new.get(k, row) for k, row in enumerate(x.unbind())])


def _coefficients(noise_input: NoiseInput, temperature: Any, before: Tensor, rates: Rates) -> Any:
    """Compute the coefficients of one noise input for which the temperature or a gain can change.

    Args:
        noise_input: the noise input.
        temperature: the temperature of this step.
        before: the conditions of the last step, ``[leaves, 5]``.
        rates: returns the gains of a link at this step, for given leaves.

    Returns:
        The coefficients of each leaf; the factor by which the velocity of each leaf is multiplied before the step, or
        ``None``; and the conditions of this step, ``[leaves, 5]``.
    """
    n = len(noise_input.leaves)
    gains = [[rates(i, noise_input.leaves) for i in part] for part in noise_input.rates]
    inputs = [before, *gains[0], *gains[1], *([temperature] if isinstance(temperature, Tensor) else [])]
    if all([is_readable(x) and not x.requires_grad for x in inputs]):
        # On a CPU arithmetic on Python numbers is faster than on 0-d tensors, and most leaves have equal numbers.
        now, known = float(temperature), dict[tuple[float, ...], Any]()
        last = before.T.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        rows: list[tuple[float, ...]] = list(zip(*_products(gains, n), *last))  # pyright: ignore[reportUnknownArgumentType]
        for row in rows:
            if row not in known:
                known[row] = _one_leaf(noise_input.process, now, *row)
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
    """For each of ``n`` leaves, the product of the gains in front of the noise, and the product of the gains behind it."""
    parts: Any = [[gain.tolist() for gain in part] for part in gains]  # pyright: ignore[reportUnknownMemberType]
    return [[math.prod(x) for x in zip(*part)] if part else [1.0] * n for part in parts]


def _one_leaf(
    process: Process,
    temperature: Any,
    front: Any,
    behind: Any,
    last_temperature: Any,
    last_rate: Any,
    last_front: Any,
    *surplus: Any,
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Compute the coefficients of one leaf from numbers, or those of all leaves from tensors ``[leaves]``.

    Args:
        process: the process that makes the noise.
        temperature, front, behind: of this step, the temperature, the product of the gains in front of the noise, and the
            product of those behind it.
        last_temperature, last_rate, last_front, surplus: the conditions that the last step left, in the order of
            :attr:`LangevinNoiseState.conditions`.

    Returns:
        The coefficients, the factor of the velocity or ``None``, and the conditions of this step.
    """
    rate, last_moved = front * behind, abs(last_rate)
    moves = rate != 0
    rate = pick(moves, rate, last_moved)
    # A gain of 0 in front of the momentum stops the gradients but not the velocity, so that the sampler stops here and begins
    # anew when the gain is positive again. A rate of 0 tells that to the next step.
    if process.velocity:
        rate = pick(front != 0, rate, 0.0)
    now = Conditions(temperature, rate, front, moves)
    before = Conditions(last_temperature, last_moved, last_front, last_rate >= 0, surplus)
    values, scale, left = process.coefficients(now, before)
    if scale is not None:  # at the temperature 0 the velocity is that of the optimizer, and is not rescaled
        scale = pick((temperature != 0) | (last_temperature != 0), scale, 1.0)
    after = temperature, pick(moves, rate, -rate), pick(front != 0, front, last_front), *left, *surplus[len(left) :]
    return values, scale, after


@checks.factory_takes(order=checks.number("[1, 2]", integer=True), lr=checks.POSITIVE, momentum=checks.MOMENTUM)
def inject_langevin_noise(
    temperature: ScalarOrSchedule,
    *,
    order: int = 2,
    lr: float | None = None,
    momentum: float | None = None,
    generator: torch.Generator | None = None,
) -> Chain:
    r"""Inject the noise that makes the chain sample ``exp(-loss / temperature)``.

    Compose it with ``bc.chain``. In plain ``torchopt.chain`` the links cannot see each other: the noise is computed from
    ``lr=`` and ``momentum=``, without which it is refused, and any other link would change what is sampled, without a message.

    If the loss is a mean over ``N`` data, ``temperature = 1 / N`` samples the Bayesian posterior; if it is a sum,
    ``temperature = 1`` does. The noise is computed from the other links when ``init`` is called, so that its position among
    linear links does not matter. It must stand behind non-linear links, such as clipping and Adam's scaling. On quadratic
    losses the noise is exact at constant learning rates and at every step of a learning rate that falls, and it has an error
    where the learning rate rises (docs/theory.md).

    Args:
        temperature: in units of the loss, a number, a 0-d tensor that is read at every update, or a schedule
            ``count -> temperature``. The number 0 makes this link the identity, without state or draws. Where a tensor or a
            schedule is 0, the gradient keeps its bits.
        order: 2 (default) samples quadratic losses exactly at every stable learning rate, and other losses with a bias of
            second order in the learning rate. 1 is white noise, as in SGLD and SGHMC, with a bias of first order.
        lr: the learning rate of a plain ``torchopt.chain``; not to be given elsewhere. The noise is then added where the link
            is written, which must be in front of the momentum.
        momentum: the momentum behind the noise in a plain ``torchopt.chain``, 0 if there is none; needed with ``lr``.
        generator: the source of the random key, which ``init`` draws once (default: torch's global generator).

    Returns:
        A link. With ``order=2`` its state has one draw for each parameter. It has none if heavy-ball momentum of at least 1/16
        follows and no changing learning rate stands in front of it, since then the velocity keeps the part of the noise that
        acts in the next step.

    Raises:
        ValueError: a temperature that is negative or not finite; an order other than 1 or 2; ``lr`` without ``momentum`` or the
            reverse.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
        >>> tx
        chain(
            inject_langevin_noise(0.5),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """
    if (lr is None) != (momentum is None):
        raise ValueError(
            f"inject_langevin_noise: lr= and momentum= go together, got lr={lr}, momentum={momentum}: plain torchopt.chain "
            "shows neither, and the noise would be wrong by a factor of up to 1 / (1 - momentum); give the momentum that "
            "follows, 0 where none does, or compose with bc.chain and leave both out"
        )
    if isinstance(temperature, Real):
        temperature = float(temperature)
    if lr is None or momentum is None:
        return Chain((LangevinNoise(temperature, order, generator=generator),))
    if is_zero(temperature):
        return Chain(())
    c, _ = law.noise_filter(law.spectrum((lr,), (1.0, -momentum)), (lr,), order)
    return Chain((ExplicitLangevinNoise(temperature, c[:1], c[1:], lr=lr, momentum=momentum, generator=generator),))
