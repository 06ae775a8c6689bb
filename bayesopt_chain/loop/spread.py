r"""A run on disk whose parameters are spread over ranks (DTensors): each rank writes what it alone holds.

    draws-000000/                  consecutive draws, stacked on axis 0: one checkpoint of :mod:`bayesopt_chain.distributed`
    checkpoint-000000001000/       parameters and state after a step
    generators-000000001000.safetensors     torch's generators of every rank
    index.json                     names those that belong together; replaced last, by the first rank
    lock                           held by the first rank

All ranks see the directory, and all commit after the same step: every so often they ask the first one whether it is time, and
when to ask again. Any number of ranks goes on with the run, in any layout of the parameters.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.distributed import checkpoint as shared
from bayesopt_chain.distributed.ranks import gather_objects, together, world
from bayesopt_chain.distributed.shards import local
from bayesopt_chain.loop import checkpoint
from bayesopt_chain.loop.draws import LOSS, Shard, merged, shards_of
from bayesopt_chain.loop.feed import Feed
from bayesopt_chain.loop.layouts import INDEX, Part, read_index
from bayesopt_chain.loop.store import (
    SHARD_BYTES,
    STATE,
    Memory,
    generator_states,
    held_by_one,
    require_same_run,
    set_generators,
    shapes_of,
)

if TYPE_CHECKING:
    from bayesopt_chain.loop.sample import Iteration, Run

RUN = "run/"  # the paths of parameters and state begin with it in a checkpoint
WRITTEN = re.compile(r"draws-\d{6}|checkpoint-\d{12}|generators-\d{12}\.safetensors")
ASKED_EACH = 0.1  # of the interval between two commits: how often the ranks ask whether it is time


class SpreadDisk(Memory):
    """Draws of DTensors in a directory that all ranks see."""

    def __init__(self, path: Path, run: Run, interval: float) -> None:
        """Refuses chains of several meshes, of which nothing says which rank holds parts of which.

        Raises:
            ValueError: a step with a mesh of chains.
        """
        super().__init__(run.params)
        if getattr(run.step, "mesh", None) is not None:
            raise ValueError(
                "sample: with path=, chains over ranks whose parameters are DTensors are not written: run the chains one after "
                "the other, each on all ranks, or sample without path= and save with bc.distributed.save(chains=)"
            )
        self.path, self.steps, self.interval = path, run.steps, interval
        self.first = world().rank == 0
        self.like = checkpoint.flat(run.params)[0]
        self.identity: dict[str, Any] = {
            "burn_in": run.burn_in, "thinning": run.thinning, "chains": run.chains, "spread": True,
            "tree": shapes_of(run),
        }  # fmt: skip
        self.index: dict[str, Any] = {
            "format": checkpoint.FORMAT, **self.identity, "leaves": self.names, "shards": [], "checkpoint": None,
            "step": 0, "complete": False, "why": "",
        }  # fmt: skip
        self.bytes = max(1, sum(local(x).nbytes for x in self.like.values()))
        self.committed = self.asked = time.monotonic()
        self.ask_at = self.asked_at = 0  # steps

    def __enter__(self) -> SpreadDisk:
        named = {str(path) for path in gather_objects(self.path.absolute(), None)}
        if len(named) > 1:
            raise ValueError(
                f"sample: the ranks name {len(named)} directories ({sorted(named)[0]}, ...), and a run of DTensors is one run "
                "of all ranks: give the same path= everywhere; chains on meshes of their own are saved by "
                "bc.distributed.save(folder, tree, chains=...)"
            )
        self.lock = together(None, lambda: held_by_one(self.path) if self.first else None)
        return self

    def __exit__(self, *error: object) -> None:
        if self.lock is not None:
            self.lock.close()

    def resume(self, run: Run) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed, wherever their parts lie now."""
        index = gather_objects(together(None, self._found), None)[0]
        if index is None:
            together(None, run.feed.rewind)
            return run.params, run.state, 0
        self.index, step = index, index["step"]
        self.ask_at = self.asked_at = step

        both: Any = (run.params, run.state)
        if getattr(run.step, "grows", False):
            state = run.step.grown()  # type: ignore[attr-defined]
            saved, known = shared.Table(self.path / index["checkpoint"], {}), checkpoint.flat(state)[0]
            names = [name.removeprefix(RUN + STATE) for name in saved if name.startswith(RUN + STATE)]
            both = (run.params, merged(state, {n: saved[RUN + STATE + n] for n in names if n not in known}))
        target: Any = both if getattr(run.step, "inplace", False) else optree.tree_map(_copy, both, none_is_leaf=True)
        tensors, _ = checkpoint.flat(target)
        with torch.no_grad():
            shared.load(self.path / index["checkpoint"], {RUN[:-1]: tensors})
        params, state = checkpoint.filled(target, tensors, index["scalars"], str(self.path))
        if step < run.steps:
            together(None, lambda: self._go_on(run.feed, index))
        return params, state, step

    def _found(self) -> dict[str, Any] | None:
        """What the first rank finds; it clears away what a dead process left."""
        if not self.first:
            return None
        self._clear()
        if not (self.path / INDEX).exists():
            return None
        part = Part(self.path, read_index(self.path))
        require_same_run(self.identity, part, self.steps)
        shards_of(part)
        return part.index

    def _go_on(self, feed: Feed, index: Mapping[str, Any]) -> None:
        """Batches and generators: of as many ranks each its own, of another number those that the first one began."""
        place, alike = index["batches"], index["ranks"] == world().size
        if not alike and _as_many(feed.state()["loader"], place["loader"]):  # each rank's batches are what they were
            place = {**place, "whole": feed.whole}
        if self.first or place["whole"] != feed.whole:
            feed.seek(place)
        else:
            feed.follow(place)
        if alike:
            states, _ = checkpoint.read(self.path / index["generators"])
            mine = f"{world().rank}/"
            set_generators({name.removeprefix(mine): x for name, x in states.items() if name.startswith(mine)})

    def pause(self, it: Iteration, feed: Feed) -> None:
        """Commit when the first rank says that it is time."""
        if it.step < self.ask_at:
            return
        now = time.monotonic()
        full = SHARD_BYTES // self.bytes  # draws
        late = now - self.committed > self.interval or self.size > full
        pace = max(1e-6, now - self.asked) / max(1, it.step - self.asked_at)
        wait = max(1, min(int(ASKED_EACH * self.interval / pace), full - self.size))
        late, wait = gather_objects((late, wait), None)[0]
        self.asked, self.asked_at, self.ask_at = now, it.step, it.step + wait
        if late:
            self._commit(it.params, it.state, it.step, feed, False, "")

    def finish(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """Commit, unless ranks were interrupted, each at a step of its own perhaps."""
        if not why.startswith("interrupted") and (step > self.index["step"] or complete != self.index["complete"]):
            self._commit(params, state, step, feed, complete, why)

    def shards(self) -> tuple[list[Shard], Any, list[str]]:
        """The draws that were committed, spread as the parameters are."""
        return shards_of(Part(self.path, self.index), like=self.like), self.spec, self.names

    def _commit(self, params: Any, state: Any, step: int, feed: Feed, complete: bool, why: str) -> None:
        """Draws, checkpoint, then the index that makes them count; what it no longer names is deleted."""
        index = {**self.index, "shards": list(self.index["shards"]), "step": step, "complete": complete, "why": why}
        if self.size:
            file, size = f"draws-{len(index['shards']):06d}", self.size
            columns = {name: torch.stack(rows) for name, rows in self.held.items()}
            if LOSS in columns:  # of ranks that each saw a part of the batch
                columns[LOSS] = torch.stack(gather_objects(columns[LOSS].cpu(), None)).mean(0)
            shared.save(self.path / file, columns)
            index["shards"].append({"file": file, "draws": size, "checksum": None})
        tensors, scalars = checkpoint.flat((params, state))
        index |= {"checkpoint": f"checkpoint-{step:012d}", "generators": f"generators-{step:012d}.safetensors"}
        if index["checkpoint"] != self.index["checkpoint"]:
            shared.save(self.path / index["checkpoint"], {RUN[:-1]: tensors})
        index |= {"scalars": scalars, "batches": feed.state(), "ranks": world().size}
        generators = gather_objects(generator_states(), None)

        def told() -> None:
            every = {f"{rank}/{name}": x for rank, states in enumerate(generators) for name, x in states.items()}
            checkpoint.write(self.path / index["generators"], every, {})
            checkpoint.write_text(self.path / INDEX, json.dumps(index, indent=1))
            self._clear()

        together(None, told if self.first else lambda: None)
        self.index, self.committed = index, time.monotonic()
        self.held, self.size = {}, 0

    def _clear(self) -> None:
        """Delete what a dead process left, and what the index has replaced.

        Raises:
            ValueError: more than a first commit leaves, and no index.
        """
        index = read_index(self.path) if (self.path / INDEX).exists() else None
        written = [file for file in self.path.iterdir() if WRITTEN.fullmatch(file.name)]
        if index is None and len(written) > 3:
            raise ValueError(
                f"sample: {self.path} holds {len(written)} parts of a run but no {INDEX}; use an empty directory"
            )
        named = (
            () if index is None else (index["checkpoint"], index["generators"], *(s["file"] for s in index["shards"]))
        )
        for file in [*written, *self.path.glob(".*.tmp")]:
            if file.name not in named:
                shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _as_many(mine: Any, theirs: Any) -> bool:
    """Whether two ranks' batches are of as many data, and as large."""
    names = ("size", "batch_size")
    known = isinstance(mine, dict) and isinstance(theirs, dict) and all(n in mine and n in theirs for n in names)
    return known and all(mine[n] == theirs[n] for n in names)
