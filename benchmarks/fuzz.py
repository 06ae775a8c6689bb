"""``python -m benchmarks.fuzz``: everything that a user calls, with arguments of ordinary kinds in the wrong places.

Every argument of every row of ``tests/fuzzing.py`` takes each of some sixty values; ``--only NAME`` takes one row. What ends
wrongly is printed. Results go to ``benchmarks/results/fuzz.json`` after every row: calls, and how many ended wrongly.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tests import fuzzing

RESULTS = Path(__file__).resolve().parent / "results" / "fuzz.json"


def main() -> None:
    """Call all rows, or some of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    rows = sorted({**fuzzing.CALLS, **fuzzing.classes()}, key=fuzzing.SLOW.__contains__)
    record = {
        "torch": torch.__version__,
        "calls": 0,
        "wrong": 0,
        "fewest": 0,
        "not called": fuzzing.missing(),
        "rows": {},
    }
    for name in only or rows:
        begin = time.monotonic()
        found, calls = fuzzing.failures(name)
        record["rows"][name] = {"calls": calls, "wrong": len(found)}
        record["calls"] += calls
        record["wrong"] += len(found)
        record["fewest"] = min(row["calls"] for row in record["rows"].values())
        print(f"{name}: {calls} calls, {len(found)} wrong, {time.monotonic() - begin:.1f} s", flush=True)
        for line in found:
            print("   ", line, flush=True)
        if not only:
            RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
