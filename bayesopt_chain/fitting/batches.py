"""Reads a loader once, its first batch ahead of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn


class Batches(NamedTuple):
    """A loader whose first batch has been read; ``total`` batches, None where that is not known."""

    first: Any
    rest: Iterator
    total: int | None

    def from_first(self, first: Any) -> Iterable:
        """All batches, with ``first`` in the place of the first."""
        return chain([first], self.rest)


def peeked(loader: Iterable, who: str = "fit_laplace") -> Batches:
    """Read the first batch.

    Raises:
        ValueError: there is none, or it is no pair (inputs, targets).
    """
    rest = iter(loader)
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{who}: the loader has no batches")
    if not (isinstance(first, (tuple, list)) and len(first) == 2):
        raise ValueError(f"{who}: batches must be (inputs, targets), got {type(first).__name__}")
    return Batches(first, rest, len(loader) if hasattr(loader, "__len__") else None)  # pyright: ignore[reportArgumentType]


def with_progress(batches: Iterable, progress: bool, total: int | None = None, unit: str = "batch") -> Iterable:
    """The same, with a progress bar where it is asked for."""
    if not progress:
        return batches
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install tqdm, or leave it out") from None
    return tqdm(batches, unit=unit, total=total)


def require_eval(module: nn.Module, who: str = "fit_laplace") -> None:
    """Raise for layers that mix data or draw."""
    changed = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    for name, layer in module.named_modules():
        if isinstance(layer, changed) and layer.training:
            raise ValueError(
                f"{who}: {name} ({type(layer).__name__}) is in training mode, where a datum's outputs depend on the "
                "others or on chance: call module.eval() first"
            )
