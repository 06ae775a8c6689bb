"""Runs cells (task, seed), each recorded as soon as it is done, and writes the table, also for the pages.

python -m benchmarks.leaderboard --data           # write the data to files (packages and folder: tasks.py)
python -m benchmarks.leaderboard --until 15:35    # run what the record lacks, seed by seed; begin nothing later (UTC)
python -m benchmarks.leaderboard --peers          # a Gaussian process and boosted trees beside them
python -m benchmarks.leaderboard --table          # the tables of what is there

One process; a run of three seeds takes about a quarter of an hour of processor time. Beside the record lie ``.md``, the part
for the pages, and ``.txt``, every mean score.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from benchmarks.leaderboard.cells import cell

HERE = Path(__file__).parent
PROTOCOL = json.loads((HERE / "protocol.json").read_text())
RECORD = HERE.parent / "results" / "leaderboard.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--until", default="24:00")
    parser.add_argument("--tasks", nargs="*", default=PROTOCOL["seen before"] + PROTOCOL["new"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=PROTOCOL["steps"])
    parser.add_argument("--cells", type=Path, default=HERE.parent / "data_device" / "leaderboard_cells")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    if given.data:
        from benchmarks.leaderboard.tasks import write

        write()
        return
    given.cells.mkdir(parents=True, exist_ok=True)
    wanted = [] if given.table else [(name, seed) for seed in given.seeds for name in given.tasks]
    for name, seed in wanted:
        file = given.cells / f"{name}-{seed}.json"
        found = json.loads(file.read_text()) if file.exists() else {}
        if time.strftime("%H:%M", time.gmtime()) >= given.until:
            break
        if ("gradient_boosting" if given.peers else "posterior_ensemble") not in found:
            began = time.monotonic()
            cell(name, seed, given.steps, file, given.peers)
            print(name, seed, f"{time.monotonic() - began:.0f} s", flush=True)
    _join(given.cells, given.record)
    from benchmarks.leaderboard.table import markdown, table

    record = json.loads(given.record.read_text())
    given.record.with_suffix(".md").write_text(markdown(record))
    given.record.with_suffix(".txt").write_text(table(record) + "\n")
    print(table(record))


def _join(folder: Path, record: Path) -> None:
    """The cells of all seeds that every task has, in one record."""
    import torch

    cells = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    names = {key.rsplit("-", 1)[0] for key in cells}
    whole = {key: cell for key, cell in cells.items() if all(f"{n}-{key.rsplit('-', 1)[1]}" in cells for n in names)}
    about = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    record.write_text(json.dumps({"protocol": PROTOCOL, "about": about, "cells": whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
