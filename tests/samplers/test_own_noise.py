"""Samplers with draws of their own: the lattice walk, microcanonical Langevin, thermostats."""

import math
import pickle
from functools import partial

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import precision, samplers
from bayesopt_chain import schedules as s
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.samplers.microcanonical import Metric, freshness
from bayesopt_chain.testing import NormalProbe, assert_bitwise_equal
from bayesopt_chain.testing._laws import example_params, run, smooth_gradient
from tests.registry.samplers import thermostat_probe
from tests.samplers.transfer import QUARTIC, fitted_slope
from tests.walk import average, end_of, variances

LR, T = 0.03, 0.8


def up_probability(tx, x: torch.Tensor, monkeypatch) -> torch.Tensor:
    """The share of 2,000 equally spaced uniforms for which the code steps up by one site: its probability, to 1/4000."""
    n = 2000
    u = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).repeat(len(x), 1)
    monkeypatch.setattr(keyed_stream, "draw_elements", lambda *args: [u.reshape(-1)])
    theta = x[:, None].expand(-1, n).clone()
    updates, _ = tx.update(QUARTIC.gradient(theta), tx.init(theta), params=theta, inplace=False)
    assert torch.allclose(updates.abs(), torch.tensor((2 * T * LR) ** 0.5, dtype=torch.float64), rtol=1e-12)
    return (updates > 0).double().mean(1)


def test_the_coin_is_tilted_by_the_gradient(monkeypatch):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    p = up_probability(bc.samplers.lattice_walk(LR, temperature=T), x, monkeypatch)
    want = (0.5 * (1 - (LR / (2 * T)) ** 0.5 * QUARTIC.gradient(x))).clamp(0, 1)
    assert (p - want).abs().max() < 1 / 3000


def test_a_steep_loss_cannot_throw_the_walk_away():
    x = torch.full((3,), 50.0)
    walk, sgld = bc.samplers.lattice_walk(0.02, temperature=1.0), bc.sgld(0.02, temperature=1.0)
    held, lost = (end_of(tx, x, lambda x: x**3, 400)[0] for tx in (walk, sgld))
    assert (held.abs() < 5).all() and not torch.isfinite(lost).all()


F64 = torch.float64
PLAIN = Metric(None, list, list)


def flow(u, g, time, d, steps=800):
    """``du/dt = -(1 - u u^T) g / (d - 1)``, by Runge and Kutta's method: what a kick solves."""
    slope = lambda u: -(g - u * (u @ g)) / (d - 1)  # noqa: E731
    h = time / steps
    for _ in range(steps):
        a = slope(u)
        b = slope(u + h / 2 * a)
        c = slope(u + h / 2 * b)
        u = u + h / 6 * (a + 2 * b + 2 * c + slope(u + h * c))
    return u


