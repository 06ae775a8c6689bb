"""Microcanonical Langevin: the kick of the paper to 1e-12, a unit direction, and the right law."""

import math

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.samplers.microcanonical import Metric, freshness
from bayesopt_chain.testing import assert_bitwise_equal
from tests.walk import end_of

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
    generator = torch.Generator().manual_seed(seed)
    u, g = torch.randn(2, d, dtype=F64, generator=generator)
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
    L = torch.linalg.cholesky(A @ A.T + torch.eye(d, dtype=F64))  # Lambda = L L^T, R = L^-T

    class Dense:
        def solve(self, x):
            return torch.cholesky_solve(x[:, None], L)[:, 0]

        def sqrt_solve(self, x):
            return torch.linalg.solve_triangular(L.T, x[:, None], upper=True)[:, 0]

        def quad(self, x):
            return (L.T @ x).square().sum()

    slope = lambda w: torch.sin(w) + w  # noqa: E731
    theta = torch.ones(d, dtype=F64)
    phi = L.T @ theta
    with_metric, plain = (bc.samplers.mclmc(0.3, 2.0, temperature=0.5, precision=p) for p in (Dense(), None))
    state, other = with_metric.init(theta), plain.init(phi)
    other = other.replace(0, other[0]._replace(key=state[0].key))
    theta, state = end_of(with_metric, theta, slope, 20, state)
    phi, _ = end_of(plain, phi, lambda x: torch.linalg.solve(L, slope(torch.linalg.solve(L.T, x))), 20, other)
    torch.testing.assert_close(L.T @ theta, phi, rtol=1e-10, atol=1e-10)
    assert float(Dense().quad(state[0].direction[0])) == pytest.approx(1.0)


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
