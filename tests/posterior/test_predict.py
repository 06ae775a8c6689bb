"""Linearised predictions against the naive Jacobian, class approximations against quadrature."""

import math

import numpy as np
import optree
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.posterior.fit import CANDIDATES
from bayesopt_chain.posterior.gaussian import Gaussian, laplace
from bayesopt_chain.precision import Diagonal
from tests.curvature.conftest import convolutional, of_module
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("double_precision")


def mlp():
    params = {"w": torch.randn(3, 4), "head": [torch.randn(2, 4), torch.randn(2)], "s": torch.tensor(1.2)}

    def forward(p, batch):
        return p["s"] * nn.functional.linear(torch.tanh(batch[0] @ p["w"]), *p["head"])

    return forward, params, torch.randn(7, 3)


def conv():
    return (*of_module(convolutional()), torch.randn(7, 2, 6, 6))


def posterior_of(forward, params, inputs, structure):
    targets = torch.zeros_like(forward(params, (inputs, None)))
    increment = curvature.ggn(forward, likelihoods.gaussian(0.5), structure)(params, (inputs, targets))
    tx = laplace()
    _, state = tx.update(params, tx.init(params), curvature=increment)
    return tx.posterior(state, params, prior_precision=0.6)


@pytest.mark.parametrize("model", [mlp, conv], ids=["mlp", "conv"])
@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_linearised_covariance_is_the_naive_one_in_every_structure(model, structure):
    forward, params, inputs = model()
    posterior = posterior_of(forward, params, inputs, structure)
    leaves, tree = optree.tree_flatten(params)
    new = torch.randn(5, *inputs.shape[1:])
    jacobians = torch.func.jacrev(
        lambda *leaves: forward(optree.tree_unflatten(tree, leaves), (new, None)), tuple(range(len(leaves)))
    )(*leaves)
    jacobian = torch.cat([j.reshape(5, j.shape[1], -1) for j in jacobians], -1)
    expected = jacobian @ torch.linalg.inv(posterior.precision.to_dense()) @ jacobian.mT
    for chunk_bytes in (None, 1, 10_000):
        mean, covariance = bc.posterior.linearized(forward, posterior, (new, None), chunk_bytes=chunk_bytes)
        assert torch.allclose(mean, forward(params, (new, None)), atol=1e-13)
        assert torch.allclose(covariance, expected, rtol=1e-9, atol=1e-11)


def test_ekfac_tables_and_shared_weights_predict_as_their_dense_matrices():
    token, params = of_module(nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)))
    forward = lambda p, batch: token(p, batch).mean(1)  # noqa: E731
    batch = (torch.randint(0, 5, (6, 4)), torch.randn(6, 2))
    kfac = curvature.ggn(forward, likelihoods.gaussian(), "kronecker")(params, batch)
    ekfac = curvature.ggn(forward, likelihoods.gaussian(), "kronecker", basis=kfac)(params, batch)
    for precision in (kfac.add_diagonal(1.0), ekfac.add_diagonal(1.0)):
        posterior = Gaussian(params, precision)
        rows = torch.func.jacrev(lambda p: forward(p, batch))(params)
        flat = torch.cat([rows[name].reshape(6, 2, -1) for name in sorted(rows)], -1)
        expected = flat @ torch.linalg.inv(precision.to_dense()) @ flat.mT
        assert torch.allclose(bc.posterior.linearized(forward, posterior, batch)[1], expected, rtol=1e-9)


def test_a_matrix_without_a_tap_predicts_in_the_bases_of_its_kronecker_factors():
    """Used in two ways, or taken for one because a saturated softmax rounds its gradients away."""
    w, x = torch.randn(2, 3), torch.randn(6, 3)
    kfac = curvature.ggn(lambda w, batch: batch[0] @ w.mT, likelihoods.gaussian(), "kronecker")(
        w, (x, torch.randn(6, 2))
    )
    precision = kfac.add_diagonal(1.0)
    forward = lambda w, batch: batch[0] @ w.mT + w.square().sum()  # noqa: E731
    rows = torch.func.jacrev(forward)(w, (x, None)).flatten(2)
    covariance = bc.posterior.linearized(forward, Gaussian(w, precision), (x, None))[1]
    assert torch.allclose(covariance, rows @ torch.linalg.inv(precision.to_dense()) @ rows.mT, rtol=1e-9)


def test_outputs_without_an_event_axis_have_one_output():
    forward = lambda p, batch: batch[0] @ p  # noqa: E731
    posterior = Gaussian(torch.ones(2), Diagonal(torch.tensor([1.0, 4.0]), torch.tensor(1.0)))
    mean, covariance = bc.posterior.linearized(forward, posterior, (torch.eye(2), None))
    assert mean.tolist() == [1, 1] and covariance.flatten().tolist() == [1, 0.25]


@pytest.mark.slow
def test_probit_for_two_outcomes_is_within_its_bound_of_quadrature():
    """The trapezoid rule on 4001 points of +-12 standard deviations integrates this analytic function to rounding
    error.
    """
    z = torch.linspace(-12, 12, 4001)
    weights = torch.exp(-z.square() / 2)
    weights = weights / weights.sum()
    mean, deviation = torch.meshgrid(torch.linspace(0, 30, 121), torch.logspace(-1, 2, 61), indexing="ij")
    exact = (torch.sigmoid(mean[..., None] + deviation[..., None] * z) * weights).sum(-1)
    zero = torch.zeros(())
    pair = torch.stack([mean, zero.expand_as(mean)], -1), torch.stack([deviation.square(), zero.expand_as(mean)], -1)
    error = (bc.posterior.probit(*pair)[..., 0] - exact).abs()
    assert error.max() < 0.019
    assert error[:, 0].max() < 1e-4  # nearly exact for small variance


