"""Draws in, noise out: what one noise link adds to the gradients of a step, at all of its sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.filters import Conditions
from bayesopt_chain.core.link import NoiseLink
from bayesopt_chain.core.matching import Site
from bayesopt_chain.core.op import Leaves, Op
from bayesopt_chain.core.scalar_or_schedule import now as value_at
from bayesopt_chain.random import stream as keyed_stream

Rates = Callable[[int, Sequence[int]], Tensor]


def constant(i: int, leaves: Sequence[int]) -> Tensor:
    """The rates of a chain in which none changes."""
    raise NotImplementedError


class LangevinNoiseState(NamedTuple):
    """``key`` and ``count`` (0-d, int64) of the stream; the remembered draws of each leaf, stacked on axis 0.

    ``conditions`` holds last step's temperature and gains, float64 ``[leaves, 3]``, where those can change (else it is empty).
    """

    key: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    memory: tuple[Tensor, ...]
    conditions: tuple[Tensor, ...]


class Injected(NamedTuple):
    """A site's noise of this step, for those of its leaves that have a gradient."""

    site: Site
    leaves: list[int]
    noise: Leaves
    scale: list[Tensor] | None  # what the velocity is multiplied by before the step
    hot: Tensor | None  # false where a changing temperature is zero: those gradients keep their bits


class Strength(NamedTuple):
    """What is known of a step before anything is drawn: the temperature; by site, coefficients and velocity scale of each
    leaf, and the conditions that the step leaves behind."""

    temperature: float | Tensor
    by_site: list[tuple[Sequence[Any], Sequence[Tensor] | None, Tensor | None]]


class Injection:
    """A noise link with its sites, and the places of their leaves in its state: leaf by leaf, site by site."""

    def __init__(self, link: NoiseLink, sites: Sequence[Site], numbers: Sequence[int], pieces: Any = None) -> None:
        self.link, self.sites = link, sites
        places = sorted((j, n) for n, site in enumerate(sites) for j in site.leaves)
        row = {place: k for k, place in enumerate(places)}
        self.rows = [[row[j, n] for j in site.leaves] for n, site in enumerate(sites)]
        self.numbers = [keyed_stream.draw_number(numbers[j], 2 * n) for j, n in places]
        self.leaves = [j for j, _ in places]
        self.pieces = None if pieces is None else [pieces[j] for j in self.leaves]
        self.processes = [sites[n].process for _, n in places]
        self.draws = [process.draws for process in self.processes]
        lone = sites[0].constants if len(sites) == 1 and not sites[0].process.memory else None
        self.level = lone[0] if lone else None  # of white noise that is scaled while it is drawn

    def start(self, leaves: Sequence[Any]) -> LangevinNoiseState:
        """The first state."""
        device = leaves[self.leaves[0]].device if self.leaves else torch.device("cpu")
        memory = [leaves[j].new_zeros((p.memory, *leaves[j].shape)) for j, p in zip(self.leaves, self.processes)]
        changes = any(site.constants is None for site in self.sites)
        conditions = (torch.zeros(len(memory), 3, dtype=torch.float64, device=device),) if changes else ()
        key, count = (
            keyed_stream.new_key(self.link.generator, device),
            torch.zeros((), dtype=torch.int64, device=device),
        )
        return LangevinNoiseState(key, count, tuple(memory), conditions)

    def strength(self, state: LangevinNoiseState, rates: Rates = constant) -> Strength:
        """That of this step; refuses a temperature out of range before anything is changed."""
        if not state.conditions and any(site.constants is None for site in self.sites):
            raise ValueError(
                "state: its temperature and lr were constant, here one changes; call init(params, like=state)"
            )
        temperature = value_at(self.link.temperature, state.count)
        if not self.link.is_static:
            checks.at_this_step("temperature", temperature)
        by_site: list[Any] = [
            ([site.constants] * len(rows), None, None)
            if site.constants is not None
            else _coefficients(
                site, temperature, state.conditions[0][torch.tensor(rows, device=state.key.device)], rates
            )
            for site, rows in zip(self.sites, self.rows)
        ]
        return Strength(temperature, by_site)

    def draw(
        self, state: LangevinNoiseState, strength: Strength, g: Sequence[Any], op: Op
    ) -> tuple[list[Injected], LangevinNoiseState]:
        """The noise of every site, and the next state. A leaf without a gradient keeps its memory."""
        key, count, link = state.key, state.count, self.link
        checks.own_key(key, [x for x in g if x is not None])
        level = 1.0 if self.level is None else self.level
        xi = keyed_stream.normals(
            key, count, state.memory, self.draws, link.noise, link.stream, level, self.numbers, self.pieces
        )
        hot = None if isinstance(strength.temperature, float) else strength.temperature != 0
        out: list[Injected] = []
        memory, conditions = list(state.memory), list(state.conditions)
        for site, rows, (c, scale, after) in zip(self.sites, self.rows, strength.by_site):
            live = [n for n, j in enumerate(site.leaves) if g[j] is not None]
            e: Leaves = []
            for n in live:
                if self.level is not None:
                    e += xi[rows[n]]
                    continue
                kept = memory[rows[n]]
                y, new = site.process.step(xi[rows[n]], list(kept), c[n])
                e.append(y if y.dtype == kept.dtype else y.to(kept.dtype))
                if new:
                    (memory[rows[n]],) = op.put([kept], [torch.stack(new) if len(new) > 1 else new[0].unsqueeze(0)])
            if after is not None:
                at = torch.tensor([rows[n] for n in live], dtype=torch.int64, device=after.device)
                after = after if len(live) == len(rows) else after[live]
                conditions = op.put(conditions, [conditions[0].index_copy(0, at, after)])
                scale = None if scale is None else [scale[n] for n in live]
            out.append(Injected(site, [site.leaves[n] for n in live], e, scale, hot))  # pyright: ignore[reportArgumentType]
        return out, LangevinNoiseState(key, *op.count([count]), tuple(memory), tuple(conditions))  # pyright: ignore[reportCallIssue]


def _coefficients(site: Site, temperature: Any, before: Tensor, rates: Rates) -> Any:
    """By leaf, the filter's coefficients and the velocity's scale; and the conditions that this step leaves behind."""
    last_heat, last_inverse, last_square = before.unbind(-1)
    one = torch.ones_like(last_heat)
    front, behind = (math.prod((rates(i, site.leaves) for i in part), start=one) for part in site.rates)
    moves = (front != 0) & (behind != 0)  # lr = 0 keeps the velocity at the level it was brought to
    inverse = torch.where(moves, front / torch.where(moves, behind, one), last_inverse)
    square, heat = torch.where(moves, front * front, last_square), one * temperature
    now, last = Conditions(heat, inverse, square), Conditions(last_heat, last_inverse, last_square)
    values, scale = site.process.coefficients(now, last)
    if scale is not None:  # a cold velocity is the optimizer's own, and stays
        scale = torch.where((heat != 0) | (last_heat != 0), scale, one).unbind()
    numbers: list[Tensor]
    numbers, structure = optree.tree_flatten(values)
    by_leaf = [structure.unflatten(x) for x in zip(*[v.unbind() for v in numbers])]
    return by_leaf, scale, torch.stack([heat, inverse, square], -1)
