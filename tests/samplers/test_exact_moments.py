"""Linear samplers on Gaussian targets: what their code samples, solved exactly, their published recursions, and their order."""

import math

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain import precision
from bayesopt_chain.testing import Unstable, assert_bitwise_equal, stationary_covariance
from tests.diagnostics.oracle import DOUBLE, affine, enumerated
from tests.registry import SAMPLERS
from tests.registry.dressings import fed
from tests.samplers.transfer import every_draw_as_a_normal, fitted_slope
from tests.walk import end_of, path_of

T = 0.7


@pytest.fixture
def every_draw_is_normal():
    """See :func:`every_draw_as_a_normal`."""
    with every_draw_as_a_normal():
        yield


def curvatures(dimension: int) -> torch.Tensor:
    """A rotated curvature with eigenvalues from 1e-3 to 1 (1 in one dimension)."""
    generator = torch.Generator().manual_seed(dimension)
    q, _ = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))
    values = torch.logspace(-3, 0, dimension, dtype=torch.float64) if dimension > 1 else torch.ones(1).double()
    return q @ torch.diag(values) @ q.T


def gibbs(k: float) -> float:
    return T / k


def white(lr: float, mu: float):
    """Order 1: too large by ``y / (2 (1 + mu) - y)``."""
    return lambda k: T / k * (1 + lr * k / (2 * (1 + mu) - lr * k))


def lyapunov(a, q) -> float:
    """Variance of the first coordinate of ``x' = a x + noise`` of covariance ``q``."""
    a, q = np.array(a), np.array(q)
    n = len(a)
    return np.linalg.solve(np.eye(n * n) - np.kron(a, a), q.ravel()).reshape(n, n)[0, 0]


def explicit_euler(lr: float, mu: float):
    """Explicit Euler in ``(theta, m)`` with step eps, friction alpha and unit momentum scale, as published."""
    eps = math.sqrt(lr)
    alpha = (1 - mu) / eps
    return lambda k: lyapunov([[1, eps], [-eps * k, 1 - eps * alpha]], [[0, 0], [0, 2 * eps * alpha * T]])


def splitting(word: str, h: float, gamma: float, shift: str = ""):
    """Position variance of a splitting on curvature ``k``, from the exact flows; ``shift`` is run last, before measuring."""

    def flow(letter: str, k: float, t: float):
        zero = np.zeros((2, 2))
        if letter == "A":
            return np.array([[1, t], [0, 1]]), zero
        if letter == "B":
            return np.array([[1, 0], [-t * k, 1]]), zero
        c = math.exp(-gamma * t)
        if letter == "O":
            return np.diag([1, c]), np.diag([0, T * (1 - c * c)])
        a = np.array([[1, (1 - c) / gamma], [0, c]])
        n1 = 2 * T / gamma * (t - 2 * (1 - c) / gamma + (1 - c * c) / (2 * gamma))
        both = T / gamma * (1 - c) ** 2
        return a, np.array([[n1, both], [both, T * (1 - c * c)]])

    def variance(k: float) -> float:
        def run(letters: str):
            a, q = np.eye(2), np.zeros((2, 2))
            for letter in letters:
                fa, fq = flow(letter, k, h / word.count(letter))
                a, q = fa @ a, fa @ q @ fa.T + fq
            return a, q

        a, q = run(word)
        x = np.linalg.solve(np.eye(4) - np.kron(a, a), q.ravel()).reshape(2, 2)
        fa, fq = run(shift)
        return (fa @ x @ fa.T + fq)[0, 0]

    return variance


LINEAR = {
    "sgld": (lambda: bc.sgld(0.5, temperature=T), gibbs),
    "sgld, order 1": (lambda: bc.sgld(0.5, temperature=T, order=1), white(0.5, 0.0)),
    "sghmc": (lambda: bc.sghmc(0.5, 0.9, temperature=T), gibbs),
    "sghmc, order 1": (lambda: bc.sghmc(0.5, 0.9, temperature=T, order=1), white(0.5, 0.9)),
    "sghmc, order 1, along a schedule": (
        lambda: bc.sghmc(bc.schedules.constant(0.3), 0.4, temperature=T, order=1),
        white(0.3, 0.4),
    ),
    "stale": (lambda: bc.samplers.sghmc_euler(0.05, 0.9, temperature=T), explicit_euler(0.05, 0.9)),
    "baoab": (lambda: bc.samplers.baoab(0.9, 0.3, temperature=T), gibbs),
    "baoab, its splitting": (lambda: bc.samplers.baoab(0.9, 0.3, temperature=T), splitting("BAOAB", 0.9, 0.3)),
    "obabo": (lambda: bc.samplers.obabo(0.9, 0.3, temperature=T), lambda k: T / k / (1 - 0.81 * k / 4)),
    "obabo, its splitting": (lambda: bc.samplers.obabo(0.9, 0.3, temperature=T), splitting("OBABO", 0.9, 0.3)),
    "ubu": (lambda: bc.samplers.ubu(0.9, 0.3, temperature=T), splitting("UBU", 0.9, 0.3, shift="U")),
    "ubu, strong friction": (lambda: bc.samplers.ubu(0.9, 3.0, temperature=T), splitting("UBU", 0.9, 3.0, shift="U")),
    "cyclical, in one long cycle": (lambda: bc.samplers.cyclical(0.5, 10**9, 0, 0.9, temperature=T), gibbs),
    "cyclical with lr inside, likewise": (
        lambda: bc.samplers.cyclical(0.5, 10**9, 0, 0.9, temperature=T, lr_inside=True),
        white(0.5, 0.9),
    ),
}


