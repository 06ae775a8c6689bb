"""How good predictions are: calls of torchmetrics and scikit-learn, with the arguments that predictive averages have.

The calibration error is that of Naeini, Cooper and Hauskrecht (2015), over bins of equal width.
Needs the extra ``metrics`` (torchmetrics, scikit-learn).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.checks import installed


@kinds.takes(log_probabilities=kinds.REALS, targets=kinds.NUMBERS_OF_CLASSES, bins=kinds.WHOLE)
def classification_metrics(log_probabilities: Tensor, targets: Tensor, *, bins: int = 15) -> dict[str, float]:
    """Accuracy, negative log likelihood, Brier score and expected calibration error of class predictions.

    Args:
        log_probabilities: of the classes, ``[N, C]``, such as ``draws.predict(..., reduce="log_mean_exp")``.
        targets: class numbers, int64 ``[N]``.
        bins: confidence bins of the calibration error.

    Returns:
        ``accuracy``, ``nll`` (nats a datum), ``brier`` (sum over classes of squared errors, in [0, 2]), ``ece`` (in [0, 1]).

    Raises:
        ValueError: shapes that do not belong together, or rows that are no probabilities.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> metrics = bc.posterior.classification_metrics(p.log(), torch.tensor([0, 1]))
        >>> metrics["accuracy"], round(metrics["brier"], 3)
        (1.0, 0.05)
    """
    installed("classification_metrics", "metrics", "torchmetrics")
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    if log_probabilities.ndim != 2 or targets.shape != log_probabilities.shape[:1] or not log_probabilities.numel():
        raise ValueError(
            f"classification_metrics: expected log_probabilities [N, C] and targets [N], got {tuple(log_probabilities.shape)} "
            f"and {tuple(targets.shape)}"
        )
    total = log_probabilities.logsumexp(-1).abs().max().item()
    if not total < 1e-3:
        raise ValueError(
            f"classification_metrics: the probabilities of a row add up to exp({total:.3g}), not 1; pass log-softmax values"
        )
    classes = log_probabilities.shape[1]
    if targets.min() < 0 or targets.max() >= classes:
        raise ValueError(f"classification_metrics: targets must lie in 0 to {classes - 1}")
    p = log_probabilities.exp()
    return {
        "accuracy": multiclass_accuracy(p, targets, classes, average="micro").item(),
        "nll": torch.nn.functional.nll_loss(log_probabilities, targets).item(),
        "brier": (p - torch.nn.functional.one_hot(targets, classes)).square().sum(-1).mean().item(),
        "ece": multiclass_calibration_error(p, targets, classes, n_bins=bins).item(),
    }


@kinds.takes(mean=kinds.REALS, variance=kinds.REALS, targets=kinds.VALUES, level=kinds.real("(0, 1)"))
def regression_metrics(mean: Tensor, variance: Tensor, targets: Tensor, *, level: float = 0.9) -> dict[str, float]:
    """Root mean squared error, negative log likelihood and coverage of Gaussian predictions.

    Args:
        mean, variance: of the prediction (noise included), of the shape of ``targets``.
        targets: what was observed.
        level: probability of the central interval whose coverage is counted.

    Returns:
        ``rmse``, ``nll`` (nats a value), ``coverage`` (share of targets inside the interval; ``level`` if calibrated).

    Raises:
        ValueError: three shapes that differ; a level outside (0, 1).

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> bc.posterior.regression_metrics(torch.zeros(2), torch.ones(2), torch.tensor([0.0, 3.0]))["coverage"]
        0.5
    """
    if not mean.shape == variance.shape == targets.shape:
        raise ValueError(
            f"regression_metrics: mean {tuple(mean.shape)}, variance {tuple(variance.shape)} and targets "
            f"{tuple(targets.shape)} must have one shape"
        )
    if not mean.numel():
        raise ValueError("regression_metrics: mean, variance and targets are empty")
    if bool((variance < 0).any()):
        raise ValueError(
            f"regression_metrics: variance must not be negative, its smallest is {float(variance.min()):.3g}"
        )
    half = (
        torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64, device="cpu")).item() * variance.sqrt()
    )
    return {
        "rmse": (mean - targets).square().mean().sqrt().item(),
        "nll": torch.nn.functional.gaussian_nll_loss(mean, targets, variance, full=True, eps=1e-30).item(),
        "coverage": ((mean - targets).abs() <= half).double().mean().item(),
    }


@kinds.takes(known=kinds.VALUES, unknown=kinds.VALUES)
def detection_auroc(known: Tensor, unknown: Tensor) -> float:
    """Area under the ROC curve of telling unknown inputs from known ones by a score that should be higher for unknown.

    Args:
        known: scores of inputs like the training data, such as the epistemic uncertainty, ``[N]``.
        unknown: scores of other inputs, ``[M]``.

    Returns:
        A number in [0, 1]; 0.5 is chance.

    Raises:
        ImportError: scikit-learn is not installed (``bayesopt_chain[metrics]``).
        ValueError: no scores on one side, or scores that are not finite.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> bc.posterior.detection_auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
        0.75
    """
    installed("detection_auroc", "metrics", "sklearn")
    for name, scores in (("known", known), ("unknown", unknown)):
        if scores.ndim != 1 or not scores.numel() or not scores.isfinite().all():
            raise ValueError(
                f"detection_auroc: {name} must be finite scores [N], at least one, got shape {tuple(scores.shape)}"
            )
    from sklearn.metrics import roc_auc_score

    labels = torch.cat([torch.zeros(len(known), device="cpu"), torch.ones(len(unknown), device="cpu")])
    return float(roc_auc_score(labels.numpy(), torch.cat([known, unknown]).detach().cpu().numpy()))
