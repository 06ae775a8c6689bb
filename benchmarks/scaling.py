"""What one SGHMC step costs in time and memory against the number of parameters, of leaves and of chains.

    python -m benchmarks.scaling [--decades 9] [--out benchmarks/results/scaling.json]

Every point runs in a process of its own: the median time of a step, and the resident memory at its peak beyond what the
process held before it made any parameter (parameters and gradients are counted). A point that would not fit into the memory
that is free, by the bytes of the point before it, is left out and named. The slope of a curve is the exponent ``k`` of
``seconds ~ n^k`` over its last two decades, by least squares on the logarithms: 1 where the arithmetic or memory counts, 0
where a fixed cost does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import bayesopt_chain as bc
from benchmarks import contestants as c
from benchmarks.measure import keep, take_turns

OUT = Path(__file__).parent / "results" / "scaling.json"
AXES = {
    "parameters": "parameters, one leaf, update only",
    "leaves": "leaves, 1e5 parameters in all, update only",
    "chains": "chains, logistic regression 768 x 8, whole step with gradient",
}


def update(n: int, leaves: int, make: Callable) -> Callable[[], None]:
    """An update of ``n`` parameters in so many leaves, by ``make(tx, params, grads)``."""
    tensors = [c.tensors(leaves, n // leaves) for _ in range(2)]
    return make(bc.sghmc(c.LR, c.MOMENTUM, temperature=c.TEMPERATURE), *tensors)


UPDATES: dict[str, Callable] = {
    "fused": c.fused,
    "update + apply": c.update_and_apply,
    "normal_ + torch.optim fused": lambda tx, params, grads: c.normal_and_fused(params, grads),
    "posteriors": lambda tx, params, grads: c.posteriors_sghmc(params, grads),
    "torchopt SGD (no noise)": lambda tx, params, grads: c.torchopt_sgd(params, grads),
}


def chains(n: int, captured: bool) -> Callable[[], None]:
    """A step of ``n`` chains, whose parameters are a leaf ``[n, 8]``."""
    from benchmarks.cpu import D, N, logistic, regression_data

    batch, params = regression_data(), torch.zeros(n, D)
    tx = bc.sghmc(0.05, 0.9, temperature=1 / N)
    step = bc.parallel(bc.make_step(logistic, tx), n)
    state = step.init(tx, params)
    run = bc.capture(step, params, state, batch) if captured else step
    now = [params, state]

    def once() -> None:
        now[:] = run(*now, batch)[:2]

    return once


CHAINS: dict[str, Callable] = {
    "parallel": lambda n: chains(n, captured=False),
    "captured": lambda n: chains(n, captured=True),
}


def contestants(axis: str) -> dict[str, Callable[[int], Callable[[], None]]]:
    """By name, what makes the step of a point."""
    if axis == "chains":
        return CHAINS
    return {
        name: lambda n, make=make: update(n, 1, make) if axis == "parameters" else update(100_000, n, make)
        for name, make in UPDATES.items()
    }


def measured(axis: str, name: str, n: int) -> dict[str, float]:
    """One point, in this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    small = 64 if axis == "chains" else 1
    contestants(axis)[name](small)()  # what a first step imports, compiles and allocates is no cost of size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    run = contestants(axis)[name](n)
    times = take_turns({name: run}, rounds=5 if n < 10**8 else 3, seconds=0.01)[name]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"n": n, "seconds": statistics.median(times), "bytes": max(0, peak - before)}


def curve(axis: str, name: str, sizes: list[int]) -> dict:
    """The points of one contestant, each in a process of its own, and what was left out."""
    points: list[dict[str, float]] = []
    for n in sizes:
        if points and points[-1]["bytes"] * n / points[-1]["n"] > 0.9 * available():
            need = points[-1]["bytes"] * n / points[-1]["n"] / 2**30
            return {"points": points, "left_out": f"{n:.0e}: it would take about {need:.0f} GiB"}
        command = [sys.executable, "-m", "benchmarks.scaling", "--alone", axis, name, str(n)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"points": points, "left_out": f"{n:.0e}: {(done.stderr.strip() or 'killed').splitlines()[-1]}"}
        points.append(json.loads(done.stdout.splitlines()[-1]))
    return {"points": points}


def available() -> float:
    """Bytes of memory that a new process may take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * float(next(line for line in lines if line.startswith("MemAvailable")).split()[1])


def slope(points: list[dict[str, float]], of: str = "seconds") -> float:
    """The exponent over the last two decades; NaN for fewer than two points."""
    last = [p for p in points if p["n"] * 100 >= points[-1]["n"] and p[of] > 0]
    if len(last) < 2:
        return math.nan
    x, y = ([math.log(p[key]) for p in last] for key in ("n", of))
    return statistics.linear_regression(x, y).slope


def table(path: Path = OUT) -> str:
    """One line for each curve: its largest point, what it costs there for each unit, and the slope."""
    lines = [
        "| against | step | largest | time for each, ns | memory for each, bytes | slope of time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for axis, curves in json.loads(path.read_text())["curves"].items():
        for name, found in curves.items():
            last = found["points"][-1]
            lines.append(
                f"| {axis} | {name} | {last['n']:.0e} | {1e9 * last['seconds'] / last['n']:.3g} | "
                f"{last['bytes'] / last['n']:.3g} | {slope(found['points']):.2f} |"
            )
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Two panels for each axis, time above and memory below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(path.read_text())["curves"]
    figure, axes = plt.subplots(2, len(result), figsize=(5 * len(result), 7), constrained_layout=True, squeeze=False)
    for column, (axis, curves) in enumerate(result.items()):
        for row, (of, label) in enumerate((("seconds", "seconds a step"), ("bytes", "bytes beyond an empty process"))):
            panel = axes[row][column]
            for name, found in curves.items():
                points = [(p["n"], p[of]) for p in found["points"] if p[of] > 0]
                panel.loglog(*zip(*points), marker="o", markersize=3, label=name)
            panel.set(xlabel=AXES[axis], ylabel=label)
            panel.grid(alpha=0.3)
        axes[0][column].legend(fontsize=7)
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--decades", type=int, default=9, help="the most parameters, as a power of ten")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--alone", nargs=3, metavar=("AXIS", "NAME", "N"), help="one point, in this process")
    given = parser.parse_args()
    if given.alone:
        axis, name, n = given.alone
        print(json.dumps(measured(axis, name, int(n))))
        return
    sizes = {
        "parameters": [10**k for k in range(3, given.decades + 1)],
        "leaves": [1, 10, 100, 1000],
        "chains": [10**k for k in range(min(6, given.decades + 1))],
    }
    result: dict = {"curves": {}}
    for axis, ns in sizes.items():
        result["curves"][axis] = {}
        for name in contestants(axis):
            result["curves"][axis][name] = found = curve(axis, name, ns)
            print(axis, name, json.dumps(found), flush=True)
            keep(given.out, result)
    draw(given.out)
    print(table(given.out))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
