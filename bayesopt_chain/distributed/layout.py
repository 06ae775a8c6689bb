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

Every rank computes its runs without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

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
    sharded: Any = x
    mesh, placements = sharded.device_mesh, sharded.placements
    coordinate = mesh.get_coordinate()
    mine: Runs = (
        () if coordinate is None else runs(tuple(x.shape), tuple(mesh.shape), tuple(coordinate), tuple(placements))
    )
    held, local = sum([length for _, length in mine]), sharded.to_local().numel()
    if held != local:
        raise ValueError(
            f"params: a DTensor of shape {tuple(x.shape)} with placements {tuple(placements)} holds {local} elements "
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
    axes = _axes(shape, mesh, coordinate, placements)
    # From the last axis to the first: ``held`` are the elements within one index of the axes that are still to come, and
    # ``stride`` is the number of all elements there.
    held: Runs = ((0, 1),)
    stride = 1
    for n, axis in zip(reversed(shape), reversed(axes)):
        # If all elements of one index are held, the elements of neighbouring indices are neighbours, and make one run.
        if held == ((0, stride),):
            held = tuple([(start * stride, length * stride) for start, length in axis])
        else:
            inside = held
            indices = [i for start, length in axis for i in range(start, start + length)]
            held = tuple([(i * stride + start, length) for i in indices for start, length in inside])
        stride *= n
    return _merged(held)


def axes_of(x: Tensor) -> list[Runs]:
    """For each axis of a leaf, the indices that this rank holds. The rank holds the elements of all their combinations.

    Args:
        x: a leaf, a plain tensor or a DTensor.

    Returns:
        For each axis the indices as ``((start, length), ...)``, in ascending order.

    Raises:
        ValueError: a placement is neither ``Replicate`` nor ``Shard`` nor ``_StridedShard``.

    Example:
        >>> import torch
        >>> axes_of(torch.zeros(2, 3))
        [((0, 2),), ((0, 3),)]
    """
    if not is_dtensor(x):
        return [((0, n),) for n in x.shape]
    sharded: Any = x
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return [() for _ in x.shape]
    return _axes(tuple(x.shape), tuple(mesh.shape), tuple(coordinate), tuple(sharded.placements))


def _axes(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]
) -> list[Runs]:
    """The same for one rank of a mesh, as in :func:`runs`."""
    axes: list[Runs] = [_merged([(0, n)]) for n in shape]
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise ValueError(
                f"params: placement {placement!r} does not say which elements a rank holds; redistribute the tensor "
                "to Shard or Replicate"
            )
        parts = int(placement.split_factor) if kind == "_StridedShard" else 1
        d = placement.dim % len(shape)
        axis = axes[d]
        axes[d] = _merged([run for i in range(parts) for run in _part(_part(axis, parts, i), size, place)])
    return axes


def _part(axis: Sequence[tuple[int, int]], parts: int, i: int) -> list[tuple[int, int]]:
    """The indices of part ``i`` of ``parts``, cut as ``torch.chunk`` does but with empty parts at the end."""
    total = sum(length for _, length in axis)
    size = -(-total // parts)
    low, high = min(i * size, total), min((i + 1) * size, total)
    out: list[tuple[int, int]] = []
    before = 0
    for start, length in axis:
        a, b = max(low, before), min(high, before + length)
        if a < b:
            out.append((start + a - before, b - a))
        before += length
    return out


def _merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Merge adjacent ranges, and leave out empty ones."""
    out: list[tuple[int, int]] = []
    for start, length in runs:
        if out and sum(out[-1]) == start:
            out[-1] = (out[-1][0], out[-1][1] + length)
        elif length:
            out.append((start, length))
    return tuple(out)
