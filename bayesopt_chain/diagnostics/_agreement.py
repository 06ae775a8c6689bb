r"""Do chains agree: split R-hat, and how probable it is where they do.

R-hat alone needs a threshold, and every threshold is wrong for some number of draws: with few, chains that agree exceed it;
with many parameters the largest of them always does. The variance between the means of ``m`` half chains of ``h`` draws,
``B``, over the one within, ``W``, is a ratio of variances, with ``h / tau`` independent draws in each:

    F = B h / (tau W) ~ F(m - 1, m (h / tau - 1)),

``tau`` the integrated autocorrelation time of the rank-normalised draws. Of ``E`` p-values the smallest is multiplied by
``2 E`` (Bonferroni, for both ways of looking), and four times their median is a p-value under any dependence of the
elements (Rüger, 1978): whichever is smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CAUTION = 1.5  # by which tau, itself an estimate, is enlarged


class Agreement(NamedTuple):
    """R-hat and effective draws of each element ``[E]``, and the p-value of all elements together."""

    r_hat: Tensor
    effective: Tensor
    p_value: float
    worst: int


def agreement(x: Tensor) -> Agreement:
    """Whether split chains agree.

    Args:
        x: draws ``[draws, chains, elements]``, float64, none of them constant.
    """
    from scipy.stats import f

    h = len(x) // 2
    z = rank_normalised(torch.cat([x[:h], x[-h:]], 1))
    m = z.shape[1]
    within, between = z.var(0).mean(0), z.mean(0).var(0)
    tau = autocorrelation_time(rank_normalised(x))
    tau = CAUTION * torch.maximum(tau, tau.median())
    effective = (h / tau).clamp(min=1.01)
    r_hat = ((h - 1) / h + between / within).sqrt()
    ratio = between * effective / within
    p = torch.as_tensor(f.sf(ratio.numpy(), m - 1, (m * (effective - 1)).clamp(min=1.0).numpy()))
    together = min(1.0, 2 * len(p) * float(p.min()), 4 * float(p.median()))
    return Agreement(r_hat, CAUTION * m * effective, together, int(p.argmin()))


def rank_normalised(x: Tensor) -> Tensor:
    """``Phi^-1((r - 3/8) / (n + 1/4))`` of the ranks over all draws and chains (Blom; Vehtari et al., 2021)."""
    n, c, elements = x.shape
    ranks = x.reshape(n * c, elements).argsort(0).argsort(0).double() + 1
    return torch.special.ndtri((ranks - 0.375) / (n * c + 0.25)).reshape(n, c, elements)


def autocorrelation_time(x: Tensor) -> Tensor:
    """Integrated autocorrelation time of ``[draws, chains, elements]`` in draws, by Geyer's positive, decreasing pairs.

    Autocovariances are pooled over chains, each about its own mean; what taking out that mean costs, ``1 / n``, is put back.
    """
    n = len(x)
    spectrum = torch.fft.rfft(x - x.mean(0), 2 * n, dim=0)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, dim=0)[:n].sum(1)
    correlation = covariance / covariance[:1].clamp(min=1e-300)
    correlation = correlation + torch.arange(n)[:, None] / n / n
    pairs = correlation[0 : n - 1 : 2][: n // 2] + correlation[1:n:2][: n // 2]
    pairs = torch.cummin(pairs, 0).values
    return (2 * (pairs * (pairs > 0).cumprod(0)).sum(0) - 1).clamp(1 / CAUTION, n)


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Mean of ``[draws, chains]`` and its standard error, the larger of what autocorrelation and what the chains say."""
    tau = max(float(autocorrelation_time(x[..., None])[0]), 1.0)
    error = float(x.std()) * (tau / x.numel()) ** 0.5
    if x.shape[1] > 3:
        error = max(error, float(x.mean(0).std()) / x.shape[1] ** 0.5)
    return float(x.mean()), error
