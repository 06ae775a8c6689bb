"""Can this run be trusted, and what to change first if not: one page in words, one figure.

Every finding rests on a number that is shown, and is made only where chance does not explain it: the draws' agreement by an
F-test that knows their autocorrelation (:mod:`bayesopt_chain.diagnostics._agreement`), their temperature by the virial theorem
along the directions that mix first (:mod:`bayesopt_chain.diagnostics._against_loss`), the scale of the loss exactly.

What cannot be seen: a prior written into the loss with another strength than meant, which is simply another posterior, and
modes that no chain has visited. A declared ``prior_sd`` is compared from one side only: draws of a leaf that lie several of
these from zero are reported. Draws that are narrower are what data do as well as too strong a prior, and which of the two it
was needs the curvature of the likelihood without its prior. So that side is judged only where the prior is weight decay, whose
strength is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.checks import installed, short
from bayesopt_chain.diagnostics import _against_loss, _findings
from bayesopt_chain.diagnostics._findings import RANK, Finding
from bayesopt_chain.diagnostics._seeds import initialised_devices
from bayesopt_chain.diagnostics.gradient_noise import scalar
from bayesopt_chain.diagnostics.heating import Heating
from bayesopt_chain.diagnostics.temperatures import (
    Estimate,
    Forces,
    Temperatures,
    estimate,
    forces_of,
)
from bayesopt_chain.trees import paths_of

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

HOT = 0.1  # excess of temperature above which a run is reported
PRIOR_UNSEEN = (
    "Not seen: whether a prior that is written into the loss has the strength that was meant; one that is too strong or "
    "too weak is another posterior, sampled well."
)
PRIOR_HALF_SEEN = (
    "Half seen: prior_sd tells of draws much wider than it; draws that are narrower, as too strong a prior in the loss makes "
    "them, look like those that the data have told much about, so that they are not reported."
)
UNTOLD = "Not told: the temperature of the draws, since they are still on their way."
NO_LOSS = "Not looked at: scale and temperature, which need tx=, loss= and batches=."
NO_TEMPERATURE = (
    "Not told: scale and temperature, since tx gives no leaf noise of a temperature above 0 that could be read; where it is a "
    "sampler of another kind, pass temperature=."
)
TOO_FEW = "Not told: the temperature of the draws, which takes four of them at least."
ONE_CHAIN = "Not seen: other modes. One chain cannot show them; run several from different starts."


class Diagnosis(NamedTuple):
    """What :func:`doctor` returns; ``print`` it.

    Attributes:
        findings: what is wrong, worst first; empty for a run that can be trusted.
        numbers: what was looked at, by name.
        traces: the series that :meth:`plot` draws, ``[draws, chains]`` each, by name.
        temperatures: those that were read, or ``None``.
        unseen: what could not be looked at or was taken for granted, a sentence each.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, float]
    traces: dict[str, Tensor]
    temperatures: Temperatures | None
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
        lines += ["", "What was looked at:", *(f"  {name:<28} {value:.4g}" for name, value in self.numbers.items())]
        if self.temperatures is not None:
            lines += ["", str(self.temperatures)]
        return "\n".join(lines)

    def plot(self) -> Any:
        """Draw the traces of all chains, and the temperatures of all leaves (needs matplotlib).

        Returns:
            A ``matplotlib.figure.Figure``, to be saved or shown.

        Example:
            >>> import torch
            >>> from bayesopt_chain.diagnostics import Diagnosis
            >>> len(Diagnosis((), {}, {"loss": torch.zeros(10, 2)}, None).plot().axes)
            1
        """
        installed("plot", "plot", "matplotlib")
        from matplotlib.figure import Figure

        read = self.temperatures
        rows = max(1, len(self.traces) + (read is not None))
        figure = Figure(figsize=(9, 3 * rows), layout="constrained")
        axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
        for axis, (name, series) in zip(axes, self.traces.items()):
            axis.plot(series.cpu().numpy(), linewidth=0.8)
            axis.set(title=name, xlabel="draw")
        if read is not None:
            part = read.configurational
            errors = [2 * e.standard_error if math.isfinite(e.standard_error) else 0.0 for e in part.values()]
            axes[-1].errorbar(list(part), [e.value for e in part.values()], errors, fmt="o", capsize=3)
            axes[-1].axhline(1.0, linewidth=0.8)
            axes[-1].set(title="temperature over the one asked for")
            axes[-1].tick_params(axis="x", rotation=30)
        return figure


