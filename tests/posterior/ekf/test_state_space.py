"""A model in motion with a known answer: skills that walk at random between matches."""

import math

import numpy as np
import pytest
import torch

import bayesopt_chain as bc

pytestmark = pytest.mark.usefixtures("double_precision")


STEPS = 120


# The probability that i beats j is sigmoid(s_i - s_j), skills walk at random (Duffield et al., 2024)


def match_forward(skills, batch):
    return skills[batch[0][:, 0]] - skills[batch[0][:, 1]]


def match_loss(skills, batch):
    return bc.likelihoods.bernoulli().nll(match_forward(skills, batch), batch[1]).mean()


SKILL_Q, SKILL_PRIOR, PLAYERS = 0.01, 1.0, 6


def league(seed, players=PLAYERS, scale=1.0):
    """Rounds in which every player plays once: pairs, and whether the first of each won."""
    generator, rounds = torch.Generator().manual_seed(seed), []
    skills = torch.randn(players, generator=generator) * scale / math.sqrt(SKILL_PRIOR)
    for _ in range(STEPS):
        skills = skills + scale * math.sqrt(SKILL_Q) * torch.randn(players, generator=generator)
        pairs = torch.randperm(players, generator=generator).reshape(-1, 2)
        chance = torch.sigmoid(skills[pairs[:, 0]] - skills[pairs[:, 1]])
        rounds.append((pairs, torch.bernoulli(chance, generator=generator)))
    return rounds


def rated(rounds, players=PLAYERS, scale=1.0):
    """Skills, the root of their information, and the loss of every round's forecast."""
    tx = bc.ekf.dense(prior_precision=SKILL_PRIOR / scale**2, transition_noise=SKILL_Q * scale**2)
    step = bc.make_step(match_loss, tx, curvature=bc.curvature.ggn(match_forward, bc.likelihoods.bernoulli(), "root"))
    skills, losses = torch.zeros(players), []
    state = tx.init(skills)
    for batch in rounds:
        skills, state, info = step(skills, state, batch)
        losses.append(info.loss.item())
    return skills, state[0].root, losses


def test_skill_ratings_are_the_textbook_extended_filters():
    """Against numpy's information form, match by match, to 1e-9, with increments from ``curvature.ggn``."""
    rounds = league(6)
    skills, root, _ = rated(rounds)
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
        rounds = league(7, 2, scale)
        skills, root, losses = rated(rounds, 2, scale)
        mean, deviation, best = grid_filter(rounds, scale)
        ours = (contrast @ torch.cholesky_inverse(root) @ contrast).sqrt().item()
        errors.append((abs((contrast @ skills).item() - mean) / deviation, abs(ours / deviation - 1)))
        assert np.mean(losses) - best < 0.01
    (first, _), (second, _), (third, _) = errors
    assert first > 3 * second > 9 * third
    assert errors[2][0] < 0.002 and errors[2][1] < 0.002
