"""IVON and VON against their equations."""

import math

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import Diagonal, flatten

from .regression import PRIOR, N, exact, forward, likelihood, negative_log_likelihood, problem

pytestmark = pytest.mark.usefixtures("double_precision")


def gradient(x):
    """Of a loss that is not quadratic, one number at a time."""
    return x + 0.4 * x**3 - 0.6 * math.sin(2 * x + 1)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_ivon_is_its_papers_algorithm_for_three_steps(samples, rescale):
    """Shen et al. 2024, algorithm 1, in Python floats and the paper's letters; to 1e-13."""
    lam, delta, beta1, beta2, h0, alpha = 50.0, 0.2, 0.8, 0.9, 0.5, 0.1
    tx = bc.vi.ivon(
        alpha,
        temperature=1 / lam,
        betas=(beta1, beta2),
        weight_decay=delta,
        init_hessian=h0,
        rescale_lr=rescale,
        n_samples=samples,
        trust_radius=math.inf,
    )
    params = torch.tensor([0.3, -1.2])
    state = tx.init(params)
    m, h, g = params.tolist(), [h0, h0], [0.0, 0.0]
    alpha = alpha * (h0 + delta) if rescale else alpha
    for t in (1, 2, 3):
        draw = tx.sample(state, params)
        z = draw.noise[0].tolist()
        for i in range(2):
            sigma = 1 / math.sqrt(lam * (h[i] + delta))
            theta = [m[i] + sigma * z[s][i] for s in range(samples)]
            g_hat = sum(gradient(x) for x in theta) / samples
            h_hat = sum(gradient(x) * (x - m[i]) / sigma**2 for x in theta) / samples
            g[i] = beta1 * g[i] + (1 - beta1) * g_hat
            g_bar = g[i] / (1 - beta1**t)
            h[i] = beta2 * h[i] + (1 - beta2) * h_hat + 0.5 * (1 - beta2) ** 2 * (h[i] - h_hat) ** 2 / (h[i] + delta)
            m[i] = m[i] - alpha * (g_bar + delta * m[i]) / (h[i] + delta)
        grads = draw.params.clone().apply_(gradient)
        updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        params = params + updates
    torch.testing.assert_close(params, torch.tensor(m), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(state[0].hessian[0], torch.tensor(h), rtol=1e-13, atol=1e-13)
    variance = tx.posterior(state, params).marginal_variance
    torch.testing.assert_close(variance, 1 / (lam * (torch.tensor(h) + delta)), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("beta1", "beta2", "samples"), [(0.9, 0.99, 1), (0.9, 0.99, 3), (0.0, 1.0, 1)])
def test_ivon_at_temperature_zero_is_averaged_gradient_descent(beta1, beta2, samples):
    """Nothing is drawn; the step is lr times the bias-corrected average, and one gradient stands for every sample."""
    before = torch.random.get_rng_state()
    tx = bc.vi.ivon(0.1, temperature=0.0, betas=(beta1, beta2), n_samples=samples)
    params = torch.tensor([0.5])
    state = tx.init(params)
    g, m = 0.0, 0.5
    for t in (1, 2, 3):
        updates, state = tx.update(torch.tensor([gradient(m)]), state, params=params, inplace=False)
        g = beta1 * g + (1 - beta1) * gradient(m)
        m = m - 0.1 * g / (1 - beta1**t)
        params = params + updates
        assert abs(params.item() - m) < 1e-14
    assert torch.equal(before, torch.random.get_rng_state())


def test_ivons_hessian_stays_positive():
    """On a loss of curvature -1, 500 steps: the correction keeps h + delta above zero."""
    tx = bc.vi.ivon(0.0, temperature=0.1, betas=(0.0, 0.5), weight_decay=0.1)
    params = torch.zeros(4)
    state = tx.init(params)
    lowest = 1.0
    for _ in range(500):
        draw = tx.sample(state, params)
        _, state = tx.update(-draw.params, state, params=params, draw=draw, inplace=False)
        lowest = min(lowest, (state[0].hessian[0] + 0.1).min().item())
    assert 0 < lowest < 0.5


def test_ivons_curvature_is_steins():
    """With all sign patterns as noise the estimate on a quadratic is the Hessian's diagonal, whatever lies off it."""
    hessian = torch.tensor([[2.0, 0.7, 0.1], [0.7, 1.0, -0.3], [0.1, -0.3, 0.5]])
    tx = bc.vi.ivon(0.0, temperature=0.3, betas=(0.0, 0.0), weight_decay=0.2, n_samples=8)
    params = torch.tensor([1.0, -2.0, 0.5])
    state = tx.init(params)
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 3)
    draw = tx.sample(state, params)
    theta = params + corners * (0.3 / 1.2) ** 0.5
    _, state = tx.update(
        theta @ hessian, state, params=params, draw=draw._replace(params=theta, noise=(corners,)), inplace=False
    )
    estimate = hessian.diagonal()
    wanted = estimate + 0.5 * (1.0 - estimate) ** 2 / 1.2
    torch.testing.assert_close(state[0].hessian[0], wanted, rtol=1e-12, atol=1e-12)


