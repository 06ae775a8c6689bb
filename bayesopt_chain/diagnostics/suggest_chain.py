r"""``suggest_chain``: learning rate, momentum, batch size and order of the batches, chosen together by the laws of
minibatch heat.

Each setting has two sides: how fast the chain forgets, and by how much the noise of the batches widens what it
samples. Both are
known for a chain on a quadratic loss (:mod:`bayesopt_chain.diagnostics._direction_laws`); what they need, curvature and
gradient noise, is measured where the chain goes:

    at ``params``    curvature and noise, a first ranking
    a pilot run      of the best setting, at a tenth of its stability limit at most; after one that runs away comes one with
                     full batches, and from then on each halves that share
    at its end       curvature and noise again, and a second pilot; the largest curvature and the worst heat of all places count

Effective draws are those of ``theta^2`` in the slower of two directions: one of the mean curvature ``tr(H) / P``, and the
stiffest one. In an ill-conditioned problem a few stiff directions make up the trace, and most are softer and forget more
slowly: what the softest one gets that Lanczos' method saw, and about how many get too little, is said in words. Gradient
noise as heat: Mandt, Hoffman and Blei (2017); the sum of an epoch's noise is zero, which momentum with a memory of an epoch
or more can use: ``docs/minibatches.md``.

Where a network's draws at the chain's temperature predict worse than its mode, held-out data say so: with ``held_out`` the
pilot's draws are scored on rows that ``params`` was trained without, as they are and pulled towards the mode as a colder
temperature would (:mod:`bayesopt_chain.diagnostics._held_out`), and the settings are those of the largest temperature at which
they predict at least as well as the mode. Several starts share the run: each mode gets a chain of its own, so that what an
ensemble gains between its members is kept.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import optree
import torch
from torch import nn

from bayesopt_chain import checks, kinds
from bayesopt_chain.data.epochs import Epochs, epochs
from bayesopt_chain.data.index_stream import Order, Rule
from bayesopt_chain.diagnostics._advice import (
    PILOTS,
    SCORED,
    TIMED,
    Advice,
    Family,
    Row,
    Search,
    draws_along,
    keeps_generators,
    report,
)
from bayesopt_chain.diagnostics._held_out import HeldOutScore, chosen, scores, split, widening
from bayesopt_chain.diagnostics._places import FLAT, FORWARD, Place, Rows, require_mean
from bayesopt_chain.diagnostics.heating import Heating
from bayesopt_chain.optimizers.functional import sgd

MOMENTA = tuple(1.0 - 10.0 ** (-0.3 - 2.7 * i / 11) for i in range(12))  # 0.5 to 0.999
MARGIN = 0.1  # of the stability limit
SHARE = 0.1  # of the passes of a run that suggesting may cost
BASE = 64  # data in the batches whose noise is measured, at most
COLDER = (1.0, 0.3, 0.1, 0.03, 0.01)  # times the chain's temperature
FEW = 10.0  # draws of a run below which it is said to be short
NO_MODE = 0.1  # of the rise T P / 2 of a loss above its mode: a fall of that size is none of a mode
FAR = 3.0  # times more draws from which on another way is worth a sentence


@dataclass(frozen=True)
class Setting:
    """One row of a :class:`ChainSuggestion`.

    Attributes:
        order: of the batches, as for :func:`bayesopt_chain.epochs`; ``"full"`` for full batches.
        batch_size: number of data in a batch.
        lr, momentum: of the chain; ``momentum`` is ``None`` where ``make_tx`` takes none.
        draws_per_epoch: effective draws that one pass over the data makes, in the slower of two directions (see the module).
        excess: estimated share by which the batches widen the variance of the worst direction, mean over an epoch; 0.05 is 5 %.
            It comes from few gradients at few places, and is no bound.
        seconds_per_epoch: from timed steps on this machine.
        kappa: relaxations an epoch of the stiffest direction, ``K lr_eff k``.
        limited_by: ``"stability"`` or ``"batch noise"``.
        stability: the rate from which on the chain diverges.
        heating: the largest rate within the tolerance; infinite where every stable one is.
    """

    order: Any
    batch_size: int
    lr: float
    momentum: float | None
    draws_per_epoch: float
    excess: float
    seconds_per_epoch: float
    kappa: float
    limited_by: str
    stability: float
    heating: float

    @property
    def options(self) -> dict[str, float]:
        """``lr`` and ``momentum`` as keywords of ``bc.sghmc`` or ``bc.optim.SGHMC``."""
        known = {"lr": self.lr, "momentum": self.momentum}
        return {name: value for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        momentum = "" if self.momentum is None else f"{self.momentum:.4g}"
        order = self.order if isinstance(self.order, str) else getattr(self.order, "__name__", "own order")
        return (
            f"{order:<12}{self.batch_size:>7}{self.lr:>11.3g}{momentum:>10}{self.draws_per_epoch:>13.2g}{self.excess:>9.1%}"
            f"{self.seconds_per_epoch:>10.2g}{self.kappa:>10.2g}  {self.limited_by}"
        )


@dataclass(frozen=True)
class ChainSuggestion:
    """What :func:`suggest_chain` and :func:`suggest_lr` suggest: settings, the best first. It can be iterated and printed.

    Attributes:
        settings: the ranked table, one row for each batch size and order.
        tx: the chain of the best setting.
        batches: for :func:`bayesopt_chain.sample`: the batches of the best setting.
        steps, burn_in, thinning: of each chain in the rest of a run of ``epochs`` epochs, a fifth of it burn-in, about 200
            draws of all chains; ``None`` where no ``epochs`` were given.
        params: the first of ``starts``: where the last pilot came to, a draw nearer to the posterior than the mode; or a mode
            that was given, where a colder temperature is suggested or where starts were given with ``held_out``.
        starts: where each chain starts: ``params`` and the other starts that were given; with ``held_out`` the latter alone.
        temperature: of ``tx``.
        scores: on held-out data, by temperature, :class:`HeldOutScore` each, and the mode's, last; empty without ``held_out``.
        report: what :func:`bayesopt_chain.diagnostics.heating` says of the best setting.
        passes: over the data that suggesting took; a product with the Hessian counts as two.
        diverged: how many pilots ran away.
        notes: what limits the best setting and what would buy more, as plain sentences.
    """

    settings: tuple[Setting, ...]
    tx: Any
    batches: Any
    steps: int | None
    burn_in: int | None
    thinning: int | None
    params: Any
    starts: tuple[Any, ...]
    temperature: float
    scores: tuple[HeldOutScore, ...]
    report: Heating
    passes: float
    diverged: int
    notes: tuple[str, ...]

    @property
    def best(self) -> Setting:
        """The setting with the most effective draws."""
        return self.settings[0]

    @property
    def lr(self) -> float:
        """The learning rate of the best setting."""
        return self.best.lr

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def __getitem__(self, index: int) -> Setting:
        return self.settings[index]

    def __str__(self) -> str:
        head = (
            f"{'batches':<12}{'size':>7}{'lr':>11}{'momentum':>10}{'draws/epoch':>13}{'excess':>9}{'s/epoch':>10}{'kappa':>10}"
            "  limited by"
        )
        return "\n".join([head, *map(str, self.settings), *self.notes])


PLACE_OR_MODULE = kinds.Kind(
    lambda x: kinds.MODULE.fits(x) or kinds.PLACE.fits(x), f"{kinds.PLACE.words}, or a module", kinds.PLACE.of
)


@kinds.takes(
    params=PLACE_OR_MODULE,
    data=kinds.ANY,
    batch_sizes=kinds.Kind(
        lambda x: kinds.SEQUENCE.fits(x) and all(map(kinds.WHOLE.fits, x)), "a list of whole numbers", (list, tuple)
    ),
    orders=kinds.SEQUENCE,
    momenta=kinds.Kind(
        lambda x: kinds.SEQUENCE.fits(x) and len(x) > 0 and all(map(kinds.real("[0, 1)").fits, x)),
        "a list of numbers in [0, 1), at least one",
        (list, tuple),
    ),
    epochs=kinds.POSITIVE,
    spent=kinds.real("[0, inf)"),
    starts=kinds.SEQUENCE,
    held_out=kinds.ANY,
    log_prob=kinds.FUNCTION,
    temperatures=kinds.Kind(
        lambda x: kinds.SEQUENCE.fits(x) and len(x) > 0 and all(map(kinds.real("(0, 1]").fits, x)),
        "a list of numbers in (0, 1], at least one",
        (list, tuple),
    ),
    margin=kinds.real("(0, 1]"),
    rank_by=kinds.one_of("epoch", "second"),
)
@keeps_generators
def suggest_chain(
    make_tx: Callable[..., Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    data: Any,
    *,
    batch_sizes: Sequence[int] | None = None,
    orders: Sequence[Order | Rule] | None = None,
    momenta: Sequence[float] = MOMENTA,
    epochs: float | None = None,
    spent: float = 0.0,
    starts: Sequence[Any] = (),
    held_out: Any = None,
    log_prob: Callable[[Any, Any], Any] | None = None,
    temperatures: Sequence[float] = COLDER,
    tolerance: float = 0.05,
    margin: float = MARGIN,
    rank_by: Literal["epoch", "second"] = "epoch",
    rank: int = 4,
    seed: int = 0,
) -> ChainSuggestion:
    """Suggest learning rate, momentum, batch size and order of the batches for a chain at a temperature.

    Pilot runs go where the chain goes, and it is measured there. Nothing that is passed in changes.

    Args:
        make_tx: ``make_tx(lr, momentum)`` returns the chain, such as ``lambda lr, momentum: bc.sghmc(lr, momentum,
            temperature=1 / N)``; or a class of ``bc.optim`` with its other arguments, ``functools.partial(bc.optim.SGHMC,
            temperature=1 / N)``. With ``held_out`` it takes ``temperature=`` too: ``functools.partial(bc.sghmc, temperature=1 /
            N)``.
        loss: as for :func:`bayesopt_chain.make_step`: the mean over the batch, prior included. Of a module,
            ``loss(module, batch)``.
        params: where to begin: a mode, not the initial values. A tree of tensors, or a module, whose parameters that require
            a gradient are meant; it stays as it is.
        data: all data: a tree of tensors with one entry a datum on axis 0; or ``bc.epochs(...)``, whose batch size and order
            are then looked at beside full batches.
        batch_sizes: to choose from. Default: a 4th, 12th, 40th and 120th of the data. Full batches are always among
            the settings.
        orders: of the batches, to choose from. Default: ``"reshuffled"`` and ``"independent"``.
        momenta: to choose from, between 0 and 1. Default: twelve from 0.5 to 0.999.
        epochs: how many passes over the data the run may take, all chains together. A tenth of them at most goes into
            suggesting, by the count of ``passes``; the fewer they are, the less certain the answer, and pilots that cannot be
            paid with the best batches go with smaller ones. Default: no limit on suggesting.
        spent: how many of these passes training the starts took; with ``epochs`` alone.
        starts: further modes, each like ``params``, from other initial values: each gets a chain of its own, all of one length.
            With ``held_out`` they are trained on all rows, and the run is theirs alone: ``params`` lacks the rows.
        held_out: numbers of rows of the data that ``params`` was trained without, say a fifth of them; of a series, the last.
            With them the temperature is chosen by predictions of these rows. The pilot leaves them out, the run does not.
        log_prob: ``log_prob(params, batch)`` (or of a module) returns the log likelihood of each datum of a batch, ``[B]``,
            without the prior; needed with ``held_out``.
        temperatures: to choose from by the held-out rows, times that of the chain, in (0, 1]. One below 1 is a cold posterior:
            another model than the loss says, to be reported as such.
        tolerance: by how much the batches may widen the variance of any direction, mean over an epoch; 0.05 is 5 %.
        margin: share of the stability limit that the rate may take at most, with minibatches and with full batches; pilots
            that run away halve their own, but for a first one with minibatches, after which full batches are tried.
        rank_by: most effective draws an ``"epoch"`` or a ``"second"`` first; seconds differ from run to run.
        rank: how many directions to look at, of the noise and of the curvature each.
        seed: of the pilots and of the batches.

    Returns:
        :class:`ChainSuggestion`; ``print`` it.

    Raises:
        TypeError: a class whose chain is not known, data that are no tree of tensors; with ``held_out`` a ``make_tx`` that
            takes no temperature.
        ValueError: ``held_out`` without ``log_prob`` or the other way round; rows that do not exist; a start unlike
            ``params``; ``spent`` that leaves nothing; a chain without noise or one that is not linear; a loss that is a sum
            or in which the data of a batch act on each other (BatchNorm in train mode); no positive curvature; chains that
            run away at every rate; ``epochs`` too few for a tenth of them to say anything; data with row numbers; a loss that
            torch cannot differentiate twice.

    Example:
        >>> import functools, torch, bayesopt_chain as bc
        >>> x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
        >>> y = x.sum(1) + torch.randn(400, generator=torch.Generator().manual_seed(1))
        >>> def loss(w, batch):
        ...     return (batch[0] @ w - batch[1]).square().mean() / 2
        >>> make_tx = lambda lr, momentum: bc.sghmc(lr, momentum, temperature=1 / 400)
        >>> found = bc.suggest_chain(make_tx, loss, torch.ones(3), (x, y), batch_sizes=(20, 100), momenta=(0.5, 0.9))
        >>> found.best.order, len(found), found.best.excess < 0.051
        ('reshuffled', 5, True)
        >>> draws = bc.sample(bc.make_step(loss, found.tx), found.params, found.tx.init(found.params), found.batches, steps=500)

        With held-out rows, which the first of two modes was trained without:

        >>> held, modes = torch.arange(320, 400), [torch.ones(3), torch.full((3,), 1.1)]
        >>> make_tx = functools.partial(bc.sghmc, temperature=1 / 400)
        >>> log_prob = lambda w, batch: -(batch[0] @ w - batch[1]).square() / 2
        >>> found = bc.suggest_chain(make_tx, loss, modes[0], (x, y), starts=modes[1:], held_out=held, log_prob=log_prob,
        ...                          epochs=400, momenta=(0.5, 0.9))
        >>> step = bc.make_step(loss, found.tx)
        >>> draws = [bc.sample(step, start, found.tx.init(start), found.batches, steps=found.steps, burn_in=found.burn_in,
        ...                    thinning=found.thinning) for start in found.starts]
        >>> len(draws), len(found.scores), found.passes < 40
        (1, 6, True)
    """
    name = "suggest_chain"
    given = params
    loss, params, draws = of_module(name, loss, params)
    others = tuple(_start(name, i, x, given, params) for i, x in enumerate(starts))
    if (held_out is None) != (log_prob is None):
        lacks = "log_prob" if log_prob is None else "held_out"
        raise ValueError(f"{name}: {lacks} is missing: held_out and log_prob are given together")
    if held_out is not None and min(temperatures) < 1:
        _require_temperature(name, make_tx)
    if epochs is None and spent:
        raise ValueError(f"{name}: spent is a part of epochs, got {spent:g} without epochs; give both or neither")
    if epochs is not None and spent >= (1 - SHARE) * epochs:
        raise ValueError(f"{name}: spent must leave a part of the {epochs:g} epochs to the run, got {spent:g}")
    tree, size, known_batch, known_order = of_data(name, data)
    held, count, whole = None, 0, Rows(tree, size, max(1, min(BASE, size // 2)), seed)
    source = whole
    if held_out is not None:
        tree, held, count = split(name, tree, size, held_out)
        source = Rows(tree, size - count, max(1, min(BASE, (size - count) // 2)), seed)
    sizes = sorted({*(batch_sizes or known_batch or {max(1, size // K) for K in (4, 12, 40, 120)}), size})
    for b in sizes:
        checks.number(f"{name}: batch_sizes", b, f"[1, {size}]", integer=True)
    known = tuple(orders or known_order or ("reshuffled", "independent"))
    require_law(name, known)
    smaller = [b for b in sizes if b < source.size]
    require_mean(name, loss, params, source, sums_only=not smaller)
    made = maker(name, make_tx, 2)
    try:
        family = Family(name, made, tuple(momenta), params, None)
    except ValueError as err:
        if "state=" not in str(err):
            raise
        raise ValueError(
            f"{name}: {err}; {name} has no state= and takes chains that are the same from their first step on: "
            "bc.suggest_lr takes a state"
        ) from err
    search = Search(
        name,
        loss,
        source,
        family,
        [*((b, order) for b in smaller for order in known), (source.size, "full")],
        tolerance,
        margin,
        0.05,
        rank,
        math.inf if epochs is None else SHARE * epochs,
        seed,
        PILOTS if held_out is None else SCORED,
        0.0 if held_out is None else FORWARD * count / size * (1 + len(temperatures)),
    )
    advice = search.run(params)
    if log_prob is None:
        return suggested(search, advice, epochs, rank_by, draws, spent=spent, others=others)
    left = None if epochs is None else (epochs - spent - advice.passes) / max(1, len(others))
    predicts, _, _ = of_module(name, log_prob, given)
    wider = widening(advice.rows[0].draws, left, advice.piloted)
    each = FORWARD * len(temperatures) * count / size  # passes for one draw
    afford = min(0.95 * search.allowance, search.allowance - search.afterwards + each) - advice.passes
    kept = advice.draws if math.isinf(afford) else advice.draws[-max(1, int(afford / each)) :]
    seen = scores(name, predicts, params, kept, held, count, temperatures, wider)
    advice.passes += FORWARD * count / size + each * len(kept)
    factor = chosen(seen).factor
    final = replace(search, source=whole, choices=[*((b, order) for b in smaller for order in known), (size, "full")])
    if factor < 1:
        family = Family(
            name,
            maker(name, partial(make_tx, temperature=factor * search.family.temperature), 2),
            tuple(momenta),
            params,
            None,
        )
        family.base = search.family.base  # what was measured is in this chain's coordinates
        final = replace(final, family=family)
        advice.params = params
    if others:
        advice.params, *others = others
    advice.rows = final.rows(advice.places, advice.margins)
    return suggested(
        final,
        advice,
        epochs,
        rank_by,
        draws,
        [_of_scores(seen, count, factor)],
        spent=spent,
        others=tuple(others),
        seen=seen,
    )


def _require_temperature(name: str, make_tx: Callable[..., Any]) -> None:
    """Refuse a function that takes no ``temperature=``, which a colder chain is made with."""
    try:
        takes = inspect.signature(make_tx).parameters
    except ValueError:  # a callable that tells nothing of its arguments
        return
    if "temperature" not in takes and not any(x.kind is inspect.Parameter.VAR_KEYWORD for x in takes.values()):
        raise TypeError(
            f"{name}: with held_out make_tx must take temperature=, as functools.partial(bc.sghmc, temperature=1 / N) does, "
            f"got one that takes {', '.join(takes) or 'nothing'}; or keep the temperature, temperatures=(1.0,)"
        )


def _start(name: str, i: int, start: Any, given: Any, params: Any) -> Any:
    """A further start as a tree like the first.

    Raises:
        TypeError: it is no tree of tensors, or no module where the first is one.
        ValueError: another structure or other shapes, or values that are not finite.
    """
    if isinstance(given, nn.Module) and isinstance(start, nn.Module):
        start = {key: p.detach().clone() for key, p in start.named_parameters() if p.requires_grad}
    kinds.require(name, **{f"starts[{i}]": (start, kinds.PLACE)})
    shapes = [optree.tree_map(lambda x: tuple(x.shape), tree) for tree in (params, start)]
    if optree.tree_structure(params) != optree.tree_structure(start) or shapes[0] != shapes[1]:
        raise ValueError(f"{name}: starts[{i}] must have the structure and the shapes of params")
    return start


def _of_scores(seen: Sequence[HeldOutScore], count: int, factor: float) -> str:
    """What held-out data say of the temperature."""
    rows = ", ".join(f"{row.factor:g} T {row.difference:+.3f} +- {row.error:.3f}" for row in seen[:-1])
    text = f"Log scores of {count} held-out data, minus the mode's ({seen[-1].score:.3f}): {rows}."
    if factor == 1:
        return text + " The chain keeps its temperature."
    best = next(row for row in seen if row.factor == factor)
    worse = " Even there draws predict worse than the mode." if best.difference < 0 else ""
    return (
        f"{text} The temperature is therefore {factor:g} of the one given: a cold posterior, to be reported as such.{worse} "
        "A prior whose functions have the scale of the targets, or more data, may let the given one predict as well."
    )


def suggested(
    search: Search,
    advice: Advice,
    run: float | None,
    rank_by: str,
    draws: bool,
    alternatives: Sequence[str] = (),
    *,
    spent: float = 0.0,
    others: tuple[Any, ...] = (),
    seen: Sequence[HeldOutScore] = (),
) -> ChainSuggestion:
    """The search's answer, with seconds and sentences."""
    size = search.source.size
    seconds, timing = _seconds(search, advice)
    settings = []
    for row in advice.rows:
        momentum = search.family.momenta[row.momentum]
        margin = advice.margins.of(row.batch == size)
        by = "batch noise" if row.heating <= margin * row.stability else "stability"
        settings.append(
            Setting(
                "full" if row.batch == size else row.order,
                row.batch,
                row.lr,
                momentum,
                row.draws,
                row.heat,
                seconds(row.batch) * size / row.batch,
                row.kappa,
                by,
                row.stability,
                row.heating,
            )
        )
    pairs = sorted(
        zip(settings, advice.rows),
        key=lambda pair: -pair[0].draws_per_epoch / (pair[0].seconds_per_epoch if rank_by == "second" else 1.0),
    )
    row = pairs[0][1]
    passes = advice.passes + timing
    steps = burn_in = thinning = None
    if run is not None:
        chains = 1 + len(others)
        steps = max(5, int((run - spent - passes) * size / row.batch / chains))
        burn_in = steps // 5
        thinning = max(1, (steps - burn_in) * chains // 200)
    notes = [
        *_sentences(
            search, advice, pairs, run, spent, passes, draws or any(p.draws for p in advice.places), len(others)
        ),
        *alternatives,
    ]
    return ChainSuggestion(
        tuple(setting for setting, _ in pairs),
        search.family.make(row.lr, search.family.momenta[row.momentum]),
        search.source.batches(row.batch, row.order),
        steps,
        burn_in,
        thinning,
        advice.params,
        (advice.params, *others),
        search.family.temperature,
        tuple(seen),
        report(search, advice, row),
        passes,
        advice.diverged,
        tuple(notes),
    )


def _seconds(search: Search, advice: Advice) -> tuple[Callable[[int], float], float]:
    """Seconds of a step as a function of the batch size, and the passes over the data that timing took."""
    size, known = search.source.size, dict(advice.seconds)
    row, spent = advice.rows[-1], 0.0
    for batch in search.to_time - known.keys():
        known[batch] = search.timed(row, advice.params, batch)
        spent += TIMED * batch / size
    b = torch.tensor(sorted(known), dtype=torch.float64, device="cpu")
    t = torch.tensor([known[int(x)] for x in b], dtype=torch.float64, device="cpu")
    if len(b) == 1:
        return (lambda batch: float(t[0])), spent
    slope = ((b - b.mean()) * (t - t.mean())).sum() / (b - b.mean()).square().sum()
    slope = float(slope.clamp(min=0.0))
    at_zero = max(float((t - slope * b).mean()), 0.0)
    return (lambda batch: known.get(batch, at_zero + slope * batch)), spent


def _sentences(
    search: Search,
    advice: Advice,
    pairs: list[tuple[Setting, Row]],
    run: float | None,
    spent: float,
    passes: float,
    draws: bool,
    others: int,
) -> list[str]:
    """What limits the best setting, what would buy more, and what was noticed."""
    (best, row), size, T = pairs[0], search.source.size, search.family.temperature
    softest = min(advice.places, key=lambda place: place.soft)
    stiff = max(p.top for p in advice.places[1:]) / advice.places[0].top
    out = []
    if best.limited_by == "stability":
        out.append(
            f"The rate is limited by stability: it is {best.lr / best.stability:.2g} of {best.stability:.3g}, from "
            "which on the stiffest "
            "direction diverges."
        )
    else:
        out.append(
            f"The rate is limited by the noise of the batches: from {best.heating:.3g} on it widens some direction by "
            "more than "
            f"{search.tolerance:.0%}; the chain diverges from {best.stability:.3g} on."
        )
    if run is not None:
        rest = run - spent - passes
        total = rest * best.draws_per_epoch
        shared = f", shared by {others + 1} chains," if others else ""
        out.append(
            f"The run's other {rest:.4g} epochs{shared} make about {total:.2g} effective draws of a direction with the "
            "average curvature."
            + (" That is short: it stays near where it starts." if total < FEW * (1 + others) else "")
        )
    out.append(_of_softest(search, row, softest, None if run is None else run - spent - passes, 1 + others))
    mini = [setting for setting, _ in pairs if setting.order != "full"]
    full = next((setting for setting, _ in pairs if setting.order == "full"), None)
    if full is not None and full is best and mini and full.draws_per_epoch > FAR * mini[0].draws_per_epoch:
        kappa = full.kappa * size / mini[0].batch_size
        out.append(
            f"No minibatch setting samples this temperature as well: at the rate of full batches, batches of "
            f"{mini[0].batch_size} would "
            f"relax the stiffest direction {kappa:.2g} times an epoch (kappa), and within {search.tolerance:.0%} of "
            "heat they make "
            f"{full.draws_per_epoch / mini[0].draws_per_epoch:.2g} times fewer draws. Take full batches; where memory "
            "does not hold them, "
            f"accumulate: bc.make_step(..., microbatches={math.ceil(size / mini[0].batch_size)})."
        )
    elif full is not None and full is not best and full.draws_per_epoch > best.draws_per_epoch:
        out.append(
            f"Full batches would buy {full.draws_per_epoch / best.draws_per_epoch:.2g} times the draws an epoch, by "
            "accumulation too "
            f"(bc.make_step(..., microbatches={math.ceil(size / best.batch_size)}))."
        )
    if best.limited_by == "batch noise":
        looser = replace(search, tolerance=4 * search.tolerance, choices=[(row.batch, row.order)])
        same = looser.rows(advice.places, advice.margins)[0]
        if same.draws > 1.2 * row.draws:
            out.append(
                f"A tolerance of {4 * search.tolerance:.0%} would buy {same.draws / row.draws:.2g} times the draws, "
                "larger batches more."
            )
    if softest.top > 100.0 * softest.soft:
        out.append(
            f"The stiffest direction is {softest.top / softest.soft:.2g} times as stiff as the softest one seen: a "
            "preconditioner would buy most there (bc.scale_by_preconditioner, or a posterior of fit_laplace as its precision)."
        )
    if stiff > 1.5 or stiff < 0.67:
        out.append(f"The largest curvature at the pilots' draws is {stiff:.2g} times that at params.")
    if draws:
        out.append(
            "The loss draws (dropout): its noise is counted, and heats in every order and at full batches; a temperature of "
            "1 / N has no exact meaning with it. Put the module into eval mode to sample its posterior."
        )
    if advice.diverged:
        lowered = [
            f"{share:.2g} with {what}"
            for share, what in ((advice.margins.mini, "minibatches"), (advice.margins.full, "full batches"))
            if share < search.margin
        ]
        then = f", and their rates are at most {' and '.join(lowered)} of the stability limit" if lowered else ""
        out.append(f"Pilots that ran away: {advice.diverged}{then}.")
    fell = advice.places[0].level - min(place.level for place in advice.places[1:])
    # At a mode the loss can only rise, by T / 2 for each direction that the pilots had time to explore.
    if fell > NO_MODE * T * advice.places[0].moving / 2.0:
        out.append(
            f"params is no mode: the loss fell by {fell:.3g} from {advice.places[0].level:.4g} during the pilots, and the "
            "chain will go on training. Train to a mode first. Where training was stopped early because it predicts better so, "
            "the prior is too wide for the data, and draws will forget the stop: narrow it first "
            "(bc.posterior.train_by_evidence finds its precision)."
        )
    gradients = sum(place.gradients for place in advice.places)
    if gradients and any(setting.order != "full" for setting, _ in pairs):
        out.append(
            f"The excess is an estimate from {gradients} gradients of batches at {len(advice.places)} places, no bound; "
            "bc.diagnostics.heating at draws of the run measures it again."
        )
    share = "" if run is None else f", {passes / run:.1%} of the run"
    out.append(f"Suggesting took {passes:.3g} passes over the data{share}; temperature {T:.3g}.")
    return out


def _of_softest(search: Search, row: Row, place: Place, rest: float | None, chains: int) -> str:
    """What the softest direction seen gets, and about how many get too little."""
    soft = torch.tensor([place.soft], dtype=torch.float64, device="cpu")
    each = float(draws_along(search, row, soft))
    text = f"The softest direction seen, of {place.soft / place.top:.2g} of the largest curvature, makes about "
    if rest is None:
        text += f"{each:.2g} effective draws an epoch: {FEW:g} of them take {FEW / max(each, 1e-300):.2g} epochs."
    else:
        few = FEW * chains
        text += f"{each * rest:.2g} effective draws in the run."
        grid = place.top * torch.logspace(-9, 0, 400, dtype=torch.float64, device="cpu")
        enough = draws_along(search, row, grid) * rest >= few
        least = float(grid[int(enough.double().argmax())]) if bool(enough.any()) else math.inf
        share = place.softer(least)
        if share > 0:
            below = "All directions" if math.isinf(least) else f"Directions softer than {least / place.top:.2g} of it"
            about = f", about {share:.0%} of all," if share < 0.995 and not math.isinf(least) else ""
            text += f" {below}{about} make fewer than {few:g}, too few to show their variance."
    if place.softer(FLAT * place.top) > 0:
        text += f" Less than {FLAT:g} of it was seen too: directions that are softer still, flat, or curve downwards."
    return text


def require_law(name: str, orders: Sequence[Any]) -> None:
    """Refuse orders that are unknown.

    Raises:
        ValueError: naming the order.
    """
    for order in orders:
        if not callable(order) and order not in get_args(Order):
            raise ValueError(f"{name}: orders must be among {', '.join(get_args(Order))}, got {order!r}")


def maker(name: str, make_tx: Callable[..., Any], count: int) -> Callable[[float, Any], Any]:
    """``make(lr, momentum)`` that returns a chain, from a function or from a class of ``bc.optim``; ``momentum`` may
    be ``None``.

    Args:
        name: who asks, in messages.
        make_tx: the function or the class.
        count: how many of ``lr`` and ``momentum`` a function is given.

    Raises:
        TypeError: a function that cannot be called so, or an optimizer whose chain is not known.
    """
    of_class = make_tx.func if isinstance(make_tx, partial) else make_tx
    is_class = inspect.isclass(of_class) and issubclass(of_class, torch.optim.Optimizer)
    names = ("lr", "momentum")[:count]
    arguments, keywords = (([],), dict.fromkeys(names, 0.0)) if is_class else (names, {})
    try:
        inspect.signature(make_tx).bind(*arguments, **keywords)
    except ValueError:  # a callable that tells nothing of its arguments
        pass
    except TypeError as err:
        form = (
            f"{of_class.__name__}(params, {', '.join(f'{x}=' for x in names)})" if is_class else f"({', '.join(names)})"
        )
        hint = "; bc.suggest_lr chooses the rate alone" if count == 2 else ""
        raise TypeError(f"{name}: make_tx cannot be called as {form}: {err}; pass one that takes them{hint}") from None

    def make(lr: float, momentum: Any) -> Any:
        rest = () if momentum is None else (momentum,)
        if is_class:
            names = {"lr": lr} if momentum is None else {"lr": lr, "momentum": momentum}
            return as_chain(make_tx([torch.zeros(1, requires_grad=True, device="cpu")], **names))
        made = make_tx(lr, *rest)
        return as_chain(made) if isinstance(made, torch.optim.Optimizer) else made

    return make


def as_chain(optimizer: torch.optim.Optimizer) -> Any:
    """The chain of the same hyperparameters as an optimizer of the family of ``bc.optim.SGD``."""
    groups = optimizer.param_groups
    known = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "temperature")
    if len(groups) != 1 or not all(key in groups[0] for key in known):
        raise TypeError(
            f"the chain of {type(optimizer).__name__} with {len(groups)} groups is not known; give bc.optim.SGD, SGHMC or SGLD "
            "with one group, or a function that returns a chain (bc.sghmc, bc.partition)"
        )
    if groups[0].get("maximize"):
        raise ValueError(
            f"the chain of {type(optimizer).__name__} with maximize=True climbs its loss; negate the loss and leave maximize "
            "out"
        )
    return sgd(**{key: groups[0][key] for key in known})


