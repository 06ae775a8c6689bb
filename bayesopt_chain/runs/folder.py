r"""Folders of draws, written and read: the listing is the manifest.

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

One process at a time writes:

    commit   refuse if the folder is no longer ours; draws, if there are any; the head, which makes them count
    rescue   draws alone, behind the step of the head
    merge    many small files become one under the name of the first, and then the others are deleted
    cut      the head, which says where the loop goes back to; then what lies behind is deleted

A name says where its draws belong, so a commit that is tried again writes the same file. Every file is written whole or not
at all (:mod:`bayesopt_chain.runs.files`), so a process may be killed anywhere: what is found is the run as it was, as it was to
be, or the new draws with the old head, which is a rescue.

Whoever reads numbers the draws ``0, ..., S - 1`` over pieces that follow one another. A piece holds tensors in memory, or rows
of files, whose chains stand side by side on axis 1. What is read out of files is checked, and nothing of it is held.
"""

from __future__ import annotations

import bisect
import errno
import fcntl
import itertools
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain._torch import local
from bayesopt_chain.distributed.shards import cut_like
from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File, is_count

STEP, LOSS, WEIGHT, LEAF, BUFFER = "_step", "_loss", "_weight", "params/", "buffers/"
HEAD, DEEPEST = "head.safetensors", 100
DRAWS = re.compile(r"draws-([0-9]{16})\.safetensors")
FOLDER = re.compile(r"chains-[0-9]{5}-[0-9]{5}|rank-[0-9]{5}-of-[0-9]{5}")
MERGING = 4  # so often a folder is listed again that somebody may write to meanwhile


class Tile(NamedTuple):
    """The draws of a file up to a step, which are its first rows; ``first`` is the number of the first draw."""

    file: File
    step: int
    first: int
    draws: int


def tile(file: File, step: int) -> Tile:
    """The draws of a file up to a step."""
    first = drawn(file.metadata, file.metadata["since"])
    return Tile(file, step, first, drawn(file.metadata, step) - first)


