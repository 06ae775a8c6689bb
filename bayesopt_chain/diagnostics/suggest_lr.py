r"""``suggest_lr``: learning rate of a chain at a temperature, and momentum and batch size where they are left open.

The rate is the smaller of two limits, both from the chain's own linear response (:mod:`._response`) and the equations of
:mod:`.heating`:

    stability    a direction of curvature ``k`` under momentum ``mu`` follows  x'' = (1 + mu - lr k) x' - mu x,  which is
                 stable for  lr k < 2 (1 + mu)  (``2 (1 + mu) / (1 + 2 mu)`` for Nesterov); of any linear chain it is the rate
                 at which the closed loop of chain and curvature has spectral radius 1. A chain far below takes a share
                 ``MARGIN`` of it.
    heat         what the noise of the batches adds to the variance of the worst direction, on average over an epoch

To first order in ``eta = lr / (1 - mu)`` batches whose gradient has the covariance ``C`` make the diffusion  dt (2 T + eta C)
in a time of ``eta`` a step. That changes the mean of ``f`` by  E[eta C : Hess phi] / 2,  where phi solves  T lap phi - grad U .
grad phi = E f - f. Of the virial  f = theta . grad U  it is  phi = |theta|^2 / 2,  whatever ``U``: so the virial grows by  eta
tr(C) / 2,  and a loss of degree ``p`` by ``1 / p`` of that:

    E[U] / T  grows by  lr tr(C) / (4 T (1 - mu))   for a quadratic, half as much for a quartic,

a direction of a quadratic by  lr C_i / (2 T (1 - mu))  (Mandt, Hoffman and Blei, 2017).

Curvature and noise are measured at ``params`` and at the end of a short trial run: in networks the curvature at draws is some
times larger than at the mode, and the gradients of all batches may vanish at a mode that fits all data, and nowhere else.
Where a part of the data is measured, it is another one there. Its largest curvature ``k = u^T H u`` contains the chance of that
part; others have ``u^T H' u``, which shows it, and lowers the limit where it is larger.

Where momentum or batch size are open, each pair of a short table gets its own rate, and the pair with the most effective draws
an epoch wins,

    K / max(tau(tr H / P), tau(k_max)),     tau(k) = 1 + 2 sum_t rho_t(k)^2,

the integrated autocorrelation time of ``theta^2`` along a direction of curvature ``k``: with ``S`` the stationary covariance of
the loop ``x' = M x + F xi`` and ``v = S e_0 / S_00`` it is ``rho_t = (M^t v)_0``, and ``tau = 2 X_00 - 1`` for
``X = M X M^T + v v^T``.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import optree
import torch
from torch.utils.data import SequentialSampler

from bayesopt_chain import checks
from bayesopt_chain.data.epochs import Epochs, epochs
from bayesopt_chain.diagnostics._response import read, require_unclipped
from bayesopt_chain.diagnostics.findings import Finding, Row, judged
from bayesopt_chain.diagnostics.gradient_noise import (
    gradient_noise,
    hessian_product,
    initialised_devices,
    loss_at,
    require_mean,
    rows_of,
    size_of,
    trace,
)
from bayesopt_chain.diagnostics.heating import Heating, Reduced, loop, predict, reduce, rescaled
from bayesopt_chain.loop.loss import gradient
from bayesopt_chain.loop.step import make_step
from bayesopt_chain.testing._linear_system import solve_lyapunov, state_of
from bayesopt_chain.trees import copied, unflatten

MARGIN = 0.1  # share of the stability limit
MOMENTA = (0.5, 0.9, 0.97, 0.99, 0.997)  # tried where the momentum is open
PARTS = (1, 10, 40)  # batches an epoch, tried where the batch size is open
SHARE = 0.1  # of the passes of a run that suggesting may cost
RANK, PROBES = 4, 4  # directions of noise and of curvature each; random vectors for the trace
PRODUCTS = 2 * RANK + 3 * RANK + PROBES  # with the Hessian, at one point
FEWEST, MOST, BASE = 4, 40, 64  # batches that are measured at one point, and data in each at most
KNOWN = 1.5  # factor within which curvatures of other data must agree with those measured
STEPS = (4, 200)  # of the trial run
FIRST = 1e-3  # the rate at which the chain is read; curvature and noise are in its coordinates
HALVINGS = 12  # of the margin, after trial runs that diverge
FAR = 3.0  # times more draws with full batches that are worth a sentence


@dataclass(frozen=True)
class Suggestion:
    """What :func:`suggest_lr` suggests; ``print`` it.

    Attributes:
        lr: learning rate.
        momentum: of the table, or ``None`` where ``make_tx`` takes none.
        batch_size: number of data in a batch.
        tx: the chain at these.
        batches: of that size, for :func:`bayesopt_chain.sample`.
        stability: the rate from which on the chain diverges, by the data that were measured and, where these are not all, by
            others.
        heating: the largest rate within the tolerance; infinite where every stable one is.
        draws_per_epoch: effective draws that a pass over the data makes, in the slower of two directions: of the mean
            curvature, and of the largest.
        report: what :func:`bayesopt_chain.diagnostics.heating` says of the suggestion where it is hotter, at ``params`` or at
            the end of the trial run.
        notes: what limits the rate and what would buy more, a sentence each.
    """

    lr: float
    momentum: float | None
    batch_size: int
    tx: Any
    batches: Any
    stability: float
    heating: float
    draws_per_epoch: float
    report: Heating
    notes: tuple[str, ...]

    def __str__(self) -> str:
        momentum = "" if self.momentum is None else f", momentum {self.momentum:g}"
        head = f"lr {self.lr:.3g}{momentum}, batches of {self.batch_size}: {self.draws_per_epoch:.2g} effective draws an epoch"
        return "\n".join([f"{head}, {self.report.worst:.1%} of heat.", *self.notes])


class Source(NamedTuple):
    """Where batches come from.

    Attributes:
        size: number of data.
        measured: from about so many data, at the first point or the second, the number of data in a batch, batches, the same
            data in at most four larger ones for products with the Hessian, and as many other data in such ones.
        sizes: batch sizes to choose from.
        order: of the batches.
        batches: of a size, for :func:`bayesopt_chain.sample`.
    """

    size: float
    measured: Callable[[float, int], tuple[int, list[Any], list[Any], list[Any]]]
    sizes: tuple[int, ...]
    order: Any
    batches: Callable[[int], Any]


class LocalModel(NamedTuple):
    """Curvature of the loss and noise of one datum's gradient at a point, in the coordinates of the chain at ``FIRST``.

    Attributes:
        system: both, in the span that is looked at.
        mean: the mean curvature, ``tr(H) / P``.
        top: the largest curvature.
        again: the curvature of other data in its direction over ``top``, and its standard error; 1 and 0 of all data.
        level: mean loss over the batches measured first, and its standard error.
        moving: number of parameters that move.
    """

    system: Reduced
    mean: float
    top: float
    again: tuple[float, float]
    level: tuple[float, float]
    moving: int


class Candidate(NamedTuple):
    """A pair of momentum and batch size, its rate, and the effective draws an epoch."""

    draws: float
    lr: float
    momentum: float | None
    batch_size: int
    stability: float


@checks.takes(
    params=checks.PLACE,
    data=checks.ANY,
    epochs=checks.POSITIVE,
)
def suggest_lr(
    make_tx: Callable[..., Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    data: Any,
    *,
    tolerance: float = 0.05,
    epochs: float | None = None,
    state: Any = None,
    seed: int = 0,
) -> Suggestion:
    """Suggest learning rate, momentum and batch size for a chain at a temperature.

    Args:
        make_tx: ``make_tx(lr)`` returns the chain, such as ``lambda lr: bc.sghmc(lr, 0.9, temperature=1 / N)``; or
            ``make_tx(lr, momentum)``, such as ``functools.partial(bc.sghmc, temperature=1 / N)``, which leaves the momentum
            open.
        loss: as for :func:`bayesopt_chain.make_step`: the mean over the batch, prior included.
        params: a mode, near which the chain will sample, not the initial values: a tree of tensors. Of a module see
            :func:`bayesopt_chain.make_functional`.
        data: ``bc.epochs(...)``, whose batch size and order are taken; all data as a tree of tensors with one entry a datum,
            which leaves the batch size open; or batches of one size that share no datum and can be gone through again, such as
            a list, which is a fixed order, or a DataLoader.
        tolerance: by how much the batches may widen the variance of any direction, mean over an epoch; 0.05 is 5 %.
        epochs: passes over the data that the run may take, a tenth of which or so pays for suggesting, and for at least 40
            data or 4 batches; the fewer are measured, the less certain the answer. Default: what a good answer needs.
        state: of the chain, where a preconditioner learns; start the run from it too.
        seed: of the trial run and of the batches.

    Returns:
        :class:`~bayesopt_chain.diagnostics.Suggestion`.

    Warns:
        UserWarning: other data have another curvature, by half or more, in the direction that is stiffest for those that were
            measured, so that the stability limit is uncertain. The limit is at most that of either.

    Raises:
        TypeError: a ``make_tx`` that takes something else; data that can be gone through once, such as a generator.
        ValueError: a chain without noise, one that is not linear, that clips gradients, or whose steps are not proportional
            to ``lr``; a loss that is a sum over the batch, or in which the data of a batch act on each other (BatchNorm in
            train mode); loss, gradient or curvature that is NaN or infinite on some of the data that were looked at; no
            positive curvature; sparse gradients; trial runs that diverge at every rate.
        RuntimeError: an operation of the loss without second derivative.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> data = torch.linspace(-3**0.5, 3**0.5, 1000)
        >>> found = bc.suggest_lr(lambda lr: bc.sghmc(lr, temperature=1 / 1000), loss, torch.tensor(0.0), bc.epochs(data, 20))
        >>> round(found.stability, 2), bool(0.0005 < found.lr < 0.003)                    # 2 (1 + 0.9) / curvature
        (3.8, True)

        With momentum and batch size left open:

        >>> from functools import partial
        >>> found = bc.suggest_lr(partial(bc.sghmc, temperature=1 / 1000), loss, torch.tensor(0.0), data)
        >>> found.batch_size, found.momentum
        (25, 0.9)
    """
    with torch.random.fork_rng(devices=initialised_devices()):
        momenta, source = _momenta(make_tx), _source(data, seed)
        _require_mean(loss, params, source)
        torch.manual_seed(seed)
        return _Adviser(make_tx, loss, params, source, momenta, tolerance, state, epochs).run()


class _Adviser:
    """Measure, try, measure where the trial came to, and answer."""

    def __init__(
        self,
        make_tx: Callable[..., Any],
        loss: Callable[[Any, Any], Any],
        params: Any,
        source: Source,
        momenta: tuple[float | None, ...],
        tolerance: float,
        state: Any,
        epochs: float | None,
    ) -> None:
        self.loss, self.params, self.source, self.tolerance, self.state = loss, params, source, tolerance, state
        self.make = lambda lr, momentum: make_tx(lr) if momentum is None else make_tx(lr, momentum)
        self.readings = {m: read(self.make(FIRST, m), params, state) for m in momenta}
        self.response = self.readings[momenta[0]]
        if not all(group.temperature > 0 for group in self.response.groups):
            raise ValueError(
                "suggest_lr: the chain draws no noise, at least in some group, to compare that of the batches with; give it a "
                "temperature above 0"
            )
        self.temperature = max(group.temperature for group in self.response.groups)
        doubled = read(self.make(2 * FIRST, momenta[0]), params, state)
        own, other = (
            [x for group in r.groups for x in (group.A, group.B[:, 0], group.D[0])] for r in (self.response, doubled)
        )
        if not (
            all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(own, other))
            and all(torch.allclose(y, 2 * x, rtol=1e-4, atol=0.0) for x, y in zip(self.response.gains, doubled.gains))
        ):
            raise ValueError(
                "suggest_lr: twice the lr does not move the parameters twice as far, or changes the momentum too, as twice the "
                "step size of baoab or obabo does; use the lr that make_tx is given in every group, and hold momentum still: "
                "bc.sghmc(lr, momentum, ...), or baoab(lr**0.5, friction=c / lr**0.5, ...)"
            )
        self.allowed = math.inf if epochs is None else SHARE * epochs
        self.compared = list[Any]()

    def run(self) -> Suggestion:
        """The answer."""
        models, margin, diverged = [self._measure(self.params, 0.15 * self.allowed, 0)], MARGIN, 0
        while (end := self._ends(max(self._candidates(models, margin)), models[0])) is None:
            diverged, margin = diverged + 1, margin / 2
            if diverged == HALVINGS:
                raise ValueError(
                    "suggest_lr: trial runs from params diverge at every learning rate; go to a mode first, and look at "
                    "the loss and for NaN in the data"
                )
        models.append(self._measure(end, 0.6 * self.allowed, 1))
        best = max(self._candidates(models, margin))
        tx = self.make(best.lr, best.momentum)
        some = islice(self.source.batches(best.batch_size), FEWEST)
        require_unclipped(tx, (gradient(self.loss, place, batch)[0] for batch in some for place in (self.params, end)))
        heating = self._largest(models, best.momentum, best.batch_size, 0.999 * best.stability)
        notes = [*self._notes(best, models, margin)]
        for note in notes:
            if note.kind == "unsure":
                checks.warn(f"suggest_lr: {note.says}")
        return Suggestion(
            best.lr,
            best.momentum,
            best.batch_size,
            tx,
            self.source.batches(best.batch_size),
            best.stability,
            heating if heating < 0.99 * best.stability else math.inf,
            best.draws,
            max(self._reports(models, best.momentum, best.batch_size, best.lr), key=lambda report: report.worst),
            tuple([note.says for note in notes]),
        )

    def _measure(self, params: Any, passes: float, number: int) -> LocalModel:
        loss, response = self.loss, self.response
        # a point costs as many passes as the share of the data that is measured times 1 + 2 PRODUCTS
        base, measured, joined, other = self.source.measured(passes / (1 + 2 * PRODUCTS) * self.source.size, number)
        product = hessian_product(loss, params, joined, max_batches=MOST)
        try:
            noise = gradient_noise(loss, params, measured, rank=RANK, max_batches=MOST)
            system = reduce(response, noise, product, self.source.size / base, max_products=3 * RANK)
            roots = [gain.to(leaf).sqrt() for gain, leaf in zip(response.gains, optree.tree_leaves(params))]
            curved = trace(product, params, roots, PROBES)
            again = _again(system, [hessian_product(loss, params, [batch]) for batch in other])
        except NotImplementedError as err:
            raise ValueError(
                "suggest_lr: loss must have dense gradients and products with its Hessian, which torch lacks for a part of it: "
                f"{str(err).strip().splitlines()[0]:.160}; of nn.Embedding take sparse=False, and for nn.EmbeddingBag the mean "
                "of an nn.Embedding"
            ) from err
        self.compared = self.compared or measured
        levels = torch.stack([loss_at(loss, params, batch) for batch in self.compared]).double()
        level = (float(levels.mean()), float(levels.std(correction=0)) / math.sqrt(len(levels)))
        _require_finite(level[0], "the mean loss of the batches that were measured")
        _require_finite(again[0], "the curvature of other data than those measured")
        prior = min(group.prior for group in response.groups)
        top = float(torch.linalg.eigvalsh(system.H)[-1]) if len(system.H) else 0.0
        if not top + prior > 0:
            raise ValueError("suggest_lr: the loss has no positive curvature at params; go to a mode first")
        moving = int((system.roots > 0).sum())
        mean = max(curved / moving, 1e-5 * top)
        return LocalModel(replace(system, C=system.C * base, D=system.D * base), mean, top, again, level, moving)

    def _at(self, model: LocalModel, momentum: float | None, size: float, lr: float) -> Reduced:
        """Curvature and noise of batches of a size, in the coordinates of the chain at this rate."""
        system = replace(model.system, C=model.system.C / size, D=model.system.D / size)
        return rescaled(system, self.readings[momentum], lr / FIRST)

    def _reports(
        self, models: Sequence[LocalModel], momentum: float | None, size: float, lr: float
    ) -> Iterator[Heating]:
        """What :func:`bayesopt_chain.diagnostics.heating` says of this rate at each point."""
        steps = self.source.size / size
        order = self.source.order if steps > 1 else "independent"
        return (predict(self._at(model, momentum, size, lr), order, steps)[0] for model in models)

    def _largest(self, models: Sequence[LocalModel], momentum: float | None, size: float, most: float) -> float:
        """The largest rate up to a limit that no point is too hot at."""

        def allowed(lr: float) -> bool:
            try:
                return all(report.worst <= self.tolerance for report in self._reports(models, momentum, size, lr))
            except ValueError:  # the chain diverges
                return False

        return largest(allowed, most)

    def _candidates(self, models: Sequence[LocalModel], margin: float) -> Iterator[Candidate]:
        """Each pair of momentum and batch size at the largest rate that both limits allow."""
        for mu in self.readings:
            stability = largest(
                lambda lr, mu=mu: all(
                    loop(self._at(model, mu, 1, lr * max(1.0, model.again[0]))).radius < 1 + 1e-6 for model in models
                ),
                1e12,
            )
            for size in self.source.sizes:
                lr = self._largest(models, mu, size, margin * stability)
                yield Candidate(self._draws(models[-1], mu, size, lr), lr, mu, size, stability)

    def _draws(self, model: LocalModel, momentum: float | None, size: float, lr: float) -> float:
        """Effective draws an epoch in the slower of the mean and the largest curvature."""
        group = max(self.response.groups, key=lambda g: len(g.leaves))
        times = []
        for curvature in (model.mean, model.top):
            H, alone = torch.tensor([[curvature]], dtype=torch.float64, device="cpu"), torch.ones(1, 1, device="cpu")
            system = replace(model.system, groups=(group,), bases=(alone,), H=H, C=0 * H, D=0 * H)
            closed = loop(self._at(model._replace(system=system), momentum, size, lr))
            S = solve_lyapunov(closed.M, closed.F @ closed.F.T)
            v = S[:, 0] / S[0, 0]
            times.append(2 * float(solve_lyapunov(closed.M, torch.outer(v, v))[0, 0]) - 1)
        return self.source.size / size / max(times)

    def _ends(self, candidate: Candidate, mode: LocalModel) -> Any:
        """Where a trial run from ``params`` comes to; ``None`` where it diverges."""
        steps_per_epoch = self.source.size / candidate.batch_size
        steps = int(max(STEPS[0], min(STEPS[1], 0.25 * self.allowed * steps_per_epoch, max(20, 40 * steps_per_epoch))))
        tx, params, losses = self.make(candidate.lr, candidate.momentum), self.params, []
        step = make_step(self.loss, tx)
        state = state_of(tx, params) if self.state is None else copied(self.state)
        for batch in islice(chain.from_iterable(repeat(self.source.batches(candidate.batch_size))), steps):
            params, state, info = step(params, state, batch)
            losses.append(info.loss)
            if not math.isfinite(info.loss):  # of the chain, or of the batch, which no smaller rate mends
                there = float(loss_at(self.loss, self.params, batch))
                _require_finite(there, f"at params the loss of batch {len(losses)} of the trial run")
                break
        level, error = mode.level
        # a Gaussian of P directions lies T P / 2 above its mode
        highest = level + 2 * self.temperature * mode.moving + 0.1 * abs(level) + 4 * error
        last = float(torch.stack(losses[-max(1, steps // 4) :]).double().mean())
        finite = all(bool(x.isfinite().all()) for x in optree.tree_leaves(params))
        return params if finite and last <= highest else None

    def _notes(self, best: Candidate, models: Sequence[LocalModel], margin: float) -> Iterator[Finding]:
        """What limits the rate, what would buy more, and what was noticed."""
        size, (again, error) = int(self.source.size), max(models, key=lambda model: model.top).again
        full = self._draws(models[-1], best.momentum, size, margin * best.stability)
        m = SimpleNamespace(
            tolerance=self.tolerance, stability=best.stability, slow=margin * best.stability, lr=best.lr,
            has_more=best.batch_size < size and full > FAR * best.draws,
            more=full / best.draws, parts=math.ceil(size / best.batch_size),
            draws=any(bool(model.system.D.any()) for model in models),
            unsure=not (again - error > 1 / KNOWN and again + error < KNOWN), again=again, error=error,
            more_data="" if math.isinf(self.allowed) else " A larger epochs= pays for measuring more of them.",
            fell=models[0].level[0] - models[1].level[0], noise=self.temperature * models[0].moving,
            # one with the chain's own weight decay is none of the loss alone
            is_whole=all(group.prior == 0 for group in self.response.groups),
        )  # fmt: skip
        return judged(NOTES, m, set())


NOTES = (
    Row("limit", lambda m: m.lr > 0.99 * m.slow,
        "The rate is limited by stability: from {stability:.3g} on the stiffest direction diverges."),
    Row("limit", lambda m: True,
        "The rate is limited by the noise of the batches: above it some direction widens by more than {tolerance:.0%}; from "
        "{stability:.3g} on the chain diverges."),
    Row("unsure", lambda m: m.unsure,
        "The stability limit is uncertain: in the direction that is stiffest for the data measured, others have {again:.2g} +- "
        "{error:.1g} times its curvature.{more_data}"),
    Row("full", lambda m: m.has_more,
        "Full batches would make {more:.2g} times the effective draws an epoch, at lr {slow:.2g}; where memory does not hold "
        "them, accumulate: bc.make_step(..., microbatches={parts})."),
    Row("dropout", lambda m: m.draws,
        "The loss draws (dropout): its noise is counted, and heats at full batches too; put the module into eval mode to "
        "sample its posterior."),
    # at a mode the loss can only rise, by T / 2 for each direction that the trial explored
    Row("start", lambda m: m.is_whole and m.fell > 0.05 * m.noise,
        "params is no mode: the loss fell by {fell:.3g} in the trial run. Train to a mode first."),
)  # fmt: skip


def _require_finite(found: float, what: str) -> None:
    """Refuse a loss or a curvature that data with NaN have made NaN.

    Raises:
        ValueError: it is NaN or infinite.
    """
    if not math.isfinite(found):
        raise ValueError(
            f"suggest_lr: {what} is {found}; look for rows of the data with NaN or infinity, drop them or fill them in"
        )


def _again(system: Reduced, products: Sequence[Callable[[Any], Any]]) -> tuple[float, float]:
    """The mean of some curvatures in the direction in which that of the system is largest, over it, and its standard error.

    The largest eigenvalue of few data contains their chance: its mean is larger than that of all data, and other data have a
    smaller one in its direction.
    """
    if len(products) < 2 or not len(system.H):
        return 1.0, 0.0
    values, vectors = torch.linalg.eigh(system.H)
    u = unflatten(system.roots * (vectors[:, -1].to(system.roots) @ torch.cat(system.bases)), system.like)
    pairs = [zip(optree.tree_leaves(u), optree.tree_leaves(product(u))) for product in products]
    each = torch.tensor([sum(float((x * y).sum()) for x, y in pair) for pair in pairs], device="cpu") / float(
        values[-1]
    )
    return float(each.mean()), float(each.std()) / math.sqrt(len(each))


def _momenta(make_tx: Callable[..., Any]) -> tuple[float | None, ...]:
    """The momenta to choose from; ``None`` where ``make_tx`` takes the rate alone."""
    try:
        signature = inspect.signature(make_tx)
        taken = signature.parameters.get("momentum")
        is_open = taken is not None and taken.kind is not inspect.Parameter.KEYWORD_ONLY
        signature.bind(*(0.0, 0.0) if is_open else (0.0,))
    except (TypeError, ValueError) as err:
        raise TypeError(
            f"suggest_lr: make_tx must be a function of lr, or of lr and momentum, that returns a chain ({err}), such as "
            "functools.partial(bc.sghmc, temperature=1 / N)"
        ) from None
    return MOMENTA if is_open else (None,)


def _source(data: Any, seed: int) -> Source:
    """Where batches come from."""
    if isinstance(data, Epochs):
        if data.leaves is None or data.chains is not None or data.ranks > 1 or data.left_out or data.with_rows:
            raise ValueError(
                "suggest_lr: data must be bc.epochs of a tree of tensors, for one chain and one rank, that leaves nothing out "
                f"and has no row numbers, got {data!r}"
            )
        return _of_rows(data.data, data.size, (data.batch_size,), data.order, seed)
    if torch.is_tensor(data) or isinstance(data, tuple | dict) or not isinstance(data, Iterable):
        whole = epochs(data, 1)
        if whole.leaves is None:
            raise TypeError(
                "suggest_lr: data must be a tree of tensors with one entry a datum, bc.epochs of one, or batches; of a "
                "TensorDataset pass dataset.tensors"
            )
        sizes = tuple(dict.fromkeys(max(1, whole.size // part) for part in PARTS))
        return _of_rows(data, whole.size, sizes, "reshuffled", seed)
    if isinstance(data, Iterator) or not hasattr(data, "__len__"):
        raise TypeError(
            "suggest_lr: data must have a length and be something that can be gone through again, got "
            f"{type(data).__name__}; pass a list, a DataLoader or bc.epochs(...)"
        )
    count = len(data)  # pyright: ignore[reportArgumentType]
    if not count:
        raise ValueError("suggest_lr: data is empty; pass at least one batch")
    base = size_of(next(iter(data))) or 1
    is_fixed = isinstance(data, Sequence) or isinstance(getattr(data, "sampler", None), SequentialSampler)

    def measured(most: float, number: int) -> tuple[int, list[Any], list[Any], list[Any]]:
        m = int(min(MOST, max(FEWEST, most / base)))
        # the first of a list may be unlike the rest, and a sequence may make its batches when they are asked for
        mixed = random.Random(seed + number).sample(range(count), count)
        both = list(islice(map(data.__getitem__, mixed) if isinstance(data, Sequence) else data, 2 * m))
        made, other = both[:m], both[m:]
        return base, (made if len(made) > 1 else 2 * made), made, other

    return Source(base * count, measured, (base,), "fixed" if is_fixed else "reshuffled", lambda size: data)


def _of_rows(tree: Any, size: int, sizes: tuple[int, ...], order: Any, seed: int) -> Source:
    """Batches of a tree of tensors; those that are measured are small, so that few data make many of them."""

    def measured(most: float, number: int) -> tuple[int, list[Any], list[Any], list[Any]]:
        most = max(most, MOST)
        base = max(1, min(BASE, int(min(most, size) / MOST), *sizes))
        small = epochs(tree, base, seed=seed + number)
        m = int(min(MOST, len(small), max(FEWEST, most / base)))
        made = [small.batch(0, k) for k in range(min(2 * m, len(small)))]
        each = m // 4 if m % 4 == 0 else m
        larger = epochs(tree, base * each, seed=seed + number)  # of the same data, in the same order
        joined = [larger.batch(0, k) for k in range(len(made) // each)]
        return base, (made[:m] if m > 1 else 2 * made), joined[: m // each], joined[m // each :]

    def batches(b: int) -> Any:
        return [tree] if b == size else epochs(tree, b, order=order, seed=seed)

    return Source(size, measured, sizes, order if isinstance(order, str) else "reshuffled", batches)


def _require_mean(loss: Callable[[Any, Any], Any], params: Any, source: Source) -> None:
    """Refuse a loss whose value on a batch is not the mean of its values on two halves of it.

    Raises:
        ValueError: it is a sum, or the data of a batch act on each other.
    """
    batch = next(iter(source.batches(max(source.sizes))))
    half = min(8, (size_of(batch) or 0) // 2)
    if not half:
        return
    parts = [rows_of(batch, at) for at in (slice(2 * half), slice(half), slice(half, 2 * half))]
    whole, *halves = (float(loss_at(loss, params, part)) for part in parts)
    _, error = require_mean("suggest_lr", loss, params, parts[0])
    draws = error > 0 or not math.isfinite(whole)
    is_mean = abs(whole - sum(halves) / 2) <= 1e-3 * max(map(abs, (whole, *halves)))
    if not draws and not is_mean and source.sizes != (int(source.size),):
        raise ValueError(
            f"suggest_lr: the loss of a batch ({whole:.6g}) is not the mean of those of its halves ({halves[0]:.6g}, "
            f"{halves[1]:.6g}), so that the noise of other batch sizes cannot be told: in train mode BatchNorm mixes the data "
            "of a batch (put such layers into eval mode), class weights divide by their own sum and ignore_index by the labels "
            "that are left (divide by the number of data instead)"
        )


def largest(allowed: Callable[[float], bool], most: float) -> float:
    """The largest learning rate that is allowed, ``most`` at most, to a hundredth; all that are smaller are allowed.

    Raises:
        ValueError: there is none.
    """
    low = high = most
    while not allowed(low):
        low, high = low / 4, low
        if low < 1e-30:
            raise ValueError(
                "no learning rate is small enough for stability and tolerance; look at the noise of the gradients first, and "
                "for NaN in loss and batches"
            )
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
