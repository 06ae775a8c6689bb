"""The demo's figure: what is won and lost on every task, calibration, and what refusing the least sure inputs is worth."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bayesopt_chain.demo.contestants import ENSEMBLE, LAPLACE, METHODS, NETWORK, POSTERIOR
from bayesopt_chain.demo.table import Cells, difference

COLORS: dict[str, str] = dict(
    zip((NETWORK, LAPLACE, ENSEMBLE, POSTERIOR), ("#6B6B6B", "#009E73", "#D55E00", "#0072B2"))
)  # Okabe and Ito
Sure = dict[str, list[dict[str, list[float]]]]  # by method, what scores.sureness found under every seed
BINS = 8


def draw_figure(path: str | Path, cells: Cells, sure: Sure, task: str) -> None:
    """Write the figure.

    Args:
        path: of the file.
        cells: all scores.
        sure: of the task with unseen classes.
        task: its name.
    """
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    against, reliable, refused = figure.subplots(1, 3, width_ratios=[1.25, 1, 1])
    bars(against, cells)
    if sure:
        reliability(reliable, sure)
        refusals(refused, sure)
        for axes, title in ((reliable, "Calibration"), (refused, "Refusing the least sure")):
            axes.set_title(f"{title}\n{task}", fontsize=11)
            axes.legend(frameon=False, fontsize=9)
    for axes in (against, reliable, refused):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


def bars(axes: Axes, cells: Cells) -> None:
    """Differences of the negative log likelihood from that of the ensemble of equal cost, a row for each task."""
    others = [name for name in METHODS if name != ENSEMBLE]
    for k, name in enumerate(others):
        for place, task in enumerate(cells):
            mean, half = difference(cells, task, name, ENSEMBLE)
            scale = abs(statistics.fmean(row["nll"] for row in cells[task][ENSEMBLE]))
            at, label = place + 0.22 * (k - 1), name if place == 0 else None
            half = half if half < float("inf") else 0.0
            axes.errorbar(
                mean / scale, at, xerr=half / scale, fmt="o", color=COLORS[name], label=label, markersize=6, capsize=2
            )
    axes.axvline(0, color=COLORS[ENSEMBLE], linewidth=1.5)
    axes.set_yticks(range(len(cells)), list(cells))
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=0.1)
    ticks = [-1, -0.1, 0, 0.1, 1]
    axes.set_xticks(ticks, [f"{100 * x:+g} %" if x else "equal" for x in ticks], fontsize=8)
    axes.set_xlabel("negative log likelihood, less is better")
    axes.set_title("Against a deep ensemble of equal cost", fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def reliability(axes: Axes, sure: Sure) -> None:
    """Accuracy against confidence of the seen classes, over all seeds, in bins that hold as many inputs each."""
    axes.plot([0, 1], [0, 1], color="#6B6B6B", linestyle=":", linewidth=1)
    for name, runs in sure.items():
        pairs = [
            torch.tensor([r["confidence"][: int(r["seen"][0])], r["right"][: int(r["seen"][0])]], device="cpu")
            for r in runs
        ]
        both = torch.cat(pairs, 1)
        both = both[:, both[0].argsort()]
        points = torch.stack([part.mean(1) for part in both.chunk(BINS, 1)])
        axes.plot(*points.T.tolist(), "o-", color=COLORS[name], label=name, markersize=4)
    axes.set(xlabel="confidence", ylabel="accuracy on digits 0 to 7")


def refusals(axes: Axes, sure: Sure) -> None:
    """The share of wrong answers among those kept, seen and unseen classes together, averaged over the seeds."""
    shares = torch.linspace(0, 0.6, 61, device="cpu")
    for name, runs in sure.items():
        curves = []
        for r in runs:
            surest = torch.tensor(r["confidence"], device="cpu").argsort(descending=True)
            wrong = 1 - torch.tensor(r["right"], device="cpu")[surest]
            kept = ((1 - shares) * len(wrong)).long().clamp_min(1)
            curves.append(wrong.cumsum(0)[kept - 1] / kept)
        axes.plot(100 * shares, torch.stack(curves).mean(0), color=COLORS[name], label=name)
    axes.set(
        xlabel="refused, % of digits 0 to 9",
        ylabel="wrong answers among those kept",
        ylim=(0, None),
    )