def example(d=7, seed=0):
    u, g = torch.randn(2, d, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return u / u.norm(), 3 * g


def kicked(u, g, lr):
    """The library's own kick, in seven dimensions."""
    e, steep = PLAIN.downhill([g])
    return PLAIN.kicked([u], e, steep * lr / 6, [g])[0]


def test_a_kick_is_the_exact_flow_of_the_direction():
    u, g = example()
    for lr in (1e-6, 0.4):
        torch.testing.assert_close(kicked(u, g, lr), flow(u, g, lr, 7), rtol=0, atol=1e-12)
    torch.testing.assert_close(kicked(u, g, 500.0), -g / g.norm(), rtol=0, atol=1e-12)


def test_a_precision_is_the_same_chain_in_other_coordinates():
    """``R^-1 theta`` of the chain with ``Lambda`` moves as the plain chain on the loss in those coordinates does."""
    d = 4
    A = torch.randn(d, d, dtype=F64)
    Lambda = A @ A.T + torch.eye(d, dtype=F64)
    theta, L = torch.ones(d, dtype=F64), torch.linalg.cholesky(Lambda)  # Lambda = L L^T, R = L^-T
    dense = precision.Dense(Lambda, precision.shape_only(theta), torch.tensor(1.0)).factorised()
    slope = lambda w: torch.sin(w) + w  # noqa: E731
    phi = L.T @ theta
    with_metric, plain = (bc.samplers.mclmc(0.3, 2.0, temperature=0.5, precision=p) for p in (dense, None))
    state, other = with_metric.init(theta), plain.init(phi)
    other = other.replace(0, other[0]._replace(key=state[0].key))
    theta, state = end_of(with_metric, theta, slope, 20, state)
    phi, _ = end_of(plain, phi, lambda x: torch.linalg.solve(L, slope(torch.linalg.solve(L.T, x))), 20, other)
    torch.testing.assert_close(L.T @ theta, phi, rtol=1e-10, atol=1e-10)
    assert float(dense.quad(state[0].direction[0])) == pytest.approx(1.0)


def test_a_refresh_forgets_the_direction_over_the_length():
    """Noise of that size leaves of a direction ``exp(-lr / length)``, as ``d`` grows: ``u z`` is 0 and ``z z`` is ``d``."""
    nu = freshness(0.3, 2.0, 50)
    assert (1 + 50 * nu**2) ** -0.5 == pytest.approx(math.exp(-0.3 / 2.0), rel=1e-12)


def test_at_temperature_zero_it_is_normalised_gradient_descent_to_the_last_bit():
    start = expected = torch.tensor([1.0, -2.0, 3.0])
    for _ in range(5):
        expected = expected + (expected.sin() / (expected.sin() * expected.sin()).sum().sqrt()) * -0.1
    static, told = (
        end_of(bc.samplers.mclmc(0.1, 1.0, temperature=zero), start, torch.sin, 5)[0]
        for zero in (0.0, torch.tensor(0.0))
    )
    assert_bitwise_equal(static, expected)
    torch.testing.assert_close(told, expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_it_samples_a_gaussian_and_minibatches_only_turn_it():
    """16 dimensions, 400 chains: the mean of the squares, an average of 400 chains times 150 draws, within 3 %."""
    k = torch.logspace(0, 1, 16)
    tx = bc.samplers.mclmc(0.35, 3.0, temperature=1.0)
    step = bc.parallel(bc.make_step(lambda w, batch: (k * w * w).sum() / 2, tx), 400)
    params = torch.randn(400, 16) / k.sqrt()
    state, total = step.init(tx, params), torch.zeros(16)
    for t in range(300):
        params, state, _ = step(params, state, None)
        if t >= 150:
            total += (params**2).mean(0) / 150
    assert (total * k).mean() == pytest.approx(1.0, abs=0.03) and (total * k - 1).abs().max() < 0.12


def test_the_scalar_thermostat_follows_the_mean_over_all_leaves():
    tx = samplers.sgnht(0.1, 0.8, temperature=2.0, thermostat_mass=3.0)
    params = {"a": torch.zeros(3).double(), "b": torch.zeros(2, 2).double()}
    state = tx.init(params)
    updates, state = tx.update(
        {"a": torch.ones(3).double(), "b": -torch.ones(2, 2).double()}, state, params=params, inplace=False
    )
    v = torch.cat([updates["a"], updates["b"].reshape(-1)]) / -0.1
    want = -math.log(0.8) * torch.exp(0.1 / (0.2 * 3.0) * (0.1 * (1 + 0.8) / 2 * (v**2).sum() / (7 * 2.0) - 1))
    torch.testing.assert_close(state[0].friction[0], want)


def test_badodab_is_its_splitting_step_by_step():
    h, gamma, q, t = 0.3, 0.8, 2.0, 1.5
    tx, theta = (
        samplers.badodab(h, gamma, temperature=t, per_parameter=True, thermostat_mass=q),
        torch.tensor([0.7]).double(),
    )
    state, p, xi, x = (
        tx.init(theta),
        torch.zeros(1).double(),
        torch.full((1,), gamma, dtype=torch.float64),
        theta.clone(),
    )
    for n in (0.3, -1.2, 0.8):
        with NormalProbe(torch.tensor([n], dtype=torch.float64)):
            updates, state = tx.update(theta + theta**3, state, params=theta, inplace=False)
        theta = theta + updates
        p = p - h * (x + x**3)
        x = x + h / 2 * p
        xi = xi * torch.exp(h / 2 * (p**2 / t - 1) / (gamma * q))
        p = torch.exp(-xi * h) * p + (gamma * t * (1 - torch.exp(-2 * xi * h)) / xi).sqrt() * n
        xi = xi * torch.exp(h / 2 * (p**2 / t - 1) / (gamma * q))
        x = x + h / 2 * p
        torch.testing.assert_close(theta, x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[0].friction[0], xi, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build, steps, order",
    [
        (lambda h: samplers.badodab(h, 0.7 / h, temperature=1.0, per_parameter=True), (0.1, 0.14, 0.2), 4),
        (lambda lr: samplers.sgnht(lr, 0.2, temperature=1.0, per_parameter=True), (0.005, 0.01, 0.02), 1),
    ],
    ids=["badodab at fixed momentum", "sgnht at another momentum"],
)
def test_the_bias_of_a_thermostat_has_its_order(build, steps, order):
    """In the step: BADODAB's is of second order in lr, which is the square of its step."""
    slope, biases = fitted_slope(lambda step: thermostat_probe(build(step)), steps, degree=9)
    assert abs(slope - order) < 0.1 * max(1, order / 2), biases


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda t: samplers.sgnht(0.0009, 0.97, temperature=t, per_parameter=True),
        lambda t: samplers.badodab(0.03, temperature=t),
    ],
    ids=["sgnht, per parameter", "badodab"],
)
def test_gradient_noise_of_unknown_strength_is_absorbed(build):
    """Gradient noise that heats SGHMC by a computed 67 % leaves a thermostat's variance within 4 %.

    4,000 coordinates over 50 time units, sampled after 40: about 20 independent draws of each, relative standard error of
    the variance sqrt(2 / 80,000) = 0.5 %. With a first-order bias below 2 % the false-alarm rate at 4 % is below 1e-4.
    """
    generator = torch.Generator().manual_seed(0)
    noise = (2 / 3 * 2 / 0.03) ** 0.5  # variance two thirds of the injected noise's, 2 gamma T / h
    tx = build(1.0)
    start = torch.randn(4000, generator=generator, dtype=torch.float64)

    def noisy(theta):
        return theta + noise * torch.randn(4000, generator=generator, dtype=torch.float64)

    variance, state = average(lambda x: (x**2).mean().item(), tx, start, noisy, 3000, 1350)
    assert abs(variance - 1) < 0.04
    assert state[0].friction[0].mean().item() > 1.2 * (1.0 if "badodab" in repr(tx) else -math.log(0.97))


