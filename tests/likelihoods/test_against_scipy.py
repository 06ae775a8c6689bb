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
        if name in ("gaussian", "student_t", "beta"):
            close(likelihood.nll(outputs, y), -wanted.logpdf(float(value)))
        elif value >= 0 and value == value.floor() and not (name == "bernoulli" and value > 1):
            close(likelihood.nll(outputs, y), -wanted.logpmf(float(value)))
