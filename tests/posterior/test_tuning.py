"""Tuning: the maximum of a known evidence, through trials that have none."""

import math

import optree
import pytest
import torch

from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.posterior.laplace import laplace
from bayesopt_chain.posterior.tuning import Trial, line_search, tune_by_evidence, tune_by_validation
from bayesopt_chain.precision import Dense, flatten, shape_only

from .test_laplace import N, accumulate, as_tree, exact_posterior, features, linear, regression

pytestmark = pytest.mark.usefixtures("double_precision")


def test_prior_precision_and_noise_tuned_by_evidence_maximise_the_gaussian_process_evidence():
    _, batch = regression()
    batch = (batch[0], linear({"w": torch.randn(3, 2), "b": torch.randn(2)}, batch) + 0.5 * torch.randn(N, 2))
    estimate, tx = curvature.ggn(linear, likelihoods.gaussian(), "dense"), laplace()
    state = accumulate(tx, as_tree(torch.zeros(8), 2), batch, estimate)
    design = features(batch[0], 2)

    def evidence(h):
        mean, _ = exact_posterior(batch, h["prior"], h["variance"])  # the mode moves with the hyperparameters
        params = as_tree(mean, 2)
        nll = likelihoods.gaussian(h["variance"]).nll(linear(params, batch), batch[1]).sum()
        return tx.log_evidence(state, params, -nll, prior_precision=h["prior"], likelihood_scale=1 / h["variance"])

    def gp(h):
        kernel = design @ design.T / h["prior"] + h["variance"] * torch.eye(2 * N)
        return torch.distributions.MultivariateNormal(torch.zeros(2 * N), kernel).log_prob(batch[1].reshape(-1))

    start = {"prior": torch.tensor(1.0), "variance": torch.tensor(1.0)}
    best = tune_by_evidence(evidence, start)
    leaves = {name: value.clone().requires_grad_() for name, value in best.items()}
    assert torch.allclose(evidence(leaves), gp(leaves), rtol=1e-10)
    gradients = torch.autograd.grad(gp(leaves), list(leaves.values()))
    assert max(abs(g * v).item() for g, v in zip(gradients, best.values())) < 1e-6
    assert 0.1 < best["variance"] < 0.5


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_evidence_is_differentiable_in_the_prior_and_the_scale(structure):
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), structure))

    def evidence(prior, scale):
        return tx.log_evidence(state, params, -1.0, prior_precision=prior, likelihood_scale=scale)

    values = (torch.tensor(0.8, requires_grad=True), torch.tensor(1.7, requires_grad=True))
    assert torch.autograd.gradcheck(evidence, values)


def test_validation_picks_the_smallest_loss_and_survives_refusals():
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "root"))

    def loss(prior):
        return (flatten(tx.posterior(state, params, prior_precision=prior).marginal_variance, params).sum() - 0.5).abs()

    best, losses = tune_by_validation(loss, [0.0, 0.1, 1.0, 10.0])
    assert losses[0] == math.inf and losses.index(min(losses)) == [0.0, 0.1, 1.0, 10.0].index(best)


def test_tuning_survives_a_precision_that_float32_cannot_factorise():
    """One direction of curvature 1e6, in float32: below a prior precision of about 0.05 the factorisation fails, and torch's
    line search from 1e4 tried 5e-6. The exact maximum of 3 log h - 10 h - log(h + 1e6) / 2 - 5/2 log h is at h = 0.05, where
    float32 leaves the log-determinant uncertain by 1: a factor of 4 is allowed."""
    v = torch.nn.functional.normalize(torch.randn(6, generator=torch.Generator().manual_seed(0)), dim=0)
    params = torch.full((6,), (20 / 6) ** 0.5).float()
    tx, trials = laplace(), []
    increment = Dense((1e6 * torch.outer(v, v)).float(), shape_only(params), torch.tensor(10.0))
    _, state = tx.update(params, tx.init(params), curvature=increment)

    def evidence(h):
        trials.append(h.item())
        return tx.log_evidence(state, params, 0.0, prior_precision=h)

    best = tune_by_evidence(evidence, torch.tensor(1e4)).item()
    assert 0.05 / 4 < best < 0.05 * 4 and len(trials) < 100


