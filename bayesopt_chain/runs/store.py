"""Where the draws of a run are kept: in memory, or in folders with checkpoints; by one process or by ranks that share it.

Ranks with chains of their own have each folders of their own, and send no message. Of ranks that share chains the first one
writes. DTensors are gathered leaf by leaf for it, at every draw and every checkpoint, so that a run of DTensors is on disk what
a run of whole tensors is, and any layout goes on with it. What a rank of a mesh of chains writes is cut into blocks of
chains, whose numbers depend on the number of all chains alone: another number of ranks owns other blocks.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import optree
import torch
from torch import Tensor

from bayesopt_chain._torch import REPLICATED, is_dtensor, local, spread_parts
from bayesopt_chain.distributed.ranks import (
    DRIFTED,
    World,
    answers,
    digest,
    gather_objects,
    mesh_of,
    require_alike,
    shown_some,
    together,
    world,
)
from bayesopt_chain.distributed.shards import cut_like
from bayesopt_chain.loop.module_state import ModuleState
from bayesopt_chain.runs import files
from bayesopt_chain.runs.draws import Draws
from bayesopt_chain.runs.files import File
from bayesopt_chain.runs.folder import (
    BUFFER,
    HEAD,
    LEAF,
    LOSS,
    STEP,
    WEIGHT,
    Folder,
    Piece,
    folders_of,
    head_of,
    side_by_side,
    tiles_of,
)
from bayesopt_chain.runs.run import (
    STATE,
    Iteration,
    Run,
    identity_of,
    keys_of,
    of_one_chain,
    require_same,
    uncaptured,
)
from bayesopt_chain.trees import are_spread

T = TypeVar("T")

SHARD_BYTES = 1 << 26  # draws on disk are committed when they have grown to this size, or after the interval
ASKED_EACH = 0.1  # of the interval between two commits: how often ranks ask the first one whether it is time
MOST_BLOCKS = 256  # folders of one run
GENERATOR, CALLBACK = "_generator/", "_callback/"
_SEEN = "the states of callbacks ({}: state_dict has to give what is equal on all ranks, as x.full_tensor() is)"


class Place(NamedTuple):
    """A rank's place in a run.

    Attributes:
        root: the directory of the run; ``None`` in memory, where every rank keeps what it draws.
        folder: of these chains, in it; those of a mesh have one for each block of them, see :func:`blocks_of`.
        sharded: whether the parameters or the state hold DTensors, which are gathered for the rank that writes.
        mesh: the ranks that share these chains, with one axis; ``None``: all ranks of sharded chains, else this one alone.
        chains: the writer's chains by their global numbers, if they have such.
        total: the number of chains of all writers, if they have global numbers.
        rank: which of how many ranks with chains of their own it is.
        in_blocks: whether a mesh shares the chains out.
    """

    root: Any = None  # a path
    folder: Path = Path()
    sharded: bool = False
    mesh: Any = None
    chains: range | None = None
    total: int | None = None
    rank: World = World(0, 1)
    in_blocks: bool = False

    @property
    def shares(self) -> bool:
        """Whether other ranks make the steps of these chains with this one, and wait for it in each of them."""
        return self.mesh is not None or self.sharded

    @property
    def alone(self) -> bool:
        """Whether no other rank shares what is kept of these chains."""
        return self.root is None or not self.shares

    @property
    def shared(self) -> World:
        """The number of this rank among those that share these chains, of which the first one writes; and how many they are."""
        if self.alone:
            return World(0, 1)
        return world() if self.mesh is None else World(self.mesh.get_local_rank(), self.mesh.size())

    @property
    def numbers(self) -> list[int] | None:
        """The first of these chains and the one behind the last, by their global numbers."""
        return None if self.chains is None else [self.chains.start, self.chains.stop]


def require_given_alike(who: str, given: Mapping[str, Any], mesh: Any) -> None:
    """Refuse ranks that share a chain and were given other arguments. It takes a message for each axis of the mesh.

    A rank that drew after other steps would wait for messages that never come, or gather parts of other draws.

    Args:
        who: the caller, for the message.
        given: arguments of this rank, by name.
        mesh: the ranks; ``None`` where this one shares no chain.

    Raises:
        ValueError: on every rank, naming the arguments that differ.
    """
    if mesh is not None and mesh.size() > 1:
        require_alike(
            f"{who}: ranks that share a chain were given other {{}}; give the same on all of them", given, mesh
        )


def place_of(path: Path | None, step: Any, tree: Any, asked: Mapping[str, Any]) -> Place:
    """The place of this rank.

    Args:
        path: the directory of the run; ``None``: in memory.
        step: of the run, which may know a mesh of chains, and one of data.
        tree: parameters and state.
        asked: what all ranks that share these chains have to be given alike, by name.

    Raises:
        ValueError: ranks that were given other numbers; meshes that leave out some of the ranks; with a directory, DTensors on
            several meshes.
    """
    chains, numbers, total = (getattr(uncaptured(step), name, None) for name in ("mesh", "numbers", "total"))
    data = getattr(getattr(of_one_chain(step), "ranks", None), "mesh", None)
    everyone, sharded = world(), are_spread(tree)
    if data is None and everyone.size > 1 and spread_parts(model := getattr(step, "model", None), REPLICATED):
        from torch.distributed.device_mesh import init_device_mesh

        data = init_device_mesh(next(cast(Any, model).parameters()).device.type, (everyone.size,))
    meshes = list(dict.fromkeys(x.device_mesh for x in optree.tree_leaves(tree) if is_dtensor(x)))
    of_shards = meshes[0] if len(meshes) == 1 and meshes[0].ndim == 1 else None
    shared = mesh_of(tree) if data is None else data
    # DTensors are gathered for one folder; else the others' is not looked at
    # of ranks with parts of the data and of the parameters some see alone what differs, and the others would wait for them
    answers(
        (data, mesh_of(tree)) if sharded and data is not None else (),
        lambda: require_given_alike("sample", {**asked, "path": str(path) if sharded else path is None}, shared),
    )
    if path is None:
        return Place(mesh=shared if shared is not None and shared.size() > 1 else None)
    if sharded and chains is None:
        return Place(path, path, True, None, numbers, total)
    if sharded and of_shards is None:
        raise ValueError(
            f"sample: with path=, DTensors of chains on ranks of their own lie on {len(meshes)} meshes, of "
            f"{max(m.ndim for m in meshes)} axes: lay all of them out on one mesh of one axis, such as mesh['shards'] beside "
            "mesh['chains']"
        )
    mesh, rank = of_shards if sharded else data, everyone
    if chains is not None or mesh is not None:
        rank = World(0, 1) if chains is None else World(chains.get_local_rank(), chains.size())
        known = rank.size * (1 if mesh is None else mesh.size())
        if known != everyone.size:
            raise ValueError(
                f"sample: {everyone.size} ranks run, and the meshes of this step are of {known}: which of them run "
                'chains of their own is not known. Make one mesh of all ranks, bc.make_step(loss, tx, mesh=mesh["data"]) and '
                'bc.parallel(step, n, loop=True, mesh=mesh["chains"])'
            )
    if chains is None and rank.size > 1:
        numbers = total = None
    mesh = mesh if mesh is not None and (sharded or mesh.size() > 1) else None
    own = "" if numbers is not None or rank.size == 1 else f"rank-{rank.rank:05d}-of-{rank.size:05d}"
    return Place(path, path / own, sharded, mesh, numbers, total, rank, chains is not None)


def blocks_of(place: Place) -> list[tuple[Path, slice | None]]:
    """The folders of these chains, and which of them each has; ``None``: all.

    Chains that a mesh shares out, now or when the run began, are kept in blocks, one chain each up to 256 of them.

    Raises:
        ValueError: the directory holds a run of another layout; chains of this rank that are no whole blocks.
    """
    root, chains, total = place.root, place.chains, place.total
    there = folders_of(root)
    blocks = place.in_blocks or any(path.name.startswith("chains-") for path in there if path != root)
    ranks = {int(path.name[-5:]) for path in there if path.name.startswith("rank-") and path != root}
    ranks |= {1} if root in there else set()
    wanted = set[int]() if blocks else {place.rank.size if chains is None else 1}
    if ranks - wanted or (blocks and (chains is None or total is None)):
        held = "chains over ranks" if not ranks else "one process" if max(ranks) == 1 else f"{max(ranks)} ranks"
        raise ValueError(
            f"sample: {root} holds a run of {held}, and {place.rank.size} run now in another layout: go on as it began, or "
            "give this run a directory of its own. Chains of bc.parallel(step, n, mesh=mesh) go on on any number of ranks, "
            "and without a mesh in one process"
        )
    if not blocks or chains is None or total is None:
        return [(place.folder, None)]
    width = -(-total // MOST_BLOCKS)
    if chains.start % width or (chains.stop % width and chains.stop != total):
        raise ValueError(
            f"sample: {total} chains are kept on disk in blocks of {width}, and this rank runs {chains.start} to "
            f"{chains.stop - 1}: take a number of chains that {width} times the number of ranks divides"
        )
    ends = [(a, min(a + width, chains.stop)) for a in range(chains.start, chains.stop, width)]
    return [(root / f"chains-{a:05d}-{b:05d}", slice(a - chains.start, b - chains.start)) for a, b in ends]


class Store:
    """Draws, copied as they come; with a place on disk, committed to its folders.

    Attributes:
        place: where the run is kept.
        device: of the parameters, to which draws come that are read.
        size: the number of draws that are held in memory.
        columns: shape and dtype of what a draw has, by name; empty before the first.
        first: whether this rank keeps the draws of these chains.
        folders: those that this rank writes.
        blocks: the folders of these chains, on every rank that shares them, and which of the run's chains each has.
        owns: whether this store has taken the folders' locks.
        heeds: whether ranks that share the chains tell each other after each step whether a callback ends the run.
    """

    def __init__(self, run: Run, place: Place, interval: float) -> None:
        self.run, self.place, self.interval = run, place, interval
        self.like = files.flat(run.params)[0]
        self.device = next((local(x).device for x in self.like.values()), torch.device("cpu"))
        self.names, self.spec = list(self.like), optree.tree_structure(run.params)
        self.held, self.size = dict[str, list[Tensor]](), 0
        self.columns = dict[str, tuple[torch.Size, torch.dtype]]()
        self.first, self.owns, self.heeds = place.shared.rank == 0, True, False
        self.folders, self.blocks = list[Folder](), list[tuple[Path, slice | None]]()
        self.bytes = max(1, sum(x.nbytes for x in self.like.values()))
        self.committed = self.asked = time.monotonic()
        self.ask_at = self.asked_at = 0  # steps
        if place.root is not None:
            self.identity = identity_of(run, place.total if place.chains is not None else run.chains)

    # draws

    def add(self, it: Iteration, loss: Tensor | None = None) -> None:
        """Copy a draw; every rank that shares the chains does, since DTensors are gathered."""
        if not self.first and not self.place.sharded:
            return
        leaves, spec = optree.tree_flatten(it.params)
        # The names are those of the first parameters: making them anew is half of what a small draw costs.
        names = self.names if spec == self.spec else list(files.flat(it.params)[0])
        row: dict[str, Any] = {LEAF + n: x for n, x in zip(names, leaves, strict=True)}
        if isinstance(it.state, ModuleState):
            row |= {BUFFER + name: x for name, x in it.state.buffers.items()}
        if torch.is_tensor(getattr(it.info, "weight", None)):
            row[WEIGHT] = it.info.weight
        row = gathered(row, self.first) if self.place.sharded else {n: x.detach().clone() for n, x in row.items()}
        if not self.first:
            return
        row[STEP] = torch.tensor(it.step, device="cpu")
        if loss is not None:
            row[LOSS] = loss
        columns = {name: (x.shape, x.dtype) for name, x in row.items()}
        self.columns = self.columns or columns
        if columns != self.columns:
            raise ValueError(
                f"draws: the draw of step {it.step} has other leaves than those before it, or other shapes or dtypes: "
                f"{shown_some([n for n in self.columns | columns if self.columns.get(n) != columns.get(n)])}; the draws of a "
                "run are alike: sample or collect the changed model into a directory of its own"
            )
        for name, x in row.items():
            self.held.setdefault(name, []).append(x)
        self.size += 1

    def draws(self, complete: bool = True, why: str = "", last: tuple[Any, Any] | None = None) -> Draws:
        """All draws of these chains: those that are committed, and those that are held."""
        return Draws(
            self._pieces(), self.spec, self.names, chains=self.run.chains, complete=complete, why=why, last=last
        )

    def _pieces(self) -> list[Piece]:
        like = self.like if self.place.sharded else None
        every = [folder.tiles for folder in self.folders] or [tiles_of(path, _head(path)) for path, _ in self.blocks]
        out, held = side_by_side(every, self.device, like), self.stacked()
        if self.folders and held:  # an interrupted commit may have written some of them
            new = held[STEP] > min(folder.since for folder in self.folders)
            held = held if bool(new.all()) else {n: x[new.to(x.device)] for n, x in held.items()}
        return [*out, Piece(len(held[STEP]), held, device=self.device, like=like)] if held and len(held[STEP]) else out

    def losses(self, done: int) -> Tensor | None:
        """The losses of the draws up to a step, ``[S, chains]``; ``None`` where none were kept."""
        rows = [p.read(LOSS)[p.read(STEP) <= done] for p in (self._pieces() if done else ()) if LOSS in p.names()]
        return torch.cat([x.reshape(len(x), -1) for x in rows if len(x)]) if any(map(len, rows)) else None

    def stacked(self) -> dict[str, Tensor]:
        """The draws that are held, by column."""
        try:
            return {name: torch.stack(rows) for name, rows in self.held.items()}
        except torch.OutOfMemoryError:  # of a device, as what ended the run perhaps
            return {name: torch.stack([x.cpu() for x in rows]) for name, rows in self.held.items()}

    def forget(self) -> None:
        """Let go of the draws that are held: they are on disk."""
        self.held, self.size, self.committed = {}, 0, time.monotonic()

    # among ranks

    def together(self, what: Callable[[], T]) -> T:
        """Every rank that shares the chains does it; where one fails, all do."""
        return what() if self.place.alone else together(self.place.mesh, what)

    def told(self, what: Callable[[], T]) -> T:
        """The first rank does it, and all learn what came of it."""
        return what() if self.place.alone else answers(self.place.mesh, lambda: what() if self.first else None)[0]  # pyright: ignore[reportReturnType]

    def __enter__(self) -> Store:
        if self.place.root is not None and self.owns:
            self.blocks = self.told(self._open)
        return self

    def _open(self) -> list[tuple[Path, slice | None]]:
        """Take the locks of these chains' folders, unless the directory is another run's."""
        blocks = blocks_of(self.place)
        self._require_same(blocks)
        try:
            for path, _ in blocks:
                self.folders.append(Folder(path))
        except BaseException:
            self.__exit__()
            raise
        return blocks

    def _require_same(self, blocks: list[tuple[Path, slice | None]]) -> None:
        """Refuse a directory whose folders, or of chains without global numbers these ones, are another run's."""
        for path in folders_of(self.place.root):
            if self.place.chains is not None or path in {path for path, _ in blocks}:
                head = _head(path).metadata
                by = "one process" if head["rank"][1] == 1 else f"{head['rank'][1]} ranks"
                require_same(path, head["identity"], self.identity, by)

    def __exit__(self, *error: object) -> None:
        for folder in self.folders if self.owns else ():
            folder.close()

    # going on

    def behind(self) -> tuple[int, list[range]]:
        """The newest step of any block of chains, and the blocks that have not come so far, those of one step together.

        Raises:
            ValueError: the directory is another run's.
        """
        return (0, []) if self.place.root is None else self.told(self._behind)

    def _behind(self) -> tuple[int, list[range]]:
        if late := [folder for folder in self.folders if folder.step > self.run.steps]:
            raise ValueError(
                f"sample: {late[0].path} has made {late[0].step} steps already, more than steps={self.run.steps}"
            )
        front = max(folder.step for folder in self.folders)
        behind = itertools.groupby(range(len(self.folders)), lambda i: self.folders[i].step)
        return front, [range(at[0], at[-1] + 1) for step, group in behind if step < front and (at := list(group))]

    def some(self, blocks: range, steps: int) -> Store:
        """The store of a run of some blocks of these chains, up to a step."""
        assert self.place.chains is not None
        some = [(path, rows) for path, rows in self.blocks[blocks.start : blocks.stop] if rows is not None]
        first, stop = some[0][1].start, some[-1][1].stop
        place = self.place._replace(chains=self.place.chains[first:stop])
        out = Store(self.run.some(slice(first, stop), steps), place, self.interval)
        out.blocks = [(path, slice(rows.start - first, rows.stop - first)) for path, rows in some]
        out.folders, out.owns = self.folders[blocks.start : blocks.stop], False
        return out

    def restore(self) -> tuple[Any, Any, int]:
        """Parameters, state and number of the last step that was committed."""
        run = self.run
        self.together(self._claim)
        # step and id of the head of each folder, as the first rank has them; in memory there is none
        written = self.told(lambda: [(f.step, f.head and f.head.metadata["id"]) for f in self.folders])
        heads = self.together(lambda: self._heads(written))
        step = self.ask_at = self.asked_at = written[0][0] if written else 0
        if not step:
            if written:
                self.together(run.batches.rewind)
            return run.params, run.state, 0
        grows = getattr(run.step, "grows", False)
        params, state = self.together(lambda: self._read(heads, grows))
        self.together(lambda: self._hand_back(heads, step))
        if step < run.steps:
            self.together(lambda: self._go_on(heads))
        if getattr(run.step, "inplace", False) and not grows:  # which holds on to its tensors, or its module does
            with torch.no_grad():
                before, after = cast(Any, (run.params, run.state)), cast(Any, (params, state))
                params, state = optree.tree_map(
                    lambda old, x: old.copy_(x) if torch.is_tensor(old) else x, before, after, none_is_leaf=True
                )
        return params, state, step

    def _heads(self, written: list[tuple[int, Any]]) -> list[File]:
        """The heads of all blocks, which every rank reads for itself.

        Raises:
            FileNotFoundError, ValueError: this rank does not see what the first one has written.
        """
        heads = [_head(path) for path, _ in self.blocks]
        if [head.metadata["id"] for head in heads] != [name for _, name in written]:
            raise ValueError(
                f"sample: {self.place.root} holds an older checkpoint here than on the first rank; run again"
            )
        return heads

    def _claim(self) -> None:
        """Write heads of step 0, before the first step: from then on the folders are this run's."""
        new = [(folder, rows) for folder, (_, rows) in zip(self.folders, self.blocks) if folder.head is None]
        for folder, rows in new:
            folder.set_head(self.metadata(folder, rows), {})
        if new:  # of ranks with chains of their own that begin at the same time, the last one sees the others' heads
            self._require_same(self.blocks)

    def _hand_back(self, heads: list[File], step: int) -> None:
        """Give the callbacks the state that they had after the step of the checkpoint; all ranks get the first one's.

        Raises:
            ValueError: other callbacks, or callbacks of other chains: what they saw would be lost, or they missed steps.
        """
        mine = self.run.seers
        # Blocks of chains that have caught up had no callbacks: those that did not have to hold what they saw.
        head = next((x for x in heads if x.metadata["callbacks"]), heads[0])
        saved = {"of": [], "chains": self.place.numbers, "states": [], **head.metadata["callbacks"]}
        if not self.owns or (step == self.run.steps and not mine):
            return  # blocks that catch up have no callbacks, and a complete run calls none
        if saved["of"] != mine or saved["chains"] != self.place.numbers:
            told = ", ".join(saved["of"]) or "none", ", ".join(mine) or "none"
            raise ValueError(
                f"sample: {self.place.root} was run for {step} steps with callbacks that have a state ({told[0]}; chains "
                f"{saved['chains']}), and these are {told[1]} (chains {self.place.numbers}): give the same ones in the same "
                "order, on as many ranks, since others have not seen those steps, or give this run a directory of its own"
            )
        for callback, state in zip(
            self.run.stateful, files.unpacked(saved["states"], head, self.device, CALLBACK), strict=True
        ):
            callback.load_state_dict(state)

    def _read(self, heads: list[File], grows: bool) -> tuple[Any, Any]:
        """Parameters and state out of the heads of all blocks."""
        if any(head.metadata["scalars"] != heads[0].metadata["scalars"] for head in heads):
            raise ValueError(f"sample: the chains in {self.place.root} do not have the same numbers in their states")
        wanted: dict[str, Any] = files.flat((self.run.params, self.run.state))[0]
        tensors = dict[str, Tensor]()
        for name in [name for name in heads[0].entries if not name.startswith((GENERATOR, CALLBACK))]:
            rows = [head.read(name) for head in heads]
            x = rows[0] if len(rows) == 1 else torch.cat(rows)
            tensors[name] = cut_like(x, wanted.get(name))
        target: Any = (self.run.params, self.run.state)
        if grows:  # a state that grows takes the shapes that were saved
            fresh = {n.removeprefix(STATE): x for n, x in tensors.items() if n.startswith(STATE)}
            target = (self.run.params, files.merged(self.run.state, fresh))
        return files.filled(target, tensors, heads[0].metadata["scalars"], str(self.place.root))

    def _go_on(self, heads: list[File]) -> None:
        """Go to the place of the checkpoint in the batches, and put back the generators that a rank of this number had."""
        batches, there = self.run.batches, heads[0].metadata["batches"]
        mine, theirs = (x if isinstance(x, dict) else {} for x in (batches.state()["loader"], there["loader"]))
        if self.place.sharded and all(n in mine and mine[n] == theirs.get(n) for n in ("size", "batch_size")):
            there = {**there, "whole": batches.whole}  # each rank's batches are what they were
        batches.seek(there, self.first)
        set_generators(heads[0], self.place.shared.rank)

    # committing

    def maybe_checkpoint(self, it: Iteration, asked: bool = False) -> bool:
        """Commit when it is time: of chains that ranks share when the first rank says so.

        Args:
            it: the step that was made.
            asked: whether this rank was asked to end the run.

        Returns:
            Whether ranks that share the chains end after this step, since one of them was asked to.
        """
        place = self.place
        if (place.root is None and not place.shares) or it.step < self.ask_at:
            return False
        now, full = time.monotonic(), math.inf if place.root is None else max(1, SHARD_BYTES // self.bytes)  # draws
        late, ends = now - self.committed > self.interval or self.size >= full, False
        pace = max(1e-6, now - self.asked) / max(1, it.step - self.asked_at)
        wait = int(max(1, min(ASKED_EACH * self.interval / pace, full - self.size)))
        if place.shares:
            every = gather_objects((late, wait, asked), place.mesh)
            (late, wait, _), ends = every[0], any(theirs[2] for theirs in every)
        self.asked, self.asked_at, self.ask_at = now, it.step, it.step + wait
        if late and not ends and place.root is not None:
            self.commit(it.params, it.state, it.step, False)
        return ends

    def finish(self, params: Any, state: Any, step: int, complete: bool, why: str) -> None:
        """Commit after the last step that was made, unless that has been done."""
        done = {"step": step, "complete": complete, "why": why}
        is_new = any(f.head is None or any(f.head.metadata[k] != v for k, v in done.items()) for f in self.folders)
        if self.told(lambda: is_new):
            self.commit(params, state, step, complete, why)

    def rescue(self, step: int, why: str) -> str:
        """Write draws alone, behind the checkpoint: the run goes on from that, and makes them again. No message is sent.

        Returns:
            Why the draws are in memory only; nothing where they are on disk.
        """
        try:
            for folder, (_, rows) in zip(self.folders, self.blocks):
                if self.size and folder.ahead < step:  # else an earlier interruption left as many of them, or more
                    folder.add(step, chains_of(self.stacked(), rows), why)
                    folder.ahead = step
                elif not self.size and (head := folder.head) is not None:
                    folder.set_head(
                        {**head.metadata, "complete": False, "why": why}, {n: head.read(n) for n in head.entries}
                    )
        except Exception as err:  # out of memory, too: what ended the run says more
            return str(err)
        return ""

    def commit(self, params: Any, state: Any, step: int, complete: bool, why: str = "") -> None:
        """Write the draws that are held, and a checkpoint; nothing is held then.

        Args:
            params, state, step: after the last step.
            complete, why: whether the run is complete, and why it ended else.
        """
        tensors, scalars = files.flat((params, state))
        generators, seen = [generator_states()], dict[str, Tensor]()
        of = self.run.seers
        # of whole tensors the first rank's are written alone
        asked = self.run.stateful if self.first or self.place.sharded else []
        states = self.together(lambda: files.packed([x.state_dict() for x in asked], seen, CALLBACK))
        if self.place.sharded:
            plain: dict[str, Any] = {name: digest(x) for name, x in tensors.items() if not is_dtensor(x)}
            plain[_SEEN.format(", ".join(of))] = (str(states), *map(digest, seen.values()))
            require_alike("save: {}" + DRIFTED, plain, self.place.mesh)
            tensors, generators = gathered(tensors, self.first), gather_objects(generators[0], self.place.mesh)
        more = seen | {f"{GENERATOR}{i}/{n}": x for i, known in enumerate(generators) for n, x in known.items()}
        callbacks = {"of": of, "chains": self.place.numbers, "states": states} if of else {}

        def write() -> None:
            columns = self.stacked()
            for folder, (_, rows) in zip(self.folders, self.blocks):
                if columns:
                    folder.add(step, chains_of(columns, rows))
                mine = tensors if rows is None else {n: x[rows] for n, x in tensors.items()}
                said = self.metadata(folder, rows, step, scalars, complete, why)
                folder.set_head({**said, "callbacks": callbacks}, {**mine, **more})

        self.together(write)
        self.forget()
        for folder in self.folders:
            folder.tidy()

    def metadata(
        self,
        folder: Folder,
        rows: slice | None = None,
        step: int = 0,
        scalars: Mapping[str, Any] | None = None,
        complete: bool = False,
        why: str = "",
    ) -> dict[str, Any]:
        """What a head says."""
        place, old = self.place, None if folder.head is None else folder.head.metadata
        chains, numbers, state = self.run.chains, place.numbers, self.run.state
        if rows is not None and numbers is not None:
            chains, numbers = rows.stop - rows.start, [numbers[0] + rows.start, numbers[0] + rows.stop]
            state = optree.tree_map(lambda x: x[rows], state)
        return {
            "run": os.urandom(16).hex() if old is None else old["run"],
            "identity": self.identity if old is None else old["identity"],
            "burn_in": self.run.burn_in,
            "thinning": self.run.thinning,
            "chains": chains,
            "numbers": numbers,
            "rank": list(place.rank),
            "leaves": self.names,
            "keys": keys_of(state) if old is None else old["keys"],
            "step": step,
            "complete": complete,
            "why": why[:5000],
            "cuts": [] if old is None else old["cuts"],
            "scalars": scalars or {},
            "batches": self.run.batches.state() if step else None,
            "callbacks": {},
        }


def chains_of(columns: Mapping[str, Tensor], rows: slice | None) -> Mapping[str, Tensor]:
    """The draws of some of the chains, which axis 1 counts."""
    return columns if rows is None else {n: x if n == STEP else x[:, rows] for n, x in columns.items()}


def _head(path: Path) -> File:
    """The head of a folder of which the first rank has said that it has one."""
    head = head_of(path)
    if head is None:
        raise FileNotFoundError(f"sample: {path} has no {HEAD} here: all ranks have to see the directory of the run")
    return head


def gathered(tensors: Mapping[str, Any], keep: bool) -> dict[str, Tensor]:
    """Whole leaves of DTensors, copied to the CPU of the ranks that keep them; one leaf at a time is whole on the others."""
    out = dict[str, Tensor]()
    for name, x in tensors.items():
        x = x.detach().full_tensor() if is_dtensor(x) else x.detach()
        if keep:
            out[name] = x.to("cpu", copy=True)
    return out


def generator_states() -> dict[str, Tensor]:
    """The states of torch's global generators, which dropout and other draws of a model use."""
    out = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        out |= {f"cuda{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return out


def set_generators(head: File, rank: int) -> None:
    """Put torch's global generators back to the states that one rank had, if a checkpoint has them."""
    names = [n for n in head.entries if n.startswith(f"{GENERATOR}{rank}/")]
    if names:
        torch.set_rng_state(head.read(f"{GENERATOR}{rank}/cpu"))
        cuda = [head.read(n) for n in sorted(names) if "cuda" in n]
        if cuda and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(cuda)
