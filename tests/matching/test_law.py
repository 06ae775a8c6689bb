"""The law of matched noise, against the independent oracle and in closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesopt_chain.matching.filters import pick
from bayesopt_chain.matching.law import (
    NoMatchedNoise,
    is_stable,
    level,
    noise_filter,
    scheduled_noise,
    spectral_factor,
    spectrum,
)
from tests.matching.reference import matched_noise_oracle as oracle


def matched_noise(b, a, lr, temperature=1.0, order=2):
    """The filter of a chain with the response ``lr b / a``."""
    b = [lr * float(v) for v in b]
    c, d = noise_filter(spectrum(b, a), b, order)
    return [math.sqrt(temperature) * v for v in c], d


def momentum(mu, dampening=0.0):
    return (1.0 - dampening,), (1.0, -mu)


def nesterov(mu):
    return (1.0 + mu, -mu), (1.0, -mu)


def ema(decay):
    return (1.0 - decay,), (1.0, -decay)


link_strategies = st.one_of(
    st.builds(momentum, st.floats(0.01, 0.95), st.floats(0.0, 0.9)),
    st.builds(nesterov, st.floats(0.01, 0.95)),
    st.builds(ema, st.floats(0.01, 0.95)),
)


@given(links=st.lists(link_strategies, max_size=3), y=st.floats(1e-3, 0.3), temperature=st.floats(1e-3, 10.0))
def test_any_product_of_links_samples_exactly_or_is_refused(links, y, temperature):
    b, a = np.ones(1), np.ones(1)
    for bi, ai in links:
        b, a = np.convolve(b, bi), np.convolve(a, ai)
    w = np.linspace(0, np.pi, 4001)
    x = np.exp(-1j * w)
    psi = np.real((1 + 1 / x) * np.polyval(a[::-1], x) / np.polyval(b[::-1], x))
    try:
        c, d = matched_noise(b, a, y, temperature)
    except NoMatchedNoise:
        assert psi.min() < 1e-6 * psi.max()
        return
    assert psi.min() > -1e-6 * psi.max()
    spectrum = np.abs(np.polyval(c[::-1], x) / np.polyval(d[::-1], x)) ** 2
    np.testing.assert_allclose(spectrum, temperature / y * psi, atol=1e-8 * temperature / y * psi.max())
    variance = oracle.stationary_variance(b, a, y, 1.0, (np.array(c), np.array(d)))
    if not np.isnan(variance):  # unstable at this learning rate
        assert variance == pytest.approx(temperature, rel=1e-8)


def test_sgd_and_momentum_take_the_mean_of_two_consecutive_draws():
    for mu in (0.0, 0.5, 0.99):
        c, d = matched_noise((1.0,), (1.0, -mu), 0.1, 0.3)
        level = math.sqrt(2 * 0.3 * (1 - mu) / 0.1)
        np.testing.assert_allclose(c, [level / 2, level / 2], rtol=1e-14)
        assert d == (1.0,)


@given(link=link_strategies, lr=st.floats(1e-3, 1.0))
def test_the_level_at_zero_frequency_is_einsteins(link, lr):
    b, a = link
    gain = lr * sum(b) / sum(a)
    for order in (1, 2):
        c, d = matched_noise(b, a, lr, 0.7, order=order)
        assert (sum(c) / sum(d)) ** 2 == pytest.approx(2 * 0.7 / gain, rel=1e-9)


@given(mu1=st.floats(0.0, 0.95), mu2=st.floats(0.0, 0.95))
def test_two_momenta_have_matched_noise_exactly_while_the_stated_margin_is_positive(mu1, mu2):
    margin = 1 - mu1 - mu2 - 3 * mu1 * mu2
    a = tuple(np.convolve([1, -mu1], [1, -mu2]))
    if margin > 1e-6:
        matched_noise((1.0,), a, 0.1)
    elif margin < -1e-6:
        with pytest.raises(NoMatchedNoise):
            matched_noise((1.0,), a, 0.1)


@given(roots=st.lists(st.floats(-0.98, 0.98), max_size=4), scale=st.floats(1e-3, 1e3))
def test_the_spectral_factor_is_the_minimum_phase_one(roots, scale):
    q = np.real(np.poly(roots))[: len(roots) + 1] * scale if roots else np.array([scale])
    n = len(q)
    r = [float(sum(q[j] * q[j + k] for j in range(n - k))) for k in range(n)]
    np.testing.assert_allclose(np.pad(got := spectral_factor(r), (0, n - len(got))), q, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize(
    "coefficients, stable",
    [((1.0, -0.9), True), ((1.0, -1.0), False), ((1.0, 0.0, -1.1), False), ((2.0, -1.0, 0.2), True)],
)
def test_stability_is_that_of_the_roots(coefficients, stable):
    assert is_stable(coefficients) is stable
    assert stable == bool(np.all(np.abs(np.roots(coefficients)) < 1))


def test_no_excess_means_no_noise():
    assert spectrum((0.1,), (1.0,)) == pytest.approx((0.1,))  # r over |b|^2 is 1 / lr
    assert [noise_filter((0.0,), (1.0,), order)[0] for order in (1, 2)] == [(0.0,), (0.0, 0.0)]


def test_a_response_without_a_stable_inverse_is_refused():
    with pytest.raises(NoMatchedNoise, match="inverse"):
        matched_noise((1.0, -2.0), (1.0,), 0.1)


# Rates that change: the rule's numbers go into the oracle's covariance recursion, which knows nothing of the rule.


def noise_along(lr, mu, temperature=1.0, own=None):
    """Weights of every step, ``own`` the optimizer's momenta where the rule may take those; and the surpluses."""
    before, surplus, out, left = None, 0.0, [], []
    for t, (rate, m) in enumerate(zip(lr, mu)):
        now = level(rate, m, temperature)
        natural = mu[max(t - 1, 0)] if own is None else own[t]
        k = scheduled_noise(now, before or now, surplus, natural, where=pick)
        before, surplus = now, k.surplus
        out.append((k.velocity, k.current, k.previous))
        left.append(surplus)
    return np.array(out).T, left


