"""Batches of any kind as trees: besides tuples, lists and dictionaries also dataclasses and mappings such as transformers'.

A class that is met for the first time is registered with optree in a namespace of this module, so that other users of optree
see no change. A dataclass is flattened into its fields, a mapping into its values; both are rebuilt as the classes they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import optree
from torch import Tensor

NAMESPACE = "bayesopt_chain.batch"
_known: set[type] = set()


def flatten(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch, and its structure, whose ``unflatten`` makes a batch of the same classes."""
    while True:
        leaves, structure = optree.tree_flatten(batch, namespace=NAMESPACE)
        unknown = {*map(type, leaves)} - _known
        opened = [kind for kind in unknown if issubclass(kind, Mapping) or dataclasses.is_dataclass(kind)]
        if not opened:
            return leaves, structure
        for kind in opened:
            _register(kind)


def tree_map(function: Callable[..., Any], batch: Any, *others: Any) -> Any:
    """The batch with a function applied to its leaves, and to those of others of the same structure beside them."""
    leaves, structure = flatten(batch)
    return structure.unflatten([function(*column) for column in zip(leaves, *(flatten(x)[0] for x in others))])


def spread(prefix: Any, batch: Any) -> list[Any]:
    """The leaf of ``prefix`` (``None`` is one) that stands above each leaf of the batch."""
    for tree in (batch, prefix):
        flatten(tree)  # from here on its classes are known
    return optree.broadcast_prefix(prefix, batch, none_is_leaf=True, namespace=NAMESPACE)


def size(batch: Any, otherwise: int = 0) -> int:
    """The number of data of a batch, the length of axis 0 of its tensors.

    Args:
        batch: with one entry a datum on axis 0 of each tensor; 0-d tensors do not count.
        otherwise: the answer where there is no such tensor.

    Raises:
        ValueError: tensors of different lengths.
    """
    lengths = sorted({len(x) for x in flatten(batch)[0] if isinstance(x, Tensor) and x.ndim})
    if len(lengths) > 1:
        raise ValueError(
            f"the batch's tensors have first axes of lengths {lengths[:8]}: every tensor of a batch, a tree such as (inputs, "
            "targets), needs one entry a datum on its first axis; what belongs to all data goes into the loss"
        )
    return lengths[0] if lengths else otherwise


def each_once(data: Any) -> Any:
    """Batches that hold each datum once: of ``bc.epochs``, whose epochs leave out what fills no batch, its ``parts()``."""
    return data.parts() if hasattr(data, "common_rows") else data


def picked(what: str | Callable[[Any], Any] | None, default: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a batch from a function, a key (of a mapping; of anything else an attribute), or ``None`` for a default."""
    if what is None:
        return default
    return what if callable(what) else partial(entry, what)


def entry(key: str, batch: Any) -> Any:
    """Of a mapping its value under a key, of anything else an attribute of that name.

    Raises:
        ValueError: there is none.
    """
    try:
        return batch[key] if isinstance(batch, Mapping) else getattr(batch, key)
    except (KeyError, AttributeError):
        held = f"it has {sorted(map(str, batch))}" if isinstance(batch, Mapping) else "pass a function of the batch"
        raise ValueError(f"the batch, a {type(batch).__name__}, has no {key!r}; {held}") from None


def _register(kind: type) -> None:
    """Let optree open the batches of a class into its values or fields, and make new ones of the class."""
    _known.add(kind)
    is_mapping = issubclass(kind, Mapping)

    def opened(batch: Any) -> Any:
        names = tuple(batch) if is_mapping else tuple([field.name for field in dataclasses.fields(batch)])
        return [batch[name] if is_mapping else getattr(batch, name) for name in names], names, names

    def closed(names: tuple[Any, ...], values: Any) -> Any:
        if is_mapping:
            return kind(dict(zip(names, values)))
        made = object.__new__(kind)  # its __init__ may convert or check what it is given
        for name, value in zip(names, values):
            object.__setattr__(made, name, value)
        return made

    register: Any = optree.register_pytree_node  # its stubs ask for a class that says itself how it is opened
    register(kind, opened, closed, namespace=NAMESPACE)
