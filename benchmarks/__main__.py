"""``python -m benchmarks``: this library, torchopt, torch.optim, posteriors and BlackJAX in one run on the same work.

Prints the ratios that have a target, with their quartiles; writes them with every time, machine, versions and date to
``benchmarks/results/``, those of Intel's processors to a record of their own. ``--gpu`` runs the CUDA rows instead (needs a
CUDA device), ``--quick`` few steps of many chains, ``--only`` one row again, by the name of its function.
"""

from __future__ import annotations

import json
import statistics

import torch

from benchmarks import cpu, gpu
from benchmarks.measure import RESULTS, command, environment, keep, known
from benchmarks.table import table

if __name__ == "__main__":
    given = command(gpu=False, quick=False, out=RESULTS, only="")
    torch.manual_seed(0)
    processor = "cpu_intel" if "Intel" in environment()["cpu"] else "cpu"
    path = given.out / f"{'gpu' if given.gpu else processor}.json"
    # rows measured again alone take their places among the others, each with its own environment
    done = {row["work"]: row for row in known(path).get("rows", [])} if given.only else {}
    for name, measure in (gpu if given.gpu else cpu).rows(given.quick).items():
        if given.only in ("", name):
            row = measure()
            seconds = {who: statistics.median(times) for who, times in row.times.items()}
            about = {"work": row.work, "seconds": seconds, "ratios": row.report(), "environment": environment()}
            done[row.work] = about
            keep(path, {"rows": list(done.values())})
            print(json.dumps(seconds, indent=1), table([about]), sep="\n", flush=True)
