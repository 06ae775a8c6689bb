"""Two models of posteriordb whose posterior is a quadrature of few numbers, because the others can be integrated out.

    eight_schools_noncentered   Rubin, 1981; theta_j integrated out, mu and log tau on a grid
    dugongs                     Ratkowsky, 1983; a growth curve, alpha and beta Gaussian, lambda and log tau on a grid

Every model is written over numbers of order one (``a`` for ``alpha = 2.65 + 0.07 a``), as one would scale it for any sampler.
Chains are compared in units of the exact deviation: 256 chains of 60 draws, thinned by 40 steps, hold at least 7,000 effective
ones for a mean, whose error is then .012 deviations, that of a deviation .009; .05 are allowed, four times either, which is an
alarm once in ten thousand seeds for each of the 12 comparisons, and includes what the rate heats (less than .01).
"""

import pytest
import torch

import bayesopt_chain as bc

SCHOOLS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
# fmt: off
AGE = torch.tensor([1.0, 1.5, 1.5, 1.5, 2.5, 4.0, 5.0, 5.0, 7.0, 8.0, 8.5, 9.0, 9.5, 9.5, 10.0, 12.0, 12.0, 13.0, 13.0, 14.5,
                    15.5, 15.5, 16.5, 17.0, 22.5, 29.0, 31.5])
LENGTH = torch.tensor([1.80, 1.85, 1.87, 1.77, 2.02, 2.27, 2.15, 2.26, 2.47, 2.19, 2.26, 2.40, 2.39, 2.41, 2.50, 2.32, 2.32,
                       2.43, 2.47, 2.56, 2.65, 2.47, 2.64, 2.56, 2.70, 2.72, 2.57])
# fmt: on


def eight_schools(p):
    """y_j ~ N(mu + tau eta_j, s_j^2), eta_j ~ N(0, 1), mu ~ N(0, 5^2), tau ~ half-Cauchy(0, 5)."""
    mu, log_tau, eta = p["mu"], p["log_tau"], p["eta"]
    tau = log_tau.exp()
    likelihood = ((SCHOOLS - mu - tau * eta) / ERRORS).square().sum() / 2
    prior = eta.square().sum() / 2 + (mu / 5).square() / 2 + (1 + (tau / 5).square()).log()
    return likelihood + prior - log_tau  # the last for the density of log tau


def eight_schools_exactly():
    mu = torch.linspace(-25, 30, 276, dtype=torch.float64)[:, None]
    log_tau = torch.linspace(-8, 5, 651, dtype=torch.float64)[None, :]
    variance = ERRORS.double().square() + (2 * log_tau[..., None]).exp()
    log_p = -((SCHOOLS - mu[..., None]).square() / variance + variance.log()).sum(-1) / 2
    log_p = log_p - ((mu / 5).square() / 2 + (1 + (log_tau.exp() / 5).square()).log() - log_tau)
    return log_p, {"mu": (mu, 0), "log_tau": (log_tau, 0)}


def curve(u):
    """lambda in (1/2, 1), uniform, by its logit, and the log density of the logit."""
    s = torch.sigmoid(u)
    return 0.5 + 0.5 * s, (s * (1 - s)).log()


def dugongs(p):
    """y ~ N(alpha - beta lambda^x, 1 / tau), alpha, beta ~ N(0, 1000^2), lambda ~ U(1/2, 1), tau ~ Gamma(1e-4, 1e-4)."""
    alpha, beta, log_tau = 2.65 + 0.07 * p["a"], 0.97 + 0.07 * p["b"], 4.6 + 0.3 * p["t"]
    base, density = curve(0.9 + 0.3 * p["u"])
    tau = log_tau.exp()
    likelihood = tau * (LENGTH - alpha + beta * base**AGE).square().sum() / 2 - len(AGE) / 2 * log_tau
    return likelihood + (alpha**2 + beta**2) / 2e6 - 1e-4 * log_tau + 1e-4 * tau - density


def dugongs_exactly():
    u, t = (torch.linspace(-8, 8, n, dtype=torch.float64) for n in (401, 321))
    (base, density), log_tau = curve(0.9 + 0.3 * u), 4.6 + 0.3 * t
    x = torch.stack([torch.ones(len(u), len(AGE), dtype=torch.float64), -(base[:, None] ** AGE)], -1)
    tau = log_tau.exp()[None, :, None, None]
    precision = tau * (x.mT @ x)[:, None] + 1e-6 * torch.eye(2)
    shift = tau[..., 0] * (x.mT @ LENGTH.double())[:, None]
    mean = torch.linalg.solve(precision, shift)
    log_p = len(AGE) / 2 * log_tau - log_tau.exp() * LENGTH.double().square().sum() / 2 + (shift * mean).sum(-1) / 2
    log_p = log_p - torch.logdet(precision) / 2 + 1e-4 * log_tau - 1e-4 * log_tau.exp() + density[:, None]
    variance = torch.linalg.inv(precision).diagonal(dim1=-2, dim2=-1)
    a, b = ((mean[..., i] - at) / 0.07 for i, at in ((0, 2.65), (1, 0.97)))
    return log_p, {
        "a": (a, variance[..., 0] / 0.0049),
        "b": (b, variance[..., 1] / 0.0049),
        "u": (u[:, None], 0),
        "t": (t[None, :], 0),
    }


STARTS = {
    eight_schools: {"mu": torch.tensor(0.0), "log_tau": torch.tensor(1.0), "eta": torch.zeros(8)},
    dugongs: {name: torch.tensor(0.0) for name in "abut"},
}
MODELS = [
    (eight_schools, eight_schools_exactly, 0.02),
    (dugongs, dugongs_exactly, 0.01),
]


def averaged(log_p, conditional):
    """Mean and deviation of numbers given on a grid by their conditional mean and variance, over the grid's weights."""
    weight = (log_p - log_p.max()).exp()
    weight = (weight / weight.sum()).reshape(*log_p.shape, *[1] * (conditional[0].ndim - log_p.ndim))
    mean_of, variance_of = conditional
    axes = tuple(range(log_p.ndim))
    mean = (weight * mean_of).sum(axes)
    return mean, (weight * (variance_of + (mean_of - mean).square())).sum(axes).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("model, exactly, lr", MODELS, ids=lambda value: getattr(value, "__name__", None))
def test_chains_have_the_posterior_that_a_quadrature_has(model, exactly, lr):
    step = bc.make_step(lambda p, batch: model(p), bc.sghmc(lr, momentum=0.9, temperature=1.0))
    chains = bc.parallel(step, 256)
    start = {name: value.float().expand(256, *value.shape).clone() for name, value in STARTS[model].items()}
    draws = bc.sample(chains, start, chains.init(step.tx, start, seed=0), None, steps=3000, burn_in=600, thinning=40)
    log_p, exact = exactly()
    for name, conditional in exact.items():
        mean, deviation = averaged(log_p, conditional)
        found = draws.params[name].double().flatten(0, 1)
        assert ((found.mean(0) - mean).abs() < 0.05 * deviation).all(), name
        assert ((found.std(0) / deviation - 1).abs() < 0.05).all(), name
