r"""Five questions to a run, and what to change first where the answer is no.

1. **Is it finite, and does it move?** Draws and losses; leaves and chains that stand still.
2. **Do the chains agree?** Split R-hat by an F-test that knows the draws' autocorrelation, effective draws, chains that share
   their noise (:mod:`bayesopt_chain.diagnostics.convergence`).
3. **Is it at rest?** Drift of the draws and of the loss from the first to the last third; a loss that falls at first.
4. **Has the loss its scale?** ``loss(a batch twice) = loss(the batch)`` for a mean, twice that for a sum, exactly. A mean over
   N data takes ``T = 1/N`` for the posterior, a sum ``T = 1``. With a likelihood the factor ``c`` of the loss is known: a prior
   is the same for every batch at one draw, so that ``loss(A) - loss(B) = c (nll(A) - nll(B))``, and the temperature is ``c/N``.
   Without one ``tr Cov(gradient) / tr H`` of one datum is shown, which is 1 at the mode of a calibrated likelihood, ``c`` for
   ``c`` times it, and anything elsewhere, so that no verdict rests on it.
5. **Has it the temperature?** For every direction ``u`` and every constant ``c``, integration by parts gives

    E[(u . (theta - c)) (u . grad U(theta))] = T |u|^2        (virial theorem; no Gaussian is assumed),

   along all parameters, leaf by leaf, and along the stiffest directions of the Hessian at a draw, which forget first and which
   minibatches heat most. ``c`` is the mean of the other half of the draws. The share of the loss without the chain's weight
   decay shows leaves that the loss does not determine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches as batch_trees
from bayesopt_chain import checks
from bayesopt_chain.curvature._plan import pair_targets
from bayesopt_chain.diagnostics._response import forces_of, names_of
from bayesopt_chain.diagnostics.convergence import (
    R_HAT,
    agreement,
    drift,
    effective,
    mean_and_error,
    shared_noise,
)
from bayesopt_chain.diagnostics.findings import Finding, Row, judged
from bayesopt_chain.diagnostics.gradient_noise import (
    gradient_noise,
    gradients,
    hessian_product,
    initialised_devices,
    lanczos,
    loss_at,
    rows_of,
    seed_all,
    size_of,
    trace,
    twice_over_once,
)
from bayesopt_chain.loop.loss import value
from bayesopt_chain.modules import as_batches
from bayesopt_chain.trees import flatten, unflatten

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

LEVEL = 0.01  # probability at which chains that agree may be called different
FEW = 4.0  # effective draws a chain below which a run is short
COPY = 0.9  # correlation of noise from which two chains are one
LARGE, UNTOLD = 1.5, 8.0  # R-hat from which so few effective draws a chain do not tell agreement from chance
STILL = 1e-3  # probability of as many equal draws in a row, by how often a chain repeats itself otherwise
GROWTH = 10.0  # by how much the loss, over its spread at first, must have grown to call a run diverging
SPEEDING = 4.0  # times as much in its second half as in its first
DRIFTED = 0.5  # standard deviations from the first to the last third that a drift must reach besides being no accident
FIRST = 10.0  # standard deviations above the later losses at which the first draws were made on the way there
MOST = 1000  # elements of all leaves together that agreement is judged on
MOST_DRAWS = 60  # at which the gradient of all data is taken
DIRECTIONS = 4  # the stiffest, along which the temperature is read
HOT = 0.1  # excess of temperature from which a run is reported
COLD, COLD_ALL = 0.8, 0.5  # temperature below which a stiff direction, or all parameters, have not spread out
OFF = 1.3  # factor by which the temperature may miss the posterior's
UNLIKE = 0.02  # share of the loss's changes that its likelihood may leave unexplained
FAR = 4.0  # prior standard deviations, root mean square of a leaf, from which the prior and the data disagree
DATA = 0.1  # share of the virial below which the loss does not determine a leaf
PATIENT = (3.0, 2.33)  # standard errors of one leaf; of the directions, with 0.35 log of their number

RANK = (  # what costs most comes first
    "diverged", "nonfinite", "scale", "duplicate", "dead", "heated", "together",
    "prior", "burn-in", "cold", "modes", "mixing", "short",
)  # fmt: skip
UNSEEN = "unseen"  # the kind of what could not be looked at
SEVERAL = ("dead", "prior", UNSEEN)  # kinds of which all findings are reported


class Diagnosis(NamedTuple):
    """What :func:`doctor` returns; ``print`` it.

    Attributes:
        findings: what is wrong, worst first; empty for a run that can be trusted.
        numbers: what was looked at, by name.
        unseen: what could not be looked at or was taken for granted, a sentence each.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, float]
    unseen: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def kinds(self) -> set[str]:
        """The kinds of the findings."""
        return {finding.kind for finding in self.findings}

    def __str__(self) -> str:
        lines = [
            "This run shows no fault that its draws could tell." if self.is_healthy else "Do not trust this run yet."
        ]
        for finding in self.findings:
            lines += ["", f"* {finding.says}", f"  {finding.do}"]
        lines += [line for sentence in self.unseen for line in ("", sentence)]
        return "\n".join([*lines, "", "What was looked at:", *(f"  {k:<34} {x:.4g}" for k, x in self.numbers.items())])


