"""Many small files of draws made few."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.store import clear, held_by_one, written
from bayesopt_chain.runs.table import INDEX, Segment, Writer, sealed, writers_of


def compact(path: str | Path, bytes: int = 1 << 30) -> None:
    """Rewrite the draws of a run in files of about so many bytes: the new files, then the index, then the old ones go.

    Files that hold parts of DTensors stay as they are.

    Raises:
        RuntimeError: a process is writing.
        ValueError: a damaged file; nothing is changed.
    """
    for writer in writers_of(Path(path)):
        with held_by_one(writer.folder):
            _compacted(writer, bytes)


def _compacted(writer: Writer, bytes: int) -> None:
    index, out = dict(writer.index), []
    for group in _alike(writer, bytes):
        if len(group) < 2:
            out += [entry for entry, _ in group]
            continue
        names = group[0][1].files.names
        columns = {name: torch.cat([s.files.column(name) for _, s in group]) for name in names}
        about = {
            "draws": sum(s.draws for _, s in group),
            "since": group[0][1].since,
            "step": group[-1][1].step,
            "rescued": False,
        }
        out.append({**about, **written(writer.folder, f"draws-{index['next']:06d}.safetensors", columns, {})})
        index["next"] += 1
    if len(out) < len(writer.index["shards"]):
        checkpoint.write_text(writer.folder / INDEX, sealed({**index, "shards": out}))
        clear(writer.folder)


def _alike(writer: Writer, bytes: int) -> Iterator[list[tuple[Any, Segment]]]:
    """Segments of consecutive steps that fit into one file together, in their order."""
    group: list[tuple[Any, Segment]] = []
    for entry, segment in zip(writer.index["shards"], writer.segments()):
        alike = bool(group) and group[-1][1].step == segment.since and not segment.rescued
        size = sum(p["bytes"] for e, _ in group for p in e["parts"])
        if group and (len(entry["parts"]) > 1 or not alike or size + entry["parts"][0]["bytes"] > bytes):
            yield group
            group = []
        group.append((entry, segment))
    yield group
