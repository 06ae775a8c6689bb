r"""How good predictions are: calls of torchmetrics and scikit-learn, with the arguments that predictive averages have.

The calibration error is that of Naeini, Cooper and Hauskrecht (2015), over bins of equal width.
Needs the extra ``metrics`` (torchmetrics, scikit-learn).

Two corrections of finished predictions by data that no member has seen.

**Split conformal intervals** (Vovk, Gammerman and Shafer, 2005; for distribution functions Chernozhukov, Wüthrich and Zhu,
2021). Of ``n`` held-out targets let ``s_i = |2 F_i(y_i) - 1|``, the smallest level whose central interval holds the target.
With ``j = ceil((n + 1) a)`` and ``p`` the ``j``-th smallest ``s_i``, intervals of level ``p`` hold a new target with
probability at least ``a``, whatever is wrong with the predictions, if the new datum and the held-out ones are exchangeable:
its score is then equally likely to have any of ``n + 1`` ranks, and ``j`` of them are good. Without ties the probability is
``j / (n + 1)``, exactly.

**Temperature scaling** (Guo, Pleiss, Sun and Weinberger, 2017). One factor ``c`` divides the logits,

    c = argmin_c  - 1/n sum_i log softmax(f_i / c)[y_i],

a convex problem in ``b = 1 / c``: its slope is ``E_i[ E_{p_i}[f] - f[y_i] ]`` with ``p_i = softmax(b f_i)``, which rises with
``b``, so that bisection finds its zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.posterior.evidence import lowest


@checks.takes(log_probabilities=checks.REALS, targets=checks.NUMBERS_OF_CLASSES, bins=checks.WHOLE)
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
    checks.installed("classification_metrics", "metrics", "torchmetrics")
    from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

    _require_of_classes("classification_metrics", "log_probabilities", log_probabilities, targets)
    total = log_probabilities.logsumexp(-1).abs().max().item()
    if not total < 1e-3:
        raise ValueError(
            f"classification_metrics: the probabilities of a row add up to exp({total:.3g}), not 1; pass log-softmax values"
        )
    p, classes = log_probabilities.exp(), log_probabilities.shape[1]
    return {
        "accuracy": multiclass_accuracy(p, targets, classes, average="micro").item(),
        "nll": torch.nn.functional.nll_loss(log_probabilities, targets).item(),
        "brier": (p - torch.nn.functional.one_hot(targets, classes)).square().sum(-1).mean().item(),
        "ece": multiclass_calibration_error(p, targets, classes, n_bins=bins).item(),
    }


@checks.takes(known=checks.VALUES, unknown=checks.VALUES)
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
    checks.installed("detection_auroc", "metrics", "sklearn")
    for name, scores in (("known", known), ("unknown", unknown)):
        if scores.ndim != 1 or not scores.numel() or not scores.isfinite().all():
            raise ValueError(
                f"detection_auroc: {name} must be finite scores [N], at least one, got shape {tuple(scores.shape)}"
            )
    from sklearn.metrics import roc_auc_score

    labels = torch.cat([torch.zeros(len(known), device="cpu"), torch.ones(len(unknown), device="cpu")])
    return float(roc_auc_score(labels.numpy(), torch.cat([known, unknown]).detach().cpu().numpy()))


def _require_of_classes(who: str, name: str, scores: Tensor, targets: Tensor) -> None:
    """Refuse what are no scores of classes for each target, and classes that have none."""
    if scores.ndim != 2 or targets.shape != scores.shape[:1] or not scores.numel():
        raise ValueError(
            f"{who}: expected {name} [N, C] and targets [N], got {tuple(scores.shape)} and {tuple(targets.shape)}"
        )
    if targets.min() < 0 or targets.max() >= scores.shape[1]:
        raise ValueError(f"{who}: targets must lie in 0 to {scores.shape[1] - 1}")


_SCALES = (1e-3, 1e3)  # between which the factor is looked for


@checks.takes(
    prediction=checks.WITH_CDF,
    targets=checks.VALUES,
    level=checks.number("(0, 1)"),
)
def conformal_level(prediction: Any, targets: Tensor, level: float = 0.9) -> float:
    """The level to ask of :meth:`interval`, so that intervals of new predictions hold their targets with probability ``level``.

    The guarantee is on average over held-out data and new ones alike, not for each input.

    Args:
        prediction: of held-out data that nothing was fitted to, with ``cdf(targets)``, such as that of ``fitted.predict`` or
            ``likelihood.mixture``; of targets on the line, ``[n]`` or ``[n, 1]``.
        targets: those of the held-out data, of the shape of the prediction's mean.
        level: the probability wanted, in (0, 1). Default 0.9.

    Returns:
        A number in [0, 1]; above ``level`` where intervals were too narrow.

    Raises:
        ValueError: several outputs a datum, NaN, or fewer than ``level / (1 - level)`` data, of which no finite interval
            follows.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> from bayesopt_chain import likelihoods
        >>> too_narrow = likelihoods.gaussian(0.25).predictive(torch.zeros(99, 1), torch.zeros(99, 1, 1))
        >>> targets = torch.special.ndtri(torch.arange(1, 100) / 100)[:, None]      # of variance 1
        >>> level = bc.posterior.conformal_level(too_narrow, targets, 0.8)
        >>> low, high = too_narrow.interval(level)
        >>> round(float((high - low)[0] / 2), 2)                                    # a normal's is 1.28
        1.28
    """
    scores = (2 * prediction.cdf(targets) - 1).abs()
    n = len(scores)
    if scores.ndim > 2 or scores.numel() != n:
        raise ValueError(
            f"conformal_level: one target a datum is needed, [n] or [n, 1], got {tuple(scores.shape)}: "
            "take each output by itself"
        )
    if scores.isnan().any():
        raise ValueError("conformal_level: the prediction or the targets hold NaN")
    rank = math.ceil((n + 1) * level - 1e-9)
    if rank > n:
        raise ValueError(
            f"conformal_level: {n} held-out data give no finite interval of level {level}; at least "
            f"{math.ceil(level / (1 - level) - 1e-9)} are needed"
        )
    return float(scores.reshape(-1).double().kthvalue(rank).values)


@checks.takes(logits=checks.REALS, targets=checks.NUMBERS_OF_CLASSES)
def temperature_scaling(logits: Tensor, targets: Tensor) -> float:
    """The factor by which logits are divided, so that held-out classes are as likely as possible.

    Args:
        logits: of held-out data, ``[n, C]``; log probabilities do as well, such as
            ``draws.predict(..., reduce="log_mean_exp")``.
        targets: class numbers, int64 ``[n]``.

    Returns:
        The factor, in [0.001, 1000]; above 1 where the predictions were too sure.

    Raises:
        ValueError: shapes that do not belong together, no data, a class out of range, or numbers that are not finite.

    Example:
        >>> import torch
        >>> import bayesopt_chain as bc
        >>> sure = 3 * torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
        >>> factor = bc.posterior.temperature_scaling(sure, torch.tensor([0, 0, 0, 1]))   # right three times of four
        >>> (sure / factor).softmax(-1)[0]
        tensor([0.7500, 0.2500])
    """
    _require_of_classes("temperature_scaling", "logits", logits, targets)
    if not logits.isfinite().all():
        raise ValueError("temperature_scaling: logits hold NaN or infinity")
    f = logits.double()
    right = f.gather(1, targets[:, None])[:, 0]

    def rises(log_b: Tensor) -> Tensor:
        mean = ((log_b.exp() * f).softmax(-1) * f).sum(-1)
        return (mean - right).mean() > 0

    low, high = (-f.new_tensor(c).log() for c in reversed(_SCALES))
    return math.exp(-float(lowest(rises, low, high, 60)))
