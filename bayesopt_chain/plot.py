r"""Pictures of predictions and of their calibration, on matplotlib's axes.

Needs the extra ``plot`` (matplotlib). Each function draws onto the axes that it is given, or makes a
figure of its own, and returns the axes, so that titles, scales and files are matplotlib's business. Traces of draws are
ArviZ's, of ``draws.to_arviz()``.

Calibration of classes, in ``bins`` of equal width of the largest probability: the mean of that probability against the share
of data for which the class was right (DeGroot and Fienberg, 1983). Of targets on the line: for every level ``p`` the share of
data inside the central interval of probability ``p``, which is the share of data with ``|2 F(y) - 1| <= p``, where ``F`` is
the prediction's distribution function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks

__all__ = ["bands", "coverage", "reliability"]

_AX = checks.having("matplotlib axes (fig, ax = plt.subplots())", "fill_between", "set_xlabel").or_none()


def axes_or_new(who: str, ax: Any) -> Any:
    """``ax``, or the axes of a new figure.

    Raises:
        ModuleNotFoundError: no matplotlib.
    """
    checks.installed(f"plot.{who}", "plot", "matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(6, 4), layout="constrained").subplots() if ax is None else ax


def plain(x: Tensor) -> Any:
    """As numpy, for matplotlib."""
    return x.detach().cpu().double().numpy()


@checks.takes(
    x=checks.Kind(
        lambda x: checks.VALUES.fits(x) and x.shape in (x.shape[:1], (*x.shape[:1], 1)),
        "inputs of one variable, a tensor [N] or [N, 1]",
        (Tensor,),
    ),
    prediction=checks.Kind(
        lambda x: hasattr(x, "interval") and not isinstance(x, type), "a prediction with mean and interval"
    ),
    levels=checks.Kind(
        lambda x: checks.SEQUENCE.fits(x) and all(map(checks.number("(0, 1)").fits, x)),
        "a list of numbers in (0, 1)",
        (list, tuple),
    ),
    output=checks.INDEX,
    ax=_AX,
)
def bands(
    x: Tensor,
    prediction: Any,
    *,
    levels: Sequence[float] = (0.5, 0.9),
    output: int = 0,
    ax: Any = None,
) -> Any:
    """The mean of a prediction along one input, and its central intervals.

    Args:
        x: ``[N]`` or ``[N, 1]``, where the predictions were made; need not be in order.
        prediction: of ``fitted.predict``, ``likelihood.predictive`` and their like: anything with a ``mean``, ``[N]`` or
            ``[N, outputs]``, and ``interval(level)`` that returns the lower and upper ends in that shape. Intervals are
            those of a new target, noise included.
        levels: the probability inside each band.
        output: which output to draw, where there are several.
        ax: matplotlib axes (default: a new figure).

    Returns:
        The axes; ``ax.plot(x, y, ".")`` adds data.

    Raises:
        ModuleNotFoundError: no matplotlib.
        TypeError: ``ax`` is no axes.
        ValueError: inputs that are not one-dimensional, other numbers of predictions, a level outside (0, 1).

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods, plot
        >>> x = torch.linspace(-1, 1, 50)
        >>> prediction = likelihoods.gaussian(0.1).predictive(x.sin()[:, None], 0.1 + x.square()[:, None, None])
        >>> ax = plot.bands(x, prediction)
        >>> [band.get_label() for band in ax.collections]
        ['50 %', '90 %']
    """
    places = x.reshape(-1)
    mean = _of_output(prediction.mean, output)
    if len(mean) != len(places):
        raise ValueError(f"plot.bands: {len(places)} inputs x and {len(mean)} predictions")
    ends = [[_of_output(end, output) for end in prediction.interval(level)] for level in levels]

    ax = axes_or_new("bands", ax)
    order = torch.argsort(places)
    (line,) = ax.plot(plain(places[order]), plain(mean[order]), label="mean")
    for level, (low, high) in zip(levels, ends):
        ax.fill_between(
            plain(places[order]),
            plain(low[order]),
            plain(high[order]),
            color=line.get_color(),
            alpha=0.35 * (1 - level) + 0.12,
            linewidth=0,
            label=f"{level * 100:g} %",
        )
    ax.legend()
    return ax


def _of_output(y: Tensor, output: int) -> Tensor:
    columns = y[:, None] if y.ndim == 1 else y
    if columns.ndim != 2 or not -columns.shape[1] <= output < columns.shape[1]:
        raise ValueError(
            f"plot.bands: prediction has shape {tuple(y.shape)}, which has no output {output}; [N] or [N, outputs]"
        )
    return columns[:, output]


@checks.takes(
    probabilities=checks.Kind(
        lambda p: checks.REALS.fits(p) and bool((p >= 0).all()) and bool(((p.sum(-1) - 1).abs() < 1e-3).all()),
        "a tensor whose rows are at least 0 and add up to 1 (pass softmax values)",
        (Tensor,),
    ),
    targets=checks.NUMBERS_OF_CLASSES,
    bins=checks.WHOLE,
    label=checks.TEXT,
    ax=_AX,
)
def reliability(
    probabilities: Tensor, targets: Tensor, *, bins: int = 15, label: str | None = None, ax: Any = None
) -> Any:
    """How often the predicted class is right, against how sure the prediction was; on the diagonal it is calibrated.

    Args:
        probabilities: of the classes, ``[N, C]``; rows add up to 1.
        targets: class numbers, int64 ``[N]``.
        bins: of confidence, of equal width; empty ones are left out. The size of a dot is the share of data in its bin.
        label: for the legend; the expected calibration error is written behind it.
        ax: matplotlib axes (default: a new figure). Call again with the same axes to compare methods.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: no matplotlib.
        TypeError: ``ax`` is no axes.
        ValueError: shapes that do not belong together, rows that are no probabilities, fewer than one bin.

    Example:
        >>> import torch
        >>> from bayesopt_chain import plot
        >>> p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
        >>> plot.reliability(p, torch.tensor([0, 1, 1]), label="network").get_legend_handles_labels()[1]
        ['calibrated', 'network (ECE 0.300)']
    """
    if probabilities.ndim != 2 or targets.shape != probabilities.shape[:1] or not len(targets):
        raise ValueError(
            f"plot.reliability: expected probabilities [N, C] and targets [N], got {tuple(probabilities.shape)} and "
            f"{tuple(targets.shape)}"
        )
    if not bool(((targets >= 0) & (targets < probabilities.shape[1])).all()):
        raise ValueError(
            f"plot.reliability: targets must be class numbers from 0 to {probabilities.shape[1] - 1}: leave out data without"
        )
    confidence, predicted = probabilities.double().max(-1)
    right = (predicted == targets).double()
    which = (confidence * bins).long().clamp(max=bins - 1)
    counts, sure, correct = (which.bincount(x, bins) for x in (torch.ones_like(right), confidence, right))
    filled = counts > 0
    counts, sure, correct = (x[filled] for x in (counts, sure / counts, correct / counts))
    error = float((counts * (sure - correct).abs()).sum() / counts.sum())

    ax = axes_or_new("reliability", ax)
    _diagonal(ax, "confidence", "share that is right")
    (line,) = ax.plot(plain(sure), plain(correct), label=f"{label} (ECE {error:.3f})" if label else f"ECE {error:.3f}")
    ax.scatter(plain(sure), plain(correct), s=plain(200 * counts / counts.sum() + 4), color=line.get_color())
    ax.legend()
    return ax


@checks.takes(prediction=checks.WITH_CDF, targets=checks.VALUES, label=checks.TEXT, ax=_AX)
def coverage(prediction: Any, targets: Tensor, *, label: str | None = None, ax: Any = None) -> Any:
    """The share of targets inside the central intervals, for every level; on the diagonal the prediction is calibrated.

    Below the diagonal intervals are too narrow, above it too wide.

    Args:
        prediction: with ``cdf(targets)``, the probability of a smaller target, such as that of ``fitted.predict``. Of
            targets on the line: of counts, intervals are wider than their level.
        targets: of the shape of the prediction's mean; all elements count alike.
        label: for the legend.
        ax: matplotlib axes (default: a new figure). Call again with the same axes to compare methods.

    Returns:
        The axes.

    Raises:
        ModuleNotFoundError: no matplotlib.
        TypeError: ``ax`` is no axes.
        ValueError: no targets, or NaN among the probabilities.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods, plot
        >>> prediction = likelihoods.gaussian(1.0).predictive(torch.zeros(100, 1), torch.zeros(100, 1, 1))
        >>> levels = torch.arange(0.5, 100)[:, None] / 100
        >>> ax = plot.coverage(prediction, torch.special.ndtri(levels), label="exact")
        >>> x, y = ax.lines[-1].get_data()
        >>> bool(abs(x - y).max() < 0.02)
        True
    """
    inside = (2 * prediction.cdf(targets) - 1).abs().reshape(-1).double()
    if not len(inside) or inside.isnan().any():
        raise ValueError(
            f"plot.coverage: {'no targets' if not len(inside) else 'the prediction or the targets hold NaN'}"
        )
    needed = inside.sort().values
    shares = torch.arange(1, len(needed) + 1, dtype=torch.float64, device="cpu") / len(needed)

    ax = axes_or_new("coverage", ax)
    _diagonal(ax, "probability of the interval", "share of targets inside")
    ax.plot([0.0, *plain(needed)], [0.0, *plain(shares)], label=label, drawstyle="steps-post")
    ax.legend()
    return ax


def _diagonal(ax: Any, x: str, y: str) -> None:
    """The line of perfect calibration, once for each axes."""
    if not ax.lines:
        ax.plot([0, 1], [0, 1], color="black", linewidth=0.8, linestyle="--", label="calibrated")
        ax.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1.02))
