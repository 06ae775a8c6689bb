r"""``inject_langevin_noise``: the link that turns an optimizer into a sampler.

Its noise is matched to the chain around it (:mod:`bayesopt_chain.core.law`), so that the parameters sample
``exp(-loss / temperature)``. The state holds the key and step count of the random stream and the draws that the next
step still needs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchopt.base import GradientTransformation

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked
from bayesopt_chain.core import counters
from bayesopt_chain.core.chain import Chain, chain
from bayesopt_chain.core.filters import Conditions
from bayesopt_chain.core.link import Injection, Rule
from bayesopt_chain.core.masks import MaskedRule
from bayesopt_chain.core.matching import Placements
from bayesopt_chain.core.response import Linear, Noise, Response
from bayesopt_chain.random import stream as keyed_stream

Temperature = float | Tensor | Callable[[Tensor], Any]


class LangevinNoiseState(NamedTuple):
    """``key`` and ``count`` (0-d, int64) of the stream; for each leaf the remembered draws, stacked on axis 0.

    ``conditions`` holds, for each leaf, last step's temperature and gains where those can change (else it is empty).
    """

    key: Tensor
    count: Tensor
    memory: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]


@dataclass(frozen=True)
class LangevinNoise(Rule):
    """The rule behind :func:`inject_langevin_noise`. The chain runs ``start`` and ``draw`` in place of ``update``."""

    temperature: Temperature
    order: int = 2
    lr: float | None = None
    momentum: float = 0.0
    generator: torch.Generator | None = field(default=None, hash=False, compare=False)
    noise: str = "gaussian"
    stream: keyed_stream.Stream | None = None

    @property
    def response(self) -> Response:
        return Linear() if self.is_off else Noise()

    @property
    def is_off(self) -> bool:
        return self.is_static and self.temperature == 0

    @property
    def is_static(self) -> bool:
        return isinstance(self.temperature, (int, float))

    def update(self, g, state, params, ctx):
        return g, state

    def start(self, placements: Placements, leaves: list, rates, gains) -> LangevinNoiseState:
        """First state, for the leaves that ``placements`` names."""
        mine = [leaves[j] for j in placements if leaves[j] is not None]
        device = mine[0].device if mine else torch.device("cpu")
        memory = []
        for j, placement in placements.items():
            p = leaves[j]
            shape = (placement.memory, *p.shape) if p is not None else ()
            memory.append(torch.empty(0, 0) if p is None else torch.zeros(shape, dtype=p.dtype, device=p.device))
        conditions = ()
        if any(placement.temperature is None for placement in placements.values()):
            conditions = tuple(torch.zeros(3, dtype=torch.float64, device=device) for _ in placements)
        state = LangevinNoiseState(
            keyed_stream.new_key(self.generator, device),
            torch.zeros((), dtype=torch.int64, device=device),
            tuple(memory),
            conditions,
        )
        self._check_conditions(state.count, rates)
        self._warn_of_rounding(placements, leaves, state, rates, gains)
        return state

    def check(self, placements: Placements, state: LangevinNoiseState, g: list) -> None:
        """Refuse gradients or a state that do not fit, before anything is drawn or changed."""
        if len(state.memory) != len(placements):
            raise ValueError(
                f"state: its noise is for {len(state.memory)} leaves, but the chain injects it into {len(placements)}; "
                "call init with these parameters"
            )
        for (j, placement), kept in zip(placements.items(), state.memory):
            if g[j] is not None and placement.sources:
                checks.alike("updates", j, g[j], "the state has", kept.shape[1:], kept.dtype, kept.device)

    def draw(self, placements: Placements, state: LangevinNoiseState, g: list, rates, gains, inplace: bool):
        """This step's :class:`Injection` and the next state. Leaves without a gradient keep theirs."""
        level = placements.level
        draws = keyed_stream.normals(
            state.key,
            state.count,
            state.memory,
            placements.draws,
            self.noise,
            self.stream,
            1.0 if level is None else level,
        )
        temperature = self._now(state.count)
        noise: dict[int, Tensor] = {}
        scales: dict[int, Tensor] = {}
        memory, conditions = list(state.memory), list(state.conditions)
        cache: dict[Any, Any] = {}
        for n, (j, placement) in enumerate(placements.items()):
            if g[j] is None or not placement.sources:
                continue
            if level is not None:
                (noise[j],) = draws[n]
                continue
            if placement.temperature is not None:
                coefficients, scale, after = placement.constants, None, None
            else:
                changing = placement.rates_before + placement.rates_after
                key = (
                    placement,
                    counters.value_key(conditions[n]),
                    *(counters.value_key(rates[i][j]) for i in changing),
                )
                if key not in cache:
                    cache[key] = self._coefficients(placement, temperature, conditions[n], rates, j)
                coefficients, scale, after = cache[key]
            kept = list(memory[n]) if placement.memory else []
            noise[j], new = _run(placement, coefficients, draws[n], kept, gains, j)
            if scale is not None:
                scales[j] = scale
            if new:
                new = torch.stack(new) if len(new) > 1 else new[0].unsqueeze(0)
                memory[n] = memory[n].copy_(new) if inplace else new
            if after is not None:
                conditions[n] = after.clone()  # leaves share nothing that in-place updates write to
        if inplace and conditions:
            conditions = [o if o is c else o.copy_(c) for o, c in zip(state.conditions, conditions)]
        count = state.count.add_(1) if inplace else state.count + 1
        hot = None if self.is_static else temperature != 0
        injection = Injection(noise, placements.at, hot, scales or None, placements.echo)
        return injection, LangevinNoiseState(state.key, count, tuple(memory), tuple(conditions))

    def _now(self, count: Tensor):
        if self.is_static:
            return float(self.temperature)
        value = self.temperature(count) if callable(self.temperature) else self.temperature
        return counters.scalar(value, count.device).detach()

    def _coefficients(self, placement, temperature, before, rates, j):
        """Coefficients of every source, the velocity's scale, and this step's conditions as the next step's ``before``."""
        one = torch.ones((), dtype=torch.float64, device=before.device)
        gain_before = _product(one, (rates[i][j] for i in placement.rates_before))
        gain_after = _product(one, (rates[i][j] for i in placement.rates_after))
        moves = (gain_before != 0) & (gain_after != 0)  # lr = 0 keeps the velocity at the level it was brought to
        temperature = one * temperature
        now = Conditions(
            temperature,
            torch.where(moves, gain_before / torch.where(moves, gain_after, one), before[1]),
            torch.where(moves, gain_before * gain_before, before[2]),
        )
        previous = Conditions(*before.unbind())
        coefficients, scale = [], None
        for source in placement.sources:
            c, s = source.process.coefficients(now, previous)
            coefficients.append(c)
            scale = s if s is not None else scale
        if scale is not None:
            thermal = (temperature != 0) | (before[0] != 0)  # a cold velocity is the optimizer's own, and stays
            scale = torch.where(thermal, scale, one)
        return coefficients, scale, torch.stack(list(now))

    def _check_conditions(self, count: Tensor, rates) -> None:
        """Refuse a schedule or tensor whose first value is out of range. A later one turns the noise into NaN."""
        if not counters.readable(count):
            return
        if not self.is_static:
            checks.temperature(self._now(count))
        for value in {id(v): v for by_leaf in rates.values() for v in by_leaf.values()}.values():
            if value.ndim or value.is_complex() or not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"lr: a changing learning rate must be a real scalar, finite and not negative, got {value} at the first "
                    "step (the sign of the descent is scale_by_neg_lr's)"
                )

    def _warn_of_rounding(self, placements, leaves, state, rates, gains) -> None:
        """Say so where the first step's noise is smaller than half the spacing of the parameters' numbers.

        Learned preconditioners are not known yet and count as one.
        """
        low = [j for j in placements if leaves[j] is not None and leaves[j].dtype in (torch.bfloat16, torch.float16)]
        for j in low:
            placement = placements[j]
            if placement.temperature is not None:
                coefficients = placement.constants
            else:
                coefficients, _, _ = self._coefficients(
                    placement, self._now(state.count), state.conditions[0], rates, j
                )
            one, none = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            e = [
                s.process.step([one.clone() for _ in range(s.process.draws)], [none] * s.process.memory, c)[0]
                for s, c in zip(placement.sources, coefficients)
            ]
            gain = math.prod((float(rates[i][j]) for i in placement.rates_after), start=placement.gain_after)
            for i in set(placement.gains):
                gain *= float(gains[i][j].float().mean().sqrt())
            step = float(sum(e)) * gain
            size = float(leaves[j].detach().abs().float().mean())
            if 0 < step < torch.finfo(leaves[j].dtype).eps * size / 2:
                warnings.warn(
                    f"inject_langevin_noise: leaf {j} is {leaves[j].dtype} with entries near {size:.2g}, and a step's noise "
                    f"of about {step:.2g} would round away; keep float32 master parameters",
                    stacklevel=4,
                )
                return

    def __str__(self) -> str:
        words = [checks.show(self.temperature)]
        words += [f"order={self.order}"] if self.order != 2 else []
        words += [f"lr={self.lr}, momentum={self.momentum}"] if self.lr is not None else []
        words += [f"noise={self.noise!r}"] if self.noise != "gaussian" else []
        words += [f"stream={self.stream!r}"] if self.stream is not None else []
        return f"inject_langevin_noise({', '.join(words)})"


