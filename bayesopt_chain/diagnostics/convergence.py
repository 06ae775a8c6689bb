r"""Have the chains mixed: R-hat and effective sample size of every element, and how probable they are where the chains agree.

:func:`r_hat` and :func:`ess` are computed by ArviZ (the extra ``diagnostics``, arviz-stats).

**Agreement.** R-hat alone needs a threshold, and every threshold is wrong for some number of draws: with few, chains that agree
exceed it; with many parameters the largest of them always does. The variance between the means of ``m`` half chains of ``h``
draws, ``B``, over the one within, ``W``, is a ratio of variances, with ``h / tau`` independent draws in each:

    F = B h / (tau W) ~ F(m - 1, m (h / tau - 1)),

``tau`` the integrated autocorrelation time of the rank-normalised draws. Of ``E`` p-values the smallest is multiplied by
``2 E`` (Bonferroni, for both ways of looking), and four times their median is a p-value under any dependence of the
elements (Rüger, 1978): whichever is smaller.

**A drift that all chains share** makes tau as long as the run, so that this test cannot see it. For it the last third of
the draws is compared with the first (Geweke, 1992). Let ``D`` be the difference of their means over all chains, ``h`` the draws
of a third, ``v`` the variance over a third of the chains' mean and ``tau`` the autocorrelation time within a third. Then

    D / sqrt(2 v tau / h)     ~ Student(h / tau - 1),
    D sqrt(m) / sd(D_c)       ~ Student(m - 1),              D_c the difference in one of m >= 3 independent chains.

The first is used where a third has at least 5 effective draws: below that it would call a slow chain a drifting one. The second
holds for chains of any speed.

**Shared noise.** Chains of one seed that started at different places meet on a convex loss, and a copy of a chain may lag
behind it; R-hat approves of both. What can be compared is what a draw does not owe to those before it (Haugh, 1976), the
residual of ``x_t = a + b t + c_1 x_{t-1} + c_2 x_{t-2} + residual_t``: those of independent chains are uncorrelated at every
lag ``k``. Of ``m`` pairs, lags and elements the normal scores of independent chains reach a correlation of
``sqrt(2 log(m / level) / d)`` with a probability below ``level``, ``d = (n - k) / (1 + 2 sum_j rho_j^2) - 6`` by the
autocorrelation ``rho`` that is left in the residuals (Bartlett). Chains that share less than a quarter of the variance
of their noise are not reported.

**Kernel Stein discrepancy** (:func:`ksd`): how far draws are from a distribution of which only the score is known.

    KSD^2 = 1/S^2 sum_ij k0(x_i, x_j),        s = grad log p
    k0(x, y) = s(x).s(y) k + s(x).grad_y k + s(y).grad_x k + tr grad_x grad_y k

(Liu, Lee and Jordan, 2016; Chwialkowski et al., 2016). With r^2 = |x - y|^2 / h^2 the kernel is

    k = (1 + r^2)^(-1/2),     which detects non-convergence, as a Gaussian one does not (Gorham and Mackey, 2017).

It depends on x - y alone: with f = dk/d(r^2) and f' its derivative, grad_x k = 2 f (x - y) / h^2 = -grad_y k and
tr grad_x grad_y k = -(2 d f + 4 r^2 f') / h^2. Pairs are visited in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.trees import require_like

if TYPE_CHECKING:
    from bayesopt_chain.runs.draws import Draws

R_HAT = 1.01  # above which draws have not mixed
AT_ONCE = 1 << 28  # bytes of draws on disk that are looked at together


@checks.takes()
def r_hat(draws: Draws | Any) -> Any:
    """Rank-normalised split R-hat of every element (Vehtari, Gelman, Simpson, Carpenter and Bürkner, 2021).

    Args:
        draws: :class:`bayesopt_chain.Draws`, or a tree with leaves ``[draws, chains, ...]``. A single chain is
            cut in two chains first (of which it then splits each, as it does any chain).

    Returns:
        A tree with a tensor like each parameter; 1 at stationarity, above 1.01 not mixed. NaN where draws are constant or not
        all finite.

    Raises:
        ValueError: fewer than four draws, or eight of a single chain.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(500, 4, 2, generator=torch.Generator().manual_seed(0))
        >>> bc.diagnostics.r_hat({"w": x})["w"].round(decimals=2)
        tensor([1., 1.], dtype=torch.float64)
    """

    def found(stats: Any, x: Any) -> Any:
        half = x.shape[-1] // 2
        both = x if x.shape[1] > 1 else x[..., -2 * half :].reshape(len(x), 2, half)  # ArviZ has no R-hat of one chain
        return stats.rhat(both, chain_axis=-2, draw_axis=-1, method="rank")

    return _each(draws, "r_hat", found)


@checks.takes(kind=checks.one_of("bulk", "tail"))
def ess(draws: Draws | Any, *, kind: Literal["bulk", "tail"] = "bulk") -> Any:
    """Effective sample size of every element, over all chains (Vehtari et al., 2021).

    Args:
        draws: as in :func:`r_hat`.
        kind: ``"bulk"`` for means and medians, ``"tail"`` for 5 % and 95 % quantiles.

    Returns:
        A tree with a tensor like each parameter. NaN where draws are not all finite.

    Raises:
        ValueError: fewer than four draws, or another kind.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(500, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> bool(bc.diagnostics.ess({"w": x})["w"] > 1000)
        True
    """
    prob = (0.05, 0.95) if kind == "tail" else None
    return _each(draws, "ess", lambda stats, x: stats.ess(x, chain_axis=-2, draw_axis=-1, method=kind, prob=prob))


def _each(draws: Any, who: str, statistic: Callable[[Any, Any], Any]) -> Any:
    """A statistic of arrays ``[elements, chains, draws]`` for every leaf; of draws on disk some elements are read at a time.

    Args:
        draws: as for :func:`r_hat`.
        who: the name of the public function.
        statistic: a function of ArviZ's statistics and an array.
    """
    checks.installed(who, "diagnostics", "arviz_stats")
    from arviz_stats.base.array import array_stats

    def found(shape: Sequence[int], chained: bool, read: Callable[[slice], Tensor]) -> Tensor:
        size, n = shape[0], (shape[1] if len(shape) > 1 else 0) if chained else 1
        least = 8 if who == "r_hat" and n == 1 else 4
        if not n or size < least:
            raise ValueError(
                f"{who}: needs leaves [draws, chains, ...] with at least {least} draws, got shape {tuple(shape)}; "
                f"{'run longer' if n else 'give draws of one chain as x[:, None]'}"
            )
        event = torch.Size(shape[2 if chained else 1 :])
        width, parts = event.numel(), list[Tensor]()
        some = max(1, AT_ONCE // (8 * size * n))
        for low in range(0, width, some):
            high = min(low + some, width)
            # [draws, chains, elements]
            x = torch.stack([read(slice(c * width + low, c * width + high)) for c in range(n)], 1)
            rows = torch.where(x.isfinite(), x.detach().double(), math.nan).permute(2, 1, 0).contiguous()
            parts.append(torch.as_tensor(statistic(array_stats, rows.cpu().numpy()), device="cpu"))
        return torch.cat(parts).reshape(event) if parts else torch.zeros(event, dtype=torch.float64, device="cpu")

    if not hasattr(draws, "shapes"):
        return optree.tree_map(lambda x: found(x.shape, True, lambda some: x.reshape(len(x), -1)[:, some]), draws)

    columns = [(shape, partial(draws.column, f"params/{name}", slice(None))) for name, shape in draws.shapes.items()]
    return draws._tree([found((len(draws), *shape), draws.chains is not None, read) for shape, read in columns])


CAUTION = 1.5  # by which tau, itself an estimate, is enlarged
ENOUGH = 5.0  # effective draws of a third, from which its tau is believed
SHARED = 0.5  # correlation of residuals from which chains are reported
ELEMENTS = 16  # that are compared for it
LAGS = 20  # over which the residuals' own autocorrelation is summed
FEWEST = 16  # draws below which nothing is


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

    h, m = len(x) // 2, 2 * x.shape[1]
    r_hat, between, within = split_r_hat(x)
    tau = autocorrelation_time(rank_normalised(x))
    tau = CAUTION * torch.maximum(tau, tau.median())
    effective = (h / tau).clamp(min=1.01)
    ratio = between * effective / within
    p = torch.as_tensor(f.sf(ratio.numpy(), m - 1, (m * (effective - 1)).clamp(min=1.0).numpy()), device="cpu")
    return Agreement(r_hat, CAUTION * m * effective, _of_all(p), int(p.argmin()))


def split_r_hat(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """R-hat of each element, and the variances of the normal scores between the halves of the chains and within them.

    Args:
        x: draws ``[draws, chains, elements]``.
    """
    h = len(x) // 2
    z = rank_normalised(torch.cat([x[:h], x[-h:]], 1))
    within, between = z.var(0).mean(0), z.mean(0).var(0)
    return ((h - 1) / h + between / within).sqrt(), between, within


def _of_all(p: Tensor) -> float:
    """The p-value of all elements together."""
    return min(1.0, 2 * len(p) * float(p.min()), 4 * float(p.median()))


def drift(x: Tensor, *, independent: bool = True) -> tuple[float, float]:
    """Whether the chains drift together from the first to the last third.

    Args:
        x: draws ``[draws, chains, elements]``, float64, none of them constant.
        independent: whether the chains are; else they are not compared with each other.

    Returns:
        The clearest drift, in standard deviations of the normal scores, positive where it grows; the p-value of all elements.
    """
    from scipy.stats import t as student

    h = len(x) // 3
    z = rank_normalised(x)
    thirds = z[:h], z[h : 2 * h], z[-h:]
    tau = autocorrelation_time(torch.cat(thirds, 1))
    effective = h / (CAUTION * torch.maximum(tau, tau.median()))
    means = [part.mean(1) for part in thirds]
    size, variance = means[2].mean(0) - means[0].mean(0), torch.stack([mean.var(0) for mean in means]).mean(0)
    ratio = size.abs() / (2 * variance / effective).sqrt().clamp(min=1e-300)
    p = 2 * torch.as_tensor(student.sf(ratio.numpy(), (effective - 1).clamp(min=1.0).numpy()), device="cpu")
    found = [torch.where(effective >= ENOUGH, p, torch.ones_like(p))]
    if x.shape[1] >= 3 and independent:
        spread = (thirds[2].mean(0) - thirds[0].mean(0)).std(0).clamp(min=1e-300)
        ratio = size.abs() * x.shape[1] ** 0.5 / spread
        found.append(2 * torch.as_tensor(student.sf(ratio.numpy(), x.shape[1] - 1), device="cpu"))
    clearest = min(found, key=_of_all)
    return float(size[clearest.argmin()]), min(1.0, len(found) * _of_all(clearest))


def shared_noise(x: Tensor, level: float = 1e-4) -> tuple[tuple[int, int], int, float] | None:
    """The two chains that most clearly use the same noise, by how many draws the second is behind, and the correlation, if any.

    Args:
        x: draws ``[draws, chains, elements]``, float64.
        level: the rate at which independent chains may be found.
    """
    chains = x.shape[1]
    if chains < 2 or len(x) < FEWEST or not x.shape[2]:
        return None
    x = x[..., :: max(1, -(-x.shape[2] // ELEMENTS))]
    n = len(x) - 2
    y = (x - x.mean(0)) / x.std(0).clamp(min=1e-300)
    line = torch.linspace(-1, 1, n, dtype=torch.float64, device="cpu").expand(*y.shape[1:], n)
    known = torch.stack([torch.ones_like(line), line, *(y[j : n + j].permute(1, 2, 0) for j in (1, 0))], -1)
    now = y[2:].permute(1, 2, 0)[..., None]
    gram = known.mT @ known + 1e-9 * n * torch.eye(4, dtype=torch.float64, device="cpu")
    scores = normal_scores((now - known @ torch.linalg.solve(gram, known.mT @ now))[..., 0].permute(2, 0, 1))
    scores = scores / scores.square().mean(0).sqrt().clamp(min=1e-300)
    lags = torch.arange(-(n // 2), n // 2 + 1, device="cpu")
    overlap = (n - lags.abs()).double()[:, None, None]
    spectrum, tried = torch.fft.rfft(scores, 2 * n, dim=0), x.shape[2] * len(lags) * chains * (chains - 1) / 2
    own = torch.fft.irfft(spectrum.abs() ** 2, 2 * n, dim=0)[1 : LAGS + 1].mean(1) / n  # autocorrelation that is left
    freedom = (overlap / (1 + 2 * own.square().sum(0)) - 6).clamp(min=1.0)
    clear = (2 * math.log(tried / level) / freedom).sqrt().clamp(min=SHARED)  # [lags, 1, elements]
    found = list[tuple[float, tuple[tuple[int, int], int, float]]]()
    for i in range(chains - 1):
        cross = torch.fft.irfft(spectrum[:, i, None].conj() * spectrum[:, i + 1 :], 2 * n, dim=0)[lags] / overlap
        k, j, e = (int(v) for v in torch.unravel_index((cross / clear).argmax(), cross.shape))
        found.append((float(cross[k, j, e] / clear[k, 0, e]), ((i, i + 1 + j), int(lags[k]), float(cross[k, j, e]))))
    clearest, pair = max(found)
    return pair if clearest > 1.0 else None


def rank_normalised(x: Tensor) -> Tensor:
    """``Phi^-1((r - 3/8) / (n + 1/4))`` of the ranks over all draws and chains (Blom; Vehtari et al., 2021)."""
    return normal_scores(x.flatten(0, 1)).reshape(x.shape)


def normal_scores(x: Tensor) -> Tensor:
    """The same of the ranks along axis 0, equal values having the mean of theirs."""
    from scipy.stats import rankdata

    ranks = torch.as_tensor(rankdata(x.cpu().numpy(), axis=0), device="cpu")
    return torch.special.ndtri((ranks - 0.375) / (len(x) + 0.25))


def autocorrelation_time(x: Tensor) -> Tensor:
    """Integrated autocorrelation time of ``[draws, chains, elements]`` in draws.

    Autocovariances are pooled over chains, each about its own mean; what taking out that mean costs, ``1 / n``, is put back.
    """
    n = len(x)
    spectrum = torch.fft.rfft(x - x.mean(0), 2 * n, dim=0)
    covariance = torch.fft.irfft(spectrum.abs() ** 2, dim=0)[:n].sum(1)
    correlation = covariance / covariance[:1].clamp(min=1e-300)
    correlation = correlation + torch.arange(n, device=x.device)[:, None] / n / n
    return geyer(correlation).clamp(1 / CAUTION, n)


def geyer(correlation: Tensor) -> Tensor:
    """Integrated autocorrelation time from correlations ``[lags, ...]``, by Geyer's positive, decreasing pairs."""
    n = len(correlation)
    pairs = correlation[0 : n - 1 : 2][: n // 2] + correlation[1:n:2][: n // 2]
    pairs = torch.cummin(pairs, 0).values
    return 2 * (pairs * (pairs > 0).cumprod(0)).sum(0) - 1


def effective(x: Tensor) -> float:
    """How many independent numbers ``[draws, chains]`` are worth."""
    return x.numel() / max(float(autocorrelation_time(x[..., None])[0]), 1.0)


def mean_and_error(x: Tensor) -> tuple[float, float]:
    """Mean of ``[draws, chains]`` and its standard error, the larger of what autocorrelation and what the chains say."""
    error = float(x.std()) / effective(x) ** 0.5
    if x.shape[1] > 3:
        error = max(error, float(x.mean(0).std()) / x.shape[1] ** 0.5)
    return float(x.mean()), error


BLOCK = 512  # draws whose pairs with as many others are computed together, which bounds the memory


@checks.takes(
    score=checks.FUNCTION,
    bandwidth=checks.POSITIVE,
)
def ksd(
    draws: Draws | Any,
    score: Callable[[Any], Any],
    *,
    bandwidth: float | None = None,
) -> float:
    """Kernel Stein discrepancy of draws.

    Args:
        draws: :class:`bayesopt_chain.Draws` (chains are pooled), or a tree with leaves
            ``[S, ...]``.
        score: gradient of the log density, a function from the parameters of one draw to a tree like them. For a mean loss
            sampled at temperature ``T`` it is minus the gradient of the loss over T.
        bandwidth: ``h``; by default the median distance of (at most 1,000) draws.

    Returns:
        The discrepancy (not squared).

    Raises:
        ValueError: fewer than two draws, a bandwidth that is not positive, scores of another shape.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> right = bc.diagnostics.ksd({"w": x}, lambda p: {"w": -p["w"]})
        >>> shifted = bc.diagnostics.ksd({"w": x + 1}, lambda p: {"w": -p["w"]})
        >>> right < 0.2 < shifted
        True
    """
    pooled: Any = draws.unchained()[0] if hasattr(draws, "unchained") else draws
    lengths = {len(x) for x in optree.tree_leaves(pooled)}
    if len(lengths) > 1 or min(lengths) < 2:
        raise ValueError(f"ksd: draws must be at least 2, as many in every leaf, got {sorted(lengths)}")
    size = lengths.pop()
    each: list[Any] = [score(optree.tree_map(lambda x, i=i: x[i], pooled)) for i in range(size)]
    scores = optree.tree_map(lambda *leaves: torch.stack(leaves), *each)
    require_like(scores, pooled, "ksd: score")
    x, s = _matrix(pooled), _matrix(scores)
    for name, matrix in (("draws", x), ("score", s)):
        if not checks.is_finite(matrix):
            raise ValueError(f"ksd: {name}: some of its numbers are NaN or infinite")
    if bandwidth is None:
        bandwidth = torch.pdist(x[:: max(1, size // 1000)]).median().item() or 1.0
    blocks = [*zip(x.split(BLOCK), s.split(BLOCK))]
    total = x.new_zeros(())
    for i, first in enumerate(blocks):
        total += _stein_kernel(*first, *first, bandwidth).sum()
        for second in blocks[:i]:
            total += 2 * _stein_kernel(*first, *second, bandwidth).sum()
    return (total.clamp_min(0.0).sqrt() / size).item()


def _stein_kernel(x: Tensor, s: Tensor, y: Tensor, t: Tensor, h: float) -> Tensor:
    """``k0`` between rows of ``x`` with scores ``s`` and rows of ``y`` with scores ``t``."""
    d = x.shape[1]
    square = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / h**2
    base = 1 + square
    k, f, slope = base.rsqrt(), -0.5 * base.pow(-1.5), 0.75 * base.pow(-2.5)
    # (s(y) - s(x)) . (x - y), without a tensor of all differences
    along = (x @ t.T - (y * t).sum(1)) - ((x * s).sum(1, keepdim=True) - s @ y.T)
    return (s @ t.T) * k + (2 * f * along - 2 * d * f - 4 * square * slope) / h**2


def _matrix(tree: Any) -> Tensor:
    """Leaves ``[S, ...]`` as the columns of one float64 matrix."""
    leaves = [x.detach().to(torch.float64) for x in optree.tree_leaves(tree)]
    return torch.cat([x.reshape(len(x), x.shape[1:].numel()) for x in leaves], 1)
