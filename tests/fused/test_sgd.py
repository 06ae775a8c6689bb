"""The fused pass is the chain, to one rounding of each operation; what it does not know it leaves to the links."""

import copy
import pickle

import optree
import pytest
import torch
import torchopt
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.fused import sgd as fused
from bayesopt_chain.random.stream import SPAN
from bayesopt_chain.testing import strategies as own
from bayesopt_chain.testing._zero_temperature import smooth_gradient

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
SHAPES = [(), (3,), (2, 3), (16,), (4, 8), (33,), (5, 64)]


def smooth_loss(params, batch):
    leaves = [p for p in optree.tree_leaves(params, none_is_leaf=True) if p is not None]
    return sum((p**2 / 2 + p**4 / 10 + 0.3 * torch.cos(2 * p + 1)).sum() for p in leaves)


def both_ways(tx, params, steps=4):
    """Parameters and state after a few steps, fused in place and link by link."""
    assert fused.recognise(tx) is not None
    state = tx.init(params)
    mine = copy.deepcopy((params, state))
    other = params, state
    for _ in range(steps):
        *mine, _ = bc.make_step(smooth_loss, tx, inplace=True)(*mine, None)
        *other, _ = bc.make_step(smooth_loss, tx)(*other, None)
    return mine, other


def assert_alike(mine, other, tolerance):
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@given(
    lr=st.floats(1e-3, 0.1),
    momentum=st.sampled_from([0.0, 0.3, 0.9]),
    nesterov=st.booleans(),
    decay=own.weight_decays,
    temperature=st.sampled_from([0.0, 1e-4, 0.3]),
    order=st.sampled_from([1, 2]),
    place=st.integers(0, 1),
    stream=st.sampled_from([None, "philox"]),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_random_chains_move_as_their_links_do(
    lr, momentum, nesterov, decay, temperature, order, place, stream, shapes, dtype, seed
):
    links = [bc.links.add_decayed_weights(decay), bc.add_momentum(momentum, nesterov=nesterov and momentum > 0)]
    if temperature:
        links.insert(1 + place, bc.inject_langevin_noise(temperature, order=order, stream=stream))
    tx = bc.chain(*links, bc.scale_by_neg_lr(lr))
    params = [own.tensors(dtype, seed + i, s) for i, s in enumerate(shapes)]
    torch.manual_seed(seed)
    assert_alike(*both_ways(tx, params), TOLERANCE[dtype])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("stream", [None, "philox"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_leaves_larger_than_a_block_draw_the_same_stream(momentum, stream):
    g = torch.Generator().manual_seed(0)
    for sizes in ([2 * SPAN + 48, 64, 3 * SPAN + 7], [SPAN + 5, 40]):
        params = [torch.randn(n, generator=g) for n in sizes]
        tx = bc.sgd(0.05, momentum, temperature=0.1)
        tx = bc.with_stream(tx, "philox") if stream else tx
        assert_alike(*both_ways(tx, params, 3), TOLERANCE[torch.float32])


def test_bfloat16_is_left_to_the_links():
    """torch's fused CPU kernel drops the momentum there; the links do not."""
    params = [torch.randn(40).to(torch.bfloat16)]
    assert_alike(*both_ways(bc.sgd(0.05, 0.9), params, 3), 0.0)


def test_transposed_parameters_and_gradients_are_taken_or_declined():
    w = torch.randn(6, 4).t()
    tx = bc.sghmc(0.05, temperature=0.1)
    assert_alike(*both_ways(tx, [w, torch.randn(3)]), TOLERANCE[torch.float32])
    dense, x = torch.randn(4, 6), torch.randn(8, 4)

    def loss(params, batch):
        return (x @ params[0]).square().mean() + (params[0].t() ** 2).sum()

    state = tx.init([dense])
    mine, _, _ = bc.make_step(loss, tx, inplace=True)([dense.clone()], copy.deepcopy(state), None)
    want, _, _ = bc.make_step(loss, tx)([dense], state, None)
    assert_alike(mine, want, TOLERANCE[torch.float32])


def test_absent_parameters_keep_their_place_in_the_stream():
    params = {"a": torch.randn(5), "b": None, "c": torch.randn(32)}
    assert_alike(*both_ways(bc.sghmc(0.05, temperature=0.1), params), TOLERANCE[torch.float32])


def test_zero_temperature_is_torchs_fused_sgd():
    w = torch.randn(1000)
    mine, module = w.clone(), torch.nn.Parameter(w.clone())
    tx = bc.sgd(0.1, 0.9, weight_decay=0.01, nesterov=True)
    theirs = torch.optim.SGD([module], 0.1, 0.9, weight_decay=0.01, nesterov=True, fused=True)
    step, state = bc.make_step(lambda p, b: torch.cos(2 * p).sum(), tx, inplace=True), tx.init(mine)
    for _ in range(5):
        mine, state, _ = step(mine, state, None)
        theirs.zero_grad()
        torch.cos(2 * module).sum().backward()
        theirs.step()
    torch.testing.assert_close(mine, module.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "tx",
    [
        bc.adam(0.1),
        bc.sgd(0.1, 0.9, 0.5),
        bc.sgd(lambda c: 0.1 / (1 + c), 0.9),
        bc.sgd(torch.tensor(0.1), 0.9),
        bc.sgd(0.1, maximize=True, temperature=0.1),
        bc.sgd(0.1, temperature=torch.tensor(0.1)),
        bc.chain(bc.add_momentum(0.5), bc.sgd(0.1, 0.9)),
        bc.chain(bc.add_momentum(0.5), bc.links.add_decayed_weights(0.1), bc.scale_by_neg_lr(0.1)),
        bc.chain(bc.links.scale(2.0), bc.sgd(0.1)),
        bc.masked(bc.sgd(0.1), lambda tree: True),
        bc.chain(torchopt.clip.clip_grad_norm(1.0), bc.sgd(0.1)),
        torchopt.sgd(0.1),
    ],
    ids=lambda tx: str(tx)[:60],
)
def test_other_chains_are_left_to_their_links(tx):
    assert fused.recognise(tx) is None
    params = [torch.linspace(-1, 1, 20)]
    state = tx.init(params)
    mine, _, _ = bc.make_step(smooth_loss, tx, inplace=True)(copy.deepcopy(params), copy.deepcopy(state), None)
    want, _, _ = bc.make_step(smooth_loss, tx)(
        params, tx.init(params) if isinstance(tx, tuple) and not state else state, None
    )
    torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)


def test_stacked_steps_are_not_fused():
    tx = bc.sghmc(0.1, temperature=0.1)
    form = fused.recognise(tx)
    seen, state = [], tx.init([torch.zeros(3)])

    def look(p):
        seen.append(form.move([p], [p], state))
        return p

    torch.vmap(look)(torch.zeros(2, 3))
    assert seen == [None] and form.move([torch.zeros(3)], [torch.zeros(3)], state) is state


def test_a_fused_run_resumes_exactly():
    tx = bc.sghmc(0.05, temperature=0.1)
    params = [torch.randn(70), torch.randn(3)]
    step, state = bc.make_step(smooth_loss, tx, inplace=True), tx.init(params)
    for _ in range(3):
        params, state, _ = step(params, state, None)
    twin, twin_state = copy.deepcopy((params, state))
    for _ in range(3):
        params, state, _ = step(params, state, None)
        twin, twin_state, _ = step(twin, twin_state, None)
    assert all(torch.equal(x, y) for x, y in zip(params, twin))


def test_the_noise_has_the_matched_variance_and_correlation():
    """On a flat loss d_t - mu d_{t-1} is the noise, d the displacements over -lr: variance and lag-one covariance over
    2e5 elements, within 5 standard errors of a Gaussian's (false-alarm rate 1e-6)."""
    n, mu, lr, temperature = 200_000, 0.9, 0.1, 0.5
    tx = bc.sghmc(lr, mu, temperature=temperature)
    params = [torch.zeros(n, dtype=torch.float64)]
    step, state = bc.make_step(lambda p, b: (p[0] * 0.0).sum(), tx, inplace=True), tx.init(params)
    noise, before = [], torch.zeros(n, dtype=torch.float64)
    for _ in range(3):
        at = params[0].clone()
        params, state, _ = step(params, state, None)
        displacement = (at - params[0]) / lr
        noise.append(displacement - mu * before)
        before = displacement
    psi = 2 * temperature * (1 - mu) / lr
    assert abs(noise[2].var() / (psi / 2) - 1) < 5 * (2 / n) ** 0.5
    assert abs((noise[1] * noise[2]).mean() / (psi / 4) - 1) < 5 * (5 / n) ** 0.5


def test_gradients_are_what_testing_says():
    params = [torch.linspace(-1, 1, 7, dtype=torch.float64).requires_grad_()]
    (g,) = torch.autograd.grad(smooth_loss(params, None), params)
    torch.testing.assert_close(g, smooth_gradient([params[0].detach()])[0])


@pytest.mark.parametrize("size", [5, 2 * SPAN])
@pytest.mark.parametrize(
    "tx", [bc.sgd(0.1, 0.9), bc.sghmc(0.1, temperature=0.1), bc.sgd(0.1, temperature=0.1)], ids=str
)
def test_a_parameter_whose_data_is_replaced_goes_on_moving(tx, size):
    """As ``Module.to`` and the loading of checkpoints replace it: same object, other memory."""
    mine = [torch.linspace(-1, 1, size)]
    other = copy.deepcopy(mine)
    state = tx.init(mine)
    twin = copy.deepcopy(state)
    fused, plain = bc.make_step(smooth_loss, tx, inplace=True), bc.make_step(smooth_loss, tx)
    for _ in range(2):
        mine, state, _ = fused(mine, state, None)
        other, twin, _ = plain(other, twin, None)
        mine[0].data = mine[0].data + 1.0
        for t in optree.tree_leaves(state):
            t.data = t.data.clone()
        other = [other[0] + 1.0]
    assert_alike((mine, state), (other, twin), TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "tx", [bc.sgd(0.1, 0.9), bc.sghmc(0.1, temperature=0.1), bc.sgd(0.1, temperature=0.1)], ids=str
)
@pytest.mark.parametrize("other", [[3], [1000, 2], []])
def test_a_state_of_other_parameters_is_refused_before_anything_is_written(tx, other):
    """torch's fused kernel trusts the sizes it is given."""
    step, params = bc.make_step(smooth_loss, tx, inplace=True), [torch.ones(1000)]
    made = tx.init([torch.ones(n) for n in other]) if other else tx.init([torch.ones(3) for _ in range(3)])
    with pytest.raises((ValueError, RuntimeError)):
        step(params, made, None)
    assert bool((params[0] == 1).all())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_learning_rate_of_zero_moves_nothing(momentum):
    tx = bc.chain(bc.add_momentum(momentum), bc.inject_langevin_noise(0.1), bc.scale_by_neg_lr(0.0))
    params = [torch.randn(5)]
    mine, _ = both_ways(tx, params, 2)
    assert torch.equal(mine[0][0], params[0])


def test_little_momentum_is_fused_too():
    tx = bc.sghmc(0.05, 0.01, temperature=0.1)
    assert_alike(*both_ways(tx, [torch.randn(40), torch.randn(3)]), TOLERANCE[torch.float32])


def test_a_pickled_form_leaves_the_tensors_behind():
    tx, params = bc.sghmc(0.05, temperature=0.1), [torch.zeros(10_000)]
    form, state = fused.recognise(tx), tx.init(params)
    assert form.move(params, [torch.ones(10_000)], state) is state and form.last
    twin = pickle.loads(pickle.dumps(form))
    assert twin == form and not twin.last