@checked
def inject_langevin_noise(
    temperature: Temperature,
    *,
    order: int = 2,
    lr: float | None = None,
    momentum: float = 0.0,
    generator: torch.Generator | None = None,
    noise: str = "gaussian",
    stream: keyed_stream.Stream | None = None,
) -> Chain:
    r"""Inject the noise that makes the chain sample ``exp(-loss / temperature)``.

    With a loss that is a mean over ``N`` data, ``temperature = 1 / N`` samples the Bayesian posterior; an unnormalised
    loss takes ``temperature = 1``. The noise is derived from the links around it when ``init`` is called, so the
    position among linear links does not matter; it must stand behind non-linear ones (clipping, Adam's scaling).

    Args:
        temperature: number, 0-d tensor (read at every update) or schedule ``count -> temperature``. The number 0 makes
            this the identity, without state or draw; a tensor or schedule that is 0 leaves the gradient's bits alone.
        order: 2 (default): exact for quadratic losses at every stable lr, bias of second order in lr otherwise. 1: white
            noise of the same level (SGLD, SGHMC), bias of first order.
        lr: only inside plain ``torchopt.chain``, whose links cannot see each other: the chain's learning rate. The
            noise then acts where it is written, which must be before the momentum.
        momentum: likewise, the chain's momentum.
        generator: source of the stream's key, drawn once by ``init`` (default: torch's global generator).
        noise: ``"gaussian"``; ``"three_point"`` (0 or +-sqrt(3), keeps order 2); or ``"rademacher"`` (signs,
            cheapest, keeps order 1; with ``order=2`` still exact in mean and covariance on quadratic losses).
        stream: ``"philox"`` draws counter-based noise on every device, the same in eager, compiled, captured and stacked
            steps; Gaussian noise then costs about a third of torch's generator where a C++ compiler is found, and many
            times as much where none is. ``"generator"`` is torch's (CPU only). Default: the generator on a CPU, Philox
            elsewhere.

    Returns:
        A link. With ``order=2`` its state holds one draw for each parameter, or none where heavy-ball momentum (of 1/16
        and more) follows at constant lr and temperature: there the velocity carries the half of the noise that acts in
        the next step.

    Raises:
        ValueError: negative, NaN or infinite temperature; an order other than 1 or 2.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
        >>> tx
        chain(
            inject_langevin_noise(0.5),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """
    checks.temperature(temperature)
    if order not in (1, 2) or isinstance(order, bool):
        raise ValueError(f"inject_langevin_noise: order must be 1 (white noise) or 2 (matched noise), got {order!r}")
    if noise not in ("gaussian", "rademacher", "three_point"):
        raise ValueError(
            f"inject_langevin_noise: noise must be 'gaussian', 'three_point' or 'rademacher', got {noise!r}"
        )
    if lr is not None:
        checks.positive("inject_langevin_noise: lr", lr)
        checks.momentum("inject_langevin_noise: momentum", momentum)
    elif momentum:
        raise ValueError("inject_langevin_noise: momentum= goes with lr=, both for plain torchopt.chain only")
    if stream is not None and stream not in keyed_stream.STREAMS:
        raise ValueError(f"inject_langevin_noise: stream must be one of {keyed_stream.STREAMS} or None, got {stream!r}")
    if isinstance(temperature, Real):
        temperature = float(temperature)
    return Chain((LangevinNoise(temperature, order, lr, momentum, generator, noise, stream),))


