"""What chains of linear links sample, solved exactly: T / curvature, beside every neighbour and in groups, or refused."""

import pytest
import torch
import torchopt
from hypothesis import assume, given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.matching import law
from bayesopt_chain.matching.filters import pick
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.testing import (
    Unstable,
    assert_bitwise_equal,
    assert_composes,
    stationary_covariance,
    variance_along,
)
from tests.walk import end_of

DIM = 3


def spd(seed, largest=1.0):
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(DIM, DIM, generator=g, dtype=torch.float64))
    return q @ torch.diag(torch.linspace(0.05, largest, DIM, dtype=torch.float64)) @ q.T


def relative(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


momenta = st.one_of(
    st.builds(lambda mu, d: ("momentum", mu, d, False), st.floats(0.05, 0.95), st.sampled_from([0.0, 0.3, 0.7])),
    st.builds(lambda mu: ("momentum", mu, mu, False), st.floats(0.05, 0.95)),  # exponential moving average
    st.builds(lambda mu: ("momentum", mu, 0.0, True), st.floats(0.05, 0.95)),
)
diagonals = st.builds(lambda seed: ("diagonal", seed), st.integers(0, 100))
scalars = st.builds(lambda p: ("scalar", p), st.floats(0.2, 2.0))
decays = st.builds(lambda wd: ("decay", wd), st.floats(0.01, 0.5))


def build(parts, lr, temperature, noise_at, lr_at, order=2):
    """The chain, and the prior it should sample besides the loss: ``sum_j wd_j / H_j(1)``."""
    links, prior, gain = [], torch.zeros(DIM, dtype=torch.float64), torch.ones(DIM, dtype=torch.float64)
    for kind, *args in parts:
        if kind == "momentum":
            mu, dampening, nesterov = args
            links.append(bc.add_momentum(mu, dampening, nesterov))
            gain = gain * ((1 + mu / (1 - mu)) if nesterov else (1 - dampening) / (1 - mu))
        elif kind == "diagonal":
            p = torch.rand(DIM, generator=torch.Generator().manual_seed(args[0]), dtype=torch.float64) * 1.5 + 0.2
            links.append(bc.scale_by_preconditioner(p))
            gain = gain * p
        elif kind == "scalar":
            links.append(bc.scale_by_preconditioner(args[0]))
            gain = gain * args[0]
        elif kind == "decay":
            links.append(bc.links.add_decayed_weights(args[0]))
            prior = prior + args[0] / gain
            lr_at = max(lr_at, len(links))  # behind the learning rate a decay would be a growth
    links.insert(min(lr_at, len(links)), bc.scale_by_neg_lr(lr))
    links.insert(min(noise_at, len(links)), bc.inject_langevin_noise(temperature, order=order))
    return bc.chain(*links), torch.diag(prior)


@pytest.mark.slow
@given(
    parts=st.lists(st.one_of(momenta, diagonals, scalars, decays), max_size=5).filter(
        lambda parts: sum(p[0] == "momentum" for p in parts) <= 1
    ),
    lr=st.floats(0.01, 0.5),
    temperature=st.floats(1e-3, 5.0),
    noise_at=st.integers(0, 6),
    lr_at=st.integers(0, 6),
    seed=st.integers(0, 1000),
)
def test_any_chain_with_one_momentum_samples_exactly_in_any_order(parts, lr, temperature, noise_at, lr_at, seed):
    tx, prior = build(parts, lr, temperature, noise_at, lr_at)
    curvature = spd(seed)
    try:
        got = stationary_covariance(tx, curvature)
    except Unstable:
        assume(False)
    assert relative(got, temperature * torch.linalg.inv(curvature + prior)) < 1e-10


@pytest.mark.slow
@given(
    parts=st.lists(st.one_of(momenta, scalars), min_size=2, max_size=3),
    lr=st.floats(0.01, 0.2),
    noise_at=st.integers(0, 4),
    lr_at=st.integers(0, 4),
)
def test_chains_of_several_momenta_sample_exactly_or_are_refused(parts, lr, noise_at, lr_at):
    tx, _ = build(parts, lr, 0.7, noise_at, lr_at)
    curvature = spd(3, largest=0.3)
    try:
        got = stationary_covariance(tx, curvature)
    except Unstable:
        assume(False)
    except ValueError as err:
        assert "no noise can be matched" in str(err) and sum(p[0] == "momentum" for p in parts) > 1
        return
    assert relative(got, 0.7 * torch.linalg.inv(curvature)) < 1e-9


SCHEDULED = {
    "sgd": lambda lr, t: bc.sgd(lr, temperature=t),
    "momentum": lambda lr, t: bc.sgd(lr, 0.9, temperature=t),
    "dampening": lambda lr, t: bc.sgd(lr, 0.9, 0.5, temperature=t),
    "nesterov": lambda lr, t: bc.sgd(lr, 0.9, nesterov=True, temperature=t),
    "lr first": lambda lr, t: bc.chain(bc.scale_by_neg_lr(lr), bc.add_momentum(0.8), bc.inject_langevin_noise(t)),
    "lr first, nesterov": lambda lr, t: bc.chain(
        bc.inject_langevin_noise(t), bc.scale_by_neg_lr(lr), bc.add_momentum(0.8, nesterov=True)
    ),
    "decoupled decay": lambda lr, t: bc.chain(
        bc.add_momentum(0.9), bc.links.add_decayed_weights(0.3), bc.inject_langevin_noise(t), bc.scale_by_neg_lr(lr)
    ),
    "nesterov and decay": lambda lr, t: bc.chain(
        bc.add_momentum(0.9, nesterov=True),
        bc.links.add_decayed_weights(0.3),
        bc.inject_langevin_noise(t),
        bc.scale_by_neg_lr(lr),
    ),
    "preconditioned": lambda lr, t: bc.chain(
        bc.scale_by_preconditioner(torch.tensor([0.5, 1.0, 2.0])),
        bc.add_momentum(0.9),
        bc.inject_langevin_noise(t),
        bc.scale_by_neg_lr(lr),
    ),
    "mixed decay": lambda lr, t: bc.chain(
        bc.add_momentum(0.9),
        bc.links.add_decayed_weights(0.3),
        bc.scale_by_preconditioner(torch.tensor([0.5, 1.0, 2.0])),
        bc.inject_langevin_noise(t),
        bc.scale_by_neg_lr(lr),
    ),
    "declared, a pole that cancels": lambda lr, t: bc.chain(
        bc.with_response(torchopt.base.identity(), bc.response.Linear((1.0, -0.5), (1.0, -0.5))),
        bc.inject_langevin_noise(t),
        bc.scale_by_neg_lr(lr),
    ),
    "declared, a zero at the end": lambda lr, t: bc.chain(
        bc.with_response(torchopt.transform.trace(0.9), bc.response.Linear((1.0, 0.0), (1.0, -0.9))),
        bc.links.add_decayed_weights(0.3),
        bc.inject_langevin_noise(t),
        bc.scale_by_neg_lr(lr),
    ),
}  # fmt: skip
PRIORS = {"decoupled decay": 0.03, "nesterov and decay": 0.03, "mixed decay": 0.03, "declared, a zero at the end": 0.03}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize(
    "lr, temperature",
    [
        (lambda c: torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)),
        (torch.tensor(0.1, dtype=torch.float64), 0.3),
        (0.1, torch.tensor(0.3, dtype=torch.float64)),
    ],
)
def test_schedules_and_tensors_that_do_not_change_sample_exactly(name, lr, temperature):
    curvature = spd(7)
    got = stationary_covariance(SCHEDULED[name](lr, temperature), curvature)
    prior = PRIORS.get(name, 0.0) * torch.eye(DIM, dtype=torch.float64)
    assert relative(got, 0.3 * torch.linalg.inv(curvature + prior)) < 1e-10


