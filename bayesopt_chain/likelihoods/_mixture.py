r"""A mixture of a likelihood over outputs, target by target: what a predictive distribution is computed from.

    p(y) = sum_s w_s p(y | f_s),      E y = sum_s w_s E[y | f_s],      F(y) = sum_s w_s P(Y <= y | f_s)
    Var y = sum_s w_s { Var[y | f_s] + (E[y | f_s] - E y)^2 }
    CRPS(F, y) = integral (F(x) - 1{x >= y})^2 dx                    (Gneiting and Raftery, 2007)

Quantiles are found by bisection. The score is in closed form for mixtures of Gaussians, a sum for counts and classes in order,
and otherwise an integral on each side of y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.likelihoods._quadrature import gauss_legendre

NODES = 200  # of each of the two integrals of a score
STRETCH = 14.0  # they reach sinh(14) = 600,000 quartile distances out
BISECTIONS = 64
MOST_COUNTS = 10**6
LOWEST, HIGHEST = float("-inf"), float("inf")


@dataclass(frozen=True)
class Mixture:
    """``likelihood`` of a target given its outputs, over the nodes ``outputs`` ``[S, N, *event]`` with ``log_weights`` ``[S]``.

    ``within`` is ``E Var[y | f]``, shaped like the mean, where the variance at a node holds more than the noise; ``support`` is
    where targets lie, by default what the likelihood says.
    """

    likelihood: Any
    outputs: Tensor
    log_weights: Tensor
    within: Tensor | None = None
    support: Any = None

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
        each = self.likelihood.log_prob_at_nodes(self.outputs, labels)
        return (each + self.log_weights.to(each).reshape(-1, *[1] * (each.ndim - 1))).logsumexp(0)

    def cdf(self, values: Tensor) -> Tensor:
        return self.average(self.likelihood.cdf(self.outputs, values).to(self.outputs.dtype))

    @torch.no_grad()
    def quantile(self, level: float) -> Tensor:
        """The smallest value y with ``P(Y <= y) >= level``; not differentiated."""
        support = self._ordered("quantile")
        low, high, value = self._line(support)
        for _ in range(BISECTIONS):
            if support.is_discrete and not bool((value(high) - value(low) > 1).any()):
                break
            middle = (low + high) / 2
            reached = self.cdf(value(middle)) >= level
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return value(high)

    def crps(self, labels: Tensor) -> Tensor:
        support = self._ordered("crps")
        labels = labels.to(self.outputs.dtype) if labels.is_floating_point() else labels
        closed = getattr(self.likelihood, "mixture_crps", None)
        if closed is not None:
            return closed(self.outputs, self.log_weights, labels)
        return (self._summed_score if support.is_discrete else self._integrated_score)(labels, support)

    def _ordered(self, what: str) -> Any:
        support = self.support or self.likelihood.support
        if support is None:
            raise ValueError(
                f"{what}: targets of a {self.likelihood.name} likelihood have no order: use log_prob, or the "
                "probabilities in mean"
            )
        return support

    def _line(self, support: Any) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """A bracket of every target in a variable u, float64, and the rising function of u that is the target's value.

        Between two ends u is the value itself; otherwise the value is a centre or the one end, plus ``sign(u) (e^|u| - 1)``.
        """
        ends = [end for end in (support.low, support.high) if math.isfinite(end)]
        shape = (self.outputs.shape[1], *self.likelihood.grouping(self.outputs.shape[2:]).positions)
        start = self.outputs.new_full(shape, ends[0] if ends else 0.0, dtype=torch.float64)
        if not ends:
            start = self.average(self.likelihood.mean(self.outputs)).to(torch.float64)
        step = float(support.is_discrete)  # below the least count

        def value(u: Tensor) -> Tensor:
            x = u if len(ends) == 2 else start + u.sign() * u.abs().expm1()
            return (x.floor() if support.is_discrete else x).to(self.outputs.dtype)

        far = math.log(torch.finfo(self.outputs.dtype).max) - 1
        low, high = -far if support.low == LOWEST else -math.log1p(step), far if support.high == HIGHEST else 0.0
        if len(ends) == 2:
            low, high = support.low - step, support.high
        return torch.full_like(start, low), torch.full_like(start, high), value

    def _summed_score(self, y: Tensor, support: Any) -> Tensor:
        high = support.high
        if high == HIGHEST:
            rest = max(1e-9, 16 * torch.finfo(self.outputs.dtype).eps)  # to which weights of a mixture add up to one
            high = max(float(self.quantile(1 - rest).max()), float(y.max()))
        if not high < MOST_COUNTS:
            raise ValueError(f"crps: counts up to {high:g} would have to be added up; use log_prob")
        total = torch.zeros_like(self.cdf(y))
        for k in range(int(support.low), int(high) + 1):
            at = torch.full_like(total, k)
            total = total + (self.cdf(at) - (at >= y).to(total.dtype)).square()
        return total

    def _integrated_score(self, y: Tensor, support: Any) -> Tensor:
        """Over ``x = middle + width sinh(u)``, fine near the middle and wide far out, u from y to each end of the support."""
        nodes, weights = (x.to(self.outputs) for x in gauss_legendre(NODES))
        middle, width = self.quantile(0.5), (self.quantile(0.75) - self.quantile(0.25)) / 2
        width = width.clamp_min(torch.finfo(width.dtype).tiny)
        start, total = torch.asinh((y - middle) / width), torch.zeros_like(middle)
        for end, sign in ((support.low, -1.0), (support.high, 1.0)):
            stop = torch.asinh((end - middle) / width) if math.isfinite(end) else torch.full_like(start, sign * STRETCH)
            u = start + nodes.reshape(-1, *[1] * y.ndim) * (stop - start)
            below = torch.stack([self.cdf(middle + width * x.sinh()) for x in u])
            missed = below if sign < 0 else 1 - below
            total = total + torch.tensordot(weights, missed.square() * u.cosh(), dims=1) * sign * (stop - start) * width
        return total
