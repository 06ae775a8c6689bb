"""What each choice of the one call is worth, and what it costs: the call without it, on development tasks.

    python -m benchmarks.leaderboard.ablation    # data as for the leaderboard; a minute of processor time a seed

NLL less that of the whole call on the same split, mean and standard error over tasks and seeds, and passes over the data.
Means of members and of more steps are in the leaderboard (``one_network``, ``twice_ensemble``).
"""

from __future__ import annotations

import math
import time
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any
from unittest import mock

from bayesopt_chain.ensemble import members
from benchmarks.leaderboard.contestants import called, scored
from benchmarks.leaderboard.tasks import split
from benchmarks.measure import RESULTS, command, fill

TASKS, SEEDS, STEPS = ["concrete", "sunspots", "meats"], 3, 1000
WHOLE, ALONG_COLUMNS = "the whole call", "without principal axes"
WITHOUT: dict[str, dict[str, Any]] = {
    WHOLE: {},
    "without the fan-in prior and renewed noise": {"prior_precision": 1.0},
    "without the trial of rates, at 0.003": {"lr": 0.003},
    "folds of a twentieth": {"held_out": 0.05},
    ALONG_COLUMNS: {},
}


def run(task: str, seed: int, name: str) -> dict[str, float]:
    """The call without a choice on a split."""
    began, data = time.process_time(), split(task, seed)
    collinear = math.inf if name == ALONG_COLUMNS else members.COLLINEAR
    with mock.patch.object(members, "COLLINEAR", collinear):
        found = called(data, seed, steps=STEPS, **WITHOUT[name])
    scores, passes = scored(data, found.predict), sum(found.report.passes.values())
    seconds = time.process_time() - began
    return {k: scores[k] for k in ("nll", "crps", "coverage")} | {"seconds": seconds, "passes": passes}


def table(record: dict[str, Any]) -> dict[str, Any]:
    """Of each choice the differences from the whole call with their standard errors, and means."""
    whole, found = record["runs"][WHOLE], {}
    for name, rows in record["runs"].items():
        gaps = {k: [row[k] - whole[split][k] for split, row in rows.items()] for k in ("nll", "crps")}
        found[name] = {k: [fmean(g), stdev(g) / len(g) ** 0.5] for k, g in gaps.items() if len(g) > 1}
        found[name] |= {k: fmean(row[k] for row in rows.values()) for k in ("coverage", "passes", "seconds")}
    return {"without": found}


if __name__ == "__main__":
    given = command(out=RESULTS / "ablation.json")
    every = product(range(SEEDS), TASKS, WITHOUT)
    cells = ((("runs", name, f"{task}-{seed}"), partial(run, task, seed, name)) for seed, task, name in every)
    fill(given.out, cells, table, tasks=TASKS, seeds=SEEDS, steps=STEPS)
