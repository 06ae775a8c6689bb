"""Chains on parameters that are spread over ranks: the trajectory of one process, in every layout, or a refusal by name."""

from contextlib import contextmanager

import optree
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bayesopt_chain.random import stream as keyed_stream
from tests.distributed.layouts import layouts, leaves, local, parts, spread
from tests.distributed.ranks import run
from tests.registry import POSTERIORS, TRANSFORMS

STEPS = 4
REFUSED = {  # rows with a link that mixes elements
    "samplers.scale_by_stein_kernel",
    "samplers.sgnht",
    "samplers.badodab",
    "samplers.langevin_with_precision",
    "samplers.sgfs, dense",
    "samplers.svgd",
    "samplers.replica_exchange",
    *[str(row) for row in POSTERIORS],
}


@contextmanager
def philox():
    """One process draws as many do: by counters."""
    normals, drawn = keyed_stream.normals, keyed_stream.drawn

    def counted(key, step, like, draws, kind="gaussian", stream=None, *rest, **named):
        return normals(key, step, like, draws, kind, "philox", *rest, **named)

    def counted_in_chunks(key, step, sizes, numbers, dtype, stream=None, *rest):
        return drawn(key, step, sizes, numbers, dtype, "philox", *rest)

    keyed_stream.normals, keyed_stream.drawn = counted, counted_in_chunks
    try:
        yield
    finally:
        keyed_stream.normals, keyed_stream.drawn = normals, drawn


def trajectory(tx, params, inplace, batches, seed):
    """The parameters after some steps, each with the gradient of a quadratic loss and a batch's noise."""
    torch.manual_seed(seed)
    state = tx.init(params)
    for batch in batches:
        grads = {name: 0.5 * p + 0.1 * batch[name] for name, p in params.items()}
        updates, state = tx.update(grads, state, params=params, inplace=inplace)
        params = {name: p + updates[name] for name, p in params.items()}
    return params, state


def compared(inplace, chosen):
    """By row and layout: the largest difference to one process, or what the refusal says."""
    found, batches = {}, [leaves(10 + step) for step in range(STEPS)]
    known = {name: layout for name, layout in layouts().items() if chosen is None or name in chosen}
    here = {name: [spread(batch, layout) for batch in batches] for name, layout in known.items()}
    for row in TRANSFORMS:
        tx = row.build(0.1)
        if str(row) not in REFUSED:
            with philox():
                whole, _ = trajectory(tx, leaves(0), inplace, batches, 3)
        for name, layout in known.items():
            try:  # the ranks are seeded as it happens: the first one's key is all ranks'
                got, state = trajectory(tx, spread(leaves(0), layout), inplace, here[name], 3 + dist.get_rank())
            except ValueError as err:
                found[str(row), name] = str(err)
                continue
            off = [
                (a - b).abs().max().item()
                for a, b in zip(*map(values, (parts(whole, layout), local(got))))
                if a.numel()
            ]
            found[str(row), name] = max(off)
            sizes = {tuple(x.shape) for x in optree.tree_leaves(state) if x.ndim > 1 and not isinstance(x, DTensor)}
            assert not sizes & {(10, 6), (3, 7)}, "memory of a leaf is spread as the leaf is"
    return found


def values(tree):
    return [tree[name] for name in sorted(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("inplace, chosen", [(True, None), (False, ["Shard(0), uneven and empty", "FSDP x TP"])])
def test_every_transform_makes_the_steps_of_one_process_in_every_layout_or_refuses_by_name(inplace, chosen, tmp_path):
    ranks = run(compared, 4, tmp_path, inplace, chosen)
    for found in ranks:
        for (row, layout), off in found.items():
            if row in REFUSED:
                assert isinstance(off, str) and "is a DTensor, of which each rank has a part" in off, (row, layout, off)
            else:
                assert off <= 1e-12, (row, layout, off)
    assert len(ranks[0]) == len(chosen or range(5)) * len(TRANSFORMS)
