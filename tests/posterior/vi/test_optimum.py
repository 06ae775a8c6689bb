"""Bayesian linear regression, where every method has one answer; and what the estimators are at it."""

import math

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import flatten

from .regression import N, exact, log_posterior_loss, problem

pytestmark = pytest.mark.usefixtures("double_precision")


def moments(posterior):
    dense = posterior.precision.to_dense()
    return flatten(posterior.mean, posterior.mean), torch.linalg.inv(dense)


def close(a, b, tolerance):
    worst = max((x - y).abs().max().item() for x, y in zip(a, b))
    assert worst < tolerance, f"off by {worst:.3g}"


@pytest.mark.slow
@pytest.mark.parametrize("family, rank", [("dense", None), ("low_rank", 4)])
def test_a_family_that_contains_the_posterior_converges_to_it(family, rank):
    """Sticking the landing, to 1e-8 after 1,000 steps: the gradient's noise vanishes with the distance."""
    data = problem()
    kwargs = {} if rank is None else {"rank": rank}
    tx = getattr(bc.vi, family)(
        bc.adam(lambda count: 0.1 * 0.5 ** (count / 120)),
        temperature=1 / N,
        init_scale=0.1,
        n_samples=4,
        antithetic=True,
        **kwargs,
    )
    params, step = data.start, bc.make_step(log_posterior_loss, tx)
    state = tx.init(params)
    for _ in range(1000):
        params, state, _ = step(params, state, (data.x, data.y))
    close(moments(tx.posterior(state, params)), exact(data), 1e-8)


@pytest.mark.parametrize("stick_the_landing", [True, False])
def test_a_correlated_gaussian_over_a_network_does_not_run_away(stick_the_landing):
    """At Adam's usual rate and the default first deviations. Off-diagonals of L in units of the parameters themselves move by
    more than its diagonal there, L^-1 explodes, and within 100 steps nothing is finite."""
    x = torch.randn(200, 5)
    y = x[:, :1].sin() + 0.1 * torch.randn(200, 1)
    forward, params, _ = bc.make_functional(
        torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    )
    loss = lambda p, batch: (forward(p, batch) - batch[1]).square().mean() / 0.02  # noqa: E731
    tx = bc.vi.dense(bc.adam(1e-2), temperature=1 / 200, stick_the_landing=stick_the_landing)
    step, state = bc.make_step(loss, tx), tx.init(params)
    for _ in range(300):
        params, state, _ = step(params, state, (x, y))
    assert torch.isfinite(tx.posterior(state, params).marginal_variance["0.weight"]).all()
    assert loss(params, (x, y)) < 1.5  # 15 at the start, .5 where only noise is left


def at_the_optimum(family):
    """A transformation of the family, with parameters and state at the optimum of its negative ELBO."""
    data = problem()
    mean, covariance = exact(data)
    tx = getattr(bc.vi, family)(bc.links.scale(1.0), temperature=1 / N, n_samples=5)
    params = data.tree(mean)
    state = tx.init(params)
    if family == "dense":
        lower = torch.linalg.cholesky(covariance)
        scale = ((lower / lower.diagonal()[:, None]).tril(-1) + torch.diag(lower.diagonal().log()),)
    else:
        best = 1 / torch.linalg.inv(covariance).diagonal()
        tree = data.tree(0.5 * best.log())
        scale = tuple(tree[k] for k in sorted(tree))
    return data, tx, params, state.replace(0, state[0]._replace(scale=scale))


def gradients_at(data, tx, params, state, draw):
    def gradient(point):
        return torch.func.grad(log_posterior_loss)(point, (data.x, data.y))

    grads = torch.vmap(gradient)(draw.params)
    updates, new = tx.update(grads, state, params=params, draw=draw, inplace=False)
    return updates, [b - a for a, b in zip(state[0].scale, new[0].scale)]


def test_sticking_the_landing_is_exactly_zero_where_the_family_contains_the_posterior():
    """1e-12, for every draw; without it the gradient of the same draws is not zero."""
    data, tx, params, state = at_the_optimum("dense")
    updates, by_scale = gradients_at(data, tx, params, state, tx.sample(state, params))
    assert max(x.abs().max() for x in (*updates.values(), *by_scale)) < 1e-12
    plain = bc.vi.dense(bc.links.scale(1.0), temperature=1 / N, n_samples=5, stick_the_landing=False)
    updates, _ = gradients_at(data, plain, params, state, tx.sample(state, params))
    assert max(x.abs().max() for x in updates.values()) > 1e-3