@checks.takes(
    draws=checks.SAMPLED,
    tx=checks.Kind(
        lambda x: checks.TX.fits(x) or (hasattr(x, "thermal_leaves") and not isinstance(x, type)),
        "a gradient transformation, or an optimizer of bc.optim",
    ),
    batches=checks.BATCH_OR_BATCHES,
    of=checks.FUNCTION,
    temperature=checks.POSITIVE,
    posterior_temperature=checks.POSITIVE,
    data_size=checks.WHOLE,
    forward=checks.FUNCTION,
    likelihood=checks.LIKELIHOOD,
    targets=checks.INPUTS,
)
def doctor(
    draws: Draws,
    tx: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Iterable[Any] | None = None,
    *,
    of: Callable[[Any], Tensor] | None = None,
    temperature: float | None = None,
    posterior_temperature: float = 1.0,
    data_size: int | None = None,
    forward: Callable[[Any, Any], Tensor] | None = None,
    likelihood: Any = None,
    targets: str | Callable[[Any], Any] | None = None,
) -> Diagnosis:
    """Look at a run and name what is wrong with it, what costs most first.

    It asks five questions: is the run finite and moving, do its chains agree, is it at rest, has the loss the scale of a
    posterior, and have the draws its temperature. The last two need ``tx``, ``loss`` and ``batches``. Agreement is judged on
    ranks (Gelman and Rubin, 1992; Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021).

    The state of random number generators is restored. The loss is called many times; what it writes stays written, such as the
    running statistics of a BatchNorm that is in training mode.

    Args:
        draws: of :func:`bayesopt_chain.sample`, with several chains if at all possible.
        tx: the chain, or the optimizer of :mod:`bayesopt_chain.optim`.
        loss: as the step had it.
        batches: all data, in batches, such as a list or a DataLoader; or all data as one batch: a tensor, a tuple with a tensor
            in it, or a dictionary. Gone through once for each of up to 60 draws of every chain.
        of: what must have mixed, a function of one draw of one chain, such as predictions at some inputs. The weights of a
            network never mix, since its units can be exchanged; what it says can. Default: the parameters (a selection where
            there are many).
        temperature: of the chain, where it cannot be read off ``tx``. One that follows a schedule is read at the last draw.
        posterior_temperature: the temperature meant, in units of the posterior's; other than 1 for tempered posteriors.
        data_size: the number of data that the loss is a mean over, as of tokens that are not ignored. Default: the length of
            the batches along axis 0.
        forward: ``forward(params, batch)`` gives the outputs that ``likelihood`` takes.
        likelihood: of :mod:`bayesopt_chain.likelihoods`. With it the scale of the loss is no guess: the loss is compared with
            ``-likelihood.log_prob(forward(params, batch), targets).mean()``.
        targets: from a batch to its targets, or their key in it. Default: the second entry of ``batch = (inputs, targets)``.

    Returns:
        :class:`Diagnosis`; ``print`` it.

    Raises:
        ValueError: ``loss`` without ``tx`` and ``batches``; ``likelihood`` without ``forward`` and ``loss``; batches without
            any, or that the loss cannot take; draws with weights.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> _ = torch.manual_seed(0)
        >>> tx = bc.sghmc(0.2, temperature=0.5)
        >>> chains = bc.parallel(bc.make_step(lambda w, batch: (w**2).sum() / 2, tx), 2)
        >>> w = torch.tensor([[-3.0], [3.0]])
        >>> draws = bc.sample(chains, w, chains.init(tx, w), None, steps=1500, burn_in=300, thinning=10)
        >>> bc.diagnostics.doctor(draws).is_healthy
        True
        >>> bc.diagnostics.doctor(draws, of=lambda w: w + 0).findings
        ()
    """
    checks.installed("doctor", "diagnostics", "arviz_stats", "scipy")
    if loss is not None and (tx is None or batches is None):
        raise ValueError("doctor: with loss= it needs tx= and batches= as well")
    if (likelihood is None) != (forward is None) or (likelihood is not None and loss is None):
        raise ValueError("doctor: likelihood= and forward= belong together, and need loss=, tx= and batches= as well")
    if draws.is_weighted:
        raise ValueError("doctor: these draws have weights, and it counts all the same; pass draws.equally_weighted()")
    m = SimpleNamespace(
        draws=draws, tx=tx, loss=loss, batches=batches, of=of, told=temperature, wanted=posterior_temperature,
        data_size=data_size, count=len(draws), n=draws.chains or 1, why=draws.why,
        known=forward and partial(_minus_log_likelihood, forward, likelihood, batch_trees.picked(targets, pair_targets)),
        numbers={"draws": float(len(draws)), "chains": float(draws.chains or 1)}, found=[], kinds=set(),
        data=None, doubled=None, levels={},
    )  # fmt: skip
    with torch.random.fork_rng(devices=initialised_devices()):
        for measure, rows in QUESTIONS:
            vars(m).update(measured := measure(m))
            m.found += judged(rows if measured else (), m, m.kinds, SEVERAL)
            if m.kinds & {"diverged", "nonfinite"} or not m.count:
                break
    findings = sorted((x for x in m.found if x.kind != UNSEEN), key=lambda x: RANK.index(x.kind))
    return Diagnosis(tuple(findings), m.numbers, tuple(x.says.strip() for x in m.found if x.kind == UNSEEN))