def test_ivons_step_is_clipped():
    tx, params = bc.vi.ivon(1.0, temperature=0.0, clip_radius=0.25), torch.zeros(2)
    updates, _ = tx.update(torch.tensor([3.0, -0.1]), tx.init(params), params=params, inplace=False)
    torch.testing.assert_close(updates, torch.tensor([-0.25, 0.1]))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("structure", ["dense", "root", "low_rank", "block", "kronecker", "diagonal"])
def test_one_full_step_of_von_solves_a_regression_in_every_structure(structure):
    """lr 1, betas (0, 0), one antithetic pair: mean and posterior are exact to 1e-10 (the structure's own part of it). Newton's
    step with the diagonal of the Hessian is halved and repeated."""
    data = problem()
    centred = data.x - data.x.mean(0)  # so that the bias and the weights are uncorrelated, as blocks have it
    y = data.y - data.y.mean()
    lr, steps = (0.5, 400) if structure == "diagonal" else (1.0, 1)
    tx = bc.vi.von(lr, temperature=1 / N, betas=(0.0, 0.0), weight_decay=PRIOR / N, n_samples=2, antithetic=True)
    estimate = bc.curvature.ggn(forward, likelihood, structure)
    step, params = bc.make_step(negative_log_likelihood, tx, curvature=estimate), data.start
    state = tx.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, (centred, y))
    mean, covariance = exact(data._replace(x=centred, y=y))
    got, wanted = tx.posterior(state, params).precision.to_dense(), torch.linalg.inv(covariance)
    assert (flatten(params, params) - mean).abs().max() < 1e-10
    if structure == "diagonal":
        got, wanted = got.diagonal(), wanted.diagonal()
    assert (got - wanted).abs().max() < 1e-10


def test_von_averages_curvature_and_corrects_its_momentum():
    """Two steps on one parameter against the equations, to 1e-13."""
    lam, delta, beta1, beta2, h0, lr = 30.0, 0.1, 0.6, 0.7, 2.0, 0.3
    tx = bc.vi.von(lr, temperature=1 / lam, betas=(beta1, beta2), weight_decay=delta, init_hessian=h0)
    params = torch.tensor([0.8])
    state = tx.init(params)
    m, h, v = 0.8, h0, 0.0
    for t, (total, count) in enumerate([(6.0, 4.0), (10.0, 5.0)], start=1):
        draw = tx.sample(state, params)
        theta = m + draw.noise[0][0].item() / math.sqrt(lam * (h + delta))
        assert abs(draw.params.item() - theta) < 1e-13
        increment = Diagonal(torch.tensor([total]), torch.tensor(count))
        updates, state = tx.update(
            torch.tensor([gradient(theta)]), state, params=params, draw=draw, curvature=increment, inplace=False
        )
        params = params + updates
        v = beta1 * v + (1 - beta1) * gradient(theta)
        h = beta2 * h + (1 - beta2) * total / count
        m = m - lr * (v / (1 - beta1**t) + delta * m) / (h + delta)
        assert abs(params.item() - m) < 1e-13
    assert abs(tx.posterior(state, params).marginal_variance.item() - 1 / (lam * (h + delta))) < 1e-14


def test_von_in_place_writes_into_its_precision():
    data = problem()
    estimate = bc.curvature.ggn(forward, likelihood, "dense")
    ends = []
    for inplace in (False, True):
        tx = bc.vi.von(0.5, temperature=1 / N, weight_decay=PRIOR / N, generator=torch.Generator().manual_seed(0))
        step = bc.make_step(negative_log_likelihood, tx, curvature=estimate, inplace=inplace)
        params = optree.tree_map(torch.clone, data.start)
        params, state, _ = step(
            params, tx.init(params), (data.x, data.y)
        )  # from here on the structure is the increments'
        matrix = state[0].hessian.matrix
        for _ in range(4):
            params, state, _ = step(params, state, (data.x, data.y))
        assert (state[0].hessian.matrix is matrix) == inplace
        ends.append((params, state[0].hessian.matrix))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_ivon_survives_a_temperature_that_comes_to_zero():
    """Where there is no noise there is no estimate of curvature: the Hessian stays, the mean goes on."""
    dial = torch.tensor(0.1)
    tx, params = bc.vi.ivon(0.1, temperature=dial, betas=(0.0, 0.5)), torch.tensor([1.0, 2.0])
    state = tx.init(params)
    for value in (0.1, 0.0):
        dial.fill_(value)
        before = state[0].hessian[0]
        draw = tx.sample(state, params)
        updates, state = tx.update(3 * draw.params, state, params=params, draw=draw, inplace=False)
    assert torch.equal(draw.params, params) and torch.equal(state[0].hessian[0], before)
    torch.testing.assert_close(updates, -0.1 * 3 * params / before)
    dial.fill_(0.1)
    _, state = tx.update(
        torch.full((2,), torch.nan), state, params=params, draw=tx.sample(state, params), inplace=False
    )
    assert state[0].hessian[0].isnan().all()  # a broken gradient is not hidden
