"""Draws in, noise out: what the chain runs for its noise links before the first link sees the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.core.filters import Conditions
from bayesopt_chain.core.link import Keyed, require_own_key
from bayesopt_chain.core.matching import Site
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.core.response import Linear, Noise, Response
from bayesopt_chain.core.scalar_or_schedule import ScalarOrSchedule, is_number, is_zero, now, require_valid
from bayesopt_chain.random import stream as keyed_stream


class LangevinNoiseState(NamedTuple):
    """``key`` and ``count`` (0-d, int64) of the stream; the remembered draws of each leaf, stacked on axis 0.

    ``conditions`` holds last step's temperature and gains, float64 ``[leaves, 3]``, where those can change (else it is empty).
    """

    key: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    memory: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]


@dataclass(frozen=True)
class NoiseLink(Keyed):
    """The link that injects matched noise: its temperature, order and kind of increments. The chain does the rest."""

    temperature: ScalarOrSchedule
    order: int = 2
    lr: float | None = None  # told, with the momentum, where its neighbours cannot be seen
    momentum: float = 0.0
    noise: str = "gaussian"

    @property
    def is_static(self) -> bool:
        """Whether the temperature is a number."""
        return is_number(self.temperature)

    @property
    def response(self) -> Response:
        return Linear() if is_zero(self.temperature) else Noise()

    def started(
        self, sites: Sequence[Site], weather: Weather, leaves: Sequence[Any], coloured: Callable[..., Any]
    ) -> None:
        """Look at the first step's conditions when a state is made."""


class Injected(NamedTuple):
    """A site's noise of this step, for those of its leaves that have a gradient."""

    site: Site
    leaves: list[int]
    noise: Leaves
    scale: list[Any] | None  # what the velocity is multiplied by before the step
    hot: Tensor | None  # false where a changing temperature is zero: those gradients keep their bits


class Weather(NamedTuple):
    """What is known of a step before anything is drawn: the temperature; by site, its coefficients and what they leave."""

    temperature: float | Tensor
    coefficients: list[tuple[list[Any], list[Any] | None, Tensor | None]]


def pairs(sites: Sequence[Site]) -> list[tuple[int, int]]:
    """The places in a noise link's state: (leaf, site), leaf by leaf."""
    return sorted((j, n) for n, s in enumerate(sites) for j in s.leaves)


def start(link: NoiseLink, sites: Sequence[Site], leaves: Sequence[Any]) -> LangevinNoiseState:
    """The first state of a noise link."""
    device = leaves[sites[0].leaves[0]].device if sites else torch.device("cpu")
    memory = [leaves[j].new_zeros((sites[n].process.memory, *leaves[j].shape)) for j, n in pairs(sites)]
    changing = any(s.constants is None for s in sites)
    conditions = (torch.zeros(len(memory), 3, dtype=torch.float64, device=device),) if changing else ()
    count = torch.zeros((), dtype=torch.int64, device=device)
    return LangevinNoiseState(keyed_stream.new_key(link.generator, device), count, tuple(memory), conditions)


def foresee(link: NoiseLink, sites: Sequence[Site], state: LangevinNoiseState, rates: Callable[..., Tensor]) -> Weather:
    """Temperature and coefficients of this step; refuses a temperature out of range before anything is changed."""
    if any(s.constants is None for s in sites) is not bool(state.conditions):
        raise ValueError(
            "state: it was made for a constant temperature and lr, and in this chain one of them changes, or the other way "
            "round; to go on from it call init(params, like=state) of this chain"
        )
    if not state.conditions:
        return Weather(float(link.temperature), [(s.constants or [], None, None) for s in sites])  # pyright: ignore[reportArgumentType]
    temperature = now(link.temperature, state.count)
    if not link.is_static:
        require_valid("temperature", temperature)
    return Weather(temperature, [_coefficients(s, temperature, state.conditions[0], rates) for s in sites])


