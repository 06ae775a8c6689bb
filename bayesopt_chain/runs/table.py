r"""A run on disk is a table: which file holds the draws of which chains after which steps, and each chain's newest checkpoint.

    index.json                      of a writer: its chains ``first, ..., stop - 1`` by their global numbers, and its files
    draws-000000.safetensors        draws after the steps ``since < t <= step``, on axis 0
    checkpoint-000000001000.safetensors
    draws-000001/rank-00003.safetensors      what rank 3 alone holds of DTensors, its place in the whole said in the index
    lock                            held while a process writes

A writer of all chains stands in the directory of the run, one of some in ``chains-00002-00004/``, and a rank with chains
that have no numbers in ``rank-00001-of-00004/``. Nobody writes into the folder of another, so ranks need no message. The draws
of a chain are those of all writers that have it, by their steps. So another number of ranks goes on, and only looks up its own.

Nothing of an index is believed: it has a checksum, its fields have the types and the ranges that they should, it names
files in its own folder, and says of draws no more than the steps allow and the files have bytes for. It holds the checksum
of every file's header, and that header those of the file's blocks, which are compared when they are read
(:mod:`bayesopt_chain.runs.files`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, spec_of, stacked_spec
from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs.files import DTYPES, File, crc_of

FORMAT, INDEX = "bayesopt_chain/run/2", "index.json"
STEP, LOSS, WEIGHT, LEAF, BUFFER = "_step", "_loss", "_weight", "params/", "buffers/"
STEM = r"(draws-\d{6}|checkpoint-\d{12})"
NAME = re.compile(STEM + r"(\.safetensors|/rank-\d{5}\.safetensors)")
FOLDER = re.compile(r"chains-\d{5}-\d{5}|rank-\d{5}-of-\d{5}")
SEGMENT = "segment-"  # of a directory in that of a run: another run, whose draws are kept apart
LARGEST, DEEPEST = 1 << 27, 100  # bytes of an index, levels of a tree

Box = list[list[list[int]]]  # for each axis of a tensor the runs (start, length) of its indices


@dataclass(eq=False)
class Files:
    """Tensors in one file, or in several that each hold a part of them.

    Attributes:
        folder: the folder of the files.
        columns: for every tensor its dtype and the shape of the whole.
        parts: the files: name, number of bytes, checksum of the header, and of the tensors of which the file holds a part,
            which one (``boxes``; ``None``: the file holds all of every tensor).
        rescued: whether a file may hold more draws than are meant: a rank that was cut off later than others kept more.
    """

    folder: Path
    columns: dict[str, Any]
    parts: list[dict[str, Any]]
    rescued: bool = False
    opened: dict[int, File] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    def paths(self) -> list[Path]:
        """Where the files are."""
        return [self.folder / part["file"] for part in self.parts]

    def require(self) -> None:
        """Refuse a file that is missing, or that has another size than the index says.

        Raises:
            FileNotFoundError, ValueError: naming it.
        """
        for path, part in zip(self.paths(), self.parts):
            if not path.exists():
                raise FileNotFoundError(f"Draws: the shard {path} is missing; restore it from a copy")
            if path.stat().st_size != part["bytes"]:
                raise ValueError(
                    f"load: {path} is truncated or damaged: {path.stat().st_size} bytes, not {part['bytes']}"
                )

    def part(self, i: int) -> File:
        """One of the files, opened.

        Raises:
            ValueError: it is not the file that the index means.
        """
        if i not in self.opened:
            file = File(self.folder / self.parts[i]["file"])
            if file.crc != self.parts[i]["crc"]:
                raise ValueError(
                    f"load: {file.path} is damaged, or of another run: its header is not what the index says"
                )
            boxes = self.parts[i]["boxes"]
            for name, (dtype, shape) in self.columns.items():
                if boxes is not None and name not in boxes:
                    continue
                x, box = file.entries.get(name), (boxes or {}).get(name)
                held = tuple(shape) if box is None else tuple(sum(n for _, n in axis) for axis in box)
                if x is not None and self.rescued and x.shape[:1] > held[:1]:
                    held = (x.shape[0], *held[1:])
                if x is None or x.dtype != DTYPES[dtype] or x.shape != held:
                    raise ValueError(f"load: {file.path} does not hold {name} as the index says")
            self.opened[i] = file
        return self.opened[i]

    def verify(self) -> None:
        """Read every block of every file.

        Raises:
            FileNotFoundError, ValueError: naming the file that is damaged.
        """
        self.require()
        for i in range(len(self.parts)):
            self.part(i).verify()

    def column(self, name: str, like: Any = None, rows: slice | None = None) -> Tensor:
        """A tensor, or consecutive rows of it: the whole, or what this rank holds of it in the layout of a DTensor.

        Args:
            name: of the tensor.
            like: a DTensor, of which the tensor may have further axes in front; anything else: the whole.
            rows: of axis 0.

        Raises:
            ValueError: damaged, or not everything is there.
        """
        dtype, shape = self.columns[name]
        low, high, _ = (rows or slice(None)).indices(shape[0]) if shape else (0, 1, 1)
        sharded = is_dtensor(like)
        for i, part in enumerate(self.parts):
            if not sharded and (part["boxes"] is None or part["boxes"].get(name, 0) is None):
                return self.part(i).read(name, slice(low, high))
        mine: Box = [[[0, n]] for n in shape]
        if sharded:
            lead = len(shape) - like.ndim
            for d, axis in enumerate(axes_of(like)):
                # Chains are counted by an axis that no rank shares out, and others may have saved more of them.
                if like.shape[d] == shape[lead + d]:
                    mine[lead + d] = [list(run) for run in axis]
        if shape and rows is not None:
            mine[0] = [[low, high - low]]
        device = local(like).device if sharded else torch.device("cpu")
        out = torch.empty([sum(n for _, n in axis) for axis in mine], dtype=DTYPES[dtype], device=device)
        filled = 0
        for i, part in enumerate(self.parts):
            if part["boxes"] is not None and name not in part["boxes"]:
                continue
            theirs = (part["boxes"] or {}).get(name) or [[[0, n]] for n in shape]
            for cut in itertools.product(*[_common(a, b) for a, b in zip(mine, theirs)]):
                if not cut:
                    x = self.part(i).read(name)
                else:
                    x = self.part(i).read(name, slice(cut[0][1], cut[0][1] + cut[0][2]))
                    x = x[(slice(None), *[slice(at, at + n) for _, at, n in cut[1:]])]
                out[tuple(slice(at, at + n) for at, _, n in cut)] = x
                filled += x.numel()
        if filled < out.numel():
            raise ValueError(
                f"load: {self.folder} holds {filled} of the {out.numel()} elements of {name} that are asked for"
            )
        return out


def laid_out(part: Tensor, like: Any) -> Tensor:
    """The DTensor in the layout of ``like`` of which this is the rank's part, with further axes in front; else the tensor."""
    if not is_dtensor(like):
        return part
    return dtensor_of(part, stacked_spec(spec_of(like), part, part.ndim - local(like).ndim))


