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
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "in a chain"])
def test_update_leaves_the_state_it_was_given_alone(name, chained):
    """Every state of a run by TorchOpt's default ``update`` still holds, at its end, what it held when it was made."""
    make, increment = BUILDS[name]
    link = make()
    tx = bc.chain(bc.sgd(0.1, 0.9), link) if chained and increment is None else bc.chain(link) if chained else link
    params = start()
    state = tx.init(params)
    kept = []
    for _ in range(6):
        params, state = advance(tx, state, params, increment)
        entry = state[-1]
        kept.append((entry, copy.deepcopy(entry)))
    for entry, before in kept:
        assert_bitwise_equal(entry, before, name)


@pytest.mark.parametrize("name", BUILDS)
def test_the_posterior_of_a_kept_state_does_not_change(name):
    make, increment = BUILDS[name]
    link, params = make(), start()
    state = link.init(params)
    for _ in range(3):
        params, state = advance(link, state, params, increment)
    before = posterior_of(link, state, params).marginal_variance
    at = params
    later = state
    for _ in range(3):
        params, later = advance(link, later, params, increment)
    assert_bitwise_equal(posterior_of(link, state, at).marginal_variance, before, name)
    after = posterior_of(link, later, params).marginal_variance
    assert any(not torch.equal(a, b) for a, b in zip(optree.tree_leaves(before), optree.tree_leaves(after)))


@pytest.mark.parametrize("name", BUILDS)
def test_an_in_place_step_makes_new_states_too(name):
    """``make_step(inplace=True)`` overwrites the parameters, and leaves a kept state of these transformations as it was."""
    make, increment = BUILDS[name]
    link = make()
    tx = bc.chain(bc.sgd(0.1), link) if increment is None else link
    curvature = None if increment is None else lambda p, batch: INCREMENTS[increment](p)
    step = bc.make_step(lambda p, b: sum(x.square().sum() for x in p.values()), tx, curvature=curvature, inplace=True)
    params = start()
    state, kept = tx.init(params), []
    for _ in range(5):
        params, state, _ = step(params, state, None)
        kept.append((state[-1], copy.deepcopy(state[-1])))
    for entry, before in kept:
        assert_bitwise_equal(entry, before, name)


def test_an_increment_that_was_passed_stays_what_it_was():
    params, tx = start(), bc.laplace()
    increment = INCREMENTS["dense"](params)
    before = increment.matrix.clone()
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, curvature=increment)
    assert torch.equal(increment.matrix, before) and torch.equal(state[0].precision.matrix, 3 * before)
