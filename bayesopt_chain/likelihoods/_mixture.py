r"""A mixture of a likelihood over outputs, target by target: what a predictive distribution is computed from.

    p(y) = sum_s w_s p(y | f_s),      E y = sum_s w_s E[y | f_s],      F(y) = sum_s w_s P(Y <= y | f_s)
    Var y = sum_s w_s { Var[y | f_s] + (E[y | f_s] - E y)^2 }
    CRPS(F, y) = integral (F(x) - 1{x >= y})^2 dx                    (Gneiting and Raftery, 2007)

Quantiles are found by bisection. The score is in closed form for mixtures of Gaussians, a sum for counts and classes in order,
and otherwise an integral on each side of y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.likelihoods._quadrature import gauss_legendre

NODES = 200  # of each of the two integrals of a score
STRETCH = 14.0  # they reach sinh(14) = 600,000 quartile distances out
DOUBLINGS, BISECTIONS = 200, 64
MOST_COUNTS = 10**6
LOWEST, HIGHEST = float("-inf"), float("inf")


@dataclass(frozen=True)
class Mixture:
    """``likelihood`` of a target given its outputs, over the nodes ``outputs`` ``[S, N, *event]`` with ``log_weights`` ``[S]``.

    ``within`` is ``E Var[y | f]``, shaped like the mean, where the variance at a node holds more than the noise.
    """

    likelihood: Any
    outputs: Tensor
    log_weights: Tensor
    within: Tensor | None = None

    def average(self, values: Tensor) -> Tensor:
        """``sum_s w_s values_s`` of values ``[S, *]``."""
        return torch.tensordot(self.log_weights.to(values.dtype).exp(), values, dims=1)

    @property
    def mean(self) -> Tensor:
        return self.average(self.likelihood.mean(self.outputs))

    @property
    def noise(self) -> Tensor:
        """``E Var[y | f]``, shaped like the mean: the part of the variance that no data remove."""
        return self.average(self.likelihood.variance(self.outputs)) if self.within is None else self.within

    @property
    def variance(self) -> Tensor:
        means = self.likelihood.mean(self.outputs)
        within = self.average(self.likelihood.variance(self.outputs))
        return within + self.average((means - self.average(means)).square())

    def log_prob(self, labels: Any) -> Tensor:
        each = self.likelihood.log_prob(self.outputs, labels)
        return (each + self.log_weights.to(each).reshape(-1, *[1] * (each.ndim - 1))).logsumexp(0)

    def cdf(self, values: Tensor) -> Tensor:
        return self.average(self.likelihood.cdf(self.outputs, values).to(self.outputs.dtype))

    @torch.no_grad()
    def quantile(self, level: float) -> Tensor:
        """The smallest value y with ``P(Y <= y) >= level``; not differentiated."""
        is_discrete = self._ordered("quantile").is_discrete
        low, high = self._bracket(level)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if is_discrete:
                if not bool((high - low > 1).any()):
                    break
                middle = middle.floor()
            reached = self.cdf(middle) >= level
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high if is_discrete else (low + high) / 2

    def crps(self, labels: Tensor) -> Tensor:
        support = self._ordered("crps")
        labels = labels.to(self.outputs.dtype) if labels.is_floating_point() else labels
        closed = getattr(self.likelihood, "mixture_crps", None)
        if closed is not None:
            return closed(self.outputs, self.log_weights, labels)
        return (self._summed_score if support.is_discrete else self._integrated_score)(labels, support)

    def _ordered(self, what: str) -> Any:
        if self.likelihood.support is None:
            raise ValueError(
                f"{what}: targets of a {self.likelihood.name} likelihood have no order: use log_prob, or the "
                "probabilities in mean"
            )
        return self.likelihood.support

    def _bracket(self, level: float) -> tuple[Tensor, Tensor]:
        """Values below and at or above the quantile, found by doubling the distance from 0 or the support's end."""
        support = self.likelihood.support
        like = self.cdf(torch.zeros_like(self._centre()))
        if support.is_discrete:
            low, high = torch.full_like(like, support.low - 1), torch.full_like(like, support.low)
        else:
            centre = self._centre()
            low = torch.full_like(like, support.low) if support.low > LOWEST else centre - 1
            high = torch.full_like(like, support.high) if support.high < HIGHEST else centre + 1
        step = torch.ones_like(like)
        for _ in range(DOUBLINGS):
            short = self.cdf(high) < level
            long = self.cdf(low) >= level if support.low == LOWEST else torch.zeros_like(short)
            if not bool((short | long).any()):
                break
            step = torch.where(short | long, 2 * step, step)
            high, low = (
                torch.where(short, (high + step).clamp_max(support.high), torch.where(long, low, high)),
                torch.where(long, low - step, torch.where(short, high, low)),
            )
        return low, high

    def _centre(self) -> Tensor:
        """A value for every target near which the search begins, 0 where the support has an end."""
        if self.likelihood.support == (LOWEST, HIGHEST, False):
            return self.average(self.likelihood.mean(self.outputs))
        shape = (self.outputs.shape[1], *self.likelihood.grouping(self.outputs.shape[2:]).positions)
        return torch.zeros(shape, dtype=self.outputs.dtype, device=self.outputs.device)

    def _summed_score(self, y: Tensor, support: Any) -> Tensor:
        high = support.high
        if high == HIGHEST:
            high = max(float(self.quantile(1 - 1e-9).max()), float(y.max()))
        if not high < MOST_COUNTS:
            raise ValueError(f"crps: counts up to {high:g} would have to be added up; use log_prob")
        total = torch.zeros_like(self._centre())
        for k in range(int(support.low), int(high) + 1):
            at = torch.full_like(total, k)
            total = total + (self.cdf(at) - (at >= y).to(total.dtype)).square()
        return total

    def _integrated_score(self, y: Tensor, support: Any) -> Tensor:
        nodes, weights = (x.to(self.outputs) for x in gauss_legendre(NODES))
        at = nodes.reshape(-1, *[1] * y.ndim)
        middle, width, u = y, y, y
        if support.low == LOWEST or support.high == HIGHEST:
            # x = middle + width sinh(u): fine near the middle, wide far out; u runs from y to each end
            middle, width = self.quantile(0.5), (self.quantile(0.75) - self.quantile(0.25)) / 2
            u = torch.asinh((y - middle) / width)
        if support.low > LOWEST:
            below, size_below = support.low + at * (y - support.low), y - support.low
        else:
            down = u - at * (u + STRETCH)
            below, size_below = middle + width * down.sinh(), (u + STRETCH) * width * down.cosh()
        if support.high < HIGHEST:
            above, size_above = y + at * (support.high - y), support.high - y
        else:
            up = u + at * (STRETCH - u)
            above, size_above = middle + width * up.sinh(), (STRETCH - u) * width * up.cosh()
        under = torch.stack([self.cdf(x).square() for x in below]) * size_below
        over = torch.stack([(1 - self.cdf(x)).square() for x in above]) * size_above
        return torch.tensordot(weights, under + over, dims=1)
