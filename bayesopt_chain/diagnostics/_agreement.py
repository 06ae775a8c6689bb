r"""Do chains agree: split R-hat, and how probable it is where they do.

R-hat alone needs a threshold, and every threshold is wrong for some number of draws: with few, chains that agree exceed it;
with many parameters the largest of them always does. The variance between the means of ``m`` half chains of ``h`` draws,
``B``, over the one within, ``W``, is a ratio of variances, with ``h / tau`` independent draws in each:

    F = B h / (tau W) ~ F(m - 1, m (h / tau - 1)),

``tau`` the integrated autocorrelation time of the rank-normalised draws. Of ``E`` p-values the smallest is multiplied by
``2 E`` (Bonferroni, for both ways of looking), and four times their median is a p-value under any dependence of the
elements (Rüger, 1978): whichever is smaller.

**One chain among many** hardly changes R-hat. The mean of each chain is compared with that of the other ``m - 1`` by Student's
test with ``n / tau - 1`` degrees of freedom, the smallest p-value times the number of chains and elements.

**A drift that all chains share** makes tau as long as the run, so that this test cannot see it. For it the last third of
the draws is compared with the first (Geweke, 1992). Let ``D_c`` be the difference of their means in chain ``c``, ``D`` the mean
of all ``D_c``, and ``h`` the draws of a third. Two tests need no tau of the whole run:

    tau of the thirds       D / sqrt(2 v tau / h) ~ Student(h / tau - 1),    v the variance over a third of the chains' mean
    the chains themselves   D sqrt(m) / sd(D_c)   ~ Student(m - 1),              m >= 3 independent chains

In the first one ``tau`` is the autocorrelation time within a third, about the third's own mean, and the chains need not be
independent. It is used where a third has at least 5 effective draws: below that it would call a slow chain a drifting one. The
second one holds for chains of any speed. Elements are combined as above, and twice the smaller p-value is that of both. At the
level 0.01 stationary chains (autoregressive, 60 and 400 draws, 2000 runs each) are called drifting by the first test at a rate
of at most 0.012 where tau is up to a fifth of the run, and 0.022 for a single chain whose tau is half of the run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CAUTION = 1.5  # by which tau, itself an estimate, is enlarged
ENOUGH = 5.0  # effective draws of a third, from which its tau is believed


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
    p = torch.as_tensor(f.sf(ratio.numpy(), m - 1, (m * (effective - 1)).clamp(min=1.0).numpy()), device="cpu")
    return Agreement(r_hat, CAUTION * m * effective, _of_all(p), int(p.argmin()))


class Apart(NamedTuple):
    """The chain whose mean is clearest away from that of the others.

    Attributes:
        chain: its number.
        size: how far it lies, in standard deviations of the draws within chains.
        p_value: of all chains and elements together.
    """

    chain: int
    size: float
    p_value: float


def apart(x: Tensor) -> Apart | None:
    """One chain among many that is elsewhere, which R-hat, a mean over chains, does not show; ``None`` of one chain.

    Args:
        x: draws ``[draws, chains, elements]``, float64, none of them constant.
    """
    from scipy.stats import t as student

    n, chains, _ = x.shape
    if chains < 2:
        return None
    tau = autocorrelation_time(rank_normalised(x))
    effective = (n / (CAUTION * torch.maximum(tau, tau.median()))).clamp(min=1.01)
    means, within = x.mean(0), x.var(0).mean(0).sqrt().clamp(min=1e-300)
    size = (means - (means.sum(0) - means) / (chains - 1)).abs() / within
    ratio = size * (effective * (chains - 1) / chains).sqrt()
    p = torch.as_tensor(2 * student.sf(ratio.numpy(), (effective - 1).expand_as(ratio).numpy()), device="cpu")
    chain, element = divmod(int(p.argmin()), p.shape[1])
    return Apart(chain, float(size[chain, element]), min(1.0, p.numel() * float(p.min())))


def _of_all(p: Tensor) -> float:
    """The p-value of all elements together."""
    return min(1.0, 2 * len(p) * float(p.min()), 4 * float(p.median()))


class Drift(NamedTuple):
    """A difference between the last and the first third of the draws.

    Attributes:
        size: of each element ``[E]``, in standard deviations of the normal scores; positive where it grows.
        p_value: of all elements together.
        worst: the element whose drift is clearest.
    """

    size: Tensor
    p_value: float
    worst: int


def drift(x: Tensor, *, independent: bool = True) -> Drift:
    """Whether the chains drift together.

    Args:
        x: draws ``[draws, chains, elements]``, float64, none of them constant.
        independent: whether the chains are; if they share their noise, the test that compares them with each other is left out.
    """
    from scipy.stats import t as student

    h, chains = len(x) // 3, x.shape[1]
    z = rank_normalised(x)
    first, middle, last = z[:h], z[h : 2 * h], z[-h:]
    tau = autocorrelation_time(torch.cat([first, middle, last], 1))
    effective = h / (CAUTION * torch.maximum(tau, tau.median()))
    means = [part.mean(1) for part in (first, middle, last)]
    size = means[2].mean(0) - means[0].mean(0)
    variance = torch.stack([mean.var(0) for mean in means]).mean(0)
    ratio = size.abs() / (2 * variance / effective).sqrt().clamp(min=1e-300)
    p = 2 * torch.as_tensor(student.sf(ratio.numpy(), (effective - 1).clamp(min=1.0).numpy()), device="cpu")
    found = [torch.where(effective >= ENOUGH, p, torch.ones_like(p))]
    if chains >= 3 and independent:
        each = last.mean(0) - first.mean(0)
        ratio = size.abs() * chains**0.5 / each.std(0).clamp(min=1e-300)
        found.append(2 * torch.as_tensor(student.sf(ratio.numpy(), chains - 1), device="cpu"))
    clearest = min(found, key=_of_all)
    return Drift(size, min(1.0, len(found) * _of_all(clearest)), int(clearest.argmin()))


def rank_normalised(x: Tensor) -> Tensor:
    """``Phi^-1((r - 3/8) / (n + 1/4))`` of the ranks over all draws and chains (Blom; Vehtari et al., 2021)."""
    n, c, elements = x.shape
    return normal_scores(x.reshape(n * c, elements)).reshape(n, c, elements)


def normal_scores(x: Tensor) -> Tensor:
    """The same of the ranks along axis 0."""
    ranks = x.argsort(0).argsort(0).double() + 1
    return torch.special.ndtri((ranks - 0.375) / (len(x) + 0.25))


def autocorrelation_time(x: Tensor) -> Tensor:
    """Integrated autocorrelation time of ``[draws, chains, elements]`` in draws, by Geyer's positive, decreasing pairs.

    Autocovariances are pooled over chains, each about its own mean; what taking out that mean costs, ``1 / n``, is put back.
    """
    n = len(x)
    spectrum = torch.fft.rfft(x - x.mean(0), 2 * n, dim=0)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, dim=0)[:n].sum(1)
    correlation = covariance / covariance[:1].clamp(min=1e-300)
    correlation = correlation + torch.arange(n, device=x.device)[:, None] / n / n
    pairs = correlation[0 : n - 1 : 2][: n // 2] + correlation[1:n:2][: n // 2]
    pairs = torch.cummin(pairs, 0).values
    return (2 * (pairs * (pairs > 0).cumprod(0)).sum(0) - 1).clamp(1 / CAUTION, n)


def effective(x: Tensor) -> float:
    """How many independent numbers ``[draws, chains]`` are worth."""
    return x.numel() / max(float(autocorrelation_time(x[..., None])[0]), 1.0)


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Mean of ``[draws, chains]`` and its standard error, the larger of what autocorrelation and what the chains say."""
    error = float(x.std()) / effective(x) ** 0.5
    if x.shape[1] > 3:
        error = max(error, float(x.mean(0).std()) / x.shape[1] ** 0.5)
    return float(x.mean()), error
