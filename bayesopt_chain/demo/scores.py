"""How good a contestant's predictions of a task's test half are.

nll          mean of -log p(y | x), in nats a datum; of numbers in units of the standardised target
error        share of wrong classes; of numbers the root of the mean squared error
miscovered   classes: the expected calibration error in 15 bins; numbers: | share of targets in the 90 % intervals - 0.9 |
unseen       the area under the ROC curve of telling classes that were never trained on by the entropy of the prediction
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from bayesopt_chain.demo.tasks import Task

BINS = 15


def scores(task: Task, prediction: Any, elsewhere: Any) -> dict[str, float]:
    """The scores of a prediction of the test half and, where the task has unseen classes, of their inputs."""
    y = task.test[1]
    found = {"nll": -float(prediction.log_prob(y).double().mean())}
    if not task.classes:
        low, high = prediction.interval(0.9)
        inside = ((low <= y) & (y <= high)).double().mean()
        return found | {
            "error": float((prediction.mean - y).square().mean().sqrt()),
            "miscovered": abs(float(inside) - 0.9),
        }
    p = prediction.probabilities
    found |= {"error": float((p.argmax(1) != y).double().mean()), "miscovered": calibration_error(p, y)}
    if len(task.unseen):
        entropies = torch.cat([prediction.entropy, elsewhere.entropy])
        unseen = torch.arange(len(entropies), device="cpu") >= len(y)
        found["unseen"] = float(roc_auc_score(unseen.numpy(), entropies.numpy()))
    return found


def calibration_error(p: Tensor, y: Tensor, bins: int = BINS) -> float:
    """The expected calibration error of the predicted class, ``p`` ``[N, C]``, ``y`` ``[N]``, in bins of equal width.

    Example:
        >>> import torch
        >>> from bayesopt_chain.demo.scores import calibration_error
        >>> p = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> round(calibration_error(p, torch.tensor([0, 1])), 3)
        0.45
    """
    confidence, guess = p.double().max(1)
    gap = (guess == y).double() - confidence
    which = (confidence * bins).long().clamp_max(bins - 1)
    return float(torch.zeros(bins, dtype=torch.float64, device=p.device).index_add(0, which, gap).abs().sum() / len(y))


def sureness(task: Task, prediction: Any, elsewhere: Any) -> dict[str, list[float]]:
    """Of a task with unseen classes what the figure draws: of every test input, those unseen last, the largest probability and
    whether the class was right, which of an unseen one it never is."""
    p, q = prediction.probabilities, elsewhere.probabilities
    right = torch.cat([p.argmax(1) == task.test[1], torch.zeros(len(q), dtype=torch.bool, device=q.device)])
    return {"confidence": torch.cat([p, q]).amax(1).tolist(), "right": right.double().tolist(), "seen": [len(p)]}
