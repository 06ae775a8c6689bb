"""States in which a posterior accumulates are values: what was kept stays, whatever is done with its successors."""

import copy

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import Dense, Diagonal, Kronecker, LowRank, Root, shape_only
from bayesopt_chain.testing import assert_bitwise_equal

COUNT = torch.tensor(4.0, dtype=torch.float64)


def start():
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(2, generator=generator)}


def rows(params):
    return optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)


INCREMENTS = {
    "dense": lambda p: Dense(torch.eye(8), shape_only(p), COUNT),
    "diagonal": lambda p: Diagonal(optree.tree_map(torch.ones_like, p), COUNT),
    "root": lambda p: Root(rows(p), COUNT),
    "low rank": lambda p: LowRank(optree.tree_map(torch.ones_like, p), rows(p), COUNT),
    "kronecker": lambda p: Kronecker(
        {"a": torch.eye(2), "b": torch.eye(2)},
        {"a": torch.eye(3), "b": torch.eye(1)},
        {"a": torch.tensor(0.0), "b": torch.tensor(0.0)},
        shape_only(p),
        COUNT,
    ),
}
BUILDS = {
    "dense filter": (lambda: bc.ekf.dense(transition_noise=0.1), "root"),
    "diagonal filter": (lambda: bc.ekf.diagonal(forgetting=0.9), "root"),
    "low-rank filter": (lambda: bc.ekf.low_rank(rank=2), "root"),
    "swag": (lambda: bc.swag(rank=3), None),
    "swag, every other": (lambda: bc.swag(rank=2, every=2), None),
    **{f"laplace, {name}": (bc.laplace, name) for name in INCREMENTS},
}


def advance(tx, state, params, increment):
    """One update with TorchOpt's defaults, which is in place."""
    extra = {} if increment is None else {"curvature": INCREMENTS[increment](params)}
    updates, state = tx.update(optree.tree_map(torch.ones_like, params), state, params=params, **extra)
    return optree.tree_map(lambda p, u: p + 0.1 * u, params, updates), state


def posterior_of(link, state, params):
    return link.posterior(state, params, **({"prior_precision": 1.0} if isinstance(link, type(bc.laplace())) else {}))


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("road", ["alone", "in a chain", "a step in place"])
def test_every_state_of_a_run_still_holds_at_its_end_what_it_held_when_it_was_made(name, road):
    """By TorchOpt's default ``update``, and by ``make_step(inplace=True)``, which overwrites the parameters; the posterior of
    the first is what it was too, and another than that of the last."""
    make, increment = BUILDS[name]
    link = make()
    tx = link if road == "alone" else bc.chain(bc.sgd(0.1, 0.9), link) if increment is None else bc.chain(link)
    curvature = None if increment is None else lambda p, batch: INCREMENTS[increment](p)
    loss = lambda p, b: sum(x.square().sum() for x in p.values())  # noqa: E731
    step = bc.make_step(loss, tx, curvature=curvature, inplace=True)
    params = start()
    state = tx.init(params)
    kept, first = [], None
    for i in range(6):
        if road == "a step in place":
            params, state, _ = step(params, state, None)
        else:
            params, state = advance(tx, state, params, increment)
        kept.append((state[-1], copy.deepcopy(state[-1])))
        if i == 2:
            at = optree.tree_map(torch.clone, params)
            first = state, at, posterior_of(link, state, at).marginal_variance
    for entry, before in kept:
        assert_bitwise_equal(entry, before, name)
    early, at, before = first
    assert_bitwise_equal(posterior_of(link, early, at).marginal_variance, before, name)
    after = posterior_of(link, state, params).marginal_variance
    assert any(not torch.equal(a, b) for a, b in zip(optree.tree_leaves(before), optree.tree_leaves(after)))


def test_an_increment_that_was_passed_stays_what_it_was():
    params, tx = start(), bc.laplace()
    increment = INCREMENTS["dense"](params)
    before = increment.matrix.clone()
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, curvature=increment)
    assert torch.equal(increment.matrix, before) and torch.equal(state[0].precision.matrix, 3 * before)
