"""Many chains at once beside each of them alone, and a captured step beside the step that it was made of."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import replays


def assert_close(mine, other, rtol=1e-10, atol=1e-12):
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        if torch.is_tensor(x):
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol)
        else:
            assert x == y


def same(a, b):
    """Whether two trees hold the same numbers, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True))


def each_alone(chains, steps, params, state, batches, batch_of=lambda batch, i: batch, **tolerance):
    """Chain ``i`` moves as ``steps[i]`` does alone, with its own part of the batch, and reports the same loss.

    Returns parameters and state of all chains at the end, and their last report.
    """
    singles = optree.tree_map(torch.clone, [*zip(bc.unstack(params), bc.unstack(state))])
    for batch in batches:
        params, state, info = chains(params, state, batch)
        ends = [step(*one, batch_of(batch, i)) for i, (step, one) in enumerate(zip(steps, singles))]
        singles = [end[:2] for end in ends]
        assert_close(info.loss, torch.stack([end[2].loss for end in ends]), **tolerance)
    for i, one in enumerate(singles):
        assert_close(optree.tree_map(lambda x, i=i: x[i], (params, state)), one, **tolerance)
    return params, state, info


COMPILED = [pytest.mark.slow, pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")]
INDUCTOR = pytest.param("inductor", marks=COMPILED)
BACKENDS = ["eager", INDUCTOR]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def record(loss, tx, params, batch, **options):
    """A step, its recording, and the parameters and state from which both start."""
    step, start = bc.make_step(loss, tx), (params, tx.init(params))
    return step, bc.capture(step, *start, batch, **options), start


def follow(step, fast, start, batches, steps=1, split=False, **tolerance):
    """Every call of ``fast`` makes ``steps`` steps of ``step``, and no later call touches what it reports.

    ``split``: a batch has the batches of the steps on its first axis. Returns parameters and state at the end, and the last
    report.
    """
    tolerance = {"rtol": 2e-5, "atol": 2e-5, **tolerance}
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
