"""What the call did, why, what it cost and what would help: to be printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Report:
    """What :func:`bayesopt_chain.posterior_ensemble` did; ``print`` it.

    Attributes:
        kind: what came out, such as "ensemble of 4 networks".
        chosen: what every argument came to, by name.
        said: one sentence for each stage, in order.
        passes: what each stage cost, in gradients of all data for each member.
        training: the passes of one plain training of the members, to compare with.
        seconds: what the call took.
        held_out: mean held-out log score by what is predicted with, in nats a datum.
        scale: what logits are divided by, or noise scales are multiplied by.
        advice: what would help, by name.

    Example:
        >>> from bayesopt_chain.ensemble import Report
        >>> report = Report("ensemble of 4 networks", {"steps": 100}, ["trained"], {"training": 1.3}, 1.0)
        >>> report.cost
        1.3
    """

    kind: str
    chosen: dict[str, Any]
    said: list[str]
    passes: dict[str, float]
    training: float
    seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)
    scale: float = 1.0
    advice: dict[str, str] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """All passes, in units of one plain training of the members."""
        return sum(self.passes.values()) / self.training

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {value / self.training:.2f}" for name, value in self.passes.items())
        lines = [f"{self.kind[0].upper()}{self.kind[1:]}.", ""]
        lines += ["Chosen: " + ", ".join(f"{k}={_short(v)}" for k, v in self.chosen.items()), ""]
        lines += [f"* {sentence}" for sentence in self.said]
        lines += ["", "Held-out log score, nats a datum:"]
        lines += [f"  {name:<28} {value:.4f}" for name, value in self.held_out.items()]
        lines += [
            "",
            f"Cost: {sum(self.passes.values()):.4g} passes over the data for each member, {self.cost:.2f} times one training, "
            f"in {self.seconds:.3g} s ({shares})",
        ]
        lines += [f"Advice ({name}): {text}" for name, text in self.advice.items()]
        return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
