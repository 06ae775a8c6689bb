"""A skipped step was never made: a run with bad batches in it is, bit for bit, the run without them."""

import copy

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal

NAN, INF = float("nan"), float("inf")


def loss(params, batch):
    return ((params["w"] - batch) ** 2).sum() + (params["b"] * batch.sum()) ** 2


def start():
    return {"w": torch.linspace(-1, 1, 20), "b": torch.tensor(0.3)}


CHAINS = {
    "sgd": lambda: bc.sgd(0.02, 0.9, weight_decay=0.1),
    "adam": lambda: bc.adam(0.05, temperature=0.1),
    "sghmc": lambda: bc.sghmc(0.02, temperature=0.1),
    "schedules": lambda: bc.sghmc(lambda count: 0.02 / (1 + count), temperature=torch.tensor(0.1)),
    "sgnht": lambda: bc.samplers.sgnht(0.02, temperature=0.1),
    "psgld": lambda: bc.samplers.psgld(0.02, temperature=0.1),
    "torchopt's adam": lambda: torchopt.adam(0.05),
    "vi": lambda: bc.vi.mean_field(bc.adam(0.05), temperature=0.1),
    "vi at two draws": lambda: bc.vi.mean_field(bc.adam(0.05), temperature=0.1, n_samples=2),
}
GOOD = [torch.linspace(0, k, 20) for k in (1.0, 2.0, 3.0)]


def bad(value):
    batch = GOOD[0].clone()
    batch[7] = value
    return batch


BATCHES = [GOOD[0], bad(NAN), GOOD[1], bad(INF), bad(-INF), GOOD[2], bad(NAN)]


def run(step, params, state, batches):
    for batch in batches:
        params, state, _ = step(params, state, batch)
    return params, state


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_with_bad_batches_is_the_run_over_the_others(name, inplace):
    compare(name, inplace, inplace)


def test_a_sampler_starts_from_the_state_of_an_optimizer_in_wrappers():
    optimizer, params = bc.skip_nonfinite(bc.with_master_weights(bc.sgd(0.1, 0.9))), start()
    _, state = optimizer.update(start(), optimizer.init(params), params=params)
    warm = bc.sghmc(0.1, temperature=0.1)
    for begun in (bc.skip_nonfinite(warm).init(params, like=state).inner, warm.init(params, like=state)):
        assert_bitwise_equal(begun[0].trace, state.inner.inner[0].trace)


def compare(name, inplace, like):
    """Against the run over the good batches, made in place or not (which may round differently)."""
    tx = CHAINS[name]()
    skipping = bc.skip_nonfinite(tx)
    torch.manual_seed(1)
    inner = tx.init(start())
    torch.manual_seed(1)
    state = skipping.init(start())
    want = run(bc.make_step(loss, tx, inplace=like), start(), copy.deepcopy(inner), GOOD)
    params, state = run(bc.make_step(loss, skipping, inplace=inplace), start(), state, BATCHES)
    assert_bitwise_equal((params, state.inner), want)
    assert state.skipped == 4 and state.skipped.dtype == torch.int64
    assert not all(
        torch.isfinite(x).all() for x in optree.tree_leaves(run(bc.make_step(loss, tx), start(), inner, BATCHES))
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_without_looking_the_result_is_the_same(name, inplace, monkeypatch):
    """The path of devices, where nothing is read: every update is computed and one of both results chosen."""
    monkeypatch.setattr(bc.tracing, "is_readable", lambda x: False)
    compare(name, inplace, False)


@pytest.mark.parametrize("name", ["sghmc", "adam", "sgd", "vi", "vi at two draws"])
def test_it_is_captured_without_a_branch(name):
    tx = bc.skip_nonfinite(CHAINS[name]())
    step, params = bc.make_step(loss, tx), start()
    state = tx.init(params)
    fast = bc.capture(step, params, state, GOOD[0], backend="eager")
    want = run(step, params, state, GOOD)
    want = want[0], want[1]._replace(skipped=torch.tensor(4))
    got = run(fast, params, state, BATCHES)
    torch.testing.assert_close(optree.tree_leaves(got), optree.tree_leaves(want), rtol=1e-5, atol=1e-6)


def test_stacked_chains_skip_each_for_itself():
    tx = bc.skip_nonfinite(bc.sghmc(0.02, temperature=0.1))
    chains = bc.parallel(bc.make_step(loss, tx), 3, batch_dim=0)
    params = bc.stack([start()] * 3)
    state = chains.init(tx, params)
    first = optree.tree_map(lambda x: x[0], state)
    batches = [torch.stack(rows) for rows in ((GOOD[0], bad(NAN), GOOD[0]), (GOOD[1], GOOD[1], bad(INF)))]
    params, state = run(chains, params, state, batches)
    assert state.skipped.tolist() == [0, 1, 1]
    assert all(torch.isfinite(x).all() for x in optree.tree_leaves(params))
    want = run(bc.make_step(loss, tx), start(), first, GOOD[:2])[0]
    torch.testing.assert_close(optree.tree_map(lambda x: x[0], params), want, rtol=1e-5, atol=1e-6)


def test_a_loss_that_is_not_finite_is_skipped_where_the_chain_takes_it():
    tx = bc.skip_nonfinite(bc.samplers.contour_sgld(0.1, 0.0, 5.0, temperature=1.0))
    params, g = torch.ones(2), torch.ones(2)
    state = tx.init(params)
    before = copy.deepcopy(state)
    updates, state = tx.update(g, state, params=params, loss=torch.tensor(NAN), inplace=False)
    assert torch.equal(updates, torch.zeros(2)) and state.skipped == 1
    assert_bitwise_equal(state.inner, before.inner)
    updates, state = tx.update(g, state, params=params, loss=torch.tensor(1.0), inplace=False)
    assert updates.abs().sum() > 0 and state.skipped == 1


@pytest.mark.parametrize("inplace", [False, True])
def test_a_gradient_that_is_missing_is_no_matter(inplace):
    tx = bc.skip_nonfinite(bc.sgd(0.1))
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    updates, state = tx.update({"a": torch.ones(2), "b": None}, tx.init(params), params=params, inplace=inplace)
    assert updates["b"] is None and torch.equal(updates["a"], torch.full((2,), -0.1)) and state.skipped == 0
    updates, state = tx.update({"a": torch.tensor([1.0, NAN]), "b": None}, state, params=params, inplace=inplace)
    assert updates["b"] is None and torch.equal(updates["a"], torch.zeros(2)) and state.skipped == 1


def test_nothing_not_finite_is_differentiated():
    """Through an update that was computed and not chosen: the derivative is zero, not NaN times zero."""
    tx = bc.skip_nonfinite(bc.adam(0.1))
    params = torch.ones(3)
    state = tx.init(params)

    def moved(g):
        return tx.update(g, state, params=params, inplace=False)[0].sum()

    assert torch.equal(torch.func.grad(moved)(torch.tensor([1.0, NAN, 2.0])), torch.zeros(3))


def test_what_it_cannot_wrap_is_refused():
    with pytest.raises(TypeError, match="skip_nonfinite: tx is 'sgd'"):
        bc.skip_nonfinite("sgd")
    with pytest.raises(ValueError, match="declared"):  # inside a chain that samples
        bc.chain(bc.skip_nonfinite(bc.add_momentum(0.9)), bc.sgd(0.1, temperature=1.0)).init(start())
