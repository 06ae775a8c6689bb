"""Variational inference: gradients against autograd, updates against their equations, and posteriors that are known."""

import itertools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torchopt
from torch import nn
from torch.distributions import MultivariateNormal

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.posterior.vi._families import cholesky
from bayesopt_chain.precision import (
    Cholesky,
    Dense,
    Diagonal,
    Root,
    flatten,
    low_rank_covariance,
    shape_only,
    unflatten,
)
from bayesopt_chain.random.stream import Variables, leaf_numbers
from bayesopt_chain.testing import assert_bitwise_equal
from bayesopt_chain.testing._laws import example_params, run, smooth_gradient
from tests.posterior.conftest import FILTERS, filter_of, moments
from tests.refusals import refused
from tests.registry import POSTERIORS
from tests.registry.samplers import COUPLED
from tests.registry.samplers import FAMILIES as ROWS_OF_FAMILIES

pytestmark = pytest.mark.usefixtures("double_precision")

T, NAN, INF = 0.3, math.nan, math.inf
F64 = {"dtype": torch.float64}
FAMILIES = ("mean_field", "dense", "low_rank")
NATURAL = ("ivon", "von")
ALL = (*FAMILIES, *NATURAL)


def make(name, first=None, **options):
    """A transformation; ``first`` is the optimizer of a family, the learning rate of the others."""
    options = {"temperature": T, **({"rank": 2} if name == "low_rank" else {}), **options}
    return getattr(bc.vi, name)((bc.sgd(0.1) if name in FAMILIES else 0.1) if first is None else first, **options)


