"""Reads what a user has, tensors, a Dataset, a DataLoader or ``bc.epochs``, into tensors with one datum a row.

Stages leave data out, score others, take all data at once and go through them in orders of their own, so that the data are
read once and kept. An augmentation that draws at random is therefore drawn once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, Subset

from bayesopt_chain import batches
from bayesopt_chain.data.epochs import Epochs
from bayesopt_chain.posterior.batches import Reader, as_pair

AT_ONCE = 1024  # data of a Dataset that are read together
LEAST = 8


class Data(NamedTuple):
    """All data: trees of tensors ``[N, *]``, and N."""

    inputs: Any
    targets: Any
    size: int
    raw: Any = None  # the mapping that they were read from, if it was one

    def of(self, module: nn.Module) -> tuple[Data, bool]:
        """The data as this module is to see them, and whether its labels had to be moved to the next token's
        (:class:`bayesopt_chain.posterior.batches.Reader`)."""
        if self.raw is None:
            return self, False
        read = Reader(module)
        _, targets = read(self.raw)
        return self._replace(targets=targets, raw=None), read.own == "moves"

    def take(self, rows: Tensor | None) -> tuple[Any, Any]:
        """``(inputs, targets)`` of these rows, int64 ``[n]`` or ``[M, n]``; of all of them for ``None``."""
        if rows is None:
            return self.inputs, self.targets
        return batches.tree_map(lambda x: x[rows], self.inputs), batches.tree_map(lambda x: x[rows], self.targets)


def read(data: Any) -> tuple[Data, int | None]:
    """All data, and the batch size that the user's loader or epochs have.

    Raises:
        TypeError: nothing that data can be read from.
        ValueError: no targets, inputs that are not finite, too few data, or batches that do not fit together.
    """
    size = None
    if isinstance(data, Epochs):
        data, size = _of_epochs(data), data.batch_size
    elif isinstance(data, DataLoader):
        size = data.batch_size
        data = _joined(_in_order(data))
    elif isinstance(data, Dataset):
        data = _joined(DataLoader(data, AT_ONCE))
    elif isinstance(data, list) and data and not isinstance(data[0], Tensor):
        data = _joined(data)
    elif not isinstance(data, (tuple, list, Mapping)):
        raise TypeError(
            f"posterior_ensemble: data is {type(data).__name__}: pass tensors (inputs, targets), a Dataset, a DataLoader, a "
            "list "
            "of batches, or bc.epochs"
        )
    inputs, targets = as_pair(data)
    if targets is None:
        raise ValueError("posterior_ensemble: data has no targets: pass (inputs, targets), or a mapping with labels")
    leaves = [*batches.flatten(inputs)[0], *batches.flatten(targets)[0]]
    if wrong := [type(x).__name__ for x in leaves if not isinstance(x, Tensor)]:
        raise TypeError(
            f"posterior_ensemble: data holds {wrong[0]}, not tensors alone: convert it with torch.as_tensor"
        )
    lengths = {tuple(x.shape[:1]) for x in leaves}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            "posterior_ensemble: inputs and targets need one entry a datum on axis 0, got shapes "
            + ", ".join(str(tuple(x.shape)) for x in leaves)
        )
    n = leaves[0].shape[0]
    if n < LEAST:
        raise ValueError(f"posterior_ensemble: {n} data are too few to leave some out: at least {LEAST}")
    require_inputs("posterior_ensemble", inputs)
    return Data(inputs, targets, n, data if isinstance(data, Mapping) else None), size


def require_inputs(who: str, inputs: Any) -> None:
    """Refuse inputs that are sparse or hold NaN or infinity, which a network would turn into predictions that are nothing.

    Raises:
        ValueError: naming what they hold.
    """
    for x in batches.flatten(inputs)[0]:
        if x.layout != torch.strided:
            raise ValueError(f"{who}: inputs are {x.layout}: pass dense tensors (x.to_dense())")
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError(f"{who}: the inputs of data hold NaN or infinity: fill in what is missing first")


def _of_epochs(data: Epochs) -> Any:
    if data.leaves is None:
        return _joined(DataLoader(data.data, AT_ONCE))
    if any(not torch.equal(rows, data.left_out[0]) for rows in data.left_out):
        raise ValueError(
            "posterior_ensemble: these epochs leave out other data for each chain: pass the data; held_out= leaves folds out"
        )
    kept = torch.ones(data.size, dtype=torch.bool, device="cpu")
    for rows in data.left_out:
        kept[rows] = False
    return batches.tree_map(lambda x: x[kept.to(x.device)], data.data)


def _in_order(loader: DataLoader) -> Iterable[Any]:
    """All batches of a loader, with what ``drop_last`` would leave out and without what its sampler does, in order."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return loader
    data: Any = loader.dataset
    if type(loader.sampler) not in (SequentialSampler, RandomSampler) or getattr(loader.sampler, "replacement", False):
        rows = sorted(loader.sampler)
        if len(set(rows)) < len(rows):
            raise ValueError(
                f"posterior_ensemble: the loader's {type(loader.sampler).__name__} gives data more than once: pass the data "
                "without it, and weights by bc.likelihoods.weighted"
            )
        data = Subset(data, rows)
    return DataLoader(data, loader.batch_size, collate_fn=loader.collate_fn, num_workers=loader.num_workers)


def _joined(loader: Iterable[Any]) -> Any:
    parts: Sequence[Any] = list(loader)
    if not parts:
        raise ValueError("posterior_ensemble: data has no batches")
    flat = [batches.flatten(tuple(part) if isinstance(part, list) else part) for part in parts]
    try:
        return flat[0][1].unflatten(
            [torch.cat(columns) for columns in zip(*(leaves for leaves, _ in flat), strict=True)]
        )
    except (RuntimeError, TypeError, ValueError) as err:
        raise ValueError(
            f"posterior_ensemble: the batches cannot be put together ({err}): every datum needs the same shape, so pad "
            "texts to "
            "one length"
        ) from err