def expected(curvature: torch.Tensor, variance) -> torch.Tensor:
    """The covariance that has ``variance(k)`` on every eigenvector of the curvature."""
    k, q = torch.linalg.eigh(curvature)
    return q @ torch.diag(torch.tensor([float(variance(float(v))) for v in k], dtype=torch.float64)) @ q.T


@pytest.mark.parametrize("dimension", [1, 2, 5])
@pytest.mark.parametrize("name", LINEAR)
def test_the_stationary_covariance_is_the_published_one(name, dimension, every_draw_is_normal):
    build, variance = LINEAR[name]
    curvature = curvatures(dimension)
    got = stationary_covariance(build(), curvature)
    torch.testing.assert_close(got, expected(curvature, variance), rtol=1e-8, atol=1e-9)


def tree(dimension: int):
    """Parameters of that many elements, a matrix among them where there are enough."""
    if dimension == 5:
        return {"b": torch.zeros(1).double(), "w": torch.zeros(2, 2).double()}
    return torch.zeros(dimension).double()


def precision_of(structure: str, dimension: int):
    """A precision that commutes with no curvature."""
    generator = torch.Generator().manual_seed(3)
    root = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
    params, one = tree(dimension), torch.tensor(1.0)
    if structure == "dense":
        matrix = torch.eye(dimension).double() + root @ root.T
        return precision.Dense(matrix, precision.shape_only(params), one)
    diagonal = optree.tree_map(lambda p: 0.5 + torch.rand(p.shape, generator=generator, dtype=torch.float64), params)
    if structure == "diagonal":
        return precision.Diagonal(diagonal, one)
    rows = {"b": root[:2, :1], "w": root[:2, 1:].reshape(2, 2, 2)}
    return precision.LowRank(diagonal, rows, one)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize(
    ("structure", "dimension"), [("dense", 1), ("dense", 2), ("dense", 5), ("diagonal", 5), ("low rank", 5)]
)
def test_a_precision_of_the_library_preconditions_exactly(structure, dimension, momentum):
    curvature = curvatures(dimension)
    built = precision_of(structure, dimension).factorised()
    tx = bc.samplers.langevin_with_precision(built, 0.3, momentum, temperature=T)
    got = stationary_covariance(tx, curvature, tree(dimension))
    torch.testing.assert_close(got, T * torch.linalg.inv(curvature), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("variance", [0.0, 0.3, 1.3, 50.0])  # 1.3: the curvature itself, where it is exact
def test_fisher_scoring_counts_the_gradients_own_noise(variance):
    lr, n, k = 0.4, 10, 1.3

    def given(updates, params):
        return torch.full((1,), variance, dtype=torch.float64)

    noisy = with_gradient_noise(bc.samplers.sgfs(lr, temperature=T, batch_size=n, decay=0.0), variance / n)
    step = 1 / (1 / lr + variance / (2 * T * n) + variance / 2)
    got = stationary_covariance(fed(noisy, gradient_variance=given), torch.tensor([[k]], dtype=torch.float64), warmup=1)
    assert got.item() == pytest.approx(T / k * (2 - variance * step) / (2 - step * k), rel=1e-9)


def with_gradient_noise(tx, variance: float):
    """``tx`` on gradients with white noise of a given variance, standing for a minibatch's."""

    def update(updates, state, **keywords):
        return tx.update(updates + variance**0.5 * torch.randn_like(updates), state, **keywords)

    return GradientTransformation(tx.init, update)


def test_the_running_average_of_fisher_scoring_is_corrected_for_its_start():
    tx, p = bc.samplers.sgfs(0.4, temperature=T, batch_size=1, decay=0.9), torch.zeros(2).double()
    state = tx.init(p)
    want = 1 / (1 / 0.4 + 2.0 / (2 * T) + 2.0 / 2)
    for _ in range(3):
        plain, _ = tx.update(
            torch.ones(2).double(), state, params=p, gradient_variance=torch.full((2,), 2.0).double(), inplace=False
        )
        shifted, state = tx.update(
            3 * torch.ones(2).double(), state, params=p, gradient_variance=torch.full((2,), 2.0).double()
        )
        torch.testing.assert_close(plain - shifted, torch.full((2,), 2 * want).double())


def test_ubu_keeps_its_noise_exact_at_small_and_large_steps():
    from bayesopt_chain.samplers.langevin import ubu_noise

    for x in (1e-6, 1e-3, 0.3, 0.999, 1.001, 5.0):
        a, b, c = ubu_noise(x, 1.0)
        if x > 0.1:
            assert a * a == pytest.approx(2 * (x - 2 * (1 - math.exp(-x)) + (1 - math.exp(-2 * x)) / 2), rel=1e-10)
        else:
            assert a * a == pytest.approx(2 * x**3 * (1 / 3 - x / 4 + 7 * x * x / 60), rel=1e-8)
        assert a * b == pytest.approx((1 - math.exp(-x)) ** 2, rel=1e-9)
        assert b * b + c * c == pytest.approx(1 - math.exp(-2 * x), rel=1e-9)


def test_the_stale_gradient_is_stable_on_a_smaller_range_than_sgd_with_momentum():
    k = torch.ones(1, 1, dtype=torch.float64)
    stationary_covariance(bc.samplers.sghmc_euler(0.09, 0.9, temperature=T), k)
    with pytest.raises(Unstable):
        stationary_covariance(bc.samplers.sghmc_euler(0.11, 0.9, temperature=T), k)
    stationary_covariance(bc.sghmc(3.7, 0.9, temperature=T), k)


def steep(theta):
    return theta**3 + torch.sin(theta)


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
        m = m - eps * (steep(theta) + alpha * m / sigma**2) - noise
        theta = theta + eps * m / sigma**2
        path.append(theta)
    tx = bc.sghmc(**bc.samplers.sghmc_from_friction(eps, alpha, beta, sigma, t), order=1)
    got = path_of(tx, torch.ones(3, dtype=torch.float64), steep, xi)
    torch.testing.assert_close(got, torch.stack(path), rtol=1e-9, atol=1e-10)


@given(lr=st.floats(1e-4, 1.0), momentum=st.floats(0.0, 0.999), sigma=st.floats(0.1, 10.0), t=st.floats(1e-5, 10.0))
def test_the_conversion_goes_there_and_back(lr, momentum, sigma, t):
    back = bc.samplers.sghmc_from_friction(**bc.samplers.sghmc_to_friction(lr, momentum, sigma, t))
    assert back["lr"] == pytest.approx(lr, rel=1e-12)
    assert back["momentum"] == pytest.approx(momentum, rel=1e-12, abs=1e-12)
    assert back["temperature"] == pytest.approx(t, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.order], ids=str)
