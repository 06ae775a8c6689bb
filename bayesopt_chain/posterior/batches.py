"""Reads a loader once, its first batch ahead of the rest; loaders whose batches are no pairs; labels of language models.

A causal language model predicts token ``t + 1`` at position ``t``. transformers' convention is that ``labels`` are the tokens
themselves, ``labels[t] = input_ids[t]``, and that the model's own loss moves them, so that the target at position ``t`` is
``labels[t + 1]`` and the last position has none (-100). A likelihood compares position by position: without the move a
model is fitted to copying its inputs. Other models that take ``labels [B, T]`` (token classifiers, masked and
sequence-to-sequence models) compare position by position themselves. Which it is, :class:`Reader` asks the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayesopt_chain.checks import installed
from bayesopt_chain.modules.functional import LABELS, batch_inputs, evaluating, takes_keywords

LEFT_OUT = -100  # transformers' label of a position that does not count


class Batches(NamedTuple):
    """A loader whose first batch has been read; ``total`` batches, None where that is not known."""

    first: Any
    rest: Iterator
    total: int | None

    def from_first(self, first: Any) -> Iterable:
        """All batches, with ``first`` in the place of the first."""
        return chain([first], self.rest)


def peeked(loader: Iterable, who: str = "fit_laplace", read: Callable[[Any], Any] | None = None) -> Batches:
    """Read the first batch; ``read`` makes a pair of each, by default :func:`as_pair`.

    Raises:
        ValueError: there is none, or it is no pair (inputs, targets) and no mapping with labels.
    """
    loader = as_batches(loader)
    rest = map(read or as_pair, loader)
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{who}: the loader has no batches")
    if first[1] is None:
        raise ValueError(
            f"{who}: batches must be (inputs, targets), or mappings with one of the keys {', '.join(LABELS)}, got "
            f"{type(first[0]).__name__}; make pairs of any other, such as ((b['x'], b['y']) for b in loader)"
        )
    return Batches(first, rest, length_of(loader))


def as_batches(data: Any) -> Iterable:
    """Return ``data``, or, of one batch (a mapping, or a tuple that begins with a tensor), the list of it."""
    alone = isinstance(data, Mapping) or (isinstance(data, tuple) and data[:1] and isinstance(data[0], Tensor))
    return [data] if alone else data


def as_pair(batch: Any) -> Any:
    """A batch as ``(inputs, targets)``: of a mapping all but its labels, and these; ``None`` where there are no targets."""
    if isinstance(batch, Mapping):
        labels = [batch[key] for key in LABELS if key in batch]
        return batch_inputs(batch), labels[0] if labels else None
    if isinstance(batch, (tuple, list)):
        return batch if len(batch) == 2 else (batch[0] if len(batch) == 1 else tuple(batch), None)
    return batch, None


class Reader:
    """Reads batches of a module as pairs ``(inputs, targets)``, with ``labels`` moved where the module's own loss moves them.

    Args:
        module: what the batches are for; anything but a module never moves labels.
    """

    def __init__(self, module: Any = None) -> None:
        self.module = module
        self.own: Literal["moves", "compares", "none"] | None = (
            None  # its loss; known from the first labels of tokens on
        )

    def __call__(self, batch: Any) -> Any:
        """The pair of a batch.

        Raises:
            ValueError: labels that are the batch's ``input_ids``, for a module that does not say that it moves them.
        """
        inputs, targets = pair = as_pair(batch)
        if not (isinstance(batch, Mapping) and targets is batch.get("labels") and _are_of_tokens(targets)):
            return pair
        if self.own is None:
            self.own = _own_loss(self.module, batch) if isinstance(self.module, nn.Module) else "none"
        if self.own == "moves":
            return inputs, next_labels(targets)
        tokens, counted = batch.get("input_ids"), targets != LEFT_OUT
        alike = (
            isinstance(tokens, Tensor) and tokens.shape == targets.shape and bool((tokens == targets)[counted].all())
        )
        if alike and self.own == "none":
            raise ValueError(
                "labels equal input_ids at every position that counts, and the model has no loss of its own that moves "
                "them: it would be fitted to copying its inputs. Pass batches (inputs, targets) with the targets of each "
                "position, for the next token bc.posterior.next_labels(labels)"
            )
        return pair


def next_labels(labels: Tensor) -> Tensor:
    """Labels by the position that predicts them: those of the next token, and -100 (left out) at the last position.

    Args:
        labels: int64 ``[B, T]``, the tokens themselves; -100 where a token does not count.

    Returns:
        int64 ``[B, T]``, a new tensor.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> bc.posterior.next_labels(torch.tensor([[5, 6, 7]]))
        tensor([[   6,    7, -100]])
    """
    moved = torch.full_like(labels, LEFT_OUT)
    moved[:, :-1] = labels[:, 1:]
    return moved


def _are_of_tokens(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point() and labels.numel() > 0


@torch.no_grad()
def _own_loss(module: nn.Module, batch: Mapping[str, Any]) -> Literal["moves", "compares", "none"]:
    """What the module's own loss does with labels, if it has one.

    It moves them if the label of the first token alone counts for nothing: no position predicts the first token. The module is
    called with one datum, in eval mode; nothing of it changes.
    """
    if not takes_keywords(module, batch):
        return "none"
    rows = len(batch["labels"])
    one = {k: v[:1] if isinstance(v, Tensor) and v.ndim and len(v) == rows else v for k, v in batch.items()}
    only = torch.full_like(one["labels"], LEFT_OUT)
    only[:, 0] = 0
    with evaluating(module):
        output = module(**{**one, "labels": only})
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        return "none"
    return "compares" if bool(loss.isfinite().all()) and bool(loss.any()) else "moves"


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


def with_progress(all_batches: Iterable, progress: bool, total: int | None = None, unit: str = "batch") -> Iterable:
    """The same, with a progress bar where it is asked for."""
    if not progress:
        return all_batches
    installed("progress=True", "runs", "tqdm")
    from tqdm.auto import tqdm

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
