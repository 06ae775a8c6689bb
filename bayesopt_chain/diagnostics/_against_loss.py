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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics._agreement import mean_and_error
from bayesopt_chain.diagnostics._findings import Finding
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


def data_of(batches: Sequence[Any]) -> int | None:
    """How many data the batches hold, by axis 0 of the first tensor; ``None`` where they hold no tensors."""
    sizes = [next((len(x) for x in optree.tree_leaves(b) if torch.is_tensor(x) and x.ndim), None) for b in batches]
    known = [n for n in sizes if n is not None]
    return sum(known) if len(known) == len(sizes) else None


def off_scale(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batches: Sequence[Any],
    temperature: float,
    wanted: float,
    numbers: dict[str, float],
) -> list[Finding]:
    """Whether the loss is a sum, and whether the temperature is the posterior's."""
    count = data_of(batches)
    if count is None:
        return []
    first = batches[0]
    twice = optree.tree_map(lambda x: torch.cat([x, x]) if torch.is_tensor(x) and x.ndim else x, first)

    def value(batch: Any, seed: int) -> float:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return float(scalar(loss, params, batch))

    once, again, doubled = value(first, 0), value(first, 1), value(twice, 0)
    chance = 5 * abs(once - again)  # dropout draws other masks for a batch of another size
    is_sum = abs(doubled - once) > max(1e-3 * abs(once), chance)
    numbers["data N"] = float(count)
    numbers["loss of a batch twice / once"] = doubled / once if once else 1.0
    times = temperature if is_sum else count * temperature
    numbers["temperature / the posterior's"] = times / wanted
    out: list[Finding] = []
    if is_sum and len(batches) > 1:
        out.append(
            Finding(
                "scale",
                f"The loss is a sum over its batch: it counts {len(batches)} times too few data on minibatches.",
                "Take the mean over the batch and temperature = 1/N.",
            )
        )
    elif abs(math.log(times / wanted)) > math.log(OFF):
        right = "1" if is_sum else f"1/{count}"
        out.append(
            Finding(
                "scale",
                f"The chain runs at temperature {temperature:.3g}, {times:.3g} times that of the posterior: the loss is a "
                f"{'sum over' if is_sum else 'mean of'} {count} data, whose posterior has temperature {right}.",
                f"Set temperature={right}. Where another one is meant pass posterior_temperature={times:.3g}; for a loss "
                "that is already multiplied by N pass posterior_temperature=N.",
            )
        )
    return out


def readings(
    judge: Any,
    draws: Draws,
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    levels: Mapping[str, float],
    *,
    directions: int,
    pooled: bool,
) -> Readings:
    """Virials and energies at up to sixty draws of every chain.

    Args:
        judge: what adds the weight decay of the chain to a gradient, ``judge.of(params, gradients)``.
        levels: the temperature of each leaf.
        directions: how many of the stiffest.
        pooled: centre at the mean of all chains, which is right where they sample one mode.
    """
    chosen = draws[:: max(1, math.ceil(len(draws) / MOST_DRAWS))]
    n = draws.chains or 1
    one = chosen[0]
    first = one if draws.chains is None else optree.tree_map(lambda x: x[0], one)
    paths = names_of(paths_of(first))
    T = max(levels.values())
    trees = [chosen[i] for i in range(len(chosen))]
    each = [[t] if draws.chains is None else [optree.tree_map(lambda x, c=c: x[c], t) for c in range(n)] for t in trees]
    half = len(each) // 2
    centres = [_centres(part, pooled) for part in (each[half:], each[:half])]
    stiff = _stiffest(loss, each[-1][0], batches, directions)
    leaves, data, decay, size = ({p: torch.zeros(len(each), n, device="cpu").double() for p in paths} for _ in range(4))
    along = {"all parameters": torch.zeros(len(each), n, device="cpu").double()}
    along |= {
        f"stiffest direction {i + 1}": torch.zeros(len(each), n, device="cpu").double() for i in range(len(stiff))
    }
    energy = torch.zeros(len(each), n, device="cpu").double()
    for k, row in enumerate(each):
        for c, params in enumerate(row):
            flat = [p.detach().double() for p in optree.tree_leaves(params)]
            mine, value = _all_data(loss, params, batches)
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
                data[path][k, c] = float((a * g.double()).mean()) / level
                decay[path][k, c] = float((d * p).mean()) / level
                size[path][k, c] = float(p.square().mean())
            a, f = (torch.cat([x.reshape(-1).double() for x in xs]) for xs in (away, total))
            along["all parameters"][k, c] = float(a @ f) / len(a) / T
            for i, u in enumerate(stiff):
                along[f"stiffest direction {i + 1}"][k, c] = float(u @ a) * float(u @ f) / T
    held = [p for p in paths if p in levels]
    whole, of_data, pulls, sizes = ({p: part[p] for p in held} for part in (leaves, data, decay, size))
    return Readings(whole, of_data, along, energy, pulls, sizes)


