"""Draws as ArviZ inference data: in memory, or read from the disk when ArviZ asks for them."""

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
    """``arviz.InferenceData`` of leaves ``[S, ...]``, or ``[S, chains, ...]``; stored ones stay where they are.

    Args:
        params: leaves by their names.
        stats: sample statistics, likewise.
        likelihood: of every datum under every draw.
        chains: the number of chains on axis 1; ``None``: there is no such axis.
    """
    import arviz

    held = {name: _laid_out(x, chains) for name, x in params.items() if not isinstance(x, Stored)}
    stored = {name: x for name, x in params.items() if isinstance(x, Stored)}
    groups: dict[str, Any] = {"sample_stats": {name: _laid_out(x, chains) for name, x in stats.items()}}
    if held:
        groups["posterior"] = held
    if likelihood is not None:
        groups["log_likelihood"] = {"y": _laid_out(likelihood, chains)}
    out: Any = arviz.from_dict(**groups)
    if stored:
        lazy = _lazy(stored, chains)
        if held:
            out.posterior = out.posterior.assign(lazy)
        else:
            out.add_groups(posterior=lazy)
    return out


def _laid_out(x: Tensor, chains: int | None) -> Any:
    x = x[:, None] if chains is None else x
    return x.detach().transpose(0, 1).to("cpu", torch.float64).contiguous().numpy()


def _lazy(stored: Mapping[str, Stored], chains: int | None) -> Any:
    """An ``xarray.Dataset`` whose variables are read when they are looked at, in the precision in which they were sampled."""
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
            x = self.x.read(rows).cpu()
            x = x[:, None] if chains is None else x
            return x.transpose(0, 1).numpy()[(chain, 0 if isinstance(draw, int) else slice(None), *rest)]

    variables = {}
    for name, x in stored.items():
        array = OnDisk(x)
        dims = ["chain", "draw", *[f"{name}_dim_{i}" for i in range(len(array.shape) - 2)]]
        variables[name] = xarray.Variable(dims, indexing.LazilyIndexedArray(array))
    first = next(iter(variables.values()))
    return xarray.Dataset(variables, {"chain": range(first.shape[0]), "draw": range(first.shape[1])})