def _minus_log_likelihood(
    forward: Any, likelihood: Any, targets: Callable[[Any], Any], params: Any, batch: Any
) -> tuple[Tensor, Any]:
    """The sum of ``- likelihood.log_prob(forward(params, batch), targets(batch))`` over a batch, and how many targets count."""
    y = targets(batch)
    own, weights = likelihood.losses(forward(params, batch), y), likelihood.weights(y)
    return own.sum(), own.numel() if weights is None else weights.sum()


class _Data:
    """All data, in batches, and a loss of them.

    Attributes:
        sizes: the data in each batch, the length that most of its tensors have along axis 0; ``None`` where there are none.
        n: the data in all batches; ``None`` where they cannot be counted and nobody said.
        is_guess: whether the count may be wrong: labels of several dimensions, as of tokens, may be as many data.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], batches: list[Any], count: int | None, params: Any) -> None:
        if not batches:
            raise ValueError("doctor: batches is empty")
        self.is_finite = True
        for i, batch in enumerate(batches):
            try:
                self.is_finite &= bool(loss_at(loss, params, batch).isfinite())
            except Exception as err:
                raise ValueError(
                    f"doctor: the loss cannot take batch {i + 1} of {len(batches)}, {checks.short(batch)}: {err}. batches= "
                    "takes all data as one batch, which is a tuple, a dictionary or a tensor, or a list or loader of batches"
                ) from err
        self.loss, self.batches = loss, batches
        sizes: list[Any] = [size_of(batch) for batch in batches]
        self.sizes = None if None in sizes else sizes
        self.n = count or (None if self.sizes is None else sum(self.sizes))
        self.is_guess = count is None and any(
            torch.is_tensor(x) and not x.is_floating_point() and x.ndim > 1 for x in batch_trees.flatten(batches[0])[0]
        )
        known = self.sizes if self.sizes and sum(self.sizes) else [1] * len(batches)
        self.weights = [size / sum(known) for size in known]

    def gradients(self, params: Any) -> list[Tensor]:
        """The gradient of the mean over all data."""
        each = [gradients(self.loss, params, batch) for batch in self.batches]
        return [torch.stack([w * g for w, g in zip(self.weights, column)]).sum(0) for column in zip(*each)]

    def parts(self, most: int) -> list[Any]:
        """Equal parts of the first batch, ``most`` at most, a datum each where it has no more."""
        length = self.sizes[0] if self.sizes else 0
        each = max(1, length // most)
        starts = range(0, each * min(most, length // each), each)
        return [rows_of(self.batches[0], slice(low, low + each)) for low in starts]

    def times_likelihood(self, params: Any, known: Callable[..., Any], is_sum: bool) -> tuple[float, float] | None:
        """The factor ``c`` in ``loss = c * (mean or sum of - log p) + rest``, and the share that no factor explains.

        At one draw the rest (a prior, constants) is the same for every part of a batch, so that differences give ``c``.
        ``None`` where all parts have one value, or one that is not finite.
        """
        both, parts = list[tuple[Tensor, Tensor]](), self.parts(8)
        for x in parts if len(parts) > 1 else self.batches[:8]:
            with torch.no_grad():
                seed_all(0)  # dropout has the same masks in both
                own, count = known(params, x)
                seed_all(0)
                both.append((value(self.loss, params, x)[0], own if is_sum else own / count))
        L, own = (torch.stack([x.double().cpu() for x in column]) for column in zip(*both))
        L, own = L - L.mean(), own - own.mean()
        if not (L.norm() * own.norm()).isfinite() or not float(own.norm()):
            return None
        factor = float(L @ own) / float(own @ own)
        return factor, float((L - factor * own).norm() / L.norm().clamp(min=1e-300))

    def noise_over_curvature(self, params: Any, product: Callable[[Any], Any]) -> float | None:
        """``tr Cov(gradient of one datum) / tr H``, by up to 64 data of the first batch and 8 random directions."""
        parts = self.parts(self.sizes[0])[:64] if self.sizes else []
        if len(parts) < 8:
            return None
        try:
            noise = gradient_noise(self.loss, params, parts, rank=1).trace
            curved = trace(product, params, probes=8)
        except Exception:  # the loss may not take a single datum, or have no second derivative
            return None
        return noise / curved if curved > 0 else None


def _finite(m: Any) -> dict[str, Any]:
    """Numbers of draws and losses that are not finite, and losses that ran away."""
    stride = max(1, math.ceil(sum(map(math.prod, m.draws.shapes.values())) / m.n / MOST))
    names = zip(names_of(m.draws[0]), m.draws.shapes)
    leaves = {shown: _looked_at(m.draws, f"params/{name}", m.n, stride) for shown, name in names}
    nothing = torch.zeros(0, 1, dtype=torch.float64, device="cpu")
    losses = m.draws.loss.double().cpu().reshape(m.count, -1) if m.draws._has("_loss") else nothing
    finite = torch.isfinite(losses).all(1)
    has_stopped, early = "the loss of" in m.why, losses[: max(len(losses) // 4, 1)].abs()
    is_level = has_stopped and len(losses) >= 2 and bool(losses[-1].abs().max() <= GROWTH * early.max())
    return {
        "leaves": leaves,
        "losses": losses,
        "still": [n for n, x in leaves.items() if m.count > 1 and x.size and bool(x.repeats.all())],
        "bad": _listing(n for n, x in leaves.items() if not x.is_finite),
        "missing": int((~finite).sum()),
        "is_level": is_level,
        "runs_away": not is_level
        and (has_stopped or _has_grown(losses[finite]) or (len(losses) > 0 and not bool(finite[-2:].any()))),
        "how": m.why if has_stopped else "the loss grows without end",
    }


def _moving(m: Any) -> dict[str, Any]:
    """Leaves and chains that stand still; leaves without noise may."""
    temperatures, force = ({}, None) if m.tx is None else _forces(m.draws, m.tx, m.told)
    noiseless = m.leaves.keys() - temperatures.keys() if temperatures else set[str]()
    moving = [x.repeats for name, x in m.leaves.items() if name not in m.still]
    chain, halted = _halt(torch.stack(moving).all(0)) if moving and m.count >= 8 else (0, 0)
    idle = _listing(name for name in m.still if name not in noiseless)
    return {"temperatures": temperatures, "force": force, "idle": idle, "chain": chain, "halted": halted}


def _halt(same: Tensor) -> tuple[int, int]:
    """The first chain whose longest run of equal draws is no accident, and its length, by whether a draw repeats the last one.

    Its length is 0 where there is none.
    """
    for chain, repeats in enumerate(same.T.tolist()):
        longest = max(len(list(run)) if equal else 0 for equal, run in itertools.groupby(repeats))
        # the probability with which it repeats a draw otherwise, as chains do that reject proposals
        often = (sum(repeats) - longest + 1) / (len(repeats) - longest + 2)
        if longest >= 2 and len(repeats) * often**longest < STILL:
            return chain, longest + 1
    return 0, 0


def _shared(m: Any) -> dict[str, Any]:
    """The numbers that must have mixed, and the two chains that most clearly have the same noise."""
    values = _watched(m)
    strange = int((~values.isfinite()).any(-1).any(-1).sum())
    values = values[..., :0] if strange else values
    pair, lag, correlation = shared_noise(values) or ((0, 0), 0, 0.0)
    if correlation:
        m.numbers["correlation of chains' noise"] = correlation
    behind = f", {abs(lag)} draw{'s' * (abs(lag) > 1)} apart" if lag else ""
    return {"values": values, "strange": strange, "pair": pair, "correlation": correlation, "lag": behind}


def _watched(m: Any) -> Tensor:
    """What must have mixed, ``[draws, chains, elements]``, without elements that never move."""
    if m.of is None:
        values = torch.cat([x.some for x in m.leaves.values()], -1)
    else:
        found = [m.of(_chain(draw, m.draws.chains, c)) for draw in m.draws for c in range(m.n)]
        shapes = {tuple(x.shape) if checks.VALUES.fits(x) else getattr(x, "dtype", type(x).__name__) for x in found}
        if [type(x) for x in shapes] != [tuple]:
            raise TypeError(
                f"doctor: of must return a tensor, of one shape at every draw, got {checks.short(shapes)}; of complex numbers "
                "return torch.view_as_real"
            )
        values = torch.stack([x.detach().reshape(-1).double() for x in found]).unflatten(0, (m.count, m.n))
    return values[..., (values != values[:1]).any(0).any(0)].cpu()


def _agreeing(m: Any) -> dict[str, Any]:
    """R-hat, its probability and effective draws, and whether each chain agrees with itself."""
    if m.count < 8 or not m.values.shape[-1]:
        return {"differ": False, "least": math.inf, "untold": 0.0, "is_untold": False}
    found = agreement(m.values)
    worst, least = float(found.r_hat.max()), float(found.effective.min())
    m.numbers |= {"R-hat, worst": worst, "R-hat, probability": found.p_value, "effective draws, least": least}
    alone = [agreement(m.values[:, [c], found.worst : found.worst + 1]) for c in range(m.n)]
    is_settled = m.n > 1 and least >= FEW * m.n and all(x.p_value >= LEVEL or float(x.r_hat) <= 1.1 for x in alone)
    return {
        "r_hat": worst,
        "chance": found.p_value,
        "least": least,
        "differ": found.p_value < LEVEL and worst > R_HAT,
        "is_settled": is_settled,
        # so few that a large R-hat may be chance, and may be none
        "untold": float(torch.where(found.effective < UNTOLD * m.n, found.r_hat, 0.0).max()),
        "is_untold": worst > LARGE and least < UNTOLD * m.n,
        "network": "" if m.of else " For a network pass of=predictions: its weights have many equal modes.",
    }


def _resting(m: Any) -> dict[str, Any]:
    """Drifts of the draws and of the loss, and how far the first losses stand out."""
    are_independent = not m.kinds & {"duplicate", "together"}
    is_long = m.count >= 12 and m.values.shape[-1] > 0
    size, p = drift(m.values, independent=are_independent) if is_long else (0.0, 1.0)
    m.numbers |= {"drift, first to last third": size, "drift, probability": p}
    above, of_loss, its_p, mean = 0.0, 0.0, 1.0, m.losses.mean(1)
    if len(mean) >= 12 and float(m.losses.std()):
        later = mean[len(mean) // 2 :]
        spread = float(later.std().clamp(min=1e-6 * float(later.abs().mean()) + 1e-300))
        counts = sorted({max(1, len(mean) // share) for share in (len(mean), 50, 20, 10)})
        # losses of a posterior have exponential tails: 10 deviations are exceeded by chance less than once in 1000 runs
        above = max((float(mean[:k].mean() - later.mean()) / spread for k in counts), key=abs)
        of_loss, its_p = drift(m.losses[..., None], independent=are_independent)
        m.numbers |= {"loss, first draws, in deviations": above, "loss, drift, probability": its_p}
    drifts, loss_drifts = (q < LEVEL and abs(x) > DRIFTED for x, q in ((size, p), (of_loss, its_p)))
    falls = of_loss < 0 if loss_drifts else above > FIRST
    return {
        "drifts": drifts,
        "drifted": abs(size),
        "by_chance": p,
        "loss_drifts": loss_drifts,
        "loss_moved": f"{'rises' if of_loss > 0 else 'falls'} by {abs(of_loss):.2f}",
        "loss_by_chance": its_p,
        "above": above,
        "falls": falls,
    }


def _shown(m: Any) -> dict[str, Any]:
    """Loss and data, where there are any to compare the draws with."""
    if m.loss is None or not m.temperatures:
        return {"is_asked": m.loss is not None}
    one = _chain(m.draws[m.count - 1], m.draws.chains, 0)
    data = _Data(m.loss, list(as_batches(batch_trees.each_once(m.batches))), m.data_size, one)
    # the loss of a batch twice over that of the batch
    doubled = data.n and data.is_finite and twice_over_once(m.loss, one, data.batches[0])
    return {"is_asked": True, "one": one, "data": data, "doubled": doubled}


def _scaled(m: Any) -> dict[str, Any]:
    """Whether the loss is a sum, or a multiple of the likelihood, and what the temperature is over the posterior's."""
    if not m.doubled:
        return {}
    data, temperature, (doubled, error) = m.data, max(m.temperatures.values()), m.doubled
    is_sum = abs(doubled - 1) > max(1e-3, error)
    seen = None if m.known is None else data.times_likelihood(m.one, m.known, is_sum)
    factor, left = seen or (1.0, 0.0)
    right = factor / (1 if is_sum else data.n)
    m.numbers |= {"loss of a batch twice / once": doubled, "data N": float(data.n)}
    if seen is not None:
        m.numbers |= {"loss / - log likelihood": factor, "  share of it that is no multiple": left}
    if factor > 0 and left <= UNLIKE:
        m.numbers["temperature / the posterior's"] = temperature / right / m.wanted
    off = abs(math.log(temperature / max(right, 1e-300) / m.wanted))
    tokens = "" if is_sum or not data.is_guess else (
        f"{data.n} data were counted along the first axis, and the batches hold whole numbers of several dimensions: where "
        "the loss is a mean over tokens, pass their number as data_size=. "
    )  # fmt: skip
    if not is_sum and seen is None:
        product = hessian_product(data.loss, m.one, data.batches, max_batches=8)
        if (ratio := data.noise_over_curvature(m.one, product)) is not None:
            m.numbers["tr Cov(gradient) / tr H"] = ratio
    what = f"{'sum over' if is_sum else 'mean of'} {data.n} data"
    return {
        "is_compared": seen is not None,
        "left": left,
        "factor": factor,
        "is_sum": is_sum,
        "counted": len(data.batches),
        "off": off,
        "temperature": temperature,
        "times": temperature / max(right, 1e-300),
        "right": right,
        "tokens": tokens,
        "what": f"a {what}" if seen is None else f"{factor:.4g} times the likelihood's {what}",
        "other": "; for a loss that is already multiplied by N pass posterior_temperature=N" if seen is None else "",
    }


