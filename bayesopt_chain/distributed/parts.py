r"""Which elements of a leaf a rank holds, as runs ``(start, length)`` in the row-major numbering of the whole leaf.

The element with the indices ``(i_0, i_1, i_2)`` of a leaf of shape ``(n_0, n_1, n_2)`` has the number
``(i_0 n_1 + i_1) n_2 + i_2``, and likewise for other numbers of axes.

A DTensor on a mesh of shape ``(k_0, k_1, ...)`` has one placement for each axis of the mesh. A rank begins with all indices
``0 .. n - 1`` of every axis of the leaf and applies the placements from left to right. At the coordinate ``c`` of a mesh axis
of size ``k`` a placement does the following:

    Replicate                 keeps all indices
    Shard(d)                  keeps part ``c`` of ``k`` of the indices of axis ``d``. A part has ``ceil(n / k)`` indices, the
                              last parts have fewer or none
    _StridedShard(d, factor)  cuts the indices of axis ``d`` into ``factor`` parts and keeps part ``c`` of ``k`` of each. This
                              is the layout in which ``fully_shard`` puts a parameter that tensor parallelism has sharded
                              along the same axis

Every rank computes its runs without a message. Plain tensors, which some engines give to the optimizer, do not say what they
hold, and so the user does, by :func:`part`:

    pipeline stages            whole leaves, under names that another stage may use, too
    ZeroRedundancyOptimizer    whole leaves, without names

The noise of an element is a function of the key, the leaf, the number of the element in the leaf and the step. Different ranks
therefore draw independent noise once leaf and elements are known. They are remembered by the identity of the tensor, so that
they are known in an optimizer, too, that another library builds from the same tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.random.philox import Runs


def runs_of(x: Tensor) -> Runs:
    """The elements of a leaf that this rank holds: all of a plain tensor, or the elements of a DTensor's shard.

    Args:
        x: a leaf, a plain tensor or a DTensor.

    Returns:
        ``((start, length), ...)`` in ascending order, which is the order of the local tensor; empty for an empty shard.

    Raises:
        ValueError: a DTensor with a placement that assigns no elements to a rank, such as a partial sum; a DTensor whose local
            tensor has another number of elements than the placements say.

    Example:
        >>> import torch
        >>> runs_of(torch.zeros(2, 3))
        ((0, 6),)
    """
    if not is_dtensor(x):
        return ((0, x.numel()),) if x.numel() else ()
    layout = _layout(x)
    mine = () if layout is None else runs(*layout)
    held, local = sum([length for _, length in mine]), cast(Any, x).to_local().numel()
    if held != local:
        raise ValueError(
            f"params: a DTensor of shape {tuple(x.shape)} with placements {cast(Any, x).placements} holds {local} elements "
            f"here, where its placements say {held}; its noise cannot be numbered: shard it evenly"
        )
    return mine


@lru_cache(maxsize=4096)
def runs(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> Runs:
    """The elements of a DTensor that one rank of its mesh holds.

    Args:
        shape: the shape of the whole leaf.
        mesh: the shape of the mesh.
        coordinate: the coordinate of the rank in the mesh.
        placements: the placement of each axis of the mesh.

    Returns:
        ``((start, length), ...)`` in ascending order.

    Raises:
        ValueError: a placement is neither ``Replicate`` nor ``Shard`` nor ``_StridedShard``.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> runs((4, 6), (2,), (1,), (Shard(1),))
        ((3, 3), (9, 3), (15, 3), (21, 3))
    """
    # From the last axis to the first: ``held`` are the elements within one index of the axes that are still to come, and
    # ``stride`` is the number of all elements there.
    held: Runs = ((0, 1),)
    stride = 1
    for n, axis in zip(reversed(shape), reversed(_axes(shape, mesh, coordinate, placements))):
        # If all elements of one index are held, those of neighbouring indices are neighbours, and are taken at once.
        at_once = held == ((0, stride),) and isinstance(axis, range)
        indices = [(axis[0], len(axis))] if at_once and axis else [(i, 1) for i in axis]
        held = _merged([(i * stride + start, k * length) for i, k in indices for start, length in held])
        stride *= n
    return held


def axes_of(x: Tensor) -> list[Sequence[int]]:
    """For each axis of a leaf, the indices that this rank holds. The rank holds the elements of all their combinations.

    Args:
        x: a leaf, a plain tensor or a DTensor.

    Returns:
        For each axis the indices in ascending order.

    Raises:
        ValueError: a placement is neither ``Replicate`` nor ``Shard`` nor ``_StridedShard``.

    Example:
        >>> import torch
        >>> axes_of(torch.zeros(2, 3))
        [range(0, 2), range(0, 3)]
    """
    if not is_dtensor(x):
        return [range(n) for n in x.shape]
    layout = _layout(x)
    return [() for _ in x.shape] if layout is None else _axes(*layout)


def _layout(x: Any) -> tuple[Any, ...] | None:
    """Shapes of a DTensor and of its mesh, this rank's coordinate and the placements; ``None`` outside of the mesh."""
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    return None if coordinate is None else (tuple(x.shape), tuple(mesh.shape), tuple(coordinate), tuple(x.placements))


