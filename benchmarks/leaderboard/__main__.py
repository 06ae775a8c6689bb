"""Runs cells (task, seed), each contestant of them recorded as soon as it is done, and writes the table, also for the pages.

python -m benchmarks.leaderboard --data                          # write the tables of data to files
python -m benchmarks.leaderboard --workers 16 --record FILE      # run what the record lacks; the tasks developed on
python -m benchmarks.leaderboard --held-out ...                  # the others, once
python -m benchmarks.leaderboard --table --record FILE           # the table of what is there

Beside the record lie ``.md``, the part for the pages, and ``.txt``, every mean score of every contestant with its differences.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.leaderboard.cells import cell

HERE = Path(__file__).parent
PROTOCOL = json.loads((HERE / "protocol.json").read_text())
RECORD = HERE.parent / "results" / "leaderboard.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--held-out", action="store_true", dest="held_out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=PROTOCOL["seeds"])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    if given.data:
        from benchmarks.leaderboard.tasks import write

        write()
        return
    folder = given.record.with_suffix("")
    if not given.table:
        folder.mkdir(parents=True, exist_ok=True)
        names = given.tasks or PROTOCOL["held out" if given.held_out else "developed on"]
        todo = []
        for seed in given.seeds:
            for name in names:
                file = folder / f"{name}-{seed}.json"
                done = json.loads(file.read_text()) if file.exists() else {}
                todo.append((name, seed, {k: v for k, v in done.items() if "failed" not in v}, str(file), given.only))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
            running = {pool.submit(cell, *arguments): arguments[:2] for arguments in todo}
            for future in as_completed(running):
                future.result()
                print(*running[future], "done", flush=True)
    if folder.exists():  # cells of a run that was cut short are in the table too
        _join(folder, given.record)
    from benchmarks.leaderboard.table import markdown, table

    record = json.loads(given.record.read_text()) if given.record.exists() else {"protocol": PROTOCOL, "cells": {}}
    given.record.with_suffix(".md").write_text(markdown(record))
    given.record.with_suffix(".txt").write_text(table(record) + "\n")
    print(table(record))


def _join(folder: Path, record: Path) -> None:
    """All cells in one record."""
    import torch

    from benchmarks.leaderboard import contestants

    cells = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    own = ("posterior_ensemble", "deep_ensemble", "twice_ensemble")
    peers = ("laplace_torch", "gaussian_process", "gradient_boosting", "mc_dropout")
    functions = {
        **dict.fromkeys(own, contestants.ours),
        **dict.fromkeys(("last_layer_laplace", "kronecker_laplace"), contestants._laplace),
        **{who: getattr(contestants, who) for who in peers},
    }
    about = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "lines": {who: contestants.lines(function) for who, function in functions.items()},
    }
    record.write_text(json.dumps({"protocol": PROTOCOL, "about": about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
