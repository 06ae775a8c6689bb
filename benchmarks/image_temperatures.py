"""Why the draws of chains from five networks predict images worse than these networks: the temperature, or the chains' length.

    python -m benchmarks.image_temperatures      # ten minutes on one core; writes results/image_temperatures.json and .md

On the three image tasks of ``benchmarks.suggest_chain``, with seeds that it does not have: the prior, five networks and the
setting of ``bc.suggest_chain`` are found as there with the gradients of ten. Then a chain goes from each network at the same
learning rate and momentum with several temperatures, at 0 by ``bc.sgd``, for as many steps as are suggested and for ten times
as many; burn-in and thinning are in proportion. The negative log-likelihood on test data is that of all draws together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import optree
import torch

import bayesopt_chain as bc
from benchmarks.cells import work_out
from benchmarks.suggest_chain import (
    BUDGETS,
    EPOCHS,
    Cell,
    mean_of,
    posterior,
    precision_by_evidence,
    score,
    suggested,
    task,
    trained,
)

TASKS = ("digits", "mnist", "mfeat")
SEEDS = (100, 101)
TEMPERATURES = (0.0, 0.01, 0.1, 1.0)  # times 1 / N
LENGTHS = (1, 10)  # times the steps that are suggested


def run(cell: Cell) -> dict[str, Any]:
    """The scores of the networks, and of the draws by temperature and length."""
    of, seed = task(cell.task, cell.seed), cell.seed
    n, members = len(of.train[1]), max(BUDGETS)
    count = BUDGETS[members]
    torch.manual_seed(1000 + seed)
    precision, passes = precision_by_evidence(of, seed)
    target = posterior(of, precision)
    torch.manual_seed(100 + seed)
    fresh = [target.fresh() for _ in range(count)]
    networks = trained(target.loss, fresh, of.train, range(10 * seed, 10 * seed + count))
    found = suggested(of, target, networks, seed, float(members * EPOCHS), count * EPOCHS + passes)
    scores = {}
    for temperature in TEMPERATURES:
        options: Any = found.best.options
        tx = bc.sghmc(**options, temperature=temperature / n) if temperature else bc.sgd(**options)
        step = bc.make_step(target.loss, tx)
        for length in LENGTHS:
            times = {"steps": found.steps, "burn_in": found.burn_in, "thinning": found.thinning}
            times = {name: length * value for name, value in times.items()}
            rows = []
            for network in networks:
                chain = bc.sample(step, network, tx.init(network), found.batches, **times)
                rows += [optree.tree_map(lambda t, i=i: t[i], chain.params) for i in range(len(chain))]
            scores[f"{temperature:g} x{length}"] = score(of, target, rows)
    return {"networks": score(of, target, networks), "scores": scores, "order": found.best.order, "says": str(scores)}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds of each task."""
    out = []
    for name in TASKS:
        mine = [row for row in rows if row["cell"].split()[0] == name and "scores" in row]
        if mine:
            scores = {key: mean_of(row["scores"][key] for row in mine) for key in mine[0]["scores"]}
            networks = mean_of(row["networks"] for row in mine)
            out.append({"task": name, "seeds": len(mine), "networks": networks, "scores": scores})
    return out


def table(of: list[dict[str, Any]]) -> str:
    """The same in Markdown."""
    head = ["task", "steps", "networks", *(f"T = {t:g} / N" if t else "T = 0" for t in TEMPERATURES)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in of:
        for length in LENGTHS:
            steps = "suggested" if length == 1 else f"{length} times as many"
            scores = " | ".join(f"{row['scores'][f'{t:g} x{length}']:.3f}" for t in TEMPERATURES)
            lines.append(f"| {row['task']} | {steps} | {row['networks']:.3f} | {scores} |")
    return "\n".join([*lines, ""])


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_temperatures", description=description)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "image_temperatures.json")
    args = parser.parse_args()
    cells = [Cell(name, seed) for seed in SEEDS for name in TASKS]
    rows = work_out(run, cells, args.out, workers=args.workers, summary=summary)
    args.out.with_suffix(".md").write_text(table(summary(rows)))
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