def error_along(lr, mu, fraction, temperature=1.0, own=None):
    """``Var(theta) K / T - 1`` after every step, at this fraction of the smallest stability limit."""
    curvature = fraction * min(2 * (1 + m) / rate for rate, m in zip(lr, mu))
    weights, _ = noise_along(lr, mu, temperature, own)
    return oracle.variance_along(lr, curvature, *weights) * curvature / temperature - 1


STEPS = np.arange(60)
FALLS = {
    "StepLR": 0.1 * 0.1 ** (STEPS // 20),
    "MultiStepLR": 0.1 * np.where(STEPS < 10, 1.0, np.where(STEPS < 13, 0.5, 1e-3)),
    "a tenth every step": 0.1 * 10.0 ** -np.minimum(STEPS, 12.0),
    "cosine": 0.1 * (1e-6 + 0.5 * (1 + np.cos(np.pi * STEPS / 60))),
    "linear": 0.1 * (1 - STEPS / 60),
    "exponential": 0.1 * 0.93**STEPS,
    "polynomial": 0.1 * (1 - STEPS / 60) ** 3,
}


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("schedule", FALLS)
def test_along_falling_rates_the_variance_is_exact_at_every_step_whatever_the_curvature(schedule, mu):
    for fraction in (0.03, 0.1, 0.3, 0.6, 0.9):
        assert np.abs(error_along(FALLS[schedule], [mu] * 60, fraction, 0.7)).max() < 1e-11


@pytest.mark.parametrize(
    "lr, mu",
    [
        ([0.1] * 60, [0.5] * 30 + [0.9] * 30),
        ([0.1] * 60, [0.9] * 30 + [0.99] * 30),
        ([0.1] * 30 + [0.02] * 30, [0.95] * 30 + [0.5] * 30),
        ([0.1] * 30 + [0.02] * 30, [0.8] * 30 + [0.0] * 30),
        (FALLS["cosine"], list(np.linspace(0.85, 0.95, 60))),  # the second half of OneCycleLR
    ],
)
def test_momenta_that_change_are_exact_where_the_velocity_needs_more_noise(lr, mu):
    for own in (None, mu):  # with the last step's momentum, and with the optimizer's own wherever there is room for it
        for fraction in (0.03, 0.3, 0.9):
            assert np.abs(error_along(lr, mu, fraction, own=own)).max() < 1e-11


def test_the_optimizers_own_momentum_is_left_alone_where_it_can_be():
    mu = list(np.linspace(0.85, 0.95, 60))
    (velocity, _, _), _ = noise_along(FALLS["exponential"], mu, own=mu)
    np.testing.assert_array_equal(velocity, mu)


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_a_rise_is_exact_as_long_as_earlier_falls_have_left_a_surplus(mu):
    lr = [0.1] * 10 + [0.01] * 3 + [0.0101] * 20
    assert np.abs(error_along(lr, [mu] * 33, 0.9)).max() < 1e-11
    assert np.abs(error_along(lr[:13] + [0.05] * 20, [mu] * 33, 0.7)).max() > 1e-3


def test_the_surplus_stays_zero_at_constant_rates_and_runs_out_as_stated():
    assert noise_along([0.1] * 50, [0.9] * 50)[1] == [0.0] * 50
    _, left = noise_along([0.1] * 2 + [0.05] * 50, [0.9] * 52)
    alpha_squared = (1 - 0.9) / (2 * 0.05)
    for n in (1, 10, 49):
        assert 1 / left[2 + n] == pytest.approx(1 / left[2] + n / alpha_squared, rel=1e-12)


@given(
    falls=st.lists(st.floats(0.0, 4.0), min_size=3, max_size=12),
    mu=st.floats(0.0, 0.99),
    fraction=st.floats(0.01, 0.95),
)
def test_any_falling_schedule_is_exact(falls, mu, fraction):
    lr = 0.1 * 10.0 ** -np.cumsum([0.0, *falls])
    assert np.abs(error_along(lr, [mu] * len(lr), fraction)).max() < 1e-9


@pytest.mark.parametrize("mu, ratio", [(0.0, 1.3), (0.5, 2.0), (0.9, 10.0), (0.99, 3.0)])
def test_a_rise_is_off_at_once_by_the_stated_factor(mu, ratio):
    for fraction in (0.03, 0.3, 0.9):
        y = fraction * 2 * (1 + mu)
        want = -(1 - ratio**-0.5) * y * (1 - y)
        assert error_along([0.1] * 3 + [0.1 * ratio], [mu] * 4, fraction)[-1] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("mu", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(
    "peak, low, high, rms", [(0.03, -0.08, 0.09, 0.02), (0.3, -0.21, 0.36, 0.07), (1.0, -0.16, 0.98, 0.18)]
)
def test_under_cosine_restarts_the_variance_stays_within_the_stated_bounds(mu, peak, low, high, rms):
    lr = np.tile(peak * 0.5 * (1 + np.cos(np.pi * np.arange(500) / 500)), 3)
    weights, _ = noise_along(lr, [mu] * 1500)
    error = oracle.variance_along(lr, 1.0, *weights)[500:] - 1
    assert error.min() > low and error.max() < high and np.sqrt(np.mean(error**2)) < rms


def test_a_falling_temperature_never_rescales():
    c = scheduled_noise(level(0.1, 0.9, 0.0), level(0.1, 0.9, 5.0), 0.0, 0.9, where=pick)
    assert c.velocity == 0.9 and c.surplus == 0.0 and c.current == 0.0
    c = scheduled_noise(level(0.2, 0.9, 0.0), level(0.1, 0.9, 5.0), 0.0, 0.9, where=pick)
    assert c.velocity == pytest.approx(0.9 * 0.5**0.5)  # but a rising rate does


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("heat, last_heat", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_a_temperature_of_zero_gives_no_nan(mu, heat, last_heat):
    now, last = (level(0.1, mu, torch.tensor(t, dtype=torch.float64)) for t in (heat, last_heat))
    c = scheduled_noise(now, last, torch.tensor(0.0).double(), mu, where=torch.where)
    assert all(math.isfinite(float(v)) for v in c)


def test_numbers_and_tensors_give_the_same_coefficients():
    now, before = (0.03, 0.8, 0.5), (0.1, 0.7, 0.6)
    numbers = scheduled_noise(level(*now), level(*before), 0.2, 0.8, where=pick)
    doubles = [[torch.tensor(x, dtype=torch.float64) for x in args] for args in (now, before, (0.2, 0.8))]
    tensors = scheduled_noise(level(*doubles[0]), level(*doubles[1]), *doubles[2], where=torch.where)
    assert [float(x) for x in tensors] == pytest.approx(numbers, rel=1e-14)
