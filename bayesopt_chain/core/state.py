"""The state of a chain: one entry for each link, in the order written, and the knowledge of what it is the state of.

The layout is static: tree maps, ``vmap``, copies, pickles and compilers carry it along. It lets a chain refuse the state of
another, and names every tensor by its link and the path of its leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.utils import _pytree

ALL = "*"  # the velocity of a declared link: all its floating-point state


class Layout(NamedTuple):
    """What a state is of: the links' kinds, the leaves' paths, shapes and dtypes, and the leaves each link acts on."""

    kinds: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[Any, ...]
    dtypes: tuple[Any, ...]
    where: tuple[tuple[int, ...], ...]


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


optree.register_pytree_node(
    State,
    lambda state: (tuple(state), state.layout),  # pyright: ignore[reportAttributeAccessIssue]
    lambda layout, entries: State(entries, layout),  # pyright: ignore[reportArgumentType]
    namespace=getattr(optree.registry, "__GLOBAL_NAMESPACE"),  # where TorchOpt's tree functions look  # pyright: ignore[reportAttributeAccessIssue]
)
_pytree.register_pytree_node(
    State,
    lambda state: (list(state), state.layout),
    lambda entries, layout: State(entries, layout),
    serialized_type_name="bayesopt_chain.State",
)


def part(entry: Any, keep: Sequence[int], n: int) -> Any:
    """What of an entry belongs to these of its link's ``n`` leaves; what belongs to no leaf is all there."""
    if not isinstance(entry, tuple) or not hasattr(entry, "_fields"):
        return entry
    return type(entry)(*[tuple([f[k] for k in keep]) if _is_by_leaf(f, n) else f for f in entry])


def put_back(entry: Any, keep: Sequence[int], n: int, new: Any) -> Any:
    """The entry with that part replaced."""
    if not isinstance(entry, tuple) or not hasattr(entry, "_fields"):
        return new
    fields: list[Any] = []
    for old, mine in zip(entry, new):
        if _is_by_leaf(old, n):
            changed = dict(zip(keep, mine))
            mine = tuple([changed.get(k, t) for k, t in enumerate(old)])
        fields.append(mine)
    return type(entry)(*fields)


def _is_by_leaf(field: Any, n: int) -> bool:
    return isinstance(field, tuple) and len(field) == n  # pyright: ignore[reportUnknownArgumentType]


def edit_velocity(name: str, entry: Any, at: Sequence[int], change: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """The entry with ``change`` made to the velocity of these of its link's leaves."""
    if name == ALL:  # which tensor is whose is not known: the first leaf's factor for all
        return optree.tree_map(lambda t: change([t])[0] if t.is_floating_point() else t, entry)
    velocity = list(getattr(entry, name))
    for k, v in zip(at, change([velocity[k] for k in at])):
        velocity[k] = v
    return entry._replace(**{name: tuple(velocity)})


def unshared(new: State, old: State) -> State:
    """A new state that shares no memory with the old one, nor its tensors with each other, and holds no views."""
    leaves, spec = optree.tree_flatten(new)  # pyright: ignore[reportArgumentType]
    seen = {id(t) for t in optree.tree_leaves(old)}  # pyright: ignore[reportArgumentType]
    out: list[Any] = []
    for t in leaves:
        if isinstance(t, Tensor) and (id(t) in seen or t._is_view()):
            t = t.clone()
        seen.add(id(t))
        out.append(t)
    return optree.tree_unflatten(spec, out)  # pyright: ignore[reportReturnType]


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


def named_tensors(state: State) -> dict[str, Tensor]:
    """Every tensor of a state under ``number.kind.field.path``: the tensors themselves, not copies."""
    layout, out = state.layout, dict[str, Tensor]()
    for i, (kind, entry, where) in enumerate(zip(layout.kinds, state, layout.where)):
        names = [layout.paths[j] for j in where]
        fields = entry._asdict() if hasattr(entry, "_asdict") else {"state": entry}
        for field, value in fields.items():
            stem = f"{i}.{kind}.{field}"
            if _is_by_leaf(value, len(names)) and all(isinstance(t, Tensor) for t in value):
                out.update({stem + name: t for name, t in zip(names, value)})
            else:
                paths, leaves, _ = optree.tree_flatten_with_path(value)
                out.update({stem + path_name(path): t for path, t in zip(paths, leaves)})
    return out


def path_name(path: tuple[Any, ...]) -> str:
    """A path as text: ``['layer']['weight']``; empty for a bare tensor."""
    return "".join([f"[{part!r}]" for part in path])


def zeros(leaves: Sequence[Tensor], value: float = 0.0, requires_grad: bool = False) -> tuple[Tensor, ...]:
    """A tensor filled with ``value`` like each leaf."""
    return tuple([torch.full_like(p, value, requires_grad=requires_grad) for p in leaves])