def counter_based(tx: GradientTransformation) -> Chain:
    """The same chain with every noise link drawing from the counter-based stream (``stream="philox"``).

    What to give to :func:`capture` and :func:`parallel`: on a CPU the noise costs about a third of torch's generator, and
    thousands of chains need no generator each.

    Args:
        tx: any chain, sampler or optimizer of this library.

    Example:
        >>> import bayesopt_chain as bc
        >>> bc.counter_based(bc.sgld(0.1, temperature=0.5))
        chain(
            inject_langevin_noise(0.5, stream='philox'),  # acts here, matched to F = 0.1
            scale_by_neg_lr(0.1),
        )
    """

    def switched(rule: Rule) -> Rule:
        if isinstance(rule, MaskedRule):
            return replace(rule, rule=switched(rule.rule))
        has_stream = is_dataclass(rule) and any(f.name == "stream" for f in fields(rule))
        return replace(rule, stream="philox") if has_stream else rule

    return Chain(tuple(map(switched, chain(tx).rules)))


def _product(start: Tensor, factors) -> Tensor:
    for factor in factors:
        start = start * factor.detach()
    return start


def _run(placement, coefficients, xi: list[Tensor], memory: list[Tensor], gains, j: int):
    """The noise of one leaf, summed over its sources, and its new memory."""
    if placement.is_plain:
        return placement.sources[0].process.step(xi, memory, coefficients[0])
    total, new, dtype = None, [], xi[0].dtype
    for source, c in zip(placement.sources, coefficients):
        process = source.process
        mine, xi = xi[: process.draws], xi[process.draws :]
        kept, memory = memory[: process.memory], memory[process.memory :]
        e, remembered = process.step(mine, kept, c)
        new += remembered
        for i in source.before:
            e = e * gains[i][j].sqrt()
        for i in source.after:
            e = e / gains[i][j].sqrt()
        total = e if total is None else total + e
    return total.to(dtype), [x.to(dtype) for x in new]
