"""Where a rank's part of a run belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import optree

from bayesopt_chain._torch import is_dtensor
from bayesopt_chain.distributed.ranks import World, world
from bayesopt_chain.distributed.replicated import is_replicated
from bayesopt_chain.distributed.shards import are_spread


class Place(NamedTuple):
    """A rank's place in a run.

    Attributes:
        root: the directory of the run.
        folder: the writer's, in it.
        sharded: whether the parameters or the state hold DTensors, of which each rank writes what it alone holds.
        mesh: the ranks that share these chains, with one axis; ``None``: all ranks of sharded chains, else this one alone.
        chains: the writer's chains by their global numbers, if they have such.
        total: the number of chains of all writers, if they have global numbers.
        rank: which of how many ranks with unnumbered chains of their own it is.
    """

    root: Path
    folder: Path
    sharded: bool = False
    mesh: Any = None
    chains: range | None = None
    total: int | None = None
    rank: World = World(0, 1)

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

    def of(self, chains: range) -> Place:
        """The place of these chains alone."""
        return self._replace(folder=_folder_of(self.root, chains, self.total, self.rank), chains=chains)


def _folder_of(root: Path, chains: range | None, total: int | None, rank: World) -> Path:
    if chains is None:
        return root if rank.size == 1 else root / f"rank-{rank.rank:05d}-of-{rank.size:05d}"
    return root if len(chains) == total else root / f"chains-{chains.start:05d}-{chains.stop:05d}"


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
    return Place(path, _folder_of(path, numbers, total, rank), sharded, mesh, numbers, total, rank)


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
