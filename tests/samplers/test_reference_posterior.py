"""Four models of posteriordb whose posterior is a quadrature of few numbers, because the others can be integrated out.

    eight_schools_noncentered   Rubin, 1981; theta_j integrated out, mu and log tau on a grid
    dugongs                     Ratkowsky, 1983; a growth curve, alpha and beta Gaussian, lambda and log tau on a grid
    rats                        Gelfand et al., 1990; slopes, intercepts and their means Gaussian, three variances on a grid
    surgical                    Spiegelhalter et al., 1996; twelve logits one by one, mu and log sigma on a grid

Every model is written over numbers of order one (``a`` for ``alpha = 2.65 + 0.07 a``), as one would scale it for any sampler.
Chains are compared in units of the exact deviation: 256 chains of 60 draws, thinned by 40 steps, hold at least 7,000 effective
ones for a mean, whose error is then .012 deviations, that of a deviation .009; .05 are allowed, four times either, which is an
alarm once in ten thousand seeds for each of the 26 comparisons, and includes what the rate heats (less than .01).
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
RATS = torch.tensor([
    [151, 199, 246, 283, 320], [145, 199, 249, 293, 354], [147, 214, 263, 312, 328], [155, 200, 237, 272, 297],
    [135, 188, 230, 280, 323], [159, 210, 252, 298, 331], [141, 189, 231, 275, 305], [159, 201, 248, 297, 338],
    [177, 236, 285, 350, 376], [134, 182, 220, 260, 296], [160, 208, 261, 313, 352], [143, 188, 220, 273, 314],
    [154, 200, 244, 289, 325], [171, 221, 270, 326, 358], [163, 216, 242, 281, 312], [160, 207, 248, 288, 324],
    [142, 187, 234, 280, 316], [156, 203, 243, 283, 317], [157, 212, 259, 307, 336], [152, 203, 246, 286, 321],
    [154, 205, 253, 298, 334], [139, 190, 225, 267, 302], [146, 191, 229, 272, 302], [157, 211, 250, 285, 323],
    [132, 185, 237, 286, 331], [160, 207, 257, 303, 345], [169, 216, 261, 295, 333], [157, 205, 248, 289, 316],
    [137, 180, 219, 258, 291], [153, 200, 244, 286, 324]], dtype=torch.float32)
DAYS = torch.tensor([-14.0, -7.0, 0.0, 7.0, 14.0])
DIED = torch.tensor([0.0, 18, 8, 46, 8, 13, 9, 31, 14, 8, 29, 24])
OPERATED = torch.tensor([47.0, 148, 119, 810, 211, 196, 148, 215, 207, 97, 256, 360])
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


def rats(p):
    """y_ij ~ N(alpha_i + beta_i (x_j - 22), sigma_y^2), alpha_i ~ N(mu_a, sigma_a^2), beta_i likewise, means N(0, 100^2)."""
    (mean_a, mean_b), (l_y, l_a, l_b) = p["means"], p["log"]
    mean_a, mean_b, a, b = 242 + 3 * mean_a, 6 + 0.1 * mean_b, 242 + 3 * p["a"], 6 + 0.1 * p["b"]
    l_y, l_a, l_b = 3.6 + 0.2 * l_y, 5.3 + 0.3 * l_a, -1.3 + 0.4 * l_b  # log variances
    loss = ((RATS - a[:, None] - b[:, None] * DAYS).square().sum() * (-l_y).exp() + RATS.numel() * l_y) / 2
    loss = loss + ((a - mean_a).square().sum() * (-l_a).exp() + 30 * l_a) / 2
    loss = loss + ((b - mean_b).square().sum() * (-l_b).exp() + 30 * l_b) / 2 + (mean_a**2 + mean_b**2) / 2e4
    return loss + 0.001 * sum(v + (-v).exp() for v in (l_y, l_a, l_b))


def rats_exactly():
    y = RATS.double()
    at = [torch.linspace(-5.5, 5.5, 45, dtype=torch.float64) for _ in range(3)]
    l_y, l_a, l_b = torch.meshgrid(3.6 + 0.2 * at[0], 5.3 + 0.3 * at[1], -1.3 + 0.4 * at[2], indexing="ij")
    v, va, vb, k = l_y.exp(), l_a.exp(), l_b.exp(), DAYS.double().square().sum()
    intercept, slope = (
        y.mean(1),
        y @ DAYS.double() / k,
    )  # days are centred, so that the two are independent of each other
    rest = (y - intercept[:, None] - slope[:, None] * DAYS).square().sum()
    log_p = -(30 * 3 * l_y + rest / v) / 2
    found = {
        "log": (torch.stack([(g - m) / s for g, m, s in ((l_y, 3.6, 0.2), (l_a, 5.3, 0.3), (l_b, -1.3, 0.4))], -1), 0)
    }
    means, variances = [], []
    for estimate, noise, spread, center, scale in ((intercept, v / 5, va, 242, 3), (slope, v / k, vb, 6, 0.1)):
        total = noise + spread
        precision = 30 / total + 1e-4
        mean = estimate.sum() / total / precision
        log_p = (
            log_p
            - (30 * total.log() + estimate.square().sum() / total - mean.square() * precision + precision.log()) / 2
        )
        means.append((mean - center) / scale)
        variances.append(1 / precision / scale**2)
    log_p = log_p - 0.001 * sum(x + (-x).exp() for x in (l_y, l_a, l_b))
    return log_p, found | {"means": (torch.stack(means, -1), torch.stack(variances, -1))}


def surgical(p):
    """deaths_j ~ Binomial(n_j, logit^-1(b_j)), b_j ~ N(mu, sigma^2), mu ~ N(0, 1000^2), sigma^2 ~ InvGamma(1e-3, 1e-3)."""
    mu, log_sigma = -2.55 + 0.15 * p["m"], -0.9 + 0.35 * p["s"]
    b = mu + log_sigma.exp() * p["eta"]
    likelihood = (OPERATED * torch.nn.functional.softplus(b) - DIED * b).sum()
    return likelihood + p["eta"].square().sum() / 2 + mu**2 / 2e6 + 0.002 * log_sigma + 0.001 * (-2 * log_sigma).exp()


def surgical_exactly():
    m, s = torch.linspace(-7, 7, 113, dtype=torch.float64), torch.linspace(-10, 6, 129, dtype=torch.float64)
    mu, log_sigma = (-2.55 + 0.15 * m)[:, None, None], (-0.9 + 0.35 * s)[None, :, None]
    eta = torch.linspace(-7, 7, 141, dtype=torch.float64)
    log_p = torch.zeros(len(m), len(s), dtype=torch.float64)
    for died, operated in zip(DIED, OPERATED):
        b = mu + log_sigma.exp() * eta
        log_p += torch.logsumexp(died * b - operated * torch.nn.functional.softplus(b) - eta.square() / 2, -1)
    log_p -= (mu**2 / 2e6 + 0.002 * log_sigma + 0.001 * (-2 * log_sigma).exp())[..., 0]
    return log_p, {"m": (m[:, None], 0), "s": (s[None, :], 0)}


STARTS = {
    eight_schools: {"mu": torch.tensor(0.0), "log_tau": torch.tensor(1.0), "eta": torch.zeros(8)},
    dugongs: {name: torch.tensor(0.0) for name in "abut"},
    # by least squares: from equal slopes a chain falls to where their spread is zero, as it does under any sampler
    rats: {
        "a": (RATS.mean(1) - 242) / 3,
        "b": (RATS @ DAYS / 490 - 6) / 0.1,
        "means": torch.zeros(2),
        "log": torch.zeros(3),
    },
    surgical: {"m": torch.tensor(0.0), "s": torch.tensor(0.0), "eta": torch.zeros(12)},
}
MODELS = [
    (eight_schools, eight_schools_exactly, 0.02),
    (dugongs, dugongs_exactly, 0.01),
    (rats, rats_exactly, 0.01),
    (surgical, surgical_exactly, 0.01),
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