def _tempered(m: Any) -> dict[str, Any]:
    """The temperatures of the draws along directions and leaves, and the shares of loss and prior in them."""
    if not m.levels or m.count < 4:
        return {}
    directions, leaves, of_data, in_prior = _virials(m)
    hot, cold = _hot_and_cold(directions, leaves, m.numbers)
    rises = "burn-in" in m.kinds and not m.falls  # which is what heat does
    is_moving = m.falls or m.is_untold or (not rises and (m.drifts or "short" in m.kinds))
    flat = [name for name, x in of_data.items() if float(x.abs().max()) < 1e-12]
    far = {name: float(x.mean().clamp(min=0)) ** 0.5 for name, x in in_prior.items()}
    m.numbers |= {f"draws in prior standard deviations, {name}": x for name, x in far.items() if x > 0}
    slack = list[str]()
    for name in leaves.keys() - flat:
        can = 1.0 if m.data.n is None else min(1.0, m.data.n / m.leaves[name].size)  # N data determine N numbers
        value, error = mean_and_error(of_data[name])
        if value + PATIENT[0] * error < DATA * can and float(leaves[name].mean()) > 0.5:
            slack.append(name)
    farthest = max(far, key=lambda name: far[name])
    return {
        "directions": len(directions),
        "is_moving": is_moving,
        "hot": hot if not is_moving else "",
        "cold": cold if is_moving or not hot else "",
        "flat": _listing(flat),
        "farthest": farthest,
        "far": far[farthest],
        "slack": _listing(sorted(slack)),
    }