def test_its_bias_has_the_stated_order(sampler, every_draw_is_normal):
    order = sampler.order
    slope, biases = fitted_slope(order.probe, order.steps[::2], degree=order.degree)
    assert abs(slope - order.slope) < 0.1, f"fitted {slope:.3f}, stated {order.slope}; biases {biases}"


COLD, K = 0.01, 4


def test_with_a_memory_of_an_epoch_palindromes_leave_less_heat_than_the_other_orders():
    """Every order of four batches, exactly, with the map of the library's chain: the mean excess over an epoch."""
    H = torch.diag(torch.tensor([1.0, 0.3], dtype=DOUBLE))
    n = 0.02 * torch.randn(K, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    n = n - n.mean(0)
    tx = bc.samplers.palindromic_ubu(0.3, 0.5, temperature=COLD)
    M, gamma, _ = affine(tx, H, torch.zeros(2, dtype=DOUBLE))
    heat = {order: (enumerated(M, gamma, n, order)[0][:2, :2] @ H).trace() for order in ORDERS}
    assert 0 < heat["palindrome"] < heat["reshuffled"] < 0.5 * heat["independent"]


ORDERS = ("independent", "reshuffled", "palindrome")


def mean_loss(w, batch):
    return (batch[0] - w).square().mean() / 2


@pytest.mark.parametrize("wrapped", [bc.chain, bc.skip_nonfinite])
@pytest.mark.parametrize("chains", [None, 2])
def test_sample_takes_palindromic_epochs_and_refuses_others(chains, wrapped):
    data, w = (torch.linspace(-1.0, 1.0, 12, dtype=DOUBLE)[:, None],), torch.zeros(1, dtype=DOUBLE)
    tx = wrapped(bc.samplers.palindromic_ubu(0.1, 1.0, temperature=COLD))
    step = bc.make_step(mean_loss, tx)
    params, state = w, tx.init(w)
    if chains is not None:
        step, params = bc.parallel(step, chains), bc.stack([w] * chains)
        state = step.init(tx, params, seed=0)
    for order in ("independent", "reshuffled", "fixed"):
        with pytest.raises(ValueError, match=f"meant for palindrome batches, and these are {order}"):
            bc.sample(step, params, state, bc.epochs(data, 3, order=order, seed=0), steps=4)
    assert len(bc.sample(step, params, state, bc.epochs(data, 3, order="palindrome", seed=0), steps=8)) == 8


def test_it_is_ubu_to_the_last_bit():
    found = []
    for make in (bc.samplers.ubu, bc.samplers.palindromic_ubu):
        torch.manual_seed(0)
        found.append(end_of(make(0.3, 1.0, temperature=COLD), torch.ones(3, dtype=DOUBLE), torch.sin, 5)[0])
    assert_bitwise_equal(*found)
