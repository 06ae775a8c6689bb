"""Several processes, launched by ``torchrun``: chains, data and parameters spread over ranks.

``bc.parallel(step, n, mesh=mesh)`` runs ``n`` chains on the ranks of a mesh, ``bc.make_step(loss, tx, mesh=mesh)`` one chain
whose batches are spread over them, and chains take parameters that are DTensors. Here is what they need besides, and ``save``
and ``load`` for parameters and states that are spread over ranks.
"""

from bayesopt_chain.distributed.checkpoint import load, save
from bayesopt_chain.distributed.layout import runs_of
from bayesopt_chain.distributed.parts import flat_shards, part
from bayesopt_chain.distributed.ranks import World, broadcast, generator, require_replicas, world

__all__ = [
    "World",
    "broadcast",
    "flat_shards",
    "generator",
    "load",
    "part",
    "require_replicas",
    "runs_of",
    "save",
    "world",
]