def drawn(about: Mapping[str, Any], step: int) -> int:
    """How many draws a run has made after so many steps: none where it keeps none.

    Example:
        >>> drawn({"burn_in": 10, "thinning": 5}, 24)
        2
    """
    return max(0, (step - about["burn_in"]) // about["thinning"]) * about.get("identity", {}).get("keep", True)


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
        with suppress(FileNotFoundError, ValueError):  # files were merged behind the listing, perhaps
            return _tiled(folder, head, skip)
    return _tiled(folder, head, skip)


def _tiled(folder: Path, head: File, skip: bool) -> list[Tile]:
    out, about, known = list[Tile](), head.metadata, True  # known: what lies behind `done` is not hidden by damage
    done, before = 0, ""
    for name in sorted(filter(DRAWS.fullmatch, os.listdir(folder))):
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
            checks.warn(f"Draws.open: left out: {err}")
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
    rows = {name: x.shape[: 1 if name == STEP else len(lead)] for name, x in file.entries.items()}
    if since >= said["step"] or said["course"] > len(about["cuts"]) or STEP not in rows:
        raise ValueError(f"load: {path} is damaged: it holds no draws behind step {since}")
    if {*rows.values()} - {lead, lead[:1]} or {LEAF + leaf for leaf in about["leaves"]} - rows.keys():
        raise ValueError(f"load: {path} is damaged: it does not hold the {n} draws of its steps")
    if first is not None and (wrong := _differing(file.entries, first)):
        raise ValueError(f"load: {path} holds other columns than {first.path.name}: {', '.join(wrong)}")
    return file


def _is_pair(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(map(is_count, x)) and x[0] < x[1]


def _is_text(x: Any) -> bool:
    return isinstance(x, str) and len(x) < 10**4


def _is_size(x: Any) -> bool:
    return is_count(x) and x > 0


def _is_seen(x: Any) -> bool:
    of, states = (x.get("of"), x.get("states")) if isinstance(x, dict) else (None, None)
    return isinstance(of, list) and all(map(_is_text, of)) and isinstance(states, list) and len(states) == len(of)


def _is_place(x: Any) -> bool:
    """Whether this is a place in batches; what a loader says of itself is its own, but for what :func:`epochs` says."""
    if (
        not isinstance(x, dict)
        or not isinstance(x.get("whole"), dict)
        or not {"position", "seen", "loader"} <= x.keys()
    ):
        return False
    loader = x["loader"] if isinstance(x["loader"], dict) and "batch_size" in x["loader"] else {"epoch": 0, "offset": 0}
    seen = 0 if x["seen"] is None else x["seen"]
    return all(map(is_count, [x["position"], seen, x["whole"].get("ranks"), loader.get("epoch"), loader.get("offset")]))


def _is_identity(x: Any) -> bool:
    if not isinstance(x, dict) or not {"burn_in", "thinning", "total", "sharded", "tree"} <= x.keys():
        return False
    return isinstance(x["tree"], dict) and (x["total"] is None or _is_size(x["total"]))


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
    "leaves": lambda x: (
        isinstance(x, list) and all(isinstance(n, str) and n.count("/") < DEEPEST for n in x) and len(set(x)) == len(x)
    ),
    "keys": lambda x: isinstance(x, list) and all(type(n) is int for n in x),
    "complete": lambda x: isinstance(x, bool),
    "cuts": lambda x: isinstance(x, list) and all(map(is_count, x)),
    "scalars": lambda x: isinstance(x, dict),
    "batches": lambda x: x is None or _is_place(x),
    "callbacks": lambda x: x == {} or _is_seen(x),
}


LARGE, SMALL_FILES = 1 << 28, 64  # bytes of a merged file; so many small files are merged
OURS = re.compile(r"\.(head|draws-[0-9]{16})\.safetensors\.[0-9]+\.tmp")
_held: set[int] = set()  # descriptors of locks


def _give_up_locks() -> None:
    """A forked child has its parent's locks; the parent alone writes."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up_locks)


def _locked(folder: Path) -> int:
    """The descriptor of the lock of a folder, which is made if absent. It is held until :func:`_unlock`.

    Raises:
        OSError: the folder cannot be written, or its lock is no regular file.
        RuntimeError: another process holds it.
    """
    fd = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        _held.add(fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "its lock is no regular file; delete it")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        if fd in _held:  # not locked: some disks know no locks
            os.close(fd)
            _held.discard(fd)
        if isinstance(err, BlockingIOError):
            raise RuntimeError(
                f"path: another process is writing to {folder}; wait for it, or give this run a directory of its own"
            ) from None
        raise OSError(
            err.errno,
            f"path: cannot write to {folder}: {err.strerror}; give path= a directory that can be written to (bc.Draws.open "
            "reads a run that is there)",
        ) from None
    return fd


def _unlock(fd: int) -> None:
    """Give a lock back, also where a forked child still has the descriptor."""
    if fd in _held:
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        _held.discard(fd)


class Folder:
    """A folder that this process writes: some chains of a run, their draws, and their newest checkpoint.

    Args:
        path: of the folder, which is made if absent.

    Attributes:
        head: the newest checkpoint; ``None`` before the first :meth:`set_head`.
        tiles: the draws up to its step.
        ahead: the step up to which draws lie behind that.

    Raises:
        FileNotFoundError, ValueError: what is there is damaged, or no run.
        OSError: the folder cannot be written.
        RuntimeError: another process writes to it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, os.getpid()
        self.lock = _locked(path)
        self.tiles: list[Tile] = []
        self.written: Tile | None = None
        try:
            self.head = head_of(path)
            self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        """Read the listing, and delete what has been merged or cut, and what a process that was killed left over."""
        names = [name for name in os.listdir(self.path) if DRAWS.fullmatch(name) or OURS.fullmatch(name)]
        if self.head is None and any(map(DRAWS.fullmatch, names)):
            raise ValueError(f"path: {self.path} holds draws but no {HEAD}: restore it, or use an empty directory")
        every = [] if self.head is None else tiles_of(self.path, self.head)
        self.tiles = [t for t in every if t.step <= self.step]
        self.ahead = every[len(self.tiles)].step if len(every) > len(self.tiles) else 0
        for name in {*names} - {t.file.path.name for t in every}:
            (self.path / name).unlink(missing_ok=True)

    def open(self) -> Folder:
        """Take the lock again, of a folder that is there and ours."""
        self.require_ours()
        self.lock = _locked(self.path)
        return self

    def close(self) -> None:
        """Give back the lock."""
        _unlock(self.lock)
        self.lock = -1  # the number may be another lock's by now

    @property
    def step(self) -> int:
        """The step of the newest checkpoint."""
        return 0 if self.head is None else self.head.metadata["step"]

    @property
    def since(self) -> int:
        """The step behind the last draw that counts."""
        return self.tiles[-1].step if self.tiles else 0

    def require_ours(self) -> None:
        """Refuse to write where this process is a forked copy, the folder was removed, or somebody else has written.

        Raises:
            OSError: saying which.
        """
        if os.getpid() != self.pid:
            raise OSError(
                f"path: this process is a forked copy of the one that writes to {self.path}, and does not write"
            )
        there = head_of(self.path)
        if there is None and self.head is not None:
            raise OSError(f"path: {self.path} has been removed; the last draws are in memory only")
        if there is not None and (self.head is None or there.metadata["id"] != self.head.metadata["id"]):
            raise OSError(
                f"path: somebody else has written to {self.path}, up to step {there.metadata['step']}; give each run a "
                "directory of its own"
            )

    def add(self, step: int, columns: Mapping[str, Tensor], why: str = "") -> None:
        """Write draws up to a step; they count as committed with a head of this step.

        Raises:
            OSError: the file cannot be written.
            ValueError: draws of other columns, or not as many as the steps give.
        """
        self.require_ours()
        assert self.head is not None
        new = columns[STEP] > self.since  # the others were committed by an earlier try, whose end was cut off
        if not bool(new.all()):
            columns = {n: x[new.to(x.device)] for n, x in columns.items()}
        about = self.head.metadata
        n = drawn(about, step) - drawn(about, self.since)
        if len(columns[STEP]) != n:
            raise ValueError(
                f"path: steps {self.since + 1} to {step} have {n} draws, and {len(columns[STEP])} were kept"
            )
        if not n:
            return
        if self.tiles and (wrong := _differing(columns, self.tiles[0].file)):
            raise ValueError(
                f"path: {self.path} holds draws of other columns than this run's: {', '.join(wrong)}; give this "
                "run a directory of its own"
            )
        prev = self.tiles[-1].file.metadata["id"] if self.tiles else ""
        said = {n: about[n] for n in ("run", "burn_in", "thinning", "chains")}
        said |= {"since": self.since, "step": step, "prev": prev, "course": len(about["cuts"]), "why": why}
        self.written = _written(self.path, columns, said)

    def set_head(self, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the head, which makes the draws up to its step count for the run.

        Raises:
            OSError: it cannot be written, or the folder is not ours.
        """
        self.require_ours()
        mine = os.urandom(8).hex()
        try:
            files.write(self.path / HEAD, tensors, {**metadata, "id": mine})
        finally:  # an error behind the rename, such as Ctrl-C, leaves a head that is ours
            there = head_of(self.path) if self.path.is_dir() else None
            if there is not None and there.metadata["id"] == mine:
                self.head = there
                if self.written is not None and self.written.step <= self.step:
                    self.tiles, self.written = [*self.tiles, self.written], None

    def cut(self, step: int) -> None:
        """Leave out the draws after a step, to which the loop goes back.

        Raises:
            OSError: the head cannot be written, or the folder is not ours.
        """
        assert self.head is not None
        self.written = None
        self.set_head({**self.head.metadata, "step": step, "cuts": [*self.head.metadata["cuts"], step]}, {})
        self._look()

    def merge(self) -> None:
        """Write consecutive files that begin within the same 256 MiB of all draws as one.

        Raises:
            OSError: a file cannot be written; all draws stay readable.
        """
        begins = itertools.accumulate([0, *[t.file.bytes for t in self.tiles]])
        groups = itertools.groupby(zip(begins, self.tiles), lambda x: x[0] // LARGE)
        before, self.tiles = self.tiles, [_merged(self, [t for _, t in group]) for _, group in groups]
        for path in sorted({t.file.path for t in before} - {t.file.path for t in self.tiles}):
            path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Merge when there are many small files; a full disk ends nothing here."""
        if sum(2 * t.file.bytes <= LARGE for t in self.tiles) < SMALL_FILES:
            return
        try:
            self.merge()
        except OSError as err:
            checks.warn(f"path: small files of draws stay as they are: {err}")
            self._look()


def _merged(folder: Folder, group: Sequence[Tile]) -> Tile:
    """These tiles in one file, under the name of the first and with the id of the last."""
    first, last = group[0], group[-1]
    if len(group) == 1 or folder.head is None:
        return first
    columns = {name: torch.cat([t.file.read(name, 0, t.draws) for t in group]) for name in first.file.entries}
    said = {**first.file.metadata, "step": last.step, "course": len(folder.head.metadata["cuts"])}
    return _written(folder.path, columns, said, last.file.metadata["id"])


def _written(folder: Path, columns: Mapping[str, Tensor], said: Mapping[str, Any], name: str = "") -> Tile:
    path = folder / draws_name(said["since"])
    files.write(path, columns, {**said, "id": name or os.urandom(8).hex()})
    return tile(File(path), said["step"])


def _differing(columns: Mapping[str, Any], file: File) -> list[str]:
    """The first of the columns, by name, whose dtype or whose rows' shape is another in a file."""
    mine = {n: (x.dtype, tuple(x.shape[1:])) for n, x in columns.items()}
    theirs = {n: (x.dtype, x.shape[1:]) for n, x in file.entries.items()}
    return sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))[:4]


