r"""How a chain works on parameters of which each rank holds a part: DTensors, as FSDP2 and tensor parallelism make them.

An elementwise link computes each element of its output from the same element of its input, so that it can act on a shard in the
same way as on a whole leaf. At its beginning an update therefore replaces each DTensor by this rank's local tensor, and at its
end it makes DTensors again. The noise is drawn by the number of an element in the whole leaf:

    leaf  ->  (local tensor, runs of the leaf's global elements)        :func:`bayesopt_chain.distributed.runs_of`
    noise  =  f(key, path of the leaf, step, global element)            :func:`bayesopt_chain.random.philox.draw_elements`

Elementwise links need no message in an update, and the noise of an element does not depend on the layout of the leaf. State
tensors that belong to a leaf are sharded as the leaf is. Keys and counts are plain tensors, equal on all ranks; ``init`` sends
the key of the first rank to all ranks that hold parts of a leaf.

If a gradient has other placements than its parameter, it is first redistributed to those of the parameter. An example is
``Partial``, a sum over ranks that is still to be taken. A link that mixes elements cannot act on a shard. If its own operations
respect DTensors, as TorchOpt's clipping by norm does, it is given the tree of DTensors. Otherwise the chain refuses it by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import (
    dtensor_of,
    is_dtensor,
    like,
    local,
    local_parts,
    specs_of,
    stacked_spec,
    whole,
)
from bayesopt_chain.distributed.parts import axes_of, runs_of
from bayesopt_chain.distributed.ranks import mesh_of, require_alike
from bayesopt_chain.random.philox import Runs

Pieces = tuple[Runs | None, ...]  # for each leaf the elements that this rank holds; None for a plain tensor


def local_tree(tree: Any) -> Any:
    """A tree in which each DTensor is replaced by this rank's local tensor."""
    leaves, spec = optree.tree_flatten(tree)
    return spec.unflatten(local_parts(leaves))


def repeated(x: Any, n: int) -> Runs:
    """The elements that this rank holds of ``n`` leaves like a DTensor, one behind the other in one numbering."""
    return _repeated(runs_of(x), x.numel(), n)


@lru_cache(maxsize=4096)
def _repeated(runs: Runs, size: int, n: int) -> Runs:
    """The same, cached because it is needed in every step."""
    return tuple([(start + i * size, length) for i in range(n) for start, length in runs])