def of_module(name: str, loss: Callable[[Any, Any], Any], params: Any) -> tuple[Callable[[Any, Any], Any], Any, bool]:
    """Loss and parameters as functions of trees, and whether a layer draws.

    Raises:
        ValueError: a module with BatchNorm in train mode.
    """
    if not isinstance(params, nn.Module):
        return loss, params, False
    norms = [key for key, x in params.named_modules() if isinstance(x, nn.modules.batchnorm._BatchNorm) and x.training]
    if norms:
        raise ValueError(
            f"{name}: {', '.join(norms[:3])} is a BatchNorm in train mode, in which the data of a batch act on each "
            "other: there is "
            "no noise of one datum to tell other batch sizes by; put these layers into eval mode, in the run too"
        )

    class Bound(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Any) -> Any:
            return loss(self.module, batch)

    bound = Bound(params)
    tree = {key: p.detach().clone() for key, p in params.named_parameters() if p.requires_grad}

    def functional(chosen: Any, batch: Any) -> Any:
        buffers = {f"module.{key}": b.detach().clone() for key, b in params.named_buffers()}
        values = {f"module.{key}": p for key, p in chosen.items()}
        return torch.func.functional_call(bound, {**buffers, **values}, (batch,))

    return functional, tree, False


def of_data(name: str, data: Any) -> tuple[Any, int, set[int] | None, tuple[Any, ...] | None]:
    """The tree of all data, their number, and the batch size and order that are known.

    Raises:
        TypeError: no tree of tensors.
        ValueError: batches of several chains or ranks, or that leave data out.
    """
    if not isinstance(data, Epochs):
        try:
            whole = epochs(data, 1)
        except (TypeError, ValueError) as err:
            raise type(err)(f"{name}: {str(err).removeprefix('epochs: ')}") from err
        if whole.leaves is None:
            hint = ""
            if isinstance(data, torch.utils.data.DataLoader | torch.utils.data.Dataset):
                hint = "; of a TensorDataset pass dataset.tensors, of another one tensors of all its data"
            raise TypeError(f"{name}: data must be a tree of tensors with one entry a datum, or bc.epochs of one{hint}")
        return data, whole.size, None, None
    if data.leaves is None or data.chains is not None or data.ranks > 1 or data.left_out:
        raise ValueError(
            f"{name}: data must be bc.epochs of a tree of tensors, for one chain and one rank, that leaves nothing "
            f"out, got {data!r}"
        )
    if data.with_rows:
        raise ValueError(
            f"{name}: data must be bc.epochs without with_rows=True, since trials take batches of other sizes and orders, got "
            f"{data!r}; make the row numbers a part of the data, bc.epochs((data, torch.arange({data.size})), ...)"
        )
    order = (data.order,) if data.batch_size < data.size else None
    return data.data, data.size, {data.batch_size}, order
