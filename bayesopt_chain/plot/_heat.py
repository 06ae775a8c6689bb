"""How much wider minibatches make a posterior, direction by direction."""

from __future__ import annotations

from typing import Any

from bayesopt_chain import kinds
from bayesopt_chain.plot._axes import axes_or_new, plain


@kinds.takes(report=kinds.ANY, label=kinds.TEXT, ax=kinds.ANY)
def heat(report: Any, *, label: str | None = None, ax: Any = None) -> Any:
    """The variance that minibatches add, over the variance without them, along each direction of a report.

    Args:
        report: of :func:`bayesopt_chain.diagnostics.heating`.
        label: for the legend; by default the order of the batches.
        ax: matplotlib axes (default: a new figure). Call again with the same axes to compare orders and rates.

    Returns:
        The axes: ``1 + excess`` against ``kappa``, the relaxations of a direction in an epoch, both logarithmic. On the
        line at 1 the draws are as wide as the posterior.

    Raises:
        ModuleNotFoundError: no matplotlib.
        TypeError: ``ax`` is no axes, or ``report`` is no report of heat.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (w - batch).square().mean() / 2
        >>> data = bc.epochs(torch.linspace(-3**0.5, 3**0.5, 1000), 20)
        >>> noise = bc.diagnostics.gradient_noise(loss, torch.tensor(0.0), data)
        >>> report = bc.diagnostics.heating(bc.sghmc(0.002, temperature=1 / 1000), noise)
        >>> bc.plot.heat(report).get_xlabel()
        'relaxations in an epoch'
    """
    if not hasattr(report, "excess") or not hasattr(report, "kappa"):
        raise TypeError(f"plot.heat: report must come from bc.diagnostics.heating, got {type(report).__name__}")
    ax = axes_or_new("heat", ax)
    if not ax.lines:
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        ax.set(xscale="log", yscale="log", xlabel="relaxations in an epoch", ylabel="variance / posterior variance")
    order = report.kappa.argsort()
    ax.plot(
        plain(report.kappa[order]), plain(1 + report.excess[order]), "o-", markersize=4, label=label or report.order
    )
    ax.legend()
    return ax
