"""A given Gaussian as prior, scales by leaf, the ELBO of a given Gaussian, and how long IVON's average remembers."""

import itertools
import math

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Cholesky, Diagonal, flatten, shape_only

from .regression import N, exact, forward, negative_log_likelihood, problem

pytestmark = pytest.mark.usefixtures("double_precision")


def halves():
    """The data in two halves, and the exact posterior of the first: the prior of the second."""
    data = problem()
    first, second = (data.x[: N // 2], data.y[: N // 2]), (data.x[N // 2 :], data.y[N // 2 :])
    features = data.features[: N // 2]
    precision = features.T @ features / data.variance + data.prior * torch.eye(4)
    mean = torch.linalg.solve(precision, features.T @ first[1][:, 0] / data.variance)
    tree = data.tree(mean)
    return second, Gaussian(tree, Cholesky(torch.linalg.cholesky(precision), shape_only(tree), torch.tensor(10.0)))


def moments(posterior):
    return flatten(posterior.mean, posterior.mean), torch.linalg.inv(posterior.precision.to_dense())


@pytest.mark.slow
def test_the_posterior_of_the_first_half_as_prior_of_the_second_gives_that_of_all():
    """Continual learning, exactly: to 1e-8 after 1,000 steps on the second half alone."""
    second, prior = halves()
    tx = bc.vi.low_rank(
        bc.adam(lambda count: 0.1 * 0.5 ** (count / 120)),
        temperature=2 / N,
        init_scale=0.1,
        n_samples=4,
        antithetic=True,
        prior=prior,
        rank=4,
    )
    step, params = bc.make_step(negative_log_likelihood, tx), prior.mean
    state = tx.init(params)
    for _ in range(1000):
        params, state, _ = step(params, state, second)
    for got, wanted in zip(moments(tx.posterior(state, params)), exact(problem())):
        assert (got - wanted).abs().max() < 1e-8
    y = second[1]
    covariance = torch.linalg.inv(prior.precision.to_dense())
    features = problem().features[N // 2 :]
    spread = features @ covariance @ features.T + problem().variance * torch.eye(N // 2)
    evidence = torch.distributions.MultivariateNormal(features @ flatten(prior.mean, prior.mean), spread).log_prob(
        y[:, 0]
    )

    def loss(params, batch):
        return negative_log_likelihood(params, batch) - 2 / N * prior.log_prob(params)

    elbo = bc.vi.negative_elbo(loss, tx.posterior(state, params), second, temperature=2 / N)
    assert abs(elbo.value + evidence * 2 / N) < 1e-8  # the bound is tight there


def diagonal_prior(mean=0.0):
    tree = optree.tree_map(lambda p: torch.full_like(p, mean), problem().start)
    return Gaussian(tree, Diagonal(optree.tree_map(lambda p: torch.full_like(p, 0.7), tree), torch.tensor(1.0)))


@pytest.mark.parametrize("name", ["ivon", "von"])
def test_a_natural_gradient_with_a_prior_about_zero_is_the_one_with_weight_decay(name):
    runs = []
    for option in ({"prior": diagonal_prior()}, {"weight_decay": 0.7 / N}):
        torch.manual_seed(0)
        tx = getattr(bc.vi, name)(0.3, temperature=1 / N, **option)
        estimate = bc.curvature.ggn(forward, bc.likelihoods.gaussian(0.25), "dense")
        step, params = bc.make_step(negative_log_likelihood, tx, curvature=estimate), problem().start
        state = tx.init(params)
        for _ in range(20):
            params, state, _ = step(params, state, (problem().x, problem().y))
        runs.append(moments(tx.posterior(state, params)))
    for a, b in zip(*runs):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_von_with_a_prior_elsewhere_finds_the_posterior_about_it():
    """Curvature is exact and antithetic draws of a quadratic leave no noise: mean and covariance to 1e-6 after 80 steps."""
    data, prior = problem(), diagonal_prior(2.0)
    tx = bc.vi.von(0.3, temperature=1 / N, betas=(0.0, 0.8), prior=prior, n_samples=2, antithetic=True)
    estimate = bc.curvature.ggn(forward, bc.likelihoods.gaussian(data.variance), "dense")
    step, params = bc.make_step(negative_log_likelihood, tx, curvature=estimate), data.start
    state = tx.init(params)
    for _ in range(80):
        params, state, _ = step(params, state, (data.x, data.y))
    precision = data.features.T @ data.features / data.variance + 0.7 * torch.eye(4)
    force = data.features.T @ data.y[:, 0] / data.variance + 0.7 * 2.0 * torch.ones(4)
    got = moments(tx.posterior(state, params))
    assert (got[0] - torch.linalg.solve(precision, force)).abs().max() < 1e-6
    assert (got[1] - torch.linalg.inv(precision)).abs().max() < 1e-6


def test_every_leaf_starts_with_its_own_scale():
    params = {"b": torch.zeros(2), "w": torch.zeros(3, 2)}
    for name, scale in itertools.product(("mean_field", "dense"), (2.0, torch.tensor([[1.0], [2.0], [3.0]]))):
        tx = getattr(bc.vi, name)(bc.adam(0.1), temperature=0.1, init_scale={"b": 0.1, "w": scale})
        variance = tx.posterior(tx.init(params), params).marginal_variance
        wanted = {"b": torch.full((2,), 0.01), "w": (scale * torch.ones(3, 2)).square()}
        torch.testing.assert_close(variance, wanted)
    torch.manual_seed(0)
    tx = bc.vi.low_rank(bc.adam(0.1), temperature=0.1, init_scale={"b": 0.1, "w": 2.0}, rank=6)
    variance = tx.posterior(tx.init(params), params).marginal_variance
    assert variance["b"].mean() < 0.05 and 1.0 < variance["w"].mean() < 8.0  # half of it is random


MAKE = {
    "mean_field": lambda **kw: bc.vi.mean_field(bc.sgd(0.1), **{"temperature": 0.1, **kw}),
    "dense": lambda **kw: bc.vi.dense(bc.sgd(0.1), **{"temperature": 0.1, **kw}),
    "ivon": lambda **kw: bc.vi.ivon(0.1, **{"temperature": 0.1, **kw}),
}
BOTH = ("mean_field", "ivon")
OTHER = Gaussian({"other": torch.zeros(2)}, Diagonal({"other": torch.ones(2)}, torch.tensor(1.0)))


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (["mean_field"], lambda: {"init_scale": {"b": 0.0, "w": 1.0}}, "init_scale is not positive at b"),
        (["dense"], lambda: {"init_scale": {"b": 1.0}}, r"vi\.dense: init_scale has the tree"),
        (BOTH, lambda: {"prior": 1.0}, r"prior must be a Gaussian, such as tx\.posterior gives, got float"),
        (BOTH, lambda: {"prior": diagonal_prior(), "weight_decay": 0.1}, "are two priors: leave one out"),
        (BOTH, lambda: {"prior": diagonal_prior(), "temperature": 0.0}, r"temperature \* Lambda = 0: use weight_decay"),
        (BOTH, lambda: {"prior": OTHER}, r"prior\.mean has the tree"),
        (["ivon"], lambda: {"prior": halves()[1]}, "precision is Cholesky, and this method takes a diagonal one"),
    ],
)
def test_scales_and_priors_that_make_no_sense_are_refused(names, options, words):
    for name in names:
        with pytest.raises((ValueError, TypeError), match=words):
            MAKE[name](**options()).init({"b": torch.zeros(2), "w": torch.zeros(3, 2)})


def test_the_elbo_of_the_posterior_is_the_log_evidence_without_error():
    """Every draw gives the same number, to 1e-12."""
    data = problem()
    mean, covariance = exact(data)
    root = torch.linalg.cholesky(torch.linalg.inv(covariance))
    posterior = Gaussian(data.tree(mean), Cholesky(root, shape_only(data.start), torch.tensor(float(N))))
    normaliser = 0.5 * 4 * math.log(data.prior / (2 * math.pi))

    def loss(params, batch):
        squares = params["w"].square().sum() + params["b"].square()
        return negative_log_likelihood(params, batch) + (0.5 * data.prior * squares - normaliser) / N, "aux"

    elbo = bc.vi.negative_elbo(loss, posterior, (data.x, data.y), temperature=1 / N, n_samples=5)
    kernel = data.features @ data.features.T / data.prior + data.variance * torch.eye(N)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(N), kernel).log_prob(data.y[:, 0])
    assert abs(elbo.value * N + evidence) < 1e-10 and elbo.standard_error < 1e-12


@pytest.mark.slow
def test_the_elbo_of_another_gaussian_is_lower_by_the_divergence():
    """Within four standard errors of the KL divergence (false alarms 6e-5, the seed is fixed), which the mean field of the
    right variances has to the correlated posterior."""
    data = problem()
    mean, covariance = exact(data)
    root = torch.linalg.cholesky(torch.linalg.inv(covariance))
    p = Gaussian(data.tree(mean), Cholesky(root, shape_only(data.start), torch.tensor(1.0)))
    q = Gaussian(p.mean, Diagonal(data.tree(1 / covariance.diagonal()), torch.tensor(1.0)))
    generator = torch.Generator().manual_seed(0)
    elbo = bc.vi.negative_elbo(
        lambda params, batch: -p.log_prob(params), q, None, temperature=1.0, n_samples=4000, generator=generator
    )
    normal = torch.distributions.MultivariateNormal
    divergence = torch.distributions.kl_divergence(
        normal(mean, torch.diag(covariance.diagonal())), normal(mean, covariance)
    )
    assert divergence > 10 * elbo.standard_error and abs(elbo.value - divergence) < 4 * elbo.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("beta2, steps", [(0.99999, 500), (1 - 5 / 1000, 1000)])
def test_ivons_first_hessian_keeps_the_weight_beta2_to_the_steps(beta2, steps):
    """On a quadratic of curvature 2, from 0.5, with as many samples as make the noise small: the average after t steps is
    ``beta2^t 0.5 + (1 - beta2^t) 2`` within five standard deviations of its noise (false alarms 6e-7)."""
    n = 400
    tx = bc.vi.ivon(0.0, temperature=0.01, betas=(0.0, beta2), init_hessian=0.5, rescale_lr=False)
    params = torch.zeros(n)
    torch.manual_seed(0)
    state = tx.init(params)
    for _ in range(steps):
        draw = tx.sample(state, params)
        _, state = tx.update(2.0 * draw.params, state, params=params, draw=draw)
    kept = beta2**steps
    wanted = kept * 0.5 + (1 - kept) * 2.0
    noise = 2.0 * math.sqrt(2 * (1 - beta2) / 2 / n)  # of h-hat = 2 z^2: variance 8
    assert abs(state[0].hessian[0].mean() - wanted) < 5 * noise + 0.5 * (1 - beta2) * 8
