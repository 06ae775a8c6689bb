"""Stage 1: all members train, each without one of two folds, and leave ten checkpoints.

    Adam with rates  lr (1 + cos(pi k / steps)) / 2 + lr / 1000

Half of the members leave out one fold, half the other, so that every held-out score is of predictions by at least one member
that has not seen the datum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bayesopt_chain.ensemble.cost import passes
from bayesopt_chain.ensemble.problem import Problem, Tensors, level_of
from bayesopt_chain.optimizers.functional import adam
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.schedules import cosine

CHECKPOINTS = 10


def descend(
    problem: Problem,
    params: Tensors,
    buffers: Tensors,
    *,
    lr: float,
    period: int,
    steps: int,
    held_out: bool,
    checkpoints: int,
    seed: int,
    path: Path | None,
) -> tuple[Draws, float]:
    """Train for ``steps`` steps of a cosine over ``period`` ones; the draws and the passes."""
    tx = adam(cosine(lr, max(1, period), final=lr / 1000))
    thinning = max(1, steps // checkpoints)
    drawn = problem.run(tx, params, buffers, held_out=held_out, steps=steps, thinning=thinning, seed=seed, path=path)
    if not drawn.complete:
        raise ValueError(
            f"posterior_ensemble: training diverged ({drawn.why}): standardise the data, or pass a smaller lr="
        )
    _, _, b = problem.batches(held_out, full=False)
    return drawn, passes(steps, b, problem.data.size)


def pilot(problem: Problem, lr: float, steps: int, path: Path | None) -> dict[str, Any]:
    """Checkpoints ``[10, M, *]`` of members that leave out their folds."""
    problem.progress.stage("pilot")
    members = problem.members
    drawn, cost = descend(
        problem,
        members.params,
        members.buffers,
        lr=lr,
        period=steps,
        steps=steps,
        held_out=True,
        checkpoints=CHECKPOINTS,
        seed=2,
        path=path,
    )
    level = level_of(drawn, members.buffers)
    return {**level.saved(), "steps": drawn.steps.tolist(), "passes": {"pilot": cost}}
