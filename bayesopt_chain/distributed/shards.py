r"""Parameters spread over ranks (DTensors: FSDP2, tensor parallelism), as a chain works on them.

An elementwise link computes each element from that element alone, so that it may act on a shard as on a leaf. An update
therefore replaces each DTensor by this rank's local tensor when it begins, and makes DTensors again when it ends:

    leaf  ->  (local tensor, runs of the leaf's global elements)        :func:`bayesopt_chain.distributed.runs_of`
    noise  =  f(key, path of the leaf, step, global element)            :func:`bayesopt_chain.random.philox.draw_elements`

An update sends no message, and the noise of an element does not depend on how the leaf is laid out. State tensors that belong
to a leaf are sharded as the leaf is. Keys and counts are plain tensors with the same value on every rank: ``init`` sends the
first rank's key to all ranks that hold parts of a leaf.

A gradient with other placements than its parameter (such as ``Partial``, a sum over ranks that is still to be taken) is
redistributed to the parameter's placements first. A link that mixes elements cannot act on a shard. It takes the tree of
DTensors if its own reductions respect them (TorchOpt's clipping by norm), and is refused by name otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import dtensor_of, is_dtensor, local_of, local_parts, spec_of, specs_of, stacked_spec
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.distributed.replicated import FULLY_SHARDED
from bayesopt_chain.random.philox import Runs
from bayesopt_chain.trees import are_same

Pieces = tuple[Runs | None, ...]  # by leaf the elements that are here; None for a plain tensor


def pieces_of(leaves: Sequence[Any]) -> Pieces:
    """The elements of each leaf that this rank holds; ``None`` for a plain tensor."""
    return tuple([runs_of(x) if is_dtensor(x) else None for x in leaves])


def local(x: Any) -> Any:
    """This rank's part of a DTensor; anything else as it is."""
    return local_of(x) if is_dtensor(x) else x


def local_tree(tree: Any) -> Any:
    """A tree with this rank's parts of its DTensors."""
    return optree.tree_map(local, tree)


class Part(NamedTuple):
    """The elements of a leaf that are here, and how many the leaf has."""

    runs: Runs
    size: int

    @staticmethod
    def of(x: Any) -> Part:
        """The part of a DTensor that this rank holds."""
        return Part(runs_of(x), x.numel())

    def repeated(self, n: int) -> Runs:
        """The elements that are here of ``n`` such leaves in a row, numbered from the first element of the first leaf."""
        return _repeated(self.runs, self.size, n)


@lru_cache(maxsize=4096)
def _repeated(runs: Runs, size: int, n: int) -> Runs:
    return tuple([(start + i * size, length) for i in range(n) for start, length in runs])


