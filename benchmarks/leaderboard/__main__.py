"""Runs cells (task, seed), each recorded as soon as it is done, and writes the table, also for the pages.

python -m benchmarks.leaderboard                  # run what the record lacks, seed by seed
python -m benchmarks.leaderboard --peers          # a Gaussian process and boosted trees beside them
python -m benchmarks.leaderboard --seeds          # the tables of what is there

One process; a run of three seeds takes about a quarter of an hour of processor time. ``tasks.py`` says where the data are from.
Beside the record lies ``.md``, the part for the pages.
"""

from __future__ import annotations

import json
import time
import traceback
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.leaderboard import contestants, tasks
from benchmarks.leaderboard.table import markdown
from benchmarks.measure import RESULTS, command, keep, known

PROTOCOL = json.loads((Path(__file__).parent / "protocol.json").read_text())


def cell(name: str, seed: int, steps: int, done: dict[str, Any], peers: bool) -> dict[str, Any]:
    """The networks of a split, or what has no networks, beside what is done."""
    task = tasks.split(name, seed)
    todo = contestants.peers(task, seed) if peers else contestants.networks_contest(task, seed, steps)
    for who, run in todo.items():
        torch.manual_seed(seed)
        start = time.process_time()
        try:
            result = run()
            seconds = time.process_time() - start
            done[who] = contestants.scored(task, result.predict) | {"seconds": seconds, **result.about}
        except Exception as err:
            done[who] = {"failed": f"{type(err).__name__}: {err}"[:500], "where": traceback.format_exc()[-800:]}
    sizes = {"train": len(task.x), "test": len(task.x_test)}
    return done | {"about": {"source": task.source, "split": task.hash, **sizes}}


if __name__ == "__main__":
    names, path = PROTOCOL["seen before"] + PROTOCOL["new"], RESULTS / "leaderboard.json"
    given = command(peers=False, tasks=names, seeds=[0, 1, 2, 3, 4], steps=PROTOCOL["steps"], record=path)
    record = {"protocol": PROTOCOL, "cells": {}} | known(given.record)
    for seed, name in product(given.seeds, given.tasks):
        found = record["cells"].setdefault(f"{name}-{seed}", {})
        if ("gradient_boosting" if given.peers else "posterior_ensemble") not in found:
            record["cells"][f"{name}-{seed}"] = cell(name, seed, given.steps, found, given.peers)
            print(name, seed, flush=True)
            keep(given.record, record)
    given.record.with_suffix(".md").write_text(markdown(record))
    print(markdown(record))