def _hot_and_cold(
    directions: dict[str, Tensor], leaves: dict[str, Tensor], numbers: dict[str, float]
) -> tuple[str, str]:
    """Where virials, which are divided by the temperature asked for, are farthest above and below 1, in words."""
    hot, cold = list[tuple[float, str]](), list[tuple[float, str]]()
    sure = PATIENT[1] + 0.35 * math.log(len(directions))  # one in a hundred for all of them together
    for where, series in {**directions, **leaves}.items():
        value, error = mean_and_error(series)
        if where.startswith("stiffest direction"):
            # a Gaussian virial is the square of a normal number, of variance 2: a few small ones have a small spread
            error = max(error, COLD * (2 / effective(series)) ** 0.5)
        numbers |= {f"temperature, {where}": value, f"  its standard error, {where}": error}
        says = f"along {where} they have {value:.2f} +- {error:.2f} times the configurational temperature asked for"
        if value - (sure if where in directions else PATIENT[0]) * error > 1 + HOT:
            hot.append((value, says))
        elif where in directions and value + sure * error < (COLD_ALL if where == "all parameters" else COLD):
            cold.append((value, says))
    return max(hot)[1] if hot else "", min(cold)[1] if cold else ""


def _virials(m: Any) -> tuple[dict[str, Tensor], ...]:
    """Virials over the temperature, ``[draws, chains]``: along directions, by leaf, of the loss, and of the prior."""
    chosen = m.draws[:: max(1, math.ceil(len(m.draws) / MOST_DRAWS))]
    trees = [[_chain(draw, m.draws.chains, c) for c in range(m.n)] for draw in chosen]
    names = names_of(trees[0][0])
    where = sorted(names.index(name) for name in m.levels)
    levels = {names[j]: m.levels[names[j]] for j in where}
    sizes = [m.leaves[name].size for name in levels]
    # in these units every leaf has temperature 1
    root = torch.tensor([*levels.values()], dtype=torch.float64, device="cpu").sqrt()
    root = root.repeat_interleave(torch.tensor(sizes, device="cpu"))

    def flat(leaves: Sequence[Any]) -> Tensor:
        return torch.cat([leaves[j].detach().double().cpu().reshape(-1) for j in where]) / root

    def by_leaf(x: Tensor) -> Tensor:
        return torch.stack([part.mean() for part in x.split(sizes)])

    stiff = _stiffest(m, trees[-1][0], where)
    each = [flat(optree.tree_leaves(tree, none_is_leaf=True)) for row in trees for tree in row]
    theta = torch.stack(each).unflatten(0, (len(trees), m.n))
    pooled = m.of is None and "modes" not in m.kinds
    half, rows = len(trees) // 2, list[Tensor]()
    for k, row in enumerate(trees):
        others = theta[half:] if k < half else theta[:half]
        for c, params in enumerate(row):
            own = m.data.gradients(params)
            a = theta[k, c] - (others.mean((0, 1)) if pooled else others[:, c].mean(0))
            f, g = flat(m.force(params, own)), flat(own)
            ahead = torch.stack([a @ f / len(a), *[(u @ a) * (u @ f) for u in stiff]])
            rows.append(torch.cat([ahead, *[by_leaf(x) for x in (a * f, a * g, (f - g) * theta[k, c])]]))
    along = ["all parameters", *[f"stiffest direction {i + 1}" for i in range(len(stiff))]]
    named = (along, levels, levels, levels)
    found = torch.stack(rows).reshape(len(trees), m.n, -1).split([len(names) for names in named], -1)
    return tuple({n: x[..., i] for i, n in enumerate(names)} for names, x in zip(named, found))


