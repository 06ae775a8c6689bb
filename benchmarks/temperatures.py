"""At which temperature draws of chains from five networks predict best, and what the dispersion of the targets tells of it.

    python -m benchmarks.temperatures --workers 2     # twenty minutes on two cores; writes results/temperatures.json and .md

On the tasks that ``benchmarks.suggest_lr`` was set on, with seeds that its table does not have: the prior, the dispersion,
ten networks and, for chains from five of them at ``COLD / N``, the setting of ``bc.suggest_lr`` (in the record: of an
earlier adviser) are found as there with the
gradients of ten. Then a chain goes from each of the five at the same learning rate and momentum with several temperatures, at 0
by ``bc.sgd``. What is compared is the negative log-likelihood on test data of all draws together, less that of the ten
networks.
"""

from __future__ import annotations

from typing import Any

import optree
import torch

import bayesopt_chain as bc
from benchmarks.cells import command
from benchmarks.suggest_lr import (
    BUDGETS,
    COLD,
    EPOCHS,
    SEEN,
    Cell,
    by_evidence,
    mean_of,
    posterior,
    score,
    suggested,
    task,
    trained,
)

SEEDS = (100, 101, 102, 103)
TEMPERATURES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0)  # times 1 / N


def run(cell: Cell) -> dict[str, Any]:
    """The scores of the networks, and of the draws by temperature."""
    of, seed = task(cell.task, cell.seed), cell.seed
    n, members = len(of.train[1]), max(BUDGETS)
    count = BUDGETS[members]
    torch.manual_seed(1000 + seed)
    precision, phi, passes = by_evidence(of, seed)
    target = posterior(of, precision)
    torch.manual_seed(100 + seed)
    fresh = [target.fresh() for _ in range(members)]
    networks = trained(target.loss, fresh, of.train, range(10 * seed, 10 * seed + members))
    starts, epochs = networks[:count], float(members * EPOCHS)
    found, steps, burn_in, thinning = suggested(of, target, COLD / n, starts, seed, epochs, count * EPOCHS + passes)
    times = {"steps": steps, "burn_in": burn_in, "thinning": thinning}
    scores = {}
    for temperature in TEMPERATURES:
        options: Any = {"lr": found.lr, "momentum": found.momentum}
        tx = bc.sghmc(**options, temperature=temperature / n) if temperature else bc.sgd(**options)
        step, rows = bc.make_step(target.loss, tx), []
        for start in starts:
            chain = bc.sample(step, start, tx.init(start), found.batches, **times)
            rows += [optree.tree_map(lambda t, i=i: t[i], chain.params) for i in range(len(chain))]
        scores[f"{temperature:g}"] = score(of, target, rows)
    ensembles = {"ensemble": score(of, target, networks), "starts": score(of, target, starts)}
    return {"dispersion": phi, **ensembles, "scores": scores, "says": f"phi {phi:.2f} {scores}"}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds of each task, in the order of their dispersions."""
    out = []
    for name in SEEN:
        mine = [row for row in rows if row["cell"].split()[0] == name and "scores" in row]
        if mine:
            scores = {key: mean_of(row["scores"][key] - row["ensemble"] for row in mine) for key in mine[0]["scores"]}
            means = {key: mean_of(row[key] for row in mine) for key in ("dispersion", "ensemble")}
            starts = mean_of(row["starts"] - row["ensemble"] for row in mine)
            out.append({"task": name, "seeds": len(mine), **means, "starts": starts, "scores": scores})
    return sorted(out, key=lambda row: row["dispersion"])


def table(of: list[dict[str, Any]]) -> str:
    """The same in Markdown."""
    head = ["task", "phi", "ensemble of 10", "5 networks", *(f"T = {t:g} / N" if t else "T = 0" for t in TEMPERATURES)]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in of:
        scores = " | ".join(f"{row['scores'][f'{t:g}']:+.3f}" for t in TEMPERATURES)
        networks = f"{row['ensemble']:.3f} | {row['starts']:+.3f}"
        lines.append(f"| {row['task']} | {row['dispersion']:.2f} | {networks} | {scores} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    cells = [Cell(name, seed) for seed in SEEDS for name in SEEN]
    command("temperatures", __doc__, run, cells, summary=summary, table=table)
