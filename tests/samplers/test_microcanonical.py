"""Microcanonical Langevin: the kick of the paper to 1e-12, a unit direction, and the right law."""

import math

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.samplers.microcanonical import Metric
from bayesopt_chain.testing import assert_bitwise_equal
from tests.walk import end_of

F64 = torch.float64
PLAIN = Metric(None, list, list)


def flow(u, g, time, d, steps=20_000):
    """``du/dt = -(1 - u u^T) g / (d - 1)``, by Runge and Kutta's method: what a kick solves."""
    slope = lambda u: -(g - u * (u @ g)) / (d - 1)  # noqa: E731
    h = time / steps
    for _ in range(steps):
        a = slope(u)
        b = slope(u + h / 2 * a)
        c = slope(u + h / 2 * b)
        u = u + h / 6 * (a + 2 * b + 2 * c + slope(u + h * c))
    return u


def published(u, g, lr, d):
    """The kick as BlackJAX 1.7.1 writes it, with the gradient of the log density ``-g``."""
    size = torch.linalg.vector_norm(-g)
    e = -g / size
    projection = u @ e
    delta = lr * size / (d - 1)
    zeta = torch.exp(-delta)
    new = e * (1 - zeta) * (1 + zeta + projection * (1 - zeta)) + 2 * zeta * u
    return new / new.norm()


def example(d=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    u, g = torch.randn(2, d, dtype=F64, generator=generator)
    return u / u.norm(), 3 * g


def kicked(u, g, lr):
    """The library's own kick, in seven dimensions."""
    e, steep = PLAIN.downhill([g])
    return PLAIN.kicked([u], e, steep * lr / 6, [g])[0]


@pytest.mark.slow
def test_a_kick_is_the_exact_flow_of_the_direction():
    u, g = example()
    torch.testing.assert_close(kicked(u, g, 0.4), flow(u, g, 0.4, 7), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lr", [1e-6, 0.3, 50.0])
def test_a_kick_is_the_published_formula_to_1e_12(lr):
    u, g = example(seed=1)
    assert (kicked(u, g, lr) - published(u, g, lr, 7)).abs().max() < 1e-12


@pytest.mark.peers
def test_a_kick_is_blackjaxs_to_1e_12():
    jax = pytest.importorskip("jax")
    integrators = pytest.importorskip("blackjax.mcmc.integrators")
    u, g = example(seed=2)
    with jax.enable_x64(True):
        update = integrators.esh_dynamics_momentum_update_one_step(inverse_mass_matrix=1.0)
        theirs, _, _ = update(jax.numpy.asarray(u.numpy()), jax.numpy.asarray(-g.numpy()), 0.4, 1.0)
    assert (kicked(u, g, 0.4) - torch.tensor(theirs.tolist(), dtype=F64)).abs().max() < 1e-12


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
    """16 dimensions, 200 chains: the mean of the squares, an average of 200 chains times 300 draws, within 3 %."""
    k = torch.logspace(0, 1, 16)
    tx = bc.samplers.mclmc(0.35, 3.0, temperature=1.0)
    step = bc.parallel(bc.make_step(lambda w, batch: (k * w * w).sum() / 2, tx), 200)
    params = torch.randn(200, 16) / k.sqrt()
    state, total = step.init(tx, params), torch.zeros(16)
    for t in range(600):
        params, state, _ = step(params, state, None)
        if t >= 300:
            total += (params**2).mean(0) / 300
    assert (total * k).mean() == pytest.approx(1.0, abs=0.03) and (total * k - 1).abs().max() < 0.12


@pytest.mark.parametrize(
    "build, error, words",
    [
        (
            lambda: bc.samplers.mclmc(0.1, 1.0, temperature=1.0).init(torch.zeros(1)),
            ValueError,
            "mclmc: needs at least 2 parameters",
        ),
        (
            lambda: bc.samplers.mclmc(0.1, 1.0, temperature=1.0, precision=3.0),
            TypeError,
            "mclmc: precision has no solve",
        ),
        *(
            (lambda bad=bad: bc.samplers.mclmc(0.1, bad, temperature=1.0), ValueError, "length")
            for bad in (0.0, -1.0, math.nan)
        ),
        (
            lambda: bc.chain(bc.add_momentum(0.9), bc.samplers.mclmc(0.1, 1.0, temperature=1.0)).init(torch.zeros(3)),
            ValueError,
            "noise of its own",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(build, error, words):
    with pytest.raises(error, match=words):
        build()
