r"""A run on disk is a table: which file holds the draws of which chains after which steps, and each chain's newest checkpoint.

    index.json                      of a writer: its chains ``first, ..., stop - 1`` by their global numbers, and its files
    draws-000000.safetensors        draws after the steps ``since < t <= step``, on axis 0
    checkpoint-000000001000.safetensors
    draws-000001/rank-00003.safetensors      what rank 3 alone holds of DTensors, its place in the whole said in the index
    lock                            held while a process writes

A writer of all chains stands in the directory of the run, one of some in ``chains-00002-00004/``, and a rank with chains
that have no numbers in ``rank-00001-of-00004/``. Nobody writes into the folder of another, so ranks need no message. The draws
of a chain are those of all writers that have it, by their steps. So another number of ranks goes on, and only looks up its own.

Nothing of an index is believed: it has a checksum, names files in its own folder, says of draws no more than the steps allow
and the files have bytes for; and each tensor has a checksum, compared when it is first looked at. No code is ever read.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain._torch import dtensor_of, is_dtensor, spec_of, stacked_spec
from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs import checkpoint

FORMAT, INDEX = "bayesopt_chain/run/2", "index.json"
STEP, LOSS, LEAF, BUFFER = "_step", "_loss", "params/", "buffers/"
STEM = r"(draws-\d{6}|checkpoint-\d{12})"
NAME = re.compile(STEM + r"(\.safetensors|/rank-\d{5}\.safetensors)")
LARGEST, DEEPEST = 1 << 27, 100  # bytes of an index, levels of a tree


@dataclass(eq=False)
class Files:
    """Tensors in one file, or in several that each hold a part of them."""

    folder: Path
    about: dict[str, Any]
    held: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "about": self.about, "held": {}}

    @property
    def names(self) -> list[str]:
        return list(self.about["columns"])

    def require(self) -> None:
        """Refuse a file that is missing or too short for what the index says.

        Raises:
            FileNotFoundError, ValueError: naming it.
        """
        for part in self.about["parts"]:
            path = self.folder / part["file"]
            if not path.exists():
                raise FileNotFoundError(f"Draws: the shard {path} is missing; restore it from a copy")
            if path.stat().st_size != part["bytes"]:
                raise ValueError(
                    f"load: {path} is truncated or damaged: {path.stat().st_size} bytes, not {part['bytes']}"
                )

    def header(self, part: int = 0) -> dict[str, Any]:
        """What was said beside the tensors of a file."""
        about = checkpoint.header_of(self.folder / self.about["parts"][part]["file"])
        if zlib.crc32(json.dumps(about["said"], sort_keys=True).encode()) != self.about["parts"][part]["said"]:
            raise ValueError(f"load: the header of {self.about['parts'][part]['file']} does not match its checksum")
        return about["said"]

    def piece(self, part: int, name: str) -> Tensor:
        """A tensor of a file, mapped; compared with its checksum when it is first asked for.

        Raises:
            ValueError: it is damaged.
        """
        if (part, name) not in self.held:
            from safetensors import SafetensorError, safe_open

            about = self.about["parts"][part]
            path = self.folder / about["file"]
            try:
                with safe_open(path, framework="pt") as file:
                    x = file.get_tensor(name)
            except (SafetensorError, OSError) as err:
                raise ValueError(f"load: {path} is no whole safetensors file (truncated or damaged): {err}") from None
            if seal(name, x) != about["sums"].get(name):
                raise ValueError(f"load: {name} in {path} does not match its checksum: the file is damaged")
            self.held[part, name] = x
        return self.held[part, name]

    def column(self, name: str, like: Any = None) -> Tensor:
        """A tensor as a whole, or spread as the DTensor ``like``, of which it may have further axes in front."""
        dtype, shape = self.about["columns"][name]
        parts = [i for i, part in enumerate(self.about["parts"]) if name in part["sums"]]
        spread = is_dtensor(like)
        if len(parts) == 1 and not spread and name not in self.about["parts"][parts[0]]["boxes"]:
            return self.piece(parts[0], name)
        lead = len(shape) - like.ndim if spread else 0
        box = [[[0, n]] for n in shape[:lead]] + list(axes_of(like)) if spread else [[[0, n]] for n in shape]
        out = torch.empty(
            [sum(n for _, n in axis) for axis in box],
            dtype=_dtype(dtype),
            device=local(like).device if spread else None,
        )
        filled = 0
        for i in parts:
            theirs = self.about["parts"][i]["boxes"].get(name, [[[0, n]] for n in shape])
            for cut in itertools.product(*[_common(a, b) for a, b in zip(box, theirs)]):
                x = self.piece(i, name)[tuple(slice(at, at + n) for _, at, n in cut)]
                out[tuple(slice(at, at + n) for at, _, n in cut)] = x
                filled += x.numel()
        if filled != out.numel():
            raise ValueError(
                f"load: {self.folder} holds {filled} of the {out.numel()} elements of {name} that are asked for"
            )
        return dtensor_of(out, stacked_spec(spec_of(like), out, lead)) if spread else out


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


def seal(name: str, x: Tensor) -> int:
    """CRC-32 of a tensor: name, dtype, shape and bytes."""
    crc = zlib.crc32(f"{name} {x.dtype} {tuple(x.shape)}".encode())
    x = x.detach().contiguous().reshape(-1).cpu()
    return zlib.crc32(x.view(torch.uint8).numpy().data, crc) if x.numel() else crc


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
        return None if self.index["checkpoint"] is None else Files(self.folder, self.index["checkpoint"])

    def segments(self) -> list[Segment]:
        """Its draws; every file is there, as large as it should be."""
        out = [
            Segment(Files(self.folder, s), s["since"], s["step"], s["draws"], s["rescued"])
            for s in self.index["shards"]
        ]
        for segment in out:
            segment.files.require()
        return out


class Group(NamedTuple):
    """Chains that have the same draws in the same files: segments, and which rows of axis 1 of each are theirs."""

    size: int
    stacked: bool
    segments: list[tuple[Segment, slice | None]]
    newest: Writer | None
    chains: range

    @property
    def step(self) -> int:
        return self.newest.step if self.newest else 0


def writers_of(path: Path) -> list[Writer]:
    """All writers of a run that have an index."""
    folders = [
        path,
        *sorted(p for p in path.glob("*") if re.fullmatch(r"chains-\d{5}-\d{5}|rank-\d{5}-of-\d{5}", p.name)),
    ]
    return [Writer(folder, read_index(folder)) for folder in folders if (folder / INDEX).exists()]


def grouped(writers: Sequence[Writer], chains: range, files: bool = True) -> list[Group]:
    """These chains, those with the same history together, each with its draws in the order of the steps.

    Raises:
        ValueError: two writers have draws of a chain after the same steps.
    """
    held = {id(w): w.segments() if files else [] for w in writers}
    ends = _within(writers, chains)
    out: list[Group] = []
    for first, stop in itertools.pairwise(sorted({chains.start, *ends, chains.stop})):
        mine = [w for w in writers if w.chains is None or first in w.chains]
        here = sorted([(s, w) for w in mine for s in held[id(w)]], key=lambda pair: (pair[0].since, pair[0].step))
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
        out.append(
            Group(stop - first, stacked, rows, max(mine, key=lambda w: w.step, default=None), range(first, stop))
        )
    return out


def _within(writers: Sequence[Writer], chains: range) -> list[int]:
    every = [x for w in writers if w.chains is not None for x in (w.chains.start, w.chains.stop)]
    return [x for x in every if chains.start < x < chains.stop]


class Cell(NamedTuple):
    """Some draws of some chains, out of one segment."""

    files: Files
    rows: slice
    chains: slice | None
    stacked: bool


class Shard(NamedTuple):
    """Consecutive draws: leaves ``[S, ...]`` by name, or cells of the table, which stand side by side on axis 1."""

    size: int
    leaves: dict[str, Tensor] | None
    cells: tuple[Cell, ...] = ()
    like: Mapping[str, Any] | None = None

    def load(self) -> Mapping[str, Tensor]:
        """All leaves; each is read when it is looked at, and a file is mapped, not copied, where it has all chains."""
        return Columns(self) if self.leaves is None else self.leaves


class Columns(Mapping[str, Tensor]):
    """The leaves of a shard on disk by name."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[str]:
        return iter(self.shard.cells[0].files.names)

    def __len__(self) -> int:
        return len(self.shard.cells[0].files.names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shard.cells[0].files.about["columns"]:
            raise KeyError(name)
        rows = []
        for cell in self.shard.cells:
            x = cell.files.column(name, (self.shard.like or {}).get(name.removeprefix(LEAF)))
            x = x if cell.rows == slice(0, len(x)) else x[cell.rows]
            if name == STEP:
                return x
            x = x if cell.chains is None or cell.chains == slice(0, x.shape[1]) else x[:, cell.chains]
            rows.append(x if cell.stacked or len(self.shard.cells) == 1 else x[:, None])
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def side_by_side(groups: Sequence[Group], like: Mapping[str, Any] | None = None) -> list[Shard]:
    """The draws that all groups have, cut wherever one of them begins another file."""
    ends = [[0, *itertools.accumulate(s.draws for s, _ in g.segments)] for g in groups]
    size = min((e[-1] for e in ends), default=0)
    cuts = sorted({x for e in ends for x in e if x <= size})
    out = []
    for a, b in itertools.pairwise(cuts):
        cells = []
        for g, e in zip(groups, ends):
            k = next(k for k in range(len(e) - 1) if e[k] <= a < e[k + 1])
            segment, chains = g.segments[k]
            cells.append(Cell(segment.files, slice(a - e[k], b - e[k]), chains if g.stacked else None, g.stacked))
        out.append(Shard(b - a, None, tuple(cells), like))
    return out


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return dtype


def drawn(index: Mapping[str, Any], step: int) -> int:
    """How many draws a run has made after so many steps."""
    return max(0, (step - index["burn_in"]) // index["thinning"])


def sealed(index: Mapping[str, Any]) -> str:
    """The text of an index, with its checksum."""
    body = {k: v for k, v in index.items() if k != "crc"}
    return json.dumps({**body, "crc": zlib.crc32(json.dumps(body, sort_keys=True).encode())}, separators=(",", ":"))


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
        _require_sound(index)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ValueError(f"{file} is damaged: {str(err)[:200]}; restore it from a copy") from None
    return index


def _require_sound(index: Mapping[str, Any]) -> None:
    body = {k: v for k, v in index.items() if k != "crc"}
    if index["format"] != FORMAT:
        raise ValueError(f"format {index['format']!r}, this version reads {FORMAT!r}")
    if index["crc"] != zlib.crc32(json.dumps(body, sort_keys=True).encode()):
        raise ValueError("it does not match its checksum")
    for name, least in (("burn_in", 0), ("thinning", 1), ("step", 0)):
        if type(index[name]) is not int or index[name] < least:
            raise ValueError(f"{name} is {index[name]!r}")
    if index["numbers"] is not None and (
        index["numbers"][1] - index["numbers"][0] != index["chains"] or index["keys"] is None
    ):
        raise ValueError(f"its chains are {index['numbers']}")
    if any(not isinstance(name, str) or name.count("/") > DEEPEST for name in index["leaves"]):
        raise ValueError(f"a leaf's path has more than {DEEPEST} levels")
    for files in (*index["shards"], *([index["checkpoint"]] if index["checkpoint"] else [])):
        has = {(name, part["file"]) for part in files["parts"] for name in part["sums"]}
        if any(NAME.fullmatch(part["file"]) is None for part in files["parts"]):
            raise ValueError(f"it names the file {files['parts'][0]['file']!r}")
        filled = {n for n, (_, shape) in files["columns"].items() if math.prod(shape)}
        needed = sum(math.prod(shape) * _dtype(dtype).itemsize for dtype, shape in files["columns"].values())
        if needed > sum(part["bytes"] for part in files["parts"]) or filled - {n for n, _ in has}:
            raise ValueError(f"{files['parts'][0]['file']} is too small for what it should hold")
    for s in index["shards"]:
        made = drawn(index, s["step"]) - drawn(index, s["since"])
        if {LEAF + name for name in index["leaves"]} - s["columns"].keys():
            raise ValueError("its draws lack a leaf")
        if index["numbers"] and any(
            c[1][1:2] != [index["chains"]] for n, c in s["columns"].items() if n.startswith(LEAF)
        ):
            raise ValueError(f"its draws are not of {index['chains']} chains")
        if not 0 <= s["since"] < s["step"] or s["draws"] != made or s["columns"][STEP][1] != [s["draws"]]:
            raise ValueError(f"{s['draws']} draws after steps {s['since']} to {s['step']}")
