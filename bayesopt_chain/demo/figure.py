"""The demo's figure: one column per method, the same scales in every column."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from torch import Tensor

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#6B6B6B"  # from Okabe and Ito's colour-blind-safe palette
STRIP = 7  # digits in a strip


def draw_figure(
    path: str | Path,
    predictions: dict[str, tuple[Tensor, Tensor, Tensor]],
    images: Tensor,
    labels: Tensor,
    classes: int,
    table: dict[str, dict[str, float]],
) -> None:
    """Write the figure.

    Args:
        predictions: per method the mean probabilities (data, classes) and the aleatoric and epistemic uncertainty (data,).
        images: (data, height, width). labels: (data,); those of ``classes`` and above were not seen in training.
        table: per method the scores that the titles quote.
    """
    seen = labels < classes
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(3.4 * len(predictions), 9.2), layout=layout)
    FigureCanvasAgg(figure)
    rows = figure.subplots(4, len(predictions), height_ratios=[3, 3, 0.85, 0.85], squeeze=False)
    for column, (name, (mean, aleatoric, epistemic)) in zip(rows.T, predictions.items()):
        reliability(column[0], mean[seen], labels[seen])
        column[0].set_title(f"{name}\n", fontweight="bold", fontsize=13)
        column[0].text(
            0.5,
            1.03,
            f"NLL {table[name]['nll']:.3f}    ECE {table[name]['ece']:.3f}",
            transform=column[0].transAxes,
            ha="center",
            color=GREY,
        )
        uncertainty(column[1], aleatoric, epistemic, seen, table[name]["auroc_total"])
        order = (aleatoric + epistemic).argsort()
        strip(column[2], order[:STRIP], images, labels, mean, classes, "most sure of, and its prediction")
        strip(column[3], order.flip(0)[:STRIP], images, labels, mean, classes, "least sure of, and its prediction")
    tidy_scales(rows[1])
    rows[0, 0].set_ylabel("accuracy")
    rows[1, 0].set_ylabel("epistemic uncertainty (nats)")
    rows[1, 0].legend(loc="upper left", frameon=False, handletextpad=0.2, markerscale=1.6)
    figure.savefig(path, dpi=150)


def reliability(axes: Axes, mean: Tensor, labels: Tensor, bins: int = 5) -> None:
    """Accuracy against confidence in equal-width bins, each with its 90 % Wilson interval and its number of digits."""
    confidence, guess = mean.max(-1)
    correct = (guess == labels).float()
    which = (confidence * bins).long().clamp(max=bins - 1)
    n = torch.bincount(which, minlength=bins)
    filled = n > 0
    n = n[filled]
    centre = torch.bincount(which, confidence, minlength=bins)[filled] / n
    accuracy = torch.bincount(which, correct, minlength=bins)[filled] / n
    z2 = 1.645**2
    middle = (accuracy + z2 / (2 * n)) / (1 + z2 / n)
    half = (z2 * accuracy * (1 - accuracy) / n + (z2 / (2 * n)) ** 2).sqrt() / (1 + z2 / n)
    axes.plot([0, 1], [0, 1], color=GREY, linestyle=":", linewidth=1)
    axes.vlines(centre, middle - half, middle + half, color=BLUE, alpha=0.35, linewidth=5)
    axes.scatter(centre, accuracy, s=42, color=BLUE, edgecolor="white", zorder=3)
    for x, count in zip(centre.tolist(), n.tolist()):
        axes.annotate(str(count), (x, 1.04), ha="center", color=GREY, fontsize=8)
    axes.set(xlim=(0.18, 1.04), ylim=(-0.03, 1.13), xlabel="confidence")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid(alpha=0.2)


def uncertainty(axes: Axes, aleatoric: Tensor, epistemic: Tensor, seen: Tensor, auroc: float) -> None:
    """Every test digit by both kinds of uncertainty."""
    for mask, color, label in ((seen, BLUE, "seen: 0 to 7"), (~seen, ORANGE, "unseen: 8 and 9")):
        axes.scatter(aleatoric[mask], epistemic[mask], s=9, alpha=0.45, color=color, label=label, linewidth=0)
    axes.set(xlabel="aleatoric uncertainty (nats)")
    axes.set_title(f"AUROC of unseen digits {auroc:.3f}", fontsize=10, color=GREY)
    axes.grid(alpha=0.2)


def strip(axes: Axes, chosen: Tensor, images: Tensor, labels: Tensor, mean: Tensor, classes: int, title: str) -> None:
    """A row of digits framed in the colour of seen or unseen, with the predicted class under each."""
    size = images.shape[-1]
    for place, i in enumerate(chosen.tolist()):
        left = place * (size + 2)
        axes.imshow(images[i], cmap="gray_r", extent=(left, left + size, 0, size))
        known = labels[i] < classes
        color = BLUE if known else ORANGE
        axes.add_patch(Rectangle((left, 0), size, size, fill=False, color=color, linewidth=1.5))
        axes.text(left + size / 2, -1, str(int(mean[i].argmax())), ha="center", va="top", color=color, fontsize=10)
    axes.set(xlim=(-1, STRIP * (size + 2) - 1), ylim=(-5, size + 1), aspect="equal")
    axes.set_title(title, fontsize=10, color=GREY)
    axes.axis("off")


def tidy_scales(row) -> None:
    """The same limits for all panels of a row."""
    x = max(axes.get_xlim()[1] for axes in row)
    y = max(axes.get_ylim()[1] for axes in row)
    for axes in row:
        axes.set(xlim=(-0.03 * x, x), ylim=(-0.03 * y, y))
