"""The default's dispersion, budget and network noise against their definitions and closed forms, in float64."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods
from bayesopt_chain.posterior import evidence
from tests.posterior.conftest import trained

pytestmark = pytest.mark.usefixtures("double_precision")


N = 60


def network(outputs):
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, outputs))


def classes(steps=300, likelihood=likelihoods.categorical()):  # noqa: B008
    x = torch.randn(N, 2)
    y = (x[:, 0] + x[:, 1] > 0).long() + (x[:, 0] > 1).long()
    y = y if likelihood.name == "categorical" else y[:, None].clamp_max(likelihood.support.high).to(x)
    return trained(network(3 if y.ndim == 1 else 1), likelihood, x, y, steps), x, y


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal"])
def test_dispersion_and_prior_are_the_fixed_point_of_their_equations(structure):
    """phi to the 1 % at which the rounds end, by its definition, |y - p|^2 over 1 - |p|^2 and the degrees of freedom that are
    left; the prior is the maximum of the evidence at that phi, to 1e-4 in its logarithm."""
    net, x, y = classes()
    fitted = bc.fit_laplace(net, likelihoods.categorical(), [(x[:25], y[:25]), (x[25:], y[25:])], structure=structure)
    phi = 1 / float(fitted.likelihood_scale)
    assert phi < 0.7  # clean labels
    prior = {name: p.clone().requires_grad_() for name, p in fitted.prior_precision.items()}
    evidence = fitted.log_evidence_at(prior, fitted.likelihood_scale)
    torch.testing.assert_close(evidence.detach(), fitted.log_evidence)
    forward, kept = bc.curvature.subset(*bc.make_functional(net)[:2], "2")
    total = bc.curvature.ggn(forward, likelihoods.categorical(), structure)
    total = (
        total(kept, (x[:25], y[:25])).add(total(kept, (x[25:], y[25:]))).to_dense()
    )  # two batches, as the fit has them
    each = torch.cat([fitted.prior_precision[name].expand(p.numel()) for name, p in sorted(kept.items())])
    theta = torch.cat([p.flatten() for _, p in sorted(kept.items())])
    gamma = torch.linalg.solve(total / phi + torch.diag(each), total / phi).trace()
    p = net(x).detach().softmax(1)
    ratio = (p - nn.functional.one_hot(y, 3)).square().sum() / (1 - p.square().sum(1)).sum()
    assert float(ratio * 2 * N / (2 * N - gamma)) == pytest.approx(phi, rel=1.5e-2)
    wanted = -nn.functional.cross_entropy(net(x), y, reduction="sum") / phi  # the likelihood to the power 1 / phi
    wanted = wanted + ((each.log() - each * theta.square()).sum() - (total / phi + torch.diag(each)).logdet()) / 2
    torch.testing.assert_close(fitted.log_evidence, wanted.detach(), rtol=1e-8, atol=1e-8)
    slopes = torch.autograd.grad(evidence, list(prior.values()))
    each = [slope * p for slope, p in zip(slopes, prior.values())]
    total = [sum(each)] if structure in ("dense", "root") else each
    assert max(abs(float(t)) for t in total) < 1e-4


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("steps", "likelihood", "subset"),
    [
        (30, likelihoods.categorical(), "last_layer"),
        (2000, likelihoods.categorical(), "last_layer"),
        (1000, likelihoods.bernoulli(), "all"),
    ],
    ids=["learning", "overtrained", "yes or no"],
)
def test_averages_stay_within_the_budget_and_use_it_up_where_it_binds(steps, likelihood, subset):
    net, x, y = classes(steps, likelihood)
    fitted = bc.fit_laplace(net, likelihood, [(x, y)], subset=subset)
    q = fitted.predict(x)
    p, mean = (p.reshape(N, -1) for p in (likelihood.mean(net(x).detach()), q))
    p, mean = (torch.cat([1 - p, p], 1) if p.shape[1] == 1 else p for p in (p, mean))
    share = (p * (p / mean).log()).sum(1).mean() / (0.1 * (likelihood.nll(net(x), y).mean() + 1e-3))
    assert share <= 1 + 1e-6 and (fitted.covariance_scale == 1 or share > 0.99)
    options = dict(subset=subset, tune=None, prior_precision=fitted.prior_precision)
    whole = bc.fit_laplace(net, likelihood, [(x, y)], **options)
    assert fitted.covariance_scale < 1 or torch.equal(fitted.outputs(x).mean, whole.outputs(x).mean)
    torch.testing.assert_close(fitted.load_state_dict(fitted.state_dict()).predict(x), q)
    more = fitted.refit([(x, y)])
    assert more.covariance_scale == fitted.covariance_scale
    assert (
        more.outputs(x).covariance.diagonal(dim1=1, dim2=2) < fitted.outputs(x).covariance.diagonal(dim1=1, dim2=2)
    ).all()


def test_counts_have_a_dispersion_too():
    x = torch.randn(N, 2)
    for spread, low, high in ((0.0, 0.4, 2.0), (4.0, 2.0, 40.0)):
        rate = (1 + x[:, :1]).exp() * torch.exp(spread**0.5 * torch.randn(N, 1) / 2)
        y = torch.poisson(rate)
        net = trained(network(1), likelihoods.poisson(), x, y, 60)
        fitted = bc.fit_laplace(net, likelihoods.poisson(), [(x, y)])
        assert low < 1 / float(fitted.likelihood_scale) < high and "dispersion" in repr(fitted)


@pytest.mark.parametrize(("batches", "outputs"), [(1, 1), (4, 2)])
def test_the_noise_of_a_regression_is_that_of_the_whole_networks_degrees_of_freedom(batches, outputs):
    """v = |y - f|^2 / (N - gamma), gamma of the dense Jacobian of all parameters, delta = gamma / |theta|^2: to 1e-8, and for
    each output by itself."""
    x, unit = torch.randn(N, 2), torch.tensor([1.0, 5.0])[:outputs]
    y = unit * (torch.sin(2 * x) + 0.3 * torch.randn(N, 2))[:, :outputs]
    net = trained(network(outputs), likelihoods.gaussian(unit.square()), x, y, 300)
    fitted = bc.fit_laplace(net, likelihoods.gaussian(2.0), list(zip(x.chunk(batches), y.chunk(batches))))
    rows = jacobian(net, x).reshape(N, outputs, -1)
    every, squares = 1 / fitted.likelihood_scale * 2.0, (net(x) - y).detach().square().sum(0)
    assert every.shape == ((2,) if outputs == 2 else ())
    for o, v in enumerate(every.reshape(-1)):
        w = torch.linalg.svdvals(rows[:, o]) ** 2
        norm, delta = sum(p.detach().square().sum() for p in net.parameters()), torch.ones(())
        for _ in range(500):
            delta = (w / (w + v * delta)).sum() / norm
        gamma = (w / (w + v * delta)).sum()
        assert 5 < gamma < N / 2
        torch.testing.assert_close(v, squares[o] / (N - gamma), rtol=1e-8, atol=0)
    wanted = bc.fit_laplace(net, likelihoods.gaussian(every), [(x, y)], tune_noise=False)
    torch.testing.assert_close(fitted.log_evidence, wanted.log_evidence, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("parameters", "noise", "rows", "low", "high"),
    [
        (40, 0.5, 100, 0.99, 1.01),
        (800, 0.5, 100, 0.99, 1.01),
        (800, 0.02, 100, 1.0, 1.15),
        (800, 0.005, 200, 1.0, 1.15),
    ],
    ids=["few parameters", "resolved", "saturated", "less saturated"],
)
def test_some_data_say_the_degrees_of_freedom_of_all(parameters, noise, rows, low, high):
    """Against the dense computation on all 400: a spectrum that falls as 1 / i, in features of one random rotation. Where the
    data determine more parameters than there are rows the noise comes out a little too wide; scaled eigenvalues would have
    given a quarter and a tenth."""
    n = 400
    x = torch.randn(n, parameters) / torch.arange(1, parameters + 1)
    squares = n * noise**2 / torch.randn(parameters).square().sum()
    values = torch.linalg.eigvalsh(x @ x.T).clamp_min(0)
    exact = torch.tensor(1.0)
    for _ in range(3000):  # MacKay's fixed point, damped
        exact = (exact + (values / (values + squares / (n - exact) * exact)).sum()) / 2
    v = squares / (n - exact)
    some = torch.linalg.eigvalsh(x[:rows] @ x[:rows].T).clamp_min(0)[None]
    one = torch.ones(1)
    found = evidence._determined(some, rows * one, n * one, squares * one, parameters)
    assert low < squares / (n - found) / v < high
    whole = evidence._determined(values[None], n * one, n * one, squares * one, parameters)
    torch.testing.assert_close(whole[0], exact, rtol=1e-8, atol=0)


@pytest.mark.slow
def test_validation_takes_the_noise_that_predicts_best():
    x, new = torch.randn(N, 2), torch.randn(200, 2)
    y, held = (torch.sin(2 * z[:, :1]) + 0.3 * torch.randn(len(z), 1) for z in (x, new))
    net = trained(network(1), likelihoods.gaussian(), x, y, 1500)
    by = {
        name: bc.fit_laplace(net, likelihoods.gaussian(), [(x, y)], **options)
        for name, options in {
            "validation": {"tune": "validation", "validation": [(new, held)]},
            "evidence": {"tune_noise": "evidence"},
            "network": {},
        }.items()
    }
    score = {name: float(fit.predictive(new).log_prob(held).mean()) for name, fit in by.items()}
    assert score["validation"] >= max(score.values()) - 0.02 and score["network"] > score["evidence"]


def jacobian(module, x):
    """Of all outputs in all parameters, ``[N C, P]``."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    rows = torch.func.jacrev(lambda p: torch.func.functional_call(module, p, (x,)))(params)
    return torch.cat([r.reshape(x.shape[0] * r.shape[1], -1) for r in rows.values()], 1)


def test_a_target_that_is_left_out_counts_for_nothing_and_a_weight_of_two_as_two():
    net, x, y = classes()
    likelihood, weights = likelihoods.categorical(), torch.where(torch.arange(N) < 20, 2.0, 1.0)
    more = torch.cat([x, torch.randn(5, 2)]), torch.cat([y, torch.full((5,), -100)])
    twice = torch.cat([x, x[:20]]), torch.cat([y, y[:20]])
    pairs = [
        [(likelihood, (x, y)), (likelihood, more)],
        [(likelihoods.weighted(likelihood), (x, (y, weights))), (likelihood, twice)],
    ]
    for pair in pairs:
        one, other = (bc.fit_laplace(net, of, [data], structure="dense").likelihood_scale for of, data in pair)
        torch.testing.assert_close(one, other, rtol=1e-8, atol=0)
