r"""A folder of draws, read: the listing is the manifest.

    run/lock                                held while a process writes
    run/head.safetensors                    the newest checkpoint, and what the run is; replaced by a rename
    run/draws-0000000000000000.safetensors  the draws after the steps ``since < t <= step``; the name is ``since``
    run/chains-00003-00004/...              the same for a block of chains, where ranks share the chains out
    run/rank-00001-of-00002/...             for a rank with chains of its own that have no numbers

Draws tile the steps: each file begins at the step where the one before it ends, ``prev`` is the ``id`` of that file, all are of
one run, and each has as many rows as burn-in and thinning give for its steps. So a missing, foreign or exchanged file is seen.
A file whose steps an earlier one covers has been merged into it and does not count.

Draws behind the step of the head are of a process that ended between two commits. They count for readers; the run makes
them again, and writes them under the same name.

A loop that goes back to step ``s`` writes ``s`` behind the list ``cuts`` of its head. A file that was written when the list had
``k`` entries counts up to the smallest of the entries from the ``k``-th on. So a cut is one replaced head, whatever is deleted
afterwards.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bayesopt_chain.runs.files import File, is_count

STEP, LOSS, WEIGHT, LEAF, BUFFER = "_step", "_loss", "_weight", "params/", "buffers/"
HEAD, DEEPEST = "head.safetensors", 100
DRAWS = re.compile(r"draws-([0-9]{16})\.safetensors")
FOLDER = re.compile(r"chains-[0-9]{5}-[0-9]{5}|rank-[0-9]{5}-of-[0-9]{5}")
MERGING = 5  # so often a folder is listed again that somebody writes to meanwhile


class Tile(NamedTuple):
    """The draws after the steps ``since < t <= step``: the first rows of a file; ``first`` is the number of the first draw."""

    file: File
    since: int
    step: int
    first: int
    draws: int


def tile(file: File, step: int) -> Tile:
    """The draws of a file up to a step."""
    since = file.metadata["since"]
    first = drawn(file.metadata, since)
    return Tile(file, since, step, first, drawn(file.metadata, step) - first)


def drawn(about: Mapping[str, Any], step: int) -> int:
    """How many draws a run has made after so many steps: none where it keeps none.

    Example:
        >>> drawn({"burn_in": 10, "thinning": 5}, 24)
        2
    """
    keep = about.get("identity", {}).get("keep", True)
    return max(0, (step - about["burn_in"]) // about["thinning"]) * keep


def draws_name(since: int) -> str:
    """The name of the file of the draws behind a step."""
    return f"draws-{since:016d}.safetensors"


def folders_of(root: Path) -> list[Path]:
    """The folders of a run that have a head: its own, and those of blocks of chains and of ranks."""
    there = sorted(p for p in root.iterdir() if FOLDER.fullmatch(p.name)) if root.is_dir() else []
    return [p for p in (root, *there) if os.path.lexists(p / HEAD)]


def head_of(folder: Path) -> File | None:
    """The head of a folder; ``None`` where there is none.

    Raises:
        ValueError: it is damaged, or does not say what a head says.
    """
    try:
        file = File(folder / HEAD)
    except FileNotFoundError:
        return None
    require_fields(file, _HEAD)
    return file


def require_fields(file: File, fields: Mapping[str, Callable[[Any], bool]]) -> None:
    """Refuse a file whose metadata are not what they should be, whatever its checksum says.

    Raises:
        ValueError: naming the field.
    """
    for name, fits in fields.items():
        value = file.metadata.get(name, "absent")
        if name not in file.metadata or not fits(value):
            raise ValueError(f"load: {file.path} is damaged: its {name} is {str(value)[:100]}")


def tiles_of(folder: Path, head: File, skip: bool = False) -> list[Tile]:
    """The draws of a folder in the order of their steps.

    Args:
        folder: that is read.
        head: of the folder.
        skip: whether damaged files are left out, with a warning; all blocks are read then.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or of another run.
    """
    for _ in range(MERGING):
        listing = _listing(folder)
        try:
            return _tiled(folder, head, skip, listing)
        except (FileNotFoundError, ValueError):
            if listing == _listing(folder):
                raise
    raise ValueError(f"Draws: {folder} changes while it is read; open it again when its run pauses")


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Names of files of draws, with inode and size."""
    with os.scandir(folder) as entries:
        status = {x.name: x.stat(follow_symlinks=False) for x in entries if DRAWS.fullmatch(x.name)}
    return {name: (status[name].st_ino, status[name].st_size) for name in sorted(status)}