def random_gaussian(classes, deviation):
    mean, root = 2 * torch.randn(classes), torch.randn(classes, classes)
    covariance = root @ root.T
    return mean, covariance / covariance.diagonal().max() * deviation**2


def softmax_by_quadrature(mean, covariance):
    """E softmax(f) for three classes by a Gauss-Hermite product rule of 40^3 nodes, good to 1e-4 here."""
    values, vectors = torch.linalg.eigh(covariance)
    nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(40))
    grid, weights = (
        torch.cartesian_prod(nodes, nodes, nodes),
        torch.cartesian_prod(*[weights / weights.sum()] * 3).prod(1),
    )
    logits = mean + grid @ (vectors * values.clamp_min(0).sqrt()).T
    return (logits.softmax(-1) * weights[:, None]).sum(0)


def softmax_by_monte_carlo(mean, covariance, n=40_000):
    """E softmax(f), each entry to 0.0025 (one standard error at most)."""
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(len(mean)))
    return (mean + torch.randn(n, len(mean)) @ root.T).softmax(-1).mean(0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("classes", "deviation", "bound"),
    [(3, 0.3, 0.01), (3, 1.0, 0.07), (3, 3.0, 0.14), (10, 0.3, 0.025), (10, 1.0, 0.085), (10, 3.0, 0.185)],
)
def test_probit_for_classes_is_within_its_bound_of_the_integral(classes, deviation, bound):
    """The docstring's bounds, on 30 random means and covariances, of ten classes with six standard errors of Monte Carlo,
    0.015, beside them (far less likely than 1e-7). Of three it is closer than scaling each logit by its own variance."""
    errors, simple = [], []
    for _ in range(30):
        mean, covariance = random_gaussian(classes, deviation)
        exact = (softmax_by_quadrature if classes == 3 else softmax_by_monte_carlo)(mean, covariance)
        errors.append((bc.posterior.probit(mean, covariance) - exact).abs().max().item())
        scaled = (mean / (1 + math.pi / 8 * covariance.diagonal()).sqrt()).softmax(-1)
        simple.append((scaled - exact).abs().max().item())
    assert max(errors) < bound, max(errors)
    assert classes == 10 or sum(errors) < sum(simple)


def test_probit_is_exact_without_variance_and_sees_only_differences():
    mean, root = torch.randn(4, 3), torch.randn(4, 3, 3)
    covariance = root @ root.mT
    assert torch.allclose(bc.posterior.probit(mean, torch.zeros(4, 3, 3)), mean.softmax(-1))
    shifted = bc.posterior.probit(mean + 5, covariance + 7 * torch.ones(3, 3))
    assert torch.allclose(bc.posterior.probit(mean, covariance), shifted)
    two = bc.posterior.probit(mean[:, :2], covariance[:, :2, :2])
    c = covariance
    variance = c[:, 0, 0] + c[:, 1, 1] - 2 * c[:, 0, 1]
    assert torch.allclose(two[:, 0], ((mean[:, 0] - mean[:, 1]) / (1 + math.pi / 8 * variance).sqrt()).sigmoid())


def test_uncertainty_splits_add_up_and_have_their_limits():
    mixture = likelihoods.categorical().mixture
    p = torch.rand(20, 5, 3).softmax(-1)
    drawn = mixture(p.log())
    assert torch.allclose(drawn.aleatoric, -(p * p.log()).sum(-1).mean(0))
    assert torch.allclose(drawn.entropy, drawn.aleatoric + drawn.epistemic) and (drawn.epistemic > 0).all()
    assert mixture(p[:1].log().expand(4, 5, 3)).epistemic.abs().max() < 1e-12
    sure = mixture(torch.eye(3)[:, None].mul(1e4))
    assert math.isclose(sure.epistemic.item(), math.log(3)) and sure.aleatoric == 0
    means, variances = torch.randn(50, 4), torch.rand(50, 4)
    split = likelihoods.gaussian("learned").mixture(torch.cat([means, variances.log()], -1)[:, None])
    assert torch.allclose(split.variance, variances.mean(0) + means.var(0, correction=0))
    assert torch.allclose(split.aleatoric, variances.mean(0)) and torch.allclose(
        split.epistemic, means.var(0, correction=0)
    )


def singular():
    forward, params, inputs = mlp()
    nothing = Diagonal(optree.tree_map(torch.zeros_like, params), torch.tensor(1.0))
    return bc.posterior.linearized(forward, Gaussian(params, nothing), (inputs, None))


# What a fit foretells of new targets: scores, validation, corrections by held-out data, metrics


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


test_what_has_no_answer_is_refused_by_name = refused(
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
        (lambda: bc.posterior.classification_metrics(torch.zeros(3), torch.zeros(3).long()), r"\[N, C\]"),
        (lambda: bc.posterior.classification_metrics(torch.zeros(3, 2), torch.zeros(3).long()), "not 1"),
        (lambda: bc.posterior.probit(torch.zeros(3), torch.zeros(2)), r"\[\*, C, C\]"),
        (lambda: bc.posterior.probit(torch.zeros(2), -torch.ones(2)), "negative"),
        (singular, "singular"),
    ]
)


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
