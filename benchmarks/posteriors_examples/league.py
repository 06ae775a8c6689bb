"""Skills of football teams that drift between matches, by a diagonal Kalman filter (its ``ekf_premier_league.py``).

Two seasons of a league of 23 teams that is drawn here, with the example's model and of its size: three results, of
chances ``sigmoid(d - 1)``, ``sigmoid(-d - 1)`` and the rest for a difference d of skills, which walk by 0.01 a day in variance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TEAMS, MATCHES, WALK = 23, 760, 0.01


def chances(d: Tensor) -> Tensor:
    """Of a draw, a win at home and a win away, ``[B, 3]``."""
    home, away = torch.sigmoid(d - 1), torch.sigmoid(-d - 1)
    return torch.stack([1 - home - away, home, away], 1)


def data(matches: int = MATCHES) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of one match: the teams ``[1, 2]``, the result ``[1]``, the days since the match before, 0-d."""
    g = torch.Generator().manual_seed(0)
    skills, out = torch.randn(TEAMS, generator=g), []
    for t in range(matches):
        days = torch.tensor(float(t % 10 == 0) * (3 + 5 * (t % 3)))
        skills = skills + (WALK * days).sqrt() * torch.randn(TEAMS, generator=g)
        pair = torch.randperm(TEAMS, generator=g)[None, :2]
        result = torch.multinomial(chances(skills[pair[:, 0]] - skills[pair[:, 1]]), 1, generator=g)[:, 0]
        out.append((pair, result, days))
    return out


def theirs(matches: list) -> dict[str, Any]:
    """With posteriors."""
    import posteriors

    def log_likelihood(params, batch):
        each = chances(params[batch[0][:, 0]] - params[batch[0][:, 1]])
        return each.log().gather(1, batch[1][:, None])[:, 0], each

    filter_ = posteriors.ekf.diag_fisher
    state, losses = filter_.init(torch.zeros(TEAMS), torch.ones(TEAMS)), []
    for match in matches:
        sd = (WALK * match[2]).sqrt()
        state, _ = filter_.update(state, match, log_likelihood, lr=1.0, per_sample=True, transition_sd=sd)
        losses.append(-state.log_likelihood)
    return {"skills": state.params, "deviations": state.sd_diag, "losses": torch.stack(losses)}


def ours(matches: list) -> dict[str, Any]:
    """With this library."""
    import bayesopt_chain as bc

    classes, skills, losses = bc.likelihoods.categorical(), torch.zeros(TEAMS), []
    estimate = bc.ekf.observe(lambda skills, match: chances(-skills[match[0]].diff()[:, 0]).log(), classes)
    walk, tx = {"transition_noise": lambda skills, match: WALK * match[2]}, bc.ekf.diagonal()
    step, state = bc.make_step(None, tx, curvature=estimate, keywords=walk), tx.init(skills)
    for match in matches:
        skills, state, info = step(skills, state, match)
        losses.append(info.loss)
    variance = tx.posterior(state, skills).marginal_variance
    return {"skills": skills, "deviations": variance.sqrt(), "losses": torch.stack(losses)}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Their number, ours, and how far apart they may be.

    Theirs takes the squared gradient of the observed result for the information, ours its expectation over the results, and
    solves for both teams together: skills differ by a part of a deviation, and the forecasts are better.
    """
    half, apart = len(a["losses"]) // 2, ((a["skills"] - b["skills"]) / a["deviations"]).abs().mean().item()
    return {
        "log loss of the second half": (a["losses"][half:].mean().item(), b["losses"][half:].mean().item(), 0.02),
        "deviation of a skill": (a["deviations"].mean().item(), b["deviations"].mean().item(), 0.05),
        "skills apart, in deviations": (0.0, apart, 0.5),
    }