def close(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() < tolerance, (a - b).abs().max()


# gradients of the families


def parameters():
    return {"b": torch.randn(2), "s": torch.randn(()), "w": torch.randn(3, 2)}


def loss(params, batch):
    hidden = torch.tanh(batch @ params["w"] + params["b"])
    return (hidden.sum(1) - params["s"]).square().mean() + 0.1 * params["w"].pow(4).sum()


def mean_and_covariance(name, params, scale):
    """The reparameterised draw and log q of it, as functions of (mu, phi) and the noise, written from the definitions."""
    flat = torch.cat([params[k].reshape(-1) for k in sorted(params)])
    if name == "mean_field":
        sigma = torch.cat([s.reshape(-1) for s in scale]).exp()
        return flat, torch.diag(sigma.square()), lambda z: sigma * torch.cat(z)
    if name == "dense":
        lower = cholesky(scale[0])
        return flat, lower @ lower.T, lambda z: lower @ z[0]
    half = len(scale) // 2
    rows = torch.cat([s.reshape(s.shape[0], -1) for s in scale[:half]], 1)
    d = torch.cat([s.reshape(-1) for s in scale[half:]]).exp()
    return flat, rows.T @ rows + torch.diag(d.square()), lambda z: rows.T @ z[-1] + d * torch.cat(z[:-1])


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
    options = {"init_scale": 0.4, "n_samples": samples, "stick_the_landing": sticks, "antithetic": samples > 1}
    tx = make(name, bc.links.scale(1.0), weight_decay=decay, prior=gaussian, **options)  # hands the gradients back
    params, batch = parameters(), torch.randn(5, 3)
    state = tx.init(params)
    bent = tuple(s + 0.1 * torch.randn_like(s) for s in state[0].scale)  # away from the start's symmetries
    state = state.replace(0, state[0]._replace(scale=tuple(b.tril() if name == "dense" else b for b in bent)))
    draw = tx.sample(state, params)
    points = [optree.tree_map(lambda x, s=s: x if samples == 1 else x[s], draw.params) for s in range(samples)]
    grads = optree.tree_map(lambda *xs: torch.stack(xs), *[torch.func.grad(loss)(point, batch) for point in points])
    grads = optree.tree_map(lambda x: x[0], grads) if samples == 1 else grads
    updates, new = tx.update(grads, state, params=params, draw=draw, inplace=False)

    mean = {k: p.clone().requires_grad_() for k, p in params.items()}
    scale = [s.clone().requires_grad_() for s in state[0].scale]
    flat, covariance, displace = mean_and_covariance(name, mean, scale)
    thetas = [flat + displace([z[s].reshape(-1) for z in draw.noise]) for s in range(samples)]
    close([flatten(point, params) for point in points], thetas, 1e-12)
    if samples > 1:
        torch.testing.assert_close(sum(thetas) / samples, flat, rtol=1e-14, atol=1e-14)  # antithetic
    average = sum(loss(unflatten(theta, params), batch) for theta in thetas) / samples
    prior = sum(0.5 * decay * theta.square().sum() for theta in thetas) / samples
    if gaussian is not None:
        prior = -sum(T * MultivariateNormal(*moments(gaussian)).log_prob(theta) for theta in thetas) / samples
    q = MultivariateNormal(flat.detach(), covariance.detach())
    path = sum(T * q.log_prob(theta) for theta in thetas) / samples
    entropy = 0.5 * torch.logdet(2 * math.pi * math.e * covariance)
    total = average + prior + (path if sticks else -T * entropy)
    wanted = torch.autograd.grad(total, [*(mean[k] for k in sorted(mean)), *scale])
    by_scale = [b - a for a, b in zip(state[0].scale, new[0].scale)]
    close([*(updates[k] for k in sorted(updates)), *by_scale], wanted)
    reported = tx.links[0].report(state[0], draw, average)["negative_elbo"]
    torch.testing.assert_close(reported, (average + prior - T * entropy).detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_posterior_is_the_gaussian_that_is_drawn_from(name):
    """Its moments across parameters and its density; and a step reports the loss less T times its entropy."""
    tx, params = make(name, init_scale=0.4), parameters()
    state = tx.init(params)
    flat, covariance, _ = mean_and_covariance(name, params, state[0].scale)
    posterior, q = tx.posterior(state, params), MultivariateNormal(flat, covariance)
    close(moments(posterior), (flat, covariance))
    x = {k: p + 0.1 for k, p in params.items()}
    torch.testing.assert_close(posterior.log_prob(x), q.log_prob(flatten(x, params)), rtol=1e-10, atol=1e-10)
    _, _, info = bc.make_step(loss, tx)(params, state, torch.randn(5, 3))
    assert abs(info.negative_elbo - (info.loss - T * q.entropy())) < 1e-12


def test_the_dense_family_stays_a_cholesky_factor_and_is_never_refactorised(monkeypatch):
    """300 rough steps of Adam; no decomposition is called, the diagonal is positive throughout."""
    tx, params = make("dense", bc.adam(0.3), temperature=1.0), torch.zeros(4)
    state = tx.init(params)
    for name in ("cholesky", "cholesky_ex", "qr", "eigh", "svd", "inv"):
        monkeypatch.delattr(torch.linalg, name)
    step = bc.make_step(lambda p, batch: (p * batch).square().sum(), tx)
    for _ in range(300):
        params, state, _ = step(params, state, torch.randn(4) * 3)
        assert (cholesky(state[0].scale[0]).diagonal() > 0).all() and torch.isfinite(params).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_temperature_may_change_between_updates(name):
    """A tensor is read at every update, a schedule sees the count of updates so far: both equal a number's update."""
    params, dial, ends = parameters(), torch.tensor(5.0), []
    for temperature in (0.2, dial, lambda count: 0.4 / (2 - count)):
        generator = torch.Generator().manual_seed(1)
        tx = make(name, bc.links.scale(1.0), temperature=temperature, init_scale=0.4, generator=generator)
        state = tx.init(params)
        dial.fill_(0.2)
        draw = tx.sample(state, params)
        ends.append(tx.update(draw.params, state, params=params, draw=draw, inplace=False))
        dial.fill_(5.0)
    for other in ends[1:]:
        close(*map(optree.tree_leaves, (ends[0], other)), 1e-12)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("inplace", [False, True])
def test_at_temperature_zero_a_family_is_its_optimizer_to_the_last_bit(name, inplace):
    for optimizer in (lambda: torchopt.sgd(0.1, momentum=0.9, weight_decay=0.1), lambda: torchopt.adam(0.1)):
        params, before = example_params(), torch.random.get_rng_state()
        _, want = run(optimizer(), params, smooth_gradient, 6, inplace)
        _, got = run(make(name, optimizer(), temperature=0.0), params, smooth_gradient, 6, inplace)
        assert torch.equal(before, torch.random.get_rng_state())
        assert_bitwise_equal(got, want, "updates")


# a regression of which the posterior is known

N, PRIOR, VARIANCE = 20, 0.7, 0.25
LIKELIHOOD = bc.likelihoods.gaussian(VARIANCE)
BOTH = {"b": torch.zeros((), **F64), "w": torch.zeros(3, 1, **F64)}


def regression():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    y = x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.3 + 0.5 * torch.randn(N, 1, generator=generator)
    return x, y


def features(x):
    """The Jacobian in (b, w), ``[N, 4]``."""
    return torch.cat([torch.ones(len(x), 1), x], 1)


def exact(x, y, centre=0.0):
    """Mean and covariance of the posterior under a prior about ``centre``, in optree order."""
    phi = features(x)
    covariance = torch.linalg.inv(phi.T @ phi / VARIANCE + PRIOR * torch.eye(4))
    return covariance @ (phi.T @ y[:, 0] / VARIANCE + PRIOR * centre), covariance


def gaussian_of(mean, covariance, data=N):
    root = torch.linalg.cholesky(torch.linalg.inv(covariance))
    return Gaussian(unflatten(mean, BOTH), Cholesky(root, shape_only(BOTH), torch.tensor(float(data))))


def log_evidence(x, y, mean, covariance):
    """Of data under a Gaussian prior."""
    phi = features(x)
    spread = phi @ covariance @ phi.T + VARIANCE * torch.eye(len(x))
    return MultivariateNormal(phi @ mean, spread).log_prob(y[:, 0])


def forward(params, batch):
    return batch[0] @ params["w"] + params["b"]


def negative_log_likelihood(params, batch):
    return LIKELIHOOD.nll(forward(params, batch), batch[1]).mean()


def steps(tx, batch, n, loss=negative_log_likelihood, structure=None, params=BOTH):
    """Parameters and state after ``n`` steps."""
    estimate = None if structure is None else bc.curvature.ggn(forward, LIKELIHOOD, structure)
    step, state = bc.make_step(loss, tx, curvature=estimate), tx.init(params)
    for _ in range(n):
        params, state, _ = step(params, state, batch)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [("dense", 0), ("low_rank", 0), ("low_rank", N // 2)])
def test_a_family_that_contains_the_posterior_converges_to_it(name, first):
    """To 1e-8 after 1,000 steps, since the gradient's noise vanishes with the distance, under the prior of the model or the
    posterior of the ``first`` data: continual learning, exactly. The negative ELBO there is minus the log evidence."""
    x, y = regression()
    before = (torch.zeros(4), torch.eye(4) / PRIOR) if first == 0 else exact(x[:first], y[:first])
    prior, data, rest = gaussian_of(*before, first), (x[first:], y[first:]), N - first
    adam = bc.adam(lambda count: 0.1 * 0.5 ** (count / 120))
    options = {"init_scale": 0.1, "n_samples": 4, "antithetic": True, "prior": prior}
    tx = make(name, adam, temperature=1 / rest, **options, **({"rank": 4} if name == "low_rank" else {}))
    params, state = steps(tx, data, 1000, params=prior.mean)
    posterior = tx.posterior(state, params)
    close(moments(posterior), exact(x, y), 1e-8)
    joint = lambda params, batch: negative_log_likelihood(params, batch) - prior.log_prob(params) / rest  # noqa: E731
    bounds = at_draws(joint, posterior, data, 1 / rest)
    torch.testing.assert_close(bounds, (-log_evidence(*data, *before) / rest).expand(5), rtol=0, atol=1e-8)


def at_draws(loss, posterior, batch, temperature, samples=5):
    """``loss + T log q`` at draws, whose mean is the negative ELBO."""
    draws = posterior.sample((samples,), generator=torch.Generator().manual_seed(0))
    return torch.vmap(lambda params: loss(params, batch))(draws) + temperature * posterior.log_prob(draws)


def test_the_elbo_of_the_posterior_is_the_log_evidence_without_error():
    """Every draw gives the same number, to 1e-12."""
    (x, y), normaliser = regression(), 2 * math.log(PRIOR / (2 * math.pi))

    def loss(params, batch):
        squares = params["w"].square().sum() + params["b"].square()
        return negative_log_likelihood(params, batch) + (0.5 * PRIOR * squares - normaliser) / N

    bounds = at_draws(loss, gaussian_of(*exact(x, y)), (x, y), 1 / N)
    wanted = log_evidence(x, y, torch.zeros(4), torch.eye(4) / PRIOR)
    torch.testing.assert_close(N * bounds, -wanted.expand(5), rtol=0, atol=1e-10)


def test_the_elbo_of_draws_is_the_expected_loss_less_the_entropy_within_its_standard_error():
    """Of a linear loss; 2,000 draws tell a deviation to 2 %, false alarm 1e-4 each (3.9 of them)."""
    q = Gaussian({"w": torch.ones(3)}, Diagonal({"w": torch.full((3,), 4.0)}, torch.tensor(1.0)))
    bounds = at_draws(lambda params, batch: params["w"].sum(), q, None, 0.7, samples=2000)
    of_one = 3 / 4 + 0.7**2 * 3 / 2  # of the loss, and of T log q, half a chi-square of three
    assert float(bounds.std()) == pytest.approx(of_one**0.5, rel=3.9 * 0.02)
    entropy = MultivariateNormal(torch.ones(3), torch.eye(3) / 4).entropy()
    assert abs(bounds.mean() - (3 - 0.7 * entropy)) < 3.9 * (of_one / 2000) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("sticks", [True, False])
def test_a_correlated_gaussian_over_a_network_does_not_run_away(sticks):
    """At Adam's usual rate and the default first deviations. Off-diagonals of L in units of the parameters themselves move by
    more than its diagonal there, L^-1 explodes, and within 100 steps nothing is finite."""
    x = torch.randn(200, 5)
    batch = x, x[:, :1].sin() + 0.1 * torch.randn(200, 1)
    forward, params, _ = bc.make_functional(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
    loss = lambda p, batch: (forward(p, batch) - batch[1]).square().mean() / 0.02  # noqa: E731
    tx = make("dense", bc.adam(1e-2), temperature=1 / 200, stick_the_landing=sticks)
    params, state = steps(tx, batch, 300, loss, params=params)
    assert torch.isfinite(tx.posterior(state, params).marginal_variance["0.weight"]).all()
    assert loss(params, batch) < 1.5  # 15 at the start, .5 where only noise is left


# natural gradients


def gradient(x):
    """Of a loss that is not quadratic, one number at a time."""
    return x + 0.4 * x**3 - 0.6 * math.sin(2 * x + 1)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_ivon_is_its_papers_algorithm_for_three_steps(samples, rescale):
    """Shen et al. 2024, algorithm 1, in Python floats and the paper's letters; to 1e-13."""
    lam, delta, beta1, beta2, h0, alpha = 50.0, 0.2, 0.8, 0.9, 0.5, 0.1
    options = {"rescale_lr": rescale, "n_samples": samples, "trust_radius": INF}
    tx = make("ivon", alpha, temperature=1 / lam, betas=(beta1, beta2), weight_decay=delta, init_hessian=h0, **options)
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
    before, params = torch.random.get_rng_state(), torch.tensor([0.5])
    tx = make("ivon", temperature=0.0, betas=(beta1, beta2), n_samples=samples)
    state, g, m = tx.init(params), 0.0, 0.5
    for t in (1, 2, 3):
        updates, state = tx.update(torch.tensor([gradient(m)]), state, params=params, inplace=False)
        g = beta1 * g + (1 - beta1) * gradient(m)
        m = m - 0.1 * g / (1 - beta1**t)
        params = params + updates
        assert abs(params.item() - m) < 1e-14
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["mean_field", "low_rank", *NATURAL, "diagonal", "laplace"])
def test_a_posterior_stays_when_its_parameters_are_overwritten(name):
    params, makers = parameters(), {"laplace": bc.laplace} | {f: lambda f=f: filter_of(f) for f in FILTERS}
    tx = makers.get(name, lambda: make(name))()
    state = tx.init(params)
    if name == "laplace":
        ones = Diagonal(optree.tree_map(torch.ones_like, params), torch.tensor(1.0))
        _, state = tx.update(params, state, params=params, curvature=ones, inplace=False)
    found = tx.posterior(state, params, **({"prior_precision": 1.0} if name == "laplace" else {}))
    before = optree.tree_map(torch.clone, found)
    for p in params.values():
        p.add_(1.0)
    assert_bitwise_equal(found, before, "posterior")


@pytest.mark.parametrize("name", (*FAMILIES, "ivon", "a link"))
def test_a_prior_about_the_parameters_stays_in_place(name):
    """One task after another: a step in place moves the parameters, and not the mean of the prior."""
    ends = []
    for inplace in (False, True):
        params = {k: torch.ones_like(p) for k, p in parameters().items()}
        diagonal = Diagonal({k: torch.full_like(p, 2.0) for k, p in params.items()}, torch.tensor(1.0))
        precision = diagonal if name == "ivon" else Cholesky(torch.eye(9), shape_only(params), torch.tensor(1.0))
        prior, generator = Gaussian(params, precision), torch.Generator().manual_seed(0)
        tx = bc.chain(bc.links.add_gaussian_prior(prior, n=4), bc.sgd(0.1))
        if name != "a link":
            tx = make(name, prior=prior, generator=generator)
        step, state, batch = bc.make_step(loss, tx, inplace=inplace), tx.init(params), torch.ones(5, 3)
        for _ in range(3):
            params, state, _ = step(params, state, batch)
        ends.append(params)
    close(*map(optree.tree_leaves, ends), 1e-12)


@pytest.mark.parametrize("name", (*FAMILIES, "ivon"))
def test_at_temperature_zero_gradients_of_several_samples_are_their_mean(name):
    """With a decay too: for at temperature 0 the decay is the optimizer's own."""
    params, many = torch.tensor([0.5, -1.0]), torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    tx = make(name, temperature=0.0, weight_decay=0.25, n_samples=2)
    found, _ = tx.update(many, tx.init(params), params=params, inplace=False)
    wanted, _ = tx.update(many.mean(0), tx.init(params), params=params, inplace=False)
    assert torch.equal(found, wanted) and not torch.equal(found, torch.zeros(2))


def test_ivons_step_is_clipped():
    tx, params = make("ivon", 1.0, temperature=0.0, clip_radius=0.25), torch.zeros(2)
    updates, _ = tx.update(torch.tensor([3.0, -0.1]), tx.init(params), params=params, inplace=False)
    torch.testing.assert_close(updates, torch.tensor([-0.25, 0.1]))


def test_ivon_survives_a_temperature_that_comes_to_zero():
    """Where there is no noise there is no estimate of curvature: the Hessian stays, the mean goes on."""
    dial, params = torch.tensor(0.1), torch.tensor([1.0, 2.0])
    tx = make("ivon", temperature=dial, betas=(0.0, 0.5))
    state = tx.init(params)
    for value in (0.1, 0.0):
        dial.fill_(value)
        before, draw = state[0].hessian[0], tx.sample(state, params)
        updates, state = tx.update(3 * draw.params, state, params=params, draw=draw, inplace=False)
    assert torch.equal(draw.params, params) and torch.equal(state[0].hessian[0], before)
    torch.testing.assert_close(updates, -0.1 * 3 * params / before)
    dial.fill_(0.1)
    broken = {"params": params, "draw": tx.sample(state, params), "inplace": False}
    _, state = tx.update(torch.full((2,), NAN), state, **broken)
    assert state[0].hessian[0].isnan().all()  # a broken gradient is not hidden


@pytest.mark.parametrize("name", NATURAL)
def test_a_step_stays_within_the_trust_radius_and_is_newtons_inside(name):
    """A quadratic of curvature 1e6 begun with a Hessian of 1; the bound in deviations of the posterior after the step."""
    params, batch, sizes = torch.ones(3), (torch.ones(4, 3), torch.zeros(4, 3)), {}
    curvature = bc.curvature.ggn(lambda p, batch: batch[0] * p, bc.likelihoods.gaussian(1e-6), "diagonal")
    loss = lambda p, batch: (batch[0] * p).square().mean() / 2e-6  # noqa: E731
    for radius in (0.5, None, INF):
        tx = make(name, temperature=1 / 4, trust_radius=radius, generator=torch.Generator().manual_seed(0))
        step = bc.make_step(loss, tx, curvature=curvature if name == "von" else None)
        moved, state, _ = step(params, tx.init(params), batch)
        ratio = (moved - params).abs() / tx.posterior(state, moved).marginal_variance.sqrt()
        sizes[radius] = ratio.max() if name == "ivon" else ratio.square().mean().sqrt()
    default = 1.0 if name == "ivon" else 10.0
    assert sizes[0.5] <= 0.5 * (1 + 1e-9) and sizes[None] <= default * (1 + 1e-9)
    assert sizes[0.5] < sizes[None] <= sizes[INF] > default


@pytest.mark.sweep(1)
@pytest.mark.parametrize("structure", ["dense", "root", "low_rank", "kronecker", "diagonal"])
def test_one_full_step_of_von_solves_a_regression_in_every_structure(structure):
    """lr 1, betas (0, 0), one antithetic pair: mean and posterior are exact to 1e-10 (the structure's own part of it). Newton's
    step with the diagonal of the Hessian is halved and repeated."""
    x, y = (z - z.mean(0) for z in regression())  # so that bias and weights are uncorrelated, as blocks have it
    lr, n = (0.5, 400) if structure == "diagonal" else (1.0, 1)
    options = {"weight_decay": PRIOR / N, "n_samples": 2, "antithetic": True}
    tx = make("von", lr, temperature=1 / N, betas=(0.0, 0.0), **options)
    params, state = steps(tx, (x, y), n, structure=structure)
    mean, covariance = exact(x, y)
    got, wanted = tx.posterior(state, params).precision.to_dense(), torch.linalg.inv(covariance)
    if structure == "diagonal":
        got, wanted = got.diagonal(), wanted.diagonal()
    close((flatten(params, params), got), (mean, wanted))


def test_von_averages_curvature_and_corrects_its_momentum():
    """Two steps on one parameter against the equations, to 1e-13."""
    lam, delta, beta1, beta2, h0, lr = 30.0, 0.1, 0.6, 0.7, 2.0, 0.3
    tx = make("von", lr, temperature=1 / lam, betas=(beta1, beta2), weight_decay=delta, init_hessian=h0)
    params = torch.tensor([0.8])
    state = tx.init(params)
    m, h, v = 0.8, h0, 0.0
    for t, (total, count) in enumerate([(6.0, 4.0), (10.0, 5.0)], start=1):
        draw = tx.sample(state, params)
        theta = m + draw.noise[0][0].item() / math.sqrt(lam * (h + delta))
        assert abs(draw.params.item() - theta) < 1e-13
        given = {"draw": draw, "curvature": Diagonal(torch.tensor([total]), torch.tensor(count))}
        updates, state = tx.update(torch.tensor([gradient(theta)]), state, params=params, inplace=False, **given)
        params = params + updates
        v = beta1 * v + (1 - beta1) * gradient(theta)
        h = beta2 * h + (1 - beta2) * total / count
        m = m - lr * (v / (1 - beta1**t) + delta * m) / (h + delta)
        assert abs(params.item() - m) < 1e-13
    assert abs(tx.posterior(state, params).marginal_variance.item() - 1 / (lam * (h + delta))) < 1e-14


def test_von_in_place_writes_into_its_precision():
    ends, estimate = [], bc.curvature.ggn(forward, LIKELIHOOD, "dense")
    for inplace in (False, True):
        tx = make("von", 0.5, temperature=1 / N, generator=torch.Generator().manual_seed(0))
        step = bc.make_step(negative_log_likelihood, tx, curvature=estimate, inplace=inplace)
        params, state, _ = step(optree.tree_map(torch.clone, BOTH), tx.init(BOTH), regression())
        matrix = state[0].hessian.matrix  # from here on the structure is the increments'
        for _ in range(4):
            params, state, _ = step(params, state, regression())
        assert (state[0].hessian.matrix is matrix) == inplace
        ends.append((params, state[0].hessian.matrix))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def diagonal_prior(mean=0.0):
    tree = optree.tree_map(lambda p: torch.full_like(p, mean), BOTH)
    return Gaussian(tree, Diagonal(optree.tree_map(lambda p: torch.full_like(p, PRIOR), tree), torch.tensor(1.0)))


@pytest.mark.parametrize("name", NATURAL)
def test_a_natural_gradient_with_a_prior_about_zero_is_the_one_with_weight_decay(name):
    runs = []
    for option in ({"prior": diagonal_prior()}, {"weight_decay": PRIOR / N}):
        torch.manual_seed(0)
        tx = make(name, 0.3, temperature=1 / N, **option)
        params, state = steps(tx, regression(), 20, structure="dense")
        runs.append(moments(tx.posterior(state, params)))
    close(*runs)


@pytest.mark.slow
def test_von_with_a_prior_elsewhere_finds_the_posterior_about_it():
    """Curvature is exact and antithetic draws of a quadratic leave no noise: mean and covariance to 1e-6 after 80 steps."""
    options = {"betas": (0.0, 0.8), "prior": diagonal_prior(2.0), "n_samples": 2, "antithetic": True}
    tx = make("von", 0.3, temperature=1 / N, **options)
    params, state = steps(tx, regression(), 80, structure="dense")
    close(moments(tx.posterior(state, params)), exact(*regression(), centre=2.0), 1e-6)


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ivon_on_an_adapter_learns_its_posterior():
    """The recipe of ``docs/howto/ivon.md``, run as it stands: the loss falls, the base network is left alone, and the Hessian
    has let go of its first value in every tensor."""
    torch.set_default_dtype(torch.float32)
    pytest.importorskip("peft")
    page = (Path(__file__).parents[2] / "docs/howto/ivon.md").read_text()
    code = re.search(r"## On a LoRA adapter.*?```python\n(.*?)```", page, re.S)
    assert code is not None
    space: dict[str, Any] = {}
    exec(compile(code[1], "docs/howto/ivon.md", "exec"), space)
    params, state, draws = space["params"], space["state"], space["draws"]
    assert all("lora_" in name for name in params) and len(params) == 4
    loss = lambda p: (space["forward"](p, (space["x"], None)) - space["y"]).square().mean() / 2  # noqa: E731
    zero = {name: p if "lora_A" in name else torch.zeros_like(p) for name, p in params.items()}
    assert loss(params) < loss(zero)
    assert all((h > 0).all() and (h - 0.1).abs().mean() > 0.01 for h in state[0].hessian)
    assert all(p.isfinite().all() and p.shape[0] == 20 for p in draws.values())


# streams, dtypes, pickles


def philox(state, path, shape, draws=1):
    ((z,),) = Variables(leaf_numbers((path,))).draw(state.key, state.step, [torch.empty(1, draws, *shape)])
    return z


WIDE = {"b": torch.zeros(3, **F64), "w": torch.zeros(2, 3, **F64)}


@pytest.mark.parametrize("name", [name for name in ALL if name != "dense"])
def test_the_noise_of_a_leaf_is_a_function_of_its_path_from_the_root(name):
    tx = make(name)
    state = tx.init(WIDE)
    for z, (key, p) in zip(tx.sample(state, WIDE).noise, WIDE.items()):
        assert torch.equal(z, philox(state[0], f"['{key}']", p.shape))


@pytest.mark.parametrize("name", ["mean_field", "low_rank", "ivon", "von"])
def test_behind_a_mask_a_step_takes_its_gradient_at_the_draw_of_sample(name):
    link, seen = make(name), []
    tx = bc.chain(bc.masked(link, {"b": False, "w": True}))

    def loss(p, batch):
        seen.append(p["w"].detach().clone())
        return p["w"].square().sum()

    state = tx.init(WIDE)
    draw = link.sample(state, {"w": WIDE["w"]})
    assert torch.equal(draw.noise[0], philox(state[0], "['w']", (2, 3)))
    estimate = (lambda p, batch: Diagonal({"b": (), "w": torch.ones(2, 3)}, ONE)) if name == "von" else None
    bc.make_step(loss, tx, curvature=estimate)(WIDE, state, torch.zeros(1))
    assert torch.equal(seen[0], draw.params["w"])


def test_every_leaf_starts_with_its_own_scale():
    params = {"b": torch.zeros(2), "w": torch.zeros(3, 2)}
    for name, scale in itertools.product(("mean_field", "dense"), (2.0, torch.tensor([[1.0], [2.0], [3.0]]))):
        tx = make(name, init_scale={"b": 0.1, "w": scale})
        variance = tx.posterior(tx.init(params), params).marginal_variance
        torch.testing.assert_close(variance, {"b": torch.full((2,), 0.01), "w": (scale * torch.ones(3, 2)).square()})
    tx = make("low_rank", init_scale={"b": 0.1, "w": 2.0}, rank=6)
    state = tx.init(params)
    variance = tx.posterior(state, params).marginal_variance
    assert variance["b"].mean() < 0.05 and 1.0 < variance["w"].mean() < 8.0  # half of it is random
    zero = state[0]._replace(step=torch.zeros((), dtype=torch.int64))  # the directions are the draws of count 0
    ratio = state[0].scale[1] / philox(zero, "['w']", (3, 2), 6)
    torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))


@pytest.mark.parametrize("row", [row for row in POSTERIORS if set(COUPLED) <= set(row.skip)], ids=str)
def test_a_missing_gradient_moves_nothing_of_its_leaf_in_a_joint_state_either(row):
    tx, params = row.build(T), example_params()
    state = tx.init(params)
    updates, state = tx.update({**smooth_gradient(params), "scale": None}, state, params=params, inplace=False)
    assert updates["scale"] is None and torch.isfinite(updates["weight"]).all()
    again, _ = tx.update(smooth_gradient(params), state, params=params, inplace=False)
    assert all(torch.isfinite(u).all() for u in optree.tree_leaves(again))


@pytest.mark.parametrize("name", [n for n in ROWS_OF_FAMILIES if "schedule" not in n and "torchopt" not in n])
def test_a_transformation_pickles_and_compares(name):
    """Not with a lambda, nor with a closure of TorchOpt, which do not pickle."""
    tx, params = ROWS_OF_FAMILIES[name](T), example_params()
    twin, state = pickle.loads(pickle.dumps(tx)), tx.init(params)
    assert type(twin) is type(tx) and repr(twin) == repr(tx)
    assert_bitwise_equal(twin.sample(state, params).params, tx.sample(state, params).params)


@pytest.mark.parametrize("row", [row for row in POSTERIORS if row.namespace in ("vi", "ekf")], ids=str)
def test_parameters_of_several_dtypes_keep_them(row):
    """A float32 matrix, a float64 vector and a float32 number in one tree: updates, state and posterior."""
    torch.set_default_dtype(torch.float32)
    tx, params = row.build(T), {"bias": torch.ones(2, **F64), "scale": torch.ones(()), "weight": torch.ones(2, 2)}
    dtypes, state = {k: p.dtype for k, p in params.items()}, tx.init(params)
    before = [x.dtype for x in optree.tree_leaves(state)]
    for _ in range(3):
        updates, state = tx.update(optree.tree_map(torch.ones_like, params), state, params=params, inplace=False)
        assert {k: u.dtype for k, u in updates.items()} == dtypes
    assert [x.dtype for x in optree.tree_leaves(state)] == before
    if row.namespace == "vi" and row.name in ROWS_OF_FAMILIES:
        draws = ROWS_OF_FAMILIES[row.name](T).posterior(state, params).sample((2,))
        assert {k: d.dtype for k, d in draws.items()} == dtypes


@pytest.mark.parametrize("name", [*ALL, *(f"ekf.{name}" for name in FILTERS)])
@pytest.mark.parametrize("has_prior", [False, True])
def test_behind_a_mask_a_posterior_is_that_of_the_selected_leaves_alone(name, has_prior):
    """To the last bit: mean, density and variances, under a prior over these leaves too."""
    every, found = {"b": torch.randn(2), "s": torch.randn(()), "w": torch.randn(3, 2)}, []
    some = {k: every[k] for k in ("b", "w")}
    prior = Gaussian(some, Diagonal(optree.tree_map(torch.ones_like, some), torch.tensor(1.0))) if has_prior else None
    filtered, square = name.startswith("ekf"), lambda p: optree.tree_map(torch.square, p)
    curvature = {"curvature": Root({k: p[None] for k, p in some.items()}, torch.tensor(1.0))} if filtered else {}
    curvature = {"curvature": Diagonal(square(some), torch.tensor(1.0))} if name == "von" else curvature
    for params, mask in ((every, {"b": True, "s": False, "w": True}), (some, True)):
        generator = torch.Generator().manual_seed(1)
        link: Any = filter_of(name[4:], prior=prior) if filtered else make(name, prior=prior, generator=generator)
        tx, at = bc.masked(link, mask), some
        state = tx.init(params)
        for _ in range(3):
            draw = {} if filtered else {"draw": link.sample(state, at)}
            updates, state = tx.update(params, state, params={**params, **at}, inplace=False, **draw, **curvature)
            at = {k: p + updates[k] for k, p in at.items()}
        q = link.posterior(state, at)
        found.append([at, q.log_prob(some), q.marginal_variance, q.sample((2,), generator=generator)])
    assert_bitwise_equal(*found)


# refusals

SOME, ONE = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, torch.tensor(1.0)
ONES = Diagonal({name: torch.ones_like(p) for name, p in SOME.items()}, ONE)
LAST_NEGATIVE = {"w": torch.ones(2, 3), "b": torch.tensor([1.0, -0.1])}
LAST_NAN = {"w": torch.ones(2, 3), "b": torch.tensor([1.0, NAN])}
NO_REALS = {"n": torch.zeros(2, dtype=torch.int64)}
OTHERS, ROWS = {**SOME, "b": torch.ones(3)}, Root({k: p[None] for k, p in SOME.items()}, ONE)
LIKE = {"b": torch.zeros(2), "w": torch.zeros(3, 2)}
OTHER = Gaussian({"other": torch.zeros(2)}, Diagonal({"other": torch.ones(2)}, torch.tensor(1.0)))
REFUSED = (ValueError, TypeError)


@pytest.mark.parametrize("name", ALL)
def test_an_update_takes_the_draw_of_its_own_state_and_a_gradient_for_each_sample(name):
    """A draw that is missing, that is none, from another run's state, and from this run's before the last update."""
    tx, more = make(name), {"curvature": ONES} if name == "von" else {}
    state, other = tx.init(SOME), tx.init(SOME)
    draw = tx.sample(state, SOME)
    update = lambda at, **k: tx.update(SOME, at, params=SOME, inplace=False, **k, **more)[1]  # noqa: E731
    for at, options, words in (
        (state, {}, r"no draw: call draw = tx\.sample"),
        (state, {"draw": SOME}, "got draw=dict"),
        (other, {"draw": draw}, "comes from another state"),
        (update(state, draw=draw), {"draw": draw}, "comes from another state"),
    ):
        with pytest.raises(ValueError, match=words):
            update(at, **options)
    tx = make(name, n_samples=3)
    state = tx.init(SOME)
    with pytest.raises(ValueError, match=r"has shape \(2,\), not \(3, 2\): take one gradient at each of the 3"):
        update(state, draw=tx.sample(state, SOME))


@pytest.mark.parametrize("name", FAMILIES)
def test_optimizers_that_decay_weights_and_samplers_are_refused(name):
    for optimizer, words in (
        (bc.adamw(1e-2), "the optimizer has weight decay"),
        (bc.sgd(1e-2, weight_decay=1e-3), "the optimizer has weight decay"),
        (torchopt.adam(1e-2, weight_decay=1e-3), "the optimizer has weight decay"),
        (bc.sgld(1e-2, temperature=1e-3), "the optimizer adds noise"),
        (bc.adam(1e-2, temperature=1e-3), "the optimizer adds noise"),
    ):
        with pytest.raises(ValueError, match=words):
            make(name, optimizer).init(SOME)
    before = torch.random.get_rng_state()
    for optimizer in (bc.adam(1e-2), torchopt.sgd(1e-2, momentum=0.9), torchopt.rmsprop(1e-2)):
        make(name, optimizer, generator=torch.Generator().manual_seed(0)).init(SOME)
        assert torch.equal(before, torch.random.get_rng_state())
    make(name, bc.adamw(1e-2), temperature=0.0).init(SOME)  # there it is that optimizer


OPTIONS = [
    *((ALL, {"temperature": x}, "temperature") for x in (-0.1, NAN, INF, torch.tensor(-1.0))),
    (ALL, {"n_samples": 0}, "n_samples must"),
    (ALL, {"n_samples": 3, "antithetic": True}, "come in pairs"),
    *((FAMILIES, {"init_scale": x}, "init_scale must be a positive") for x in (0.0, -1.0, NAN)),
    *((NATURAL, {"init_hessian": x}, "init_hessian must be a positive") for x in (0.0, -1.0, NAN)),
    (ALL, {"weight_decay": -0.1}, "weight_decay must be a non-negative"),
    *((NATURAL, {"betas": x}, "betas must be two") for x in ((1.0, 0.9), (0.9, 1.1), (-0.1, 0.9), (0.9,))),
    (NATURAL, {"trust_radius": 0.0}, r"trust_radius must be a number in \(0, inf\]"),
    (NATURAL, {"first": -0.1}, "lr must"),
    *((("low_rank",), {"rank": r}, "rank must") for r in (0, -1, 1.5)),
    (("low_rank",), {"rank": 9}, "above the number of parameters, 8"),
    (("mean_field",), {"first": torch.optim.SGD}, "must be a gradient transformation"),
    (("mean_field",), {"scale_optimizer": 0.1}, "scale_optimizer"),
    (("mean_field",), {"init_scale": {"b": 0.0, "w": 1.0}}, "init_scale is not positive at b"),
    (("dense",), {"init_scale": {"b": 1.0}}, r"vi\.dense: init_scale has the tree"),
    (ALL, {"prior": 1.0}, r"prior must be a bc\.Gaussian posterior, or None, got 1\.0"),
    (ALL, {"prior": diagonal_prior(), "weight_decay": 0.1}, "are two priors: leave one out"),
    (ALL, {"prior": diagonal_prior(), "temperature": 0.0}, r"temperature \* Lambda = 0: use weight_decay"),
    (ALL, {"prior": OTHER}, r"prior\.mean has the tree"),
    (
        NATURAL,
        {"prior": Gaussian(LIKE, Cholesky(torch.eye(8), shape_only(LIKE), ONE))},
        "Cholesky, and this method",
    ),
]
OF_FILTERS = [
    *(({"prior_precision": x}, "prior_precision must be a positive, fin") for x in (0.0, -1.0, NAN, INF)),
    *(({"transition_noise": x}, "transition_noise must") for x in (-1.0, NAN, INF)),
    *(({"lr": x}, r"lr.* must") for x in (-1.0, NAN, INF)),
    *(({"forgetting": x}, "forgetting must be a number in") for x in (0.0, 1.1, -0.5)),
    ({"prior_precision": LAST_NEGATIVE}, "not positive at b"),
    *(({"transition_noise": q}, "transition_noise is negative or not fin.* at b") for q in (LAST_NEGATIVE, LAST_NAN)),
]


def posterior(tx, state=None, at=SOME):
    return tx.posterior(tx.init(SOME) if state is None else state, at)


def after_an_update(tx, **more):
    state = tx.init(SOME)
    return tx.update(SOME, state, params=SOME, draw=tx.sample(state, SOME), inplace=False, **more)[1]


def of_another_structure():
    tx, dense = make("von"), Dense(torch.eye(8), shape_only(SOME), ONE)
    state = after_an_update(tx, curvature=ONES)
    return tx.update(SOME, state, params=SOME, draw=tx.sample(state, SOME), inplace=False, curvature=dense)


def observe(*given):
    return bc.ekf.observe(lambda p, batch: batch[0] @ p["b"], *given)


def lanes():
    tx = make("mean_field")
    state, stacked = tx.init(SOME), {k: torch.stack([p, p]) for k, p in SOME.items()}
    return torch.vmap(lambda p: tx.sample(state, p).params)(stacked)


test_calls_that_make_no_sense = refused(
    [
        *(
            (lambda name=name, options=options: make(name, **options).init(LIKE), words)
            for names, options, words in OPTIONS
            for name in names
        ),
        *(
            (lambda name=name, options=options: filter_of(name, **options).init(SOME), words)
            for options, words in OF_FILTERS
            for name in FILTERS
        ),
        *((lambda r=r: filter_of("low_rank", rank=r), "rank must") for r in (0, -1, 1.5)),
        (lambda: filter_of("low_rank", rank=9).init(SOME), "above the number of parameters, 8"),
        *((lambda f=f: posterior(make(f, temperature=0.0)), "at temperature=0 there is no post") for f in ALL),
        *((lambda tx=tx: tx.init(NO_REALS), "only real floating-point") for tx in (make("ivon"), bc.ekf.dense())),
        *(
            (lambda tx=tx: tx.init(torch.eye(2).to_sparse()), "dense layout")
            for tx in (make("ivon"), bc.ekf.diagonal())
        ),
        (
            lambda: bc.vi.mean_field(bc.adam(0.1), temperature=0.1).init(torch.ones(2).half()),
            "an eps such as 1e-8 rounds to 0",
        ),
        *((lambda tx=tx: tx.init({}), "no leaves") for tx in (make("mean_field"), bc.ekf.dense())),
        (
            lambda: make("mean_field").sample(bc.sgd(0.1).init(SOME), SOME),
            r"holds 0 states of vi\.mean_field",
        ),
        (lambda: posterior(make("ivon"), 2 * make("ivon").init(SOME)), "holds 2 states"),
        (lambda: posterior(make("dense"), at={"w": SOME["w"]}), "the state is over parameters of 8"),
        (lambda: after_an_update(make("von")), "got curvature=NoneType"),
        (of_another_structure, "the first increment decides the structure"),
        *((lambda f=f: bc.make_step(lambda p, b: p["w"].sum(), filter_of(f)), "needs curvature") for f in FILTERS),
        *(
            (lambda tx=tx: tx.update(OTHERS, tx.init(SOME), params=SOME, curvature=ROWS), "leaf 0")
            for tx in map(filter_of, FILTERS)
        ),
        (lambda: observe(-1.0), r"likelihood must be one of bc\.likelihoods, called, or a variance"),
        (lambda: observe(bc.likelihoods.gaussian), r"likelihood must be one of bc\.likelihoods, called, or a variance"),
        (lambda: observe()(LAST_NAN, (torch.ones(3, 2).float(), torch.ones(3, 1))), "reshape the targets"),
        (lambda: low_rank_covariance(torch.tensor([1.0, -1]), torch.ones(1, 2), ONE), r"singular.*\(a variance\)"),
        (lambda: low_rank_covariance(torch.ones(2), torch.ones(1, 2), ONE).add_diagonal(1.0), "cannot take up further"),
        (
            lambda: bc.make_step(lambda p, b: p["w"].sum(), bc.chain(make("mean_field"), make("ivon"))),
            "2 links of this chain draw",
        ),
        *(  # a sampler's noise and a posterior in one chain have no common meaning
            (lambda tx=tx: bc.chain(tx, bc.inject_langevin_noise(0.1)).init(SOME), "give")
            for tx in (make("mean_field"), make("ivon"), bc.ekf.diagonal())
        ),
        *(  # in front it would move the mean and not the covariance, behind it would keep the mean from where it belongs
            (lambda tx=tx: tx.init(SOME), r"would change the mean, and the covariance would not follow; .*prior=")
            for tx in (
                bc.chain(bc.links.add_decayed_weights(0.1), make("mean_field")),
                bc.chain(bc.links.add_gaussian_prior({"w": 1.0, "b": 2.0}, n=4), make("ivon")),
                bc.chain(bc.add_momentum(0.9), make("dense")),
                bc.chain(make("von"), bc.scale_by_neg_lr(0.1)),
                bc.chain(bc.ekf.diagonal(), bc.scale_by_neg_lr(0.1)),
                bc.chain(bc.skip_nonfinite(bc.ekf.dense()), bc.scale_by_neg_lr(0.1)),
                bc.chain(bc.links.add_decayed_weights(0.1), bc.skip_nonfinite(make("ivon"))),
            )
        ),
        (
            lambda: bc.make_step(lambda p, b: p["w"].sum(), tx := make("ivon"))(LAST_NAN, tx.init({"w": ONE}), ONE),
            "the state is over parameters of",
        ),
        (lanes, "every lane would get the same noise"),
    ],
    error=REFUSED,
)


def test_draws_that_round_to_their_mean_are_said():
    tx, narrow = bc.vi.mean_field(bc.sgd(0.1), temperature=1e-6, init_scale=1e-3), {"w": torch.ones(8).bfloat16()}
    with pytest.warns(UserWarning, match=r"a draw of vi.mean_field.*\['w'\] in torch.bfloat16 round to their mean"):
        tx.sample(tx.init(narrow), narrow)
    tx = bc.ekf.diagonal(prior_precision=1e6)  # of a deviation below the resolution of the mean
    with pytest.warns(UserWarning, match=r"a deviation of ekf.diagonal.*most entries of \['w'\]"):
        tx.posterior(tx.init(narrow), narrow)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["ivon", "von", "mean_field", "dense", "low_rank", "ekf.dense", "ekf.diagonal", "ekf.low_rank"]
)
def test_16_bit_parameters_have_the_posterior_of_float32_to_the_rounding_of_their_mean(name, dtype):
    """Steps of a log deviation and of a Hessian that remembers 1,000 updates are below the resolution of bfloat16."""
    x, means, variances = torch.randn(32, 3).to(dtype), [], []

    def forward(p, b):
        return b[0] @ p["w"]

    for d in (torch.float32, dtype):
        batch, generator = (x.to(d), x.to(d).sum(1, keepdim=True)), torch.Generator().manual_seed(1)
        options: Any = {"temperature": 1 / 32, "generator": generator}
        curvature = bc.ekf.observe(forward) if "ekf" in name else None
        if "ekf" in name:
            kind = name.removeprefix("ekf.")
            tx: Any = getattr(bc.ekf, kind)(transition_noise=0.01, **({"rank": 2} if kind == "low_rank" else {}))
        elif name in ("ivon", "von"):
            tx = getattr(bc.vi, name)(0.1, betas=(0.9, 0.999), weight_decay=1 / 32, **options)
            curvature = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "dense") if name == "von" else None
        else:
            tx = getattr(bc.vi, name)(bc.adam(1e-2, eps=1e-4), **options, **({"rank": 2} if name == "low_rank" else {}))
        loss = None if "ekf" in name else lambda p, b: (forward(p, b) - b[1]).square().mean() / 2
        step = bc.make_step(loss, tx, **({} if curvature is None else {"curvature": curvature}))
        params = {"w": torch.zeros(3, 1, dtype=d)}
        state = tx.init(params)
        for _ in range(30):
            params, state, _ = step(params, state, batch)
        q = tx.posterior(state, params)
        assert params["w"].dtype == d and q.sample((2,), generator=generator)["w"].isfinite().all()
        means.append(params["w"].float())
        variances.append(q.marginal_variance["w"].float())
    torch.testing.assert_close(means[1], means[0], rtol=0.1, atol=0.02)
    torch.testing.assert_close(variances[1], variances[0], rtol=0.1, atol=0)
