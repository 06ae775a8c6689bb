r"""A folder of draws, written by one process at a time.

    commit   refuse if the folder is no longer ours; draws, if there are any; the head, which makes them count
    rescue   draws alone, behind the step of the head
    merge    many small files become one under the name of the first, and then the others are deleted
    cut      the head, which says where the loop goes back to; then what lies behind is deleted

A name says where its draws belong, so a commit that is tried again writes the same file. Every file is written whole or not at
all (:mod:`bayesopt_chain.runs.files`), so a process may be killed anywhere: what is found is the run as it was, as it was to
be, or the new draws with the old head, which is a rescue.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.runs import files
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.folder import DRAWS, HEAD, STEP, Tile, drawn, draws_name, folders_of, head_of, tile, tiles_of

LARGE, SMALL_FILES = 1 << 28, 64  # bytes of a merged file; so many small files are merged
OURS = re.compile(r"\.(head|draws-[0-9]{16})\.safetensors\.[0-9]+\.tmp")
_held: set[int] = set()  # descriptors of locks


def _give_up_locks() -> None:
    """A forked child has its parent's locks; the parent alone writes."""
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_give_up_locks)


class Lock:
    """The lock of a folder, held until :meth:`close`.

    Raises:
        OSError: the folder cannot be written, or its lock is no regular file.
        RuntimeError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            self.fd: int | None = os.open(folder / "lock", flags, 0o666)
        except OSError as err:
            raise OSError(err.errno, f"sample: cannot write to {folder}: {err.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                raise OSError(f"sample: {folder}/lock is no regular file; delete it")
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise RuntimeError(
                f"sample: another process is writing to {folder}; wait for it, or give this run a directory of its own"
            ) from None
        except BaseException:
            os.close(self.fd)
            raise
        _held.add(self.fd)

    def close(self) -> None:
        """Give it back, also where a forked child still has the descriptor."""
        if self.fd in _held:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            _held.discard(self.fd)
        self.fd = None


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
        OSError, RuntimeError: as for :class:`Lock`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, os.getpid()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise OSError(err.errno, f"sample: cannot write to {path}: {err.strerror}") from None
        self.lock: Lock | None = Lock(path)
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
            raise ValueError(f"sample: {self.path} holds draws but no {HEAD}: restore it, or use an empty directory")
        every = [] if self.head is None else tiles_of(self.path, self.head)
        self.tiles = [t for t in every if t.step <= self.step]
        self.ahead = every[len(self.tiles)].step if len(every) > len(self.tiles) else 0
        for name in {*names} - {t.file.path.name for t in every}:
            (self.path / name).unlink(missing_ok=True)

    def open(self) -> None:
        """Take the lock again, of a folder that is there and ours."""
        self.require_ours()
        self.lock = Lock(self.path)

    def close(self) -> None:
        """Give back the lock."""
        if self.lock is not None:
            self.lock.close()
        self.lock = None

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
                f"sample: this process is a forked copy of the one that writes to {self.path}, and does not write"
            )
        there = head_of(self.path)
        if there is None and self.head is not None:
            raise OSError(f"sample: {self.path} has been removed; the last draws are in memory only")
        if there is not None and (self.head is None or there.metadata["id"] != self.head.metadata["id"]):
            raise OSError(
                f"sample: somebody else has written to {self.path}, up to step {there.metadata['step']}; give each run a "
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
                f"sample: steps {self.since + 1} to {step} have {n} draws, and {len(columns[STEP])} were kept"
            )
        if not n:
            return
        if self.tiles and (wrong := _differing(columns, self.tiles[0].file)):
            raise ValueError(
                f"sample: {self.path} holds draws of other columns than this run's: {wrong}; give this run a directory of its "
                "own"
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

    def merge(self, largest: int | None = None) -> None:
        """Write consecutive small files as one.

        Args:
            largest: bytes of a merged file; a file of more than half of that stays as it is.

        Raises:
            OSError: a file cannot be written; all draws stay readable.
        """
        largest = LARGE if largest is None else largest
        out = list[Tile]()
        for group in _groups(self.tiles, largest):
            out.append(_merged(self, group) if len(group) > 1 else group[0])
        gone = {t.file.path for t in self.tiles} - {t.file.path for t in out}
        self.tiles = out
        for path in sorted(gone):
            path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Merge when there are many small files; a full disk ends nothing here."""
        if sum(2 * t.file.bytes <= LARGE for t in self.tiles) < SMALL_FILES:
            return
        try:
            self.merge()
        except OSError as err:
            warnings.warn(f"sample: small files of draws stay as they are: {err}", stacklevel=4)
            self._look()


def _groups(tiles: Sequence[Tile], largest: int) -> Iterable[list[Tile]]:
    """Consecutive tiles that make one file of at most so many bytes together."""
    group, size = list[Tile](), 0
    for one in tiles:
        is_large = 2 * one.file.bytes > largest
        if group and (is_large or size + one.file.bytes > largest):
            yield group
            group, size = [], 0
        group.append(one)
        size += largest if is_large else one.file.bytes
    if group:
        yield group


def _merged(folder: Folder, group: Sequence[Tile]) -> Tile:
    """These tiles in one file, under the name of the first and with the id of the last."""
    assert folder.head is not None
    first, last = group[0], group[-1]
    columns = {name: torch.cat([t.file.read(name, 0, t.draws) for t in group]) for name in first.file.entries}
    said = {**first.file.metadata, "step": last.step, "course": len(folder.head.metadata["cuts"])}
    return _written(folder.path, columns, said, last.file.metadata["id"])


def _written(folder: Path, columns: Mapping[str, Tensor], said: Mapping[str, Any], name: str = "") -> Tile:
    path = folder / draws_name(said["since"])
    files.write(path, columns, {**said, "id": name or os.urandom(8).hex()})
    return tile(File(path), said["step"])


def _differing(columns: Mapping[str, Tensor], file: File) -> str:
    mine = {n: (x.dtype, tuple(x.shape[1:])) for n, x in columns.items()}
    theirs = {n: (x.dtype, x.shape[1:]) for n, x in file.entries.items()}
    return ", ".join(sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n))[:4])


def compact(path: str | Path, largest: int = LARGE) -> None:
    """Merge the small files of draws of a run. A run does so on its own whenever it has 64 of them.

    Args:
        path: the directory of the run.
        largest: bytes that a file may have.

    Raises:
        RuntimeError: a process is writing.
        ValueError: a damaged file; nothing is changed.
    """
    for at in folders_of(Path(path)):
        folder = Folder(at)
        try:
            folder.merge(largest)
        finally:
            folder.close()
