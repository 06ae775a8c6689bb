"""Scores of predictions of a task: likelihood, CRPS or calibration error, coverage, telling inputs from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.posterior import detection_auroc
from benchmarks.leaderboard.tasks import Task, shifted


def scored(task: Task, predict: Any) -> dict[str, float]:
    """All scores of a contestant; ``nll`` and ``crps`` in units of the standardised targets."""
    found, elsewhere = predict(task.x_test), predict(shifted(task))
    if task.classes:
        p, q = _probabilities(found), _probabilities(elsewhere)
        y = task.y_test
        return {
            "nll": float(-p.gather(1, y[:, None]).log().mean()),
            "ece": calibration_error(p, y),
            "accuracy": float((p.argmax(1) == y).double().mean()),
            "ood": detection_auroc(torch.special.entr(p).sum(1), torch.special.entr(q).sum(1)),
        }
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


def calibration_error(p: Tensor, y: Tensor, bins: int = 15) -> float:
    """The expected calibration error of the predicted class, in bins of equal width."""
    confidence, label = p.max(1)
    right = (label == y).double()
    place = (confidence * bins).long().clamp_max(bins - 1)
    gaps = [(right[place == b] - confidence[place == b]).sum().abs() for b in range(bins)]
    return float(torch.stack(gaps).sum() / len(y))
