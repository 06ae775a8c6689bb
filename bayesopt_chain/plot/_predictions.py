"""Predictions of a function of one variable, with bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.plot._axes import axes_or_new, plain


@kinds.takes(
    x=kinds.ANY,
    prediction=kinds.Kind(
        lambda x: hasattr(x, "interval") and not isinstance(x, type), "a prediction with mean and interval"
    ),
    levels=kinds.Kind(
        lambda x: kinds.SEQUENCE.fits(x) and all(map(kinds.real("(0, 1)").fits, x)),
        "a list of numbers in (0, 1)",
        (list, tuple),
    ),
    output=kinds.INDEX,
    data=kinds.Kind(
        lambda x: kinds.SEQUENCE.fits(x) and len(x) == 2 and all(map(kinds.VALUES.fits, x)),
        "a pair (inputs, targets) of tensors",
    ),
    ax=kinds.ANY,
)
def bands(
    x: Tensor,
    prediction: Any,
    *,
    levels: Sequence[float] = (0.5, 0.9),
    output: int = 0,
    data: tuple[Tensor, Tensor] | None = None,
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
        data: inputs and targets to show as dots, each ``[n]`` or ``[n, 1]`` (targets ``[n, outputs]``).
        ax: matplotlib axes (default: a new figure).

    Returns:
        The axes.

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
    places = _of_one_variable("x", x)
    mean = _of_output("prediction", prediction.mean, output)
    if len(mean) != len(places):
        raise ValueError(f"plot.bands: {len(places)} inputs x and {len(mean)} predictions")
    ends = [[_of_output("prediction", end, output) for end in prediction.interval(level)] for level in levels]
    dots = None if data is None else (_of_one_variable("data", data[0]), _of_output("data", data[1], output))

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
    if dots is not None:
        ax.plot(*map(plain, dots), ".", color="black", markersize=4, label="data")
    ax.legend()
    return ax


def _of_one_variable(name: str, x: Tensor) -> Tensor:
    if not kinds.VALUES.fits(x) or x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[1] != 1):
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"plot.bands: {name} must hold inputs of one variable, [N] or [N, 1], got {came}")
    return x.reshape(-1)


def _of_output(name: str, y: Tensor, output: int) -> Tensor:
    if y.ndim == 2 and -y.shape[1] <= output < y.shape[1]:
        return y[:, output]
    if y.ndim == 1 and output in (0, -1):
        return y
    raise ValueError(
        f"plot.bands: {name} has shape {tuple(y.shape)}, which has no output {output}; [N] or [N, outputs]"
    )
