"""Scores of predictions of a task: likelihood, CRPS or calibration error, coverage, telling inputs from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.posterior import classification_metrics, detection_auroc
from benchmarks.leaderboard.tasks import Task, shifted


def scored(task: Task, predict: Any) -> dict[str, float]:
    """All scores of a contestant; ``nll`` and ``crps`` in units of the standardised targets."""
    found, elsewhere = predict(task.x_test), predict(shifted(task))
    if task.classes:
        p, q = _probabilities(found), _probabilities(elsewhere)
        metrics = classification_metrics(p.log(), task.y_test)
        ood = detection_auroc(torch.special.entr(p).sum(1), torch.special.entr(q).sum(1))
        return {**{name: metrics[name] for name in ("nll", "ece", "accuracy")}, "ood": ood}
    low, high = found.interval(0.9)
    y = task.y_test
    return {
        "nll": float(-found.log_prob(y).double().mean()),
        "crps": float(found.crps(y).double().mean()),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "rmse": float((found.mean - y).square().mean().sqrt()),
        "ood": detection_auroc(found.variance.flatten(), elsewhere.variance.flatten()),
    }


def _probabilities(found: Any) -> Tensor:
    p = found if torch.is_tensor(found) else found.probabilities
    p = p.detach().double().clamp(1e-12, 1)
    return p / p.sum(1, keepdim=True)