def test_sticking_the_landing_of_the_mean_field_is_the_correlations_force():
    """(H - diag H)(theta - mean) at its optimum, averaged over the draws."""
    data, tx, params, state = at_the_optimum("mean_field")
    draw = tx.sample(state, params)
    updates, _ = gradients_at(data, tx, params, state, draw)
    hessian = torch.linalg.inv(exact(data)[1]) / N
    away = flatten(draw.params, params) - flatten(params, params)
    want = (away @ (hessian - torch.diag(hessian.diagonal()))).mean(0)
    assert (flatten(updates, params) - want).abs().max() < 1e-12


def test_the_mean_fields_optimum_has_the_variance_one_over_lambda_ii():
    """The expected gradient is zero there: with all sign patterns of z as draws the expectation of a quadratic is exact."""
    data, tx, params, state = at_the_optimum("mean_field")
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    tx = bc.vi.mean_field(bc.links.scale(1.0), temperature=1 / N, n_samples=len(corners))
    draw = tx.sample(state, params)
    tree = {"b": corners[:, 0], "w": corners[:, 1:].reshape(-1, 3, 1)}
    noise = tuple(tree[k] for k in sorted(tree))
    moved = {k: params[k] + s.exp() * z for k, s, z in zip(sorted(tree), state[0].scale, noise)}
    draw = draw._replace(params=moved, noise=noise)
    updates, by_scale = gradients_at(data, tx, params, state, draw)
    assert max(x.abs().max() for x in (*updates.values(), *by_scale)) < 1e-12
    variance = flatten(tx.posterior(state, params).marginal_variance, params)
    torch.testing.assert_close(variance, 1 / torch.linalg.inv(exact(data)[1]).diagonal(), rtol=1e-12, atol=0)
    wider = state.replace(0, state[0]._replace(scale=tuple(s + 0.1 for s in state[0].scale)))
    moved = {k: params[k] + (s + 0.1).exp() * z for k, s, z in zip(sorted(tree), state[0].scale, noise)}
    _, by_scale = gradients_at(data, tx, params, wider, draw._replace(params=moved))
    assert min(x.min() for x in by_scale) > 1e-4  # and not zero elsewhere


@pytest.mark.slow
def test_the_mean_field_gets_there():
    """500 steps of descent on exact expectations (all sign patterns as draws): mean and 1 / Lambda_ii to 1e-8."""
    data = problem()
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    noise = (corners[:, 0], corners[:, 1:].reshape(-1, 3, 1))
    tx = bc.vi.mean_field(
        bc.sgd(0.1), temperature=1 / N, init_scale=0.1, n_samples=len(corners), scale_optimizer=bc.sgd(5.0)
    )
    params = data.start
    state = tx.init(params)
    for _ in range(1000):
        points = {k: params[k] + s.exp() * z for k, s, z in zip(sorted(params), state[0].scale, noise)}
        draw = tx.sample(state, params)._replace(params=points, noise=noise)
        grads = torch.vmap(lambda p: torch.func.grad(log_posterior_loss)(p, (data.x, data.y)))(points)
        updates, state = tx.update(grads, state, params=params, draw=draw, inplace=False)
        params = {k: params[k] + updates[k] for k in params}
    mean, covariance = exact(data)
    assert (flatten(params, params) - mean).abs().max() < 1e-8
    variance = flatten(tx.posterior(state, params).marginal_variance, params)
    torch.testing.assert_close(variance, 1 / torch.linalg.inv(covariance).diagonal(), rtol=1e-8, atol=0)


def test_the_negative_elbo_at_the_dense_optimum_is_minus_the_log_evidence():
    """Per datum; antithetic corners make the expected loss exact, so that the bound is tight to 1e-10."""
    data, tx, params, state = at_the_optimum("dense")
    lower = torch.linalg.cholesky(exact(data)[1])
    corners = math.sqrt(4) * torch.cat([torch.eye(4), -torch.eye(4)])  # a cubature of second order
    points = flatten(params, params) + corners @ lower.T
    losses = torch.stack([log_posterior_loss(data.tree(p), (data.x, data.y)) for p in points])
    constant = -0.5 * 4 * math.log(data.prior / (2 * math.pi)) / N  # the prior's normaliser, which the loss leaves out
    kernel = data.features @ data.features.T / data.prior + data.variance * torch.eye(N)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(N), kernel).log_prob(data.y[:, 0])
    assert abs(tx.negative_elbo(state, losses.mean()) + constant + evidence / N) < 1e-10