SPARSE = 4  # of so many rows on disk one is wanted: from there on rows are read one by one


class Piece(NamedTuple):
    """Consecutive draws: leaves ``[S, ...]`` by name, and the others in files that stand side by side on axis 1.

    Attributes:
        size: the number of draws.
        leaves: in memory.
        parts: on disk, where there are any: the draws of some chains each, these and perhaps others.
        first: the number of the first draw, where there are parts.
        device: to which columns come that are read, except for the steps.
        like: parameters by name, as whose DTensors whole leaves are to come.
    """

    size: int
    leaves: Mapping[str, Tensor]
    parts: tuple[Tile, ...] = ()
    first: int = 0
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
        every = [part.file for part in self.parts]
        x = every[0].entries[name]
        _, *shape = x.shape
        if len(every) > 1 and name != STEP:
            inner = shape if every[0].metadata["chains"] is None else shape[1:]
            shape = [sum(file.metadata["chains"] or 1 for file in every), *inner]
        return x.dtype, tuple(shape)

    def read(self, name: str, low: int = 0, high: int | None = None, elements: tuple[int, int] | None = None) -> Tensor:
        """Rows ``low`` to ``high`` of a column, or elements of each of them, taken as flat."""
        high = self.size if high is None else high
        if name in self.leaves or not self.parts:
            x = self.leaves[name] if (low, high) == (0, self.size) else self.leaves[name][low:high]
            x = x if elements is None else x.reshape(len(x), -1)[:, slice(*elements)]
            x = x if name == STEP or self.like is None else x.to(self.device)
        else:
            shape = self.kind(name)[1]
            x = self._elements(name, low, high, *(elements or (0, math.prod(shape))))
            x = x if elements is not None else x.reshape(high - low, *shape)
            x = x if name == STEP else x.to(self.device)
        if elements is not None:
            return x
        return cut_like(x, (self.like or {}).get(name.removeprefix(LEAF)))

    def _elements(self, name: str, low: int, high: int, first: int, stop: int) -> Tensor:
        """Elements of rows, of which each part holds consecutive ones: those of its chains."""
        out, at = list[Tensor](), 0
        for part in self.parts[:1] if name == STEP else self.parts:
            n = math.prod(part.file.entries[name].shape[1:])
            a, b = max(first - at, 0), min(stop - at, n)
            row = self.first - part.first  # of the first draw in this file
            out.append(part.file.elements(name, range(row + low, row + high), a, max(a, b)))
            at += n
        return out[0] if len(out) == 1 else torch.cat(out, 1)


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
            out.append(Piece(b - a, {}, tuple(found), a, device, like))
    return out


