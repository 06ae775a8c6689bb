"""Many small files of draws made few, by one process."""

from __future__ import annotations

from pathlib import Path

from bayesopt_chain.runs import files
from bayesopt_chain.runs.rescued import writers_of
from bayesopt_chain.runs.table import INDEX, sealed
from bayesopt_chain.runs.writing import LARGE, clear, held_by_one, merged_entry, merged_part, runs_of_small


def compact(path: str | Path, bytes: int = LARGE) -> None:
    """Rewrite the draws of a run in fewer files: the new files, then the index, then the old ones go.

    A run does this on its own whenever it has 64 small files.

    Args:
        path: the directory of the run.
        bytes: how large a file may become.

    Raises:
        RuntimeError: a process is writing.
        ValueError: a damaged file; nothing is changed.
    """
    for writer in writers_of(Path(path)):
        with held_by_one(writer.folder):
            index, out = dict(writer.index), []
            for group in runs_of_small(index, bytes):
                if len(group) < 2:
                    out += group
                    continue
                stem = f"draws-{index['next']:06d}"
                parts = [merged_part(writer.folder, index, group, i, stem) for i in range(len(group[0]["parts"]))]
                out.append(merged_entry(group, parts))
                index["next"] += 1
            if len(out) < len(index["shards"]):
                index["shards"] = out
                files.write_text(writer.folder / INDEX, sealed(index))
                clear(writer.folder)
