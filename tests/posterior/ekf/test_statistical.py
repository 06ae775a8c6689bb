"""Statistical linearisation against its definition by brute quadrature, and against the exact filter."""

import math

import numpy as np
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.likelihoods._quadrature import cubature

from .test_state_space import SKILL_PRIOR, SKILL_Q, grid_filter, league, match_forward


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def by_quadrature(mean, variance, h, v):
    """Slope, noise and expected value of the line through h over N(mean, variance), on a fine grid."""
    f = mean + variance**0.5 * torch.linspace(-16, 16, 200_001)
    w = torch.exp(-((f - mean) ** 2) / (2 * variance))
    w = w / w.sum()
    mu = w @ h(f)
    slope = w @ (h(f) * (f - mean)) / variance
    residual = h(f) - mu - slope * (f - mean)
    return slope, w @ (v(f) + residual**2), mu


@pytest.mark.parametrize("variance", [1e-6, 0.3, 9.0])
@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_the_line_is_the_least_squares_line_over_the_gaussian(name, variance):
    """Slope, innovation and log probability of the target, to 1e-6."""
    h = torch.sigmoid if name == "bernoulli" else torch.exp
    v = (lambda f: torch.sigmoid(f) * torch.sigmoid(-f)) if name == "bernoulli" else torch.exp
    slope, noise, mu = by_quadrature(torch.tensor(0.7), torch.tensor(variance), h, v)
    got, innovation, chance = getattr(bc.likelihoods, name)().straight_line(
        torch.tensor([[0.7]]), torch.tensor([1.0]), torch.tensor([[[variance]]])
    )
    torch.testing.assert_close(got.squeeze(), slope / noise.sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(innovation.squeeze(), (1 - mu) / noise.sqrt(), rtol=1e-6, atol=0)
    likely = (lambda f: torch.sigmoid(f)) if name == "bernoulli" else (lambda f: torch.exp(f - torch.exp(f)))
    wanted = by_quadrature(torch.tensor(0.7), torch.tensor(variance), likely, likely)[2]
    assert abs(chance.item() - math.log(wanted)) < 1e-6


def test_two_classes_are_a_bernoulli_of_the_difference():
    """The information and the force of the outputs, to 1e-6 of them."""
    f, y = torch.tensor([[0.4, -0.3], [1.0, 1.5]]), torch.tensor([0, 1])
    root = torch.tensor([[[0.9, 0.0], [0.3, 0.6]], [[1.2, 0.0], [-0.4, 0.5]]])
    s = root @ root.mT
    contrast = torch.tensor([1.0, -1.0])
    two, one = bc.likelihoods.categorical().straight_line, bc.likelihoods.bernoulli().straight_line
    slope, innovation, chance = two(f, y, s)
    other, e, p = one((f @ contrast)[:, None], (y == 0).double(), (contrast @ s @ contrast)[:, None, None])
    other = other * contrast
    torch.testing.assert_close(slope.mT @ slope, other.mT @ other, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(slope.mT @ innovation[..., None], other.mT @ e[..., None], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(chance, p, rtol=1e-6, atol=0)


@pytest.mark.parametrize("classes", [3, 5, 12])
def test_nodes_have_the_moments_of_a_standard_normal(classes):
    z, w = cubature(classes)
    assert (w > 0).all()
    torch.testing.assert_close(w.sum(), torch.tensor(1.0), rtol=1e-12, atol=0)
    torch.testing.assert_close((w[:, None] * z).sum(0), torch.zeros(classes), rtol=0, atol=1e-12)
    torch.testing.assert_close((w[:, None] * z).mT @ z, torch.eye(classes), rtol=0, atol=1e-10)


def model(params, batch):
    return batch[0] @ params


LIKELIHOODS = {
    "bernoulli": (bc.likelihoods.bernoulli(), 1, torch.tensor([1.0, 0.0, 1.0])[:, None]),
    "poisson": (bc.likelihoods.poisson(), 1, torch.tensor([2.0, 0.0, 1.0])[:, None]),
    "categorical": (bc.likelihoods.categorical(), 4, torch.tensor([3, 0, 1])),
    "many classes": (bc.likelihoods.categorical(), 9, torch.tensor([8, 0, 1])),
    "gaussian": (bc.likelihoods.gaussian(0.3), 2, torch.ones(3, 2)),
}


def filtered(name, filter_name, linearisation, prior_precision):
    likelihood, outputs, targets = LIKELIHOODS[name]
    g = torch.Generator().manual_seed(0)
    x, params = torch.randn(3, 2, generator=g), 0.3 * torch.randn(2, outputs, generator=g)
    options = {"rank": 2 * outputs} if filter_name == "low_rank" else {}
    tx = getattr(bc.ekf, filter_name)(prior_precision=prior_precision, **options)
    estimate = bc.ekf.observe(model, likelihood, linearisation=linearisation)
    targets = targets.double() if targets.is_floating_point() else targets
    params, state, _ = bc.make_step(None, tx, curvature=estimate)(params, tx.init(params), (x, targets))
    return params, tx.posterior(state, params).precision.to_dense(), tx.log_evidence(state)


@pytest.mark.parametrize("filter_name", ["dense", "diagonal", "low_rank"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_narrow_gaussian_sees_the_tangent(name, filter_name):
    """At a prior variance of 1e-6 the two linearisations agree, the means' moves to 1e-4 of them."""
    tangent, statistical = (filtered(name, filter_name, how, 1e6) for how in ("tangent", "statistical"))
    torch.testing.assert_close(
        statistical[1] - 1e6 * torch.eye(len(tangent[1])),
        tangent[1] - 1e6 * torch.eye(len(tangent[1])),
        rtol=1e-3,
        atol=1e-3,
    )
    assert (statistical[0] - tangent[0]).abs().max() < 1e-4 * 1e-6 * 10
    if name != "gaussian":
        assert abs(statistical[2] - tangent[2]) < 1e-4


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
def test_the_filters_agree_on_a_wide_gaussian(name):
    """Dense and low-rank see the same covariance; a wide prior claims less information than the tangent does."""
    dense, low = (filtered(name, kind, "statistical", 0.2) for kind in ("dense", "low_rank"))
    for a, b in zip(dense, low):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    tangent = filtered(name, "dense", "tangent", 0.2)
    assert torch.logdet(dense[1]) < torch.logdet(tangent[1])


def test_the_evidence_of_single_data_is_their_probability():
    """Two parameters that the datum sees as one number: the probability of the target, by quadrature, to 1e-8."""
    tx, x = bc.ekf.dense(prior_precision=torch.tensor([0.5, 2.0])), torch.tensor([[1.0, -2.0]])
    estimate = bc.ekf.observe(model, bc.likelihoods.bernoulli(), linearisation="statistical")
    params = torch.tensor([0.3, 0.1])
    _, state, _ = bc.make_step(None, tx, curvature=estimate)(params, tx.init(params), (x, torch.ones(1)))
    variance = torch.tensor(1 / 0.5 + 4 / 2.0)
    _, _, wanted = by_quadrature((x @ params).squeeze(), variance, torch.sigmoid, torch.sigmoid)
    assert abs(tx.log_evidence(state) - wanted.log()) < 1e-8


def test_an_evidence_by_moments_exists_at_lr_1_only():
    tx, x = bc.ekf.dense(0.5), torch.tensor([[1.0, -2.0]])
    estimate = bc.ekf.observe(model, bc.likelihoods.bernoulli(), linearisation="statistical")
    _, state, _ = bc.make_step(None, tx, curvature=estimate)(
        torch.zeros(2), tx.init(torch.zeros(2)), (x, torch.ones(1))
    )
    with pytest.raises(ValueError, match="there is an evidence at lr=1 only"):
        tx.log_evidence(state)


@pytest.mark.slow
def test_skills_are_nearer_to_the_exact_filter_than_by_the_tangent():
    """The match-by-match filter of two players with a wide prior, against a grid: the error of the mean, in exact standard
    deviations, averaged over 4 leagues after 60 and 120 matches, falls to less than a third (0.08 for 0.51 over 10 leagues when
    written), that of the deviation falls too (0.12 for 0.16)."""
    contrast, scale = torch.tensor([1.0, -1.0]), 3.0
    errors = {"tangent": [], "statistical": []}
    for seed in range(4):
        _, rounds = league(torch.Generator().manual_seed(seed), 1, players=2, scale=scale)
        rounds = [(pairs[0], won[0]) for pairs, won in rounds]
        for how, found in errors.items():
            tx = bc.ekf.dense(prior_precision=SKILL_PRIOR / scale**2, transition_noise=SKILL_Q * scale**2)
            estimate = bc.ekf.observe(match_forward, bc.likelihoods.bernoulli(), linearisation=how)
            step, skills = bc.make_step(None, tx, curvature=estimate), torch.zeros(2)
            state = tx.init(skills)
            for t, batch in enumerate(rounds):
                skills, state, _ = step(skills, state, batch)
                if t % 60 == 59:
                    mean, deviation, _ = grid_filter(rounds[: t + 1], scale)
                    ours = (contrast @ torch.cholesky_inverse(state[0].root) @ contrast).sqrt().item()
                    found.append((abs((contrast @ skills).item() - mean) / deviation, abs(ours / deviation - 1)))
    tangent, statistical = (np.mean(errors[how], axis=0) for how in ("tangent", "statistical"))
    assert statistical[0] < tangent[0] / 3 and statistical[1] < tangent[1], (tangent, statistical)


def test_a_likelihood_without_moments_is_refused():
    likelihood = bc.likelihoods.custom(lambda f, y: torch.log1p((f - y) ** 2).sum(-1))
    with pytest.raises(ValueError, match=r"the custom likelihood has no moments.*use linearisation='tangent'"):
        bc.ekf.observe(model, likelihood, linearisation="statistical")
    with pytest.raises(ValueError, match="linearisation must be one of"):
        bc.ekf.observe(model, linearisation="unscented")
    with pytest.raises(TypeError, match=r"likelihood must be one of bc\.likelihoods or a variance"):
        bc.ekf.observe(model, "bernoulli")
