"""What each choice of the one call is worth, and what it costs: the call without it, on development tasks.

    python -m benchmarks.leaderboard.ablation    # data as for the leaderboard; a minute of processor time a seed

NLL less that of the whole call on the same split, mean and standard error over tasks and seeds, and passes over the data.
Means of members and of more steps are in the leaderboard (``one_network``, ``twice_ensemble``).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bayesopt_chain as bc
from bayesopt_chain.ensemble import members
from bayesopt_chain.ensemble.members import COLLINEAR
from benchmarks.leaderboard.contestants import network, scored
from benchmarks.leaderboard.tasks import split
from benchmarks.measure import keep

RECORD = Path(__file__).parents[1] / "results" / "ablation.json"
TASKS, SEEDS, STEPS = ("concrete", "sunspots", "meats"), range(3), 1000
ALONG_COLUMNS = "without principal axes"
WITHOUT: dict[str, dict[str, Any]] = {
    "the whole call": {},
    "without the fan-in prior and renewed noise": {"prior_precision": 1.0},
    "without the trial of rates, at 0.003": {"lr": 0.003},
    "folds of a twentieth": {"held_out": 0.05},
    ALONG_COLUMNS: {},
}


def main() -> None:
    torch.set_num_threads(1)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WITHOUT}
    for task, seed in ((split(name, seed), seed) for seed in SEEDS for name in TASKS):
        for name, without in WITHOUT.items():
            began, members.COLLINEAR = time.process_time(), math.inf if name == ALONG_COLUMNS else COLLINEAR
            data, make = (task.x, task.y), lambda task=task: network(task)
            told: dict[str, Any] = {"steps": STEPS, "seed": seed, "progress": False, **without}
            try:
                found = bc.posterior_ensemble(make, data, bc.likelihoods.gaussian(), **told)
            except bc.ensemble.EnsembleError as err:
                found = err.ensemble
            scores = scored(task, found.predict)
            row = {"seconds": time.process_time() - began, "passes": sum(found.report.passes.values())}
            runs[name].append({k: scores[k] for k in ("nll", "crps", "coverage")} | row)
            print(task.name, seed, name, runs[name][-1], flush=True)
    whole, table = runs["the whole call"], {}
    for name, rows in runs.items():
        gaps = {k: [r[k] - w[k] for r, w in zip(rows, whole)] for k in ("nll", "crps")}
        table[name] = {k: [float(np.mean(g)), float(np.std(g, ddof=1) / len(g) ** 0.5)] for k, g in gaps.items()}
        table[name] |= {k: float(np.mean([r[k] for r in rows])) for k in ("coverage", "passes", "seconds")}
    keep(RECORD, {"tasks": TASKS, "seeds": len(SEEDS), "steps": STEPS, "without": table, "runs": runs})


if __name__ == "__main__":
    main()
