"""Many chains at once beside each of them alone."""

import optree
import torch

import bayesopt_chain as bc


def assert_close(mine, other, rtol=1e-10, atol=1e-12):
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


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
