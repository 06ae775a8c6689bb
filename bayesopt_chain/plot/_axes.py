"""Axes to draw on: the ones that are given, or those of a new figure that no window manager knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayesopt_chain.checks import installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def axes_or_new(who: str, ax: Any) -> Axes:
    """``ax``, or the axes of a new figure.

    Raises:
        ModuleNotFoundError: no matplotlib.
        TypeError: not axes.
    """
    installed(f"plot.{who}", "plot", "matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if ax is None:
        return Figure(figsize=(6, 4), layout="constrained").subplots()
    if not isinstance(ax, Axes):
        raise TypeError(f"plot.{who}: ax must be matplotlib axes, got {type(ax).__name__}; fig, ax = plt.subplots()")
    return ax


def plain(x: Tensor) -> Any:
    """As numpy, for matplotlib."""
    return x.detach().cpu().double().numpy()
