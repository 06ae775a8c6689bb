"""Consecutive draws, in memory or in files, and reading some rows of one of their columns.

Draws are numbered ``0, ..., S - 1`` over pieces that follow one another. A piece holds tensors in memory, or rows of files,
whose chains stand side by side on axis 1. What is read out of files is checked, and nothing of it is held. Directories are
opened here: whose chains they hold, and that no two of them are one chain.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, spec_of, stacked_spec
from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.folder import HEAD, LEAF, STEP, Tile, drawn, folders_of, head_of, tiles_of

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
    """

    size: int
    leaves: Mapping[str, Tensor]
    parts: tuple[Part, ...] = ()
    device: torch.device = torch.device("cpu")
    like: Mapping[str, Any] | None = None

    def to(self, device: torch.device) -> Piece:
        """The same draws on a device."""
        held = {name: x if name == STEP else x.to(device) for name, x in self.leaves.items()}
        return self._replace(leaves=held, device=device)

    def names(self) -> list[str]:
        """The names of its columns."""
        return list(dict.fromkeys([*(self.parts[0].file.entries if self.parts else ()), *self.leaves]))

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


class Chains(NamedTuple):
    """A folder that is read: some chains of a run, and the draws of them that are there."""

    folder: Path
    head: dict[str, Any]
    tiles: list[Tile]

    def why(self) -> str:
        """Why there are not all draws."""
        step, head = self.tiles[-1].step if self.tiles else 0, self.head
        if sum(t.draws for t in self.tiles) < drawn(head, max(step, head["step"])):
            return "damaged files are left out"
        if step > head["step"]:
            return self.tiles[-1].file.metadata["why"] or f"it was cut off after step {step}"
        return head["why"] or ("" if head["complete"] else f"it was cut off after step {head['step']}")


def opened(paths: Sequence[Path], like: Any, skip: bool) -> tuple[list[Piece], Any, list[str], dict[str, Any]]:
    """The draws of all folders of these runs, side by side.

    Args:
        paths: of runs.
        like: the parameters, for their structure, their device and the layout of DTensors; ``None``: nested dictionaries, on
            the CPU.
        skip: whether damaged files are left out, with a warning; all files are read then.

    Returns:
        The arguments of :class:`bayesopt_chain.Draws`, the last ones by name.

    Raises:
        FileNotFoundError: no run, or a file of it is missing.
        ValueError: a damaged file, runs that do not belong together, or chains that drew the same noise.
    """
    if not paths:
        raise FileNotFoundError("Draws.open: no directory is named, or none fits the pattern")
    every = [one for path in paths for one in _run(path, skip)]
    first = every[0].head["identity"]
    for one in every:
        differing = [k for k in ("burn_in", "thinning", "tree") if one.head["identity"][k] != first[k]]
        if differing:
            raise ValueError(f"Draws.open: {one.folder} and {every[0].folder} hold runs with another {differing[0]}")
    _require_chains_of_their_own(every)
    names = every[0].head["leaves"]
    tree = files.nested(dict.fromkeys(names, 0)) if like is None else like
    mine = list(files.flat(tree)[like is None])
    if sorted(mine) != sorted(names):
        raise ValueError(f"Draws.open: {paths[0]} holds leaves {sorted(names)}, like has {sorted(mine)}")
    leaves = files.flat(like)[0]
    device = next((local(x).device for x in leaves.values() if not x.is_meta), torch.device("cpu"))
    pieces = side_by_side([one.tiles for one in every], device, leaves)
    even = len({sum(t.draws for t in one.tiles) for one in every}) == 1
    why = next((why for one in every if (why := one.why())), "" if even else "some of the chains have more draws")
    stacked = len(every) > 1 or every[0].head["chains"] is not None
    chains = sum(one.head["chains"] or 1 for one in every) if stacked else None
    spec = optree.tree_structure(tree, none_is_leaf=True)
    return pieces, spec, mine, {"chains": chains, "complete": not why, "why": why, "identity": first}


def _run(path: Path, skip: bool) -> list[Chains]:
    """All chains of one run, in the order of their numbers.

    Raises:
        FileNotFoundError: there is no run, or a folder of it is gone.
    """
    found = [(folder, head) for folder in folders_of(path) if (head := head_of(folder)) is not None]
    if not found:
        raise FileNotFoundError(f"Draws.open: there is no run in {path}: it has no {HEAD}")
    numbers = sorted(head.metadata["numbers"] for _, head in found if head.metadata["numbers"] is not None)
    total, ranks = found[0][1].metadata["identity"]["total"], found[0][1].metadata["rank"][1]
    at = 0
    for a, b in numbers:
        at = b if a == at else at
    if len(numbers) == len(found) and at != total:
        raise FileNotFoundError(
            f"Draws.open: {path} holds no draws of chain {at} of {total}; restore its folder, or go on with the run"
        )
    if not numbers and len(found) != ranks:
        raise FileNotFoundError(f"Draws.open: {path} holds runs of {len(found)} of {ranks} ranks; restore the others")
    if 0 < len(numbers) < len(found):
        raise ValueError(f"Draws.open: {path} holds folders of two runs; restore it, or give each run a directory")
    found.sort(key=lambda x: x[1].metadata["numbers"] or [])
    return [Chains(folder, head.metadata, tiles_of(folder, head, skip)) for folder, head in found]


def _require_chains_of_their_own(every: Sequence[Chains]) -> None:
    """Refuse chains that drew the same noise: they have a key in common, or the same first draws.

    Raises:
        ValueError: naming two of them.
    """
    seen = dict[Any, Chains]()
    for one in every:
        told = list[Any](one.head["keys"])
        if one.head["numbers"] is None and one.tiles:
            entries = one.tiles[0].file.entries
            told.append(tuple(x.sums for n, x in sorted(entries.items()) if n.startswith(LEAF)))
        for key in told:
            if (other := seen.setdefault(key, one)) is not one:
                raise ValueError(
                    f"Draws.open: {other.folder.name} and {one.folder.name} drew the same noise, since their ranks "
                    "were seeded alike: they are one chain, not two. Make the chains with bc.parallel(step, n, mesh=mesh), or "
                    "seed each rank differently"
                )
