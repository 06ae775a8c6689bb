"""The state of a chain: one entry for each link, in the order written, and the knowledge of what it is the state of.

The layout is static: tree maps, ``vmap``, copies, pickles and compilers carry it along. It lets a chain refuse the state of
another, and names every tensor by its link and the path of its leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils import _pytree

from bayesopt_chain.distributed.shards import Pieces

ALL = "*"  # the velocity of a declared link: all its floating-point state


class Layout(NamedTuple):
    """What a state is of: the links' kinds, the leaves' paths, shapes and dtypes, the leaves each link acts on, and, of
    parameters spread over ranks, whose shapes are this rank's, the elements that it holds."""

    kinds: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    where: tuple[tuple[int, ...], ...]
    pieces: Pieces | None = None


class State(tuple[Any, ...]):
    """One entry a link. A tuple, whose ``layout`` says what it is the state of."""

    layout: Layout

    def __new__(cls, entries: Iterable[Any], layout: Layout) -> State:
        self = super().__new__(cls, entries)
        self.layout = layout
        return self

    def __reduce__(self) -> Any:
        return State, (tuple(self), self.layout)

    def replace(self, i: int, entry: Any) -> State:
        """The same with another entry for link ``i``."""
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


def part(entry: Any, keep: Sequence[int], n: int) -> Any:
    """What of an entry belongs to these of its link's ``n`` leaves; what belongs to no leaf is all there."""
    if not hasattr(entry, "_fields"):
        return entry
    return type(entry)(*[tuple([f[k] for k in keep]) if is_by_leaf(f, n) else f for f in entry])


def put_back(entry: Any, keep: Sequence[int], n: int, new: Any) -> Any:
    """The entry with that part replaced."""
    if not hasattr(entry, "_fields"):
        return new
    fields = list(new)
    for f, (old, mine) in enumerate(zip(entry, new)):
        if is_by_leaf(old, n):
            changed = dict(zip(keep, mine))
            fields[f] = tuple([changed.get(k, t) for k, t in enumerate(old)])
    return type(entry)(*fields)


def is_by_leaf(field: Any, n: int) -> bool:
    """Whether a field of an entry has one tensor for each of ``n`` leaves."""
    return type(field) is tuple and len(field) == n  # pyright: ignore[reportUnknownArgumentType]


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """The tensors of a state or entry, and the structure that puts them back."""
    return optree.tree_flatten(tree)


def unshared(new: State, old: State) -> State:
    """A new state that shares no memory with the old one, nor its tensors with each other, and holds no views."""
    leaves, spec = flattened(new)
    seen = {id(t) for t in flattened(old)[0]}
    out: list[Any] = []
    for t in leaves:
        if isinstance(t, Tensor) and (id(t) in seen or t._is_view()):
            t = t.clone()
        seen.add(id(t))
        out.append(t)
    return spec.unflatten(out)


def selected(mask: Any, tree: Any) -> set[int]:
    """The numbers of the leaves that a mask selects: a prefix of the tree, or a function from the tree to one."""
    return {j for j, bit in enumerate(spread_prefix(mask(tree) if callable(mask) else mask, tree)) if bit}


def spread_prefix(prefix: Any, tree: Any) -> list[Any]:
    """The leaf of ``prefix`` that stands above each leaf of ``tree``.

    Raises:
        ValueError: the structures do not fit.
    """
    try:
        return optree.tree_leaves(optree.tree_broadcast_prefix(prefix, tree, none_is_leaf=True), none_is_leaf=True)
    except ValueError as err:
        raise ValueError(f"mask (or labels): its structure is no prefix of the parameter tree: {err}") from None


def paths_of(tree: Any) -> tuple[str, ...]:
    """The leaves' paths as text: ``['layer']['weight']``; empty for a bare tensor."""
    return tuple(["".join([f"[{part!r}]" for part in path]) for path in optree.tree_paths(tree, none_is_leaf=True)])


def zeros(leaves: Sequence[Tensor], value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """A tensor filled with ``value`` like each leaf."""
    return tuple([torch.full_like(p, value, requires_grad=requires_grad) for p in leaves])


def new_counts(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A counter for each leaf, at zero."""
    return tuple([torch.zeros((), dtype=torch.int64, device=p.device) for p in leaves])


NOISE = ("LangevinNoiseState", "FilteredNoiseState")  # matched to its own chain: it begins anew


def warm_start(fresh: State, like: Any) -> State:
    """``fresh`` with every entry that the state of an optimizer, or of another temperature, has too taken over from there.

    Random keys are new, and noise, which is matched to its own chain, begins anew.
    """
    several = issubclass(type(like), (tuple, list)) and not hasattr(like, "_fields")
    donors: Sequence[Any] = like if several else [like]
    out = list(fresh)
    for donor in donors:
        tensors, _ = flattened(donor)
        if not tensors or type(donor).__name__ in NOISE:
            continue
        fits = [i for i, mine in enumerate(fresh) if out[i] is mine and _alike(mine, donor)]
        if fits:
            taken = flattened(fresh[fits[0]])[1].unflatten([t.detach().clone() for t in tensors])
            out[fits[0]] = taken._replace(key=out[fits[0]].key) if hasattr(taken, "key") else taken
        else:
            raise ValueError(
                f"init: like= holds {type(donor).__name__}, which no link of this chain remembers in that shape; "
                "build the chain from the same links as the optimizer, or leave that entry out: like=[the others]"
            )
    return State(out, fresh.layout)


def _alike(mine: Any, donor: Any) -> bool:
    """Whether two states are of one kind, by name and fields; fields without tensors do not count."""
    names, others = ([f for f in getattr(s, "_fields", ()) if flattened(getattr(s, f))[0]] for s in (mine, donor))
    if type(mine).__name__ != type(donor).__name__ or names != others:
        return False
    a, b = flattened(mine)[0], flattened(donor)[0]
    same = [isinstance(y, Tensor) and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b)]
    return len(a) == len(b) and all(same)
