"""Mean, variance, distribution function and density of each likelihood of one output, against scipy."""

import pytest
import torch
from scipy import stats

from bayesopt_chain import likelihoods

F = torch.tensor([-1.5, 0.3, 1.2], dtype=torch.float64)
MU, P = F.exp().numpy(), F.sigmoid().numpy()
COUNTS = torch.tensor([-1.0, 0.0, 0.5, 1.0, 4.0, 9.0], dtype=torch.float64)
REALS = torch.tensor([-3.0, -0.2, 0.0, 1.7], dtype=torch.float64)
SHARES = torch.tensor([0.01, 0.4, 0.99], dtype=torch.float64)
CASES = {
    "poisson": (likelihoods.poisson(), stats.poisson(MU), COUNTS),
    "negative_binomial": (likelihoods.negative_binomial(2.5), stats.nbinom(2.5, 2.5 / (2.5 + MU)), COUNTS),
    "geometric": (likelihoods.negative_binomial(1.0), stats.nbinom(1.0, 1 / (1 + MU)), COUNTS),
    "bernoulli": (likelihoods.bernoulli(), stats.bernoulli(P), COUNTS[:4]),
    "gaussian": (likelihoods.gaussian(0.7), stats.norm(F.numpy(), 0.7**0.5), REALS),
    "student_t": (likelihoods.student_t(4.5, 0.6), stats.t(4.5, F.numpy(), 0.6), REALS),
    "beta": (likelihoods.beta(3.0), stats.beta(3.0 * P, 3.0 * (1 - P)), SHARES),
    "gumbel": (
        likelihoods.custom(distribution=lambda f: torch.distributions.Gumbel(f, torch.ones_like(f))),
        stats.gumbel_r(F.numpy()),
        REALS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_likelihood_is_scipys_distribution(name):
    likelihood, wanted, values = CASES[name]
    outputs = F[:, None]  # [B, 1]

    def close(found, want):
        torch.testing.assert_close(found.reshape(-1), torch.as_tensor(want).reshape(-1), rtol=1e-9, atol=1e-12)

    close(likelihood.mean(outputs), wanted.mean())
    close(likelihood.variance(outputs), wanted.var())
    for value in values:
        y = torch.full_like(outputs, value)
        close(likelihood.cdf(outputs, y), wanted.cdf(float(value)))
        if name in ("gaussian", "student_t", "beta", "gumbel"):
            close(likelihood.nll(outputs, y), -wanted.logpdf(float(value)))
        elif value >= 0 and value == value.floor() and not (name == "bernoulli" and value > 1):
            close(likelihood.nll(outputs, y), -wanted.logpmf(float(value)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", [1e-6, 0.3, 0.999])
def test_quantiles_are_scipys_out_to_the_tails(name, level):
    likelihood, wanted, _ = CASES[name]
    found = likelihood.mixture(F[None, :, None]).quantile(level)
    torch.testing.assert_close(found.flatten(), torch.as_tensor(wanted.ppf(level)), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("name", ["poisson", "negative_binomial", "gumbel"])
def test_scores_in_single_precision_are_those_in_double(name):
    likelihood, y = CASES[name][0], torch.tensor([[0.0], [2.0], [7.0]], dtype=torch.float32)
    single, double = (likelihood.mixture(F[None, :, None].to(y).to(t)).crps(y.to(t)) for t in (y.dtype, torch.float64))
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)
