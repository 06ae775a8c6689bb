"""A model in motion with a known answer: skills that walk at random between matches.

The statistical tests run R independent replicates at once and use the sum of their normalised squared errors, which is
chi-squared where the filter is right; their bounds are six standard deviations (false alarms below 2e-9 each), and the
seeds are fixed.
"""

import math

import numpy as np
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import Root

pytestmark = pytest.mark.usefixtures("double_precision")


R, STEPS = 100, 120


def squared_errors(truth, means, roots):
    """(theta - mean)^T Lambda (theta - mean), summed over replicates, for lower roots of Lambda."""
    return torch.einsum("ri,rij->rj", truth - means, roots).square().sum().item()


# The probability that i beats j is sigmoid(s_i - s_j), skills walk at random (Duffield et al., 2024)


def match_forward(skills, batch):
    return skills[batch[0][:, 0]] - skills[batch[0][:, 1]]


def match_loss(skills, batch):
    return bc.likelihoods.bernoulli().nll(match_forward(skills, batch), batch[1]).mean()


def match_roots(skills, batch):
    """The rows of the Fisher information, as ``curvature.ggn`` gives them, written out so that leagues can be stacked."""
    p = torch.sigmoid(match_forward(skills, batch))
    eye = torch.eye(skills.shape[0])
    rows = (eye[batch[0][:, 0]] - eye[batch[0][:, 1]]) * (p * (1 - p)).sqrt()[:, None]
    return Root(rows, torch.tensor(float(batch[1].shape[0])))


SKILL_Q, SKILL_PRIOR, PLAYERS = 0.01, 1.0, 6


def league(generator, replicates, players=PLAYERS, scale=1.0):
    """Skills at the end, and rounds in which every player plays once."""
    skills = torch.randn(replicates, players, generator=generator) * scale / math.sqrt(SKILL_PRIOR)
    rounds = []
    for _ in range(STEPS):
        skills = skills + scale * math.sqrt(SKILL_Q) * torch.randn(skills.shape, generator=generator)
        order = torch.stack([torch.randperm(players, generator=generator) for _ in range(replicates)])
        pairs = order.reshape(replicates, -1, 2)
        chance = torch.sigmoid(skills.gather(1, pairs[..., 0]) - skills.gather(1, pairs[..., 1]))
        rounds.append((pairs, torch.bernoulli(chance, generator=generator)))
    return skills, rounds


def rate(skills, rounds, estimate, noise=SKILL_Q, replicates=None):
    tx = bc.ekf.dense(prior_precision=SKILL_PRIOR, transition_noise=noise)
    step = bc.make_step(match_loss, tx, curvature=estimate)
    chains = step if replicates is None else bc.parallel(step, replicates, batch_dim=0)
    state = tx.init(skills) if replicates is None else chains.init(tx, skills)
    surprise = []
    for batch in rounds:
        skills, state, info = chains(skills, state, batch)
        surprise.append(info.loss)
    return skills, state[0].root, torch.stack(surprise)


def test_skill_ratings_are_the_textbook_extended_filters():
    """Against numpy's information form, match by match, to 1e-9, with increments from ``curvature.ggn``."""
    _, rounds = league(torch.Generator().manual_seed(6), 1)
    rounds = [(pairs[0], won[0]) for pairs, won in rounds]
    estimate = bc.curvature.ggn(match_forward, bc.likelihoods.bernoulli(), "root")
    skills, root, _ = rate(torch.zeros(PLAYERS), rounds, estimate)
    mean, p = np.zeros(PLAYERS), np.eye(PLAYERS) / SKILL_PRIOR
    for pairs, won in rounds:
        information = np.linalg.inv(p + SKILL_Q * np.eye(PLAYERS))
        force = np.zeros(PLAYERS)
        for (i, j), y in zip(pairs.tolist(), won.tolist()):
            h = np.zeros(PLAYERS)
            h[i], h[j] = 1.0, -1.0
            chance = 1 / (1 + np.exp(-h @ mean))
            information += chance * (1 - chance) * np.outer(h, h)
            force += (y - chance) * h
        p = np.linalg.inv(information)
        mean = mean + p @ force
    np.testing.assert_allclose(skills.numpy(), mean, atol=1e-9, rtol=0)
    np.testing.assert_allclose(torch.cholesky_inverse(root).numpy(), p, atol=1e-9, rtol=0)


def grid_filter(rounds, scale):
    """Mean and deviation of the difference of two skills, exactly, and its mean log loss; skills in units of ``scale``."""
    grid = np.linspace(-14, 14, 1401) * scale
    density = np.exp(-(grid**2) * SKILL_PRIOR / (4 * scale**2))
    kernel = np.exp(-((grid[:, None] - grid) ** 2) / (4 * SKILL_Q * scale**2))
    losses = []
    for pairs, won in rounds:
        sign = 1 if (pairs[0, 0].item() == 0) == (won[0].item() == 1) else -1
        density = kernel @ (density / density.sum())
        likely = density / density.sum() / (1 + np.exp(-sign * grid))
        losses.append(-math.log(likely.sum()))
        density = likely / likely.sum()
    mean = density @ grid
    return mean, math.sqrt(density @ (grid - mean) ** 2), np.mean(losses)


@pytest.mark.slow
def test_two_players_agree_with_the_exact_filter_on_a_grid():
    """The difference of two skills is one number, whose exact posterior a grid gives. The filter linearises: its error, in
    exact deviations, vanishes with the skills' scale, and at full scale its forecasts lose under 0.01 nats a match."""
    contrast = torch.tensor([1.0, -1.0])
    errors = []
    for scale in (1.0, 0.3, 0.1):
        _, rounds = league(torch.Generator().manual_seed(7), 1, players=2, scale=scale)
        rounds = [(pairs[0], won[0]) for pairs, won in rounds]
        tx = bc.ekf.dense(prior_precision=SKILL_PRIOR / scale**2, transition_noise=SKILL_Q * scale**2)
        estimate = bc.curvature.ggn(match_forward, bc.likelihoods.bernoulli(), "root")
        step, skills = bc.make_step(match_loss, tx, curvature=estimate), torch.zeros(2)
        state, losses = tx.init(skills), []
        for batch in rounds:
            skills, state, info = step(skills, state, batch)
            losses.append(info.loss.item())
        mean, deviation, best = grid_filter(rounds, scale)
        ours = (contrast @ torch.cholesky_inverse(state[0].root) @ contrast).sqrt().item()
        errors.append((abs((contrast @ skills).item() - mean) / deviation, abs(ours / deviation - 1)))
        assert np.mean(losses) - best < 0.01
    (first, _), (second, _), (third, _) = errors
    assert first > 3 * second > 9 * third
    assert errors[2][0] < 0.002 and errors[2][1] < 0.002


@pytest.mark.slow
def test_skills_are_tracked_with_the_uncertainty_they_claim():
    """Chi-squared with 6 R degrees of freedom, six standard deviations, although the filter linearises. And the ratings
    foretell matches better than ratings that stand still."""
    truth, rounds = league(torch.Generator().manual_seed(8), R)
    skills, roots, surprise = rate(torch.zeros(R, PLAYERS), rounds, match_roots, replicates=R)
    total = squared_errors(truth, skills, roots)
    assert abs(total - PLAYERS * R) < 6 * math.sqrt(2 * PLAYERS * R), total
    _, _, still = rate(torch.zeros(R, PLAYERS), rounds, match_roots, noise=0.0, replicates=R)
    gain = (still - surprise)[STEPS // 2 :].mean(0)  # per league
    assert gain.mean() > 6 * gain.std() / math.sqrt(R)
