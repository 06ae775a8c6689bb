r"""Scores on the folds that members left out.

Of a level, the draws s of the members that left a fold out, a target there has the log score

    l = log 1/S sum_s p(y | f_s),      of several levels with weights w      log sum_j w_j exp(l_j),

each density at least e^-50, so that one surprise does not decide everything. Scores of a datum's targets are added up, times
their weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.ensemble.cost import FORWARD, passes
from bayesopt_chain.ensemble.problem import Level, Problem
from bayesopt_chain.likelihoods import Likelihood

FLOOR = -50.0


@dataclass(frozen=True)
class Held:
    """Two folds, and which members left each out.

    Attributes:
        problem: of these members.
        folds: pairs of a fold's ``(inputs, targets)`` and of the members that left it out.
    """

    problem: Problem
    folds: list[tuple[Any, list[int]]]

    @classmethod
    def of(cls, problem: Problem) -> Held:
        """The folds of a problem."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, fold in enumerate(problem.folds):
            groups.setdefault(tuple(fold.tolist()), []).append(i)
        return cls(
            problem, [(problem.data.take(torch.tensor(rows, device="cpu")), who) for rows, who in groups.items()]
        )

    def outputs(self, level: Level) -> list[Tensor]:
        """Of each fold, outputs ``[S m, n, *event]`` of the draws of the m members that left it out."""
        return [self.problem.outputs(level.of(who), fold[0]) for fold, who in self.folds]

    def cost(self, draws: int) -> float:
        """Passes of the forwards behind :meth:`outputs`."""
        return sum(passes(draws * len(who), self.size, self.problem.data.size, FORWARD) for _, who in self.folds) / max(
            1, self.problem.count
        )

    @property
    def size(self) -> int:
        """Data in a fold."""
        return len(self.problem.folds[0])

    @property
    def weights(self) -> Tensor:
        """Of the targets, ``[n, P]`` over both folds, on the CPU."""
        return torch.cat([_weights(self.problem.likelihood, fold[1]) for fold, _ in self.folds]).cpu()

    def levels(self, levels: Sequence[list[Tensor]], factor: float, likelihood: Likelihood | None = None) -> Tensor:
        """Log scores ``[J, n, P]`` of J levels, for P targets of a datum, on the CPU."""
        lik = self.problem.likelihood if likelihood is None else likelihood
        rows = []
        for outputs in levels:
            parts = []
            for (fold, _), f in zip(self.folds, outputs):
                scores = log_scores(lik, f.double(), fold[1], factor)
                parts.append(scores.logsumexp(0) - math.log(len(scores)))
            rows.append(torch.cat(parts).cpu())
        return torch.stack(rows)

    def score(self, levels: Sequence[list[Tensor]], weights: Tensor, factor: float) -> Tensor:
        """Log scores ``[n]`` of the data of both folds under a mixture of levels."""
        each = (self.levels(levels, factor) + weights.double().log()[:, None, None]).logsumexp(0)
        return (each * self.weights).sum(1)


def log_scores(likelihood: Likelihood, outputs: Tensor, targets: Any, factor: float) -> Tensor:
    """Log densities ``[S, n, P]`` of targets at outputs ``[S, n, *event]``, of predictions widened by a factor."""
    labels = likelihood.labels(targets)
    if factor != 1:
        likelihood, outputs = likelihood.widened(outputs, factor)
    scores = likelihood.log_prob(outputs, labels)
    return scores.reshape(*scores.shape[:2], -1).nan_to_num(FLOOR, FLOOR, FLOOR).clamp_min(FLOOR)


def z_of(difference: Tensor) -> float:
    """The mean of paired differences ``[n]`` in its standard errors."""
    return float(difference.mean() / (difference.std() / len(difference) ** 0.5 + 1e-12))


def _weights(likelihood: Likelihood, targets: Any) -> Tensor:
    labels, weights = likelihood.labels(targets), likelihood.weights(targets)
    w = torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double()
    return w.reshape(len(w), -1)