def _common(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """What two sets of runs of indices share: place in the first, place in the second, length."""
    out: list[tuple[int, int, int]] = []
    before = 0
    for start, n in mine:
        other = 0
        for first, m in theirs:
            low, high = max(start, first), min(start + n, first + m)
            if low < high:
                out.append((before + low - start, other + low - first, high - low))
            other += m
        before += n
    return out


class Segment(NamedTuple):
    """Draws of consecutive steps; ``rescued``: the run goes on from an earlier step, and will make them again."""

    files: Files
    since: int
    step: int
    draws: int
    rescued: bool


@dataclass(frozen=True, eq=False)
class Writer:
    """A folder with an index."""

    folder: Path
    index: dict[str, Any]

    @property
    def chains(self) -> range | None:
        """The global numbers of its chains; ``None`` where they have none."""
        return None if self.index["numbers"] is None else range(*self.index["numbers"])

    @property
    def step(self) -> int:
        """The step of its checkpoint; 0 before there is one."""
        return self.index["step"]

    @property
    def saved(self) -> Files | None:
        """Its checkpoint."""
        about = self.index["checkpoint"]
        return None if about is None else Files(self.folder, about["columns"], about["parts"])

    def segments(self) -> list[Segment]:
        """Its draws, in the order of their steps."""
        return [segment_of(self.folder, self.index, shard) for shard in self.index["shards"]]


def segment_of(folder: Path, index: Mapping[str, Any], shard: Mapping[str, Any]) -> Segment:
    """The draws of one entry of an index."""
    draws = drawn(index, shard["step"]) - drawn(index, shard["since"])
    columns = {name: [dtype, [draws, *shape]] for name, (dtype, shape) in index["columns"].items()}
    return Segment(
        Files(folder, columns, shard["parts"], shard["rescued"]), shard["since"], shard["step"], draws, shard["rescued"]
    )


class Group(NamedTuple):
    """Chains that have the same draws in the same files: segments, and which rows of axis 1 of each are theirs."""

    size: int
    stacked: bool
    segments: list[tuple[Segment, slice | None]]
    newest: Writer | None
    chains: range

    @property
    def step(self) -> int:
        """The step of its newest checkpoint; 0 before there is one."""
        return self.newest.step if self.newest else 0


def folder_of_segment(path: Path, segment: str | None) -> Path:
    """Where the draws of a segment are.

    Raises:
        ValueError: a name that is no part of a path.
    """
    if segment is None:
        return path
    if not isinstance(segment, str) or re.fullmatch(r"[A-Za-z0-9_.=-]{1,100}", segment) is None:
        raise ValueError(f"segment must be a name of letters, digits and '_.=-', got {segment!r}")
    return path / f"{SEGMENT}{segment}"


def grouped(writers: Sequence[Writer], chains: range, files: bool = True) -> list[Group]:
    """These chains, those with the same history together, each with its draws in the order of the steps.

    Args:
        writers: of one run.
        chains: the chains that are asked for, by their global numbers; of writers whose chains have none, ``range(1)``.
        files: whether the draws are wanted too.

    Raises:
        FileNotFoundError: nobody holds the draws of some steps.
        ValueError: two writers have draws of a chain after the same steps.
    """
    held = {id(w): w.segments() if files else [] for w in writers}
    every = [x for w in writers if w.chains is not None for x in (w.chains.start, w.chains.stop)]
    ends = {x for x in every if chains.start < x < chains.stop}
    out: list[Group] = []
    for first, stop in itertools.pairwise(sorted({chains.start, *ends, chains.stop})):
        mine = [w for w in writers if w.chains is None or first in w.chains]
        here = sorted([(s, w) for w in mine for s in held[id(w)]], key=lambda pair: (pair[0].since, pair[0].step))
        # Rescued draws count only behind everything that is committed: the run makes their steps again.
        last = max([s.step for s, _ in here if not s.rescued], default=0)
        here = [(s, w) for s, w in here if not s.rescued or s.since >= last]
        done, before = 0, None
        for s, w in here:
            if s.since < done:
                raise ValueError(
                    f"Draws: {before} and {w.folder} both hold draws of chain {first} after step {s.since + 1}"
                )
            if drawn(w.index, s.since) != drawn(w.index, done):
                raise FileNotFoundError(
                    f"Draws: no folder holds the draws of chain {first} after steps {done + 1} to {s.since}; restore it"
                )
            done, before = s.step, w.folder
        rows = [
            (s, None if w.chains is None else slice(first - w.chains.start, stop - w.chains.start)) for s, w in here
        ]
        stacked = bool(mine) and mine[0].index["chains"] is not None
        newest = max(mine, key=lambda w: w.step, default=None)
        out.append(Group(stop - first, stacked, rows, newest, range(first, stop)))
    return out


def drawn(index: Mapping[str, Any], step: int) -> int:
    """How many draws a run has made after so many steps."""
    return max(0, (step - index["identity"]["burn_in"]) // index["identity"]["thinning"])


def sealed(index: Mapping[str, Any]) -> str:
    """The text of an index, with its checksum."""
    body = {k: v for k, v in index.items() if k != "crc"}
    return json.dumps({**body, "crc": crc_of(json.dumps(body, sort_keys=True))}, separators=(",", ":"))


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: another format, or it is damaged or says what cannot be.
    """
    file = folder / INDEX
    if not file.exists():
        raise FileNotFoundError(f"there is no run in {folder}: it has no {INDEX}")
    try:
        if file.stat().st_size > LARGEST:
            raise ValueError(f"it has {file.stat().st_size} bytes")
        index = json.loads(file.read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it is no dictionary")
        if index.get("format") != FORMAT:
            raise ValueError(f"its format is {index.get('format')!r}, and this version reads {FORMAT!r}")
        body = {k: v for k, v in index.items() if k != "crc"}
        if index.get("crc") != crc_of(json.dumps(body, sort_keys=True)):
            raise ValueError("it does not match its checksum")
        require_sound(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, IndexError, OSError) as err:
        raise ValueError(f"{file} is damaged: {str(err)[:200]}; restore it from a copy") from None
    return index


def require_sound(index: Mapping[str, Any]) -> None:
    """Refuse an index whose fields are not what they should be, whatever its checksum says.

    Raises:
        ValueError: naming the field.
    """
    for name, ok in _FIELDS.items():
        _require(ok(index[name]), name, index[name])
    for name, ok in _IDENTITY.items():
        _require(ok(index["identity"][name]), name, index["identity"][name])
    numbers, chains = index["numbers"], index["chains"]
    if numbers is not None:
        _require(numbers[1] - numbers[0] == (chains or 1), "numbers", numbers)
    lead = 0 if chains is None else 1
    wanted = {STEP, *[LEAF + name for name in index["leaves"]]} if index["columns"] else set[str]()
    _require(wanted <= index["columns"].keys(), "columns", index["columns"])
    for name, (_, shape) in index["columns"].items():
        if name.startswith((LEAF, BUFFER)):
            _require(shape[:lead] == [chains][:lead], name, shape)
    done = 0
    for shard in index["shards"]:
        _require(isinstance(shard, dict) and _count(shard["since"]) and _count(shard["step"]), "shards", shard)
        _require(isinstance(shard["rescued"], bool) and done <= shard["since"] < shard["step"], "shards", shard)
        done = shard["since"] if shard["rescued"] else shard["step"]
        draws = drawn(index, shard["step"]) - drawn(index, shard["since"])
        _require(bool(index["columns"]) and index["columns"][STEP] == ["I64", []], "columns", index["columns"])
        _require_parts(shard["parts"], {n: (d, [draws, *s]) for n, (d, s) in index["columns"].items()}, "draws")
    if index["checkpoint"] is not None:
        _require(_kinds(index["checkpoint"]["columns"]), "checkpoint", index["checkpoint"]["columns"])
        _require_parts(index["checkpoint"]["parts"], index["checkpoint"]["columns"], "checkpoint")


def _require(ok: bool, name: str, value: Any) -> None:
    if not ok:
        raise ValueError(f"{name} is {str(value)[:100]}")


def _require_parts(parts: Any, columns: Mapping[str, Any], stem: str) -> None:
    """The files of some tensors: in the folder, with boxes inside the tensors, and with room for what they hold."""
    _require(isinstance(parts, list) and bool(parts), "parts", parts)
    for part in parts:
        named = isinstance(part["file"], str) and NAME.fullmatch(part["file"]) is not None
        _require(named and part["file"].startswith(stem), "file", part["file"])
        _require(_count(part["bytes"]) and _count(part["crc"]), "parts", part)
        boxes = part["boxes"]
        _require(boxes is None or (isinstance(boxes, dict) and boxes.keys() <= columns.keys()), "boxes", boxes)
        needed = 0
        for name, (dtype, shape) in columns.items():
            if boxes is not None and name not in boxes:
                continue
            box = (boxes or {}).get(name)
            if box is not None:
                _require(len(box) == len(shape) and all(_runs(a, n) for a, n in zip(box, shape)), "boxes", box)
                shape = [sum(n for _, n in axis) for axis in box]
            needed += math.prod(shape) * DTYPES[dtype].itemsize
        _require(needed <= part["bytes"], "bytes", f"{part['bytes']} for {needed} in {part['file']}")


def _count(x: Any) -> bool:
    return type(x) is int and 0 <= x < 1 << 53


def _runs(axis: Any, size: int) -> bool:
    """Whether these are ascending runs (start, length) of the indices of an axis."""
    end = 0
    for start, n in axis:
        if not (_count(start) and _count(n) and start >= end and n > 0):
            return False
        end = start + n
    return end <= size


def _kind(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and x[0] in DTYPES and isinstance(x[1], list) and all(map(_count, x[1]))


def _kinds(x: Any) -> bool:
    return isinstance(x, dict) and all(map(_kind, x.values()))


def _pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(map(_count, x)) and x[0] < x[1]


def _names(x: Any) -> bool:
    return (
        isinstance(x, list) and all(isinstance(n, str) and n.count("/") <= DEEPEST for n in x) and len(set(x)) == len(x)
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "identity": lambda x: isinstance(x, dict),
    "numbers": lambda x: x is None or _pair(x),
    "chains": lambda x: x is None or (_count(x) and x > 0),
    "rank": lambda x: _pair(x),
    "leaves": _names,
    "columns": _kinds,
    "keys": lambda x: isinstance(x, list) and all(type(k) is int for k in x),
    "next": _count,
    "shards": lambda x: isinstance(x, list),
    "checkpoint": lambda x: x is None or isinstance(x, dict),
    "step": _count,
    "complete": lambda x: isinstance(x, bool),
    "why": lambda x: isinstance(x, str),
}
_IDENTITY: dict[str, Callable[[Any], bool]] = {
    "burn_in": _count,
    "thinning": lambda x: _count(x) and x > 0,
    "total": lambda x: x is None or (_count(x) and x > 0),
    "sharded": lambda x: isinstance(x, bool),
    "tree": lambda x: isinstance(x, dict),
}
