r"""The search that :func:`bayesopt_chain.suggest_chain` and :func:`bayesopt_chain.suggest_lr` share.

For a chain of rate ``lr`` and momentum ``mu`` and batches of ``b`` in some order, at the places measured,

    draws an epoch      K / tau,   K = N / b,   tau the larger forgetting time of theta^2 of two directions: one of the mean
                        curvature tr(H) / P, and the stiffest
    heat                the largest relative variance that the batches add, over directions and places
    stability           the rate at which the stiffest direction of any place diverges

    best = argmax draws an epoch    subject to    heat <= tolerance,    lr <= margin stability.

Draws an epoch and heat both grow with the rate, so that for each momentum the largest allowed rate is the one to look at. The
scan over rates and momenta treats directions one by one (:mod:`._direction_laws`); the rate of a row is then settled by the
coupled equations of :mod:`.heating`. A pilot run from the last place comes to a place that is measured in its turn: in
networks the curvature at draws is some times larger than at the mode, and the noise points elsewhere.

A pilot that diverges halves the margin. Minibatches and full batches have a margin each, since minibatches may diverge by noise
that the mode does not show: where a model fits all data, the gradients of all batches vanish at the mode, and do not at draws.
After the first divergence of a minibatch pilot a pilot with full batches therefore goes to draws, where that noise is measured.

Of an allowance each stage takes what it needs from what is left when the later ones have theirs: the places still to be
measured, the shortest pilots, the timing of steps. Where the best batches are too large for a pilot that is left so much, the
best of the smaller ones go in their place.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor, nn

from bayesopt_chain.diagnostics import _direction_laws as laws
from bayesopt_chain.diagnostics._places import (
    Loss,
    Place,
    Rows,
    Source,
    devices_of,
    least_passes,
    measure,
    passes_of,
    seed_all,
)
from bayesopt_chain.diagnostics._response import Group, Response, read, reread
from bayesopt_chain.diagnostics.heating import Heating, Reduced, loop, predict, rescaled
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.testing._lyapunov import Unstable
from bayesopt_chain.trees import Tree

FIRST = 1e-3  # the rate at which chains are read
RATES = 28  # rates of the scan, over six decades below the stability limit
SCALED = 1e-4  # how exactly a gain has to be proportional to the rate
PLACE = 0.2  # of the allowance, for each place that is measured
PILOTS = (0.1, 1 / 6)  # of the allowance, for each pilot
SCORED = (0.37,)  # the same where draws of the pilot are scored on held-out data: one long pilot
SCORED_EPOCHS = 20.0  # of that pilot, where the allowance has no limit
KEPT = 8  # draws of a pilot that are scored
HALVINGS = 12
LEAST_PILOT = 0.5  # of what a pilot had, for the one that follows its divergence
LEAST_STEPS = 4  # of a pilot
TIMED = 3  # steps that are taken to time one batch size

P = ParamSpec("P")
R = TypeVar("R")


def keeps_generators(advise: Callable[P, R]) -> Callable[P, R]:
    """An adviser that draws from its own seed and leaves torch's generators as they were."""

    @functools.wraps(advise)
    def advised(*args: P.args, **options: P.kwargs) -> R:
        params: Any = options.get("params", args[2] if len(args) > 2 else ())
        tree = list(params.parameters()) if isinstance(params, nn.Module) else params
        seed: Any = options.get("seed", 0)
        with torch.random.fork_rng(devices=devices_of(tree)):
            seed_all(seed, devices_of(tree))
            return advise(*args, **options)

    return advised


