r"""Which folders of a run on disk hold which chains, after which steps.

A run is made by one process or by several ranks, and may be gone on with by another number of them. What one such number
of ranks writes is a layout, and a layout is made of parts, each of which is a run as in :mod:`bayesopt_chain.loop.sample`:

    index.json, ...                              the only part of a run by one process
    part-00000-of-00004/ ...                     the parts of a run by four ranks
    layout-00001/part-00000-of-00002/ ...        those of two ranks that went on with it; layout-00002 is the next
    layout-00001/catch-up-00004-00006/           chains 4 and 5 alone, as far as the others had come

A part holds chains ``first, ..., stop - 1`` by their global numbers, and the draws of the steps ``since < t <= step``; its
index says which. No layout writes into the parts of another. So the draws of a chain are those of the parts that hold it, one
after the other, and its newest state is that of the last one. A part without an index holds nothing yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bayesopt_chain.loop import checkpoint

INDEX = "index.json"


@dataclass(frozen=True, eq=False)
class Part:
    """A folder with an index."""

    folder: Path
    index: dict[str, Any]

    @property
    def chains(self) -> range | None:
        """The global numbers of its chains; ``None`` where a rank ran chains of its own, which have none."""
        numbers = self.index.get("numbers")
        return None if numbers is None else range(*numbers)

    @property
    def step(self) -> int:
        """The last step that was committed."""
        return self.index["step"]


class Layout(NamedTuple):
    """What so many ranks wrote."""

    folder: Path
    size: int


class Group(NamedTuple):
    """Consecutive chains that the same parts hold, the oldest first."""

    chains: range
    parts: list[Part]

    @property
    def step(self) -> int:
        """The newest step of these chains; 0 where nothing was committed."""
        return self.parts[-1].step if self.parts else 0


def layouts(path: Path) -> list[Layout]:
    """The layouts of a run, the oldest first; none where nothing was written.

    Raises:
        ValueError: a folder with the parts of several numbers of ranks.
    """
    found = []
    for folder in (path, *sorted(path.glob("layout-*"))):
        sizes = {ranks_of(part) for part in part_folders(folder)}
        sizes |= {1} if folder == path and (path / INDEX).exists() else set()
        if len(sizes) > 1:
            raise ValueError(
                f"{folder} holds runs of {' and of '.join(map(str, sorted(sizes)))} ranks; move one of them away"
            )
        found += [Layout(folder, size) for size in sizes]
    return found


def part_folders(folder: Path) -> list[Path]:
    """The folders that ranks wrote into this one, by rank."""
    return sorted(p for p in folder.glob("part-*-of-*") if re.fullmatch(r"part-\d+-of-\d+", p.name))


def ranks_of(folder: Path) -> int:
    """Of how many ranks' runs one of :func:`part_folders` is a part."""
    return int(folder.name.rpartition("-")[2])


def part_name(rank: int, size: int) -> str:
    """The folder of a rank in a layout of so many."""
    return f"part-{rank:05d}-of-{size:05d}"


def catch_up_name(chains: range) -> str:
    """The folder in a layout of chains that catch up with others."""
    return f"catch-up-{chains.start:05d}-{chains.stop:05d}"


def next_layout(path: Path, last: Layout) -> Path:
    """The folder of the layout after this one; the ranks of a launch have to agree on it, each on its own."""
    number = 0 if last.folder == path else int(last.folder.name.rpartition("-")[2])
    return path / f"layout-{number + 1:05d}"


def parts_of(path: Path) -> list[Part]:
    """All parts of a run that have an index, the oldest first."""
    folders = [path]
    for folder in (path, *sorted(path.glob("layout-*"))):
        folders += [*part_folders(folder), *sorted(folder.glob("catch-up-*-*"))]
    parts = [Part(folder, read_index(folder)) for folder in folders if (folder / INDEX).exists()]
    return sorted(parts, key=lambda part: (part.index.get("since", 0), part.step))


def grouped(parts: Sequence[Part], chains: range) -> list[Group]:
    """These chains in the groups that the same parts hold."""
    groups: list[Group] = []
    for chain in chains:
        mine = [part for part in parts if part.chains is not None and chain in part.chains]
        if groups and groups[-1].parts == mine:
            groups[-1] = Group(range(groups[-1].chains.start, chain + 1), mine)
        else:
            groups.append(Group(range(chain, chain + 1), mine))
    return groups


def read_index(path: Path) -> dict[str, Any]:
    """The index of a part."""
    file = path / INDEX
    if not file.exists():
        raise FileNotFoundError(f"there is no run in {path}: it has no {INDEX}")
    try:
        index = json.loads(file.read_text())
        if index["format"] != checkpoint.FORMAT:
            raise ValueError(f"{file} has the format {index['format']!r}, this version reads {checkpoint.FORMAT!r}")
    except (json.JSONDecodeError, KeyError, TypeError) as err:
        raise ValueError(f"{file} is damaged: {err}; restore it from a copy") from None
    return index