def test_groups_sample_with_their_own_lr_momentum_preconditioner_and_temperature():
    """The groups share one curvature matrix: exactness with one temperature needs nothing of the groups to agree."""
    params = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros((), dtype=torch.float64)}
    p = torch.tensor([0.5, 2.0], dtype=torch.float64)
    tx = bc.partition(
        {
            "x": bc.chain(
                bc.scale_by_preconditioner(p),
                bc.add_momentum(0.9),
                bc.inject_langevin_noise(0.3),
                bc.scale_by_neg_lr(0.05),
            ),
            "y": bc.sgd(0.2, 0.5, nesterov=True, temperature=0.3),
        },
        {"a": "x", "b": "y"},
    )
    curvature = spd(11)
    assert relative(stationary_covariance(tx, curvature, params), 0.3 * torch.linalg.inv(curvature)) < 1e-10
    cold = bc.partition({"x": bc.sgd(0.1), "y": bc.sgd(0.1, temperature=0.4)}, {"a": "x", "b": "y"})
    diagonal = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
    got = stationary_covariance(cold, diagonal, params)
    torch.testing.assert_close(
        got, torch.diag(torch.tensor([0.0, 0.0, 0.1], dtype=torch.float64)), rtol=1e-10, atol=1e-14
    )


def test_masked_decay_is_matched_leaf_by_leaf():
    params = {"a": torch.zeros(2, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    tx = bc.chain(
        bc.add_momentum(0.9),
        bc.links.add_decayed_weights(0.5, {"a": True, "b": False}),
        bc.inject_langevin_noise(0.3),
        bc.scale_by_neg_lr(0.1),
    )
    curvature, prior = spd(5), torch.diag(torch.tensor([0.05, 0.05, 0.0], dtype=torch.float64))
    assert relative(stationary_covariance(tx, curvature, params), 0.3 * torch.linalg.inv(curvature + prior)) < 1e-10


def burnt_in(tx, curvature, steps):
    at, start = iter(range(steps)), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return end_of(tx, start, lambda x: curvature @ x + torch.sin(torch.arange(3.0).double() * next(at)), steps)[1]


def test_frozen_adamw_samples_with_its_prior_divided_by_the_preconditioner():
    tx, curvature = bc.adamw(0.05, (0.9, 0.99), weight_decay=0.3, temperature=0.3, freeze_after=20), spd(13)
    state = burnt_in(tx, curvature, 800)
    p = 1 / (torch.sqrt(state[0].nu[0] / (1 - 0.99**20)) + 1e-8)
    want = 0.3 * torch.linalg.inv(curvature + torch.diag(0.3 / p))
    assert relative(stationary_covariance(tx, curvature, state=state), want) < 1e-6  # Adam's correction is in float32


def test_noise_never_reaches_the_second_moment():
    """Every statistic that makes P is the same with noise and without, on given gradients."""
    for build in (lambda t: bc.adam(0.1, temperature=t), lambda t: bc.rmsprop(0.1, centered=True, temperature=t)):
        states = []
        for temperature in (0.0, 5.0):
            tx, p = build(temperature), [torch.zeros(4)]
            state = tx.init(p)
            for k in range(5):
                _, state = tx.update([torch.full((4,), float(k))], state, params=p, inplace=True)
            states.append(state[0])
        assert torch.equal(states[0].nu[0], states[1].nu[0])
    assert not torch.equal(bc.adam(0.1, temperature=1.0).init([torch.zeros(4)])[1].key, torch.tensor(0))


@pytest.mark.slow
def test_under_cosine_restarts_nesterov_stays_within_the_stated_bounds():
    """Exact: the covariance is propagated through the maps that probing the chain gives at each step, from 20 before a restart
    to where the fall behind it is exact again."""
    schedule = bc.schedules.cosine_restarts(0.3, 500)
    tx = bc.sgd(lambda count: schedule(count + 480), 0.99, nesterov=True, temperature=1.0)
    error = variance_along(tx, torch.ones(1, 1, dtype=torch.float64), 80).flatten() - 1
    assert error.min() > -0.25 and error.max() < 0.37
    assert error[:10].abs().max() < 1e-9 and error[-10:].abs().max() < 1e-3
    assert (error.square().sum() / 500).sqrt() < 0.07


@pytest.mark.parametrize("rates", [[0.0, 0.0, 0.1, 0.0, 0.2], [0.1, 0.0, 0.0, 0.3, 0.1]])
def test_a_learning_rate_of_zero_gives_no_nan(rates):
    s = bc.schedules.piecewise([1, 2, 3, 4], rates)
    for tx in (
        bc.sgd(s, 0.9, nesterov=True, temperature=1.0),
        bc.sgd(s, temperature=1.0),
        bc.chain(bc.scale_by_neg_lr(s), bc.add_momentum(0.9), bc.inject_langevin_noise(1.0)),
        bc.sgd(s, 0.9, temperature=1.0),
        bc.sgd(0.0, 0.9, temperature=1.0),
    ):
        assert torch.isfinite(end_of(tx, torch.ones(3), torch.ones_like, 8)[0]).all()


RATES = {  # of each step; where it rises by half, the velocity is rescaled
    "constant": [0.1] * 6,
    "falling": [0.1, 0.1, 0.02, 0.02, 0.015, 0.001],
    "rising": [0.1, 0.02, 0.02, 0.06, 0.07, 0.1],
    "zero first, and now and then": [0.0, 0.1, 0.0, 0.05, 0.0, 0.0],
}


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("mask", [None, True])
def test_the_velocity_carries_what_the_next_step_needs_of_the_noise(dampening, mask, rates):
    """Path by path the chain is ``v = k v + b (g + a xi_t + b' xi_{t-1})`` of the law, without a buffer for ``xi_{t-1}``."""
    mu, temperature, steps = 0.7, 0.4, RATES[rates]
    lr = steps[0] if rates == "constant" else bc.schedules.piecewise([1, 2, 3, 4, 5], steps)
    links = bc.add_momentum(mu, dampening), bc.inject_langevin_noise(temperature)
    if mask:
        links = tuple(bc.masked(link, mask) for link in links)
    tx = bc.chain(*links, bc.scale_by_neg_lr(lr))
    theta = torch.linspace(-1, 1, 20, dtype=torch.float64)
    state = tx.init(theta)
    assert state[1].memory[0].numel() == 0
    key, b, last, surplus, moved = state[1].key, 1 - dampening, None, 0.0, True
    want, v, before = theta, torch.zeros(20, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    for t, rate in enumerate(steps):
        k = law.ScheduleCoefficients(0.0, 0.0, mu, surplus)  # before the first rate that moves there is no noise
        if rate or last:
            now = law.level(rate * b, mu, temperature) if rate else last._replace(half=0.0)
            # behind a step of rate 0 the velocity is reversed, and owes nothing to its draw
            then = last._replace(**({} if moved else {"half": 0.0, "momentum": -1.0})) if last else now
            k = law.scheduled_noise(now, then, surplus, mu, where=pick)
            last, surplus, moved = (now if rate else last), k.surplus, rate != 0
        [[xi]] = keyed_stream.Variables(keyed_stream.leaf_numbers(("",))).draw(
            key, torch.tensor(t), [theta.unsqueeze(0)]
        )
        v = k.velocity * v + (1.0 if t == 0 else b) * (torch.sin(want) + k.current * xi + k.previous * before)
        want, before = want - rate * v, xi * bool(last)
        updates, state = tx.update(torch.sin(theta), state, params=theta, inplace=False)
        theta = theta + updates
        torch.testing.assert_close(theta, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [1e-2, 1e-5, 1e-310])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_little_momentum_carries_no_noise_that_could_overflow(momentum, dtype):
    tx = bc.chain(bc.add_momentum(momentum), bc.inject_langevin_noise(1.0), bc.scale_by_neg_lr(1e-6))
    theta, _ = end_of(tx, torch.zeros(50, dtype=dtype), lambda theta: theta, 3)
    assert bool(torch.isfinite(theta).all()) and bool(theta.abs().max() > 0)
    eye = torch.eye(1, dtype=torch.float64)
    tx = bc.chain(bc.add_momentum(momentum), bc.inject_langevin_noise(0.5), bc.scale_by_neg_lr(0.1))
    torch.testing.assert_close(stationary_covariance(tx, eye), 0.5 * eye, rtol=1e-10, atol=0.0)


HEAT = 0.3
EXACT = {
    "sgld": lambda: bc.sgld(0.05, temperature=HEAT),
    "sghmc": lambda: bc.sghmc(0.05, 0.6, temperature=HEAT),
    "nesterov": lambda: bc.sgd(0.05, 0.6, nesterov=True, temperature=HEAT),
    "dampened": lambda: bc.sgd(0.05, 0.6, 0.4, temperature=HEAT),
    "scheduled": lambda: bc.sghmc(lambda c: 0.05, 0.6, temperature=HEAT),
    "baoab": lambda: bc.samplers.baoab(0.2, 1.0, temperature=HEAT),
    "preconditioned": lambda: bc.chain(bc.scale_by_preconditioner(torch.tensor(2.0)), bc.sghmc(0.05, temperature=HEAT)),
    "rmsprop": lambda: bc.rmsprop(0.05, momentum=0.5, temperature=HEAT, freeze_after=20),
    "adaptive_sghmc": lambda: bc.samplers.adaptive_sghmc(0.05, 0.5, temperature=HEAT, burn_in=20),
}
APPROXIMATE = {  # how far each is from exact alone; a neighbour must not take it further
    "sgld, order 1": (lambda: bc.sgld(0.02, temperature=HEAT, order=1), 0.02),
    "sghmc, order 1": (lambda: bc.sghmc(0.02, 0.5, temperature=HEAT, order=1), 0.03),
    "psgld": (lambda: bc.samplers.psgld(0.02, 0.9, temperature=HEAT, freeze_after=20), 0.02),
    "ubu": (lambda: bc.samplers.ubu(0.1, 1.0, temperature=HEAT), 0.05),
    "sghmc_euler": (lambda: bc.samplers.sghmc_euler(0.01, 0.5, temperature=HEAT), 0.1),
    "adadelta": (lambda: bc.adadelta(0.1, temperature=HEAT), 0.0),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", EXACT)
def test_an_exact_sampler_stays_exact_or_refuses(name):
    what = assert_composes(EXACT[name], HEAT)
    assert what["gain behind"] == what["gain before"] == "right", what


@pytest.mark.parametrize("name", APPROXIMATE)
def test_another_sampler_is_taken_no_further_from_its_law_or_refuses(name):
    build, bias = APPROXIMATE[name]
    what = assert_composes(build, HEAT, tolerance=bias)
    if name in ("ubu", "sghmc_euler"):  # of those with noise of their own that are linear
        assert {v for k, v in what.items() if k not in ("decay before", "clip before")} == {"refused"}, what


GROUPS = {"body": torch.ones(3, dtype=torch.float64), "head": torch.ones(2, 2, dtype=torch.float64)}


@pytest.mark.parametrize("name", ["sgnht", "lattice_walk", "sgfs"])
def test_a_group_of_parameters_can_be_sampled_while_the_rest_is_optimised(name):
    build = {
        "sgnht": lambda: bc.samplers.sgnht(0.01, temperature=1.0),
        "lattice_walk": lambda: bc.samplers.lattice_walk(0.01, temperature=1.0),
        "sgfs": lambda: bc.samplers.sgfs(0.01, temperature=1.0, batch_size=1),
    }[name]
    tx = bc.partition({"cold": bc.sgd(0.1), "hot": build()}, {"body": "cold", "head": "hot"})
    extra = {"gradient_variance": {k: torch.ones_like(v) for k, v in GROUPS.items()}} if name == "sgfs" else {}
    grads = {k: v.clone() for k, v in GROUPS.items()}
    updates, _ = tx.update(grads, tx.init(GROUPS), params=GROUPS, inplace=False, **extra)
    assert_bitwise_equal(updates["body"], -0.1 * grads["body"])
    assert (updates["head"] != 0).all() and not torch.equal(updates["head"], -0.01 * grads["head"])


def test_two_thermostats_of_two_groups_are_two():
    tx = bc.partition(
        {"a": bc.samplers.sgnht(0.1, temperature=1.0), "b": bc.samplers.sgnht(0.1, temperature=2.0)},
        {"body": "a", "head": "b"},
    )
    _, state = end_of(tx, GROUPS, lambda p: p, 3)
    first, second = (s.friction[0] for s in state if hasattr(s, "friction"))
    assert first.ndim == second.ndim == 0 and first != second
