"""``python -m benchmarks``: this library, torchopt, torch.optim, posteriors and BlackJAX in one run on the same work.

Prints the ratios that have a target, with their quartiles; writes them with every time, machine, versions and date to
``benchmarks/results/``. ``--gpu`` runs the CUDA rows instead; ``python -m benchmarks.scaling`` measures the cost against
parameters, leaves and chains.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks.measure import environment, keep


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="the CUDA rows (needs a CUDA device)")
    parser.add_argument("--quick", action="store_true", help="100 steps of the 5,000 chains")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", help="the name of a row, a function of benchmarks/cpu.py, to measure again alone")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "gpu" if args.gpu else "cpu"
    if args.gpu:
        from benchmarks.gpu import rows
    else:
        from benchmarks.cpu import rows
    path = args.out / f"{kind}.json"
    result: dict = {"environment": environment(), "rows": []}
    if args.only and path.exists():  # measured again one by one: each row keeps its own environment
        result = json.loads(path.read_text())
    for name, measure in rows(args.quick).items():
        if args.only not in (None, name):
            continue
        row = measure()
        print(f"\n{row.work}")
        for name, times in row.times.items():
            print(f"    {name:32s} {1e6 * statistics.median(times):12.1f} us (shortest {1e6 * min(times):.1f})")
        for line in row.report():
            met = "met" if line["ratio"] <= line["target"] else "missed"
            print(
                f"  {line['ours']} / {line['theirs']}: {line['ratio']:.3f} (quartiles {line['low']:.3f} .. "
                f"{line['high']:.3f}, of shortest {line['of_shortest']:.3f}), target {line['target']:.3f}: {met}"
            )
        medians = {name: statistics.median(times) for name, times in row.times.items()}
        mine = {"work": row.work, "seconds": medians, "ratios": row.report(), "environment": environment()}
        works = [old["work"] for old in result["rows"]]
        at = works.index(row.work) if row.work in works else len(works)
        result["rows"][at : at + 1] = [mine]
        keep(path, result)


if __name__ == "__main__":
    main()