class Family:
    """The chains ``make(lr, momentum)``, read once for each momentum.

    Raises:
        ValueError: a chain without noise, or one that is not linear, or whose moves are not proportional to ``lr``.
    """

    def __init__(self, name: str, make: Callable[[float, Any], Any], momenta: Sequence[Any], params: Tree, state: Any):
        self.make, self.momenta, self.state = make, list(momenta), state
        middle = self.momenta[len(self.momenta) // 2]
        first = make(FIRST, middle)
        self.generators = [(generator, generator.get_state()) for generator in _generators(first)]
        try:
            self._read(name, first, middle, params, state)
        finally:
            self.restore()

    def _read(self, name: str, first: Any, middle: Any, params: Tree, state: Any) -> None:
        make = self.make
        base = read(first, params, state)
        silent = sum(not group.temperature > 0 for group in base.groups)
        if silent:
            which = f" in {silent} of its {len(base.groups)} groups" if silent < len(base.groups) else ""
            raise ValueError(
                f"{name}: the chain draws no noise{which} to compare that of the batches with; give it a temperature above 0"
                + (" in every group" if which else "")
            )
        self.base = base
        self.readings = [
            base if momentum == middle else reread(base, make(FIRST, momentum), params, state)
            for momentum in self.momenta
        ]
        doubled = reread(base, make(2 * FIRST, middle), params, state)
        for once, twice in zip(base.gains, doubled.gains):
            if once.any() and abs(float((twice / once).reshape(-1)[0]) - 2.0) > SCALED:
                raise ValueError(
                    f"{name}: twice the lr does not move the parameters twice as far; make_tx must use the lr that it "
                    "is given, "
                    "in every group"
                )
        self.temperature = max(group.temperature for group in base.groups)

    def start(self, tx: Any, params: Tree) -> Any:
        """The state that a chain starts from: a copy of the one that was given, or its own."""
        if self.state is None:
            return tx.init(params)
        return optree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, self.state)

    def restore(self) -> None:
        """Put the generators that ``make`` handed to the chain back to where they were."""
        for generator, at in self.generators:
            generator.set_state(at)

    def group(self, i: int) -> Group:
        """The system of the largest group at the i-th momentum."""
        return max(self.readings[i].groups, key=lambda g: len(g.leaves))

    def ratio(self, i: int, lr: float | Tensor) -> Any:
        """Curvature and noise at this rate and momentum, over those at the first ones."""
        j = self.group(i).leaves[0]
        own, first = (float(r.gains[j].reshape(-1)[0]) for r in (self.readings[i], self.base))
        return own / first * lr / FIRST

    def at(self, i: int, lr: float, place: Place, batch: float) -> Reduced:
        """Curvature and noise of batches of that size, in the coordinates of the chain at this rate and momentum."""
        ratio = lr / FIRST
        reading = self.readings[i]
        # weight decay is a curvature, and grows with the rate as every other one does
        groups = tuple(g._replace(u=g.u * ratio, w=g.w * ratio) for g in reading.groups)
        system = replace(place.system, C=place.system.C / batch, D=place.system.D / batch)
        return rescaled(system, Response(tuple(g * ratio for g in reading.gains), groups))


@dataclass(frozen=True)
class Row:
    """A setting before its name: the index of its momentum, and what the laws say of it."""

    batch: int
    order: Any
    momentum: int
    lr: float
    stability: float
    heating: float
    draws: float
    heat: float
    kappa: float


class Margins(NamedTuple):
    """The share of the stability limit that a rate may take, with minibatches and with full batches."""

    mini: float
    full: float

    def of(self, is_full: bool) -> float:
        """The share for full batches, or for minibatches."""
        return self.full if is_full else self.mini

    def lowered(self, row: Row, is_full: bool) -> Margins:
        """The margins after a pilot of that row diverged; minibatches never have more than full batches."""
        halved = min(self.of(is_full), row.lr / row.stability) / 2.0
        return Margins(min(self.mini, halved), halved) if is_full else self._replace(mini=halved)


@dataclass
class Advice:
    """What the search came to; :class:`bayesopt_chain.diagnostics.suggest_chain.ChainSuggestion` shows it."""

    rows: list[Row]
    places: list[Place]
    params: Tree
    margins: Margins
    diverged: int
    passes: float
    seconds: dict[int, float] = field(default_factory=dict)
    draws: list[Tree] = field(default_factory=list)  # from the second half of the last pilot
    piloted: float = 0.0  # epochs up to the middle of these draws


