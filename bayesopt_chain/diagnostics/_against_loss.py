r"""What draws tell beside their loss and data: the scale of the temperature, its value, the prior, the energy.

**Scale.** A mean over the data takes ``T = 1/N`` for the posterior, a sum ``T = 1``. Which of them a loss is shows exactly:
``loss(a batch twice) = loss(the batch)`` for a mean, twice that for a sum.

**Temperature.** For every fixed direction ``u`` and every constant ``c``, integration by parts gives

    E[(u . (theta - c)) (u . grad U(theta))] = T |u|^2        (virial theorem; no Gaussian is assumed),

``T`` the temperature that the draws have. It is read along all parameters together, leaf by leaf, and along the stiffest
directions of the Hessian at a draw: those forget first, so that it answers before weights mix, and they are where minibatches
heat most. ``c`` is the mean of the other half of the draws.

**Energy.** On a quadratic loss ``U - U(mode)`` is ``T P / 2`` on average. Networks whose draws are right read 1.1 to 1.4 of
that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics._agreement import effective, mean_and_error
from bayesopt_chain.diagnostics._findings import Finding
from bayesopt_chain.diagnostics._seeds import initialised_devices, seed_all
from bayesopt_chain.diagnostics.gradient_noise import gradients, scalar
from bayesopt_chain.diagnostics.temperatures import MARGIN, Estimate, estimate, names_of
from bayesopt_chain.diagnostics.top_curvature import hessian_product, lanczos
from bayesopt_chain.trees import paths_of

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

MOST_DRAWS = 60  # at which the gradient of all data is taken
HOT = 0.1  # excess of temperature from which a run is reported
COLD = 0.8  # temperature below which a stiff direction has not spread out
COLD_ALL = 0.5  # the same of all parameters together, most of which forget slowly
OFF = 1.3  # factor by which the temperature may miss the posterior's
FAR = 4.0  # prior standard deviations, root mean square of a leaf, from which the prior and the data disagree
DATA = 0.1  # share of the configurational temperature below which the loss does not determine a leaf
ENERGY = 1.5  # of T P / 2
SCALE_UNSEEN = (
    "Not seen: whether loss and temperature have the scale of a posterior, since the data could not be counted or the loss "
    "does not take a batch twice; data_size= gives their number."
)
MULTIPLE_UNSEEN = (
    "Not seen: the scale of the loss, beyond that it is no sum over its batch. A multiple of the mean, such as N times it, "
    "looks like the mean of a sharper likelihood; at temperature 1/N it must be the mean itself."
)
TOKENS = (
    "They were counted along the first axis, and the batches hold whole numbers of several dimensions: where the loss is a "
    "mean over tokens, pass their number as data_size=."
)
HESSIAN_UNSEEN = (
    "Not seen: the temperature along the stiffest directions, since the loss has no finite Hessian at the draws."
)


class Readings(NamedTuple):
    """Virials over the temperature asked for, ``[draws, chains]`` each, and energies.

    Attributes:
        leaves: by the leaf's path, of the loss with the chain's weight decay.
        data: by the leaf's path, of the loss alone.
        directions: ``"all parameters"`` and the stiffest directions.
        energy: the loss of all data with the chain's weight decay, not divided by the temperature.
        decay: by the leaf's path, the prior's pull ``weight_decay * theta^2`` over the temperature, mean of an element.
        size: by the leaf's path, ``theta^2`` at the same draws, mean of an element.
    """

    leaves: Mapping[str, Tensor]
    data: Mapping[str, Tensor]
    directions: Mapping[str, Tensor]
    energy: Tensor
    decay: Mapping[str, Tensor]
    size: Mapping[str, Tensor]


class Data(NamedTuple):
    """All data, in batches.

    Attributes:
        batches: each a tree of tensors.
        sizes: the data in each batch; ``None`` where they cannot be counted.
        n: the data in all batches; ``None`` where they cannot be counted and nobody said.
        is_guess: whether the count may be wrong: labels of several dimensions, as of tokens, may be as many data.
    """

    batches: Sequence[Any]
    sizes: tuple[int, ...] | None
    n: int | None
    is_guess: bool

    @property
    def weights(self) -> Sequence[float]:
        """The share of each batch in all data; equal shares where they cannot be counted."""
        if self.sizes is None or not sum(self.sizes):
            return [1.0 / len(self.batches)] * len(self.batches)
        return [size / sum(self.sizes) for size in self.sizes]


def data_in(batches: Sequence[Any], count: int | None) -> Data:
    """Count the data along axis 0 of the tensors, of which most must have the same length.

    Args:
        batches: all data.
        count: what the caller said of their number.
    """
    sizes = [_length(batch) for batch in batches]
    known = None if None in sizes else tuple([size for size in sizes if size is not None])
    deep = any(not x.is_floating_point() and x.ndim > 1 for x in _tensors(batches[0]))
    return Data(batches, known, sum(known) if known is not None and count is None else count, deep and count is None)


def _tensors(batch: Any) -> list[Tensor]:
    return [x for x in optree.tree_leaves(batch) if torch.is_tensor(x) and x.ndim]


def _length(batch: Any) -> int | None:
    """The length that most tensors of a batch have along axis 0, the first of several; ``None`` without tensors."""
    often = Counter(len(x) for x in _tensors(batch)).most_common(1)
    return often[0][0] if often else None


def is_sum(loss: Callable[[Any, Any], Any], params: Any, data: Data, numbers: dict[str, float]) -> bool | None:
    """Whether the loss is a sum over its batch; ``None`` where it does not take a batch twice.

    A loss that draws random numbers, as with dropout, is compared by its mean over 16 seeds.
    """
    batch, size = data.batches[0], _length(data.batches[0])
    if size is None:
        return None
    twice = optree.tree_map(
        lambda x: torch.cat([x, x]) if torch.is_tensor(x) and x.ndim and len(x) == size else x, batch
    )

    def values(of: Any, seeds: range) -> Tensor:
        found: list[float] = []
        for seed in seeds:
            seed_all(seed, initialised_devices())
            with torch.no_grad():
                found.append(float(scalar(loss, params, of)))
        return torch.tensor(found, device="cpu").double()

    once = values(batch, range(2))
    is_random = bool(once[0] != once[1])
    try:
        doubled = values(twice, range(16) if is_random else range(1))
    except Exception:  # a loss may know the size of its batch
        return None
    once = values(batch, range(16, 32)) if is_random else once[:1]
    chance = 5 * float(((once.var() + doubled.var()) / len(once)).sqrt()) if is_random else 0.0
    one, two = float(once.mean()), float(doubled.mean())
    numbers["loss of a batch twice / once"] = two / one if one else 1.0
    return abs(two - one) > max(1e-3 * abs(one), chance)


def off_scale(
    loss: Callable[[Any, Any], Any],
    params: Any,
    data: Data,
    temperature: float,
    wanted: float,
    numbers: dict[str, float],
    notes: list[str],
) -> list[Finding]:
    """Whether the loss is a sum, and whether the temperature is the posterior's."""
    count = data.n
    total = None if count is None else is_sum(loss, params, data, numbers)
    if count is None or total is None:
        notes.append(SCALE_UNSEEN)
        return []
    if not total:
        notes.append(MULTIPLE_UNSEEN)
    numbers["data N"] = float(count)
    times = temperature if total else count * temperature
    numbers["temperature / the posterior's"] = times / wanted
    counted = TOKENS if data.is_guess and not total else ""
    if total and len(data.batches) > 1:
        return [
            Finding(
                "scale",
                f"The loss is a sum over its batch: it counts {len(data.batches)} times too few data on minibatches.",
                "Take the mean over the batch and temperature = 1/N. If every step of the run took all data, pass them here as "
                "one batch.",
            )
        ]
    if abs(math.log(times / wanted)) <= math.log(OFF):
        if counted:
            notes.append(f"Taken for granted: {count} data. {counted}")
        return []
    right = "1" if total else f"1/{count}"
    return [
        Finding(
            "scale",
            f"The chain runs at temperature {temperature:.3g}, {times:.3g} times that of the posterior: the loss is a "
            f"{'sum over' if total else 'mean of'} {count} data, whose posterior has temperature {right}.",
            f"{counted + ' Otherwise set' if counted else 'Set'} temperature={right}. Where another one is meant pass "
            f"posterior_temperature={times:.3g}; for a loss that is already multiplied by N pass posterior_temperature=N.",
        )
    ]


