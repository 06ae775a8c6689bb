"""A module's buffers and draws travel with the state: each chain its own, alone or among many, eager, captured, resumed."""

import copy

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.loop.model_draws import model_draws
from bayesopt_chain.loop.module_state import ModuleState
from tests.loop.beside import assert_close, each_alone, same

BATCH = torch.randn(10, 1, 4, 4, dtype=torch.float64), torch.randint(3, (10,))
COLD, HOT = bc.sgd(0.1, 0.9), bc.sghmc(0.05, temperature=0.01)


def network(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(12, 8)]
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def made(tx, **options):
    """A step over one network, and its parameters."""
    forward, params, buffers = bc.make_functional(network())

    def loss(params, batch, buffers):
        out, buffers = forward.with_buffers(params, batch, buffers)
        return F.cross_entropy(out, batch[1]), buffers, out.argmax(-1)

    return bc.make_step(loss, tx, buffers=buffers, **options), params, forward


def stacked(n):
    return bc.stack([bc.make_functional(network(i)).params for i in range(n)])


def run(step, params, state, steps=3):
    for _ in range(steps):
        params, state, info = step(params, state, BATCH)
    return params, state, info


def test_a_step_moves_parameters_and_statistics_as_torch_does():
    step, params, _ = made(COLD)
    state = step.init(params)
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, 0.9)
    for k in range(3):
        before = torch.get_rng_state()
        with model_draws((state.stream.key, torch.tensor(k))):
            optimizer.zero_grad()
            F.cross_entropy(module(BATCH[0]), BATCH[1]).backward()
        optimizer.step()
        params, state, _ = step(params, state, BATCH)
        assert torch.equal(torch.get_rng_state(), before)
    assert_close(params, dict(module.named_parameters()))
    assert_close(state.buffers, dict(module.named_buffers()))
    assert state.buffers["1.num_batches_tracked"] == 3 and state.stream.step == 3


@pytest.mark.parametrize("how", [{}, {"chunk": 2}, {"loop": True}])
@pytest.mark.parametrize("tx", [COLD, HOT], ids=["cold", "hot"])
def test_a_chain_among_many_is_its_single_self(tx, how):
    step, _, _ = made(tx)
    for n in (2, 3):  # and does not depend on how many they are
        params = stacked(n)
        chains = bc.parallel(step, n, **how)
        _, state, info = each_alone(chains, [step] * n, params, chains.init(tx, params, seed=7), [BATCH] * 3)
        means = state.buffers["1.running_mean"]
        assert not torch.allclose(means[0], means[1]) and info.aux.shape == (n, 10)


def test_a_captured_step_drops_and_normalises_as_the_eager_one():
    for n in (None, 2):
        step, params, _ = made(HOT)
        run_one = step if n is None else bc.parallel(step, n)
        params = params if n is None else stacked(n)
        state = step.init(params) if n is None else run_one.init(HOT, params)
        fast = bc.capture(run_one, params, state, BATCH, backend="eager")
        assert_close(run(fast, params, state)[:2], run(run_one, params, state)[:2], rtol=1e-9)


def test_in_place_and_pure_steps_agree_and_a_pure_one_shares_nothing():
    pure, params, _ = made(HOT)
    state = pure.init(params)
    inplace, _, _ = made(HOT, inplace=True)
    kept = copy.deepcopy((params, state))
    want = run(pure, params, state)[:2]
    assert same(kept, (params, state))
    shared = {x.data_ptr() for x in optree.tree_leaves((params, state)) if x.numel()}
    assert not shared & {x.data_ptr() for x in optree.tree_leaves(want) if x.numel()}
    got = run(inplace, params, state)[:2]
    assert all(x is y for x, y in zip(optree.tree_leaves(got[1].buffers), optree.tree_leaves(state.buffers)))
    assert_close(got, want)


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path):
    def stop(it):
        if it.step == 5:
            raise KeyError

    for loop in (None, False, True):
        step, params, _ = made(HOT)
        if loop is None:
            state = step.init(params)
        else:
            step, params = bc.parallel(step, 2, loop=loop), stacked(2)
            state = step.init(HOT, params)
        chains, path = None if loop is None else 2, tmp_path / str(loop)
        options = {"steps": 8, "burn_in": 2, "thinning": 2, "checkpoint_seconds": 0.0, "chains": chains}
        want = bc.sample(step, params, state, BATCH, **options)
        with pytest.raises(KeyError):
            bc.sample(step, params, state, BATCH, path=path, callbacks=[stop], **options)
        torch.manual_seed(99)
        got = bc.sample(step, params, state, BATCH, path=path, **options)
        assert same((got.params, got.buffers, got.last), (want.params, want.buffers, want.last))
        again = bc.Draws.open(path, like=params)
        assert same(again.buffers, want.buffers) and len(want.buffers) == 6


def test_fork_renews_the_key_of_what_the_model_draws_too():
    step, params, _ = made(HOT)
    state = step.init(params)
    with pytest.raises(ValueError, match="one key"):
        bc.stack([state, state])
    a, b = bc.fork(state, 2)
    keys = {int(s.stream.key) for s in (state, a, b)} | {int(s.inner[1].key) for s in (state, a, b)}
    assert len(keys) == 6 and same(a.buffers, b.buffers)
    assert not same(step(params, a, BATCH)[2].loss, step(params, b, BATCH)[2].loss)


