r"""Stage 5: the weights of the levels, by EM on held-out scores, with two pseudo-data on the mode.

    q_ij = w_j exp(l_ij) / sum_k w_k exp(l_ik),      w_j <- (sum_i q_ij + 2 [j = 0]) / (n + 2)

where ``l_ij`` is the held-out log score of target i at level j (Yao, Vehtari, Simpson and Gelman, 2018, for stacking). Each
iteration raises ``sum_i log sum_j w_j exp(l_ij) + 2 log w_0``.
"""

from __future__ import annotations

import torch
from torch import Tensor

PSEUDO_DATA, ITERATIONS, LEAST = 2.0, 200, 1e-9


def stack_weights(scores: Tensor, weights: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """The weights of levels, ``[J]``.

    Args:
        scores: log scores ``[J, n]``.
        weights: of the targets, ``[n]``. Default: 1.
        start: ``[J]``. Default: equal.

    Example:
        >>> import torch
        >>> from bayesopt_chain.ensemble.stack import stack_weights
        >>> stack_weights(torch.zeros(2, 10))  # levels that say the same: the pseudo-data decide
        tensor([1., 0.], dtype=torch.float64)
    """
    levels = scores.shape[0]
    logs = scores.double()
    counts = torch.ones_like(logs[0]) if weights is None else weights.double()
    w = torch.full((levels,), 1 / levels, dtype=torch.float64, device=logs.device) if start is None else start.double()
    for _ in range(ITERATIONS):
        q = ((logs + w.log()[:, None]).softmax(0) * counts).sum(1)
        q[0] += PSEUDO_DATA
        w = (q / q.sum()).clamp_min(LEAST)
    return w / w.sum()
