"""What a fit foretells of new targets: scores, validation, corrections by held-out data, metrics."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods
from bayesopt_chain.posterior.fit import CANDIDATES

pytestmark = pytest.mark.usefixtures("double_precision")


def regression(outputs=1):
    x = torch.randn(50, 2)
    module = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).eval()
    return module, x, torch.sin(2 * x[:, :1])


def noisy(name):
    module, x, y = regression({"learned": 2, "categorical": 3}.get(name, 1))
    rate = (1 + y).exp()
    return {
        "categorical": (module, x, (y[:, 0] > 0).long() + (x[:, 0] > 1), bc.likelihoods.categorical()),
        "poisson": (module, x, torch.poisson(rate), bc.likelihoods.poisson()),
        "learned": (module, x, y + 0.3 * torch.randn_like(y), bc.likelihoods.gaussian("learned")),
        "student": (module, x, y + 0.3 * torch.randn_like(y), bc.likelihoods.student_t(3.0, 0.3)),
        "custom": (
            module,
            x,
            torch.distributions.Exponential(rate).sample(),
            bc.likelihoods.custom(distribution=lambda f: torch.distributions.Exponential(f.exp())),
        ),
    }[name]


@pytest.mark.parametrize("name", ["categorical", "poisson", "learned", "student", "custom"])
def test_validation_scores_targets_and_not_outputs_at_the_mode(name):
    """The chosen prior has the best held-out density, computed by 4,000 draws of the outputs; candidates differ."""
    module, x, y, likelihood = noisy(name)
    train, held = [(x[:30], y[:30])], (x[30:], y[30:])
    fitted = bc.fit_laplace(module, likelihood, train, tune="validation", validation=[held])
    scores = {}
    for prior in CANDIDATES:
        one = bc.fit_laplace(module, likelihood, train, tune=None, prior_precision=prior).predictive(held[0])
        drawn = torch.distributions.MultivariateNormal(
            one.outputs.mean, one.outputs.covariance + 1e-12 * torch.eye(one.outputs.mean.shape[1])
        ).sample((4000,))
        density = likelihood.log_prob(drawn, held[1]).logsumexp(0) - torch.tensor(4000.0).log()
        torch.testing.assert_close(one.log_prob(held[1]).mean(), density.mean(), rtol=0, atol=0.25)
        scores[prior] = one.log_prob(held[1]).sum().item()
    assert fitted.prior_precision == max(scores, key=scores.get)
    assert len({round(score, 6) for score in scores.values()}) > 3


def tokens():
    module = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 4)).eval()
    ids = torch.randint(0, 7, (12, 3))
    labels = torch.randint(0, 4, (12, 3))
    labels[:, 2] = -100
    return module, ids, labels


def test_tokens_are_predicted_and_validated_position_by_position():
    """Every method, against the same positions one by one."""
    module, ids, labels = tokens()
    likelihood = bc.likelihoods.categorical()
    fitted = bc.fit_laplace(module, likelihood, [(ids, labels)], structure="dense")
    forward, params, _ = bc.make_functional(module)
    head, _ = bc.curvature.subset(forward, params, "1")
    mean, covariance = bc.posterior.linearized(head, fitted.posterior, (ids.reshape(-1, 1), None))
    mean = mean[:, 0]
    for method, rule in (("sobol", bc.posterior.softmax_mean), ("probit", bc.posterior.probit)):
        torch.testing.assert_close(fitted.predict(ids, method=method).reshape(-1, 4), rule(mean, covariance))
    assert fitted.predict(ids, method="mc", samples=3).shape == (12, 3, 4)
    logs = fitted.predictive(ids).log_prob(labels)
    assert logs.shape == (12, 3) and not logs[:, 2].any()
    tuned = bc.fit_laplace(module, likelihood, [(ids, labels)], tune="validation", validation=[(ids, labels)])
    assert tuned.prior_precision in CANDIDATES


def test_scores_and_intervals_come_through_a_fit():
    module, x, y = regression()
    fitted = bc.fit_laplace(module, bc.likelihoods.gaussian(), [(x, y)])
    predictive = fitted.predictive(x)
    normal = torch.distributions.Normal(predictive.mean, predictive.variance.sqrt())
    torch.testing.assert_close(predictive.log_prob(y), normal.log_prob(y))
    torch.testing.assert_close(predictive.quantile(0.9), normal.icdf(torch.tensor(0.9)), rtol=1e-9, atol=1e-9)
    variance = predictive.outputs.covariance[..., 0] + 1 / fitted.likelihood_scale
    torch.testing.assert_close(predictive.variance, variance)
    low, high = predictive.interval(0.5)
    assert (low < predictive.mean).all() and (predictive.mean < high).all() and predictive.crps(y).shape == y.shape


def zero_mean(n, variance):
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    return likelihoods.gaussian(variance).predictive(zeros, zeros[..., None])


@pytest.mark.parametrize("variance", (0.1, 1.0, 9.0))
def test_the_conformal_level_is_the_held_out_score_of_its_rank(variance):
    """19 held-out data and level 0.85: rank 17 = 0.85 (19 + 1), so that a new one is inside with probability 17 / 20."""
    targets = 2 * torch.rand(19, 1)  # not at all what is predicted
    scores = torch.erf(targets / (2 * variance) ** 0.5).flatten().sort().values
    found = bc.posterior.conformal_level(zero_mean(19, variance), targets, 0.85)
    assert found == pytest.approx(float(scores[16]), rel=1e-12)
    levels = torch.special.ndtri(torch.arange(1, 1000) / 1000)[:, None]  # calibrated: the level is kept
    assert bc.posterior.conformal_level(zero_mean(999, 1.0), levels, 0.9) == pytest.approx(0.9, abs=2e-3)


@pytest.mark.parametrize("scale", (0.3, 1.0, 4.0))
def test_temperature_scaling_finds_the_least_held_out_loss(scale):
    torch.manual_seed(1)
    logits = torch.randn(300, 4, dtype=torch.float64)
    targets = torch.distributions.Categorical(logits=logits).sample()
    given = scale * logits
    want = minimize_scalar(
        lambda log_c: torch.nn.functional.cross_entropy(given / math.exp(log_c), targets).item(), tol=1e-10
    ).x
    assert bc.posterior.temperature_scaling(given, targets) == pytest.approx(math.exp(want), rel=1e-5)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: bc.posterior.conformal_level(zero_mean(8, 1.0), torch.zeros(8, 1), 0.9), "at least 9 are needed"),
        (
            lambda: bc.posterior.conformal_level(zero_mean(8, 1.0), torch.zeros(8, 1), 90),
            r"level must be a number in \(0, 1\)",
        ),
        (lambda: bc.posterior.conformal_level(zero_mean(9, 1.0), torch.full((9, 1), torch.nan)), "hold NaN"),
        (
            lambda: bc.posterior.conformal_level(
                likelihoods.gaussian(1.0).predictive(torch.zeros(9, 2), torch.zeros(9, 2, 2)), torch.zeros(9, 2)
            ),
            "each output by itself",
        ),
        (lambda: bc.posterior.temperature_scaling(torch.zeros(3, 2), torch.zeros(2).long()), r"logits \[N, C\]"),
        (lambda: bc.posterior.temperature_scaling(torch.zeros(3, 2), torch.full((3,), 2)), "lie in 0 to 1"),
        (
            lambda: bc.posterior.temperature_scaling(torch.full((1, 2), torch.inf), torch.zeros(1).long()),
            "NaN or infinity",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_class_metrics_are_their_definitions():
    g = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 4, generator=g), torch.randint(4, (200,), generator=g)
    log_p = logits.log_softmax(-1)
    got = bc.posterior.classification_metrics(log_p, targets, bins=10)
    p, hit = log_p.exp().max(-1).values, log_p.argmax(-1) == targets
    bins = (p * 10).long().clamp(max=9)
    ece = sum(
        (bins == b).double().mean() * (hit[bins == b].double().mean() - p[bins == b].double().mean()).abs()
        for b in range(10)
        if (bins == b).any()
    )
    assert got["accuracy"] == pytest.approx(hit.double().mean().item())
    assert got["nll"] == pytest.approx(-log_p[torch.arange(200), targets].mean().item(), rel=1e-5)
    assert got["ece"] == pytest.approx(float(ece), rel=1e-4)
    assert got["brier"] == pytest.approx(
        sum(((log_p[i].exp() - torch.eye(4)[targets[i]]) ** 2).sum().item() for i in range(200)) / 200, rel=1e-5
    )


def test_wrong_shapes_and_unnormalised_rows_are_refused():
    with pytest.raises(ValueError, match=r"\[N, C\]"):
        bc.posterior.classification_metrics(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="not 1"):
        bc.posterior.classification_metrics(torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64))