class Sharding:
    """How the leaves of a tree are laid out over ranks, where some of them are DTensors.

    Attributes:
        pieces: by leaf the elements that are here.
        specs: by leaf torch's description of the DTensor that was seen last.
    """

    def __init__(self, layout: Any, links: Sequence[Any]) -> None:
        """Refuse links that need whole leaves, and streams that do not number elements.

        Raises:
            ValueError: naming the link and the leaf.
        """
        self.pieces: Pieces = layout.pieces
        self.shapes = layout.shapes
        self.paths, self.where, self.links = layout.paths, layout.where, links
        self.specs: list[Any] = [None] * len(self.pieces)
        # the same of the last gradients that lay as their parameters; of a spread leaf never that of a plain tensor
        self.alike: list[Any] = [None if mine is None else () for mine in self.pieces]
        self.met = False  # whether every leaf was seen
        for link, w in zip(links, self.where):
            here = [j for j in w if self.pieces[j] is not None]
            if here and link.traits.on_shards == "refused":
                raise ValueError(
                    f"chain: {link} needs whole leaves, and {checks.name(self.paths[here[0]])} is a DTensor, of which each "
                    f"rank has a part{link.traits.refusal_hint}. Keep whole parameters on every rank and spread the data "
                    "(bc.make_step(loss, tx, mesh=mesh)), or mask the link to leaves that are whole"
                )
            if here and getattr(link, "stream", None) == "generator":
                raise ValueError(
                    f"chain: {link} draws with torch's generator, one element after the other, so that ranks with shards of "
                    'a leaf would all draw the first ones; leave stream= out, or take stream="philox"'
                )

    def seen(self, leaves: Sequence[Any], what: str) -> None:
        """Remember how these leaves are laid out, and refuse another layout than the one that the state was made for.

        Raises:
            ValueError: naming the leaf.
        """
        specs = specs_of(leaves)
        if self.met and are_same(specs, self.specs):
            return
        for j, (x, spec) in enumerate(zip(leaves, specs)):
            if x is None or (spec is self.specs[j] and (spec is None) == (self.pieces[j] is None)):
                continue
            if (spec is None) != (self.pieces[j] is None) or (spec is not None and runs_of(x) != self.pieces[j]):
                came = "a plain tensor" if spec is None else f"spread as {spec.placements}"
                raise ValueError(
                    f"{what}: leaf {checks.name(self.paths[j])} is {came}, otherwise than the parameter that the state was "
                    "made for; call init with these parameters"
                )
            self.specs[j] = spec
        self.met = all([(spec is None) == (mine is None) for spec, mine in zip(self.specs, self.pieces)])

    def gradients(self, g: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The local gradients, each redistributed to its parameter's placements first; ``own`` are the local tensors of ``g``.

        Raises:
            ValueError: a plain gradient of a spread leaf, or a spread one of a plain leaf.
        """

        def refuse(j: int) -> None:
            if is_dtensor(g[j]) or self.pieces[j] is not None:
                self.seen([None] * j + [g[j]], "updates")

        return local_gradients(g, own, self.specs, self.alike, refuse)

    def whole(self, leaves: Sequence[int], xs: Sequence[Any]) -> list[Any]:
        """Make DTensors of these local tensors, for links that take DTensors."""
        return [x if x is None or self.specs[j] is None else dtensor_of(x, self.specs[j]) for j, x in zip(leaves, xs)]

    def laid_out(self, leaves: Sequence[int], xs: Sequence[Any]) -> list[Any]:
        """Make DTensors of these local tensors, which may have dtypes of their own."""
        specs = [self.specs[j] for j in leaves]
        return [x if x is None or s is None else dtensor_of(x, stacked_spec(s, x, 0)) for s, x in zip(specs, xs)]

    def parts(self, leaves: Sequence[int], xs: Sequence[Any], what: str) -> list[Any]:
        """This rank's parts of values given for these leaves: DTensors laid out likewise, or numbers for all elements.

        Raises:
            ValueError: a plain tensor for a spread leaf, or one spread otherwise.
        """
        out: list[Any] = []
        for j, x in zip(leaves, xs):
            mine = self.pieces[j]
            if mine is not None and isinstance(x, Tensor) and x.ndim and not (is_dtensor(x) and runs_of(x) == mine):
                raise ValueError(
                    f"{what}: the tensor at {checks.name(self.paths[j])} is not spread over the ranks as its parameter is; "
                    "distribute it likewise (torch.distributed.tensor.distribute_tensor(x, p.device_mesh, p.placements))"
                )
            out.append(local(x))
        return out

    def rows(self, leaves: Sequence[int], xs: Sequence[Any], what: str) -> list[Any]:
        """This rank's parts of rows ``[M, *leaf.shape]`` of these leaves, redistributed to their leaves' placements first.

        Raises:
            ValueError: plain rows of a spread leaf, or spread ones of a plain leaf.
        """
        out: list[Any] = []
        for j, x in zip(leaves, xs, strict=True):
            spec = self.specs[j]
            if is_dtensor(x) != (spec is not None):
                came, is_leaf = (
                    ("DTensors", "whole")
                    if spec is None
                    else ("plain tensors", "a DTensor, of which each rank has a part")
                )
                raise ValueError(
                    f"{what}: the rows of {checks.name(self.paths[j])} are {came}, and the leaf is {is_leaf}; estimate them "
                    "for these parameters (bc.ekf.observe_by_backward of a sharded module)"
                )
            if spec is not None:
                placements = stacked_spec(spec, x, 1).placements
                x = (
                    x
                    if x.placements == placements and x.device_mesh == spec.mesh
                    else x.redistribute(spec.mesh, placements)
                )
            out.append(local(x))
        return out

    def total(self, leaves: Sequence[int], xs: Sequence[Tensor]) -> Tensor:
        """Add up sums ``xs`` of one shape, each over the elements of one leaf that are on this rank, over all ranks.

        It takes one message for each axis of a mesh along which leaves are cut.
        """
        groups: dict[tuple[Any, ...], list[Tensor]] = {}  # by the process groups over which a leaf is cut
        for j, x in zip(leaves, xs):
            groups.setdefault(_cut_over(self.specs[j]), []).append(x)
        sums: list[Tensor] = []
        for every, parts in groups.items():
            sums.append(torch.stack(parts).sum(0))
            for group in every:
                dist.all_reduce(sums[-1], group=group)
        return torch.stack(sums).sum(0)

    def count(self, leaves: Sequence[int]) -> int:
        """The number of all elements of these leaves."""
        return sum([math.prod(self.shapes[j] if self.specs[j] is None else self.specs[j].shape) for j in leaves])

    def spread(self, entries: Sequence[Any], leaves: Sequence[Any], noise: Mapping[int, Any]) -> list[Any]:
        """Lay out the entries of a fresh state: the memory of a leaf is sharded as the leaf is, the key is the first rank's.

        A noise link says itself of which leaves the tensors of its state's fields are: ``noise[i].by_leaf``.
        """
        out: list[Any] = []
        for i, (link, entry, w) in enumerate(zip(self.links, entries, self.where)):
            if link.traits.on_shards == "elementwise" and hasattr(entry, "_fields"):
                of: Any = noise[i].by_leaf if i in noise else dict.fromkeys(entry._fields, w)
                fields = [self._memory(x, of.get(name, ()), leaves) for name, x in zip(entry._fields, entry)]
                entry = self._agreed(type(entry)(*fields))
            elif link.traits.samples:
                entry = self._agreed(entry)
            out.append(entry)
        return out

    def _memory(self, field: Any, where: Sequence[int], leaves: Sequence[Any]) -> Any:
        if type(field) is not tuple or len(field) != len(where):  # pyright: ignore[reportUnknownArgumentType]
            return field
        return tuple([memory_of(x, leaves[j], self.specs[j]) for x, j in zip(field, where)])

    def _agreed(self, entry: Any) -> Any:
        """Give the entry the key of the first rank, on all ranks that hold parts."""
        if not hasattr(entry, "key"):
            return entry
        return entry._replace(key=_first(entry.key, [spec.mesh for spec in self.specs if spec is not None]))


def _cut_over(spec: Any) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of a leaf; none for a plain tensor."""
    if spec is None:
        return ()
    return tuple([spec.mesh.get_group(i) for i, p in enumerate(spec.placements) if not p.is_replicate()])


def start(init: Callable[..., Any], params: Any, *, like: Any = None) -> Any:
    """Call ``init`` on this rank's local tensors, if some of the parameters are DTensors."""
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    if not any(map(is_dtensor, leaves)):
        return init(params) if like is None else init(params, like=like)
    return init(spec.unflatten(local_parts(leaves)), like=optree.tree_map(local, like), whole=leaves)


def step(
    update: Callable[..., Any],
    plan: Callable[[Any], Any],
    updates: Any,
    state: Any,
    *,
    params: Any = None,
    inplace: bool = True,
    **extra: Any,
) -> Any:
    """Call ``update`` on this rank's local tensors, if the state is of DTensors, and make DTensors of its results.

    A tensor that was overwritten in place comes back as the DTensor object that it was.

    Raises:
        ValueError: leaves that lie otherwise than the state was made for.
    """
    if getattr(getattr(state, "layout", None), "pieces", None) is None:
        return update(updates, state, params=params, inplace=inplace, **extra)
    sharding: Sharding = plan(state).shards
    g, spec = optree.tree_flatten(updates, none_is_leaf=True)
    if params is not None:
        leaves, structure = optree.tree_flatten(params, none_is_leaf=True)
        sharding.seen(leaves, "params")
        params = structure.unflatten(local_parts(leaves))
    own = local_parts(g)
    mine = sharding.gradients(g, own)
    entries: list[_Entry] | None = getattr(state, "taken_apart", None)  # by the update that made it
    if entries is None:
        entries = [_Entry.of(x, link.traits.on_shards == "tree") for x, link in zip(state, sharding.links)]
    moves: Any
    moves, after = update(
        spec.unflatten(mine),
        type(state)([entry.parts for entry in entries], state.layout),
        params=params,
        inplace=inplace,
        **{name: whole(x) for name, x in extra.items()},
    )
    flat: list[Any] = spec.flatten_up_to(moves)
    new = [
        old if x is part else x if x is None or known is None else dtensor_of(x, known)
        for x, part, old, known in zip(flat, own, g, sharding.specs)
    ]
    entries = [entry.put(x) for entry, x in zip(entries, after)]
    made = type(state)([entry.whole for entry in entries], state.layout)
    made.taken_apart = entries
    return spec.unflatten(new), made


class _Entry(NamedTuple):
    """An entry of a state with its leaves, and both again as this rank's local tensors.

    ``stays`` is true for the entry of a link that takes DTensors itself: it is not taken apart.
    """

    whole: Any
    leaves: list[Any]
    parts: Any
    mine: list[Any]
    stays: bool

    @staticmethod
    def of(entry: Any, stays: bool) -> _Entry:
        """Take an entry apart."""
        if stays:
            return _Entry(entry, [], entry, [], stays)
        leaves, spec = optree.tree_flatten(entry)
        mine = local_parts(leaves)
        return _Entry(entry, leaves, spec.unflatten(mine), mine, stays)

    def put(self, parts: Any) -> _Entry:
        """The entry after an update, made of DTensors again; the same object if nothing was replaced."""
        if self.stays:
            return _Entry(parts, [], parts, [], True)
        mine: list[Any]
        mine, spec = optree.tree_flatten(parts)
        if are_same(mine, self.mine):
            return self
        every = zip(self.leaves, specs_of(self.leaves), self.mine, mine, strict=True)
        leaves: list[Any] = [x if y is part else y if was is None else dtensor_of(y, was) for x, was, part, y in every]
        return _Entry(spec.unflatten(leaves), leaves, parts, mine, False)


def local_gradients(
    g: Sequence[Any], own: Sequence[Any], specs: Sequence[Any], alike: list[Any], refuse: Callable[[int], None]
) -> list[Any]:
    """The local gradients, each redistributed to its parameter's placements first.

    Args:
        g: gradients; ``None`` where there is none.
        own: their local tensors.
        specs: torch's description of each parameter; ``None`` for a plain one.
        alike: that of the last gradients that lay as their parameters, which are taken as they come; it is kept up to date.
        refuse: called with the number of a gradient that is a DTensor while its parameter is none, or the other way round.
    """
    came_as, out = specs_of(g), list(own)
    if are_same(came_as, alike):
        return out
    for j, (x, came, spec) in enumerate(zip(g, came_as, specs)):
        if x is None:
            continue
        if came is None or spec is None:
            refuse(j)
            continue
        if x.ndim == len(spec.shape) + 1:  # gradients at several draws
            spec = stacked_spec(spec, x, 1)
        if came is spec or (came.placements == spec.placements and came.mesh == spec.mesh):
            alike[j] = came
        else:
            out[j] = local_of(x.redistribute(spec.mesh, spec.placements))
    return out


def memory_of(x: Any, part: Tensor, spec: Any) -> Any:
    """Make a DTensor of what is remembered of a leaf, a tensor like the leaf's local ``part`` or with one axis in front.

    Anything else, and whatever belongs to a plain leaf (``spec`` is ``None``), is returned as it is.
    """
    if spec is None or not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    if x.shape == part.shape:
        return dtensor_of(x, stacked_spec(spec, x, 0))
    return dtensor_of(x, stacked_spec(spec, x, 1)) if x.shape[1:] == part.shape else x


def cut_like(x: Tensor, like: Any) -> Any:
    """Make a DTensor that lies as ``like`` does of a plain tensor of its shape, the same and whole on every rank.

    No message is sent: each rank takes its own elements.
    """
    row = x.reshape(-1)
    mine = torch.cat([row[:0], *[row[start : start + length] for start, length in runs_of(like)]])
    return dtensor_of(part := mine.view(local_of(like).shape), stacked_spec(spec_of(like), part, 0))


def everywhere(ok: Tensor, leaves: Sequence[Any]) -> Tensor:
    """Whether a condition holds on all ranks that hold parts of these leaves; one message for each axis of their mesh."""
    groups = _groups([x.device_mesh for x in leaves if is_dtensor(x)])
    if not groups:
        return ok
    least = ok.to(torch.int32)
    for group in groups:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return least.to(torch.bool)


def mean_everywhere(x: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The mean of a tensor over all ranks that hold parts of these leaves; one message for each axis of their mesh."""
    x = x.clone()
    for group in _groups([leaf.device_mesh for leaf in leaves if is_dtensor(leaf)]):
        dist.all_reduce(x, group=group)
        x /= dist.get_world_size(group)
    return x


def agreed_key(key: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The first rank's key, on all ranks that hold parts of these leaves."""
    return _first(key, [x.device_mesh for x in leaves if is_dtensor(x)])


def _first(key: Tensor, meshes: Sequence[Any]) -> Tensor:
    key = key.clone()
    for group in _groups(meshes):
        dist.broadcast(key, group=group, group_src=0)
    return key


def _groups(meshes: Sequence[Any]) -> list[Any]:
    """The process groups of these meshes, in the same order on all ranks."""
    return [mesh.get_group(axis) for mesh in dict.fromkeys(meshes) for axis in range(mesh.ndim)]


def whole(x: Any) -> Any:
    """A 0-d DTensor, such as a loss, as a plain tensor with its full value; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) and x.ndim == 0 else x


def are_spread(tree: Any) -> bool:
    """Whether any leaf of a tree is a DTensor."""
    return any(map(is_dtensor, optree.tree_leaves(tree)))


def like(x: Any, part: Any) -> Any:
    """A DTensor of this new local tensor, laid out as ``x`` is; the tensor itself if ``x`` is plain."""
    return dtensor_of(part, stacked_spec(spec_of(x), part, 0)) if is_dtensor(x) else part


def add(params: Sequence[Any], updates: Sequence[Any], inplace: bool) -> list[Any]:
    """``p + update`` for each parameter, on local tensors; a parameter without an update stays."""
    moves = zip(params, local_parts(params), local_parts(updates))
    if inplace:
        return [p if u is None else (x.add_(u), p)[1] for p, x, u in moves]
    return [p if u is None else x.add(u) if x is p else dtensor_of(x.add(u), spec_of(p)) for p, x, u in moves]


def require_reached(leaves: Sequence[Any], grads: Sequence[Any]) -> None:
    """Refuse a loss that does not depend on a DTensor: a module under ``fully_shard`` uses other parameters than it is given.

    Raises:
        ValueError: with what to do instead.
    """
    if any(g is None and is_dtensor(x) for x, g in zip(leaves, grads)):
        raise ValueError(f"loss: does not depend on a DTensor among params; leave it out of params. If {FULLY_SHARDED}")