@dataclass(frozen=True)
class Search:
    """All that stays the same while places are added."""

    name: str
    loss: Loss
    source: Source
    family: Family
    choices: list[tuple[int, Any]]  # batch size and order of each row
    tolerance: float
    margin: float
    exact: float  # how exactly a row's rate is settled
    rank: int
    allowance: float  # of passes over the data
    seed: int
    pilots: tuple[float, ...] = PILOTS
    later: float = 0.0  # passes that the caller needs after the search

    def run(self, params: Tree) -> Advice:
        """Measure, try, measure where the trial came to, and search again; torch's generators stay as they are."""
        with torch.random.fork_rng(devices=devices_of(params)):
            seed_all(self.seed, devices_of(params))  # of the pilots' keys
            try:
                return self._run(params)
            finally:
                self.family.restore()

    def _run(self, params: Tree) -> Advice:
        self._require_allowance()
        at, margins, diverged, spent, epochs = params, Margins(self.margin, self.margin), 0, 0.0, 0.0
        places = [self._measure(at)]
        seconds: dict[int, float] = {}
        kept: list[Tree] = []
        for pilot, share in enumerate(self.pilots):
            length = share * self.allowance
            if self.pilots == SCORED and math.isinf(length):
                length = SCORED_EPOCHS
            passes, came_to, to_draws = 0.0, None, False
            while True:
                left = self._left(spent, places, pilot)
                row = self._affordable(places, margins, left, to_draws)
                if row is None:
                    break
                kept, to_draws = [], False
                is_full = row.batch == self.source.size
                passes, came_to, took = self._pilot(row, at, places[0], min(length, left), pilot, kept)
                spent += passes
                # What diverging took is taken from the next trial, which keeps a part to be seen to run away in.
                length = max(length - passes, LEAST_PILOT * length)
                seconds[row.batch] = took
                if came_to is not None:
                    break
                diverged += 1
                if diverged > HALVINGS:
                    raise ValueError(
                        f"{self.name}: chains run away from params at every learning rate down to {row.lr:.3g}; go "
                        "to a mode first, and look at the loss"
                    )
                to_draws = not is_full and len(places) == 1 and isinstance(self.source, Rows) and diverged == 1
                to_draws = to_draws and self._left(spent, places, pilot) >= LEAST_STEPS
                if not to_draws:
                    margins = margins.lowered(row, is_full)
            if came_to is None:
                break
            epochs += 0.75 * passes if pilot == len(self.pilots) - 1 else passes
            at = came_to
            places.append(self._measure(at))
        if len(places) == 1:
            ran = f" after {diverged} that ran away" if diverged else ""
            raise ValueError(
                f"{self.name}: epochs: of a tenth of them, {self.allowance:.3g} passes over the data, too little is left for a "
                f"pilot run{ran}; give more, or leave epochs out"
            )
        rows = self.rows(places, margins)
        spent += sum(place.passes for place in places)
        return Advice(rows, places, at, margins, diverged, spent, seconds, kept, epochs)

    def timed(self, row: Row, params: Tree, batch: int) -> float:
        """Seconds of a step with batches of that size: the best of two, after one that is not counted."""
        tx = self.family.make(row.lr, self.family.momenta[row.momentum])
        step, state = make_step(self.loss, tx), self.family.start(tx, params)
        data, best = next(self.source.run(batch, "independent", self.seed)), math.inf
        for n in range(TIMED):
            began = time.perf_counter()
            params, state, info = step(params, state, data)
            float(info.loss)
            best = min(best, time.perf_counter() - began) if n else best
        self.family.restore()
        return best

    @property
    def to_time(self) -> set[int]:
        """The batch sizes whose steps are timed apart from pilots."""
        if not isinstance(self.source, Rows):
            return set()
        size, least = self.source.size, min(batch for batch, _ in self.choices)
        return {least, int(max(least, min(size, 8 * least, size // 8)))}

    @property
    def afterwards(self) -> float:
        """Passes that are needed once the last place is measured."""
        sizes = {batch for batch, _ in self.choices}
        known = sizes if len(sizes) == 1 else set()  # from the pilots
        return TIMED * sum(self.to_time - known) / self.source.size + self.later

    @property
    def _least_pilot(self) -> float:
        return LEAST_STEPS * min(batch for batch, _ in self.choices) / self.source.size

    def _left(self, spent: float, places: list[Place], pilot: int) -> float:
        """Passes that a pilot may take, after what its predecessors took and what has to follow."""
        each = [place.passes for place in places]
        follow = len(self.pilots) - pilot
        return (
            self.allowance - spent - sum(each) - follow * max(each) - (follow - 1) * self._least_pilot - self.afterwards
        )

    def _affordable(self, places: list[Place], margins: Margins, left: float, full: bool) -> Row | None:
        """The best row, or that of full batches, whose shortest pilot takes no more passes; ``None`` where there is none."""
        choices = [(self.source.size, "full")] if full else self.choices
        cheap = [choice for choice in choices if LEAST_STEPS * choice[0] / self.source.size <= left]
        if not cheap:
            return None
        try:
            return replace(self, choices=cheap).rows(places, margins, only_best=True)[0]
        except ValueError:
            if len(cheap) == len(choices):
                raise
            return None

    @property
    def _only_full(self) -> bool:
        return all(batch == self.source.size for batch, _ in self.choices)

    def _require_allowance(self) -> None:
        """Refuse an allowance in which nothing can be measured."""
        place = least_passes(self.source, self.rank, self._only_full)
        least = max(place / PLACE, self._needed(0.0))
        if least > self.allowance:
            raise ValueError(
                f"{self.name}: epochs: a tenth of them, {self.allowance:.3g} passes over the data, is too little to "
                "measure curvature "
                f"and noise at {len(self.pilots) + 1} places and to try a chain, which takes {least:.3g}; give "
                f"{math.ceil(10 * least)} or more, or leave epochs out"
            )

    def _needed(self, place: float) -> float:
        """Passes of all stages with the shortest pilots, where each place is measured with that allowance."""
        tries = len(self.pilots)
        measured = (tries + 1) * passes_of(self.source, self.rank, self._only_full, place)
        return measured + tries * self._least_pilot + self.afterwards

    @functools.cached_property
    def _place(self) -> float:
        """The allowance for each place: its share, or what leaves the shortest pilots theirs."""
        place = PLACE * self.allowance
        while math.isfinite(place) and place > 1e-6 and self._needed(place) > self.allowance:
            place *= 0.95
        return place

    def _measure(self, params: Tree) -> Place:
        try:
            return measure(
                self.loss,
                params,
                self.source,
                self.family.base,
                rank=self.rank,
                allowance=self._place,
                only_full=self._only_full,
            )
        except ValueError as err:
            raise ValueError(f"{self.name}: {err}") from err
        except RuntimeError as err:
            if not isinstance(err, NotImplementedError) and "no second derivative" not in str(err):
                raise
            reason = str(err).strip().split("\n")[0]
            raise ValueError(
                f"{self.name}: loss must have dense gradients and products with its Hessian, which torch lacks for a part of "
                f"it: {reason:.160}; of nn.Embedding take sparse=False, and for nn.EmbeddingBag the mean of an nn.Embedding"
            ) from err
        except torch.linalg.LinAlgError as err:  # pyright: ignore[reportPrivateImportUsage]
            raise ValueError(
                f"{self.name}: loss has second derivatives at params that are not finite; look for NaN in params and data, and "
                "for roots and norms at zero"
            ) from err

    def _pilot(
        self, row: Row, params: Tree, mode: Place, allowance: float, seed: int, kept: list[Tree]
    ) -> tuple[float, Tree | None, float]:
        """Passes over the data that a trial took, where it came to (``None``: it diverged), and seconds a step.

        Draws of its second half are appended to ``kept``.
        """
        K = self.source.size / row.batch
        steps = int(min(200, max(20, 40 * K))) if math.isinf(allowance) else max(LEAST_STEPS, int(allowance * K))
        tx = self.family.make(row.lr, self.family.momenta[row.momentum])
        step, state = make_step(self.loss, tx), self.family.start(tx, params)
        batches = self.source.run(row.batch, row.order, self.seed + seed)
        # a Gaussian of P directions lies T P / 2 above its mode
        most = mode.level + 2.0 * self.family.temperature * mode.moving
        most += 0.1 * abs(most) + 4.0 * mode.level_error
        losses: list[Tensor] = []
        began = time.perf_counter()
        for n in range(1, steps + 1):
            params, state, info = step(params, state, next(batches))
            losses.append(info.loss)
            if (n * 2 * KEPT) // steps > max(((n - 1) * 2 * KEPT) // steps, KEPT):
                kept.append(optree.tree_map(torch.clone, params))
            if n % 20 == 0 or n == steps:
                last = torch.stack(losses[-max(1, n // 4) :]).double().mean()
                if (
                    not bool(last.isfinite())
                    or (n == steps and float(last) > most)
                    or float(last) > 10.0 * abs(most) + most
                ):
                    return n / K, None, (time.perf_counter() - began) / n
        if not all(bool(x.isfinite().all()) for x in optree.tree_leaves(params)):
            return steps / K, None, (time.perf_counter() - began) / steps
        return steps / K, params, (time.perf_counter() - began) / steps

    def rows(self, places: list[Place], margins: Margins, only_best: bool = False) -> list[Row]:
        """The best rate and momentum for each batch size and order, most draws an epoch first; or of all of them the best.

        Raises:
            ValueError: no rate is small enough for any of them.
        """
        scans = {
            margin: [Scan(self.family, i, places, margin) for i in range(len(self.family.momenta))]
            for margin in {margins.of(batch == self.source.size) for batch, _ in self.choices}
        }
        found = []
        for batch, order in self.choices:
            scan = scans[margins.of(batch == self.source.size)]
            best = max(
                (s.best(batch, order, self.source.size / batch, self.tolerance) for s in scan), key=lambda x: x[0]
            )
            if best[0] > 0:
                found.append((best, batch, order))
        if not found:
            raise ValueError(
                f"{self.name}: no learning rate is small enough for the tolerance; look at the noise of the gradients first, "
                "and for NaN in loss and batches"
            )
        if only_best:
            found = [max(found, key=lambda x: x[0][0])]
        exact = max(self.exact, 0.05) if only_best else self.exact
        rows = [
            self._settle(best[1], best[2], batch, order, places, margins.of(batch == self.source.size), exact)
            for best, batch, order in found
        ]
        return sorted(rows, key=lambda row: -row.draws)

    def _settle(
        self, i: int, lr: float, batch: int, order: Any, places: list[Place], margin: float, exact: float
    ) -> Row:
        """The largest rate that the coupled equations allow, and what they say of it."""
        K = self.source.size / batch
        known = _known(order) if K > 1 else "independent"
        silent = K == 1 and not any(place.draws for place in places)

        def heat_at(place: Place, lr: float) -> float:
            try:
                return predict(self.family.at(i, lr, place, batch), known, K).worst
            except (ValueError, Unstable):  # it diverges
                return math.inf

        # the places differ by less than the rates that are tried: the worst one at the scan's rate decides
        stiffest = max(places, key=lambda place: place.top)
        hottest = places[0] if silent else max(places, key=lambda place: heat_at(place, lr))
        stability = self._largest(
            lambda lr: loop(self.family.at(i, lr, stiffest, batch)).radius < 1.0 + 1e-6, lr, math.inf, exact
        )
        heating = math.inf
        if not silent:
            heating = self._largest(
                lambda lr: heat_at(hottest, lr) <= self.tolerance, min(lr, 0.5 * stability), 0.999 * stability, exact
            )
        lr = min(heating, margin * stability)
        ratio = self.family.ratio(i, lr)
        draws = K / float(_forgetting(self.family.group(i), places, ratio))
        heat = 0.0 if silent else heat_at(hottest, lr)
        return Row(batch, order, i, lr, stability, heating, draws, heat, K * stiffest.top * ratio)

    def _largest(self, allowed: Callable[[float], bool], start: float, most: float, exact: float) -> float:
        try:
            return largest(allowed, start, most, exact)
        except ValueError as err:
            raise ValueError(f"{self.name}: {err}") from None


class Scan:
    """All rates at one momentum, direction by direction."""

    def __init__(self, family: Family, i: int, places: list[Place], margin: float) -> None:
        self.i, group = i, family.group(i)
        known = [_directions_of(place) for place in places]
        y, self.C, self.D = (torch.cat(parts) for parts in zip(*known))
        self.y_top = float(max(place.top for place in places))
        most_y = limit(group)
        most = margin * most_y / (self.y_top * family.ratio(i, 1.0))
        self.lr = most * torch.logspace(-6, 0, RATES, dtype=torch.float64, device="cpu")
        self.ratio = family.ratio(i, self.lr)[:, None]
        self.of = laws.directions(group, self.ratio * y, most_y)
        self.variance = laws.variance(self.of)
        self.alone = laws.unit_excess(self.of, math.inf, False)  # of draws of the model, which no order cancels
        self.tau = _forgetting(group, places, self.ratio, most_y)
        self.seen: dict[Any, Tensor] = {}

    def best(self, batch: int, order: Any, K: float, tolerance: float) -> tuple[float, int, float]:
        """The most draws an epoch within the tolerance (0 where there are none), the momentum, and the rate."""
        own = self.D / batch * self.alone
        if K > 1:
            key = (order, K)
            if key not in self.seen:
                self.seen[key] = laws.unit_excess(self.of, K, _known(order) != "independent")
            own = own + self.C / batch * self.seen[key]
        heat = (self.ratio * own / self.variance).amax(-1)
        draws = torch.where((heat <= tolerance) & self.tau.isfinite(), K / self.tau, 0.0)
        at = int(draws.argmax())
        return float(draws[at]), self.i, float(self.lr[at])


def limit(group: Group) -> float:
    """The curvature in coordinates of gain one from which on the chain diverges, to 1e-6 of it."""
    low, high = 1e-6, 1e4
    for _ in range(8):
        y = torch.logspace(math.log10(low), math.log10(high), 24, dtype=torch.float64, device="cpu")
        stable = laws.directions(group, y).stable.tolist()
        first = next((n for n, ok in enumerate(stable) if not ok), len(stable))
        if first in (0, len(stable)):
            return float(y[-1] if first else y[0])
        low, high = float(y[first - 1]), float(y[first])
    return low


def largest(allowed: Callable[[float], bool], start: float, most: float, exact: float) -> float:
    """The largest number that is allowed, to that part of it; infinite where ``most`` is allowed.

    Raises:
        ValueError: none is.
    """
    low, high = start, None
    while not allowed(low):
        low, high = low / 4.0, low
        if low < 1e-30:
            raise ValueError("no learning rate is small enough; look at the noise of the gradients first")
    while high is None:
        if low >= most:
            return math.inf
        if low > 1e30:
            raise ValueError("no learning rate is too large; the chain does not move, or the loss is flat")
        wider = min(2.0 * low, most)
        if allowed(wider):
            low = wider
        else:
            high = wider
    while high > low * (1.0 + exact):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


def _generators(made: Any) -> Iterator[torch.Generator]:
    """The generators that a chain holds."""
    if isinstance(made, torch.Generator):
        yield made
        return
    parts: Any = getattr(made, "links", ())
    if isinstance(made, Mapping):
        parts = made.values()
    elif is_dataclass(made) and not isinstance(made, type):
        parts = [getattr(made, x.name) for x in fields(made)]
    elif isinstance(made, list | tuple) and not parts:
        parts = made
    for part in parts:
        yield from _generators(part)


def report(search: Search, advice: Advice, row: Row) -> Heating:
    """What :func:`bayesopt_chain.diagnostics.heating` says of a row at the place where it is hottest."""
    K = search.source.size / row.batch
    order = _known(row.order) if K > 1 else "independent"
    systems = [search.family.at(row.momentum, row.lr, place, row.batch) for place in advice.places]
    return max((predict(system, order, K) for system in systems), key=lambda heating: heating.worst)


def draws_along(search: Search, row: Row, curvatures: Tensor) -> Tensor:
    """Effective draws of theta^2 an epoch that a row makes along directions of these curvatures, prior included."""
    y = curvatures.double() * search.family.ratio(row.momentum, row.lr)
    return search.source.size / row.batch / laws.forgetting(laws.directions(search.family.group(row.momentum), y))


def _known(order: Any) -> Any:
    """The order whose law holds; a rule of one's own is a permutation of an epoch."""
    return order if isinstance(order, str) else "reshuffled"


def _directions_of(place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Curvature, batch noise and noise of the model's draws along the eigenvectors of the curvature and of the noise."""
    H, C, D = place.system.H, place.system.C, place.system.D
    prior = min(group.prior for group in place.system.response.groups)
    V = torch.cat([torch.linalg.eigh(H).eigenvectors, torch.linalg.eigh(C + D).eigenvectors], dim=1)
    y, c, d = (torch.einsum("ij,ik,kj->j", V, X, V) for X in (H, C, D))
    keep = y + prior > 1e-6 * place.top
    return y[keep] + prior, c[keep], d[keep]


def _forgetting(group: Group, places: list[Place], ratio: Any, limit: float | None = None) -> Tensor:
    """Steps between effective draws: the slower of a direction of the mean curvature and of the stiffest one."""
    slow = torch.tensor(
        [sorted(place.slow for place in places)[len(places) // 2], max(p.top for p in places)], device="cpu"
    )
    return laws.forgetting(laws.directions(group, slow.double() * ratio, limit)).amax(-1)