def _coefficients(site: Site, temperature: Any, before: Tensor, rates: Callable[..., Tensor]) -> Any:
    """By leaf, the filter's coefficients and the velocity's scale; and the conditions that this step leaves behind."""
    rows = before[torch.tensor(site.rows, device=before.device)]
    last = Conditions(*rows.unbind(-1))
    one = torch.ones_like(last.temperature)  # pyright: ignore[reportArgumentType]
    front, behind = (math.prod((rates(i, site.leaves) for i in part), start=one) for part in site.rates)
    moves = (front != 0) & (behind != 0)  # lr = 0 keeps the velocity at the level it was brought to
    inverse = torch.where(moves, front / torch.where(moves, behind, one), last.inverse)
    current = Conditions(one * temperature, inverse, torch.where(moves, front * front, last.square))
    values, scale = site.process.coefficients(current, last)
    if scale is not None:  # a cold velocity is the optimizer's own, and stays
        scale = torch.where((current.temperature != 0) | (last.temperature != 0), scale, one).unbind()  # pyright: ignore[reportArgumentType, reportCallIssue]
    return _by_leaf(values, len(site.leaves)), scale, torch.stack(list(current), -1)  # pyright: ignore[reportArgumentType]


def _by_leaf(values: Any, n: int) -> list[Any]:
    """Coefficients, each ``[leaves]``, as one structure of 0-d tensors for each leaf."""
    if isinstance(values, Tensor):
        return list(values.unbind())
    if values is None:
        return [None] * n
    parts = [_by_leaf(v, n) for v in values]
    rebuild = type(values)._make if hasattr(values, "_make") else type(values)
    return [rebuild(x) for x in zip(*parts)]


def draw(
    link: NoiseLink,
    sites: Sequence[Site],
    state: LangevinNoiseState,
    weather: Weather,
    g: Sequence[Any],
    numbers: Sequence[int],
    op: Op,
) -> tuple[list[Injected], LangevinNoiseState]:
    """The noise of every site of one noise link, and its next state. A leaf without a gradient keeps its memory."""
    require_own_key(state.key, [x for x in g if x is not None])
    white = len(sites) == 1 and bool(sites[0].constants) and not sites[0].process.memory  # scaled while it is drawn
    level = sites[0].constants[0] if white and sites[0].constants else 1.0
    places = pairs(sites)
    xi = keyed_stream.normals(
        state.key,
        state.count,
        state.memory,
        [sites[n].process.draws for _, n in places],
        link.noise,
        link.stream,
        level,
        numbers=[keyed_stream.draw_number(numbers[j], 2 * n) for j, n in places],
    )
    hot = None if link.is_static else weather.temperature != 0
    out: list[Injected] = []
    memory, conditions = list(state.memory), list(state.conditions)
    for site, (c, scale, after) in zip(sites, weather.coefficients):
        live = [n for n, j in enumerate(site.leaves) if g[j] is not None]
        e: Leaves = []
        for n in live:
            row = site.rows[n]
            if white:
                e += xi[row]
                continue
            kept = memory[row]
            y, new = site.process.step(xi[row], list(kept), c if site.constants is not None else c[n])
            e.append(y if y.dtype == kept.dtype else y.to(kept.dtype))
            if new:
                (memory[row],) = op.put([kept], [torch.stack(new) if len(new) > 1 else new[0].unsqueeze(0)])
        if after is not None:
            rows = torch.tensor([site.rows[n] for n in live], device=after.device)
            after = after if len(live) == len(site.leaves) else after[torch.tensor(live, device=after.device)]
            conditions = op.put(conditions, [conditions[0].index_copy(0, rows, after)])
            scale = None if scale is None else [scale[n] for n in live]
        out.append(Injected(site, [site.leaves[n] for n in live], e, scale, hot))  # pyright: ignore[reportArgumentType]
    return out, LangevinNoiseState(state.key, *op.count([state.count]), tuple(memory), tuple(conditions))  # pyright: ignore[reportCallIssue]
