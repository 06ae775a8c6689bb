"""A tree of parameters, spread over four ranks in every way that torch knows."""

import optree
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.distributed.ranks import mesh_of

STRIDED = (_StridedShard(0, split_factor=2), Shard(0))


def layouts():
    """By name: the mesh, and the placements of every leaf; ``None`` for a plain tensor."""
    line, square = mesh_of(4), mesh_of(2, 2)
    alike = {"scale": (Replicate(),), "bias": (Replicate(),)}
    return {
        "Shard(0), uneven and empty": (
            line,
            {"weight": (Shard(0),), "bias": (Shard(0),), "scale": (Replicate(),), "head": (Shard(0),)},
        ),
        "Shard(1)": (line, {"weight": (Shard(1),), "head": (Shard(1),), **alike}),
        "HSDP": (
            square,
            {
                "weight": (Replicate(), Shard(0)),
                "bias": (Replicate(), Shard(0)),
                "scale": (Replicate(), Replicate()),
                "head": (Replicate(), Shard(0)),
            },
        ),
        "TP": (line, {"weight": (Shard(0),), "bias": (Shard(0),), "scale": None, "head": (Shard(1),)}),
        "FSDP x TP": (
            square,
            {
                "weight": STRIDED,
                "bias": STRIDED,
                "scale": (Replicate(), Replicate()),
                "head": (Shard(0), Shard(1)),
            },
        ),
    }


def leaves(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = {"weight": (10, 6), "bias": (5,), "scale": (), "head": (3, 7)}
    return {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}


def cut(x, mesh, coordinate, placements):
    """What a rank at a coordinate of a mesh of this shape holds of a tensor, by torch's own cutting."""
    for size, place, placement in zip(mesh, coordinate, placements or ()):
        if not isinstance(placement, Replicate):
            x = placement._split_tensor(x, size, with_padding=False)[0][place]
    return x.contiguous().clone()


def part(x, mesh, placements):
    """What this rank holds of a tensor."""
    return cut(x, mesh.shape, mesh.get_coordinate(), placements)


def spread(tree, layout):
    """The tree as DTensors."""
    mesh, placements = layout
    return {
        name: part(x, mesh, None)
        if placements[name] is None
        else DTensor.from_local(
            part(x, mesh, placements[name]), mesh, placements[name], run_check=False, shape=x.shape, stride=x.stride()
        )
        for name, x in tree.items()
    }


def parts(tree, layout):
    """What a rank holds of each leaf of a whole tree."""
    mesh, placements = layout
    return {name: part(x, mesh, placements[name]) for name, x in tree.items()}


def local(tree):
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tree.items()}


def is_spread_as_its_leaf(state):
    """Whether no plain tensor of a state has the shape of a whole matrix."""
    plain = {tuple(x.shape) for x in optree.tree_leaves(state) if x.ndim > 1 and not isinstance(x, DTensor)}
    return not plain & {(10, 6), (3, 7)}