def test_evidence_with_a_forbidden_region_is_maximised_at_its_edge_or_inside():
    """a log h - b h, refused below a floor: the maximum a / b where that is allowed, else the floor, to 1e-6."""
    refused = []
    for floor, wanted in ((0.1, 2.0), (1.9, 2.0), (5.0, 5.0)):

        def evidence(h, floor=floor):
            if h < floor:
                refused.append(h)
                raise ValueError("not positive definite")
            return 2 * h.log() - h

        for start in (6.0, 100.0, 1e5):
            assert tune_by_evidence(evidence, torch.tensor(start)).item() == pytest.approx(wanted, rel=1e-6)
    assert len(refused) > 10


def test_the_line_search_meets_the_weak_wolfe_conditions_beside_a_cliff():
    """f = (x - 1)^2 up to x = 1.2, infinite beyond; and a quadratic without one."""

    def cliff(x):
        return (float("inf"), torch.zeros_like(x)) if x > 1.2 else ((x - 1).square().item(), 2 * (x - 1))

    for evaluate, t in (
        (cliff, 1.0),
        (cliff, 64.0),
        (cliff, 1e-6),
        (lambda x: ((x - 1).square().item(), 2 * (x - 1)), 40.0),
    ):
        step, value, slope = line_search(evaluate, torch.zeros(1), torch.ones(1), Trial(0.0, 1.0, -2.0), t)
        assert value <= 1.0 - 1e-4 * 2 * step and slope.item() >= -1.8
        assert value == pytest.approx((step - 1) ** 2)


def test_many_hyperparameters_of_mixed_shapes_reach_their_optimum():
    """sum of a_i log h_i - b_i h_i has its maximum at a / b, whatever the condition (1e4 here), dtype and shape."""
    a = {"w": torch.logspace(-2, 2, 12).reshape(3, 4), "s": torch.tensor(3.0)}
    b = {"w": torch.logspace(1, -1, 12).reshape(3, 4), "s": torch.tensor(0.5)}

    def evidence(h):
        return sum((a[k] * h[k].log() - b[k] * h[k]).sum() for k in a)

    best = tune_by_evidence(evidence, optree.tree_map(torch.ones_like, a), steps=400)
    for k in a:
        torch.testing.assert_close(best[k], a[k] / b[k], rtol=1e-6, atol=0)
    single = tune_by_evidence(evidence, optree.tree_map(lambda x: torch.ones_like(x).float(), a))
    assert single["w"].dtype == torch.float32
    torch.testing.assert_close(single["s"], torch.tensor(6.0).float(), rtol=1e-3, atol=0)


def refusing(h):
    raise ValueError("too small")


@pytest.mark.parametrize(
    ("tune", "of", "start", "words"),
    [
        (tune_by_evidence, lambda h: h, torch.tensor(0.0), "not positive"),
        (tune_by_evidence, lambda h: h / 0, torch.tensor(1.0), "not finite"),
        (tune_by_evidence, lambda h: -h, torch.tensor(math.nan), r"not positive and finite.*nan"),
        (tune_by_evidence, lambda h: h * math.nan, torch.tensor(1.0), "log_evidence is NaN"),
        (
            tune_by_evidence,
            lambda h: (h - 1).abs().sqrt() * 0 - 1,
            torch.tensor(1.0),
            "gradient of log_evidence is NaN",
        ),
        (tune_by_validation, lambda h: math.nan, [1, 2], r"none of 2 candidates.*its loss is NaN"),
        (tune_by_validation, refusing, [1], r"none of 1 candidates.*too small"),
    ],
)
def test_what_cannot_be_tuned_says_why(tune, of, start, words):
    with pytest.raises(ValueError, match=words):
        tune(of, start)


def test_a_gradient_that_is_nan_on_the_way_shortens_the_step():
    """log h - h, whose gradient is NaN above 1.05: a step that overshoots there comes back, and the maximum at 1 is found."""
    visited = []

    def evidence(h):
        visited.append(h.item())
        return h.log() - h + ((h - h).sqrt() if h > 1.05 else 0.0)  # value 0, slope NaN

    best = tune_by_evidence(evidence, torch.tensor(0.01))
    assert best.item() == pytest.approx(1.0, abs=1e-6) and max(visited) > 1.05
