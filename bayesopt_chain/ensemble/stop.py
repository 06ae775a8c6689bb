"""Stage 2: the checkpoint to stop at: the best on held-out data, if it beats the end by three standard errors, else the end."""

from __future__ import annotations

from typing import Any

import torch

from bayesopt_chain.ensemble.held import Held, z_of
from bayesopt_chain.ensemble.problem import Level
from bayesopt_chain.ensemble.scale import best

SURE = 3.0
ONE = torch.ones(1, dtype=torch.float64, device="cpu")


def stop(held: Held, checkpoints: Level, steps: list[int]) -> dict[str, Any]:
    """The checkpoint, by its number and step, with the factor that scores it, and whether scores still rose at the end."""
    table, factors = [], []
    for i in range(len(steps)):
        outputs = [held.outputs(checkpoints.at(i))]
        factor = best(held, outputs, ONE) if held.problem.likelihood.has_noise_scale else 1.0
        table.append(held.score(outputs, ONE, factor))
        factors.append(factor)
    means = [float(scores.mean()) for scores in table]
    i = max(range(len(steps)), key=means.__getitem__)
    z = z_of(table[i] - table[-1]) if i < len(steps) - 1 else 0.0
    early = z > SURE
    i = i if early else len(steps) - 1
    rising = z_of(table[-1] - table[-3]) if len(table) > 2 else 0.0
    return {
        "checkpoint": i,
        "step": steps[i],
        "early": early,
        "z": z,
        "factor": factors[i],
        "scores": means,
        "rising": rising,
        "passes": {"scores": held.cost(len(steps))},
    }
