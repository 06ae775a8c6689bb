"""Writing into the folder of a run: files of tensors, the lock, what is left over, and many small files made few."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import DTYPES
from bayesopt_chain.runs.table import INDEX, STEM, Segment, Writer, drawn, read_index, segment_of

NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGE = 1 << 28  # bytes: what small files of draws are made into


def kind_of(x: Tensor) -> list[Any]:
    """Dtype and shape, as an index has them.

    Raises:
        TypeError: a dtype that no file can hold.
    """
    if x.dtype not in NAMES:
        raise TypeError(
            f"sample: {x.dtype} cannot be written; make it real (torch.view_as_real), or of another precision"
        )
    return [NAMES[x.dtype], list(x.shape)]


def write_part(
    folder: Path, file: str, tensors: Mapping[str, Tensor], said: Mapping[str, Any], boxes: dict[str, Any] | None
) -> dict[str, Any]:
    """Write a file of tensors; what the index says of it."""
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    crc = files.write(path, tensors, said)
    return {"file": file, "bytes": path.stat().st_size, "crc": crc, "boxes": boxes}


def clear(path: Path, index: dict[str, Any] | None = None) -> None:
    """Delete what a dead process left, and what the index has replaced.

    Raises:
        ValueError: more than a first commit leaves, and no index.
    """
    index = read_index(path) if index is None and (path / INDEX).exists() else index
    there = [file for file in path.iterdir() if re.fullmatch(STEM + r"(\.safetensors)?", file.name)]
    if index is None and len(there) > 2:
        raise ValueError(f"sample: {path} holds {len(there)} parts of a run but no {INDEX}; use an empty directory")
    every = () if index is None else (index["checkpoint"] or {"parts": []}, *index["shards"])
    named = {part["file"].partition("/")[0] for each in every for part in each["parts"]}
    for file in [*there, *path.glob(".*.tmp")]:
        if file.name not in named:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def held_by_one(path: Path) -> IO[str]:
    """The lock of a writer's folder, which is made if absent; closing it gives it back.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: another process holds it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a")  # noqa: SIM115
    except OSError as err:
        raise OSError(err.errno, f"sample: cannot write to {path}: {err.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RuntimeError(
            f"sample: another process is writing to {path}; wait for it, or give this run a directory of its own"
        ) from None
    return lock


def require_unwritten(writer: Writer) -> None:
    """Refuse to go on from a folder that somebody writes to.

    Raises:
        RuntimeError: a process of the earlier launch is still there.
    """
    with open(writer.folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            written = read_index(writer.folder)["step"] != writer.step
        except BlockingIOError:
            written = True
        if written:
            raise RuntimeError(
                f"sample: another process is writing to {writer.folder}; end the earlier launch before another number of "
                "ranks goes on with its run"
            )


def runs_of_small(index: Mapping[str, Any], largest: int) -> Iterator[list[dict[str, Any]]]:
    """Entries of an index whose draws follow one another and that make one file of at most so many bytes together.

    An entry that is more than half as large stands alone, so that no draw is rewritten often. So does one whose ranks hold
    other parts of DTensors than those of the entry before it.
    """
    group: list[dict[str, Any]] = []
    for entry in index["shards"]:
        size = max(p["bytes"] for p in entry["parts"])
        fits = sum(max(p["bytes"] for p in e["parts"]) for e in group) + size <= largest
        alike = bool(group) and _follow(index, group[-1], entry)
        alike = alike and _layout(group[-1]) == _layout(entry)
        if group and not (alike and fits and not entry["rescued"] and 2 * size <= largest):
            yield group
            group = []
        group.append(entry)
        if 2 * size > largest or entry["rescued"]:
            yield group
            group = []
    if group:
        yield group


def _follow(index: Mapping[str, Any], before: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether no draw lies between two entries."""
    return drawn(index, before["step"]) == drawn(index, entry["since"])


def _layout(entry: Mapping[str, Any]) -> list[Any]:
    """Which parts of which tensors lie in which of an entry's files; axis 0 counts its draws."""
    boxes = [
        None if part["boxes"] is None else {n: box if box is None else box[1:] for n, box in part["boxes"].items()}
        for part in entry["parts"]
    ]
    return [[part["file"].partition("/")[2], box] for part, box in zip(entry["parts"], boxes)]


def merged_part(
    folder: Path, index: Mapping[str, Any], group: Sequence[Mapping[str, Any]], i: int, stem: str
) -> dict[str, Any]:
    """Write what file ``i`` of each of these entries holds into one; what the index says of it."""
    segments: list[Segment] = [segment_of(folder, index, entry) for entry in group]
    opened = [s.files.part(i) for s in segments]
    tensors = {name: torch.cat([file.read(name) for file in opened]) for name in opened[0].entries}
    boxes = group[0]["parts"][i]["boxes"]
    draws = sum(s.draws for s in segments)
    boxes = boxes and {n: box if box is None else [[[0, draws]], *box[1:]] for n, box in boxes.items()}
    inner = group[0]["parts"][i]["file"].partition("/")[2]
    return write_part(folder, f"{stem}/{inner}" if inner else f"{stem}.safetensors", tensors, {}, boxes)


def merged_entry(group: Sequence[Mapping[str, Any]], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry of merged draws."""
    return {"since": group[0]["since"], "step": group[-1]["step"], "rescued": False, "parts": parts}