class Sharding:
    """The layout over ranks of the leaves of a chain, some of which are DTensors.

    Attributes:
        pieces: for each leaf the elements that this rank holds; ``None`` for a plain tensor.
        shapes, paths: for each leaf its shape and its path.
        where: for each link the leaves on which it acts.
        links: the links of the chain.
        specs: for each leaf torch's description of the DTensor that was seen last; ``None`` for a plain tensor.
    """

    def __init__(self, layout: Any, links: Sequence[Any]) -> None:
        """Refuse links that need whole leaves.

        Raises:
            ValueError: there is such a link; the message names the link, and a leaf.
        """
        self.pieces: Pieces = layout.pieces
        self.shapes = layout.shapes
        self.paths, self.where, self.links = layout.paths, layout.where, links
        self.specs: list[Any] = [None] * len(self.pieces)
        for link, w in zip(links, self.where):
            here = [j for j in w if self.pieces[j] is not None]
            if here and link.traits.on_shards == "refused":
                raise ValueError(
                    f"chain: {link} needs whole leaves, and {checks.name(self.paths[here[0]])} is a DTensor, of which each "
                    f"rank has a part{link.traits.refusal_hint}. Keep whole parameters on every rank and spread the data "
                    "(bc.make_step(loss, tx, mesh=mesh)), or mask the link to leaves that are whole"
                )

    def seen(self, leaves: Sequence[Any], what: str) -> None:
        """Remember the layout of these leaves, and refuse another layout than that for which the state was made.

        Args:
            leaves: the leaves in the order of the tree, or the first of them; ``None`` for a leaf that is absent.
            what: the argument of the user that has the leaves, for the message.

        Raises:
            ValueError: the layout is another; the message names the leaf.
        """
        for j, (x, spec) in enumerate(zip(leaves, specs_of(leaves))):
            # Layouts hardly ever change, and then a description is the same object as at the last step.
            if x is None or (spec is self.specs[j] and (spec is None) == (self.pieces[j] is None)):
                continue
            if (spec is None) != (self.pieces[j] is None) or (spec is not None and runs_of(x) != self.pieces[j]):
                came = "a plain tensor" if spec is None else f"spread as {spec.placements}"
                raise ValueError(
                    f"{what}: leaf {checks.name(self.paths[j])} is {came}, otherwise than the parameter that the state was "
                    "made for; call init with these parameters"
                )
            self.specs[j] = spec

    def gradients(self, g: Sequence[Any], own: Sequence[Any]) -> list[Any]:
        """The local gradients, each redistributed to the placements of its parameter first.

        Args:
            g: the gradients; ``None`` for a missing one.
            own: their local tensors.

        Returns:
            The local tensors; ``None`` for a missing gradient.

        Raises:
            ValueError: a gradient is a DTensor and its parameter is not, or the other way round.
        """
        out = list(own)
        for j, (x, came, spec) in enumerate(zip(g, specs_of(g), self.specs)):
            if x is None or (came is None and self.pieces[j] is None):
                continue
            if came is None or spec is None:
                self.seen([None] * j + [x], "updates")
                continue
            if x.ndim == len(spec.shape) + 1:  # gradients at several draws have an axis of draws in front
                spec = stacked_spec(spec, x, 1)
            if came.placements != spec.placements or came.mesh != spec.mesh:
                out[j] = local(x.redistribute(spec.mesh, spec.placements))
        return out

    def laid_out(self, leaves: Sequence[int], xs: Sequence[Any]) -> list[Any]:
        """Make DTensors of local tensors of these leaves, whose dtypes may differ from those of the leaves."""
        specs = [self.specs[j] for j in leaves]
        return [x if x is None or s is None else dtensor_of(x, stacked_spec(s, x, 0)) for s, x in zip(specs, xs)]

    def parts(self, leaves: Sequence[int], xs: Sequence[Any], what: str) -> list[Any]:
        """This rank's parts of values that the user gave for these leaves.

        Args:
            leaves: the numbers of the leaves.
            xs: for each leaf a DTensor with the layout of the leaf, a number or a 0-d tensor; for a plain leaf any tensor.
            what: the argument of the user that has the values, for the message.

        Raises:
            ValueError: a plain tensor for a sharded leaf, or a DTensor with another layout.
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

    def total(self, leaves: Sequence[int], xs: Sequence[Tensor]) -> Tensor:
        """Add up sums of one shape over leaves and ranks.

        It takes one message for each axis of a mesh along which leaves are cut. A leaf is not added up over ranks that are
        replicas, since they would count it several times.

        Args:
            leaves: the numbers of the leaves.
            xs: for each leaf the sum over its elements on this rank.

        Returns:
            The sum over all elements of all of these leaves, equal on all ranks.
        """
        groups: dict[tuple[Any, ...], list[Tensor]] = {}  # the sums, by the process groups over which their leaf is cut
        for j, x in zip(leaves, xs):
            groups.setdefault(_cut_over(self.specs[j]), []).append(x)
        # Leaves that are cut over the same ranks are added up first, and take one message together.
        sums: list[Tensor] = []
        for every, parts in groups.items():
            sums.append(torch.stack(parts).sum(0))
            for group in every:
                dist.all_reduce(sums[-1], group=group)
        return torch.stack(sums).sum(0)

    def count(self, leaves: Sequence[int]) -> int:
        """The number of elements of these leaves, on all ranks together."""
        return sum([math.prod(self.shapes[j] if self.specs[j] is None else self.specs[j].shape) for j in leaves])

    def spread(self, entries: Sequence[Any], leaves: Sequence[Any], noise: Mapping[int, Any]) -> list[Any]:
        """Make DTensors of the tensors of a new state that belong to sharded leaves, and give all ranks the first rank's key.

        Args:
            entries: the state of each link, made from local tensors.
            leaves: the local tensors of all leaves.
            noise: the noise of each noise link, by the number of the link. Its ``leaves`` are those of the tensors that it
                remembers.

        Returns:
            The state of each link.

        Raises:
            ValueError: on every rank, where some draw noise and some do not, as at a temperature of 0.
        """
        noisy = [i for i, entry in enumerate(entries) if "key" in getattr(entry, "_fields", ())]
        mesh = mesh_of(self.specs)
        if mesh.get_coordinate() is not None:  # a rank outside of the mesh holds nothing
            require_alike(
                "init: ranks that hold parts of one chain were given chains of which other {}; give all of them the same links "
                "and temperatures",
                {"links draw noise": tuple(noisy)},
                mesh,
            )
        out: list[Any] = []
        for i, (link, entry, w) in enumerate(zip(self.links, entries, self.where)):
            fields: tuple[str, ...] = getattr(entry, "_fields", ())
            if fields and link.traits.on_shards == "elementwise":
                of: Any = {"memory": noise[i].leaves} if i in noise else dict.fromkeys(fields, w)
                entry = type(entry)(*[self._memory(x, of.get(name, ()), leaves) for name, x in zip(fields, entry)])
            if i in noisy:
                entry = entry._replace(key=agreed_key(entry.key, self.specs))
            out.append(entry)
        return out

    def _memory(self, field: Any, where: Sequence[int], leaves: Sequence[Any]) -> Any:
        """Make DTensors of a field that has one tensor for each of the leaves ``where``. Other fields stay as they are."""
        # A NamedTuple is a tuple, too, but its entries do not belong to leaves.
        if type(field) is not tuple or len(field) != len(where):  # pyright: ignore[reportUnknownArgumentType]
            return field
        return tuple([memory_of(x, leaves[j], self.specs[j]) for x, j in zip(field, where)])


def _cut_over(spec: Any) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of a leaf; none for a plain tensor."""
    return tuple(
        [spec.mesh.get_group(i) for i, p in enumerate(getattr(spec, "placements", ())) if not p.is_replicate()]
    )


