"""What the call did, stage by stage, why, what it cost and what would help: to be printed, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bayesopt_chain.checks import installed

CAVEAT = (
    "Draws of a short run at T > 0 are an ensemble around each mode, not an equilibrated posterior, unless "
    "bc.diagnostics.doctor agrees."
)


@dataclass(frozen=True)
class Report:
    """What :func:`bayesopt_chain.posterior_ensemble` did; ``print`` it.

    Attributes:
        method: the road taken.
        chosen: what every argument came to, by name.
        said: one sentence for each stage, in order.
        passes: what each stage cost, in gradients of all data for each member.
        training: the passes of one plain training of the members, to compare with.
        levels: of each level of the mixture its temperature in units of ``1 / N``, its weight, its mean excess loss above the
            mode and ``T P / (2 N)``, in nats a datum.
        held_out: mean held-out log score by what is predicted with, in nats a datum.
        checkpoints: mean held-out log score of each checkpoint, by its step.
        scale: the factor on the noise's variance or the logits.
        advice: what would help, by name.

    Example:
        >>> from bayesopt_chain.ensemble import Report
        >>> report = Report("ensemble", {"steps": 100}, ["trained"], {"pilot": 0.85}, 1.0)
        >>> round(report.cost, 2)
        0.85
    """

    method: str
    chosen: dict[str, Any]
    said: list[str]
    passes: dict[str, float]
    training: float
    levels: list[dict[str, float]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)
    checkpoints: dict[int, float] = field(default_factory=dict)
    scale: float = 1.0
    advice: dict[str, str] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """All passes, in units of one plain training of the members."""
        return sum(self.passes.values()) / self.training

    def __str__(self) -> str:
        lines = [f"Posterior ensemble by {self.method}.", ""]
        lines += ["Chosen: " + ", ".join(f"{k}={_short(v)}" for k, v in self.chosen.items()), ""]
        lines += [f"* {sentence}" for sentence in self.said]
        if self.levels:
            lines += ["", f"  {'T':>6} {'weight':>8} {'excess loss':>12} {'T P / 2 N':>10}"]
            lines += [
                f"  {x['temperature']:>6.2g} {x['weight']:>8.3f} {x['excess']:>12.3g} {x['expected']:>10.3g}"
                for x in self.levels
            ]
        if self.held_out:
            lines += ["", "Held-out log score, nats a datum:"]
            lines += [f"  {name:<28} {value:.4f}" for name, value in self.held_out.items()]
        lines += ["", f"Cost: {self.cost:.2f} times one training of the members ("]
        lines[-1] += ", ".join(f"{name} {value / self.training:.2f}" for name, value in self.passes.items()) + ")"
        lines += [f"Advice ({name}): {text}" for name, text in self.advice.items()]
        if len(self.levels) > 1:
            lines += [CAVEAT]
        return "\n".join(lines)

    def plot(self) -> Any:
        """Draw held-out scores over the training, the weights of the levels, and the cost of the stages (needs matplotlib).

        Returns:
            A ``matplotlib.figure.Figure``, to be saved or shown.

        Example:
            >>> from bayesopt_chain.ensemble import Report
            >>> len(Report("ensemble", {}, [], {"pilot": 1.0}, 1.0).plot().axes)
            3
        """
        installed("plot", "plot", "matplotlib")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.2), layout="constrained")
        scores, levels, cost = figure.subplots(1, 3)
        scores.plot(list(self.checkpoints), list(self.checkpoints.values()), marker="o")
        scores.set(title="held-out log score of the pilots", xlabel="step", ylabel="nats a datum")
        names = [f"T = {x['temperature']:g} / N" if x["temperature"] else "mode" for x in self.levels]
        levels.bar(names, [x["weight"] for x in self.levels])
        levels.set(title="weight of each level", ylim=(0, 1))
        cost.barh(list(self.passes), [x / self.training for x in self.passes.values()])
        cost.set(title=f"cost: {self.cost:.2f} trainings")
        return figure


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
