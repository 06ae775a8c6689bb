"""A captured step beside the step that it was made of."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import replays

COMPILED = [pytest.mark.slow, pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")]
INDUCTOR = pytest.param("inductor", marks=COMPILED)
BACKENDS = ["eager", INDUCTOR]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def record(loss, tx, params, batch, **options):
    """A step, its recording, and the parameters and state from which both start."""
    step, start = bc.make_step(loss, tx), (params, tx.init(params))
    return step, bc.capture(step, *start, batch, **options), start


def assert_close(mine, other, rtol=2e-5, atol=2e-5):
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        if torch.is_tensor(x):
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
        else:
            assert x == y


def follow(step, fast, start, batches, steps=1, split=False, **tolerance):
    """Every call of ``fast`` makes ``steps`` steps of ``step``, and no later call touches what it reports.

    ``split``: a batch has the batches of the steps on its first axis. Returns parameters and state at the end, and the last
    report.
    """
    eager = mine = start
    reports, wanted = [], []
    for batch in batches:
        losses, draws = [], []
        for k in range(steps):
            *eager, info = step(*eager, optree.tree_map(lambda x, k=k: x[k], batch) if split else batch)
            losses.append(info.loss)
            draws.append(eager[0])
        *mine, got = fast(*mine, batch)
        assert_close(mine, eager, **tolerance)
        drawn = getattr(got, "draws", ())
        reports.append((got.loss, drawn))
        wanted.append((info.loss if steps == 1 else torch.stack(losses), () if drawn == () else bc.stack(draws)))
    assert_close(reports, wanted, **tolerance)
    if steps == 1 and drawn == ():
        assert_close(got, info, **tolerance)
    return mine, got