def _stiffest(m: Any, params: Any, where: Sequence[int]) -> list[Tensor]:
    """Eigenvectors of the Hessian's largest eigenvalues at a draw, of leaves that move; none without a finite Hessian."""
    product = hessian_product(m.data.loss, params, m.data.batches, max_batches=8)
    leaves, spec = optree.tree_flatten(params)
    moves = flatten(spec.unflatten([torch.full_like(x, float(j in where)) for j, x in enumerate(leaves)]), params)

    def along(v: Tensor) -> Tensor:
        return moves * flatten(product(unflatten(moves * v, params)), params)

    try:
        values, vectors = lanczos(along, moves, min(DIRECTIONS, int(moves.sum())), max_products=25)
    except (RuntimeError, ValueError):  # a product that is NaN, an operation without second derivative, no memory
        return []
    return [u[moves > 0].double().cpu() for k, u in zip(values, vectors) if k > 1e-6 * values.abs().max()]


def _listing(names: Iterable[str]) -> str:
    """The first four."""
    return ", ".join(itertools.islice(names, 4))


def _has_grown(losses: Tensor) -> bool:
    """Whether the loss ends many times its first spread above where it began, and grows faster and faster.

    A chain that leaves a mode grows ever more slowly, one that diverges by a factor a step.
    """
    if len(losses) < 4:
        return False
    first, *between, last = losses.tensor_split(4)
    middle, spread = torch.cat(between).mean(), float(first.std()) if first.numel() > 1 else 0.0
    grown, spread = float(last.mean() - first.mean()), max(spread, 1e-3 * float(first.abs().mean()))
    is_faster = last.mean() - middle > SPEEDING * (middle - first.mean())
    return float(last.min()) > float(first.max()) and grown > GROWTH * spread and bool(is_faster)


