"""``python -m benchmarks``: this library, torchopt, torch.optim, posteriors and BlackJAX in one run on the same work.

Prints the ratios that have a target, with their quartiles; writes them with every time, machine, versions and date to
``benchmarks/results/``. ``--gpu`` runs the CUDA rows instead (needs a CUDA device), ``--quick`` few steps of many chains,
``--only`` one row again, by the name of its function.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks import cpu, gpu
from benchmarks.measure import RESULTS, command, environment, keep, known

if __name__ == "__main__":
    given = command(gpu=False, quick=False, out=RESULTS, only="")
    torch.manual_seed(0)
    path = given.out / f"{'gpu' if given.gpu else 'cpu'}.json"
    # rows measured again alone take their places among the others, each with its own environment
    done = {row["work"]: row for row in known(path).get("rows", [])} if given.only else {}
    for name, measure in (gpu if given.gpu else cpu).rows(given.quick).items():
        if given.only not in ("", name):
            continue
        row = measure()
        print(f"\n{row.work}")
        medians = {name: statistics.median(times) for name, times in row.times.items()}
        for name, times in row.times.items():
            print(f"    {name:32s} {1e6 * medians[name]:12.1f} us (shortest {1e6 * min(times):.1f})")
        for r in row.report():
            met = "met" if r["ratio"] <= r["target"] else "missed"
            quartiles = f"quartiles {r['low']:.3f} .. {r['high']:.3f}, of shortest {r['of_shortest']:.3f}"
            print(f"  {r['ours']} / {r['theirs']}: {r['ratio']:.3f} ({quartiles}), target {r['target']:.3f}: {met}")
        about = {"seconds": medians, "ratios": row.report(), "environment": environment()}
        done[row.work] = {"work": row.work} | about
        keep(path, {"rows": list(done.values())})
