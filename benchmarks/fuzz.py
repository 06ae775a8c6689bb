"""``python -m benchmarks.fuzz``: everything that a user calls, with arguments of ordinary kinds in the wrong places.

Every argument of every row of ``tests/fuzzing.py`` takes each of some sixty values. What ends wrongly is
printed. ``--workers 2`` takes two processes; ``--only NAME ...`` takes some rows, and ``--only NAME.`` all rows whose names
begin so. Results go to ``benchmarks/results/fuzz.json`` after every row: calls, wrong ones, seconds; with ``--only``
these rows replace those that the record has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from tests import fuzzing

RESULTS = Path(__file__).resolve().parent / "results" / "fuzz.json"


def row(name: str) -> dict[str, Any]:
    """All calls of one row."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin = time.process_time()
    found, calls = fuzzing.failures(name)
    return {"calls": calls, "wrong": len(found), "seconds": round(time.process_time() - begin, 1), "found": found}


def main() -> None:
    """Call all rows, or some of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows, or how they begin")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    names = [
        name
        for name in sorted(fuzzing.rows(), key=lambda name: name not in fuzzing.SLOW)  # the long ones first
        if not given.only or any(name == x or (x.endswith(".") and name.startswith(x)) for x in given.only)
    ]
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if given.only and RESULTS.exists() else {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        running = {pool.submit(row, name): name for name in names}
        for done in as_completed(running):
            name, told = running[done], done.result()
            print(f"{name}: {told['calls']} calls, {told['wrong']} wrong, {told['seconds']} s", flush=True)
            for line in told.pop("found"):
                print("   ", line, flush=True)
            rows[name] = told
            record = {
                "torch": torch.__version__,
                "calls": sum(x["calls"] for x in rows.values()),
                "wrong": sum(x["wrong"] for x in rows.values()),
                "fewest": min(x["calls"] for x in rows.values() if x["calls"]),
                "not called": fuzzing.missing(),
                "rows": {name: rows[name] for name in fuzzing.rows() if name in rows},
            }
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
