r"""The one number c by which held-out data widen the predictions: of Gaussian noise its variance, of others the logits' scale.

    c = argmax_c  1/n sum_i l_i(c) - [not Gaussian] (log c)^2 / (4 n_f)

on a grid, n_f the data of a fold. Gaussian noise of a known variance is always set; any other likelihood keeps c = 1 unless c
is better by two standard errors. What folds are scored with are the m members that left one out, of M: their squared error

    MSE_m = a + b / m,      b = (MSE_1 - MSE_m) / (1 - 1 / m),      so that      c <- c - b (1 / m - 1 / M).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.ensemble.held import Held, z_of
from bayesopt_chain.ensemble.plan import NOISE
from bayesopt_chain.likelihoods import Likelihood

# Variances from 1e-5 to 10 of the targets'.
NOISES = torch.logspace(-5, 1, 80, dtype=torch.float64, device="cpu") / NOISE
SCALES = torch.logspace(-0.5, 1, 40, dtype=torch.float64, device="cpu")
SURE = 2.0  # standard errors
COARSE = 8  # every eighth of the grid is tried, then those around the best: the score has one maximum, or nearly


def grid_for(held: Held) -> Tensor:
    """The factors that are tried; 1 alone where the likelihood has no width."""
    likelihood = held.problem.likelihood
    if not likelihood.has_width:
        return torch.ones(1, dtype=torch.float64, device="cpu")
    return NOISES if likelihood.has_noise_scale else SCALES


def best(held: Held, levels: Sequence[list[Tensor]], weights: Tensor) -> float:
    """The factor of the grid that scores best."""
    gaussian = held.problem.likelihood.has_noise_scale

    def objective(c: float) -> float:
        fit = float(held.score(levels, weights, c).mean())
        return fit if gaussian else fit - torch.tensor(c, device="cpu").log().item() ** 2 / (4 * held.size)

    grid = grid_for(held).tolist()
    coarse = max(range(0, len(grid), COARSE), key=lambda i: objective(grid[i]))
    fine = range(max(0, coarse - COARSE + 1), min(len(grid), coarse + COARSE))
    return grid[max(fine, key=lambda i: objective(grid[i]))]


def for_all_members(held: Held, outputs: list[Tensor], factor: float) -> float:
    """A noise factor that pairs were scored with, for the mean of all members; at least a quarter of it."""
    likelihood, members = held.problem.likelihood, held.problem.count
    gains, size = [], 0
    for (fold, who), f in zip(held.folds, outputs):
        m = len(who)
        if m < 2:
            continue
        together = squared_error(likelihood, f.mean(0), fold[1])
        alone = torch.stack([squared_error(likelihood, one, fold[1]) for one in f]).mean()
        b = (alone - together) / (1 - 1 / m)
        gains.append(b * (1 / m - 1 / members) * len(f[0]))
        size += len(f[0])
    return max(factor - float(sum(gains)) / size, factor / 4) if size else factor


def squared_error(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    """The mean squared residual in units of the training noise, 0-d; targets count by their weights."""
    counts = likelihood.weights(targets)
    squares = likelihood.whitened(outputs, targets).square()
    return squares.mean() if counts is None else squares.sum() / counts.sum().clamp_min(1e-30)


def settled(held: Held, levels: Sequence[list[Tensor]], weights: Tensor) -> float:
    """The factor to predict with."""
    c = best(held, levels, weights)
    if held.problem.likelihood.has_noise_scale:
        return for_all_members(held, levels[0], c)
    if c == 1:
        return c
    return c if z_of(held.score(levels, weights, c) - held.score(levels, weights, 1.0)) > SURE else 1.0