def readings(
    judge: Any,
    draws: Draws,
    loss: Callable[[Any, Any], Any],
    data: Data,
    still: Collection[str],
    notes: list[str],
    *,
    directions: int,
    pooled: bool,
) -> Readings:
    """Virials and energies at up to sixty draws of every chain.

    Args:
        judge: what adds the weight decay of the chain to a gradient, ``judge.of(params, gradients)``.
        still: names of the leaves that do not move, which are left out like those without noise.
        notes: what could not be seen is added to them.
        directions: how many of the stiffest.
        pooled: centre at the mean of all chains, which is right where they sample one mode.
    """
    chosen = draws[:: max(1, math.ceil(len(draws) / MOST_DRAWS))]
    n = draws.chains or 1
    one = chosen[0]
    first = one if draws.chains is None else optree.tree_map(lambda x: x[0], one)
    paths = names_of(paths_of(first))
    levels = {path: level for path, level in judge.levels.items() if path not in still}
    trees = [chosen[i] for i in range(len(chosen))]
    each = [[t] if draws.chains is None else [optree.tree_map(lambda x, c=c: x[c], t) for c in range(n)] for t in trees]
    half = len(each) // 2
    centres = [_centres(part, pooled) for part in (each[half:], each[:half])]
    stiff = _stiffest(loss, each[-1][0], data, [path in levels for path in paths], directions)
    if stiff is None:
        notes.append(HESSIAN_UNSEEN)
        stiff = []
    leaves, of_data, decay, size = (
        {p: torch.zeros(len(each), n, device="cpu").double() for p in paths} for _ in range(4)
    )
    along = {"all parameters": torch.zeros(len(each), n, device="cpu").double()}
    along |= {
        f"stiffest direction {i + 1}": torch.zeros(len(each), n, device="cpu").double() for i in range(len(stiff))
    }
    energy = torch.zeros(len(each), n, device="cpu").double()
    for k, row in enumerate(each):
        for c, params in enumerate(row):
            flat = [p.detach().double() for p in optree.tree_leaves(params)]
            mine, value = _all_data(loss, params, data)
            nothing = [torch.zeros_like(g) for g in mine]
            total = judge.of(params, mine)
            pull = [f.double() for f in judge.of(params, nothing)]
            away = [p - m for p, m in zip(flat, centres[k >= half][c])]
            energy[k, c] = value + 0.5 * sum(float((f * p).sum()) for f, p in zip(pull, flat))
            for path, p, a, g, f, d in zip(paths, flat, away, mine, total, pull):
                level = levels.get(path)
                if level is None or not p.numel():
                    continue
                leaves[path][k, c] = float((a * f.double()).mean()) / level
                of_data[path][k, c] = float((a * g.double()).mean()) / level
                decay[path][k, c] = float((d * p).mean()) / level
                size[path][k, c] = float(p.square().mean())
            # in these units every leaf has temperature 1
            a, f = (
                torch.cat(
                    [x.reshape(-1).double() / levels[path] ** 0.5 for path, x in zip(paths, xs) if path in levels]
                )
                for xs in (away, total)
            )
            along["all parameters"][k, c] = float(a @ f) / len(a)
            for i, u in enumerate(stiff):
                along[f"stiffest direction {i + 1}"][k, c] = float(u @ a) * float(u @ f)
    held = [p for p in paths if p in levels]
    whole, of_loss, pulls, sizes = ({p: part[p] for p in held} for part in (leaves, of_data, decay, size))
    return Readings(whole, of_loss, along, energy, pulls, sizes)


