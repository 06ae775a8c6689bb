r"""Targets that are numbers: on the real line, with Gaussian noise, known or learned, or Student's t; and counts.

gaussian      loss = (y - f)^2 / (2 v) + log(2 pi v) / 2                       sum_k s_k s_k^T = 1 / v
  learned     f = (m, r), v = e^r                                              sum_k s_k s_k^T = diag(1 / v, 1 / 2)
student_t     loss = (nu + 1)/2 log(1 + (y - f)^2 / (nu s^2)) + const          sum_k s_k s_k^T = (nu + 1) / ((nu + 3) s^2)

At outputs ``f ~ N(m, S)`` a target with known variance is ``N(m, S + v)``. With a learned one, given r it is Gaussian too,

    y | r ~ N(m + S_mr / S_rr (r - E r),  S_mm - S_mr^2 / S_rr + e^r),      r by the trapezoidal rule.

Student's t is a mixture of Gaussians too, so that density, distribution function, quantiles and score of targets are those of

    y | W ~ N(m, S + s^2 / W),     W ~ Gamma(nu / 2) of mean 1,             log W by the trapezoidal rule.

Counts have log rates as outputs.

poisson             loss = e^f - y f + log y!                                    sum_k s_k s_k^T = e^f
negative_binomial   mean mu = e^f, variance mu + mu^2 / r                        sum_k s_k s_k^T = mu r / (mu + r)
                    loss = (y + r) log(r + mu) - y f - r log r - log C(y + r - 1, y)

At outputs ``f ~ N(m, S)`` moments are those of log-normal means ``mu = e^f``, exactly: ``E mu = exp(m + S / 2)``, ``E mu^2 =
exp(2 m + 2 S)``, and ``Var y = E mu + E mu^2 / r + Var mu`` (of a Poisson without r). Nodes would have to reach to ``m + 2 S``.

Log densities are differences of terms as large as ``y log y`` and ``r log r``, which is why they are computed in float64: in
float32 a count of 10^6, and a dispersion of 10^6, would be wrong by half a nat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.special import erfc

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._likelihood import COUNTS, Elementwise, Grouping, Likelihood, like
from bayesopt_chain.likelihoods._predictive import Outputs, Predictive
from bayesopt_chain.likelihoods._quadrature import FEW, NATS, gamma_like, log_gamma, log_rising, normal_nodes

LOG_2PI = math.log(2 * math.pi)
SMALL, LARGE = -350.0, 700.0  # log deviations, the square of the first a number
PAIRS_AT_ONCE = 2**16  # of nodes, whose numbers a cache holds


class Normal(Likelihood):
    """Gaussian noise of outputs ``[*, 2]``, mean and log variance of each target; a subclass has another :meth:`pair`."""

    name = "gaussian"

    def pair(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log variances."""
        mean, log_variance = outputs.unbind(-1)
        return mean, log_variance

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, log_variance = self.pair(outputs)
        largest = torch.finfo(log_variance.dtype).max  # an infinite precision times a residual of 0 would be no number
        precision = (-log_variance).exp().clamp(max=largest)
        return (targets - mean).square() * (precision / -2) - (log_variance + LOG_2PI) / 2

    def mean(self, outputs: Tensor) -> Tensor:
        return self.pair(outputs)[0]

    def variance(self, outputs: Tensor) -> Tensor:
        return self.pair(outputs)[1].exp()

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean, log_variance = self.pair(outputs)
        return mean + (log_variance / 2).exp() * torch.randn_like(mean, generator=generator)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        mean, log_variance = self.pair(outputs)
        return normal_cdf((values - mean) * (-log_variance / 2).exp())

    def mixture_crps(self, outputs: Tensor, log_weights: Tensor, targets: Tensor) -> Tensor:
        """``E|X - y| - E|X - X'| / 2`` for a mixture of Gaussians (Grimit et al., 2006).

        With ``E|N(d, v)| = sqrt(2 v / pi) + h(d, v)`` the first terms of a pair of deviations a and b cancel but for
        ``(a + b - c) / sqrt(2 pi)``, ``c^2 = a^2 + b^2``, which is ``2 a b / (a + b + c)`` and no more than the smaller one.
        """
        mean, log_variance = torch.broadcast_tensors(*(x.double() for x in self.pair(outputs)))
        weights, deviation = log_weights.double().exp(), (log_variance / 2).clamp(SMALL, LARGE).exp()
        found = torch.tensordot(weights, _beyond_deviation(targets - mean, deviation), dims=1)
        at_once = max(1, math.isqrt(PAIRS_AT_ONCE // max(1, mean[0].numel())))
        parts = list(zip(*(x.split(at_once) for x in (weights, mean, deviation))))
        for one, other in combinations_with_replacement(parts, 2):
            (w, m, a), (v, n, b) = ([x[:, None] for x in one], other)
            c = torch.hypot(a, b)
            each = (2 / math.pi) ** 0.5 * (a * (b / (a + b + c))) - _beyond_deviation(m - n, c) / 2
            of_pairs = torch.tensordot(w * v, each, dims=2)
            found = found + (of_pairs if one is other else 2 * of_pairs)
        return found


@dataclass(frozen=True, eq=False)
class Gaussian(Normal):
    """See :func:`gaussian`."""

    noise_variance: Any

    def grouping(self, event: torch.Size) -> Grouping:
        return _each_of("gaussian: variance", self.noise_variance, event)

    def pair(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, like(self.noise_variance, outputs).log()

    def variance(self, outputs: Tensor) -> Tensor:
        return like(self.noise_variance, outputs).expand_as(outputs)

    def information(self, outputs: Tensor) -> Tensor:
        return like(self.noise_variance, outputs).reciprocal().expand_as(outputs)

    def scaled(self, scale: Tensor | float) -> Likelihood:
        return Gaussian(self.noise_variance / scale)

    def mixed(self, outputs: Outputs, points: int = FEW) -> Predictive:
        noise = self.variance(outputs.mean)
        spread = outputs.variance.reshape(noise.shape)
        known = Gaussian(noise + spread)
        return Predictive(known, outputs.mean[None], noise.new_zeros(1), None, (outputs.mean, noise, spread))

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        return Gaussian(self.noise_variance * factor), outputs


@dataclass(frozen=True, eq=False)
class LearnedGaussian(Normal):
    """See :func:`gaussian`, ``variance="learned"``."""

    name = "gaussian with learned variance"

    def grouping(self, event: torch.Size) -> Grouping:
        if not event or event[-1] % 2:
            raise ValueError(
                f"gaussian(variance='learned') got outputs [B, {', '.join(map(str, event))}]: return means and log "
                "variances, [B, *, 2 C]"
            )
        half = event[-1] // 2
        index = torch.arange(event.numel(), device="cpu").reshape(*event[:-1], 2, half)
        return Grouping((*event[:-1], half), 2, index.mT.flatten())

    def pair(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = outputs.chunk(2, dim=-1)
        return mean, log_variance

    def exact_root(self, outputs: Tensor, labels: Any) -> Elementwise:
        _, log_variance = self.pair(outputs)
        return Elementwise(torch.cat([(-log_variance / 2).exp(), torch.full_like(log_variance, 0.5**0.5)], dim=-1))

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        mean, log_variance = self.pair(outputs)
        return self, torch.cat([mean, log_variance + math.log(factor)], -1)

    def mixed(self, outputs: Outputs, points: int = FEW) -> Predictive:
        grouping = self.grouping(outputs.mean.shape[1:])
        m, s = grouping.split(outputs.mean), grouping.blocks(outputs.covariance)
        s = torch.diag_embed(s) if s.ndim == m.ndim else s
        r, log_weights = normal_nodes(m[..., 1:], s[..., 1:, 1:], points)
        r, gain = r[..., 0], s[..., 0, 1] / s[..., 1, 1].clamp_min(torch.finfo(s.dtype).tiny)
        moments = m[..., 0], (m[..., 1] + s[..., 1, 1] / 2).exp(), s[..., 0, 0]
        nodes = _normals(m[..., 0] + gain * (r - m[..., 1]), s[..., 0, 0] - gain * s[..., 0, 1], r)
        return Predictive(Normal(), nodes, log_weights, None, moments, points)


@dataclass(frozen=True, eq=False)
class StudentT(Likelihood):
    """See :func:`student_t`."""

    df: float
    scale: Any
    name = "student_t"

    def grouping(self, event: torch.Size) -> Grouping:
        return _each_of("student_t: scale", self.scale, event)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        s, df, x = like(self.scale, outputs), self.df, self.df / 2
        if x < 100:
            gap = math.lgamma(x + 0.5) - math.lgamma(x) - math.log(x) / 2
        else:  # where they would cancel, their series
            gap = (-1 / 8 + (1 / 192 - 1 / (640 * x * x)) / (x * x)) / x
        return gap - LOG_2PI / 2 - s.log() - (df + 1) / 2 * ((targets - outputs) / s).square().div(df).log1p()

    def information(self, outputs: Tensor) -> Tensor:
        return ((self.df + 1) / (self.df + 3) / like(self.scale, outputs).square()).expand_as(outputs)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs  # the centre, where the mean does not exist

    def variance(self, outputs: Tensor) -> Tensor:
        factor = self.df / (self.df - 2) if self.df > 2 else math.inf
        return (factor * like(self.scale, outputs).square()).expand_as(outputs)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        precision = gamma_like(outputs, self.df / 2, generator) / (self.df / 2)
        return outputs + like(self.scale, outputs) * torch.randn_like(outputs, generator=generator) / precision.sqrt()

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        t = ((values - outputs) / like(self.scale, outputs)).to(torch.float64)
        u, log_weights = log_gamma(self.df / 2, NATS)
        found = torch.zeros_like(t)
        for root, weight in zip((u / 2).exp().tolist(), log_weights.exp().tolist()):
            found = found + weight * normal_cdf(root * t)
        return found.to(outputs.dtype)

    def mixed(self, outputs: Outputs, points: int = FEW) -> Predictive:
        mean = outputs.mean.double()  # variances of far nodes are no numbers in single precision
        spread = outputs.variance.reshape(mean.shape)
        u, log_weights = (x.to(mean) for x in log_gamma(self.df / 2, NATS * (points - 1) / (FEW - 1)))
        log_noise = 2 * like(self.scale, mean).log() - u.reshape(-1, *[1] * mean.ndim)
        nodes = _normals(mean, spread.double(), log_noise)
        moments = outputs.mean, self.variance(outputs.mean), spread
        beyond = log_weights[0] - (nodes[0, ..., 1] + LOG_2PI) / 2  # wider Gaussians are lower everywhere
        return Predictive(Normal(), nodes, log_weights, None, moments, beyond=beyond)

    def widened(self, outputs: Tensor, factor: float) -> tuple[Likelihood, Tensor]:
        return StudentT(self.df, self.scale * factor**0.5), outputs


class LogRates(Likelihood):
    """Counts of mean ``e^f`` and variance ``e^f + excess e^2f``."""

    support = COUNTS
    excess = 0.0

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.exp()

    def variance(self, outputs: Tensor) -> Tensor:
        mu = outputs.exp()
        return mu + self.excess * mu * mu  # of squares a Poisson's excess of 0 would make 0 times infinity

    def information(self, outputs: Tensor) -> Tensor:
        return 1 / ((-outputs).exp() + self.excess)

    def mixed(self, outputs: Outputs, points: int = FEW) -> Predictive:
        variance = outputs.variance.reshape(outputs.mean.shape)
        mu = (outputs.mean + variance / 2).exp()
        within = mu + self.excess * mu * (mu * variance.exp())
        return replace(super().mixed(outputs, points), moments=(mu, within, mu.square() * variance.expm1()))


@dataclass(frozen=True, eq=False)
class Poisson(LogRates):
    """See :func:`poisson`."""

    name = "poisson"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        f = outputs.double()
        return (targets * f - f.exp() - torch.lgamma(targets.to(f) + 1)).to(outputs.dtype)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(outputs.exp(), generator=generator)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        rate, count = torch.broadcast_tensors(outputs.exp(), values.floor())
        return torch.where(count < 0, 0.0, torch.special.gammaincc(count.clamp_min(0) + 1, rate))


@dataclass(frozen=True, eq=False)
class NegativeBinomial(LogRates):
    """See :func:`negative_binomial`."""

    dispersion: float
    name = "negative_binomial"

    @property
    def excess(self) -> float:
        return 1 / self.dispersion

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        f = outputs.double()
        y, r = targets.to(f), torch.as_tensor(self.dispersion, dtype=f.dtype, device=f.device)
        above = softplus(f - r.log(), threshold=40)  # log(r + mu) - log r
        return (log_rising(r, y) - torch.lgamma(y + 1) + y * (f - r.log() - above) - r * above).to(outputs.dtype)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        rate = gamma_like(outputs, self.dispersion, generator) * outputs.exp() / self.dispersion
        return torch.poisson(rate, generator=generator)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        """By scipy, on the CPU, and not differentiated: torch has no incomplete beta function."""
        checks.installed("negative_binomial: the distribution function", "diagnostics", "scipy")
        from scipy.special import betainc, betaincc

        mu, count = (x.detach().cpu() for x in torch.broadcast_tensors(outputs.double().exp(), values.double().floor()))
        r, least = self.dispersion, count.clamp_min(0).numpy() + 1
        p, rest = (mu / (r + mu)).numpy(), (r / (r + mu)).numpy()  # of which the smaller one has all its digits
        small, large = (torch.as_tensor(x, device="cpu") for x in (betaincc(least, r, p), betainc(r, least, rest)))
        return torch.where(count < 0, 0.0, torch.where(mu < r, small, large)).to(outputs)


@checks.takes(
    variance=checks.Kind(
        lambda x: (isinstance(x, str) and x == "learned") or checks.POSITIVES.fits(x),
        f"{checks.POSITIVES.words}, or 'learned'",
        (str, *checks.POSITIVES.of),
    )
)
def gaussian(variance: float | Tensor | Literal["learned"] = 1.0) -> Likelihood:
    """Independent Gaussian noise on every output.

    Targets have the shape of the outputs, ``[B, *event]``; with ``"learned"`` that of the means, ``[B, *, C]``. Missing
    targets are given the weight 0 by :func:`weighted`.

    Args:
        variance: of the noise, in the targets' units squared: a number or 0-d tensor, a tensor ``[*event]`` with one
            variance an output, or ``"learned"``: then the outputs are ``[B, *, 2 C]``, C means followed by C log
            variances. Default 1.

    Returns:
        A :class:`Likelihood`.

    Raises:
        ValueError: for a variance that is not positive, and where it is used for targets or outputs of another shape, or NaN.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.gaussian(0.25).factors(torch.zeros(2, 1), torch.zeros(2, 1)).flatten()
        tensor([2., 2.])
    """
    return LearnedGaussian() if isinstance(variance, str) else Gaussian(variance)


@checks.takes(
    df=checks.number(
        "[1, 1e9]",
        hint="above that it is likelihoods.gaussian(scale**2) to a billionth; below 1 the precision of a target spreads over "
        "hundreds of powers of ten, and up to .5 no CRPS is finite",
    ),
    scale=checks.POSITIVES,
)
def student_t(df: float = 4.0, scale: float | Tensor = 1.0) -> Likelihood:
    """Regression that outliers do not drag along: Student's t around every output.

    Targets have the shape of the outputs, ``[B, *event]``. The curvature is the Fisher information, which is positive
    where the Hessian of the loss is not. At Gaussian outputs a target is a mixture of Gaussians, however uncertain they are.

    Args:
        df: degrees of freedom, in [1, 1e9]; up to 2 the variance of a target is infinite, which predictions say. Default 4.
        scale: in the targets' units: a number, or a tensor ``[*event]``. Default 1.

    Returns:
        A :class:`Likelihood`.

    Raises:
        ValueError: ``df`` outside [1, 1e9], a scale that is not positive; where used for targets of another shape, or NaN.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.student_t(df=3.0).nll(torch.zeros(2, 1), torch.tensor([[0.0], [10.0]]))
        tensor([1.0009, 8.0731])
    """
    return StudentT(float(df), scale)


def poisson() -> Likelihood:
    """Independent counts from log rates.

    Outputs ``[B, *event]`` are log rates; targets are counts and have the same shape.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape, or that are no counts.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.poisson().nll(torch.zeros(1, 1), torch.zeros(1, 1))
        tensor([1.])
    """
    return Poisson()


@checks.takes(dispersion=checks.number("(0, 1e9]", hint="a larger one is likelihoods.poisson() to a billionth"))
def negative_binomial(dispersion: float = 1.0) -> Likelihood:
    """Counts that vary more than a Poisson's: mean ``e^f``, variance ``e^f + e^2f / dispersion``.

    Outputs ``[B, *event]`` are logarithms of means; targets are counts and have the same shape. The distribution function, and
    with it quantiles, intervals and CRPS, needs scipy (the extra ``diagnostics``).

    Args:
        dispersion: r, in (0, 1e9]; a large one is nearly Poisson. Default 1 (geometric).

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape, or that are no counts.

    Raises:
        ValueError: a dispersion that is not positive, or above 1e9.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.negative_binomial(1.0).nll(torch.zeros(1, 1), torch.full((1, 1), 2.0)).exp()  # 2^3
        tensor([8.])
    """
    return NegativeBinomial(float(dispersion))


def _each_of(what: str, value: Any, event: torch.Size) -> Grouping:
    """One output a target; numbers that are no one for each output of a datum, as one for each datum would be, are refused."""
    if isinstance(value, Tensor) and not checks.is_spread(value.shape, event):
        raise ValueError(
            f"{what} of shape {tuple(value.shape)} is not one number for each output of a datum, of shape {tuple(event)}: "
            "let the model return a log variance for each datum (gaussian(variance='learned'))"
        )
    return Grouping(tuple(event), 1)


def _normals(mean: Tensor, spread: Tensor, log_noise: Tensor) -> Tensor:
    """Outputs of :class:`Normal` targets of variance ``spread + exp(log_noise)``, which far out is no number of the dtype."""
    log_variance = torch.logaddexp(log_noise, (spread.clamp_min(0) + torch.finfo(spread.dtype).tiny).log())
    return torch.stack([mean.expand_as(log_variance), log_variance], -1)


def normal_cdf(z: Tensor) -> Tensor:
    """The standard normal distribution function; ``torch.special.ndtr`` has no digits left at -8.3, in float32 at -5.5."""
    return erfc(z / -(2**0.5)) / 2


def _beyond_deviation(mean: Tensor, deviation: Tensor) -> Tensor:
    """``E|X| - sqrt(2 v / pi)`` of Gaussians, between 0 and ``|E X|``."""
    z = mean / deviation
    return (2 / math.pi) ** 0.5 * deviation * (-z.square() / 2).expm1() + mean * (z / 2**0.5).erf()
