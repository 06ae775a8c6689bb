"""The law of matched noise, against the independent oracle and in closed form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesopt_chain.matching.law import (
    NoMatchedNoise,
    is_stable,
    noise_filter,
    scheduled_momentum_noise,
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


@pytest.mark.parametrize(
    "b, a",
    [
        ((1.0,), (1.0,)),
        momentum(0.9),
        momentum(0.9, 0.5),
        nesterov(0.9),
        ema(0.9),
        ((1.0,), tuple(np.convolve([1, -0.5], [1, -0.1]))),
    ],
)
@pytest.mark.parametrize("y", [0.01, 0.1, 0.5])
def test_the_filter_is_the_oracles(b, a, y):
    c, d = matched_noise(b, a, y, 0.7)
    want_c, want_d = oracle.noise_filter(b, a, y, 0.7)
    np.testing.assert_allclose(np.abs(c), np.abs(want_c), rtol=1e-8)
    np.testing.assert_allclose(d, want_d, rtol=1e-12)
    assert oracle.stationary_variance(b, a, y, 1.0, (np.array(c), np.array(d))) == pytest.approx(0.7, rel=1e-10)


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


@given(mu=st.floats(0.0, 0.95), y=st.floats(0.01, 1.0))
def test_white_noise_has_the_closed_form_bias(mu, y):
    c, d = matched_noise((1.0,), (1.0, -mu), y, 1.0, order=1)
    variance = oracle.stationary_variance((1.0,), (1.0, -mu), y, 1.0, (np.array(c), np.array(d)))
    assert variance - 1 == pytest.approx(y / (2 * (1 + mu) - y), rel=1e-8)


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


def test_a_response_without_a_stable_inverse_is_refused():
    with pytest.raises(NoMatchedNoise, match="inverse"):
        matched_noise((1.0, -2.0), (1.0,), 0.1)


# The schedule rule, by propagating the covariance of (theta, v, last draw) exactly through a changing learning rate.


def variance_along(lrs, temperatures, mu, curvature=1.0, order=2):
    """Variance of theta before each step, over the schedule repeated until it is periodic."""
    where = lambda condition, x, y: x if condition else y  # noqa: E731
    cov = np.diag([temperatures[0] / curvature, 0.0, 0.0])
    level_before, temperature_before, out = 0.0, 0.0, []
    for lr, t in zip(lrs, temperatures):
        c = scheduled_momentum_noise(mu, 1 / lr, level_before, t, temperature_before, order=order, where=where)
        level_before, temperature_before = 1 / lr, t
        k = mu * c.velocity_scale
        previous = 0.0 if c.previous is None else c.previous
        velocity = np.array([curvature, k, previous])  # v' = k v + curvature theta + current xi + previous xi_before
        a = np.array([[1.0, 0.0, 0.0] - lr * velocity, velocity, [0.0, 0.0, 0.0]])
        b = np.array([-lr * c.current, c.current, 1.0])
        out.append(cov[0, 0])
        cov = a @ cov @ a.T + np.outer(b, b)
    return np.array(out)


def cosine_restarts(peak, period, cycles):
    return np.tile(peak * 0.5 * (1 + np.cos(np.pi * np.arange(period) / period)), cycles)


@pytest.mark.parametrize("mu", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("peak", [0.03, 0.3])
@pytest.mark.parametrize("period", [500, 2000])
def test_under_cosine_restarts_the_variance_stays_within_the_stated_bounds(mu, peak, period):
    lrs = cosine_restarts(peak, period, 6)
    error = variance_along(lrs, np.ones_like(lrs), mu)[3 * period :] - 1
    assert error.min() > -0.21 and error.max() < 0.37
    assert np.sqrt(np.mean(error**2)) < 0.07


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("order", [1, 2])
def test_a_constant_schedule_is_the_constant_rule(mu, order):
    y = 0.2
    error = variance_along(np.full(4000, y), np.ones(4000), mu, order=order)[-1] - 1
    assert error == pytest.approx(0.0 if order == 2 else y / (2 * (1 + mu) - y), abs=1e-9)


def test_without_the_schedule_rule_a_restart_heats_a_thousandfold():
    """What the rule is for: noise that merely follows the Einstein level of each step."""
    mu, period = 0.99, 2000
    lrs = cosine_restarts(0.3, period, 3)
    cov = np.diag([1.0, 0.0, 0.0])
    worst = 0.0
    for lr in lrs:
        s = math.sqrt(2 * (1 - mu) / lr) / 2
        velocity = np.array([1.0, mu, s])
        a = np.array([[1.0, 0.0, 0.0] - lr * velocity, velocity, [0.0, 0.0, 0.0]])
        b = np.array([-lr * s, s, 1.0])
        cov = a @ cov @ a.T + np.outer(b, b)
        worst = max(worst, cov[0, 0])
    assert worst > 1000


def test_a_falling_temperature_never_rescales_and_a_vanishing_rate_gives_no_nan():
    c = scheduled_momentum_noise(
        0.9, torch.tensor(10.0), torch.tensor(10.0), torch.tensor(0.0), torch.tensor(5.0), order=2, where=torch.where
    )
    assert c.velocity_scale == 1.0 and all(torch.isfinite(v) for v in c)
    for levels in ((0.0, 0.0), (0.0, 10.0), (10.0, 0.0)):
        level, before = map(torch.tensor, levels)
        c = scheduled_momentum_noise(
            0.9, level, before, torch.tensor(1.0), torch.tensor(1.0), order=2, where=torch.where
        )
        assert all(torch.isfinite(v) for v in c)
