"""Chooses the hyperparameters of a Laplace posterior: by the evidence, which is differentiable, or by held-out loss.

    evidence      maximise  log Z(h)  over positive h, by L-BFGS in log h
    validation    minimise  loss(h)   over given candidates

`h` is whatever the caller's function makes of it: prior precisions, one a layer, or the noise's variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.trees import Tree


def tune_by_evidence(log_evidence: Callable[[Tree], Tensor], start: Tree, *, steps: int = 100) -> Tree:
    """Maximise a log evidence over positive hyperparameters.

    Args:
        log_evidence: from the hyperparameters, a tree of tensors like `start`, to a 0-d tensor, in nats.
        start: a tree of positive tensors (or numbers).
        steps: at most so many L-BFGS iterations; it stops when the gradient in log h is below 1e-9.

    Returns:
        The best hyperparameters, detached.

    Raises:
        ValueError: for a start that is not positive, or an evidence that is not finite there.

    >>> import torch
    >>> from bayesopt_chain.posterior.tuning import tune_by_evidence
    >>> best = tune_by_evidence(lambda h: h.log() - h / 3, torch.tensor(1.0, dtype=torch.float64))
    >>> round(best.item(), 6)
    3.0
    """
    values, structure = optree.tree_flatten(start)
    values = [torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64) for value in values]
    if any(bool((value <= 0).any()) for value in values):
        raise ValueError("start has values that are not positive: hyperparameters are searched for in log space")
    logs = [value.detach().log().requires_grad_() for value in values]
    optimizer = torch.optim.LBFGS(
        logs, max_iter=steps, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -log_evidence(optree.tree_unflatten(structure, [log.exp() for log in logs]))
        loss.backward()
        return loss

    with torch.enable_grad():
        if not math.isfinite(closure().item()):
            raise ValueError("log_evidence is not finite at start: pass a proper prior and another start")
        optimizer.step(closure)
    return optree.tree_unflatten(structure, [log.detach().exp() for log in logs])


def tune_by_validation(loss: Callable[[Any], Any], candidates: Sequence[Any]) -> tuple[Any, list[float]]:
    """Return the candidate with the smallest held-out loss, and every candidate's loss.

    A candidate whose loss is not finite, or whose posterior is refused with a `ValueError`, counts as infinitely bad.

    Raises:
        ValueError: when there is no candidate with a finite loss.

    >>> from bayesopt_chain.posterior.tuning import tune_by_validation
    >>> tune_by_validation(lambda h: (h - 2) ** 2, [1, 2, 4])
    (2, [1.0, 0.0, 4.0])
    """

    def value(candidate: Any) -> float:
        try:
            number = float(loss(candidate))
        except ValueError:
            return math.inf
        return number if math.isfinite(number) else math.inf

    losses = [value(candidate) for candidate in candidates]
    if not losses or min(losses) == math.inf:
        raise ValueError(f"none of {len(losses)} candidates has a finite loss: pass others, or check loss itself")
    return candidates[losses.index(min(losses))], losses
