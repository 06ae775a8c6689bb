"""What every transform that carries a posterior shares beyond the laws: dtypes, pickles, temperature zero."""

import pickle

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from bayesopt_chain.testing._zero_temperature import example_params, run, smooth_gradient
from tests.registry import POSTERIORS
from tests.registry.dressings import drawing
from tests.registry.posteriors import COUPLED, FAMILIES

T = 0.01
JOINT = [row for row in POSTERIORS if set(COUPLED) <= set(row.skip)]
DRESSED = [row for row in POSTERIORS if row.namespace in ("vi", "ekf")]


@pytest.mark.parametrize("row", JOINT, ids=str)
def test_a_missing_gradient_moves_nothing_of_its_leaf_in_a_joint_state_either(row):
    tx, params = row.build(T), example_params()
    state = tx.init(params)
    updates, state = tx.update({**smooth_gradient(params), "scale": None}, state, params=params, inplace=False)
    assert updates["scale"] is None and torch.isfinite(updates["weight"]).all()
    again, _ = tx.update(smooth_gradient(params), state, params=params, inplace=False)
    assert all(torch.isfinite(u).all() for u in optree.tree_leaves(again))


@pytest.mark.parametrize("family", [bc.vi.mean_field, bc.vi.dense, bc.vi.low_rank])
@pytest.mark.parametrize("inplace", [False, True])
def test_at_temperature_zero_a_family_is_its_optimizer_to_the_last_bit(family, inplace):
    kwargs = {"rank": 2} if family is bc.vi.low_rank else {}
    for make in (lambda: torchopt.sgd(0.1, momentum=0.9, weight_decay=0.1), lambda: torchopt.adam(0.1)):
        params = example_params()
        _, want = run(make(), params, smooth_gradient, 6, inplace)
        before = torch.random.get_rng_state()
        _, got = run(family(make(), temperature=0.0, **kwargs), params, smooth_gradient, 6, inplace)
        assert torch.equal(before, torch.random.get_rng_state())
        assert_bitwise_equal(got, want, "updates")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_transformation_pickles_and_compares(name):
    if "schedule" in name or "torchopt" in name:
        pytest.skip("a lambda, or a closure of TorchOpt, does not pickle")
    tx = FAMILIES[name](T)
    twin = pickle.loads(pickle.dumps(tx))
    assert type(twin) is type(tx) and repr(twin) == repr(tx)
    params = example_params()
    state = tx.init(params)
    assert_bitwise_equal(twin.sample(state, params).params, tx.sample(state, params).params)


@pytest.mark.parametrize("optimizer", [bc.adam, torchopt.adam])
def test_adams_count_advances_in_place(optimizer):
    tx, params = bc.vi.mean_field(optimizer(0.01), temperature=T), example_params()
    law_abiding, state = drawing(tx), tx.init(params)
    first = state
    for _ in range(3):
        _, state = law_abiding.update(smooth_gradient(params), state, params=params, inplace=True)
    counts = [
        x for x in optree.tree_leaves((first[0].mean_optimizer, first[0].scale_optimizer)) if x.dtype == torch.int64
    ]
    assert counts and all(bool((c == 3).all()) for c in counts) and int(first[0].step) == 4


@pytest.mark.parametrize("row", DRESSED, ids=str)
def test_parameters_of_several_dtypes_keep_them(row):
    """A float32 matrix, a float64 vector and a float32 number in one tree: updates, state and posterior."""
    tx = row.build(T)
    params = {
        "bias": torch.ones(2, dtype=torch.float64),
        "scale": torch.ones((), dtype=torch.float32),
        "weight": torch.ones(2, 2, dtype=torch.float32),
    }
    state = tx.init(params)
    before = [x.dtype for x in optree.tree_leaves(state)]
    for _ in range(3):
        updates, state = tx.update(optree.tree_map(torch.ones_like, params), state, params=params, inplace=False)
        assert {k: u.dtype for k, u in updates.items()} == {k: p.dtype for k, p in params.items()}
    assert [x.dtype for x in optree.tree_leaves(state)] == before
    if row.namespace == "vi" and row.name in FAMILIES:
        posterior = FAMILIES[row.name](T).posterior(state, params)
        draws = posterior.sample((2,))
        assert {k: d.dtype for k, d in draws.items()} == {k: p.dtype for k, p in params.items()}
