"""Draws as ArviZ takes them: data sets of xarray, in memory, or read from the disk when ArviZ asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Stored(NamedTuple):
    """A column on disk: shape ``[S, ...]``, dtype, and a function that reads rows of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice], Tensor]


def inference_data(
    params: Mapping[str, Tensor | Stored], stats: Mapping[str, Tensor], likelihood: Tensor | None, chains: int | None
) -> Any:
    """Leaves ``[S, ...]``, or ``[S, chains, ...]``, as the installed ArviZ takes them; stored ones stay where they are.

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


def _data_set(columns: Mapping[str, Tensor | Stored], chains: int | None) -> Any:
    """An ``xarray.Dataset`` with dimensions chain, draw and those of a draw. What is stored keeps its precision."""
    import xarray
    from xarray.backends import BackendArray
    from xarray.core import indexing

    class OnDisk(BackendArray):
        def __init__(self, x: Stored) -> None:
            self.x = x
            self.shape = (chains or 1, x.shape[0], *x.shape[1 if chains is None else 2 :])
            self.dtype = torch.empty(0, dtype=x.dtype, device="cpu").numpy().dtype

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self.picked)

        def picked(self, key: Any) -> Any:
            chain, draw, *rest = key
            rows = slice(draw, draw + 1) if isinstance(draw, int) else draw
            x = _chains_first(self.x.read(rows).cpu(), chains).numpy()
            return x[(chain, 0 if isinstance(draw, int) else slice(None), *rest)]

    variables = {}
    for name, x in columns.items():
        if isinstance(x, Stored):
            array: Any = indexing.LazilyIndexedArray(OnDisk(x))
        else:
            array = _chains_first(x.detach(), chains).to("cpu", torch.float64).contiguous().numpy()
        dims = ["chain", "draw", *[f"{name}_dim_{i}" for i in range(len(array.shape) - 2)]]
        variables[name] = xarray.Variable(dims, array)
    sizes = next(iter(variables.values())).sizes
    return xarray.Dataset(variables, {"chain": range(sizes["chain"]), "draw": range(sizes["draw"])})


def _chains_first(x: Tensor, chains: int | None) -> Tensor:
    return (x[:, None] if chains is None else x).transpose(0, 1)
