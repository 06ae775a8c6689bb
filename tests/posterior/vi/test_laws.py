"""Every transform that carries a posterior against every law of the core."""

import pickle

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.testing import LAWS, assert_bitwise_equal
from bayesopt_chain.testing._laws import a_missing_gradient_leaves_its_leaf_alone, in_place_keeps_the_state_tensors
from bayesopt_chain.testing._zero_temperature import example_params, run, smooth_gradient

from .adapters import drawing, filtering, per_sample, two_rows, unit_diagonal, unit_rows

T = 0.01
VARIATIONAL = {
    "mean field": lambda: bc.vi.mean_field(bc.adam(0.01), temperature=T, init_scale=0.1),
    "mean field, torchopt": lambda: bc.vi.mean_field(torchopt.adam(0.01), temperature=T, init_scale=0.1),
    "mean field, not landing": lambda: bc.vi.mean_field(
        bc.sgd(0.01, 0.9), temperature=T, init_scale=0.1, stick_the_landing=False
    ),
    "mean field, tensor": lambda: bc.vi.mean_field(bc.sgd(0.1), temperature=torch.tensor(T)),
    "mean field, schedule": lambda: bc.vi.mean_field(bc.sgd(0.1), temperature=lambda count: T / (1 + count)),
    "dense": lambda: bc.vi.dense(bc.sgd(0.01), temperature=T, init_scale=0.1),
    "dense, not landing": lambda: bc.vi.dense(bc.adam(0.01), temperature=T, init_scale=0.1, stick_the_landing=False),
    "low rank": lambda: bc.vi.low_rank(bc.sgd(0.01), temperature=T, init_scale=0.1, rank=2),
    "low rank, not landing": lambda: bc.vi.low_rank(
        bc.sgd(0.01), temperature=T, init_scale=0.1, rank=2, stick_the_landing=False
    ),
    "ivon": lambda: bc.vi.ivon(0.1, temperature=T, betas=(0.9, 0.99), weight_decay=0.1),
}
FURTHER = {
    "von": lambda: drawing(bc.vi.von(0.1, temperature=T, weight_decay=0.1), curvature=unit_diagonal),
    "vogn": lambda: drawing(bc.vi.vogn(0.1, temperature=T, weight_decay=0.1), per_sample_gradients=per_sample),
}
FILTERS = {
    "dense filter": lambda: filtering(bc.ekf.dense(0.5), two_rows),
    "dense filter that forgets": lambda: filtering(bc.ekf.dense(transition_noise=0.1, forgetting=0.9), two_rows),
    "diagonal filter": lambda: filtering(bc.ekf.diagonal(0.5, transition_noise=0.1), unit_rows),
    "diagonal filter of mixed rows": lambda: filtering(bc.ekf.diagonal(0.5, transition_noise=0.1), two_rows),
    "low-rank filter": lambda: filtering(bc.ekf.low_rank(0.5, rank=3, transition_noise=0.1), two_rows),
}
COLLECTORS = {
    "swag": lambda: bc.chain(bc.sgd(0.1), bc.swag(rank=3)),
    "swag with a schedule": lambda: bc.chain(bc.adam(0.1), bc.swag(rank=2, start=1, every=2)),
    "running mean": lambda: bc.chain(bc.sgd(0.1, temperature=T), bc.swag(rank=0)),
}
BUILDS = (
    {name: (lambda make=make: drawing(make())) for name, make in VARIATIONAL.items()} | FURTHER | FILTERS | COLLECTORS
)


# A missing gradient leaves its leaf alone where leaves are independent. A filter's joint information ties every leaf's
# move and uncertainty to every other's, rows that mix leaves tie their moves, and a running mean is one of iterates, whether
# they moved or not.
JOINT = (
    "dense filter",
    "dense filter that forgets",
    "diagonal filter of mixed rows",
    "low-rank filter",
    *COLLECTORS,
)
VALUES = (*FILTERS, *COLLECTORS)  # their states are values, see tests/posterior/test_values.py


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", BUILDS)
def test_law(name, law):
    if name in JOINT and law is a_missing_gradient_leaves_its_leaf_alone:
        pytest.skip("its leaves are joint")
    if name in VALUES and law is in_place_keeps_the_state_tensors:
        pytest.skip("its state is a value")
    law(BUILDS[name])


@pytest.mark.parametrize("name", JOINT)
def test_a_missing_gradient_moves_nothing_of_its_leaf_in_a_joint_state_either(name):
    tx, params = BUILDS[name](), example_params()
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


@pytest.mark.parametrize("name", VARIATIONAL)
def test_a_transformation_pickles_and_compares(name):
    if "schedule" in name or "torchopt" in name:
        pytest.skip("a lambda, or a closure of TorchOpt, does not pickle")
    tx = VARIATIONAL[name]()
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
    assert counts and all(bool((c == 3).all()) for c in counts) and int(first[0].count) == 4


@pytest.mark.parametrize("name", [*VARIATIONAL, *FURTHER, *FILTERS])
def test_parameters_of_several_dtypes_keep_them(name):
    """A float32 matrix, a float64 vector and a float32 number in one tree: updates, state and posterior."""
    tx = BUILDS[name]()
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
    if name in VARIATIONAL:
        posterior = VARIATIONAL[name]().posterior(state, params)
        draws = posterior.sample((2,))
        assert {k: d.dtype for k, d in draws.items()} == {k: p.dtype for k, p in params.items()}
