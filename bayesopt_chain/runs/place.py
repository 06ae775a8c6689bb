"""Where a rank's part of a run belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import optree

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.ranks import World, world
from bayesopt_chain.distributed.replicated import is_replicated
from bayesopt_chain.distributed.shards import are_spread
from bayesopt_chain.runs.folder import folders_of

MOST_BLOCKS = 256  # folders of one run


class Place(NamedTuple):
    """A rank's place in a run.

    Attributes:
        root: the directory of the run.
        folder: of these chains, in it; those of a mesh have one for each block of them, see :func:`blocks_of`.
        sharded: whether the parameters or the state hold DTensors, which are gathered for the rank that writes.
        mesh: the ranks that share these chains, with one axis; ``None``: all ranks of sharded chains, else this one alone.
        chains: the writer's chains by their global numbers, if they have such.
        total: the number of chains of all writers, if they have global numbers.
        rank: which of how many ranks with chains of their own it is.
        in_blocks: whether a mesh shares the chains out.
    """

    root: Path
    folder: Path
    sharded: bool = False
    mesh: Any = None
    chains: range | None = None
    total: int | None = None
    rank: World = World(0, 1)
    in_blocks: bool = False

    @property
    def alone(self) -> bool:
        """Whether no other rank shares these chains."""
        return self.mesh is None and not self.sharded

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the ranks that share these chains: the one that writes the index."""
        return self.number == 0

    @property
    def number(self) -> int:
        """The number of this rank among those that share these chains."""
        return 0 if self.alone else world().rank if self.mesh is None else self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """How many ranks share these chains."""
        return 1 if self.alone else world().size if self.mesh is None else self.mesh.size()


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


def place_of(path: Path, step: Any, tree: Any) -> Place:
    """The place of this rank.

    Args:
        path: the directory of the run.
        step: of the run, which may know a mesh of chains, and one of data.
        tree: parameters and state.

    Raises:
        ValueError: meshes that leave out some of the ranks.
    """
    inner = getattr(step, "step", step)
    chains, data = getattr(step, "mesh", None), getattr(getattr(inner, "ranks", None), "mesh", None)
    everyone, sharded = world(), are_spread(tree)
    if data is None and everyone.size > 1 and is_replicated(model := getattr(step, "model", None)):
        data = _mesh_of_all(model)  # DistributedDataParallel over all ranks
    if sharded and chains is None:
        numbers, total = getattr(step, "numbers", None), getattr(step, "total", None)
        return Place(path, path, True, None, numbers, total)
    shared = _mesh_of(tree) if sharded else data
    rank = everyone
    if chains is not None or shared is not None:
        rank = World(0, 1) if chains is None else World(chains.get_local_rank(), chains.size())
        known = rank.size * (1 if shared is None else shared.size())
        if known != everyone.size:
            raise ValueError(
                f"sample: {everyone.size} ranks run, and the meshes of this step are of {known}: which of them run "
                'chains of their own is not known. Make one mesh of all ranks, bc.make_step(loss, tx, mesh=mesh["data"]) and '
                'bc.parallel(step, n, loop=True, mesh=mesh["chains"])'
            )
    numbered = chains is not None or rank.size == 1
    numbers, total = (getattr(step, "numbers", None), getattr(step, "total", None)) if numbered else (None, None)
    mesh = shared if shared is not None and (sharded or shared.size() > 1) else None
    of_rank = f"rank-{rank.rank:05d}-of-{rank.size:05d}"
    folder = path if numbers is not None or rank.size == 1 else path / of_rank
    return Place(path, folder, sharded, mesh, numbers, total, rank, chains is not None)


def mesh_in_memory(step: Any, tree: Any) -> Any:
    """The ranks that share the chains of a run that writes nothing, as one mesh; ``None`` for one rank, or several meshes."""
    mesh = getattr(getattr(getattr(step, "step", step), "ranks", None), "mesh", None)
    if mesh is None and world().size > 1 and is_replicated(model := getattr(step, "model", None)):
        mesh = _mesh_of_all(model)
    if mesh is None:
        meshes = list(dict.fromkeys(x.device_mesh for x in optree.tree_leaves(tree) if is_dtensor(x)))
        mesh = meshes[0] if len(meshes) == 1 and meshes[0].ndim == 1 else None
    return mesh if mesh is not None and mesh.size() > 1 else None


def _mesh_of_all(model: Any) -> Any:
    """All ranks as one mesh, on the device of a model."""
    from torch.distributed.device_mesh import init_device_mesh

    device = next(model.parameters()).device.type
    return init_device_mesh(device, (world().size,))


def _mesh_of(tree: Any) -> Any:
    """The mesh of the ranks that hold parts of these DTensors, with one axis."""
    meshes = list(dict.fromkeys(x.device_mesh for x in optree.tree_leaves(tree) if is_dtensor(x)))
    if len(meshes) > 1 or meshes[0].ndim > 1:
        raise ValueError(
            f"sample: with path=, DTensors of chains on ranks of their own lie on {len(meshes)} meshes, of "
            f"{max(m.ndim for m in meshes)} axes: lay all of them out on one mesh of one axis, such as mesh['shards'] beside "
            "mesh['chains']"
        )
    return meshes[0]