def _centres(rows: list[list[Any]], pooled: bool) -> list[list[Tensor]]:
    """For each chain the mean over these draws, of all chains if ``pooled``."""
    columns = [[optree.tree_leaves(row[c]) for row in rows] for c in range(len(rows[0]))]
    means = [[torch.stack([x.double() for x in leaf]).mean(0) for leaf in zip(*column)] for column in columns]
    if not pooled:
        return means
    return [[torch.stack(leaf).mean(0) for leaf in zip(*means)]] * len(means)


def _all_data(loss: Callable[[Any, Any], Any], params: Any, data: Data) -> tuple[list[Tensor], float]:
    """Gradient and value of the mean over all data."""
    total: list[Tensor] | None = None
    value = 0.0
    for weight, batch in zip(data.weights, data.batches):
        mine = [weight * g for g in gradients(loss, params, batch)]
        with torch.no_grad():
            value += weight * float(scalar(loss, params, batch))
        total = mine if total is None else [x + y for x, y in zip(total, mine)]
    assert total is not None
    return total, value


def _stiffest(
    loss: Callable[[Any, Any], Any], params: Any, data: Data, moves: Sequence[bool], most: int
) -> list[Tensor] | None:
    """Eigenvectors of the Hessian's largest eigenvalues at a draw, in float64; ``None`` if there is no finite Hessian.

    Args:
        moves: for each leaf, whether the directions may move it; the vectors have the elements of these leaves alone.
    """
    leaves, spec = optree.tree_flatten(params)
    chosen = [x for x, moving in zip(leaves, moves) if moving]
    if not most or not chosen:
        return []
    product = hessian_product(loss, params, data.batches, max_batches=8)
    like = torch.cat([x.detach().reshape(-1) for x in chosen])

    def along(v: Tensor) -> Tensor:
        parts = iter(v.split([x.numel() for x in chosen]))
        tangents = [next(parts).view_as(x).to(x) if moving else torch.zeros_like(x) for x, moving in zip(leaves, moves)]
        image = optree.tree_leaves(product(optree.tree_unflatten(spec, tangents)))
        return torch.cat([x.reshape(-1).to(like) for x, moving in zip(image, moves) if moving])

    try:
        if not bool(torch.isfinite(along(torch.ones_like(like))).all()):
            return None
        values, vectors = lanczos(along, like, min(most, like.numel()), max_products=25)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # of autograd, where an operation has no second derivative, or of a decomposition
        return None
    return [u.double() for k, u in zip(values, vectors) if float(k) > 1e-6 * float(values.abs().max())]


