"""Where the draws of a run are kept: in memory, or in a folder with checkpoints."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.loop import checkpoint
from bayesopt_chain.loop.draws import BUFFER, LEAF, LOSS, STEP, Shard, merged, shards_beside, shards_of
from bayesopt_chain.loop.feed import Feed
from bayesopt_chain.loop.layouts import INDEX, Group, Part, grouped, parts_of, read_index
from bayesopt_chain.loop.module_state import buffers_of
from bayesopt_chain.loop.parts import Place, copied, keys_of

if TYPE_CHECKING:
    from bayesopt_chain.loop.sample import Iteration, Run

SHARD_BYTES = 1 << 26  # a shard on disk is written when it has grown to this size, or after the interval


class Memory:
    """Draws kept in memory, copied as they come."""

    def __init__(self, params: Any) -> None:
        self.names = list(checkpoint.flat(params)[0])
        self.spec = optree.tree_structure(params, none_is_leaf=True)
        self.held: dict[str, list[Tensor]] = {}
        self.size = 0

    def resume(self, run: Run) -> tuple[Any, Any, int]:
        return run.params, run.state, 0

    def add(self, it: Iteration) -> None:
        """Copy a draw."""
        row = {LEAF + name: x.clone() for name, x in checkpoint.flat(it.params)[0].items()}
        row |= {BUFFER + name: x.detach().clone() for name, x in buffers_of(it.state).items()}
        row[STEP] = torch.tensor(it.step)
        if torch.is_tensor(getattr(it.info, "loss", None)):
            row[LOSS] = it.info.loss.detach().clone()
        for name, x in row.items():
            self.held.setdefault(name, []).append(x)
        self.size += 1

    def pause(self, it: Iteration, feed: Feed) -> None:
        """Between two steps."""

    def finish(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """After the last step."""

    def take(self) -> dict[str, Tensor]:
        """What is held, stacked; nothing is held any more."""
        out = {name: torch.stack(rows) for name, rows in self.held.items()}
        self.held, self.size = {}, 0
        return out

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        size = self.size
        return ([Shard(size, self.take(), None)] if size else []), self.spec, self.names


STATE = "1/"  # the paths of a state begin with it in a file of ``(params, state)``


def shapes_of(run: Run) -> dict[str, Any]:
    """By path what the tensors of a run are; of a state that grows, which has no shape of its own, nothing."""
    tensors, _ = checkpoint.flat((run.params, run.state))
    fixed = {n: x for n, x in tensors.items() if not (getattr(run.step, "grows", False) and n.startswith(STATE))}
    return {n: [str(x.dtype), list(x.shape)] for n, x in fixed.items()}


def below(stem: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose paths begin with a stem, by what follows it."""
    return {n.removeprefix(stem): x for n, x in tensors.items() if n.startswith(stem)}


class Held(NamedTuple):
    """What a checkpoint says of some chains."""

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    generators: dict[str, Tensor]
    batches: dict[str, Any]


