"""The closed forms against automatic differentiation through the reparameterised ELBO."""

import math

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.vi._families import cholesky
from bayesopt_chain.precision import Cholesky, flatten, shape_only, unflatten

pytestmark = pytest.mark.usefixtures("double_precision")


T = 0.3
FAMILIES = {
    "mean_field": {},
    "dense": {},
    "low_rank": {"rank": 2},
}


def parameters():
    return {"b": torch.randn(2), "s": torch.randn(()), "w": torch.randn(3, 2)}


def loss(params, batch):
    hidden = torch.tanh(batch @ params["w"] + params["b"])
    return (hidden.sum(1) - params["s"]).square().mean() + 0.1 * params["w"].pow(4).sum()


def capture_gradients():
    """An optimizer that hands the gradients back: lr 1, no sign."""
    return bc.links.scale(1.0)


def mean_and_covariance(name, params, scale):
    """The reparameterised draw and log q of it, as functions of (mu, phi) and the noise, written from the definitions."""
    flat = torch.cat([params[k].reshape(-1) for k in sorted(params)])
    if name == "mean_field":
        sigma = torch.cat([s.reshape(-1) for s in scale]).exp()
        return flat, torch.diag(sigma.square()), lambda z: sigma * z[0]
    if name == "dense":
        lower = cholesky(scale[0])
        return flat, lower @ lower.T, lambda z: lower @ z[0]
    half = len(scale) // 2
    rows = torch.cat([s.reshape(s.shape[0], -1) for s in scale[:half]], 1)
    d = torch.cat([s.reshape(-1) for s in scale[half:]]).exp()
    return flat, rows.T @ rows + torch.diag(d.square()), lambda z: rows.T @ z[1] + d * z[0]


def moments_of(gaussian):
    return flatten(gaussian.mean, gaussian.mean), torch.linalg.inv(gaussian.precision.to_dense())


def noise_of(name, draw, s):
    flat = [z[s].reshape(-1) for z in draw.noise]
    if name == "mean_field":
        return [torch.cat(flat)]
    return [flat[0]] if name == "dense" else [torch.cat(flat[:-1]), flat[-1]]


def log_q(x, mean, covariance):
    lower = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(lower, (x - mean)[:, None], upper=False)
    return -0.5 * white.square().sum() - lower.diagonal().log().sum() - 0.5 * len(x) * math.log(2 * math.pi)


def some_prior():
    """A Gaussian away from zero, with correlations across leaves."""
    root = torch.randn(9, 9).tril() + 3 * torch.eye(9)
    return Gaussian(parameters(), Cholesky(root, shape_only(parameters()), torch.tensor(1.0)))