@kinds.takes(
    draws=kinds.SAMPLED,
    tx=kinds.TX_OR_OPTIMIZER,
    batches=kinds.BATCH_OR_BATCHES,
    heating=kinds.instance(Heating, "a report of bc.diagnostics.heating, or None"),
    of=kinds.FUNCTION,
    mode=kinds.PLACE,
    temperature=kinds.POSITIVE,
    posterior_temperature=kinds.POSITIVE,
    data_size=kinds.WHOLE,
    prior_sd=kinds.Kind(
        lambda x: isinstance(x, Mapping) and all(map(kinds.POSITIVE.fits, x.values())),
        "a dictionary of positive numbers by the leaves' names",
    ),
    level=kinds.real("(0, 1)"),
    directions=kinds.WHOLE,
)
def doctor(
    draws: Draws,
    tx: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Iterable[Any] | None = None,
    *,
    heating: Heating | None = None,
    of: Callable[[Any], Tensor] | None = None,
    mode: Any = None,
    temperature: float | None = None,
    posterior_temperature: float = 1.0,
    data_size: int | None = None,
    prior_sd: Mapping[str, float] | None = None,
    level: float = 0.01,
    directions: int = 4,
) -> Diagnosis:
    """Look at a run and name what is wrong with it, what costs most first.

    Agreement of chains is judged on ranks (Gelman and Rubin, 1992; Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021)
    with an F-test; temperatures by the virial theorem.

    The more it is given the more it sees: from draws alone whether they are finite, different, move, mix and have left their
    start; with ``tx``, ``loss`` and ``batches`` whether loss and temperature have the scale of a posterior, the temperature of
    the draws, leaves that the loss or the prior does not determine; with an audit what the minibatches do.

    The state of random number generators is restored. The loss is called many times; what it writes stays written, such as the
    running statistics of a BatchNorm that is in training mode.

    Args:
        draws: of :func:`bayesopt_chain.sample`, with several chains if at all possible.
        tx: the chain, or the optimizer of :mod:`bayesopt_chain.optim`.
        loss: as the step had it.
        batches: all data, in batches, such as a list or a DataLoader; or all data as one batch: a tensor, a tuple with a tensor
            in it, or a dictionary. Gone through once for each of up to 60 draws of every chain.
        heating: what :func:`bayesopt_chain.diagnostics.heating` predicted.
        of: what must have mixed, a function of one draw of one chain, such as predictions at some inputs. The weights of a
            network never mix, since its units can be exchanged; what it says can. Default: the parameters (a selection where
            there are many).
        mode: the parameters at the minimum of the loss with its prior, to compare energies with.
        temperature: of the chain, where it cannot be read off ``tx``. One that follows a schedule is read at the last draw.
        posterior_temperature: the temperature meant, in units of the posterior's; other than 1 for tempered posteriors.
        data_size: the number of data that the loss is a mean over, as of tokens that are not ignored. Default: the length of
            the batches along axis 0.
        prior_sd: the standard deviation of the prior that was meant, by the path of the leaf (``"layer/weight"``), where the
            prior stands in the loss; leaves that are not named are not compared. Draws much wider than it are reported. Draws
            that are narrower are not, since data do that too; only weight decay that is stronger than declared is.
        level: probability at which chains that agree may be called different.
        directions: along how many of the stiffest directions the temperature is read.

    Returns:
        :class:`Diagnosis`; ``print`` it, or ``.plot().savefig(...)``.

    Raises:
        ValueError: ``loss`` without ``tx`` and ``batches``; batches without any, or that the loss cannot take; ``prior_sd`` of
            a leaf that is not in the draws; ``mode`` of other leaves than the draws.

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
    installed("doctor", "diagnostics", "arviz_stats", "scipy")
    with torch.random.fork_rng(devices=initialised_devices()):
        return _judged(
            draws, tx, loss, batches, heating, of, mode, temperature, directions, level,
            _Scale(posterior_temperature, data_size, prior_sd),
        )  # fmt: skip


def _judged(
    draws: Draws,
    tx: Any,
    loss: Callable[[Any, Any], Any] | None,
    batches: Iterable[Any] | None,
    heating: Heating | None,
    of: Callable[[Any], Tensor] | None,
    mode: Any,
    temperature: float | None,
    directions: int,
    level: float,
    scale: _Scale,
) -> Diagnosis:
    """What :func:`doctor` returns."""
    if not len(draws):
        return Diagnosis((_findings.no_draws(draws),), {"draws": 0.0}, {}, None)
    if loss is not None and (tx is None or batches is None):
        raise ValueError("doctor: with loss= it needs tx= and batches= as well")
    if draws.is_weighted:
        raise ValueError("doctor: these draws have weights, and it counts all the same; pass draws.equally_weighted()")
    known = dict(_findings.named(draws))
    if unknown := [name for name in scale.prior_sd or {} if name not in known]:
        raise ValueError(
            f"doctor: prior_sd names {', '.join(map(repr, unknown[:4]))}, and the draws have the leaves {', '.join(known)}"
        )
    numbers, traces = {"draws": float(len(draws)), "chains": float(draws.chains or 1)}, dict[str, Tensor]()
    losses = _findings.losses_of(draws)
    if losses is not None:
        traces["loss"] = losses
    if findings := _findings.broken(draws, losses, numbers):
        return Diagnosis(_ranked(findings), numbers, traces, None)
    values = _findings.watched(draws, of)
    findings = [*_findings.duplicates(draws), *_findings.together(values, numbers)]
    independent = not findings
    judge = _judge(draws, tx, temperature, is_needed=loss is not None)
    noiseless = (
        {name for name, _ in _findings.named(draws) if name not in judge.levels} if judge and judge.levels else set()
    )
    findings += _findings.immobile(draws, noiseless)
    drifts = _findings.drifting(values, numbers, level, independent)
    findings += [*drifts, *_findings.unmixed(values, numbers, traces, level, of is not None)]
    trend = _findings.unfinished(losses, numbers, level, independent)
    findings += trend.findings
    read = None
    unseen = [] if draws.chains and draws.chains > 1 else [ONE_CHAIN]
    if loss is None or batches is None or judge is None:
        unseen.append(NO_LOSS)
    elif not judge.levels:
        unseen.append(NO_TEMPERATURE)
    else:
        # the mean of chains in several modes is in none of them
        pooled = of is None and draws.chains is not None and "modes" not in {finding.kind for finding in findings}
        more, configurational, energy = _with_loss(
            draws, judge, loss, _listed(batches), numbers, unseen, pooled, mode, scale, directions
        )
        findings += more
        read = Temperatures(*configurational)
        if not trend.findings:
            trend = _findings.unfinished(energy, numbers, level, independent)
            findings += trend.findings
        unseen.append(PRIOR_HALF_SEEN if scale.prior_sd else PRIOR_UNSEEN)
    # Draws that are still on their way, or have hardly moved, have the temperature of their start. What they will have cannot
    # be told, and a lower rate is the last thing they need. Energy that rises is what heat does, so that heat is reported then,
    # unless the draws jumped so rarely that their spread is that of the jumps.
    kinds_found = {finding.kind for finding in findings}
    is_untold = trend.falls or (not trend.findings and bool(drifts or "short" in kinds_found))
    is_untold |= _findings.is_untold(numbers)
    if is_untold and "heated" in kinds_found:
        unseen.append(UNTOLD)
        findings = [finding for finding in findings if finding.kind != "heated"]
    if not trend.falls:
        findings += _audited(heating)
    if trend.findings:  # the same fault, seen in the energy
        findings = [finding for finding in findings if finding not in drifts]
    return Diagnosis(_ranked(findings), numbers, traces, read, tuple(unseen))


def _listed(batches: Any) -> list[Any]:
    """Batches as a list: a tensor, a dictionary and a tuple with tensors are all data in one batch."""
    is_batch = isinstance(batches, (Tensor, Mapping)) or (
        isinstance(batches, tuple) and any(isinstance(x, Tensor) for x in batches)
    )
    return [batches] if is_batch or not hasattr(batches, "__iter__") else list(batches)


def _ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What costs most first. Of each kind one finding; of those that name leaves, all."""
    first: dict[Any, Finding] = {}
    for finding in findings:
        first.setdefault(finding if finding.kind in ("dead", "prior") else finding.kind, finding)
    return tuple(sorted(first.values(), key=lambda finding: RANK.index(finding.kind)))


