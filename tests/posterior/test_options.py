"""Options of a fit: prior mean, temperature, the Fishers, and the word about an overfitted network."""

import warnings

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

pytestmark = pytest.mark.usefixtures("double_precision")


def case():
    module = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).eval()
    x = torch.randn(50, 2)
    return module, x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def test_a_prior_mean_moves_the_linear_gaussian_posterior_and_its_evidence():
    """The Gaussian process with that mean: posterior mean, evidence, and the maximum over prior and noise."""
    module, x, _ = case()
    y, phi = torch.randn(50, 3), torch.cat([torch.ones(50, 1), torch.tanh(module[0](x)).detach()], 1)
    mean = {"2.weight": 0.3 * torch.randn(3, 6), "2.bias": torch.tensor([1.0, -1.0, 0.5])}
    options = {"structure": "dense", "prior_mean": mean, "tune": None, "prior_precision": 0.8}
    fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(0.4), [(x, y)], **options)
    m0 = torch.cat([mean["2.bias"][None], mean["2.weight"].T])
    kernel = phi @ phi.T / 0.8 + 0.4 * torch.eye(50)
    exact = sum(torch.distributions.MultivariateNormal(phi @ m0[:, c], kernel).log_prob(y[:, c]) for c in range(3))
    torch.testing.assert_close(fitted.log_evidence, exact, rtol=1e-10, atol=1e-8)
    precision = phi.T @ phi / 0.4 + 0.8 * torch.eye(7)
    solution = torch.linalg.solve(precision, phi.T @ y / 0.4 + 0.8 * m0)
    torch.testing.assert_close(fitted.posterior.mean["2.weight"].T, solution[1:], rtol=1e-8, atol=1e-9)
    options = {"structure": "dense", "prior_mean": mean, "tune_noise": "evidence"}
    tuned = bc.fit_laplace(module, bc.likelihoods.gaussian(0.4), [(x, y)], **options)
    prior = next(iter(tuned.prior_precision.values()))
    for factor in (0.9, 1.1):
        assert tuned.log_evidence_at(prior * factor, tuned.likelihood_scale) < tuned.log_evidence
        assert tuned.log_evidence_at(prior, tuned.likelihood_scale * factor) < tuned.log_evidence


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
def test_a_temperature_scales_the_covariance_and_leaves_the_evidence(structure):
    module, x, y = case()
    options = {"structure": structure, "tune": None, "prior_precision": 2.0}
    bayes = bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], **options)
    cold = bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], temperature=0.1 / 50, **options)
    torch.testing.assert_close(cold.outputs(x).covariance, 0.1 * bayes.outputs(x).covariance)
    assert torch.equal(cold.log_evidence, bayes.log_evidence)


def test_the_fishers_are_those_of_their_estimators():
    module, x, y = case()
    forward, params, _ = bc.make_functional(module)
    options = {"subset": "all", "structure": "dense", "tune": None, "prior_precision": 2.0}
    got = bc.fit_laplace(module, bc.likelihoods.categorical(), [(x, y)], curvature="empirical_fisher", **options)
    wanted = bc.curvature.empirical_fisher(forward, bc.likelihoods.categorical(), "dense")(params, (x, y)).to_dense()
    torch.testing.assert_close(got.posterior.precision.to_dense(), wanted + 2 * torch.eye(len(wanted)))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    got = bc.fit_laplace(
        module,
        bc.likelihoods.categorical(),
        [(x, y)],
        curvature="fisher",
        samples=3,
        generator=generators[0],
        **options,
    )
    estimate = bc.curvature.fisher(forward, bc.likelihoods.categorical(), "dense", samples=3, generator=generators[1])
    torch.testing.assert_close(
        got.posterior.precision.to_dense(), estimate(params, (x, y)).to_dense() + 2 * torch.eye(len(wanted))
    )


@pytest.mark.slow
def test_an_overfitted_network_is_named_in_a_warning():
    """40 rows learned by heart: the predictive's negative log-likelihood of training data is .7 above the network's. A network
    that was stopped early, and one whose prior validation has chosen, pass without a word."""

    def data(n):
        x = 1.5 * torch.randn(n, 2)
        return x, (2 * x @ torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, -0.5]]) + 0.3 * torch.randn(n, 3)).argmax(1)

    (x, y), held = data(40), data(40)
    module = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))

    def train(steps):
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

    likelihood = bc.likelihoods.categorical()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(20)
        bc.fit_laplace(module.eval(), likelihood, [(x, y)])
    train(1500)
    with pytest.warns(UserWarning, match=r"on training data the predictive density .* the network itself 0\.00"):
        bc.fit_laplace(module, likelihood, [(x, y)], subset="all", tune_noise=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bc.fit_laplace(module, likelihood, [(x, y)], subset="all", tune="validation", validation=[held])
