"""Where the draws of a run are kept: in memory, or in a folder with checkpoints; by one process or by ranks that share it.

Ranks with chains of their own have each a store, and send no message. Ranks that share chains have one together: of plain
tensors the first one writes all, and tells the others where to go on; of DTensors each writes what nobody before it holds, all
after the same step. A commit writes draws, then the checkpoint, then the index that makes them count, then deletes what
the index no longer names.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import optree
import torch
from torch import Tensor

from bayesopt_chain.checks import installed
from bayesopt_chain.distributed.layout import axes_of
from bayesopt_chain.distributed.ranks import broadcast, gather_objects, together
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.loop.module_state import buffers_of
from bayesopt_chain.runs import checkpoint, files
from bayesopt_chain.runs.columns import Shard, side_by_side
from bayesopt_chain.runs.files import checksums
from bayesopt_chain.runs.identity import STATE, identity_of, keys_of, losses_of, require_same
from bayesopt_chain.runs.place import Place
from bayesopt_chain.runs.rescued import index_of, write_alone, writers_of
from bayesopt_chain.runs.resumable_batches import ResumableBatches
from bayesopt_chain.runs.run import Iteration, Run
from bayesopt_chain.runs.table import (
    BUFFER,
    FORMAT,
    INDEX,
    LEAF,
    LOSS,
    STEP,
    WEIGHT,
    Files,
    Group,
    Writer,
    grouped,
    laid_out,
    read_index,
    sealed,
)
from bayesopt_chain.runs.writing import (
    LARGE,
    clear,
    held_by_one,
    kind_of,
    merged_entry,
    merged_part,
    require_unwritten,
    runs_of_small,
    write_part,
)

T = TypeVar("T")

SHARD_BYTES = 1 << 26  # draws on disk are committed when they have grown to this size, or after the interval
SMALL_FILES = 64  # so many small files of draws are made few
ASKED_EACH = 0.1  # of the interval between two commits: how often ranks ask the first one whether it is time
GENERATOR = "_generator/"


class Store:
    """Draws, copied as they come; with a place, committed to its folder.

    Attributes:
        place: where a run on disk is; ``None`` in memory.
        device: of the parameters, to which draws come that are read.
        size: the number of draws that are held in memory.
        writes: whether this rank writes draws.
        outer: where chains catch up, the folder of all chains of this rank, which this run holds already.
    """

    lock: IO[str] | None = None  # of the folder, while this run holds it

    def __init__(self, run: Run, place: Place | None = None, interval: float = 30.0, outer: Path | None = None) -> None:
        self.run, self.place, self.interval, self.outer = run, place, interval, outer
        self.like = checkpoint.flat(run.params)[0]
        self.device = next((local(x).device for x in self.like.values()), torch.device("cpu"))
        self.names, self.spec = list(self.like), optree.tree_structure(run.params, none_is_leaf=True)
        self.held: dict[str, list[Tensor]] = {}
        self.size = self.since = 0  # draws that are held, and the step behind which they come
        self.writes = place is not None and (place.sharded or place.is_first)
        if place is None:
            return
        installed("path=", "runs", "safetensors")
        self.identity = identity_of(run, place.total if place.chains is not None else run.chains)
        self.index: dict[str, Any] = {
            "format": FORMAT,
            "identity": self.identity,
            "numbers": None if place.chains is None else [place.chains.start, place.chains.stop],
            "chains": run.chains,
            "rank": list(place.rank),
            "leaves": self.names,
            "columns": {},
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

    @property
    def path(self) -> Path:
        """The writer's folder."""
        assert self.place is not None
        return self.place.folder

    # draws

    def add(self, it: Iteration, loss: Tensor | None = None) -> None:
        """Copy a draw, with its loss on all ranks that share the chain."""
        if self.place is not None and not self.writes:
            return
        leaves, spec = optree.tree_flatten(it.params, none_is_leaf=True)
        # The names are those of the first parameters: making them anew is half of what a small draw costs.
        names = self.names if spec == self.spec else list(checkpoint.flat(it.params)[0])
        row = {LEAF + name: x.detach().clone() for name, x in zip(names, filter(torch.is_tensor, leaves), strict=True)}
        row |= {BUFFER + name: x.detach().clone() for name, x in buffers_of(it.state).items()}
        row[STEP] = torch.tensor(it.step, device="cpu")
        if loss is not None:
            row[LOSS] = loss
        if torch.is_tensor(getattr(it.info, "weight", None)):
            row[WEIGHT] = it.info.weight.detach().clone()
        if self.held and row.keys() != self.held.keys():
            raise ValueError(
                f"sample: the draw of step {it.step} holds {sorted(row)}, those before it {sorted(self.held)}"
            )
        for name, x in row.items():
            self.held.setdefault(name, []).append(x)
        self.size += 1

    def shards(self) -> list[Shard]:
        """All draws of these chains: those that are committed, and those that are held."""
        out: list[Shard] = []
        if self.place is not None:
            own = [Writer(self.path, read_index(self.path))] if (self.path / INDEX).exists() else []
            groups = self._groups([*own, *[w for w in self._writers() if w.folder != self.path]])
            out = side_by_side(groups, self.device, self.like if self.place.sharded else None)
        return [*out, Shard(self.size, self._stacked())] if self.size else out

    def losses(self, done: int) -> Tensor | None:
        """The losses of the draws up to a step, ``[S, chains]``; ``None`` where none were kept."""

        def read() -> Tensor | None:
            shards = [s for s in self.shards() if LOSS in s.names()]
            rows = [s.read(LOSS)[s.read(STEP) <= done] for s in shards]
            return torch.cat([x.reshape(len(x), math.prod(x.shape[1:])) for x in rows]) if rows else None

        return self.told(read) if self.place is not None and done else None

    def _stacked(self) -> dict[str, Tensor]:
        return {name: torch.stack(rows) for name, rows in self.held.items()}

    # among ranks

    def together(self, what: Callable[[], T]) -> T:
        """Every rank that shares the chains does it; where one fails, all do."""
        return what() if self.place is None or self.place.alone else together(self.place.mesh, what)

    def gathered(self, value: T) -> list[T]:
        """What each of the ranks that share the chains holds."""
        return [value] if self.place is None or self.place.alone else gather_objects(value, self.place.mesh)

    def told(self, what: Callable[[], T]) -> T:
        """The first rank does it, and all learn what came of it."""
        first = self.place is None or self.place.is_first
        value: Any = self.together(lambda: what() if first else None)
        return self.gathered(value)[0]

    def __enter__(self) -> Store:
        if self.place is not None:
            if self.place.sharded and len(named := {str(p) for p in self.gathered(self.path.absolute())}) > 1:
                raise ValueError(
                    f"sample: the ranks name {len(named)} directories ({sorted(named)[0]}, ...), and a run of DTensors is one "
                    "run of all ranks: give the same path= everywhere; chains on meshes of their own are told apart by "
                    'bc.parallel(step, n, loop=True, mesh=mesh["chains"])'
                )
            first = self.place.is_first
            self.lock = self.together(lambda: held_by_one(self.path) if first else None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            self.lock.close()

    # going on

    def _writers(self) -> list[Writer]:
        """All writers of the run; this one alone, where its chains have no numbers."""
        assert self.place is not None
        if self.place.chains is None and self.path != self.place.root:
            return [Writer(self.path, index_of(self.path))] if (self.path / INDEX).exists() else []
        return writers_of(self.place.root)

    def _groups(self, writers: list[Writer], files: bool = True) -> list[Group]:
        assert self.place is not None
        return grouped(writers, range(1) if self.place.chains is None else self.place.chains, files)

    def behind(self) -> tuple[int, list[range]]:
        """The newest step of any of the chains, and the chains that have not come so far.

        Raises:
            ValueError: the folder is another run's.
        """
        return (0, []) if self.place is None else self.told(self._behind)

    def _behind(self) -> tuple[int, list[range]]:
        assert self.place is not None
        place, size = self.place, self.place.rank.size
        writers = writers_of(place.root)
        ranks = {w.index["rank"][1] for w in writers if w.chains is None}
        mine = 0 if place.chains is not None else size
        if writers and (ranks or mine) and ranks != {mine} and not (ranks <= {0, 1} and mine <= 1):
            held = f"{max(ranks)} ranks" if ranks and max(ranks) > 1 else "one process"
            raise ValueError(
                f"sample: {place.root} holds a run of {held}, and {size} run now, and its chains are not "
                "numbered over the ranks: resume with as many, or give this run a directory of its own. Chains of "
                "bc.parallel(step, n, mesh=mesh) go on on any number of ranks"
            )
        if mine > 1:
            writers = [w for w in writers if w.folder == self.path]
        for w in writers:
            by = w.index["rank"][1]
            require_same(w.folder, w.index["identity"], self.identity, "one process" if by == 1 else f"{by} ranks")
            apart = (
                place.chains is not None
                and w.chains is not None
                and not (max(w.chains.start, place.chains.start) < min(w.chains.stop, place.chains.stop))
            )
            if w.step > self.run.steps and not apart:
                raise ValueError(
                    f"sample: {w.folder} has made {w.step} steps already, more than steps={self.run.steps}"
                )
        groups = self._groups(writers, files=False)
        front = max(group.step for group in groups)
        return front, [group.chains for group in groups if group.step < front]

    def restore(self, run: Run) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed, by one writer or by several."""
        if self.place is None:
            return run.params, run.state, 0
        found, index = self.told(lambda: (self._found(), self.index))
        self.index = index if self.place.sharded else self.index
        if not found:
            self.together(run.batches.rewind)
            return run.params, run.state, 0
        step = self.since = found[0][2]
        self.ask_at = self.asked_at = step
        held = [(Files(folder, about["columns"], about["parts"]), rows) for folder, about, _, rows in found]
        grows, inplace = getattr(run.step, "grows", False), getattr(run.step, "inplace", False)
        said: dict[str, Any] = {}
        params, state = run.params, run.state
        if self.writes:
            said = held[0][0].part(0).said
            params, state = self._read(held, said, grows)
        if not self.place.alone and not self.place.sharded:
            together(self.place.mesh, lambda: None)
            if grows:  # only the writer's state has what an optimizer makes in its first step
                leaves, spec = optree.tree_flatten(state)
                about, theirs = self.gathered(([(x.shape, x.dtype, x.device.type) for x in leaves], spec))[0]
                empty = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in about]
                state = state if self.writes else theirs.unflatten(empty)
            params, state = broadcast((params, state), self.place.mesh)
        if step < run.steps:
            self._go_on(run.batches, said, held[0][0])
        if inplace and not grows:
            params, state = copied((run.params, run.state), (params, state))
        return params, state, step

    def _found(self) -> list[tuple[Path, dict[str, Any], int, slice | None]]:
        """The newest checkpoints of these chains: folder, files, step, and which of its chains."""
        mine = None
        if (self.path / INDEX).exists():
            mine = index_of(self.path)
            for segment in Writer(self.path, mine).segments():
                segment.files.require()
            self.index = {**mine, "identity": losses_of(mine["identity"], self.identity)}
        clear(self.path, mine)
        groups = self._groups(self._writers())
        if not any(group.step for group in groups):
            return []
        out = []
        for group in groups:
            w = group.newest
            assert w is not None and w.saved is not None
            if w.folder not in (self.path, self.outer):
                require_unwritten(w)
            w.saved.require()
            rows = (
                None
                if w.chains is None or len(w.chains) == group.size
                else slice(group.chains.start - w.chains.start, group.chains.stop - w.chains.start)
            )
            out.append((w.folder, w.index["checkpoint"], w.step, rows))
        return out

    def _read(self, held: list[tuple[Files, slice | None]], said: Mapping[str, Any], grows: bool) -> tuple[Any, Any]:
        """Parameters and state out of checkpoints, of which each holds some of the chains."""
        assert self.place is not None
        if any(saved.part(0).said["scalars"] != said["scalars"] for saved, _ in held):
            raise ValueError(f"sample: the chains in {self.place.root} do not have the same numbers in their states")
        names = [name for name in held[0][0].columns if not name.startswith(GENERATOR)]
        state = self.run.state
        if grows:
            state = self.run.step.grown() if self.place.sharded else state  # type: ignore[attr-defined]
            known = checkpoint.flat(state)[0]
            below = {n.removeprefix(STATE): torch.empty(0, device="cpu") for n in names if n.startswith(STATE)}
            state = checkpoint.merged(state, {n: x for n, x in below.items() if n not in known})
        target: Any = (self.run.params, state)
        like = checkpoint.flat(target)[0]
        tensors = {}
        for name in names:
            rows = [saved.column(name, like.get(name), cut) for saved, cut in held]
            x = torch.cat(rows) if rows[1:] else rows[0]
            tensors[name] = laid_out(x.to(local(like[name]).device), like[name]) if name in like else x
        if grows:  # a state that grows takes the shapes that were saved
            fresh = {n.removeprefix(STATE): x for n, x in tensors.items() if n.startswith(STATE)}
            target = (self.run.params, checkpoint.merged(state, fresh))
        return checkpoint.filled(target, tensors, said["scalars"], str(self.path))

    def _go_on(self, batches: ResumableBatches, said: Mapping[str, Any], saved: Files) -> None:
        """Batches and generators: of as many ranks each its own, of another number those that the first one began."""
        assert self.place is not None
        place = self.place
        if place.alone:
            batches.seek(said["batches"])
            set_generators(saved, "")
            return
        if not place.sharded:
            if place.is_first:
                batches.seek(said["batches"])
                set_generators(saved, "")
            first = self.gathered(batches.state())[0]
            self.together(lambda: None if place.is_first else batches.follow(first))
            return
        size = place.size

        def go_on() -> None:
            first, alike = said["batches"], said["ranks"] == size
            if not alike and _as_many(
                batches.state()["loader"], first["loader"]
            ):  # each rank's batches are what they were
                first = {**first, "whole": batches.whole}
            (batches.seek if place.is_first or first["whole"] != batches.whole else batches.follow)(first)
            if alike:
                set_generators(saved, f"{place.number}/")

        self.together(go_on)

    # committing

    def maybe_checkpoint(self, it: Iteration, batches: ResumableBatches, asked: bool = False) -> bool:
        """Commit when it is time: of DTensors when the first rank says so.

        Args:
            it: the step that was made.
            batches: as they stand after it.
            asked: whether this rank was asked to end the run.

        Returns:
            Whether ranks that share DTensors end after this step, since one of them was asked to.
        """
        if self.place is None or not self.writes or it.step < self.ask_at:
            return False
        now, full = time.monotonic(), max(1, SHARD_BYTES // self.bytes)  # draws
        late, ends = now - self.committed > self.interval or self.size >= full, False
        pace = max(1e-6, now - self.asked) / max(1, it.step - self.asked_at)
        wait = max(1, min(int(ASKED_EACH * self.interval / pace), full - self.size))
        if self.place.sharded:
            every = self.gathered((late, wait, asked))
            (late, wait, _), ends = every[0], any(theirs[2] for theirs in every)
        self.asked, self.asked_at, self.ask_at = now, it.step, it.step + wait
        if late and not ends:
            self._commit(it.params, it.state, it.step, batches, False, "")
        return ends

    def finish(self, params: Any, state: Any, step: int, batches: ResumableBatches, complete: bool, why: str) -> None:
        """Commit after the last step that was made."""
        if self.writes and (
            step > self.index["step"] or complete != self.index["complete"] or why != self.index["why"]
        ):
            self._commit(params, state, step, batches, complete, why)

    def rescue(self, step: int, why: str, common: bool) -> str:
        """Commit draws alone, where nothing is known of a half-made step: the run goes on from its checkpoint, and makes
        them again.

        Args:
            step: the last one that was made.
            why: the run ended.
            common: whether all ranks that share the chains rescue after this step.

        Returns:
            Why the draws are in memory only; nothing where they are on disk.
        """
        if self.place is None or not self.writes:
            return ""
        alone = self.place.sharded and not common
        try:
            index = {**self.index, "complete": False, "why": why}
            kept = any(s["rescued"] and s["step"] >= step for s in self.index["shards"])
            if alone:
                if self.size and not kept:
                    self._write_alone(index, step)
                return ""
            if self.size and not kept:  # else an earlier interruption left as many of these draws, or more
                index |= self.with_draws(step, rescued=True)
            if kept or self.size or self.index["checkpoint"] is not None:
                self.publish({**index, "complete": False, "why": why})
        except (OSError, ValueError) as err:
            return str(err)
        return ""

    def _write_alone(self, index: dict[str, Any], step: int) -> None:
        """Write what this rank holds of the draws, where it was cut off alone and can wait for nobody."""
        assert self.place is not None
        index["shards"] = [s for s in index["shards"] if not s["rescued"]]
        write_alone(self.path, index, self.since, step, self._stacked(), self.place.number, self.place.size)

    def _commit(self, params: Any, state: Any, step: int, batches: ResumableBatches, complete: bool, why: str) -> None:
        assert self.place is not None
        index = self.with_draws(step, rescued=False)
        if index["checkpoint"] is None or step != index["step"]:
            tensors, scalars = checkpoint.flat((params, state))
            said = {"scalars": scalars, "batches": batches.state(), "ranks": self.place.size}
            parts = self._write(f"checkpoint-{step:012d}", tensors, said, generators=True)
            index["checkpoint"] = parts
        index = self.compacted(index)
        self.publish({**index, "step": step, "complete": complete, "why": why})
        self.since = step

    def with_draws(self, step: int, rescued: bool) -> dict[str, Any]:
        """The index with the draws that are held, which are written."""
        assert self.place is not None
        index = {**self.index, "shards": [s for s in self.index["shards"] if not s["rescued"]]}
        if self.size:
            columns = self._stacked()
            written = self._write(f"draws-{index['next']:06d}", columns, {})
            kinds = {n: [dtype, shape[1:]] for n, (dtype, shape) in written["columns"].items()}
            if index["columns"] not in ({}, kinds):
                wrong = sorted(n for n in {*kinds, *index["columns"]} if kinds.get(n) != index["columns"].get(n))
                raise ValueError(
                    f"sample: {self.path} holds draws of other columns than this run's: {', '.join(wrong[:4])}; give this "
                    "run a directory of its own"
                )
            entry = {"since": self.since, "step": step, "rescued": rescued, "parts": written["parts"]}
            index |= {"columns": kinds, "shards": [*index["shards"], entry], "next": index["next"] + 1}
        return index

    def compacted(self, index: dict[str, Any]) -> dict[str, Any]:
        """The index with small files of draws made few, each rank's by itself, where there are many."""
        small = [s for s in index["shards"] if 2 * max(p["bytes"] for p in s["parts"]) <= LARGE]
        if len(small) < SMALL_FILES:
            return index
        index, shards = dict(index), list[dict[str, Any]]()
        for group in runs_of_small(index, LARGE):
            if len(group) < 2:
                shards += group
                continue
            stem = f"draws-{index['next']:06d}"
            names = [part["file"].partition("/")[2] for part in group[0]["parts"]]
            mine = [i for i, name in enumerate(names) if name in ("", self._own_file())]
            made = self.together(lambda g=group, s=stem, m=mine: [merged_part(self.path, index, g, i, s) for i in m])
            shards.append(merged_entry(group, [part for parts in self.gathered(made) for part in parts]))
            index["next"] += 1
        return {**index, "shards": shards}

    def _own_file(self) -> str:
        assert self.place is not None
        return f"rank-{self.place.number:05d}.safetensors"

    def _write(
        self, stem: str, tensors: dict[str, Tensor], said: dict[str, Any], generators: bool = False
    ) -> dict[str, Any]:
        """Write tensors in one file, or what each rank alone holds in one of its own; what the index says of them."""
        assert self.place is not None
        place = self.place
        own = f"{GENERATOR}{place.number}/" if place.sharded else GENERATOR
        more = {own + name: x for name, x in generator_states().items()} if generators else {}
        columns = {n: kind_of(x) for n, x in {**tensors, **more}.items()}
        if not place.sharded:
            part = write_part(self.path, f"{stem}.safetensors", {**tensors, **more}, said, None)
            return {"columns": columns, "parts": [part]}
        boxes = {n: [[list(run) for run in axis] for axis in axes_of(x)] for n, x in tensors.items()}
        sums = {(n, json.dumps(boxes[n])): checksums(n, local(x)) for n, x in tensors.items() if local(x).numel()}
        every = self.gathered(sums)
        wrong = sorted({at[0] for at, crc in sums.items() for theirs in every if theirs.get(at, crc) != crc})
        if wrong:
            raise ValueError(
                f"save: {', '.join(wrong[:4])} differ from rank to rank, and one of them would be kept: "
                "bc.distributed.broadcast for replicas that have drifted apart, DTensors for shards"
            )
        before = {at for theirs in every[: place.number] for at in theirs}  # what an earlier rank writes
        mine = {n: local(tensors[n]) for n, box in sums if (n, box) not in before}
        where = {n: boxes[n] if mine[n].shape != tensors[n].shape else None for n in mine} | dict.fromkeys(more)
        file = f"{stem}/{self._own_file()}"
        part = self.together(lambda: write_part(self.path, file, {**mine, **more}, said, where))
        return {
            "columns": {n: kind for theirs in self.gathered(columns) for n, kind in theirs.items()},
            "parts": self.gathered(part),
        }

    def publish(self, index: dict[str, Any]) -> None:
        """Write the index, which makes files count; delete what it no longer names."""
        assert self.place is not None
        first = self.place.is_first

        def publish() -> None:
            if first:
                files.write_text(self.path / INDEX, sealed(index))
                clear(self.path, index)

        self.together(publish) if self.place.sharded else publish()
        self.index, self.committed = index, time.monotonic()
        self.held, self.size = {}, 0


def copied(old: Any, new: Any) -> Any:
    """``new``, in the tensors of ``old``: an in-place step, or a module, holds on to them."""
    with torch.no_grad():
        return optree.tree_map(lambda a, b: a.copy_(b) if torch.is_tensor(a) else b, old, new, none_is_leaf=True)


def generator_states() -> dict[str, Tensor]:
    """The states of torch's global generators, which dropout and other draws of a model use."""
    out = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return out


def set_generators(saved: Files, stem: str) -> None:
    """Put torch's global generators back to the states in a checkpoint: those of one rank, where it has them of several."""
    names = [n for n in saved.columns if n.startswith(GENERATOR + stem)]
    torch.set_rng_state(saved.column(f"{GENERATOR}{stem}cpu"))
    rest = [saved.column(n) for n in sorted(names) if "cuda" in n]
    if rest and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(rest)


def _as_many(mine: Any, theirs: Any) -> bool:
    """Whether two ranks' batches are of as many data, and as large."""
    names = ("size", "batch_size")
    known = isinstance(mine, dict) and isinstance(theirs, dict) and all(n in mine and n in theirs for n in names)
    return known and all(mine[n] == theirs[n] for n in names)
