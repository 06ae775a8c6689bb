"""Draws of DTensors that every rank kept by itself, where one of them was cut off and no rank could wait for the others.

Each rank writes what it holds of them, with what an index would say, into a file of its own, and sends no message:

    draws-000007/rank-00003.safetensors      7: the number that the index would give to its next file

A reader that finds the files of all ranks adds them to the index as one rescued entry, up to the last draw that all of them
have. Where a rank was killed before it wrote, there is nothing to add. A run that goes on makes these steps again.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.table import FOLDER, INDEX, Writer, drawn, read_index, require_sound, sealed
from bayesopt_chain.runs.writing import kind_of

ALONE = "alone"  # what a file of this kind says of itself


def write_alone(
    folder: Path, index: Mapping[str, Any], since: int, step: int, draws: Mapping[str, Tensor], rank: int, ranks: int
) -> None:
    """Write one rank's part of draws; the first rank also says in the index why the run ended.

    Args:
        folder: of the writer.
        index: what it is to say, without these draws.
        since, step: the draws are those of the steps behind the first up to the second.
        draws: columns, of DTensors or of tensors that every rank holds.
        rank, ranks: which of how many ranks this is.

    Raises:
        OSError: the files cannot be written.
    """
    inner = folder / f"draws-{index['next']:06d}"
    inner.mkdir(exist_ok=True)
    boxes = {name: [[list(run) for run in axis] for axis in axes_of(x)] for name, x in draws.items()}
    columns = {name: [kind_of(x)[0], kind_of(x)[1][1:]] for name, x in draws.items()}
    said = {"since": since, "step": step, "ranks": ranks, "boxes": boxes, "columns": columns}
    files.write(inner / f"rank-{rank:05d}.safetensors", {n: local(x) for n, x in draws.items()}, {ALONE: said})
    if rank == 0:
        files.write_text(folder / INDEX, sealed({**index, "complete": False}))


def writers_of(path: Path) -> list[Writer]:
    """All writers of a run that have an index."""
    folders = [path, *sorted(p for p in path.glob("*") if FOLDER.fullmatch(p.name))]
    return [Writer(folder, index_of(folder)) for folder in folders if (folder / INDEX).exists()]


def index_of(folder: Path) -> dict[str, Any]:
    """The index of a folder, with the draws that its ranks kept each by itself, if all of them did.

    Raises:
        FileNotFoundError, ValueError: there is no index, or it is damaged. Damaged files of such draws are left out, with a
            warning: the index does not count on them.
    """
    index = read_index(folder)
    inner = folder / f"draws-{index['next']:06d}"
    if not inner.is_dir():
        return index
    try:
        return _with_entry(index, folder, [File(path) for path in sorted(inner.glob("rank-*.safetensors"))])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as err:
        warnings.warn(f"Draws: left out: draws that the ranks kept in {inner}: {str(err)[:200]}", stacklevel=4)
        return index


def _with_entry(index: dict[str, Any], folder: Path, found: list[File]) -> dict[str, Any]:
    told: list[dict[str, Any]] = [file.said[ALONE] for file in found if ALONE in file.said]
    if not told or any(x["ranks"] != len(told) or x["since"] != told[0]["since"] for x in told):
        return index  # a commit under way, or not all ranks came so far
    since, step = told[0]["since"], min(x["step"] for x in told)
    draws = drawn(index, step) - drawn(index, since)
    if draws < 1:
        return index
    parts, seen = [], set[tuple[str, str]]()
    for file, x in zip(found, told, strict=True):
        boxes: dict[str, Any] = {}
        for name, (_, *rest) in x["boxes"].items():
            if (name, json.dumps(rest)) not in seen:  # else an earlier rank holds the same
                seen.add((name, json.dumps(rest)))
                boxes[name] = [[[0, draws]], *rest]
        name = f"{file.path.parent.name}/{file.path.name}"
        parts.append({"file": name, "bytes": file.path.stat().st_size, "crc": file.crc, "boxes": boxes})
    entry = {"since": since, "step": step, "rescued": True, "parts": parts}
    made = {
        **index,
        "columns": index["columns"] or told[0]["columns"],
        "shards": [*[s for s in index["shards"] if not s["rescued"]], entry],
        "next": index["next"] + 1,
    }
    require_sound(made)
    return made
