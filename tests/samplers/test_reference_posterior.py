"""Eight schools (Rubin, 1981; eight_schools_noncentered of posteriordb), whose posterior of mu and tau is a quadrature.

    y_j ~ N(theta_j, s_j^2),    theta_j = mu + tau eta_j,    eta_j ~ N(0, 1),    mu ~ N(0, 5^2),    tau ~ half-Cauchy(0, 5)

and with theta integrated out y_j ~ N(mu, s_j^2 + tau^2), two numbers on a grid.
"""

import math

import pytest
import torch

import bayesopt_chain as bc

Y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
S = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def loss(p, batch):
    mu, log_tau, eta = p["mu"], p["log_tau"], p["eta"]
    tau = log_tau.exp()
    likelihood = ((Y - mu - tau * eta) / S).square().sum() / 2
    prior = eta.square().sum() / 2 + (mu / 5).square() / 2 + (1 + (tau / 5).square()).log()
    return likelihood + prior - log_tau  # the last for the density of log tau


def moments_by_quadrature():
    mu = torch.linspace(-25, 30, 551, dtype=torch.float64)[:, None, None]
    log_tau = torch.linspace(-8, 5, 1301, dtype=torch.float64)[None, :, None]
    variance = S.double().square() + (2 * log_tau).exp()
    log_p = -((Y - mu).square() / variance + variance.log()).sum(-1) / 2
    log_p = log_p - ((mu / 5).square() / 2 + (1 + (log_tau.exp() / 5).square()).log() - log_tau)[..., 0]
    weight = (log_p - log_p.max()).exp()
    weight, mu, tau = weight / weight.sum(), mu[..., 0], log_tau[..., 0].exp()
    means = [(weight * x).sum() for x in (mu, tau)]
    return [(m.item(), math.sqrt((weight * (x - m).square()).sum().item())) for m, x in zip(means, (mu, tau))]


@pytest.mark.slow
def test_chains_have_the_posterior_of_eight_schools():
    """512 chains give 15,000 effective draws, whose mean has an error of .008 deviations; .03 are allowed."""
    step = bc.make_step(loss, bc.sghmc(0.02, momentum=0.9, temperature=1.0))
    chains = bc.parallel(step, 512)
    start = {"mu": torch.zeros(512), "log_tau": torch.ones(512), "eta": torch.zeros(512, 8)}
    draws = bc.sample(chains, start, chains.init(step.tx, start, seed=0), None, steps=4000, burn_in=1000, thinning=50)
    for found, (mean, deviation) in zip((draws.params["mu"], draws.params["log_tau"].exp()), moments_by_quadrature()):
        assert abs(found.mean().item() - mean) < 0.03 * deviation
        assert abs(found.std().item() / deviation - 1) < 0.03
