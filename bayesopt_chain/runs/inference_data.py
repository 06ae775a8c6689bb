"""Draws as ArviZ takes them: data sets of xarray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def inference_data(
    params: Mapping[str, Tensor], stats: Mapping[str, Tensor], likelihood: Tensor | None, chains: int | None
) -> Any:
    """Leaves ``[S, ...]``, or ``[S, chains, ...]``, as the installed ArviZ takes them, in float64.

    Args:
        params: leaves by their names.
        stats: sample statistics, likewise.
        likelihood: of every datum under every draw.
        chains: the number of chains on axis 1; ``None``: there is no such axis.

    Returns:
        ``arviz.InferenceData`` before ArviZ 1, an ``xarray.DataTree`` since.
    """
    import arviz
    import xarray

    groups = {
        "posterior": params,
        "sample_stats": stats,
        "log_likelihood": {} if likelihood is None else {"y": likelihood},
    }
    sets = {name: _data_set(columns, chains) for name, columns in groups.items() if columns}
    kept: Callable[..., Any] | None = getattr(arviz, "InferenceData", None)
    return xarray.DataTree.from_dict(sets) if kept is None else kept(**sets)


def _data_set(columns: Mapping[str, Tensor], chains: int | None) -> Any:
    """An ``xarray.Dataset`` with dimensions chain, draw and those of a draw."""
    import xarray

    variables = {}
    for name, x in columns.items():
        draws_first = x.detach() if chains is not None else x.detach()[:, None]
        array = draws_first.transpose(0, 1).to("cpu", torch.float64).contiguous().numpy()
        dims = ["chain", "draw", *[f"{name}_dim_{i}" for i in range(array.ndim - 2)]]
        variables[name] = xarray.Variable(dims, array)
    sizes = next(iter(variables.values())).sizes
    return xarray.Dataset(variables, {"chain": range(sizes["chain"]), "draw": range(sizes["draw"])})
