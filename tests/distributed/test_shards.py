"""Chains on parameters that are spread over ranks: the trajectory of one process, in every layout, or a refusal by name."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from bayesopt_chain.random import stream as keyed_stream
from tests.distributed.layouts import layouts, leaves, local, parts, spread
from tests.distributed.ranks import run
from tests.registry import TRANSFORMS

STEPS = 4
WHOLE = (
    "scale_by_stein_kernel",
)


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


def trajectory(tx, params, inplace, gradient, seed):
    """The parameters after some steps; at each the gradient of a quadratic loss, and a batch's noise."""
    torch.manual_seed(seed)
    state, out = tx.init(params), []
    for step in range(STEPS):
        updates, state = tx.update(gradient(params, step), state, params=params, inplace=inplace)
        params = {name: params[name] + updates[name] for name in params}
        out.append(params)
    return out


def compared(rows):
    """By row and layout: the largest difference to one process, or what the refusal says."""
    found = {}
    known = layouts()
    batches = [leaves(10 + step) for step in range(STEPS)]
    for row in rows:
        tx = next(t for t in TRANSFORMS if str(t) == row).build(0.1)
        for inplace in (False, True):
            with philox():
                whole = trajectory(
                    tx, leaves(0), inplace, lambda p, s: {k: 0.5 * p[k] + 0.1 * batches[s][k] for k in p}, 3
                )
            for name, layout in known.items():
                cut = [spread(batch, layout) for batch in batches]
                try:
                    here = trajectory(
                        tx,
                        spread(leaves(0), layout),
                        inplace,
                        lambda p, s, cut=cut: {k: 0.5 * p[k] + 0.1 * cut[s][k] for k in p},
                        3 + dist.get_rank(),
                    )
                except (ValueError, TypeError, RuntimeError) as err:
                    found[row, name, inplace] = f"{type(err).__name__}: {err}"
                    continue
                off = 0.0
                for a, b in zip(whole, here):
                    mine, theirs = parts(a, layout), local(b)
                    for leaf in mine:
                        assert mine[leaf].shape == theirs[leaf].shape
                        if mine[leaf].numel():
                            off = max(off, (mine[leaf] - theirs[leaf]).abs().max().item())
                found[row, name, inplace] = off
    return found