def _centres(rows: list[list[Any]], pooled: bool) -> list[list[Tensor]]:
    """For each chain the mean over these draws, of all chains if ``pooled``."""
    columns = [[optree.tree_leaves(row[c]) for row in rows] for c in range(len(rows[0]))]
    means = [[torch.stack([x.double() for x in leaf]).mean(0) for leaf in zip(*column)] for column in columns]
    if not pooled:
        return means
    return [[torch.stack(leaf).mean(0) for leaf in zip(*means)]] * len(means)


def _all_data(loss: Callable[[Any, Any], Any], params: Any, batches: Sequence[Any]) -> tuple[list[Tensor], float]:
    """Gradient and value of the mean of the batches' losses."""
    total: list[Tensor] | None = None
    value = 0.0
    for batch in batches:
        mine = gradients(loss, params, batch)
        with torch.no_grad():
            value += float(scalar(loss, params, batch)) / len(batches)
        total = mine if total is None else [x + y for x, y in zip(total, mine)]
    assert total is not None
    return [x / len(batches) for x in total], value


def _stiffest(loss: Callable[[Any, Any], Any], params: Any, batches: Sequence[Any], most: int) -> list[Tensor]:
    """Eigenvectors of the Hessian's largest eigenvalues at a draw, as vectors in float64."""
    leaves, spec = optree.tree_flatten(params)
    if not most or not leaves:
        return []
    product = hessian_product(loss, params, batches, max_batches=8)
    like = torch.cat([x.detach().reshape(-1) for x in leaves])

    def along(v: Tensor) -> Tensor:
        parts = v.split([x.numel() for x in leaves])
        image = product(optree.tree_unflatten(spec, [y.view_as(x).to(x) for x, y in zip(leaves, parts)]))
        return torch.cat([x.reshape(-1).to(like) for x in optree.tree_leaves(image)])

    values, vectors = lanczos(along, like, min(most, like.numel()), max_products=25)
    return [u.double() for k, u in zip(values, vectors) if float(k) > 1e-6 * float(values.abs().max())]


def temperature(found: Readings, numbers: dict[str, float]) -> list[Finding]:
    """Draws that are hotter or colder than asked for."""
    count = len(found.directions)
    sure = 2.33 + 0.35 * math.log(count)  # one in a hundred for all of them together
    hot: list[tuple[float, str]] = []
    cold: list[tuple[float, str]] = []
    for where, series in found.directions.items():
        value, error = mean_and_error(series)
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


def energy_at(judge: Any, loss: Callable[[Any, Any], Any], params: Any, batches: Sequence[Any]) -> float:
    """The loss of all data with the chain's weight decay."""
    mine, value = _all_data(loss, params, batches)
    pull = judge.of(params, [torch.zeros_like(g) for g in mine])
    return value + 0.5 * sum(float((f * p).sum()) for f, p in zip(pull, optree.tree_leaves(params)))


def energy(found: Readings, at_mode: float, T: float, size: int, numbers: dict[str, float]) -> list[Finding]:
    """Energy above the mode, against ``T P / 2``."""
    value, error = mean_and_error(found.energy)
    unit = T * size / 2
    ratio = (value - at_mode) / unit
    numbers["energy above the mode / (T P / 2)"] = ratio
    if ratio - 4 * error / unit <= ENERGY:
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
    found: Readings, sizes: Mapping[str, Tensor], prior_sd: Mapping[str, float] | None, numbers: dict[str, float]
) -> list[Finding]:
    """Leaves that the prior and the data disagree about, that the loss does not use, and that the prior alone determines."""
    out: list[Finding] = []
    far: list[tuple[float, str, float]] = []
    narrow: list[tuple[float, str, float, float]] = []
    for path in found.leaves:
        declared = (prior_sd or {}).get(path)
        square = float(sizes[path].double().square().mean())
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
    slack = [p for p in found.data if p not in flat and _is_slack(estimate(found.data[p]), estimate(found.leaves[p]))]
    if slack:
        out.append(
            Finding(
                "prior",
                f"The prior dominates {', '.join(slack[:4])}: the data contribute less than {DATA:.0%} of what holds it.",
                "Right if it was meant; else lower weight_decay (a prior precision lambda is weight_decay = lambda / N).",
            )
        )
    return out


def _is_slack(data: Estimate, total: Estimate) -> bool:
    return data.value + MARGIN * data.standard_error < DATA and total.value > 0.5
