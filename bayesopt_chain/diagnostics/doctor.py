"""Can this run be trusted, and what to change if not: one page in words, one figure.

Every finding rests on a number that is shown, and on a threshold that a healthy run passes: R-hat above 1.1 (Gelman and Rubin,
1992), an excess of temperature above 10 % by three standard errors, draws that are not finite or do not move at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.diagnostics.convergence import ess, r_hat
from bayesopt_chain.diagnostics.heating import Heating
from bayesopt_chain.diagnostics.temperatures import MARGIN, Temperatures, Thermometer, temperatures

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

MIXED = 1.1  # R-hat above which a run is reported
HOT = 0.1  # excess of temperature above which a run is reported
GROWTH = 10.0  # by how much the loss, over its spread at first, must have grown to call a run diverging
DATA = 0.1  # share of the configurational temperature below which the loss does not determine a leaf
MOST = 1000  # elements of all leaves together that R-hat and ESS are computed for


class Finding(NamedTuple):
    """One fault of a run.

    Attributes:
        kind: nonfinite, diverged, heated, modes, mixing, dead, prior or short.
        says: what was seen, a sentence with its number.
        do: what to do about it, a sentence.
    """

    kind: str
    says: str
    do: str


class Diagnosis(NamedTuple):
    """What :func:`doctor` returns; ``print`` it.

    Attributes:
        findings: what is wrong, worst first; empty for a run that can be trusted.
        numbers: what was looked at, by name.
        traces: the series that :meth:`plot` draws, ``[draws, chains]`` each, by name.
        temperatures: those that were read, or ``None``.
    """

    findings: tuple[Finding, ...]
    numbers: dict[str, float]
    traces: dict[str, Tensor]
    temperatures: Temperatures | None

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
        from matplotlib.figure import Figure

        read = self.temperatures
        figure = Figure(figsize=(9, 3 * (len(self.traces) + (read is not None))), layout="constrained")
        axes = figure.subplots(len(self.traces) + (read is not None), 1, squeeze=False)[:, 0]
        for axis, (name, series) in zip(axes, self.traces.items()):
            axis.plot(series.cpu().numpy(), linewidth=0.8)
            axis.set(title=name, xlabel="draw")
        if read is not None:
            for marker, (label, part) in zip(
                "os", (("kinetic", read.kinetic), ("configurational", read.configurational))
            ):
                if part:
                    errors = [2 * e.standard_error if math.isfinite(e.standard_error) else 0.0 for e in part.values()]
                    values = [e.value for e in part.values()]
                    axes[-1].errorbar(list(part), values, errors, fmt=marker, label=label, capsize=3)
            axes[-1].axhline(1.0, linewidth=0.8)
            axes[-1].set(title="temperature over the one asked for")
            axes[-1].tick_params(axis="x", rotation=30)
            axes[-1].legend()
        return figure


def doctor(
    draws: Draws,
    tx: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batches: Iterable[Any] | None = None,
    *,
    thermometer: Thermometer | None = None,
    heating: Heating | None = None,
    of: Callable[[Any], Tensor] | None = None,
) -> Diagnosis:
    """Look at a run and name what is wrong with it.

    The more it is given the more it sees: from draws alone whether they are finite, move and mix; with ``tx``, ``loss`` and
    ``batches`` (all data; gone through once for each draw) the configurational temperature and leaves that the loss does not
    determine; with a thermometer or an audit what the minibatches do.

    Args:
        draws: of :func:`bayesopt_chain.sample`, with several chains if at all possible.
        tx: the chain.
        loss: as the step had it.
        batches: as :func:`temperatures` takes them.
        thermometer: the callback that watched the run.
        heating: what :func:`bayesopt_chain.diagnostics.heating` predicted.
        of: what must have mixed, a function of one draw of one chain, such as predictions at some inputs. The weights of a
            network never mix, since its units can be exchanged; what it says can. Default: the parameters (a selection where
            there are many).

    Returns:
        :class:`Diagnosis`; ``print`` it, or ``.plot().savefig(...)``.

    Raises:
        ValueError: no draws, or ``loss`` without ``tx`` and ``batches``.

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
    if not len(draws):
        return Diagnosis((_no_draws(draws),), {"draws": 0.0}, {}, None)
    if loss is not None and (tx is None or batches is None):
        raise ValueError("doctor: with loss= it needs tx= and batches= as well")
    numbers, traces = {"draws": float(len(draws)), "chains": float(draws.chains or 1)}, dict[str, Tensor]()
    losses = _losses(draws)
    if losses is not None:
        traces["loss"] = losses
    findings = [*_broken(draws, losses, numbers)]
    read: Temperatures | None = None
    if not findings:
        values = _watched(draws, of)
        findings += _dead(draws)
        findings += _unmixed(values, numbers, traces)
        if thermometer is not None or loss is not None:
            if loss is not None and len(draws) >= 4:
                read = temperatures(draws, tx, loss, batches, thermometer=thermometer)
            elif thermometer is not None:
                read = temperatures(thermometer=thermometer)
            if read is not None:
                findings += _hot(read, thermometer, {f.kind for f in findings})
                findings += _loose(read)
        findings += _audited(heating)
    return Diagnosis(tuple(findings), numbers, traces, read)