def temperature(found: Readings, numbers: dict[str, float]) -> list[Finding]:
    """Draws that are hotter or colder than asked for."""
    count = len(found.directions)
    sure = 2.33 + 0.35 * math.log(count)  # one in a hundred for all of them together
    hot: list[tuple[float, str]] = []
    cold: list[tuple[float, str]] = []
    for where, series in found.directions.items():
        value, error = mean_and_error(series)
        if where != "all parameters":
            # a Gaussian virial is the square of a normal number, of variance 2: a few small ones have a small spread by chance
            error = max(error, COLD * (2 / effective(series)) ** 0.5)
        numbers[f"temperature, {where}"] = value
        numbers[f"  its standard error, {where}"] = error
        says = f"along {where} they have {value:.2f} +- {error:.2f} times the temperature asked for"
        if value - sure * error > 1 + HOT:
            hot.append((value, says))
        elif value + sure * error < (COLD_ALL if where == "all parameters" else COLD):
            cold.append((value, says))
    for path, series in found.leaves.items():
        read = estimate(series)
        if read.value - MARGIN * read.standard_error > 1 + HOT:
            hot.append((read.value, f"in {path} they have {read} times the (configurational) temperature asked for"))
    out: list[Finding] = []
    if hot:
        out.append(
            Finding(
                "heated",
                f"The draws are too hot: {max(hot)[1]}.",
                "Minibatches heat the chain, or lr is too large for the curvature at the draws. Lower lr, enlarge the batch, "
                "or take all data.",
            )
        )
    elif cold:
        out.append(
            Finding(
                "cold",
                f"The draws have not spread out: {min(cold)[1]}.",
                "Run longer or with a larger lr. A chain that starts at the mode needs several relaxations to leave it.",
            )
        )
    return out


def energy_at(judge: Any, loss: Callable[[Any, Any], Any], params: Any, data: Data) -> float:
    """The loss of all data with the chain's weight decay."""
    mine, value = _all_data(loss, params, data)
    pull = judge.of(params, [torch.zeros_like(g) for g in mine])
    return value + 0.5 * sum(float((f * p).sum()) for f, p in zip(pull, optree.tree_leaves(params)))