def _tiled(folder: Path, head: File, skip: bool, names: Mapping[str, Any]) -> list[Tile]:
    out, about, known = list[Tile](), head.metadata, True  # known: what lies behind `done` is not hidden by damage
    done, before = 0, ""
    for name in names:
        since = int(name[6:22])
        try:
            file = _draws_file(folder / name, since, about, out[0].file if out else None)
            step = min([file.metadata["step"], *about["cuts"][file.metadata["course"] :]])
            if step <= (done if known else since):
                continue  # merged into an earlier file, or of a course that the loop has left
            if known and since == done and file.metadata["prev"] != before:
                raise ValueError(
                    f"load: {file.path} does not follow the file before it: one of the two is an old copy, or of another run"
                )
            if skip:
                file.verify()
        except ValueError as err:
            if not skip:
                raise
            warnings.warn(f"Draws.open: left out: {err}", stacklevel=6)
            known = False
            continue
        if known and since > done:
            raise _missing(folder, done, since)
        if known and since < done:
            raise ValueError(f"load: {file.path} holds draws that the file before it holds too: one is of another run")
        out.append(tile(file, step))
        done, before, known = step, file.metadata["id"], True
    if known and drawn(about, about["step"]) > drawn(about, done):
        raise _missing(folder, done, about["step"])
    return out


def _missing(folder: Path, done: int, step: int) -> FileNotFoundError:
    return FileNotFoundError(
        f"Draws: {folder} lacks the draws after steps {done + 1} to {step}: restore {draws_name(done)}"
    )


def _draws_file(path: Path, since: int, about: Mapping[str, Any], first: File | None) -> File:
    """A file of draws of the run that ``about`` describes, with the columns of the first file.

    Raises:
        ValueError: it is damaged, or of another run.
    """
    file = File(path)
    require_fields(file, _DRAWS)
    said = file.metadata
    if any(said[name] != about[name] for name in ("run", "burn_in", "thinning", "chains")) or said["since"] != since:
        raise ValueError(f"load: {path} is of another run, or of another place in it, than its folder says")
    n = drawn(said, said["step"]) - drawn(said, since)
    lead = (n,) if said["chains"] is None else (n, said["chains"])
    kinds = {name: (x.dtype, x.shape[1:]) for name, x in file.entries.items()}
    rows = [x.shape[: 1 if name == STEP else len(lead)] for name, x in file.entries.items()]
    if since >= said["step"] or said["course"] > len(about["cuts"]) or STEP not in kinds:
        raise ValueError(f"load: {path} is damaged: it holds no draws behind step {since}")
    if any(row not in (lead, lead[:1]) for row in rows) or {LEAF + leaf for leaf in about["leaves"]} - kinds.keys():
        raise ValueError(f"load: {path} is damaged: it does not hold the {n} draws of its steps")
    if first is not None and kinds != {name: (x.dtype, x.shape[1:]) for name, x in first.entries.items()}:
        raise ValueError(f"load: {path} holds other columns than {first.path.name}")
    return file


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(map(is_count, x)) and x[0] < x[1]


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and len(x) < 10**4


def _is_size(x: Any) -> bool:
    return is_count(x) and x > 0


def _is_leaves(x: Any) -> bool:
    return (
        isinstance(x, list) and all(isinstance(n, str) and n.count("/") < DEEPEST for n in x) and len(set(x)) == len(x)
    )


def _is_seen(x: Any) -> bool:
    of, states = (x.get("of"), x.get("states")) if isinstance(x, dict) else (None, None)
    return isinstance(of, list) and all(map(_is_text, of)) and isinstance(states, list) and len(states) == len(of)


def _is_identity(x: Any) -> bool:
    wanted = {"burn_in", "thinning", "total", "sharded", "tree", "version"}
    total = x.get("total", 0) if isinstance(x, dict) else 0
    return (
        isinstance(x, dict)
        and wanted <= x.keys()
        and isinstance(x["tree"], dict)
        and (total is None or _is_size(total))
    )


_BOTH: dict[str, Callable[[Any], bool]] = {
    "run": _is_text,
    "id": _is_text,
    "burn_in": is_count,
    "thinning": _is_size,
    "chains": lambda x: x is None or _is_size(x),
    "step": is_count,
    "why": _is_text,
}
_DRAWS = {**_BOTH, "since": is_count, "prev": _is_text, "course": is_count}
_HEAD = {
    **_BOTH,
    "identity": _is_identity,
    "numbers": lambda x: x is None or _is_pair(x),
    "rank": _is_pair,
    "leaves": _is_leaves,
    "keys": lambda x: isinstance(x, list) and all(type(n) is int for n in x),
    "complete": lambda x: isinstance(x, bool),
    "cuts": lambda x: isinstance(x, list) and all(map(is_count, x)),
    "scalars": lambda x: isinstance(x, dict),
    "batches": lambda x: x is None or (isinstance(x, dict) and {"position", "loader", "whole"} <= x.keys()),
    "callbacks": lambda x: x == {} or _is_seen(x),
}
