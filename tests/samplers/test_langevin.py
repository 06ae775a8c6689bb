"""SGLD and SGHMC: their classical recursions, and the conversion between parametrisations."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.testing import NormalProbe


def gradient(theta):
    return theta**3 + torch.sin(theta)


def run(tx, theta, xi):
    state, path = tx.init(theta), []
    for row in xi:
        with NormalProbe(row):
            updates, state = tx.update(gradient(theta), state, params=theta, inplace=False)
        theta = theta + updates
        path.append(theta)
    return torch.stack(path)


def test_order_one_without_momentum_is_sgld():
    lr, temperature, xi = 0.05, 0.7, torch.randn(20, 3, dtype=torch.float64)
    theta, path = torch.ones(3, dtype=torch.float64), []
    for row in xi:
        theta = theta - lr * gradient(theta) - math.sqrt(2 * lr * temperature) * row
        path.append(theta)
    got = run(bc.sgld(lr, temperature=temperature, order=1), torch.ones(3, dtype=torch.float64), xi)
    torch.testing.assert_close(got, torch.stack(path), rtol=1e-12, atol=1e-12)


@given(
    eps=st.floats(0.01, 0.3),
    alpha=st.floats(0.1, 3.0),
    sigma=st.floats(0.5, 2.0),
    beta=st.floats(0.0, 0.5),
    t=st.floats(0.1, 1.0),
)
def test_the_friction_parametrisation_is_the_same_recursion(eps, alpha, sigma, beta, t):
    if eps * alpha / sigma**2 > 1 or eps * t * beta > 2 * alpha:
        with pytest.raises(ValueError):
            bc.samplers.sghmc_from_friction(eps, alpha, beta, sigma, t)
        return
    xi = torch.randn(10, 3, dtype=torch.float64)
    theta, m, path = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), []
    for row in xi:
        noise = math.sqrt(eps * t * (2 * alpha - eps * t * beta)) * row
        m = m - eps * (gradient(theta) + alpha * m / sigma**2) - noise
        theta = theta + eps * m / sigma**2
        path.append(theta)
    got = run(
        bc.sghmc(**bc.samplers.sghmc_from_friction(eps, alpha, beta, sigma, t), order=1),
        torch.ones(3, dtype=torch.float64),
        xi,
    )
    torch.testing.assert_close(got, torch.stack(path), rtol=1e-9, atol=1e-10)


@given(lr=st.floats(1e-4, 1.0), momentum=st.floats(0.0, 0.999), sigma=st.floats(0.1, 10.0), t=st.floats(1e-5, 10.0))
def test_the_conversion_goes_there_and_back(lr, momentum, sigma, t):
    back = bc.samplers.sghmc_from_friction(**bc.samplers.sghmc_to_friction(lr, momentum, sigma, t))
    assert back["lr"] == pytest.approx(lr, rel=1e-12)
    assert back["momentum"] == pytest.approx(momentum, rel=1e-12, abs=1e-12)
    assert back["temperature"] == pytest.approx(t, rel=1e-12)
