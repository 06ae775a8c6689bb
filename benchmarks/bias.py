"""Bias against learning rate for every sampler whose order is stated, computed, not simulated.

    python benchmarks/bias.py [--out DIRECTORY]

On ``U = theta^2 / 2 + theta^4 / 4`` at T = 1, in one dimension, the stationary ``E theta^2`` of each sampler's own code by
transfer-operator quadrature (``tests/samplers/transfer.py``), less the exact value. Splittings, whose step ``h`` is a time, are
shown at ``lr = h^2``. Writes ``bias.csv``, and ``bias.png`` where matplotlib is installed. Half a minute on one core.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bayesopt_chain as bc
from tests.registry import SAMPLERS
from tests.samplers.test_lattice import lattice_moment
from tests.samplers.test_preconditioned import grid_moment, hessian
from tests.samplers.transfer import QUARTIC, every_draw_as_a_normal, stationary_moment, target_moment

WITHOUT_POLYNOMIALS = {
    "lattice_walk": lattice_moment,  # by detailed balance
    "psgld corrected, alpha 0": lambda lr: grid_moment(  # on a grid, P having a kink
        bc.samplers.psgld(lr, 0.0, 1.0, temperature=1.0, corrected=True), hessian_diagonal=hessian
    ),
}


def curve(order, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Learning rates and relative biases over the range in which the order is fitted."""
    steps = np.geomspace(order.steps[0], order.steps[-1], points)
    want = target_moment(QUARTIC, 1.0)
    moments = [stationary_moment(order.probe(float(h)), 1.0, degree=order.degree, noise=order.noise) for h in steps]
    return steps**2 if order.in_time else steps, np.array(moments) / want - 1


def report(name: str, lr: np.ndarray, bias: np.ndarray) -> None:
    slope = np.polyfit(np.log(lr), np.log(np.abs(bias)), 1)[0]
    print(f"{name:28s} order in lr {slope:5.2f}   bias {bias[0]:+.2e} .. {bias[-1]:+.2e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--points", type=int, default=6)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves = {}
    with every_draw_as_a_normal():
        for sampler in SAMPLERS:
            if sampler.order:
                curves[sampler.name] = curve(sampler.order, arguments.points)
                report(sampler.name, *curves[sampler.name])
    want, lr = target_moment(QUARTIC, 1.0), np.geomspace(0.002, 0.008, arguments.points)
    for name, moment in WITHOUT_POLYNOMIALS.items():
        curves[name] = lr, np.array([moment(x) for x in lr]) / want - 1
        report(name, *curves[name])
    with open(arguments.out / "bias.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sampler", "lr", "relative_bias"])
        writer.writerows((name, x, y) for name, (lr, bias) in curves.items() for x, y in zip(lr, bias))
    plot(curves, arguments.out / "bias.png")


def plot(curves: dict, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 6))
    for n, (name, (lr, bias)) in enumerate(curves.items()):
        axes.loglog(
            lr,
            np.abs(bias),
            color=f"C{n % 10}",
            marker="ov"[n // 10 % 2],
            ls=["-", "--"][n // 10 % 2],
            ms=4,
            label=name,
        )
    axes.set_xlabel("learning rate (h² for splittings)")
    axes.set_ylabel("|relative bias of E θ²|")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
