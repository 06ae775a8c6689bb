"""One cell: all contestants on one split, each recorded as soon as it is done."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any


def cell(name: str, seed: int, done: dict[str, Any], file: str, only: list[str]) -> dict[str, Any]:
    """All contestants of one split that are not done; written to the cell's file after each."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.leaderboard import contestants as c
    from benchmarks.leaderboard.scores import scored
    from benchmarks.leaderboard.tasks import split

    task = split(name, seed)
    kept: dict[str, Any] = {}

    def module() -> Any:
        if "module" not in kept:
            kept["module"] = c.trained(task, seed)
        return kept["module"]

    order = {
        "posterior_ensemble": lambda: c.posterior_ensemble(task, seed),
        "deep_ensemble": lambda: c.deep_ensemble(task, seed),
        "twice_ensemble": lambda: c.twice_ensemble(task, seed),
        "last_layer_laplace": lambda: c.last_layer_laplace(task, module()),
        "kronecker_laplace": lambda: c.kronecker_laplace(task, module()),
        "laplace_torch": lambda: c.laplace_torch(task, module()),
        "mc_dropout": lambda: c.mc_dropout(task, seed),
        "gaussian_process": lambda: c.gaussian_process(task, seed),
        "gradient_boosting": lambda: c.gradient_boosting(task, seed),
    }
    for who, run in order.items():
        if who in done or (only and who not in only):
            continue
        torch.manual_seed(seed)
        start = time.perf_counter()
        try:
            result = run()
            if result is None:
                done[who] = {"left out": "not installed, or not for this task"}
            else:
                seconds = time.perf_counter() - start
                done[who] = {**scored(task, result.predict), "seconds": seconds, "said": result.said}
                done[who] |= {} if result.passes is None else {"passes": result.passes}
        except Exception as err:
            done[who] = {"failed": f"{type(err).__name__}: {err}"[:500], "where": traceback.format_exc()[-800:]}
        done["about"] = {"source": task.source, "split": task.hash, "train": len(task.x), "test": len(task.x_test)}
        temporary = Path(f"{file}.{os.getpid()}")
        temporary.write_text(json.dumps(done, indent=1))
        os.replace(temporary, file)
    return done
