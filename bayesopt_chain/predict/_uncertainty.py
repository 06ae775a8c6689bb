"""Splits predictive uncertainty into what data could remove (epistemic) and what they could not (aleatoric).

classes    total H[E p] = aleatoric E H[p] + epistemic (the mutual information of label and parameters), in nats
moments    total Var y  = aleatoric E Var[y | theta] + epistemic Var E[y | theta]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Uncertainty(NamedTuple):
    """``total = aleatoric + epistemic``, tensors of one shape."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def uncertainty_of_classes(probabilities: Tensor) -> Uncertainty:
    """Split the entropy of class probabilities over draws (Depeweg et al., 2018).

    Args:
        probabilities: of each draw, ``[S, *, C]``; they sum to 1 over C.

    Returns:
        :class:`Uncertainty` with tensors ``[*]``, in nats.

    Raises:
        IndexError: no axis of draws and classes.

    Example:
        >>> import torch
        >>> from bayesopt_chain import predict
        >>> predict.uncertainty_of_classes(torch.eye(2)[:, None]).epistemic  # the draws are sure and disagree
        tensor([0.6931])
    """
    total = torch.special.entr(probabilities.mean(0)).sum(-1)
    aleatoric = torch.special.entr(probabilities).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp_min(0))


def uncertainty_of_moments(means: Tensor, variances: Tensor | float) -> Uncertainty:
    """Split the variance of draws' predictions.

    Args:
        means: of each draw, ``[S, *]``.
        variances: of the noise, ``[S, *]`` or a number.

    Returns:
        :class:`Uncertainty` with tensors ``[*]``, in squared units of the target.

    Raises:
        RuntimeError: variances that do not broadcast to the means.

    Example:
        >>> import torch
        >>> from bayesopt_chain import predict
        >>> predict.uncertainty_of_moments(torch.tensor([[0.0], [2.0]]), 0.5)
        Uncertainty(total=tensor([1.5000]), aleatoric=tensor([0.5000]), epistemic=tensor([1.]))
    """
    aleatoric = torch.as_tensor(variances, dtype=means.dtype, device=means.device).expand_as(means).mean(0)
    epistemic = means.var(0, correction=0)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
