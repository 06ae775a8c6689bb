"""Masks, weights and checks of targets: a datum of weight 2 is two data, one of weight 0 none, a wrong one is refused."""

import math

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import likelihoods

pytestmark = pytest.mark.usefixtures("double_precision")


def language_model():
    module = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).eval()
    ids = torch.randint(0, 11, (4, 7))
    labels = ids.clone()
    labels[:, 4:] = -100
    return module, ids, labels


@pytest.mark.parametrize("structure", ["dense", "diagonal", "root"])
def test_ignored_labels_are_left_out_of_the_curvature(structure):
    """It is that of the sequences without them, which is exact here, since a position sees itself alone."""
    module, ids, labels = language_model()
    forward, params, _ = bc.make_functional(module)
    estimate = bc.curvature.ggn(forward, likelihoods.categorical(), structure)
    got, wanted = estimate(params, (ids, labels)), estimate(params, (ids[:, :4], labels[:, :4]))
    torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-9, atol=1e-11)


def test_ignored_labels_are_left_out_of_fishers_gradients_and_filters():
    """The empirical Fisher and the loss; the sampled Fisher of a batch of padding is zero; a filter learns nothing from it."""
    module, ids, labels = language_model()
    forward, params, _ = bc.make_functional(module)
    likelihood, outputs = likelihoods.categorical(), forward(params, (ids, None))
    torch.testing.assert_close(likelihood.nll(outputs, labels), likelihood.nll(outputs[:, :4], labels[:, :4]))
    factor = likelihood.empirical_factors(outputs, labels)
    assert not factor[:, :, 4:].any()
    torch.testing.assert_close(factor[:, :, :4], likelihood.empirical_factors(outputs[:, :4], labels[:, :4]))
    nothing = torch.full_like(labels, -100)
    fisher = bc.curvature.fisher(forward, likelihood, "diagonal", generator=torch.Generator().manual_seed(0))
    assert all(not leaf.any() for leaf in fisher(params, (ids, nothing)).diag().values())
    small = nn.Linear(2, 3)
    forward, params, _ = bc.make_functional(small)
    x, y = torch.randn(4, 2), torch.tensor([0, 2, -100, -100])
    for how in ("tangent", "empirical"):
        tx = bc.ekf.dense(prior_precision=1.0)
        ends = []
        for batch in ((x, y), (x[:2], y[:2])):
            observe = bc.ekf.observe(forward, likelihood, linearisation=how)
            updates, state = tx.update(params, tx.init(params), params=params, curvature=observe(params, batch))
            ends.append((updates, tx.posterior(state, params).precision.to_dense()))
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-10)


def test_class_weights_and_smoothing_are_those_of_torch():
    """Losses of ``cross_entropy``, and the Hessian of that loss by differentiation."""
    weight = torch.tensor([0.5, 2.0, 1.0])
    outputs, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, -100, 0])
    for options in ({"weight": weight}, {"label_smoothing": 0.2}, {"weight": weight, "label_smoothing": 0.2}):
        likelihood = likelihoods.categorical(**options)
        loss = lambda f: nn.functional.cross_entropy(f, y, reduction="none", **options)  # noqa: B023, E731
        torch.testing.assert_close(likelihood.nll(outputs, y), loss(outputs))
        hessian = torch.func.hessian(lambda f: loss(f).sum())(outputs)  # noqa: B023
        s = likelihood.factors(outputs, y)
        torch.testing.assert_close(
            torch.einsum("kbi,kbj->bij", s, s), torch.stack([hessian[b, :, b] for b in range(6)])
        )


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "categorical"])
def test_a_weight_of_two_is_the_datum_twice_and_of_zero_not_there(name):
    """Loss, curvature, evidence, tuned prior and noise of a fit."""
    x = torch.randn(40, 2)
    y = {
        "gaussian": torch.sin(x[:, :1]),
        "poisson": torch.randint(0, 4, (40, 1)).double(),
        "bernoulli": torch.randint(0, 2, (40, 1)).double(),
        "categorical": torch.randint(0, 3, (40,)),
    }[name]
    module = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3 if name == "categorical" else 1)).eval()
    weights = torch.tensor([2.0] * 10 + [1.0] * 20 + [0.0] * 10)
    plain = getattr(likelihoods, name)()
    missing = y.clone()
    if missing.is_floating_point():
        missing[30:] = math.nan
    twice = torch.cat([x[:30], x[:10]]), torch.cat([y[:30], y[:10]])
    got = bc.fit_laplace(module, likelihoods.weighted(plain), [(x, (missing, weights))], structure="dense")
    wanted = bc.fit_laplace(module, plain, [twice], structure="dense")
    torch.testing.assert_close(got.log_evidence, wanted.log_evidence, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(got.likelihood_scale, wanted.likelihood_scale, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.prior_precision, wanted.prior_precision, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "likelihood, targets, words",
    [
        (likelihoods.bernoulli(), [[1.0], [-1.0]], r"targets that are not whole numbers from 0 to 1, such as -1"),
        (likelihoods.poisson(), [[1.0], [-3.5]], "not counts from 0, such as -3.5"),
        (likelihoods.negative_binomial(), [[0.5], [1.0]], "not counts from 0, such as 0.5"),
        (likelihoods.gaussian(), [[math.nan], [0.0]], "not finite numbers, such as nan"),
        (likelihoods.student_t(), [[math.inf], [0.0]], "not finite numbers, such as inf"),
        (likelihoods.beta(), [[0.0], [0.5]], "strictly between 0 and 1, such as 0"),
        (likelihoods.ordinal([0.0]), [[2.0], [1.0]], "whole numbers from 0 to 1, such as 2"),
        (
            likelihoods.custom(distribution=lambda f: torch.distributions.Exponential(f.exp())),
            [[-1.0], [1.0]],
            "not in the support",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(likelihood, targets, words):
    """By the loss, a fit that tunes nothing, and a filter, whose parameters stay what they are."""
    y, module = torch.tensor(targets), nn.Linear(1, 1).eval()
    with pytest.raises(ValueError, match=words):
        likelihood.nll(torch.zeros(2, 1), y)
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(module, likelihood, [(torch.ones(2, 1), y)], tune=None)
    forward, params, _ = bc.make_functional(module)
    with pytest.raises(ValueError, match=words):
        bc.ekf.observe(forward, likelihood)(params, (torch.ones(2, 1), y))
