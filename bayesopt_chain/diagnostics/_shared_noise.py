r"""Do two chains use the same noise: the correlation of what is new in each draw.

Chains of one seed that started at different places meet on a convex loss, and a copy of a chain may lag behind it by some
draws. Neither is bitwise equal, and R-hat approves of both. The draws themselves are no good for a correlation, since two slow
chains that know nothing of each other may both happen to rise. What can be compared is what a draw does not owe to those
before it (Haugh, 1976): the residual of

    x_t = a + b t + c_1 x_{t-1} + c_2 x_{t-2} + residual_t

for each element of each chain. Residuals of independent chains are uncorrelated at every lag, however slow the chains are and
whatever line they share. For two chains and the lag ``k`` let ``r`` be the correlation of the ranks' normal scores over the
``n - k`` draws that overlap, of which there must be 12. Then

    t = r sqrt(d / (1 - r^2)) ~ Student(d),    d = (n - k) / (1 + 2 sum_j rho_j^2) - 6,

where ``rho_j`` is the autocorrelation that is left in the residuals (Bartlett's formula). The smallest p-value is multiplied by
the number of pairs, lags and elements that were tried (Bonferroni), so that independent chains are found at most at the rate
``level``, 1 in 10,000 by default. Chains that share less than a quarter of the variance of their noise (``r < 0.5``) are not
reported, and ``r`` must be reached in both halves of the overlap, which a fast transient from a common start does not do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.diagnostics._agreement import normal_scores

LEVEL = 1e-4  # at which independent chains are called dependent
SHARED = 0.5  # correlation from which chains are reported
SAME = 0.995  # correlation of the later draws, of most elements, from which chains are the same chain
ELEMENTS = 16  # that are compared
LAGS = 20  # over which the residuals' own autocorrelation is summed
FEWEST = 16  # draws below which nothing is compared
LEAST = 12  # residuals of both chains that a lag leaves to compare


class SharedNoise(NamedTuple):
    """Two chains that move together.

    Attributes:
        chains: their numbers.
        lag: by how many draws the second is behind the first.
        correlation: of the residuals, at the element where it is clearest.
        is_same: whether the draws of the second half agree too, so that the two are one chain.
    """

    chains: tuple[int, int]
    lag: int
    correlation: float
    is_same: bool


def shared_noise(x: Tensor, level: float = LEVEL) -> SharedNoise | None:
    """The two chains that most clearly use the same noise, if any do.

    Args:
        x: draws ``[draws, chains, elements]``, float64.
        level: the rate at which independent chains may be found.
    """
    from scipy.stats import t as student

    if x.shape[1] < 2 or len(x) < FEWEST or not x.shape[2]:
        return None
    x = x[..., :: max(1, -(-x.shape[2] // ELEMENTS))]
    new = _residuals(x)
    n, chains, elements = new.shape
    most = min(n // 2, n - LEAST)
    lags = torch.arange(-most, most + 1, device="cpu")
    spectrum = torch.fft.rfft(new, 2 * n, dim=0)
    own = torch.fft.irfft(spectrum.abs() ** 2, 2 * n, dim=0)[1 : LAGS + 1].mean(1) / n
    overlap = (n - lags.abs()).double()
    freedom = (overlap[:, None] / (1 + 2 * own.square().sum(0)) - 6).clamp(min=1.0)
    (sum_1, square_1), (sum_2, square_2) = (_sums_of_overlap(new, at) for at in (lags, -lags))
    tried = elements * len(lags) * chains * (chains - 1) / 2
    best: tuple[float, SharedNoise | None] = (level, None)
    for i in range(chains - 1):
        cross = torch.fft.irfft(spectrum[:, i, None].conj() * spectrum[:, i + 1 :], 2 * n, dim=0)[lags]
        covariance = cross - sum_1[:, i, None] * sum_2[:, i + 1 :] / overlap[:, None, None]
        r = covariance / (square_1[:, i, None] * square_2[:, i + 1 :]).sqrt().clamp(min=1e-300)
        r = r.clamp(-1 + 1e-12, 1 - 1e-12)
        t = r * (freedom[:, None] / (1 - r.square()).clamp(min=1e-12)).sqrt()
        k, c, e = (int(v) for v in torch.unravel_index(t.argmax(), t.shape))
        p = tried * float(student.sf(float(t[k, c, e]), float(freedom[k, e])))
        if p >= best[0]:
            continue
        lag, j = int(lags[k]), i + 1 + c
        one, other = _overlap(new[:, i, e], new[:, j, e], lag)
        half = len(one) // 2
        if min((one[:half] * other[:half]).mean(), (one[half:] * other[half:]).mean()) >= SHARED:
            one, other = (part[half:] - part[half:].mean(0) for part in _overlap(x[:, i], x[:, j], lag))
            alike = (one * other).sum(0) / (one.norm(dim=0) * other.norm(dim=0)).clamp(min=1e-300)
            best = p, SharedNoise((i, j), lag, float(r[k, c, e]), float(alike.median()) >= SAME)
    return best[1]


def _residuals(x: Tensor) -> Tensor:
    """Normal scores over time of what each draw does not owe to a line and the two draws before."""
    n = len(x) - 2
    y = (x - x.mean(0)) / x.std(0).clamp(min=1e-300)
    line = torch.linspace(-1, 1, n, device="cpu").double().expand(*y.shape[1:], n)
    known = torch.stack([torch.ones_like(line), line, *(y[j : n + j].permute(1, 2, 0) for j in (1, 0))], -1)
    now = y[2:].permute(1, 2, 0)[..., None]
    gram = known.mT @ known + 1e-9 * n * torch.eye(4, device="cpu").double()
    left = now - known @ torch.linalg.solve(gram, known.mT @ now)
    scores = normal_scores(left[..., 0].permute(2, 0, 1))
    return scores / scores.square().mean(0).sqrt().clamp(min=1e-300)


def _sums_of_overlap(x: Tensor, lags: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``[n, chains, elements]``, for each lag ``k`` over the ``t`` with ``0 <= t + k < n``: sum and squares about the mean.

    Returns:
        Two tensors ``[lags, chains, elements]``.
    """
    n = len(x)
    first, end = (-lags).clamp(min=0), n - lags.clamp(min=0)
    up_to, squares = (torch.nn.functional.pad(y.cumsum(0), (0, 0, 0, 0, 1, 0)) for y in (x, x.square()))
    total = up_to[end] - up_to[first]
    return total, squares[end] - squares[first] - total.square() / (end - first)[:, None, None]


def _overlap(x: Tensor, y: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    """``x_t`` and ``y_{t + lag}`` where there are both."""
    return (x[: len(x) - lag], y[lag:]) if lag >= 0 else (x[-lag:], y[: len(y) + lag])
