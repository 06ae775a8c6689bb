"""``python -m benchmarks.leaderboard.ablations``: the recipe with one thing changed, on the tasks that it was developed on.

Every variant is a cell (task, seed, variant) of a record, written as soon as it is done; a call goes on where the record stops.
Printed are paired differences from the recipe as it is, with the cost of both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "results" / "leaderboard_ablations.json"
# arguments of the call, and constants of its stages by file
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recipe": ({}, {}),
    "prior precision 1": ({"prior_precision": 1.0}, {}),
    "prior precision 25": ({"prior_precision": 25.0}, {}),
    "no chains": ({"method": "ensemble", "prior_precision": "held out"}, {}),
    "no chains, prior precision 1": ({"method": "ensemble"}, {}),
    "levels .3 and 1": ({"temperatures": (0.3, 1.0)}, {}),
    "chains four times as long": ({}, {"ladder.SHARE": 0.4}),
    "first step of the prior 5": ({}, {"prior.FIRST": 5.0}),
    "no early stop": ({}, {"stop.SURE": math.inf}),
    "equal pseudo-data": ({}, {"stack.PSEUDO_DATA": 0.0}),
}


def cell(name: str, seed: int, variant: str, file: str) -> None:
    """One variant on one split."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.leaderboard import contestants
    from benchmarks.leaderboard.scores import scored
    from benchmarks.leaderboard.tasks import split

    options, constants = VARIANTS[variant]
    for key, value in constants.items():
        stage, constant = key.split(".")
        setattr(importlib.import_module(f"bayesopt_chain.ensemble.{stage}"), constant, value)
    task, start = split(name, seed), time.perf_counter()
    torch.manual_seed(seed)
    result = contestants.ours(task, seed, **options)
    found = {**scored(task, result.predict), "passes": result.passes, "seconds": time.perf_counter() - start}
    temporary = Path(f"{file}.{os.getpid()}")
    temporary.write_text(json.dumps({**found, "said": result.said}, indent=1))
    os.replace(temporary, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=["sunspots", "meats", "concrete", "caravan"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    folder = given.record.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    cells = {
        (name, seed, variant): folder / f"{name}-{seed}-{variant.replace(' ', '_')}.json"
        for seed in given.seeds
        for name in given.tasks
        for variant in given.variants
    }
    # a process runs one cell alone: a variant changes constants
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        for future in as_completed(
            pool.submit(cell, *key, str(file)) for key, file in cells.items() if not file.exists()
        ):
            future.result()
    found = {"/".join(map(str, key)): json.loads(file.read_text()) for key, file in cells.items()}
    given.record.write_text(json.dumps(found, indent=1) + "\n")
    for name in given.tasks:
        for variant in given.variants:
            for score in ("nll", "crps", "ece"):
                both = [(found[f"{name}/{s}/{variant}"], found[f"{name}/{s}/recipe"]) for s in given.seeds]
                if score in both[0][0]:
                    differences = [a[score] - b[score] for a, b in both]
                    cost = sum(a["passes"] / b["passes"] for a, b in both) / len(both)
                    shown = " ".join(f"{d:+.4f}" for d in differences)
                    print(f"{name:<10} {variant:<26} {score:<5} {shown}  at {cost:.2f} of the passes")


if __name__ == "__main__":
    main()
