"""Splits predictive uncertainty into what data could remove (epistemic) and what they could not (aleatoric).

classes    total H[E p] = aleatoric E H[p] + epistemic (the mutual information of label and parameters), in nats
moments    total Var y  = aleatoric E Var[y | theta] + epistemic Var E[y | theta]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import kinds


class Uncertainty(NamedTuple):
    """``total = aleatoric + epistemic``, tensors of one shape."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


@kinds.takes(probabilities=kinds.REALS)
def uncertainty_of_classes(probabilities: Tensor) -> Uncertainty:
    """Split the entropy of class probabilities over draws (Depeweg et al., 2018).

    Args:
        probabilities: of each draw, ``[S, *, C]``; they sum to 1 over C.

    Returns:
        :class:`Uncertainty` with tensors ``[*]``, in nats.

    Raises:
        ValueError: no axis of draws and classes.

    Example:
        >>> import torch
        >>> from bayesopt_chain import predict
        >>> predict.uncertainty_of_classes(torch.eye(2)[:, None]).epistemic  # the draws are sure and disagree
        tensor([0.6931])
    """
    if probabilities.ndim < 2 or not probabilities.numel():
        raise ValueError(
            f"uncertainty_of_classes: probabilities must be [draws, *, classes], got shape {tuple(probabilities.shape)}"
        )
    total = torch.special.entr(probabilities.mean(0)).sum(-1)
    aleatoric = torch.special.entr(probabilities).sum(-1).mean(0)
    return Uncertainty(total, aleatoric, (total - aleatoric).clamp_min(0))


VARIANCES = kinds.Kind(
    lambda x: kinds.REALS.fits(x) or kinds.real("[0, inf)").fits(x), "a real tensor, or a number from 0 on"
)


@kinds.takes(means=kinds.REALS, variances=VARIANCES)
def uncertainty_of_moments(means: Tensor, variances: Tensor | float) -> Uncertainty:
    """Split the variance of draws' predictions.

    Args:
        means: of each draw, ``[S, *]``.
        variances: of the noise, ``[S, *]`` or a number.

    Returns:
        :class:`Uncertainty` with tensors ``[*]``, in squared units of the target.

    Raises:
        ValueError: variances that do not broadcast to the means.

    Example:
        >>> import torch
        >>> from bayesopt_chain import predict
        >>> predict.uncertainty_of_moments(torch.tensor([[0.0], [2.0]]), 0.5)
        Uncertainty(total=tensor([1.5000]), aleatoric=tensor([0.5000]), epistemic=tensor([1.]))
    """
    if not means.ndim or not means.numel():
        raise ValueError(f"uncertainty_of_moments: means must be [draws, *], got shape {tuple(means.shape)}")
    noise = torch.as_tensor(variances, dtype=means.dtype, device=means.device)
    if noise.ndim > means.ndim or any(a not in (1, b) for a, b in zip(noise.shape[::-1], means.shape[::-1])):
        raise ValueError(
            f"uncertainty_of_moments: variances of shape {tuple(noise.shape)} do not broadcast to means {tuple(means.shape)}"
        )
    aleatoric = noise.expand_as(means).mean(0)
    epistemic = means.var(0, correction=0)
    return Uncertainty(aleatoric + epistemic, aleatoric, epistemic)
