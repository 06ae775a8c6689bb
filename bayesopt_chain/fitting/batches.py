"""Reads a loader once, its first batch ahead of the rest; and loaders whose batches are no pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from bayesopt_chain import batches
from bayesopt_chain.modules.functional import LABELS, batch_inputs


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
        ValueError: there is none, or it is no pair (inputs, targets) and no mapping with labels.
    """
    rest = (as_pair(batch) for batch in loader)
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{who}: the loader has no batches")
    if first[1] is None:
        raise ValueError(
            f"{who}: batches must be (inputs, targets), or mappings with one of the keys {', '.join(LABELS)}, got "
            f"{type(first[0]).__name__}; make them of any other with bc.fitting.pairs(loader, inputs, targets)"
        )
    return Batches(first, rest, length_of(loader))


def as_pair(batch: Any) -> Any:
    """A batch as ``(inputs, targets)``: of a mapping all but its labels, and these; ``None`` where there are no targets."""
    if isinstance(batch, Mapping):
        labels = [batch[key] for key in LABELS if key in batch]
        return batch_inputs(batch), labels[0] if labels else None
    if isinstance(batch, (tuple, list)):
        return batch if len(batch) == 2 else (batch[0] if len(batch) == 1 else tuple(batch), None)
    return batch, None


def logits_of(output: Any) -> Any:
    """The tensor that a module returns, by itself or as the ``logits`` of a mapping or a dataclass (transformers' outputs)."""
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def length_of(loader: Any) -> int | None:
    """The number of its batches, where it knows."""
    try:
        return len(loader)
    except TypeError:
        return None


class Pairs:
    """What :func:`pairs` returns: an iterable of pairs, as long as the loader."""

    def __init__(self, loader: Iterable, inputs: Callable[[Any], Any], targets: Callable[[Any], Any]) -> None:
        self.loader, self.inputs, self.targets = loader, inputs, targets

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for batch in self.loader:
            yield self.inputs(batch), self.targets(batch)

    def __len__(self) -> int:
        return len(self.loader)  # pyright: ignore[reportArgumentType]


def pairs(
    loader: Iterable, inputs: str | Callable[[Any], Any], targets: str | Callable[[Any], Any] | None = None
) -> Pairs:
    """A loader of dictionaries, dataclasses or ``BatchEncoding`` objects as one of pairs ``(inputs, targets)``.

    :func:`bayesopt_chain.fit_laplace` and what it returns take pairs; a module is called with the inputs.

    Args:
        loader: an iterable of batches.
        inputs: their key in a batch (of anything but a mapping an attribute), or a function of the batch.
        targets: likewise. Default: none, for inputs to predict.

    Returns:
        An iterable that can be gone through as often as the loader can.

    Raises:
        ValueError: while it is read, a batch without that key.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> loader = [{"x": torch.randn(20, 2), "y": torch.randint(0, 3, (20,))}]
        >>> module = torch.nn.Linear(2, 3).eval()
        >>> fitted = bc.fit_laplace(module, bc.likelihoods.categorical(), bc.fitting.pairs(loader, "x", "y"))
        >>> fitted.predict(bc.fitting.pairs(loader, "x")).shape
        torch.Size([20, 3])
    """

    def nothing(batch: Any) -> None:
        return None

    return Pairs(loader, batches.picked(inputs, nothing), batches.picked(targets, nothing))


def with_progress(all_batches: Iterable, progress: bool, total: int | None = None, unit: str = "batch") -> Iterable:
    """The same, with a progress bar where it is asked for."""
    if not progress:
        return all_batches
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ImportError("progress=True needs tqdm: pip install tqdm, or leave it out") from None
    return tqdm(all_batches, unit=unit, total=total)


def _changes_in_training(layer: nn.Module) -> bool:
    if isinstance(layer, (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)):
        return True
    return isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) and layer.dropout > 0


def require_eval(module: nn.Module, who: str = "fit_laplace") -> None:
    """Raise for layers that mix data or draw, and for parameters without values."""
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{who}: {name} is on the meta device and has no values: load the trained ones first")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            raise ValueError(
                f"{who}: {name} ({type(layer).__name__}) has no running statistics, so that a datum's outputs depend on the "
                "others in eval mode too: train it with track_running_stats=True, or use a norm of single data"
            )
        if layer.training and _changes_in_training(layer):
            raise ValueError(
                f"{who}: {name} ({type(layer).__name__}) is in training mode, where a datum's outputs depend on the "
                "others or on chance: call module.eval() first"
            )