def start(init: Callable[..., Any], params: Any, *, like: Any = None) -> Any:
    """Call ``init`` on the local tensors of this rank, where some of the parameters are DTensors.

    Args:
        init: makes a state from parameters.
        params: the parameters.
        like: a state whose memory the new state is to take over, or ``None``.

    Returns:
        What ``init`` returned.
    """
    leaves, spec = optree.tree_flatten(params, none_is_leaf=True)
    return init(spec.unflatten(local_parts(leaves)), like=local_tree(like), whole=leaves)


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
    """Call ``update`` on the local tensors of this rank, for a state of DTensors, and make DTensors of its results.

    Args:
        update: makes an update from gradients and state.
        plan: returns the plan of a state, which has its :class:`Sharding`.
        updates: the gradients.
        state: the state of the chain.
        params: the parameters, or ``None``.
        inplace: whether tensors may be overwritten. A DTensor whose local tensor was overwritten is returned as the same
            object.
        extra: further keywords of ``update``.

    Returns:
        The updates and the new state.

    Raises:
        ValueError: the layout of a leaf is not that for which the state was made.
    """
    sharding: Sharding = plan(state).shards
    g, spec = optree.tree_flatten(updates, none_is_leaf=True)
    if params is not None:
        leaves, structure = optree.tree_flatten(params, none_is_leaf=True)
        sharding.seen(leaves, "params")
        params = structure.unflatten(local_parts(leaves))
    own = local_parts(g)
    mine = sharding.gradients(g, own)
    takes = [link.traits.on_shards == "tree" for link in sharding.links]  # DTensors, and returns them
    parts = [entry if tree else local_tree(entry) for entry, tree in zip(state, takes)]
    moves, after = update(
        spec.unflatten(mine),
        type(state)(parts, state.layout),
        params=params,
        inplace=inplace,
        **{name: whole(x) for name, x in extra.items()},
    )
    # An update that was written in place is in the local tensor of the gradient's DTensor already.
    flat: list[Any] = spec.flatten_up_to(moves)
    new = [
        old if x is part else x if x is None or known is None else dtensor_of(x, known)
        for x, part, old, known in zip(flat, own, g, sharding.specs)
    ]
    made = [x if tree else _put(was, part, x) for was, part, x, tree in zip(state, parts, after, takes)]
    return spec.unflatten(new), type(state)(made, state.layout)


