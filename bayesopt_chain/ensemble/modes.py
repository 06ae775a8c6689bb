"""Stage 3: modes on all data, which are a deep ensemble.

Where the pilots ran to their end, they train on for 0.3 of the steps on all data, at 0.3 of the rate. Where they stopped
early, in the first 0.4 of the steps, new members train on all data up to that step; later, the checkpoints train on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayesopt_chain.ensemble.pilot import descend
from bayesopt_chain.ensemble.problem import Level, Problem, last_of

MORE, RATE, EARLY = 0.3, 0.3, 0.4


def modes(problem: Problem, pilots: Level, stopped: int, *, lr: float, steps: int, path: Path | None) -> dict[str, Any]:
    """Parameters and buffers ``[M, *]`` trained on all data."""
    problem.progress.stage("modes")
    anew = stopped <= EARLY * steps
    more = max(1, round(MORE * steps))
    params, buffers = (problem.members.params, problem.members.buffers) if anew else pilots.last()
    drawn, cost = descend(
        problem,
        params,
        buffers,
        lr=lr if anew else RATE * lr,
        period=steps if anew else more,
        steps=stopped if anew else more,
        held_out=False,
        checkpoints=1,
        seed=3,
        path=path,
    )
    params, buffers = last_of(drawn, buffers)
    return {"params": params, "buffers": buffers, "anew": anew, "passes": {"modes": cost}}