def _no_draws(draws: Draws) -> Finding:
    if "loss" in draws.why:
        return Finding(
            "diverged", f"The run has no draws: {draws.why}.", "Lower lr by ten, or look for NaN in the data."
        )
    return Finding("short", f"The run has no draws{': ' + draws.why if draws.why else ''}.", "Run longer.")


def _losses(draws: Draws) -> Tensor | None:
    try:
        x = draws.loss.double()
    except KeyError:
        return None
    return x[:, None] if x.ndim == 1 else x


def _broken(draws: Draws, losses: Tensor | None, numbers: dict[str, float]) -> list[Finding]:
    """Numbers that are not finite, and runs that ran away."""
    out: list[Finding] = []
    bad = [name for name, x in _named(draws) if not bool(torch.isfinite(x).all())]
    if bad:
        out.append(
            Finding(
                "nonfinite",
                f"Draws of {', '.join(bad[:4])} hold NaN or infinity.",
                "bc.make_step(..., check_finite=True) names the step and leaf; bc.skip_nonfinite(tx) leaves bad batches out.",
            )
        )
    stopped = "the loss of step" in draws.why
    if stopped and losses is not None and len(losses) >= 4 and not _exploded(losses):
        out.append(
            Finding(
                "nonfinite",
                f"The run stopped: {draws.why}, and nothing before it grew.",
                "Look for NaN in the data or the loss: bc.make_step(..., check_finite=True) names the step and leaf.",
            )
        )
    elif stopped or _grown(losses):
        says = draws.why if stopped else "the loss grows without end"
        out.append(
            Finding("diverged", f"The run diverged: {says}.", "Lower lr; bc.suggest_lr gives one that is stable.")
        )
    if losses is not None:
        numbers["loss, last quarter"] = float(losses[-max(1, len(losses) // 4) :].mean())
    return out


def _exploded(losses: Tensor) -> bool:
    """Whether the last loss is many times what it was at first."""
    return float(losses[-1].abs().max()) > GROWTH * float(losses[: len(losses) // 4].abs().max())


def _grown(losses: Tensor | None) -> bool:
    """Whether the loss ends many times its first spread above where it began."""
    if losses is None or len(losses) < 4 or not bool(torch.isfinite(losses).all()):
        return losses is not None and not bool(torch.isfinite(losses).all())
    quarter = len(losses) // 4
    first, last = losses[:quarter], losses[-quarter:]
    spread = float(first.std()) if first.numel() > 1 else 0.0
    rises = float(last.min()) > float(first.max())
    return rises and float(last.mean() - first.mean()) > GROWTH * max(spread, 1e-3 * float(first.abs().mean()))


def _dead(draws: Draws) -> list[Finding]:
    """Leaves whose draws are all one."""
    still = [name for name, x in _named(draws) if len(x) > 1 and x.numel() and bool((x == x[:1]).all())]
    if not still:
        return []
    return [
        Finding(
            "dead",
            f"{', '.join(still[:4])} did not move in {len(draws)} draws.",
            "It gets neither gradient nor noise: look at masks and partitions, lr, and bfloat16 parameters.",
        )
    ]


def _watched(draws: Draws, of: Callable[[Any], Tensor] | None) -> Tensor:
    """What must have mixed, ``[draws, chains, elements]``."""
    n = draws.chains or 1
    if of is not None:
        rows = []
        for draw in draws:
            each = [draw] if draws.chains is None else [optree.tree_map(lambda x, i=i: x[i], draw) for i in range(n)]
            rows.append(torch.stack([of(params).detach().reshape(-1) for params in each]))
        return torch.stack(rows).double()
    columns = [x.double().reshape(len(draws), n, -1) for _, x in _named(draws)]
    total = sum(x.shape[-1] for x in columns)
    stride = max(1, math.ceil(total / MOST))
    return torch.cat([x[..., ::stride] for x in columns], -1)


def _unmixed(values: Tensor, numbers: dict[str, float], traces: dict[str, Tensor]) -> list[Finding]:
    """Chains that disagree with each other, or each with itself."""
    if len(values) < 8:
        return [
            Finding("short", f"{len(values)} draws are too few to tell whether they mix.", "Run longer, or thin less.")
        ]
    moving = values[..., (values != values[:1]).any(0).any(0)]
    if not moving.shape[-1]:
        return []
    whole = torch.nan_to_num(r_hat(moving), nan=1.0)
    worst = int(whole.argmax())
    series = moving[..., worst]
    traces["what mixed least"] = series
    numbers["R-hat, worst"] = float(whole[worst])
    numbers["ESS, least"] = float(torch.nan_to_num(ess(moving), nan=math.inf).amin())
    if float(whole[worst]) <= MIXED:
        return []
    alone = [float(torch.nan_to_num(r_hat(series[:, [c], None]), nan=1.0)) for c in range(series.shape[1])]
    if series.shape[1] > 1 and max(alone) <= MIXED:
        return [
            Finding(
                "modes",
                f"The chains are in different modes: R-hat {float(whole[worst]):.2f}, in one chain at most {max(alone):.2f}.",
                "Average predictions over all chains; or cross between modes: bc.samplers.cyclical, replica exchange. For a "
                "network pass of=predictions, since its weights have many equal modes.",
            )
        ]
    return [
        Finding(
            "mixing",
            f"The draws have not mixed: R-hat {float(whole[worst]):.2f} (below {MIXED} wanted).",
            "Run longer, with a longer burn-in, a larger lr or momentum, or a preconditioner.",
        )
    ]


def _hot(read: Temperatures, thermometer: Thermometer | None, known: set[str]) -> list[Finding]:
    """An excess of temperature that is no accident: that of the parameters, and for independent batches that of the steps."""
    kinds: list[tuple[str, Any]] = []
    if not known & {"mixing", "modes"}:
        kinds.append(("configurational", read.configurational))
    if thermometer is not None and thermometer.order == "independent" and "mixing" not in known:  # a drift reads hot
        kinds.append(("kinetic", read.kinetic))
    for kind, part in kinds:
        sure = [(n, e) for n, e in part.items() if e.value - MARGIN * e.standard_error > 1 + HOT]
        if sure:
            name, e = max(sure, key=lambda item: item[1].value)
            return [
                Finding(
                    "heated",
                    f"The minibatches heat the chain: the {kind} temperature of {name} is {e} times the one asked for.",
                    "Lower lr, enlarge the batch, or take bc.epochs(order='palindrome') or bc.gradients.svrg; "
                    "bc.diagnostics.heating predicts what each of these leaves.",
                )
            ]
    return []


def _loose(read: Temperatures) -> list[Finding]:
    """Leaves on which the loss hardly depends."""
    out: list[Finding] = []
    flat = [n for n, e in read.data.items() if abs(e.value) < 1e-12 and e.standard_error < 1e-12]
    if flat:
        out.append(
            Finding(
                "dead",
                f"The loss does not depend on {', '.join(flat[:4])}: its gradient is zero at every draw.",
                "A dead unit, or a parameter the model does not use: it samples its prior, or wanders off without one.",
            )
        )
    slack = [
        n
        for n, e in read.data.items()
        if n not in flat and e.value + MARGIN * e.standard_error < DATA and read.configurational[n].value > 0.5
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


def _audited(heating: Heating | None) -> list[Finding]:
    if heating is None or heating.worst <= HOT:
        return []
    return [
        Finding(
            "heated",
            f"The audit predicts that {heating.order} batches add {heating.worst:.0%} to the variance of the worst direction.",
            "Lower lr, enlarge the batch, or take bc.epochs(order='palindrome') or bc.gradients.svrg.",
        )
    ]


def _named(draws: Draws) -> Sequence[tuple[str, Tensor]]:
    """Every leaf with its path."""
    paths, leaves, _ = optree.tree_flatten_with_path(draws.params)
    return [("/".join(map(str, path)) or "tensor", x) for path, x in zip(paths, leaves)]