def _looked_at(draws: Draws, name: str, chains: int, stride: int) -> SimpleNamespace:
    """Read a column of the draws once, some draws at a time: its number of elements in one chain, whether all are finite,
    whether a draw repeats the one before it ``[draws - 1, chains]``, and some elements ``[draws, chains, elements]``."""
    step, size, is_finite = draws.at_once(), 0, True
    repeats, some, last = list[Tensor](), list[Tensor](), None
    for low in range(0, len(draws), step):
        x = draws.column(name, slice(low, low + step))
        x = x.reshape(len(x), chains, -1)
        joined = x if last is None else torch.cat([last, x])
        repeats.append((joined[1:] == joined[:-1]).all(-1))
        some.append(x[..., ::stride].double())
        size, last, is_finite = x.shape[-1], x[-1:], is_finite and bool(torch.isfinite(x).all())
    return SimpleNamespace(size=size, is_finite=is_finite, repeats=torch.cat(repeats), some=torch.cat(some))


def _chain(draw: Any, chains: int | None, c: int) -> Any:
    """The parameters of one chain."""
    return draw if chains is None else optree.tree_map(lambda x: x[c], draw)


def _forces(draws: Draws, tx: Any, temperature: float | None) -> tuple[dict[str, float], Any]:
    """Temperatures and forces of the chain, by its schedule at the last draw."""
    return forces_of(tx, _chain(draws[len(draws) - 1], draws.chains, 0), temperature, int(draws.steps[-1]) - 1)


LOOK = "bc.make_step(..., check_finite=True) names the step and leaf; bc.skip_nonfinite(tx) leaves bad batches out."
SAME_NOISE = (
    "Chains {pair[0]} and {pair[1]} move by the same noise (correlation {correlation:.3f} of what is new in each draw{lag}): "
    "they do not count as two, and R-hat and effective draws mean nothing.",
    "Give every chain its own key, as bc.parallel does; one seed from several starts, or a copy, is one chain.",
)
LENGTHEN = "Lengthen burn_in until it does not; draws from before lie where the chain started, not where it samples."
LONGER = "Run longer, with a longer burn-in, a larger lr or momentum, or a preconditioner."
UNSEEN_SCALE = (
    "Not seen: the scale of the loss, beyond that it is no sum over its batch. A multiple of the mean, such as N times it, "
    "looks like a sharper likelihood; pass forward= and likelihood= to have it compared. tr Cov(gradient) / tr H, which is "
    "shown where it could be read, is near 1 at the mode of a calibrated loss; where it is far from 1, either the noise scale "
    "is off, or the loss is multiplied, or the draw is far from the mode."
)