class _Scale(NamedTuple):
    """What was meant: the temperature in units of the posterior's, the number of data, the prior's standard deviations."""

    posterior_temperature: float
    data_size: int | None
    prior_sd: Mapping[str, float] | None


def _one(draws: Draws) -> Any:
    """The last draw of the first chain."""
    last = draws[len(draws) - 1]
    return last if draws.chains is None else optree.tree_map(lambda x: x[0], last)


def _judge(draws: Draws, tx: Any, temperature: float | None, *, is_needed: bool) -> Forces | None:
    """Temperatures and forces of the chain, by its schedule at the last draw; ``None`` without one."""
    try:
        step = int(draws.steps[-1]) - 1
    except KeyError:
        step = None
    try:
        return None if tx is None else forces_of(tx, _one(draws), temperature, step)
    except (TypeError, ValueError):  # it is asked for names of leaves alone, which an optimizer may lack
        if is_needed:
            raise
        return None


def _with_loss(
    draws: Draws,
    judge: Forces,
    loss: Callable[[Any, Any], Any],
    batches: list[Any],
    numbers: dict[str, float],
    unseen: list[str],
    pooled: bool,
    mode: Any,
    scale: _Scale,
    directions: int,
) -> tuple[list[Finding], tuple[dict[str, Estimate], dict[str, Estimate]], Tensor | None]:
    """What the loss adds: scale, temperatures, prior and energy.

    Returns:
        Findings; the configurational temperatures of the loss with the prior, and of the loss alone; the energy of each draw.
    """
    params = _one(draws)
    if not batches:
        raise ValueError("doctor: batches is empty")
    if mode is not None:
        _require_like(mode, params)
    for i, batch in enumerate(batches):
        try:
            with torch.no_grad():
                scalar(loss, params, batch)
        except Exception as err:
            raise ValueError(
                f"doctor: the loss cannot take batch {i + 1} of {len(batches)}, {short(batch)}: {err}. batches= takes all "
                "data as one batch, which is a tuple, a dictionary or a tensor, or a list or loader of batches"
            ) from err
    data = _against_loss.data_in(batches, scale.data_size)
    T = max(judge.levels.values())
    findings = _against_loss.off_scale(loss, params, data, T, scale.posterior_temperature, numbers, unseen)
    if len(draws) < 4:
        unseen.append(TOO_FEW)
        return findings, ({}, {}), None
    still = _findings.still_leaves(draws)
    if not judge.levels.keys() - still:
        return findings, ({}, {}), None
    found = _against_loss.readings(judge, draws, loss, data, still, unseen, directions=directions, pooled=pooled)
    findings += _against_loss.temperature(found, numbers)
    elements = {name: x.numel() for (name, _), x in zip(_findings.named(draws), optree.tree_leaves(params))}
    findings += _against_loss.prior(found, dict(_findings.named(draws)), elements, scale.prior_sd, data.n, numbers)
    if mode is not None:
        unit = sum(judge.levels[name] * elements[name] for name in found.leaves) / 2
        findings += _against_loss.energy(found, _against_loss.energy_at(judge, loss, mode, data), unit, numbers)
    configurational, of_data = ({k: estimate(x) for k, x in part.items()} for part in (found.leaves, found.data))
    return findings, (configurational, of_data), found.energy


def _require_like(mode: Any, params: Any) -> None:
    """Raise ValueError unless ``mode`` has the leaves of a draw."""
    shapes = [{p: tuple(x.shape) for p, x in zip(paths_of(tree), optree.tree_leaves(tree))} for tree in (mode, params)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"doctor: mode must have the leaves of one draw of one chain, {short(params)}, got {short(mode)}"
        )


def _audited(heating: Heating | None) -> list[Finding]:
    if heating is None or heating.worst <= HOT:
        return []
    return [
        Finding(
            "heated",
            f"The audit predicts that {heating.order} batches add {heating.worst:.0%} to the variance of the worst direction.",
            "Lower lr, enlarge the batch, or take all data.",
        )
    ]
