"""Thermostats: their constants, what they absorb, what they refuse."""

import math

import pytest
import torch

from bayesopt_chain import samplers
from bayesopt_chain.testing import NormalProbe, assert_bitwise_equal
from bayesopt_chain.testing._zero_temperature import run, smooth_gradient
from tests.registry.samplers import thermostat_probe
from tests.samplers.transfer import fitted_slope
from tests.walk import average

BOTH = [samplers.sgnht, samplers.badodab]


@pytest.mark.parametrize("build", BOTH)
def test_with_one_parameter_both_kinds_are_the_same(build):
    p = torch.tensor([0.4], dtype=torch.float64)
    a, _ = run(build(0.1, temperature=0.7), p, smooth_gradient, 20)
    b, _ = run(build(0.1, temperature=0.7, per_parameter=True), p, smooth_gradient, 20)
    assert_bitwise_equal(a, b)


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
def test_badodab_at_fixed_momentum_is_of_second_order_in_lr():
    build = lambda h: thermostat_probe(samplers.badodab(h, 0.7 / h, temperature=1.0, per_parameter=True))  # noqa: E731
    slope, biases = fitted_slope(build, (0.1, 0.14, 0.2), degree=9)
    assert abs(slope / 2 - 2) < 0.1, biases


@pytest.mark.slow
def test_sgnht_is_of_first_order_in_lr_at_another_momentum():
    build = lambda lr: thermostat_probe(samplers.sgnht(lr, 0.2, temperature=1.0, per_parameter=True))  # noqa: E731
    slope, biases = fitted_slope(build, (0.005, 0.01, 0.02), degree=9)
    assert abs(slope - 1) < 0.1, biases


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