def rows_of(pieces: Sequence[Piece], rows: Sequence[int], name: str, elements: tuple[int, int] | None = None) -> Tensor:
    """Some rows of a column, in this order; of each row all, or some elements, taken as flat."""
    ends, parts = list(itertools.accumulate(p.size for p in pieces)), list[Tensor]()
    for k, group in itertools.groupby(rows, lambda r: bisect.bisect_right(ends, r)):
        at = [r - ends[k] + pieces[k].size for r in group]
        low, high = min(at), max(at) + 1
        if high - low > SPARSE * len(at):
            parts += [pieces[k].read(name, i, i + 1, elements) for i in at]
            continue
        x = pieces[k].read(name, low, high, elements)
        parts.append(x if at == list(range(low, high)) else x[[i - low for i in at]])
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
    for name, x in leaves.items() if pieces else ():
        row = pieces[0].kind(LEAF + name)[1]
        row = row[1:] if stacked else row
        lead = x.ndim - len(row)  # the parameters of one chain, or of several
        if lead not in (0, int(stacked)) or tuple(x.shape[lead:]) != row:
            raise ValueError(f"Draws.open: {paths[0]} holds {name} of shape {row}, like has {tuple(x.shape)}")
    spec = optree.tree_structure(tree)  # an absent parameter, None, is no leaf of it
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