def _axes(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[Sequence[int]]:
    """For each axis of a leaf the indices that one rank of a mesh holds, as in :func:`runs`."""
    axes: list[Sequence[int]] = [range(n) for n in shape]
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(
                f"params: placement {placement!r} does not say which elements a rank holds; redistribute the tensor "
                "to Shard or Replicate"
            )
        d = placement.dim % len(shape)
        if kind == "Shard":
            axes[d] = _part(axes[d], size, place)
        else:
            cut = [_part(axes[d], placement.split_factor, i) for i in range(placement.split_factor)]
            axes[d] = [index for part in cut for index in _part(part, size, place)]
    return axes


def _part(axis: Sequence[int], parts: int, i: int) -> Sequence[int]:
    """The indices of part ``i`` of ``parts``, cut as ``torch.chunk`` does but with empty parts at the end."""
    size = -(-len(axis) // parts)
    return axis[i * size : (i + 1) * size]


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Merge adjacent runs."""
    out: list[tuple[int, int]] = []
    for start, length in runs:
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((start, length))
    return tuple(out)


class Place(NamedTuple):
    """The place of a tensor in the whole model.

    Attributes:
        name: the name of the leaf in the whole model.
        runs: the elements of the leaf that the tensor holds, as ``((start, length), ...)``; ``None`` for all of them.
    """

    name: str
    runs: Runs | None


# By name or as a function of name and tensor: a leaf's name, (name, first element) or (name, runs).
Where = Mapping[str, Any] | Callable[[str, Tensor], Any]
# Weak, so that a place is forgotten together with its tensor.
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()


def part(params: Iterable[tuple[str, Tensor]], where: Where | None = None) -> list[tuple[str, Tensor]]:
    """Say which elements of the whole model tensors hold, so that ranks with different parts draw different noise.

    Call it on every rank before the first step. The optimizer may be built from the returned pairs or from the tensors alone.

    Args:
        params: ``(name, tensor)`` pairs, such as ``model.named_parameters()``.
        where: the place of each tensor, as a dictionary by name or as a function of name and tensor. A place is one of

            * a name: the tensor is the whole leaf of that name in the whole model, as in a stage of a pipeline;
            * ``(name, start)``: the tensor holds consecutive elements of that leaf, from number ``start`` in row-major order;
            * ``(name, ((start, length), ...))``: the tensor holds these elements of that leaf, in ascending order.

            By default, and if its name is not in the dictionary, a tensor is the whole leaf of its own name.

    Returns:
        ``(name, tensor)`` pairs with the names of the leaves, for the argument ``params`` of an optimizer.

    Raises:
        TypeError: ``params`` are not ``(name, tensor)`` pairs.
        ValueError: the number of elements is not that of the tensor; elements are given for a DTensor, which knows its own; two
            tensors have the same elements of one leaf.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> stage, first = torch.nn.Sequential(torch.nn.Linear(2, 2)), 3      # layers 3 and on of a longer model
        >>> mine = bc.distributed.part(stage.named_parameters(), lambda name, p: f"{first + int(name[0])}{name[1:]}")
        >>> [name for name, _ in mine]
        ['3.weight', '3.bias']
        >>> optimizer = bc.optim.SGHMC(mine, 0.1, temperature=0.1, generator=bc.distributed.generator(0))
    """
    given = list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in given):
        raise TypeError(
            "part: params must be (name, tensor) pairs, such as model.named_parameters(); the noise is numbered by names"
        )
    told = [where(name, p) if callable(where) else (where or {}).get(name, name) for name, p in given]
    places = [_place(name, p, place) for (name, p), place in zip(given, told)]
    if double := [place for place, n in Counter(places).items() if n > 1]:
        raise ValueError(
            f"part: two tensors are said to be the same elements of {double[0].name!r}, and would draw the same noise"
        )
    for (_, p), place in zip(given, places):
        _places[p] = place
    return [(place.name, p) for (_, p), place in zip(given, places)]


def place_of(p: Tensor) -> Place | None:
    """The place of a tensor that was given to :func:`part`; ``None`` for any other tensor."""
    return _places.get(p)


def is_part(p: Tensor) -> bool:
    """Whether a tensor may hold some elements of its leaf only: a DTensor, or one whose elements :func:`part` was given."""
    return is_dtensor(p) or getattr(place_of(p), "runs", None) is not None


def elements_of(p: Tensor) -> Runs:
    """The elements of its leaf that a tensor holds: those given to :func:`part`, those of a DTensor's shard, or all.

    Args:
        p: a plain tensor or a DTensor.

    Returns:
        ``((start, length), ...)`` in ascending order.
    """
    told = getattr(place_of(p), "runs", None)
    return runs_of(p) if told is None else told


def _place(name: str, p: Tensor, said: Any) -> Place:
    """Check a place that the user gave, and convert it.

    Raises:
        ValueError: the name is missing; elements are given for a DTensor; the elements are not as many as the tensor has, or
            they are not in ascending order.
    """
    leaf, elements = (said, None) if isinstance(said, str) else said
    if not isinstance(leaf, str):
        raise ValueError(f"part: where must give a leaf's name, or (name, elements), for {name!r}; got {said!r}")
    if elements is not None and is_dtensor(p):
        raise ValueError(
            f"part: {name!r} is a DTensor, which says itself which elements are here; give its leaf's name alone"
        )
    runs: Runs | None = None
    if elements is not None:
        runs = ((elements, p.numel()),) if isinstance(elements, int) else tuple([(int(a), int(n)) for a, n in elements])
        runs = tuple([run for run in runs if run[1]])
        if sum([n for _, n in runs]) != p.numel():
            raise ValueError(
                f"part: {name!r} has {p.numel()} elements, and where names {sum([n for _, n in runs])} of {leaf!r}"
            )
        if any(a < 0 or n < 0 for a, n in runs) or any(b < a + n for (a, n), (b, _) in pairwise(runs)):
            raise ValueError(f"part: the elements of {name!r} must ascend from 0 in {leaf!r}, got {runs[:4]}")
    return Place(leaf, runs)
