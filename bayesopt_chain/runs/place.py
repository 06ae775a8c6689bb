"""Where a rank's part of a run belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from bayesopt_chain.distributed.ranks import World, world
from bayesopt_chain.distributed.replicated import is_replicated


class Place(NamedTuple):
    """The folder of all and that of this writer; the mesh of the ranks that share its chains, if any; its chains of all by
    their global numbers, if they have such; which of how many ranks with chains of their own it is."""

    root: Path
    folder: Path
    shared: Any = None
    chains: range | None = None
    total: int | None = None
    rank: World = World(0, 1)

    def of(self, chains: range) -> Place:
        """The place of these chains alone."""
        return self._replace(folder=folder_of(self.root, chains, self.total, self.rank), chains=chains)


def folder_of(root: Path, chains: range | None, total: int | None, rank: World) -> Path:
    if chains is None:
        return root if rank.size == 1 else root / f"rank-{rank.rank:05d}-of-{rank.size:05d}"
    return root if len(chains) == total else root / f"chains-{chains.start:05d}-{chains.stop:05d}"


def place_of(path: Path, step: Any) -> Place:
    """The folder of this rank's run.

    Raises:
        ValueError: a mesh that leaves out some of the ranks; replicas of which nothing says which one writes.
    """
    inner = getattr(step, "step", step)
    chains, data = getattr(step, "mesh", None), getattr(getattr(inner, "ranks", None), "mesh", None)
    everyone = world()
    if everyone.size > 1 and is_replicated(getattr(step, "model", None)):
        raise ValueError(
            "sample: the ranks of a DistributedDataParallel model would all write the same run, each up to another "
            "step: sample without path=, or with bc.make_step(loss, tx, mesh=mesh), whose ranks resume together"
        )
    rank = everyone
    if chains is not None or data is not None:
        rank = World(0, 1) if chains is None else World(chains.get_local_rank(), chains.size())
        known = rank.size * (1 if data is None else data.size())
        if known != everyone.size:
            raise ValueError(
                f"sample: {everyone.size} ranks run, and the meshes of this step are of {known}: which of them run "
                'chains of their own is not known. Make one mesh of all ranks, bc.make_step(loss, tx, mesh=mesh["data"]) and '
                'bc.parallel(step, n, loop=True, mesh=mesh["chains"])'
            )
    numbered = chains is not None or rank.size == 1
    numbers, total = (getattr(step, "numbers", None), getattr(step, "total", None)) if numbered else (None, None)
    shared = data if data is not None and data.size() > 1 else None
    return Place(path, folder_of(path, numbers, total, rank), shared, numbers, total, rank)
