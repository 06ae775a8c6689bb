r"""What runs of several ranks leave on the disk, and how their draws are put together.

Ranks that run chains of their own (``bc.parallel(step, n, mesh=mesh)``, or a step that says nothing of ranks) write a
run each, without a message, into a folder of their own:

    part-00000-of-00004/   part-00001-of-00004/   ...       each a run as in :mod:`bayesopt_chain.loop.sample`

and their draws are one beside the other on the axis of chains; :mod:`bayesopt_chain.loop.layouts` has the folders of another
number of ranks that goes on with them. Ranks that share a chain (``bc.make_step(loss, tx, mesh=mesh)``) have the same draws:
the first one writes them, and tells the others where to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from bayesopt_chain.distributed.ranks import World, agreed_seed, broadcast, chain_seed, gather_objects, together, world
from bayesopt_chain.distributed.replicated import is_replicated
from bayesopt_chain.loop.draws import Draws
from bayesopt_chain.loop.layouts import INDEX, catch_up_name, layouts, next_layout, part_name, parts_of, read_index
from bayesopt_chain.loop.module_state import keyed


class Place(NamedTuple):
    """Where a rank's run belongs: its folder in that of all, the mesh of the ranks that share it, if any, and its chains of
    all by their global numbers, if they have such."""

    root: Path
    folder: Path
    shared: Any
    chains: range | None
    total: int | None

    def catching_up(self, chains: range) -> Place:
        """The folder of some of these chains until they have come as far as the others."""
        return self._replace(folder=self.folder.parent / catch_up_name(chains), chains=chains)


def place_of(path: Path, step: Any) -> Place:
    """The folder of this rank's run.

    Raises:
        ValueError: a mesh that leaves out some of the ranks; a folder with a run of another number of ranks; replicas
            of which nothing says which one writes.
    """
    inner = getattr(step, "step", step)
    chains, data = getattr(step, "mesh", None), getattr(getattr(inner, "ranks", None), "mesh", None)
    everyone = world()
    if everyone.size > 1 and is_replicated(getattr(step, "model", None)):
        raise ValueError(
            "sample: the ranks of a DistributedDataParallel model would all write the same run, each up to another "
            "step: sample without path=, or with bc.make_step(loss, tx, mesh=mesh), whose ranks resume together"
        )
    if chains is None and data is None:
        part = everyone
    else:
        part = World(0, 1) if chains is None else World(chains.get_local_rank(), chains.size())
        known = part.size * (1 if data is None else data.size())
        if known != everyone.size:
            raise ValueError(
                f"sample: {everyone.size} ranks run, and the meshes of this step are of {known}: which of them run "
                'chains of their own is not known. Make one mesh of all ranks, bc.make_step(loss, tx, mesh=mesh["data"]) and '
                'bc.parallel(step, n, loop=True, mesh=mesh["chains"])'
            )
    numbered = chains is not None or part.size == 1
    numbers, total = (getattr(step, "numbers", None), getattr(step, "total", None)) if numbered else (None, None)
    folder = _folder(path, part, numbers, total)
    return Place(path, folder, data if data is not None and data.size() > 1 else None, numbers, total)


def _folder(path: Path, part: World, numbers: range | None, total: int | None) -> Path:
    """The folder of a rank in the newest layout, or in one of its own beside it.

    Raises:
        ValueError: a run of another number of ranks, whose chains have no numbers by which they could be shared out.
    """
    there = layouts(path)
    if not there or there[-1].size == part.size:
        base = there[-1].folder if there else path
        return base if base == path and part.size == 1 else base / part_name(*part)
    theirs = parts_of(path)
    ranks = "one process" if there[-1].size == 1 else f"{there[-1].size} ranks"
    if numbers is None or any(known.chains is None for known in theirs):
        raise ValueError(
            f"sample: {path} holds a run of {ranks}, and {part.size} run now, and its chains are not numbered over the ranks: "
            "resume with as many, or give this run a directory of its own. Chains of bc.parallel(step, n, mesh=mesh) go on "
            "on any number of ranks"
        )
    for known in theirs:
        if known.index["total"] != total:
            raise ValueError(
                f"sample: {path} holds a run of {known.index['total']} chains by {ranks}, and {total} are to be run now: "
                "resume with as many, or give this run a directory of its own"
            )
    return next_layout(path, there[-1]) / part_name(*part)


def gather(draws: Draws, mesh: Any) -> Draws:
    """The draws of all ranks of a mesh, side by side on the axis of chains, in memory on every rank.

    Raises:
        ValueError: on every rank, draws of other leaves or steps.
    """
    mine = draws.columns()
    kinds = {name: (x.dtype, tuple(x.shape)) for name, x in mine.items()}
    every = gather_objects((kinds, draws.chains, draws.complete, draws.why), mesh)
    if any(their[0].keys() != kinds.keys() for their in every):
        raise ValueError(
            "gather: the ranks' draws have other leaves; run the same chains over the same parameters on each"
        )
    columns: list[dict[str, Tensor]] = [{} for _ in every]
    device = torch.device(mesh.device_type)
    for name, x in mine.items():
        sizes = [their[0][name][0].itemsize * torch.Size(their[0][name][1]).numel() for their in every]
        sent = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        sent[: sizes[mesh.get_local_rank()]] = x.detach().contiguous().reshape(-1).view(torch.uint8).to(device)
        came = [torch.empty_like(sent) for _ in every]
        dist.all_gather(came, sent, group=mesh.get_group())
        for column, their, raw, n in zip(columns, every, came, sizes):
            dtype, shape = their[0][name]
            column[name] = raw[:n].clone().view(dtype).view(shape).to(x.device)
    parts = [
        draws.holding_columns(column, chains=chains, complete=complete, why=why)
        for column, (_, chains, complete, why) in zip(columns, every)
    ]
    return parts[0].beside(*parts[1:])


def chain_draws(chains: Any, seed: int | None) -> Callable[[Any, int], AbstractContextManager[None]]:
    """What :meth:`Parallel.init` opens around ``tx.init`` of a chain, by its global number."""
    if seed is None and chains.mesh is None:
        return lambda tx, number: nullcontext()
    data = getattr(getattr(chains.step, "ranks", None), "mesh", None)
    agreed = agreed_seed(seed, *[mesh for mesh in (data, chains.mesh) if mesh is not None])
    return lambda tx, number: _seeded(tx, chain_seed(agreed, number))


@contextmanager
def _seeded(tx: Any, seed: int) -> Iterator[None]:
    """torch's global generator of the CPU, from which keys are drawn, starts from ``seed``, and is put back.

    Raises:
        ValueError: a link with a generator of its own.
    """
    tx = getattr(tx, "transformation", tx)
    if any(getattr(link, "generator", None) is not None for link in getattr(tx, "links", ())):
        raise ValueError(
            "parallel: tx has a generator of its own, from which chains on different ranks would draw the same keys; "
            "build it without generator=, and give the seed to chains.init(tx, params, seed=...)"
        )
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def keys_of(state: Any) -> list[int]:
    """The keys of all random streams of a state."""
    keys = [key for entry in keyed(state) for key in entry.key.reshape(-1).tolist()]
    return sorted({int(key) for key in keys if key})


class Leader:
    """The first of the ranks that share a run: it writes, and tells the others where to go on."""

    def __init__(self, disk: Any, mesh: Any) -> None:
        self.disk, self.mesh = disk, mesh

    def __enter__(self) -> Leader:
        together(self.mesh, self.disk.__enter__)
        return self

    def __exit__(self, *error: object) -> None:
        self.disk.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def behind(self) -> tuple[int, list[range]]:
        """The chains that have to catch up; the others learn of them."""
        said = together(self.mesh, self.disk.behind)
        return gather_objects(said, self.mesh)[0]

    def resume(self, run: Any) -> tuple[Any, Any, int]:
        """Where the run stands; the others learn it."""
        params, state, done = together(self.mesh, lambda: self.disk.resume(run))
        gather_objects((done, run.feed.state()), self.mesh)
        if done:
            broadcast((params, state), self.mesh)
        together(self.mesh, lambda: None)
        return params, state, done

    def shards(self) -> Any:
        """The draws, which all are on the disk now."""
        together(self.mesh, lambda: None)
        return self.disk.shards()


class Follower(Leader):
    """Another of them: it writes nothing, and goes on where the first one does. It reads the draws where it sees the folder."""

    def __enter__(self) -> Follower:
        together(self.mesh, lambda: None)
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is held."""

    def behind(self) -> tuple[int, list[range]]:
        """What the first rank says."""
        together(self.mesh, lambda: None)
        told: Any = None
        return gather_objects(told, self.mesh)[0]

    def resume(self, run: Any) -> tuple[Any, Any, int]:
        """What the first rank says."""
        together(self.mesh, lambda: None)
        told: Any = None
        done, place = gather_objects(told, self.mesh)[0]
        params, state = run.params, run.state
        if done:
            new = broadcast((params, state), self.mesh)
            params, state = copied((params, state), new) if getattr(run.step, "inplace", False) else new
        together(self.mesh, lambda: run.feed.follow(place) if 0 < done < run.steps else None)
        return params, state, done

    def add(self, it: Any) -> None:
        """The first rank keeps the draw."""

    def pause(self, it: Any, feed: Any) -> None:
        """The first rank commits when it is time."""

    def finish(self, *about: Any) -> None:
        """The first rank commits."""

    def shards(self) -> Any:
        """The draws that the first rank wrote, if they are to be seen from here."""
        together(self.mesh, lambda: None)
        if (self.disk.path / INDEX).exists():
            self.disk.index = read_index(self.disk.path)
        return self.disk.shards()


def copied(old: Any, new: Any) -> Any:
    """``new``, in the tensors of ``old``: an in-place step, or a module, holds on to them."""
    with torch.no_grad():
        return optree.tree_map(lambda a, b: a.copy_(b) if torch.is_tensor(a) else b, old, new, none_is_leaf=True)