class Disk(Memory):
    """Draws in a directory; :mod:`bayesopt_chain.loop.sample` has its files and what happens when the process dies,
    :mod:`bayesopt_chain.loop.layouts` the folders that other numbers of ranks wrote."""

    def __init__(self, place: Place, run: Run, interval: float) -> None:
        super().__init__(run.params)
        self.place, self.path, self.steps, self.interval = place, place.folder, run.steps, interval
        chains = None if place.chains is None else [place.chains.start, place.chains.stop]
        self.identity = {
            "burn_in": run.burn_in, "thinning": run.thinning, "chains": run.chains, "numbers": chains, "total": place.total,
            "spread": None, "tree": shapes_of(run),
        }  # fmt: skip
        self.index: dict[str, Any] = {
            "format": checkpoint.FORMAT, **self.identity, "leaves": self.names, "shards": [], "checkpoint": None,
            "since": 0, "step": 0, "complete": False, "why": "", "keys": keys_of(run.state),
        }  # fmt: skip
        self.committed = time.monotonic()
        self.bytes = sum(x.nbytes for x in checkpoint.flat(run.params)[0].values())

    def __enter__(self) -> Disk:
        self.lock = held_by_one(self.path)
        return self

    def __exit__(self, *error: object) -> None:
        self.lock.close()

    def behind(self) -> tuple[int, list[range]]:
        """The newest step of any of the chains, and the chains that have not come so far."""
        groups = self._groups(self._parts())
        for part in [part for group in groups for part in group.parts]:
            self._require_same_run(part)
        front = max(group.step for group in groups)
        return front, [group.chains for group in groups if group.step < front]

    def resume(self, run: Run) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed, by one part or by several."""
        self._clear()
        groups = self._groups(self._parts())
        parts = [part for group in groups for part in group.parts]
        if not parts:
            run.feed.rewind()
            return run.params, run.state, 0
        for part in parts:
            self._require_same_run(part)
            shards_of(part)
        own = [part for part in parts if part.folder == self.path][:1]
        groups = self._groups(own) if own else groups
        step = groups[0].step
        held = [self._held(group) for group in groups]
        if any(h.scalars != held[0].scalars for h in held):
            raise ValueError(
                f"sample: the chains that {self.place.root} holds do not have the same numbers in their states"
            )
        tensors = {n: torch.cat([h.tensors[n] for h in held]) if held[1:] else x for n, x in held[0].tensors.items()}
        where = ", ".join([str(group.parts[-1].folder) for group in groups])
        grows = getattr(run.step, "grows", False)
        like = merged(run.state, below(STATE, tensors)) if grows else run.state
        params, state = checkpoint.filled((run.params, like), tensors, held[0].scalars, where)
        self.index = own[0].index if own else {**self.index, "since": step, "step": step, "keys": keys_of(state)}
        if step < run.steps:
            for i, h in enumerate(held):
                if h.batches not in [other.batches for other in held[:i]]:
                    run.feed.seek(h.batches)
            set_generators(held[0].generators)
            if getattr(run.step, "inplace", False) and not grows:
                (params, state) = copied((run.params, run.state), (params, state))
        return params, state, step

    def _parts(self) -> list[Part]:
        """All parts of the run, or this one alone, where no others have chains in common with it."""
        own = Part(self.path, read_index(self.path)) if (self.path / INDEX).exists() else None
        if self.place.chains is None or (own is not None and own.chains is None):
            return [] if own is None else [own]
        return parts_of(self.place.root)

    def _groups(self, parts: list[Part]) -> list[Group]:
        if self.place.chains is None or any(part.chains is None for part in parts):
            return [Group(range(1), parts)]
        return grouped(parts, self.place.chains)

    def _require_same_run(self, part: Part) -> None:
        require_same_run(self.identity, part, self.steps, self.path)

    def _held(self, group: Group) -> Held:
        """What the newest checkpoint says of the chains of a group."""
        part = group.parts[-1]
        with nullcontext() if part.folder == self.path else _unwritten(part):
            tensors, header = checkpoint.read(part.folder / part.index["checkpoint"])
        generators = {name: tensors.pop(name) for name in [n for n in tensors if n.startswith("_generator/")]}
        first = part.chains
        if first is not None and part.folder != self.path:
            rows = slice(group.chains.start - first.start, group.chains.stop - first.start)
            tensors = {name: x[rows] for name, x in tensors.items()}
        return Held(tensors, header["scalars"], generators, header["batches"])

    def pause(self, it: Iteration, feed: Feed) -> None:
        """Commit when it is time."""
        if time.monotonic() - self.committed > self.interval or self.size * self.bytes > SHARD_BYTES:
            self._commit(it.params, it.state, it.step, feed, False, "")

    def finish(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        if step > self.index["step"] or complete != self.index["complete"]:
            self._commit(params, state, step, feed, complete, why)

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        """All draws of these chains: those of earlier parts, then those of this one."""
        groups = self._groups([part for part in self._parts() if part.folder != self.path])
        before = shards_beside(groups, self.spec, self.names) if any(group.parts for group in groups) else []
        return [*before, *shards_of(Part(self.path, self.index))], self.spec, self.names

    def _commit(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """Shard, checkpoint, then the index that makes them count; what it no longer names is deleted."""
        index = {**self.index, "shards": list(self.index["shards"]), "step": step, "complete": complete, "why": why}
        if self.size:
            file, size = f"draws-{len(index['shards']):06d}.safetensors", self.size
            crc = checkpoint.write(self.path / file, {n: torch.stack(x) for n, x in self.held.items()}, {"step": step})
            index["shards"].append({"file": file, "draws": size, "checksum": crc})
        index["checkpoint"] = f"checkpoint-{step:012d}.safetensors"
        tensors, scalars = checkpoint.flat((params, state))
        header = {"scalars": scalars, "batches": feed.state()}
        checkpoint.write(self.path / index["checkpoint"], {**tensors, **generator_states()}, header)
        checkpoint.write_text(self.path / INDEX, json.dumps(index, indent=1))
        self.index, self.committed = index, time.monotonic()
        self.held, self.size = {}, 0
        self._clear()

    def _clear(self) -> None:
        """Delete what a dead process left, and checkpoints that the index has replaced."""
        index = read_index(self.path) if (self.path / INDEX).exists() else None
        for file in self.path.glob(".*.tmp"):
            file.unlink(missing_ok=True)
        written = [*self.path.glob("draws-*.safetensors"), *self.path.glob("checkpoint-*.safetensors")]
        if index is None and len(written) > 2:  # a first commit leaves two at most
            raise ValueError(
                f"sample: {self.path} holds {len(written)} files of a run but no {INDEX}; use an empty directory"
            )
        keep = set() if index is None else {index["checkpoint"], *(s["file"] for s in index["shards"])}
        for file in written:
            if file.name not in keep:
                file.unlink(missing_ok=True)


def held_by_one(path: Path) -> IO[str]:
    """The lock of a run's directory, which is made if absent; closing it gives it back.

    Raises:
        OSError: the directory cannot be written.
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