def energy(found: Readings, at_mode: float, unit: float, numbers: dict[str, float]) -> list[Finding]:
    """Energy above the mode, against ``T P / 2``, the ``unit``.

    Losses that are far from quadratic, as those with heavy tails, lie further above it at the right temperature. Nothing is
    reported where the virial theorem, which holds for every loss, says that the temperature is below ``ENERGY``.
    """
    value, error = mean_and_error(found.energy)
    ratio = (value - at_mode) / unit
    numbers["energy above the mode / (T P / 2)"] = ratio
    virial, its_error = mean_and_error(found.directions["all parameters"])
    if ratio - 4 * error / unit <= ENERGY or virial + MARGIN * its_error < ENERGY:
        return []
    return [
        Finding(
            "heated",
            f"The draws lie {ratio:.2g} times T P / 2 above the mode in energy, where 1 is expected and networks read up to "
            "1.4.",
            "Minibatches heat the chain, or the mode is none. Lower lr, enlarge the batch, or train the mode to its end.",
        )
    ]


def prior(
    found: Readings,
    draws: Mapping[str, Tensor],
    elements: Mapping[str, int],
    prior_sd: Mapping[str, float] | None,
    count: int | None,
    numbers: dict[str, float],
) -> list[Finding]:
    """Leaves that the prior and the data disagree about, that the loss does not use, and that the prior alone determines.

    Args:
        found: virials.
        draws: of each leaf.
        elements: how many each leaf has in one chain. ``count`` data cannot determine more than as many of them.
    """
    out: list[Finding] = []
    far: list[tuple[float, str, float]] = []
    narrow: list[tuple[float, str, float, float]] = []
    for path in found.leaves:
        declared = (prior_sd or {}).get(path)
        square = float(draws[path].double().square().mean())
        pull = float(found.decay[path].mean())
        in_sd = square / declared**2 if declared else pull
        if in_sd > 0:
            numbers[f"draws in prior standard deviations, {path}"] = math.sqrt(in_sd)
            if math.sqrt(in_sd) > FAR:
                far.append((math.sqrt(in_sd), path, math.sqrt(square / in_sd)))
        if declared and pull > 0:
            own = math.sqrt(float(found.size[path].mean()) / pull)
            numbers[f"prior by weight_decay / declared, {path}"] = own / declared
            if own < declared / OFF:
                narrow.append((own / declared, path, own, declared))
    if far:
        times, path, sd = max(far)
        out.append(
            Finding(
                "prior",
                f"Draws of {path} lie {times:.1f} prior standard deviations ({sd:.2g}) from zero: data and prior disagree.",
                "The prior is probably narrower than meant: a standard deviation s is weight_decay = 1 / (N s^2).",
            )
        )
    if narrow:
        _, path, own, declared = min(narrow)
        out.append(
            Finding(
                "prior",
                f"The weight decay alone gives {path} a prior standard deviation of {own:.2g}, and {declared:.2g} is declared.",
                "A standard deviation s is weight_decay = T / s^2, which is 1 / (N s^2) for a mean over N data.",
            )
        )
    flat = [p for p, x in found.data.items() if float(x.abs().max()) < 1e-12]
    if flat:
        out.append(
            Finding(
                "dead",
                f"The loss does not depend on {', '.join(flat[:4])}: its gradient is zero at every draw.",
                "A dead unit, or a parameter the model does not use: it samples its prior, or wanders off without one.",
            )
        )
    can = {p: 1.0 if count is None else min(1.0, count / max(elements[p], 1)) for p in found.data}
    slack = [
        p for p in found.data if p not in flat and _is_slack(estimate(found.data[p]), estimate(found.leaves[p]), can[p])
    ]
    if slack:
        out.append(
            Finding(
                "prior",
                f"The prior dominates {', '.join(slack[:4])}: the data contribute less than {DATA:.0%} of what holds it.",
                "Right if it was meant; else lower weight_decay (a prior precision lambda is weight_decay = lambda / N).",
            )
        )
    return out


def _is_slack(data: Estimate, total: Estimate, can: float) -> bool:
    """Whether the data contribute less than a tenth of the share that they can."""
    return data.value + MARGIN * data.standard_error < DATA * can and total.value > 0.5
