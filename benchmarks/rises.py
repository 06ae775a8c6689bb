"""``python -m benchmarks.rises``: the error of the variance where a learning rate rises, as docs/theory.md has it.

Along falling rates matched noise is exact. At a rise the joint law of parameters and velocity cannot be restored at once, and
this table says by how much ``Var theta`` is off on a quadratic loss, solved exactly by ``bc.testing.variance_along``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import variance_along

PEAKS = (0.03, 0.1, 0.3, 1.0)  # the largest lr times the curvature; the stability limit is 2 (1 + momentum)
S = bc.schedules
RISES: dict[
    str, tuple[Callable[[torch.Tensor], torch.Tensor], int]
] = {  # of lr / its largest value; how many steps to follow
    "x 1.2 in one step": (S.piecewise([3], [1 / 1.2, 1.0]), 300),
    "x 2 in one step": (S.piecewise([3], [1 / 2, 1.0]), 300),
    "x 10 in one step": (S.piecewise([3], [1 / 10, 1.0]), 300),
    "linear warmup from a tenth, 10 steps": (S.polynomial(0.1, 10, final=1.0), 300),
    "linear warmup from a tenth, 100 steps": (S.polynomial(0.1, 100, final=1.0), 400),
    "cosine with restarts every 500 steps": (S.cosine_restarts(1.0, 500), 1000),
}


def errors(schedule: Callable[[torch.Tensor], torch.Tensor], steps: int, momentum: float) -> torch.Tensor:
    """``Var theta K / T - 1`` after every step, shape ``[steps, len(PEAKS)]``."""
    curvatures = torch.tensor(PEAKS, dtype=torch.float64)
    tx = bc.sgd(schedule, momentum, temperature=1.0)
    return variance_along(tx, curvatures.diag(), steps).diagonal(dim1=1, dim2=2) * curvatures - 1.0


def table() -> str:
    """The table, in Markdown."""
    head = "| the rate rises | momentum | " + " | ".join(f"lr k = {peak:g}" for peak in PEAKS) + " |"
    lines = [head, "|---" * (2 + len(PEAKS)) + "|"]
    for name, (schedule, steps) in RISES.items():
        for momentum in (0.0, 0.5, 0.9, 0.99):
            error = 100.0 * errors(schedule, steps, momentum)
            low, high = error.min(0).values.tolist(), error.max(0).values.tolist()
            cells = [f"{_rounded(a)} to {_rounded(b)} %" for a, b in zip(low, high)]
            lines.append(f"| {name} | {momentum:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rounded(x: float) -> str:
    text = f"{x:+.1f}"
    return "0" if text in ("+0.0", "-0.0") else text


if __name__ == "__main__":
    print(table())