def require_same_run(identity: Mapping[str, Any], part: Part, steps: int, folder: Path | None = None) -> None:
    """Refuse a part of another run, or of one that has come further; ``folder`` is that of this run.

    Raises:
        ValueError: naming what differs.
    """
    for key, mine in identity.items():
        theirs = part.index.get(key)
        if folder is not None and part.folder != folder:  # a part of another layout has other chains
            if key in ("chains", "numbers"):
                continue
            theirs, mine = (_of_one_chain(x) if key == "tree" else x for x in (theirs, mine))
        if theirs != mine and key == "spread":
            kinds = [("plain tensors", "DTensors")[bool(x)] for x in (theirs, mine)]
            raise ValueError(
                f"sample: {part.folder} holds a run of {kinds[0]}, and {kinds[1]} are given: go on with {kinds[0]} (DTensors "
                "on a mesh of one rank will do), or give this run a directory of its own"
            )
        if theirs != mine and (key not in ("numbers", "total") or None not in (theirs, mine)):
            raise ValueError(f"sample: {part.folder} holds another run: {key} {_difference(theirs, mine)}")
    if part.step > steps:
        raise ValueError(f"sample: {part.folder} has made {part.step} steps already, more than steps={steps}")


@contextmanager
def _unwritten(part: Part) -> Iterator[None]:
    """While a part of another layout is read: nobody writes to it.

    Raises:
        RuntimeError: a process of the earlier launch is still there.
    """
    with open(part.folder / "lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            written = read_index(part.folder)["step"] != part.step
        except BlockingIOError:
            written = True
        if written:
            raise RuntimeError(
                f"sample: another process is writing to {part.folder}; end the earlier launch before another number of "
                "ranks goes on with its run"
            )
        yield


def _of_one_chain(tree: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The shapes without the axis of chains."""
    return None if tree is None else {name: [dtype, shape[1:]] for name, (dtype, shape) in tree.items()}


def _difference(theirs: Any, mine: Any) -> str:
    if isinstance(theirs, dict) and isinstance(mine, dict):
        for name in sorted({*theirs, *mine}):
            if theirs.get(name) != mine.get(name):
                return f"{name} is {theirs.get(name, 'absent')}, here {mine.get(name, 'absent')}"
    return f"is {theirs!r}, here {mine!r}"


def generator_states() -> dict[str, Tensor]:
    """torch's global generators, which dropout and other draws of a model use."""
    out = {"_generator/cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"_generator/cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return out


def set_generators(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["_generator/cpu"])
    rest = [states[k] for k in sorted(states) if "cuda" in k]
    if rest and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(rest)
