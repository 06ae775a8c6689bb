"""Traces of draws, by ArviZ."""

from __future__ import annotations

from typing import Any

from bayesopt_chain import kinds
from bayesopt_chain.checks import installed


@kinds.takes(draws=kinds.ANY, names=kinds.SEQUENCE)
def traces(draws: Any, names: list[str] | None = None, *, thinning: int = 1) -> Any:
    """The density and the trace of each parameter, a line for each chain, as ArviZ draws them.

    Args:
        draws: a :class:`bayesopt_chain.Draws`, or any that ``to_arviz()`` turns into inference data.
        names: of the leaves to show, as in ``draws.to_arviz()`` (dots in place of slashes); default: all. Of a network
            choose some: every element of a leaf is a line.
        thinning: show every so many draws.

    Returns:
        What ArviZ returns: an array of axes, ``[leaves, 2]``, and from ArviZ 1 on its collection of plots.

    Raises:
        ModuleNotFoundError: no ArviZ or no matplotlib.
        TypeError: no draws.
        ValueError: a thinning below 1; a name that the draws do not have, with the names they have.

    Example:
        >>> import matplotlib, torch, bayesopt_chain as bc
        >>> matplotlib.use("agg")
        >>> draws = bc.Draws.from_trees([{"w": torch.randn(2)} for _ in range(20)])
        >>> bc.plot.traces(draws).shape
        (1, 2)
    """
    if not hasattr(draws, "to_arviz"):
        raise TypeError(f"plot.traces: draws must be a bc.Draws, got {type(draws).__name__}")
    installed("plot.traces", "plot", "matplotlib")
    installed("plot.traces", "diagnostics", "arviz")
    import arviz

    data = draws.to_arviz()
    known = list(data.posterior.data_vars)
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"plot.traces: no leaf is called {unknown[0]!r}; there are {', '.join(known[:12])}")
    plot: Any = getattr(arviz, "plot_trace_dist", arviz.plot_trace)  # its name from ArviZ 1 on
    return plot(data.sel(draw=slice(None, None, thinning)), var_names=names)
