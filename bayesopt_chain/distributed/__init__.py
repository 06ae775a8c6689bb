"""Programs of several processes (ranks), such as ``torchrun`` launches, with chains, data or parameters on different ranks.

* ``bc.parallel(step, n, mesh=mesh)`` runs ``n`` chains on the ranks of a mesh.
* ``bc.make_step(loss, tx, mesh=mesh)`` runs one chain whose batches are divided among the ranks.
* A chain takes parameters that are DTensors, of which each rank holds a part.

This namespace has functions that such programs need besides: seeds and checks for replicas, the places of plain tensors that
are parts of a parameter, and ``save`` and ``load`` for parameters and states on several ranks.
"""

from bayesopt_chain.distributed.checkpoint import load, save
from bayesopt_chain.distributed.parts import part, runs_of
from bayesopt_chain.distributed.ranks import World, broadcast, generator, require_replicas, world

__all__ = [
    "World",
    "broadcast",
    "generator",
    "load",
    "part",
    "require_replicas",
    "runs_of",
    "save",
    "world",
]