WITH_ROOM = {  # velocity memory 0.9 in every update
    "sgnht": lambda lr, t: samplers.sgnht(lr, 0.9, temperature=t, per_parameter=True),
    "badodab": lambda lr, t: samplers.badodab(lr**0.5, -math.log(0.9) / lr**0.5, temperature=t, per_parameter=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_ROOM)
@pytest.mark.parametrize("lr", [0.1, 1.0])
def test_one_friction_for_each_parameter_samples_quadratics_at_large_lr(name, lr):
    """Standard deviations within 6 % of ``sqrt(T / k)``, which both have where the friction varies little.

    300 coordinates of each curvature, 2,000 updates after 1,000; the slowest decorrelate in about 200 updates (lr = 0.1,
    k = 0.1), so that there are 3,000 independent draws and the standard error of a standard deviation is 1.3 %: false alarms
    below 1e-4 in all four cases.
    """
    k = torch.tensor([0.1, 0.3, 1.0], dtype=torch.float64)[:, None].expand(3, 300)
    tx, start = WITH_ROOM[name](lr, 0.5), torch.full((3, 300), 1.0, dtype=torch.float64)
    variance, _ = average(lambda x: (x**2).mean(1), tx, start, lambda x: k * x, 3000, 1000)
    ratio = (variance * k[:, 0] / 0.5).sqrt()
    assert ((ratio - 1).abs() < 0.06).all(), ratio


def test_friction_is_positive_and_bounded_whatever_the_gradients():
    for build in WITH_ROOM.values():
        tx, p = build(0.3, 1.0), torch.zeros(3)
        state = tx.init(p)
        for g in (1e18, -1e18, 0.0, 1e6):
            updates, state = tx.update(torch.full((3,), g), state, params=p, inplace=False)
            friction = state[0].friction[0]
            assert torch.isfinite(updates).all() and torch.isfinite(friction).all() and (friction > 0).all()


# Schedules: values, purity under vmap, pickling and counts; cyclical sampling along one: phases, noise against the paper's


def half_cosine(fraction: float) -> float:
    return (1 + math.cos(math.pi * fraction)) / 2


WRITTEN_OUT = {
    "constant": (s.constant(0.3), lambda t: 0.3),
    "cosine": (s.cosine(1.0, 20, final=0.1), lambda t: 0.1 + 0.9 * half_cosine(min(t / 20, 1))),
    "cosine_restarts": (
        s.cosine_restarts(1.0, 7, final=0.1, decay=0.5),
        lambda t: 0.1 + 0.9 * 0.5 ** (t // 7) * half_cosine(t % 7 / 7),
    ),
    "polynomial": (s.polynomial(1.0, 20, power=2.0), lambda t: (1 - min(t / 20, 1)) ** 2),
    "robbins_monro": (s.robbins_monro(0.5, b=10.0, gamma=0.6), lambda t: 0.5 * (10 + t) ** -0.6),
    "piecewise": (s.piecewise((5, 15), (1.0, 0.5, 0.1)), lambda t: (1.0, 0.5, 0.1)[(t >= 5) + (t >= 15)]),
    "join": (
        s.join((s.polynomial(0.0, 5, final=1.0), s.cosine(1.0, 10), s.constant(0.2)), (5, 15)),
        lambda t: (t / 5, half_cosine((t - 5) / 10), 0.2)[(t >= 5) + (t >= 15)],
    ),
}
EVERY = {name: schedule for name, (schedule, _) in WRITTEN_OUT.items()}


@pytest.mark.parametrize("name", EVERY)
def test_values_are_the_formulas(name):
    for t in range(30):
        value = EVERY[name](torch.tensor(t))
        assert value.dtype == torch.float64 and value.ndim == 0
        assert value.item() == pytest.approx(WRITTEN_OUT[name][1](t), abs=1e-12)
        assert EVERY[name](t).item() == value.item()


@pytest.mark.parametrize("name", EVERY)
def test_vmapped_counts_give_the_looped_values(name):
    counts = torch.arange(30)
    looped = torch.stack([EVERY[name](t) for t in counts])
    torch.testing.assert_close(torch.vmap(EVERY[name])(counts), looped, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_schedules_pickle_compare_and_hash(name):
    twin = pickle.loads(pickle.dumps(EVERY[name]))
    assert twin == EVERY[name] and hash(twin) == hash(EVERY[name])
    assert bc.sgd(twin) == bc.sgd(EVERY[name])


@pytest.mark.parametrize("temperature", [1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("build", [bc.samplers.cyclical, partial(bc.samplers.cyclical, lr_inside=True)])
def test_exploration_is_the_optimizer(build, temperature):
    """Until the first sampling phase no noise moves anything, and its first update does."""
    params = example_params()
    hot, cold = (
        [run(build(0.1, 20, 10, 0.9, temperature=t), params, smooth_gradient, steps)[0] for steps in (10, 11)]
        for t in (temperature, 0.0)
    )
    assert_bitwise_equal(hot[0], cold[0])
    assert all(not torch.equal(hot[1][k], cold[1][k]) for k in params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peak", "lowest", "highest", "rms"),
    [(0.3, -0.209, 0.234, 0.020), (1.0, -0.099, 0.807, 0.053), (3.0, -0.343, 5.981, 0.463)],
)
def test_the_variance_at_a_restart_is_off_by_what_the_docs_say(peak, lowest, highest, rms):
    """Momentum 0.9, cycles of 500 updates, ``peak`` the largest lr times the curvature; the second cycle."""
    tx = bc.sgd(bc.schedules.cosine_restarts(peak, 500), momentum=0.9, temperature=1.0)
    error = variances(tx, 1.0, 1000)[500:] - 1
    assert error.min().item() == pytest.approx(lowest, abs=0.001)
    assert error.max().item() == pytest.approx(highest, abs=0.001)
    assert error.square().mean().sqrt().item() == pytest.approx(rms, abs=0.001)


@pytest.mark.slow
def test_the_late_sampling_phase_is_at_temperature_and_with_lr_inside_too_warm():
    inside, ours = (
        variances(bc.samplers.cyclical(0.1, 200, 100, 0.97, temperature=1.0, lr_inside=inside), 1.0, 400) - 1
        for inside in (True, False)
    )
    assert ours[-50:].abs().max() < 0.12
    assert inside[-10:].min() > 1.0
