r"""Stage 3: how strong the prior is, found on held-out data by training on from where the pilots ended.

    lambda -> 25 lambda -> 5 * 25 lambda -> ...        each for 0.15 of the steps, a cosine from the full rate

for as long as each is better than the one before by a standard error; the last that was better stands if its score is above
that of the checkpoint to stop at. A network forgets a weaker prior within such a cycle, so that no strength is trained from
the start, and what was trained on the way is kept. The first step is large because a prior of unit variance on every weight
is too wide by about the inputs of a layer (25 to 100), or it is not too wide at all.

Gaussian noise of training is small (see :mod:`bayesopt_chain.ensemble.plan`), and a mode depends on noise times precision
alone. Chains run with the noise c that held-out data choose, in units of that of training, so that what they sample has the
precision

    lambda_T = max(lambda_0, lambda / c),        of other likelihoods        lambda_T = lambda.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bayesopt_chain.ensemble.held import Held, z_of
from bayesopt_chain.ensemble.pilot import descend
from bayesopt_chain.ensemble.problem import Level, Problem, last_of
from bayesopt_chain.ensemble.ranks import firsts
from bayesopt_chain.ensemble.scale import best
from bayesopt_chain.ensemble.stop import ONE

FIRST, NEXT, SHARE, SURE, MOST = 25.0, 5.0, 0.15, 1.0, 5


def strengthen(
    problem: Problem, held: Held, ended: Level, stopped: Level, *, lr: float, steps: int, stages: Any
) -> dict[str, Any]:
    """The pilots to go on with, and the precision that they were trained with last.

    Args:
        problem: with the precision of training so far.
        held: the folds.
        ended: the pilots at the end of training, one draw.
        stopped: the pilots at the checkpoint to stop at, one draw.
        lr, steps: of training.
        stages: whose folders the runs have.

    Returns:
        ``precision``; ``moved``, whether it is another than before, and then ``params``, ``buffers`` and ``factor``; ``tried``,
        a precision and its mean score each; ``passes``.
    """
    problem.progress.stage("prior")
    scores, _ = _scored(held, ended)
    bar = float(_scored(held, stopped)[0].mean())
    period = max(1, round(SHARE * steps))
    precision, at = problem.prior_precision, ended
    tried, spent, found = [(precision, float(scores.mean()))], held.cost(2), None
    for i in range(MOST):
        precision *= NEXT if i else FIRST
        drawn, cost = descend(
            replace(problem, prior_precision=precision),
            *at.last(),
            lr=lr,
            period=period,
            steps=period,
            held_out=True,
            checkpoints=1,
            seed=20 + i,
            path=stages.folder("prior", str(i)),
        )
        params, buffers = last_of(drawn, at.last()[1])
        at = Level({k: x[None] for k, x in params.items()}, {k: x[None] for k, x in buffers.items()}, ended.loss)
        new, factor = _scored(held, at)
        spent += cost + held.cost(1)
        tried.append((precision, float(new.mean())))
        if z_of(new - scores) <= SURE:
            break
        scores = new
        found = {"precision": precision, "params": params, "buffers": buffers, "factor": factor}
    passes = {"prior": spent}
    if found is None or float(scores.mean()) <= bar:
        return {"precision": problem.prior_precision, "moved": False, "tried": tried, "passes": passes}
    return {**found, "moved": True, "tried": tried, "passes": passes}


def _scored(held: Held, level: Level) -> tuple[torch.Tensor, float]:
    """Log scores of the data of both folds, under the noise that is best there, and that noise's factor."""
    outputs = [held.outputs(level)]
    factor = best(held, outputs, ONE) if held.problem.likelihood.has_noise_scale else 1.0
    return firsts((held.score(outputs, ONE, factor), factor), held.problem.mesh)