# What is measured, and the findings that follow from it and from what was measured before. The first of a kind is reported, of
# those that name leaves all; where nothing could be measured none is.
QUESTIONS: tuple[tuple[Callable[[Any], dict[str, Any]], tuple[Row, ...]], ...] = (
    (lambda m: {"because": f": {m.why}" if m.why else ""}, (
        Row(UNSEEN, lambda m: m.n == 1, "Not seen: other modes. One chain cannot show them; run several."),
        Row("diverged", lambda m: not m.count and "loss" in m.why, "The run has no draws{because}.",
            "Lower lr by ten, or look for NaN in the data."),
        Row("short", lambda m: not m.count and not m.kinds, "The run has no draws{because}.", "Run longer."),
    )),
    # is it finite
    (_finite, (
        Row("nonfinite", lambda m: m.bad, "Draws of {bad} hold NaN or infinity.", LOOK),
        Row("nonfinite", lambda m: m.is_level, "The run stopped: {why}, and nothing before it grew.", LOOK),
        Row("diverged", lambda m: m.runs_away, "The run diverged: {how}.",
            "Lower lr; bc.suggest_lr gives one that is stable."),
        Row("nonfinite", lambda m: m.missing and not m.runs_away,
            "The losses of {missing} of {count} draws are not finite.", LOOK),
    )),
    # and does it move
    (_moving, (
        Row("dead", lambda m: m.idle, "{idle} did not move in {count} draws.",
            "It gets neither gradient nor noise: look at masks and partitions, lr, and bfloat16 parameters."),
        Row("dead", lambda m: m.halted, "Chain {chain} stood still for {halted} draws in a row, bit for bit.",
            "It lost its noise, or its step was skipped: look at its gradients and at what was written at those steps."),
    )),
    # do the chains agree
    (_shared, (
        Row("nonfinite", lambda m: m.strange, "What of= gives is NaN or infinite at {strange} of {count} draws.",
            "Look at the function of= at these draws, whose parameters are finite."),
        Row(UNSEEN, lambda m: m.of and not m.strange and not m.values.shape[-1],
            "Not seen: whether the chains agree, since what of= gives is the same at every draw, or empty."),
        Row("duplicate", lambda m: m.correlation > COPY, *SAME_NOISE),
        Row("together", lambda m: 0 < m.correlation <= COPY, *SAME_NOISE),
        Row("short", lambda m: m.count < 8, "{count} draws are too few to tell whether they mix.",
            "Run longer, or thin less."),
    )),
    (_agreeing, ()),
    # is it at rest; a drift explains a large R-hat
    (_resting, (
        Row("burn-in", lambda m: m.loss_drifts,
            "The loss still moves: it {loss_moved} standard deviations from the first to the last third, by chance with "
            "probability {loss_by_chance:.1g}.", LENGTHEN),
        Row("burn-in", lambda m: m.above > FIRST,
            "The loss falls at first: the first draws lie {above:.3g} standard deviations above the second half's.", LENGTHEN),
        Row("mixing", lambda m: m.drifts and "burn-in" not in m.kinds,  # which is the same fault, seen in the loss
            "The draws drift: from the first to the last third a number moves by {drifted:.2f} standard deviations in all "
            "chains alike, by chance with probability {by_chance:.1g}.",
            "Run longer, and lengthen burn_in until it stops; look whether lr, temperature or data change on the way."),
        Row("modes", lambda m: m.differ and m.is_settled,
            "The chains are in different modes: R-hat {r_hat:.2f} between them, and none within a chain.",
            "Average predictions over all chains, or cross between modes.{network}"),
        Row("mixing", lambda m: m.differ and not m.is_settled,
            "The draws have not mixed: R-hat {r_hat:.2f}, by chance with probability {chance:.1g}.", LONGER),
        Row("short", lambda m: not m.differ and m.least < FEW * m.n,
            "The slowest number has about {least:.0f} independent draws.", "Run longer."),
        Row("mixing", lambda m: not m.differ and m.least >= FEW * m.n and m.count >= 16 and m.untold > LARGE,
            "The draws have not mixed: R-hat {untold:.2f}, with too few independent draws to tell it from chance.", LONGER),
    )),
    (_shown, (
        Row(UNSEEN, lambda m: not m.is_asked,
            "Not looked at: scale and temperature, which need tx=, loss= and batches=."),
        Row(UNSEEN, lambda m: m.is_asked and m.data is None,
            "Not told: scale and temperature, since tx gives no leaf noise of a temperature above 0 that could be read; where "
            "it is a sampler of another kind, pass temperature=."),
        Row("nonfinite", lambda m: m.data is not None and not m.data.is_finite, "The loss at the last draw is NaN or infinite.",
            "Look for NaN in the data."),
        Row(UNSEEN, lambda m: m.data is not None and m.data.is_finite and not m.doubled,
            "Not seen: whether loss and temperature have the scale of a posterior, since the data could not be counted or the "
            "loss does not take a batch twice; data_size= gives their number."),
    )),
    # has the loss its scale
    (_scaled, (
        Row(UNSEEN, lambda m: m.known and not m.is_compared,
            "Not told: the loss against the likelihood, which has one value on all data, or NaN."),
        Row(UNSEEN, lambda m: m.tokens and m.off <= math.log(OFF), "Taken for granted: {tokens}"),
        Row(UNSEEN, lambda m: not m.is_sum and not m.is_compared, UNSEEN_SCALE),
        Row("scale", lambda m: m.left > UNLIKE or not m.factor > 0,
            "The loss is no multiple of -likelihood.log_prob(...): {left:.0%} of how it differs between data is not.",
            "Pass the likelihood that the loss is of, or take the loss from this one."),
        Row("scale", lambda m: m.is_sum and m.counted > 1,
            "The loss is a sum over its batch: it counts {counted} times too few data on minibatches.",
            "Take the mean over the batch and temperature = 1/N. If every step of the run took all data, pass them here as one "
            "batch."),
        Row("scale", lambda m: m.off > math.log(OFF),
            "The chain runs at T = {temperature:.3g}, {times:.3g} times that of the posterior: the loss is {what}, for which "
            "it is {right:.4g}.",
            "{tokens}Set temperature={right:.4g}. Where another one is meant pass posterior_temperature={times:.3g}{other}."),
    )),
    # has it the temperature
    (lambda m: {"levels": {k: x for k, x in m.temperatures.items() if m.data and k not in m.still and m.leaves[k].size}}, (
        Row(UNSEEN, lambda m: m.data,
            "Not seen: whether a prior that is written into the loss has the strength that was meant."),
        Row(UNSEEN, lambda m: m.data and m.count < 4,
            "Not told: the temperature of the draws, which takes four of them at least."),
    )),
    (_tempered, (
        Row(UNSEEN, lambda m: m.directions == 1,
            "Not seen: the temperature along the stiffest directions: the loss has no finite Hessian at the draws."),
        Row(UNSEEN, lambda m: m.is_moving, "Not told: whether the draws are too hot, since they are still on their way."),
        Row("heated", lambda m: m.hot, "The draws are too hot: {hot}.",
            "Minibatches heat the chain, or lr is too large for the curvature at the draws. Lower lr, or larger batches."),
        Row("cold", lambda m: m.cold, "The draws have not spread out: {cold}.",
            "Run longer or with a larger lr. A chain that starts at the mode needs several relaxations to leave it."),
        Row("dead", lambda m: m.flat, "The loss does not depend on {flat}: its gradient is zero at every draw.",
            "A parameter that the model does not use samples its prior, or wanders off without one."),
        Row("prior", lambda m: m.far > FAR,
            "Draws of {farthest} lie {far:.1f} standard deviations of the weight decay's prior from zero.",
            "Data and prior disagree: a standard deviation s is weight_decay = T / s^2, or 1 / (N s^2) at T = 1 / N."),
        Row("prior", lambda m: m.slack,
            f"The prior dominates {{slack}}: the data contribute less than {DATA:.0%} of its pull.",
            "Right if it was meant; else lower weight_decay (prior precision lambda: lambda / N)."),
    )),
)  # fmt: skip
