"""The prior precision that the evidence finds with the posterior's structure: dense, Kronecker-factored or diagonal.

    python -m benchmarks.prior_structures        # three minutes on one core; writes results/prior_structures.json and .md

Networks of ``benchmarks.suggest_lr``, trained by ``bc.posterior.train_by_evidence`` as there, with one precision for all
parameters (``prior_structure="scalar"``). The dense structure has the exact eigenvalues of the curvature. Seconds are of the
whole training, with ten estimates of the evidence.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.cells import command
from benchmarks.suggest_lr import Cell, by_evidence, mean_of, task

TASKS = ("diabetes", "boston", "spam", "co2", "digits", "mnist")
STRUCTURES = ("dense", "kronecker", "diagonal")
SEEDS = (100, 101, 102)


def run(cell: Cell) -> dict[str, Any]:
    """The precision and the seconds for each structure, from the same initial weights."""
    of = task(cell.task, cell.seed)
    precision, seconds = {}, {}
    for structure in STRUCTURES:
        torch.manual_seed(1000 + cell.seed)
        began = time.perf_counter()
        precision[structure] = by_evidence(of, cell.seed, structure).precision
        seconds[structure] = time.perf_counter() - began
    count = sum(p.numel() for p in of.network().parameters())
    return {"parameters": count, "precision": precision, "seconds by structure": seconds, "says": str(precision)}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds of each task, and the ratio of the precision to that of the dense structure."""
    out = []
    for name in TASKS:
        mine = [row for row in rows if row["cell"].split()[0] == name and "precision" in row]
        if not mine:
            continue
        by_structure = {
            structure: {
                "precision": mean_of(row["precision"][structure] for row in mine),
                "to dense": mean_of(row["precision"][structure] / row["precision"]["dense"] for row in mine),
                "seconds": mean_of(row["seconds by structure"][structure] for row in mine),
            }
            for structure in STRUCTURES
        }
        out.append({"task": name, "parameters": mine[0]["parameters"], "seeds": len(mine), **by_structure})
    return out


def table(of: list[dict[str, Any]]) -> str:
    """The same in Markdown."""
    lines = ["| network | parameters | dense | Kronecker | diagonal | seconds: dense | Kronecker |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for row in of:
        others = " | ".join(f"{row[s]['precision']:.1f} ({row[s]['to dense']:.1f} x)" for s in STRUCTURES[1:])
        seconds = " | ".join(f"{row[s]['seconds']:.1f}" for s in STRUCTURES[:2])
        lines.append(
            f"| {row['task']} | {row['parameters']:,} | {row['dense']['precision']:.1f} | {others} | {seconds} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    cells = [Cell(name, seed) for name in TASKS for seed in SEEDS]
    command("prior_structures", __doc__, run, cells, summary=summary, table=table)
