r"""Targets that are counts, from log rates.

poisson             loss = e^f - y f + log y!                                    sum_k s_k s_k^T = e^f
negative_binomial   mean mu = e^f, variance mu + mu^2 / r                        sum_k s_k s_k^T = mu r / (mu + r)
                    loss = (y + r) log(r + mu) - y f - r log r - log C(y + r - 1, y)

At outputs ``f ~ N(m, S)`` moments are those of log-normal means ``mu = e^f``, exactly: ``E mu = exp(m + S / 2)``, ``E mu^2 =
exp(2 m + 2 S)``, and ``Var y = E mu + E mu^2 / r + Var mu`` (of a Poisson without r). Nodes would have to reach to ``m + 2 S``.

Log densities are differences of terms as large as ``y log y`` and ``r log r``, which is why they are computed in float64: in
float32 a count of 10^6, and a dispersion of 10^6, would be wrong by half a nat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._likelihood import COUNTS, Likelihood
from bayesopt_chain.likelihoods._quadrature import incomplete_beta, standard_gamma


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

    def moments(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mu = (mean + variance / 2).exp()
        within = mu + self.excess * mu * (mu * variance.exp())
        return within, (mu, mu.square() * variance.expm1())


@dataclass(frozen=True, eq=False)
class Poisson(LogRates):
    """See :func:`poisson`."""

    name = "poisson"

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        f = outputs.double()
        return (targets * f - f.exp() - torch.lgamma(targets.to(f) + 1)).to(outputs.dtype)

    def gradient(self, outputs: Tensor, targets: Any) -> Tensor:
        self._require_once(outputs, targets)
        return outputs.exp() - targets.to(outputs.dtype)  # also of yes and no

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
        ways = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
        total = torch.logaddexp(f, r.log())
        return (ways + y * (f - total) + r * (r.log() - total)).to(outputs.dtype)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        shape = torch.full_like(outputs, self.dispersion)
        rate = standard_gamma(shape, generator) * outputs.exp() / self.dispersion
        return torch.poisson(rate, generator=generator)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        mu, count = torch.broadcast_tensors(outputs.double().exp(), values.floor())
        r = torch.full_like(mu, self.dispersion)
        value = incomplete_beta(r, count.clamp_min(0) + 1, r / (r + mu), mu / (r + mu)).to(outputs.dtype)
        return torch.where(count < 0, 0.0, value)


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

    Outputs ``[B, *event]`` are logarithms of means; targets are counts and have the same shape.

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