@pytest.mark.sweep(30)
@pytest.mark.parametrize("decay", [0.0, 0.7, "prior"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("sticks", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_autograd_through_the_elbo(name, sticks, samples, decay):
    """To 1e-10: along the path only when sticking the landing, else with the entropy's exact gradient."""
    gaussian = some_prior() if decay == "prior" else None
    decay = 0.0 if decay == "prior" else decay
    tx = getattr(bc.vi, name)(
        capture_gradients(),
        temperature=T,
        init_scale=0.4,
        n_samples=samples,
        stick_the_landing=sticks,
        antithetic=samples > 1,
        weight_decay=decay,
        prior=gaussian,
        **FAMILIES[name],
    )
    params, batch = parameters(), torch.randn(5, 3)
    state = tx.init(params)
    bent = tuple(s + 0.1 * torch.randn_like(s) for s in state[0].scale)  # away from the start's symmetries
    state = state.replace(0, state[0]._replace(scale=tuple(b.tril() if name == "dense" else b for b in bent)))
    draw = tx.sample(state, params)
    points = (
        [draw.params] if samples == 1 else [optree.tree_map(lambda x, s=s: x[s], draw.params) for s in range(samples)]
    )
    grads = [torch.func.grad(loss)(point, batch) for point in points]
    grads = grads[0] if samples == 1 else optree.tree_map(lambda *xs: torch.stack(xs), *grads)
    updates, new = tx.update(grads, state, params=params, draw=draw, inplace=False)
    by_scale = [b - a for a, b in zip(state[0].scale, new[0].scale)]

    mean = {k: p.clone().requires_grad_() for k, p in params.items()}
    scale = [s.clone().requires_grad_() for s in state[0].scale]
    flat, covariance, displace = mean_and_covariance(name, mean, scale)
    total = 0
    for s in range(samples):
        theta = flat + displace(noise_of(name, draw, s))
        torch.testing.assert_close(unflatten(theta, params)["w"], points[s]["w"], rtol=1e-12, atol=1e-12)
        if sticks:
            total = total + T * log_q(theta, flat.detach(), covariance.detach()) / samples
        total = total + (loss(unflatten(theta, params), batch) + 0.5 * decay * theta.square().sum()) / samples
        if gaussian is not None:
            total = total - T * log_q(theta, *moments_of(gaussian)) / samples
    if not sticks:
        total = total - T * 0.5 * torch.logdet(2 * math.pi * math.e * covariance)
    want = torch.autograd.grad(total, [*(mean[k] for k in sorted(mean)), *scale])
    got = [*(updates[k] for k in sorted(updates)), *by_scale]
    for x, y in zip(got, want, strict=True):
        assert (x - y).abs().max() < 1e-10
    average = sum(loss(point, batch) for point in points) / samples
    prior = sum(0.5 * decay * x.square().sum() for point in points for x in point.values()) / samples
    if gaussian is not None:
        prior = sum(-T * log_q(flatten(point, point), *moments_of(gaussian)) for point in points) / samples
    entropy = 0.5 * torch.logdet(2 * math.pi * math.e * covariance)
    torch.testing.assert_close(tx.negative_elbo(state, average, draw), (average + prior - T * entropy).detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_negative_elbo_is_loss_minus_temperature_times_entropy(name):
    tx = getattr(bc.vi, name)(bc.sgd(0.1), temperature=T, init_scale=0.4, **FAMILIES[name])
    params = parameters()
    state = tx.init(params)
    _, covariance, _ = mean_and_covariance(name, params, state[0].scale)
    entropy = torch.distributions.MultivariateNormal(torch.zeros(len(covariance)), covariance).entropy()
    assert abs(tx.negative_elbo(state, torch.tensor(2.0)) - (2.0 - T * entropy)) < 1e-12
    _, _, info = bc.make_step(loss, tx)(params, state, torch.randn(5, 3))
    assert abs(info.negative_elbo - tx.negative_elbo(state, info.loss)) < 1e-15


@pytest.mark.parametrize("name", FAMILIES)
def test_the_posterior_is_the_gaussian_that_is_drawn_from(name):
    """Covariance to 1e-10, and across parameters; log density against torch's own."""
    tx = getattr(bc.vi, name)(bc.sgd(0.1), temperature=T, init_scale=0.4, **FAMILIES[name])
    params = parameters()
    state = tx.init(params)
    flat, covariance, _ = mean_and_covariance(name, params, state[0].scale)
    posterior = tx.posterior(state, params)
    eye = torch.eye(len(flat))
    units = unflatten(eye, params)
    solved, roots = (flatten(f(units), params) for f in (posterior.precision.solve, posterior.precision.sqrt_solve))
    torch.testing.assert_close(solved, covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(roots.T @ roots, covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.precision.to_dense() @ covariance, eye, rtol=1e-9, atol=1e-9)
    x = {k: p + 0.1 for k, p in params.items()}
    want = log_q(flatten(x, params), flat, covariance)
    torch.testing.assert_close(posterior.log_prob(x), want, rtol=1e-10, atol=1e-10)
    variance = flatten(posterior.marginal_variance, params)
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=1e-10, atol=0)
    assert (
        abs(posterior.precision.scale(4.0).logdet() - (posterior.precision.logdet() + len(flat) * math.log(4))) < 1e-10
    )
    diagonal = flatten(posterior.precision.diag(), params)
    torch.testing.assert_close(diagonal, torch.linalg.inv(covariance).diagonal(), rtol=1e-9, atol=1e-9)


def test_the_dense_family_stays_a_cholesky_factor_and_is_never_refactorised(monkeypatch):
    """300 rough steps of Adam; no decomposition is called, the diagonal is positive throughout."""
    tx = bc.vi.dense(bc.adam(0.3), temperature=1.0)
    params = torch.zeros(4)
    state = tx.init(params)
    for name in ("cholesky", "cholesky_ex", "qr", "eigh", "svd", "inv"):

        def refuse(*args, name=name, **kwargs):
            raise AssertionError(f"{name} was called")

        monkeypatch.setattr(torch.linalg, name, refuse)
    step = bc.make_step(lambda p, batch: (p * batch).square().sum(), tx)
    for _ in range(300):
        params, state, _ = step(params, state, torch.randn(4) * 3)
        assert (cholesky(state[0].scale[0]).diagonal() > 0).all() and torch.isfinite(params).all()


def test_antithetic_draws_average_to_the_mean():
    tx = bc.vi.dense(bc.sgd(0.1), temperature=1.0, n_samples=6, antithetic=True)
    params = parameters()
    draw = tx.sample(tx.init(params), params)
    for x, p in zip(optree.tree_leaves(draw.params), optree.tree_leaves(params)):
        assert x.shape == (6, *p.shape)
        torch.testing.assert_close(x.mean(0), p, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_temperature_may_change_between_updates(name):
    """A tensor is read at every update, a schedule sees the count of updates so far: both equal a number's update."""
    params = parameters()
    dial = torch.tensor(5.0)
    ends = []
    for temperature in (0.2, dial, lambda count: 0.4 / (2 - count)):
        generator = torch.Generator().manual_seed(1)
        tx = getattr(bc.vi, name)(
            bc.links.scale(1.0), temperature=temperature, init_scale=0.4, generator=generator, **FAMILIES[name]
        )
        state = tx.init(params)
        dial.fill_(0.2)
        draw = tx.sample(state, params)
        ends.append(tx.update(draw.params, state, params=params, draw=draw, inplace=False))
        dial.fill_(5.0)
    for other in ends[1:]:
        for a, b in zip(optree.tree_leaves(ends[0]), optree.tree_leaves(other)):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
