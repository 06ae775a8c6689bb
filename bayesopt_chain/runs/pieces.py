"""Consecutive draws, in memory or in files, and reading some rows of one of their columns.

Draws are numbered ``0, ..., S - 1`` over pieces that follow one another. A piece holds tensors in memory, or rows of files,
whose chains stand side by side on axis 1. What is read out of files is checked, and nothing of it is held.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, spec_of, stacked_spec
from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.folder import LEAF, STEP, Tile

SPARSE = 4  # of so many rows on disk one is wanted: from there on rows are read one by one


class Part(NamedTuple):
    """Rows of a file from ``first`` on; ``stacked``: axis 1 counts chains."""

    file: File
    first: int
    stacked: bool


class Piece(NamedTuple):
    """Consecutive draws: leaves ``[S, ...]`` by name, and the others in parts of files that stand side by side on axis 1.

    Attributes:
        size: the number of draws.
        leaves: in memory.
        parts: on disk, where there are any.
        device: to which columns come that are read, except for the steps.
        like: parameters by name, as whose DTensors whole leaves are to come.
        hidden: how the names of columns on disk begin that do not count, if any.
    """

    size: int
    leaves: Mapping[str, Tensor]
    parts: tuple[Part, ...] = ()
    device: torch.device = torch.device("cpu")
    like: Mapping[str, Any] | None = None
    hidden: str | None = None

    def to(self, device: torch.device) -> Piece:
        """The same draws on a device."""
        held = {name: x if name == STEP else x.to(device) for name, x in self.leaves.items()}
        return self._replace(leaves=held, device=device)

    def names(self) -> list[str]:
        """The names of its columns."""
        stored = self.parts[0].file.entries if self.parts else ()
        return list(
            dict.fromkeys([*[n for n in stored if not self.hidden or not n.startswith(self.hidden)], *self.leaves])
        )

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype of a column, and shape of one of its rows."""
        if name in self.leaves:
            return self.leaves[name].dtype, tuple(self.leaves[name].shape[1:])
        every = [part.file.entries[name] for part in self.parts]
        _, *shape = every[0].shape
        if len(every) > 1 and name != STEP:
            inner = shape[1:] if self.parts[0].stacked else shape
            shape = [sum(x.shape[1] if part.stacked else 1 for x, part in zip(every, self.parts)), *inner]
        return every[0].dtype, tuple(shape)

    def read(self, name: str, low: int = 0, high: int | None = None, elements: tuple[int, int] | None = None) -> Tensor:
        """Rows ``low`` to ``high`` of a column, or elements of each of them, taken as flat."""
        high = self.size if high is None else high
        if name in self.leaves or not self.parts:
            x = self.leaves[name] if (low, high) == (0, self.size) else self.leaves[name][low:high]
            x = x if name == STEP or self.like is None else x.to(self.device)
        elif elements is not None and name != STEP:
            return self._elements(name, low, high, *elements).to(self.device)
        else:
            x = self._side_by_side(name, low, high)
            x = x if name == STEP else x.to(self.device)
        if elements is not None:
            return x.reshape(len(x), -1)[:, slice(*elements)]
        like = (self.like or {}).get(name.removeprefix(LEAF))
        return shard_of(x, like) if is_dtensor(like) and not is_dtensor(x) else x

    def _elements(self, name: str, low: int, high: int, first: int, stop: int) -> Tensor:
        """Elements of rows, of which each part holds consecutive ones: those of its chains."""
        out, at = list[Tensor](), 0
        for part in self.parts:
            n = math.prod(part.file.entries[name].shape[1:])
            a, b = max(first - at, 0), min(stop - at, n)
            if a < b or not n:
                out.append(part.file.elements(name, range(part.first + low, part.first + high), a, max(a, b)))
            at += n
        return torch.cat(out, 1) if out else self._side_by_side(name, low, high).flatten(1)[:, :0]

    def _side_by_side(self, name: str, low: int, high: int) -> Tensor:
        parts = self.parts[:1] if name == STEP else self.parts
        rows = [part.file.read(name, part.first + low, part.first + high) for part in parts]
        if len(parts) == 1:
            return rows[0]
        return torch.cat([x if part.stacked else x[:, None] for x, part in zip(rows, parts)], 1)


def shard_of(x: Tensor, like: Any) -> Any:
    """This rank's part of a whole tensor, as a DTensor in the layout of ``like``; ``x`` may have further axes in front.

    An axis of which every rank holds all, such as that of chains, may have another length than in ``like``.
    """
    lead = x.ndim - like.ndim
    for d, axis in enumerate(axes_of(like)):
        if axis != ((0, like.shape[d]),):
            x = x.index_select(
                lead + d, torch.cat([torch.arange(start, start + n, device="cpu") for start, n in axis] or [_NONE])
            )
    x = x.to(local(like).device)
    return dtensor_of(x, stacked_spec(spec_of(like), x, lead))


_NONE = torch.zeros(0, dtype=torch.long, device="cpu")


def side_by_side(
    every: Sequence[Sequence[Tile]], device: torch.device, like: Mapping[str, Any] | None = None
) -> list[Piece]:
    """The draws that all chains have, cut wherever one of the folders begins another file.

    Args:
        every: of each folder its draws.
        device: to which what is read comes.
        like: parameters as which DTensors are to come.
    """
    first = [[t.first for t in tiles] for tiles in every]
    cuts = sorted({x for tiles in every for t in tiles for x in (t.first, t.first + t.draws)})
    out = list[Piece]()
    for a, b in itertools.pairwise(cuts):
        found = [tiles[bisect.bisect_right(f, a) - 1] for tiles, f in zip(every, first) if tiles and f[0] <= a]
        if len(found) == len(every) and all(a < t.first + t.draws for t in found):
            parts = [Part(t.file, a - t.first, t.file.metadata["chains"] is not None) for t in found]
            out.append(Piece(b - a, {}, tuple(parts), device, like))
    return out


def spans(pieces: Sequence[Piece], rows: Sequence[int]) -> Iterator[tuple[Piece, int, int, list[int] | None]]:
    """What to read for these rows, in their order: a piece, its rows from where to where, and which of them, if not all."""
    ends = list(itertools.accumulate(p.size for p in pieces))
    for k, group in itertools.groupby(rows, lambda r: bisect.bisect_right(ends, r)):
        at = [r - ends[k] + pieces[k].size for r in group]
        low, high = min(at), max(at) + 1
        if high - low > SPARSE * len(at):
            yield from ((pieces[k], i, i + 1, None) for i in at)
        else:
            yield pieces[k], low, high, None if at == list(range(low, high)) else [i - low for i in at]


def rows_of(pieces: Sequence[Piece], rows: Sequence[int], name: str, elements: tuple[int, int] | None = None) -> Tensor:
    """Some rows of a column, in this order; of each row all, or some elements, taken as flat."""
    parts = list[Tensor]()
    for piece, low, high, wanted in spans(pieces, rows):
        x = piece.read(name, low, high, elements)
        parts.append(x if wanted is None else x[wanted])
    if not parts:
        return pieces[0].read(name, 0, 0, elements)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def row_bytes(pieces: Sequence[Piece], name: str) -> int:
    """Bytes of one row of a column."""
    dtype, shape = pieces[0].kind(name)
    return math.prod(shape) * dtype.itemsize
