"""Thermostats: their constants, what they absorb, what they refuse."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import samplers
from bayesopt_chain.samplers.thermostats import NoseHoover
from bayesopt_chain.testing import NormalProbe, assert_bitwise_equal
from bayesopt_chain.testing._zero_temperature import run, smooth_gradient
from tests.samplers.transfer import QUARTIC, Probe, fitted_slope, stationary_moment, target_moment

SCALAR_AND_PER_PARAMETER = [
    (samplers.sgnht, samplers.sgnht_per_parameter),
    (samplers.badodab, samplers.badodab_per_parameter),
]


@pytest.mark.parametrize(("scalar", "own"), SCALAR_AND_PER_PARAMETER, ids=["sgnht", "badodab"])
def test_with_one_parameter_both_kinds_are_the_same(scalar, own):
    p = torch.tensor([0.4], dtype=torch.float64)
    a, _ = run(scalar(0.1, temperature=0.7), p, smooth_gradient, 20)
    b, _ = run(own(0.1, temperature=0.7), p, smooth_gradient, 20)
    assert_bitwise_equal(a, b)


def test_the_scalar_thermostat_follows_the_mean_over_all_leaves():
    tx = samplers.sgnht(0.1, 0.8, temperature=2.0, thermostat_mass=3.0)
    params = {"a": torch.zeros(3).double(), "b": torch.zeros(2, 2).double()}
    state = tx.init(params)
    updates, state = tx.update(
        {"a": torch.ones(3).double(), "b": -torch.ones(2, 2).double()}, state, params=params, inplace=False
    )
    v = torch.cat([updates["a"], updates["b"].reshape(-1)]) / -0.1
    want = 0.2 + 0.1 / 3.0 * (0.1 * (1 - 0.2 / 2) * (v**2).sum() / (7 * 2.0) - 1)
    torch.testing.assert_close(state[0].friction[0], want)


def test_badodab_is_its_splitting_step_by_step():
    h, gamma, q, t = 0.3, 0.8, 2.0, 1.5
    tx, theta = (
        samplers.badodab_per_parameter(h, gamma, temperature=t, thermostat_mass=q),
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
        xi = xi + h / 2 * (p**2 / t - 1) / q
        p = torch.exp(-xi * h) * p + (gamma * t * (1 - torch.exp(-2 * xi * h)) / xi).sqrt() * n
        xi = xi + h / 2 * (p**2 / t - 1) / q
        x = x + h / 2 * p
        torch.testing.assert_close(theta, x, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state[0].friction[0], xi, rtol=1e-12, atol=1e-12)


class PaperKinetic(NoseHoover):
    """SGNHT with the paper's kinetic energy, ``lr v^2`` without the factor."""

    def advance(self, g, v, friction, n, temperature):
        moves, v, _ = super().advance(g, v, friction, n, temperature)
        k = self.kinetic(v)
        return moves, v, [xi + self.step / self.mass * (self.step * e / temperature - 1) for xi, e in zip(friction, k)]


def test_the_kinetic_factor_is_what_makes_the_bias_vanish_with_lr():
    want, lr = target_moment(QUARTIC, 1.0), 0.002
    ours = stationary_moment(Probe(samplers.sgnht_per_parameter(lr, 0.5, temperature=1.0)), 1.0, degree=9)
    paper = stationary_moment(Probe(bc.Chain((PaperKinetic(lr, 0.5, 1.0, 1.0, True),))), 1.0, degree=9)
    assert abs(ours / want - 1) < 0.01
    assert abs(paper / want - 1) > 0.05


def test_badodab_at_fixed_momentum_is_of_second_order_in_lr():
    build = lambda h: Probe(samplers.badodab_per_parameter(h, 0.7 / h, temperature=1.0))  # noqa: E731
    slope, biases = fitted_slope(build, (0.1, 0.14, 0.2), degree=9)
    assert abs(slope / 2 - 2) < 0.1, biases


@pytest.mark.parametrize("momentum", [0.2, 0.5])
def test_sgnht_is_of_first_order_in_lr_at_other_momenta(momentum):
    build = lambda lr: Probe(samplers.sgnht_per_parameter(lr, momentum, temperature=1.0))  # noqa: E731
    slope, biases = fitted_slope(build, (0.005, 0.01, 0.02), degree=9)
    assert abs(slope - 1) < 0.1, biases


@pytest.mark.parametrize(
    "build",
    [
        lambda t: samplers.sgnht(0.0009, 0.97, temperature=t),
        lambda t: samplers.sgnht_per_parameter(0.0009, 0.97, temperature=t),
        lambda t: samplers.badodab(0.03, temperature=t),
        lambda t: samplers.badodab_per_parameter(0.03, temperature=t),
    ],
    ids=["sgnht", "sgnht_per_parameter", "badodab", "badodab_per_parameter"],
)
def test_gradient_noise_of_unknown_strength_is_absorbed(build):
    """Gradient noise that heats SGHMC by a computed 67 % leaves a thermostat's variance within 4 %.

    2,000 coordinates over 100 time units, sampled after 100: about 40 independent draws of each, relative standard error of
    the variance sqrt(2 / 80,000) = 0.5 %. With a first-order bias below 2 % the false-alarm rate at 4 % is below 1e-4.
    """
    generator = torch.Generator().manual_seed(0)
    noise = (2 / 3 * 2 / 0.03) ** 0.5  # variance two thirds of the injected noise's, 2 gamma T / h
    tx = build(1.0)
    theta = torch.randn(2000, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        state = tx.init(theta)
    total = 0.0
    for t in range(7000):
        g = theta + noise * torch.randn(2000, generator=generator, dtype=torch.float64)
        updates, state = tx.update(g, state, params=theta, inplace=True)
        theta += updates
        if t >= 3500:
            total += (theta**2).mean().item()
    assert abs(total / 3500 - 1) < 0.04
    assert state[0].friction[0].mean().item() > 1.2 * (1.0 if "badodab" in repr(tx) else 0.03)


@pytest.mark.parametrize(
    "build",
    [samplers.sgnht, samplers.sgnht_per_parameter, samplers.badodab, samplers.badodab_per_parameter],
)
def test_temperature_zero_is_refused_with_the_reason(build):
    for zero in (0, 0.0, torch.zeros(())):
        with pytest.raises(ValueError, match=r"temperature must be positive.*no limit as T -> 0; use bc\.sghmc"):
            build(0.1, temperature=zero)


def test_a_thermostat_takes_no_second_noise():
    tx = bc.chain(bc.inject_langevin_noise(1.0), samplers.sgnht(0.1, temperature=1.0))
    with pytest.raises(ValueError, match="it brings noise of its own; leave inject_langevin_noise out"):
        tx.init(torch.zeros(2))