def _put(old: Any, before: Any, after: Any) -> Any:
    """The state of a link after an update of its local tensors; where one of them is the same, so is its DTensor.

    Args:
        old: the state before the update.
        before: the same with local tensors.
        after: local tensors after the update.
    """
    new, spec = optree.tree_flatten(after)
    every = zip(optree.tree_leaves(old), optree.tree_leaves(before), new, strict=True)
    leaves: list[Any] = [x if y is part else like(x, y) for x, part, y in every]
    return spec.unflatten(leaves)


def memory_of(x: Any, part: Tensor, spec: Any) -> Any:
    """Make a DTensor of a state tensor that belongs to a leaf.

    Args:
        x: the state tensor, of the shape of the local tensor or with one axis in front.
        part: the local tensor of the leaf.
        spec: torch's description of the leaf; ``None`` for a plain leaf.

    Returns:
        A DTensor with the placements of the leaf. Integers, other shapes, and everything of a plain leaf are returned as they
        are.
    """
    if spec is None or not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    axes = x.ndim - part.ndim
    return dtensor_of(x, stacked_spec(spec, x, axes)) if axes in (0, 1) and x.shape[axes:] == part.shape else x


def cut_like(x: Tensor, leaf: Any) -> Any:
    """Make a DTensor of a whole plain tensor that is equal on all ranks. It takes no message.

    Args:
        x: the plain tensor, which may have further axes in front.
        leaf: a DTensor of the same shape. Where its ranks hold all of an axis, that of ``x`` may have another length.

    Returns:
        A DTensor of the elements of ``x`` with the layout of ``leaf``, on its device; ``x`` itself if it is a DTensor already,
        or if ``leaf`` is a plain tensor.
    """
    if is_dtensor(x) or not is_dtensor(leaf):
        return x
    lead = x.ndim - leaf.ndim
    for d, axis in enumerate(axes_of(leaf)):
        if len(axis) < leaf.shape[d]:
            x = x.index_select(lead + d, torch.tensor(axis, dtype=torch.long, device=x.device))
    x = x.to(local(leaf).device)
    return like(leaf, x, lead)


def everywhere(ok: Tensor, leaves: Sequence[Any]) -> Tensor:
    """Whether a condition holds on all ranks that hold parts of these leaves.

    It takes one message for each axis of their meshes, and none if no leaf is a DTensor.

    Args:
        ok: the condition on this rank, 0-d bool.
        leaves: the leaves.

    Returns:
        The condition on all ranks, 0-d bool.
    """
    least = ok.to(torch.int32)  # back ends reduce integers by their minimum, but not all of them booleans
    for group in _groups(leaves):
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return least.to(torch.bool)


def mean_everywhere(x: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The mean of a tensor over all ranks that hold parts of these leaves. One message for each axis of their meshes.

    Args:
        x: this rank's tensor, of one shape on all ranks.
        leaves: the leaves. If none is a DTensor, they are replicas, and the mean is over all ranks.
    """
    x = x.clone()
    for group in _groups(leaves) or [None]:
        dist.all_reduce(x, group=group)
        x /= dist.get_world_size(group)
    return x


def agreed_key(key: Tensor, leaves: Sequence[Any]) -> Tensor:
    """The key of the first rank, sent to all ranks that hold parts of these leaves.

    Args:
        key: this rank's key.
        leaves: the leaves, or torch's descriptions of them.
    """
    key = key.clone()
    for group in _groups(leaves):
        dist.broadcast(key, group=group, group_src=0)
    return key


def _groups(leaves: Sequence[Any]) -> list[Any]:
    """The process groups of the meshes of these leaves, or of torch's descriptions of them, in one order on all ranks."""
    meshes = dict.fromkeys([x.device_mesh for x in leaves if hasattr(x, "device_mesh")])
    return [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]


def add(params: Sequence[Any], updates: Sequence[Any], inplace: bool) -> list[Any]:
    """Add updates to parameters.

    Args:
        params: the parameters, plain tensors or DTensors.
        updates: the updates; ``None`` for a parameter that does not change.
        inplace: whether the parameters are overwritten.

    Returns:
        The new parameters; in place the same objects.
    """
    moves = zip(params, local_parts(params), local_parts(updates))
    if inplace:
        return [p if u is None else (x.add_(u), p)[1] for p, x, u in moves]
    return [p if u is None else x.add(u) if x is p else like(p, x.add(u)) for p, x, u in moves]