def test_a_skipped_step_leaves_buffers_and_draws_as_they_were():
    tx = bc.skip_nonfinite(HOT)
    for inplace in (False, True):
        step, params, _ = made(tx, inplace=inplace)
        state = step.init(params)
        kept = copy.deepcopy((params, state))
        bad = torch.full_like(BATCH[0], torch.nan), BATCH[1]
        params, state, _ = step(params, state, bad)
        assert state.inner.skipped == 1
        assert same((params, state.buffers, state.stream), (kept[0], kept[1].buffers, kept[1].stream))
        params, state, info = step(params, state, BATCH)
        want, _, first = made(tx)[0](*kept, BATCH)
        assert_close((params, info.loss), (want, first.loss))
    chains, params = bc.parallel(made(tx)[0], 2), stacked(2)
    state = chains.init(tx, params)
    _, after, _ = chains(params, state, bad)
    assert same((after.buffers, after.stream), (state.buffers, state.stream))


def test_a_variational_step_carries_the_statistics_through_its_samples():
    tx = bc.vi.ivon(0.1, temperature=0.01, n_samples=2)
    step, params, _ = made(tx)
    state = step.init(params)
    params, state, info = step(params, state, BATCH)
    assert state.buffers["1.num_batches_tracked"] == 2 and info.aux.shape == (2, 10)
    assert tx.posterior(state.inner, params).marginal_variance["8.bias"].shape == (3,)


def test_a_trained_state_warms_a_sampler_and_brings_its_buffers():
    cold, params, _ = made(COLD)
    params, trained, _ = run(cold, params, cold.init(params))
    hot, _, _ = made(HOT)
    with pytest.raises(ValueError, match=r"step\.init\(params, like=state\)"):
        hot(params, trained.inner, BATCH)
    state = hot.init(params, like=trained)
    assert same(state.buffers, trained.buffers) and same(state.inner[0].trace, trained.inner[0].trace)
    run(hot, params, state)
    assert made(HOT)[0].init(params, like=trained.inner).buffers["1.num_batches_tracked"] == 0


def test_a_loss_that_returns_no_buffers_is_refused_by_name():
    _, params, buffers = bc.make_functional(network())
    for out in (torch.zeros(()), (torch.zeros(()), {}), (torch.zeros(()), buffers, 1, 2)):
        step = bc.make_step(lambda p, b, c, out=out: out, COLD, buffers=buffers)
        with pytest.raises(ValueError, match=r"with buffers= it must return \(scalar, buffers\)"):
            step(params, step.init(params), BATCH)


def test_a_module_without_buffers_gets_its_key_all_the_same():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    forward, params, buffers = bc.make_functional(model)

    def loss(params, x, buffers):
        out, buffers = forward.with_buffers(params, x, buffers)
        return out.square().mean(), buffers

    x, tx = torch.randn(8, 3), bc.sgd(0.1)
    step = bc.make_step(loss, tx, buffers=buffers)
    state = step.init(params)
    assert isinstance(state, ModuleState) and state.buffers == {}
    assert torch.equal(step(params, state, x)[2].loss, step(params, state, x)[2].loss)
    chains, many = bc.parallel(step, 3), bc.stack([params] * 3)
    assert len(set(chains(many, chains.init(tx, many), x)[2].loss.tolist())) == 3
    unkeyed = bc.parallel(bc.make_step(lambda p, x: forward(p, x).square().mean(), tx), 3)
    with pytest.raises(RuntimeError, match=r"no chain's key governs.*buffers=buffers"):
        unkeyed(many, unkeyed.init(tx, many), x)


def test_a_capture_that_could_not_follow_the_key_is_refused():
    forward, params, buffers = bc.make_functional(nn.LSTM(3, 4, 2, dropout=0.5))

    def loss(params, x, buffers):
        (out, _), buffers = forward.with_buffers(params, x, buffers)
        return out.square().mean(), buffers

    step = bc.make_step(loss, bc.sgd(0.1), buffers=buffers)
    with pytest.raises(RuntimeError, match=r"lstm with dropout 0\.5"):
        bc.capture(step, params, step.init(params), torch.randn(5, 2, 3), backend="eager")
    noisy = bc.make_step(lambda w, x: (w * torch.empty_like(x).normal_()).square().mean(), HOT)
    w = torch.ones(3)
    with pytest.raises(bc.CaptureError, match=r"aten\.normal_"):
        bc.capture(noisy, w, HOT.init(w), torch.ones(3), backend="eager")


def test_particles_cannot_share_buffers():
    buffers = bc.make_functional(network()).buffers
    with pytest.raises(ValueError, match="gradients of particles, for which a module's buffers"):
        bc.make_step(lambda p, b, c: None, bc.samplers.svgd(0.1, temperature=0.1), buffers=buffers)


def test_dropout_follows_the_key_of_a_chain_within_other_chains():
    noise = bc.sgld(0.1, temperature=0.1)
    for tx in (
        bc.chain(bc.skip_nonfinite(noise)),
        bc.partition({"a": bc.skip_nonfinite(noise), "b": bc.sgd(0.0)}, {"w": "a"}),
    ):
        step, params = (
            bc.make_step(lambda p, x: nn.functional.dropout(p["w"] * x).square().sum(), tx),
            {"w": torch.ones(20)},
        )
        state, losses = tx.init(params), set()
        for k in range(3):
            torch.manual_seed(k)
            losses.add(step(params, state, torch.ones(20))[2].loss.item())
        assert len(losses) == 1
