"""The state of a chain: one entry for each link, in the order written, and a layout that names the links and the leaves.

The layout is not a tensor: tree maps, ``vmap``, copies, pickles and compilers carry it along unchanged. By it a chain refuses
the state of another chain, and every tensor of a state is named by its link and the path of its leaf.

What entries hold for each leaf starts as :func:`zeros` or :func:`new_counts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils import _pytree

from bayesopt_chain.distributed.shards import Pieces
from bayesopt_chain.trees import broadcast_prefix, entries_of, is_bit


class Layout(NamedTuple):
    """The links, and the leaves of the tree of parameters, that a state belongs to."""

    kinds: tuple[str, ...]  # the class names of the links
    paths: tuple[str, ...]
    shapes: tuple[Any, ...]  # of sharded parameters: of the parts on this rank; None where the tree has None
    dtypes: tuple[Any, ...]
    where: tuple[tuple[int, ...], ...]  # for each link the numbers of the leaves that it acts on
    pieces: Pieces | None = None  # of sharded parameters: for each leaf the elements that are on this rank


class State(tuple[Any, ...]):
    """A tuple with one entry for each link, and the ``layout`` that it belongs to."""

    layout: Layout

    def __new__(cls, entries: Iterable[Any], layout: Layout) -> State:
        self = super().__new__(cls, entries)
        self.layout = layout
        return self

    def __reduce__(self) -> Any:
        return State, (tuple(self), self.layout)

    def replace(self, i: int, entry: Any) -> State:
        """This state with another entry for link ``i``."""
        return State((*self[:i], entry, *self[i + 1 :]), self.layout)


def _flatten(state: State) -> tuple[list[Any], Layout]:
    return list(state), state.layout


def _unflatten(layout: Layout, entries: Iterable[Any]) -> State:
    return State(entries, layout)


_trees: Any = optree  # its stubs leave out the name of the namespace in which TorchOpt's tree functions look
_trees.register_pytree_node(
    State,
    _flatten,
    _unflatten,
    namespace=getattr(_trees.registry, "__GLOBAL_NAMESPACE"),
)
_pytree.register_pytree_node(State, _flatten, State, serialized_type_name="bayesopt_chain.State")


def zeros(leaves: Sequence[Tensor], value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """For each leaf a tensor of its shape, dtype and device.

    Args:
        leaves: the leaves.
        value: the value of every entry.
        requires_grad: whether autograd records what is done to the tensors, for meta-learning.

    Example:
        >>> zeros([torch.ones(2)], 0.5)
        (tensor([0.5000, 0.5000]),)
    """
    return tuple([torch.full_like(p, value, requires_grad=requires_grad) for p in leaves])


def new_counts(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """For each leaf a counter at zero, 0-d int64 on the device of the leaf.

    A counter belongs to its leaf, because a leaf without a gradient does not take part in an update.

    Example:
        >>> new_counts([torch.ones(2)])
        (tensor(0),)
    """
    return tuple([torch.zeros((), dtype=torch.int64, device=p.device) for p in leaves])


def is_by_leaf(field: Any, n: int) -> bool:
    """Whether a field of an entry has one tensor for each of ``n`` leaves."""
    return type(field) is tuple and len(field) == n  # pyright: ignore[reportUnknownArgumentType]


def replaced(tensors: Sequence[Any], at: Sequence[int], new: Sequence[Any]) -> tuple[Any, ...]:
    """These tensors with ``new`` ones at the places ``at``."""
    by_place = dict(zip(at, new))
    return tuple([by_place.get(k, t) for k, t in enumerate(tensors)])


def edited(entry: Any, field: str, at: Sequence[int], change: Callable[[list[Tensor]], Sequence[Tensor]]) -> Any:
    """The entry with the tensors numbered ``at`` of one of its fields changed."""
    tensors: Sequence[Tensor] = getattr(entry, field)
    return entry._replace(**{field: replaced(tensors, at, change([tensors[k] for k in at]))})


def unshared(new: State, old: State) -> State:
    """The new state without memory in common with the old one, and without two tensors that share theirs.

    A pure update may return a tensor that it was given. Whoever then overwrites one state would change the other.
    """
    leaves, spec = _trees.tree_flatten(list(new))
    seen = set(map(id, _trees.tree_leaves(list(old))))
    for k, t in enumerate(leaves):
        if isinstance(t, Tensor) and (id(t) in seen or t._is_view()):
            leaves[k] = t.clone()
        seen.add(id(leaves[k]))
    return State(spec.unflatten(leaves), new.layout)


def selected(mask: Any, tree: Any) -> set[int]:
    """The numbers of the leaves that a mask selects: a prefix of the tree, or a function from the tree to one."""
    bits = broadcast_prefix(mask(tree) if callable(mask) else mask, tree)
    leaves = optree.tree_leaves(tree, none_is_leaf=True)  # where a leaf is None, its bit is not checked
    return {j for j, bit in enumerate(bits) if (leaves[j] is None or is_bit(bit)) and bit}


def warm_start(fresh: State, like: Any) -> State:
    """The state ``fresh`` with the memory of another state, as that of an optimizer or of a chain of another temperature.

    An entry of ``like`` replaces the entry of the first link whose state has the same class, fields, shapes and dtypes. Random
    keys stay those of ``fresh``. Entries whose class sets ``begins_anew`` are left out: such an entry belongs to a noise that
    was matched to another chain.

    Args:
        fresh: the first state of this chain.
        like: a state of another chain, a state of TorchOpt, or a list of entries; of a wrapper or a step, the state inside it.

    Raises:
        ValueError: an entry of ``like`` fits no link of this chain.
    """
    out = list(fresh)
    for donor in entries_of(like):
        tensors, _ = optree.tree_flatten(donor)
        if not tensors or getattr(donor, "begins_anew", False):
            continue
        fits = [i for i, mine in enumerate(fresh) if out[i] is mine and _remembered(mine) == _remembered(donor)]
        if not fits:
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer, or leave that entry out: like=[the others]"
            )
        taken = _trees.tree_flatten(fresh[fits[0]])[1].unflatten([t.detach().clone() for t in tensors])
        out[fits[0]] = taken._replace(key=out[fits[0]].key) if hasattr(taken, "key") else taken
    return State(out, fresh.layout)


def _remembered(entry: Any) -> Any:
    """The names of an entry's class and fields, and its tensors' shapes and dtypes: equal for entries with the same memory."""
    return (
        type(entry).__name__,
        [f for f in getattr(entry, "_fields", ()) if optree.tree_flatten(getattr(entry, f))[0]],
        [(getattr(t, "shape", None), getattr(t, "dtype", None)) for t in optree.tree_flatten(entry)[0]],
    )
