"""Cost of one SGHMC update against the number of parameters, of leaves and of chains."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

import bayesopt_chain as bc
from benchmarks import contestants as c
from benchmarks.cpu import D, N, logistic, regression_data
from benchmarks.measure import take_turns


def curves(parameters=tuple(10**k for k in range(1, 9)), leaves=(1, 10, 100, 1000), chains=(1, 10, 100, 1000, 10_000)):
    """``{curve: {contestant: [(x, seconds), ...]}}``."""
    return {
        "parameters, one leaf": _curve(parameters, lambda n: _updates(1, n)),
        "leaves, 1e5 parameters": _curve(leaves, lambda n: _updates(n, 100_000 // n)),
        "chains, logistic regression 768 x 8": _curve(chains, _chains),
    }


def _curve(xs, contestants) -> dict[str, list[tuple[int, float]]]:
    out: dict[str, list[tuple[int, float]]] = {}
    for x in xs:
        for name, times in take_turns(contestants(x), rounds=5, seconds=0.01).items():
            out.setdefault(name, []).append((x, statistics.median(times)))
    return out


def _updates(leaves: int, size: int) -> dict:
    params, grads = c.tensors(leaves, size), c.tensors(leaves, size)
    tx = bc.sghmc(c.LR, c.MOMENTUM, temperature=c.TEMPERATURE)
    return {
        "fused": c.fused(tx, params, grads),
        "fused, Philox": c.fused(bc.with_stream(tx, "philox"), params, grads),
        "update + apply": c.update_and_apply(tx, params, grads),
        "normal_ + torch.optim fused": c.normal_and_fused(params, grads),
        "posteriors": c.posteriors_sghmc(params, grads),
        "torchopt SGD (no noise)": c.torchopt_sgd(params, grads),
    }


def _chains(n: int) -> dict:
    batch, params = regression_data(), torch.zeros(n, D)
    tx = bc.sghmc(0.05, 0.9, temperature=1 / N)
    run = {}
    for name, t in (("generator", tx), ("Philox", bc.with_stream(tx, "philox"))):
        chains = bc.parallel(bc.make_step(logistic, t), n)
        now = [params, chains.init(t, params)]

        def step(chains=chains, now=now):
            now[:] = chains(*now, batch)[:2]

        run[f"parallel, {name}"] = step
    return run


def draw(result: dict, path: Path) -> None:
    """One panel for each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(result), figsize=(5 * len(result), 4), constrained_layout=True)
    for axis, (title, lines) in zip(axes, result.items()):
        for name, points in lines.items():
            axis.loglog(*zip(*points), marker="o", label=name)
        axis.set(xlabel=title, ylabel="seconds a step")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
