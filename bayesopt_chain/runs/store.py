"""Where the draws of a run are kept: in memory, or in a folder with checkpoints; by one process or by ranks that share it.

Ranks with chains of their own have each a store, and send no message. Ranks that share chains have one together: of plain
tensors the first one writes all, and tells the others where to go on; of DTensors each writes what nobody before it holds, all
after the same step. A commit writes draws, then the checkpoint, then the index that makes them count, then deletes what
the index no longer names.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.ranks import broadcast, gather_objects, together, world
from bayesopt_chain.distributed.shards import are_spread, local
from bayesopt_chain.loop.module_state import buffers_of
from bayesopt_chain.runs import checkpoint
from bayesopt_chain.runs.draws import BUFFER, LEAF, LOSS, STEP, merged
from bayesopt_chain.runs.identity import STATE, identity_of, keys_of, require_same
from bayesopt_chain.runs.place import Place
from bayesopt_chain.runs.resumable_batches import ResumableBatches
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.runs.table import (
    FORMAT,
    INDEX,
    STEM,
    Files,
    Group,
    Shard,
    Writer,
    grouped,
    read_index,
    seal,
    sealed,
    side_by_side,
    writers_of,
)

SHARD_BYTES = 1 << 26  # draws on disk are committed when they have grown to this size, or after the interval
ASKED_EACH = 0.1  # of the interval between two commits: how often ranks ask the first one whether it is time
GENERATOR = "_generator/"


class Store:
    """Draws, copied as they come; with a place, committed to its folder."""

    def __init__(self, run: Run, place: Place | None = None, interval: float = 30.0) -> None:
        self.run, self.place, self.interval = run, place, interval
        self.like = checkpoint.flat(run.params)[0]
        self.names, self.spec = list(self.like), optree.tree_structure(run.params, none_is_leaf=True)
        self.held: dict[str, list[Tensor]] = {}
        self.size = 0
        if place is None:
            return
        self.cut = are_spread((run.params, run.state))
        self.alone = not self.cut and place.shared is None
        self.mesh: Any = None if self.cut else place.shared
        self.first = self.alone or (world().rank if self.cut else self.mesh.get_local_rank()) == 0
        self.path, self.rank = place.folder, list(place.rank)
        self.identity = identity_of(run, place.total if place.chains is not None else run.chains)
        numbers = None if place.chains is None else [place.chains.start, place.chains.stop]
        self.index: dict[str, Any] = {
            "format": FORMAT,
            **self.identity,
            "numbers": numbers,
            "chains": run.chains,
            "rank": self.rank,
            "leaves": self.names,
            "keys": keys_of(run.state),
            "next": 0,
            "shards": [],
            "checkpoint": None,
            "step": 0,
            "complete": False,
            "why": "",
        }
        self.bytes = max(1, sum(local(x).nbytes for x in self.like.values()))
        self.committed = self.asked = time.monotonic()
        self.ask_at = self.asked_at = 0  # steps

    # in memory

    def add(self, it: Iteration) -> None:
        """Copy a draw."""
        if self.place is not None and not (self.cut or self.first):
            return
        row = {LEAF + name: x.clone() for name, x in checkpoint.flat(it.params)[0].items()}
        row |= {BUFFER + name: x.detach().clone() for name, x in buffers_of(it.state).items()}
        row[STEP] = torch.tensor(it.step)
        if torch.is_tensor(getattr(it.info, "loss", None)):
            row[LOSS] = it.info.loss.detach().clone()
        for name, x in row.items():
            self.held.setdefault(name, []).append(x)
        self.size += 1

    def stacked(self) -> dict[str, Tensor]:
        return {name: torch.stack(rows) for name, rows in self.held.items()}

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        """All draws of these chains."""
        if self.place is None:
            return ([Shard(self.size, self.stacked())] if self.size else []), self.spec, self.names
        self.together(lambda: None)
        own = [Writer(self.path, read_index(self.path))] if (self.path / INDEX).exists() else []
        groups = self._groups([*own, *[w for w in self._writers() if w.folder != self.path]])
        return side_by_side(groups, self.like if self.cut else None), self.spec, self.names

    # among ranks

    def together(self, what: Any) -> Any:
        """Every rank does it; where one fails, all do."""
        return what() if self.place is None or self.alone else together(self.mesh, what)

    def told(self, what: Any) -> Any:
        """The first rank does it, and all learn what came of it."""
        if self.alone:
            return what()
        return gather_objects(together(self.mesh, lambda: what() if self.first else None), self.mesh)[0]

    def __enter__(self) -> Store:
        self.lock = None
        if (
            self.place is not None
            and self.cut
            and len(named := {str(path) for path in gather_objects(self.path.absolute(), None)}) > 1
        ):
            raise ValueError(
                f"sample: the ranks name {len(named)} directories ({sorted(named)[0]}, ...), and a run of DTensors is one run "
                "of all ranks: give the same path= everywhere; chains on meshes of their own are saved by "
                "bc.distributed.save(folder, tree, chains=...)"
            )
        if self.place is not None:
            self.lock = self.together(lambda: held_by_one(self.path) if self.first else None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            self.lock.close()

    # going on

    def _writers(self) -> list[Writer]:
        """All writers of the run; this one alone, where its chains have no numbers."""
        assert self.place is not None
        if self.place.chains is None and self.path != self.place.root:
            return [Writer(self.path, read_index(self.path))] if (self.path / INDEX).exists() else []
        return writers_of(self.place.root)

    def _groups(self, writers: list[Writer], files: bool = True) -> list[Group]:
        assert self.place is not None
        return grouped(writers, range(1) if self.place.chains is None else self.place.chains, files)

    def behind(self) -> tuple[int, list[range]]:
        """The newest step of any of the chains, and the chains that have not come so far."""
        if self.place is None:
            return 0, []

        def found() -> tuple[int, list[range]]:
            assert self.place is not None
            writers = writers_of(self.place.root)
            ranks = {tuple(w.index["rank"])[1] for w in writers if w.chains is None}
            mine = 0 if self.place.chains is not None else self.rank[1]
            if writers and (ranks or mine) and ranks != {mine} and not (ranks <= {0, 1} and mine <= 1):
                held = f"{max(ranks)} ranks" if ranks and max(ranks) > 1 else "one process"
                raise ValueError(
                    f"sample: {self.place.root} holds a run of {held}, and {self.rank[1]} run now, and its chains are not "
                    "numbered over the ranks: resume with as many, or give this run a directory of its own. Chains of "
                    "bc.parallel(step, n, mesh=mesh) go on on any number of ranks"
                )
            if mine > 1:
                writers = [w for w in writers if w.folder == self.path]
            for w in writers:
                size = w.index["rank"][1]
                require_same(w.folder, w.index, self.index, "one process" if size == 1 else f"{size} ranks")
                both = (
                    self.place.chains is None
                    or w.chains is None
                    or max(w.chains.start, self.place.chains.start) < min(w.chains.stop, self.place.chains.stop)
                )
                if w.step > self.run.steps and both:
                    raise ValueError(
                        f"sample: {w.folder} has made {w.step} steps already, more than steps={self.run.steps}"
                    )
            groups = self._groups(writers, files=False)
            front = max(group.step for group in groups)
            return front, [group.chains for group in groups if group.step < front]

        return self.told(found)

    def restore(self, run: Run) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed, by one writer or by several."""
        if self.place is None:
            return run.params, run.state, 0
        found, index = self.told(lambda: (self._found(), self.index))
        self.index = index if self.cut else self.index
        if not found:
            self.together(run.feed.rewind)
            return run.params, run.state, 0
        step = found[0][2]
        self.ask_at = self.asked_at = step
        held = [(Files(folder, about), rows) for folder, about, _, rows in found]
        said = held[0][0].header() if self.cut or self.first else {}
        grows, inplace = getattr(run.step, "grows", False), getattr(run.step, "inplace", False)
        params, state = run.params, run.state
        if self.cut or self.first:
            params, state = self._read(held, said, grows)
        if not self.alone and not self.cut:
            together(self.mesh, lambda: None)
            params, state = broadcast((params, state), self.mesh)
        if step < run.steps:
            self._go_on(run.feed, said, held[0][0])
        if inplace and not grows:
            params, state = copied((run.params, run.state), (params, state))
        return params, state, step

    def _found(self) -> list[tuple[Path, dict[str, Any], int, slice | None]]:
        """The newest checkpoints of these chains: folder, files, step, and which of its chains."""
        clear(self.path)
        groups = self._groups(self._writers())
        if not any(group.step for group in groups):
            return []
        out = []
        for group in groups:
            w = group.newest
            assert w is not None and w.saved is not None
            if w.folder == self.path:
                self.index = {
                    **w.index,
                    **{k: v for k, v in self.index.items() if k in self.identity and v is not None},
                }
            else:
                _require_unwritten(w)
            w.saved.require()
            rows = (
                None
                if w.chains is None or len(w.chains) == group.size
                else slice(group.chains.start - w.chains.start, group.chains.stop - w.chains.start)
            )
            out.append((w.folder, w.index["checkpoint"], w.step, rows))
        if (self.path / INDEX).exists():
            self.index = {
                **self.index,
                **{k: read_index(self.path)[k] for k in ("next", "shards", "checkpoint", "step", "complete")},
            }
        self.index = {**self.index, "from": groups[0].step}
        return out

    def _read(self, held: list[tuple[Files, slice | None]], said: Mapping[str, Any], grows: bool) -> tuple[Any, Any]:
        if any(files.header()["scalars"] != said["scalars"] for files, _ in held):
            raise ValueError(f"sample: the chains in {self.place.root} do not have the same numbers in their states")  # type: ignore[union-attr]
        names = [name for name in held[0][0].names if not name.startswith(GENERATOR)]
        state = self.run.state
        if grows:
            state = self.run.step.grown() if self.cut else state  # type: ignore[attr-defined]
            known = checkpoint.flat(state)[0]
            below = {n.removeprefix(STATE): torch.empty(0) for n in names if n.startswith(STATE)}
            state = merged(state, {n: x for n, x in below.items() if n not in known})
        target: Any = (self.run.params, state)
        like = checkpoint.flat(target)[0]
        tensors = {}
        for name in names:
            rows = [files.column(name, like.get(name)) for files, _ in held]
            rows = [x if cut is None else x[cut] for x, (_, cut) in zip(rows, held)]
            tensors[name] = (torch.cat(rows) if rows[1:] else rows[0].clone()).to(
                local(like[name]).device if name in like else "cpu"
            )
        if grows:  # a state that grows takes the shapes that were saved
            fresh = {n.removeprefix(STATE): x for n, x in tensors.items() if n.startswith(STATE)}
            target = (self.run.params, merged(state, fresh))
        return checkpoint.filled(target, tensors, said["scalars"], str(self.path))

    def _go_on(self, feed: ResumableBatches, said: Mapping[str, Any], saved: Files) -> None:
        """Batches and generators: of as many ranks each its own, of another number those that the first one began."""
        if self.alone:
            feed.seek(said["batches"])
            set_generators(saved, "")
            return
        if not self.cut:
            if self.first:
                feed.seek(said["batches"])
                set_generators(saved, "")
            place = gather_objects(feed.state(), self.mesh)[0]
            together(self.mesh, lambda: None if self.first else feed.follow(place))
            return

        def go_on() -> None:
            place, alike = said["batches"], len(saved.about["parts"]) and said["ranks"] == world().size
            if not alike and _as_many(
                feed.state()["loader"], place["loader"]
            ):  # each rank's batches are what they were
                place = {**place, "whole": feed.whole}
            (feed.seek if self.first or place["whole"] != feed.whole else feed.follow)(place)
            if alike:
                set_generators(saved, f"{world().rank}/")

        together(None, go_on)

    # committing

    def maybe_checkpoint(self, it: Iteration, feed: ResumableBatches) -> None:
        """Commit when it is time: of DTensors when the first rank says so."""
        if self.place is None or not (self.cut or self.first) or it.step < self.ask_at:
            return
        now, full = time.monotonic(), SHARD_BYTES // self.bytes  # draws
        late = now - self.committed > self.interval or self.size > full
        if self.cut:
            pace = max(1e-6, now - self.asked) / max(1, it.step - self.asked_at)
            wait = max(1, min(int(ASKED_EACH * self.interval / pace), full - self.size))
            late, wait = gather_objects((late, wait), None)[0]
            self.asked, self.asked_at, self.ask_at = now, it.step, it.step + wait
        if late:
            self._commit(it.params, it.state, it.step, feed, False, "")

    def finish(self, params: Any, state: Any, step: int, feed: ResumableBatches, complete: bool, why: str) -> None:
        """Commit after the last step, unless DTensors were interrupted, each rank at a step of its own perhaps."""
        if self.place is None or not (self.cut or self.first) or (self.cut and why.startswith("interrupted")):
            return
        if step > self.index["step"] or complete != self.index["complete"]:
            self._commit(params, state, step, feed, complete, why)

    def rescue(self, step: int, why: str) -> None:
        """Commit draws alone, where nothing is known of a half-made step: the run goes on from its checkpoint, and makes
        them again."""
        if self.place is None or self.cut or not self.first or not self.size:
            return
        try:
            if any(s["rescued"] and s["step"] >= step for s in self.index["shards"]):
                return  # an earlier interruption left as many of these draws, or more
            index = self._with_draws(max(self.index.get("from", 0), self.index["step"]), step, rescued=True)
            self._publish({**index, "complete": False, "why": why})
        except OSError:
            return  # what ended the run says more

    def _commit(self, params: Any, state: Any, step: int, feed: ResumableBatches, complete: bool, why: str) -> None:
        index = self._with_draws(max(self.index.get("from", 0), self.index["step"]), step, rescued=False)
        if index["checkpoint"] is None or step != index["step"]:
            tensors, scalars = checkpoint.flat((params, state))
            said = {"scalars": scalars, "batches": feed.state(), "ranks": world().size}
            index["checkpoint"] = self._write(f"checkpoint-{step:012d}", tensors, said, generators=True)
        self._publish({**index, "step": step, "complete": complete, "why": why})

    def _with_draws(self, since: int, step: int, rescued: bool) -> dict[str, Any]:
        """The index with the draws that are held, which are written."""
        index = {**self.index, "shards": [s for s in self.index["shards"] if not s["rescued"]]}
        if self.size:
            columns = self.stacked()
            if self.cut and LOSS in columns:  # of ranks that each saw a part of the batch
                columns[LOSS] = torch.stack(gather_objects(columns[LOSS].cpu(), None)).mean(0)
            files = self._write(f"draws-{index['next']:06d}", columns, {})
            about = {"draws": self.size, "since": since, "step": step, "rescued": rescued}
            index |= {"shards": [*index["shards"], {**about, **files}], "next": index["next"] + 1}
        return index

    def _write(
        self, stem: str, tensors: dict[str, Tensor], said: dict[str, Any], generators: bool = False
    ) -> dict[str, Any]:
        """Tensors in one file, or each rank's in one of its own; what the index says of them."""
        own = f"{GENERATOR}{world().rank}/" if self.cut else GENERATOR
        more = {own + name: x for name, x in generator_states().items()} if generators else {}
        if not self.cut:
            return written(self.path, f"{stem}.safetensors", {**tensors, **more}, said)
        boxes = {n: [[list(run) for run in axis] for axis in axes_of(x)] for n, x in tensors.items()}
        sums = {(n, json.dumps(boxes[n])): seal(n, local(x)) for n, x in tensors.items() if local(x).numel()}
        every = gather_objects(sums, None)
        wrong = sorted({at[0] for at, crc in sums.items() for theirs in every if theirs.get(at, crc) != crc})
        if wrong:
            raise ValueError(
                f"save: {', '.join(wrong[:4])} differ from rank to rank, and one of them would be kept: "
                "bc.distributed.broadcast for replicas that have drifted apart, DTensors for shards"
            )
        before = {at for theirs in every[: world().rank] for at in theirs}  # what an earlier rank writes
        mine = {n: local(tensors[n]) for n, box in sums if (n, box) not in before}
        boxes = {n: boxes[n] for n in mine if mine[n].shape != tensors[n].shape}
        file = f"{stem}/rank-{world().rank:05d}.safetensors"
        parts = gather_objects(
            together(None, lambda: _part_written(self.path, file, {**mine, **more}, said, boxes)), None
        )
        return {"columns": {n: _kind(x) for n, x in {**tensors, **more}.items()}, "parts": parts}

    def _publish(self, index: dict[str, Any]) -> None:
        """The index that makes files count; what it no longer names is deleted."""

        def publish() -> None:
            if self.first:
                checkpoint.write_text(self.path / INDEX, sealed({k: v for k, v in index.items() if k != "from"}))
                clear(self.path, index)

        together(None, publish) if self.cut else publish()
        self.index, self.committed = index, time.monotonic()
        self.held, self.size = {}, 0


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
    named = {part["file"].partition("/")[0] for files in every for part in files["parts"]}
    for file in [*there, *path.glob(".*.tmp")]:
        if file.name not in named:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def written(folder: Path, file: str, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> dict[str, Any]:
    """Whole tensors in one file; what the index says of it."""
    part = _part_written(folder, file, tensors, said, {})
    return {"columns": {n: _kind(x) for n, x in tensors.items()}, "parts": [part]}


def _kind(x: Tensor) -> list[Any]:
    return [str(x.dtype).removeprefix("torch."), list(x.shape)]


def _part_written(
    folder: Path, file: str, tensors: Mapping[str, Tensor], said: Mapping[str, Any], boxes: Any
) -> dict[str, Any]:
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    checkpoint.write(path, tensors, {"said": said})
    crc = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    sums = {n: seal(n, x) for n, x in tensors.items()}
    return {"file": file, "bytes": path.stat().st_size, "said": crc, "boxes": boxes, "sums": sums}


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


def _require_unwritten(writer: Writer) -> None:
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


def copied(old: Any, new: Any) -> Any:
    """``new``, in the tensors of ``old``: an in-place step, or a module, holds on to them."""
    with torch.no_grad():
        return optree.tree_map(lambda a, b: a.copy_(b) if torch.is_tensor(a) else b, old, new, none_is_leaf=True)


def generator_states() -> dict[str, Tensor]:
    """torch's global generators, which dropout and other draws of a model use."""
    out = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return out


def set_generators(saved: Files, stem: str) -> None:
    names = {
        n: i for i, part in enumerate(saved.about["parts"]) for n in part["sums"] if n.startswith(GENERATOR + stem)
    }
    torch.set_rng_state(saved.piece(names[f"{GENERATOR}{stem}cpu"], f"{GENERATOR}{stem}cpu").clone())
    rest = [saved.piece(i, n).clone() for n, i in sorted(names.items()) if "cuda" in n]
    if rest and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(rest)


def _as_many(mine: Any, theirs: Any) -> bool:
    """Whether two ranks' batches are of as many data, and as large."""
    names = ("size", "batch_size")
    known = isinstance(mine, dict) and isinstance(theirs, dict) and all(n in mine and n in theirs for n in names)
    return known and all(mine[n] == theirs[n] for n in names)
