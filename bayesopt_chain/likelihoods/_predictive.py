r"""The distribution of a new target: a likelihood averaged over nodes of its outputs.

    p(y) = sum_s w_s p(y | f_s),      E y = sum_s w_s E[y | f_s],      F(y) = sum_s w_s P(Y <= y | f_s)
    Var y = sum_s w_s { Var[y | f_s] + (E[y | f_s] - E y)^2 }
    CRPS(F, y) = integral (F(x) - 1{x >= y})^2 dx                    (Gneiting and Raftery, 2007)

Quantiles are found by bisection. The score is in closed form for mixtures of Gaussians, a sum for counts and classes in order,
and otherwise an integral on each side of y.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.likelihoods._quadrature import gauss_legendre

NODES = 200  # of each of the two integrals of a score
STRETCH = 14.0  # they reach sinh(14) = 600,000 quartile distances out
DOUBLINGS, BISECTIONS = 200, 64
MOST_COUNTS = 10**6
LOWEST, HIGHEST = float("-inf"), float("inf")


class Conditional(Protocol):
    """What is asked of a likelihood here; see :class:`bayesopt_chain.likelihoods.Likelihood`."""

    @property
    def name(self) -> str: ...
    @property
    def support(self) -> Any: ...
    def grouping(self, event: torch.Size) -> Any: ...
    def log_prob(self, outputs: Tensor, targets: Any) -> Tensor: ...
    def mean(self, outputs: Tensor) -> Tensor: ...
    def variance(self, outputs: Tensor) -> Tensor: ...
    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor: ...
    def labels(self, targets: Any) -> Any: ...
    def weights(self, targets: Any) -> Tensor | None: ...


class Predictive:
    """A mixture of ``likelihood`` over ``outputs``, ``[S, N, *event]``, with ``log_weights``, ``[S]``, target by target.

    Made by :meth:`bayesopt_chain.likelihoods.Likelihood.predictive`.

    Attributes:
        likelihood: of a target given the outputs at a node.
        outputs: the nodes, ``[S, N, *event]``.
        log_weights: of the nodes, ``[S]``; their exponentials sum to 1.
        of: the likelihood whose targets these are, which knows their weights.
        noise: ``E Var[y | f]``, shaped like the mean: the part of the variance that no data remove.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> predictive = likelihoods.poisson().predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
        >>> predictive.mean, predictive.variance  # exp(1/4), and that plus exp(1/2) (exp(1/2) - 1)
        (tensor([[1.2840]]), tensor([[2.3536]]))
    """

    def __init__(
        self,
        likelihood: Conditional,
        outputs: Tensor,
        log_weights: Tensor,
        *,
        of: Conditional | None = None,
        noise: Tensor | None = None,
    ) -> None:
        self.likelihood, self.outputs, self.log_weights = likelihood, outputs, log_weights
        self._noise = noise  # where the variance at a node holds more than the noise
        self.of = likelihood if of is None else of  # whose targets these are: their weights, labels and checks

    @kinds.takes(values=kinds.VALUES)
    def average(self, values: Tensor) -> Tensor:
        """The weighted mean over the nodes, ``sum_s w_s values_s``.

        Args:
            values: ``[S, *]``.

        Returns:
            ``[*]``.

        Raises:
            ValueError: values without a row for each node, or no real numbers.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> predictive = likelihoods.poisson().predictive(torch.ones(1, 1), torch.full((1, 1, 1), 0.5))
            >>> predictive.average(predictive.outputs)
            tensor([[1.]])
        """
        if values.shape[:1] != self.log_weights.shape or not values.is_floating_point():
            raise ValueError(
                f"average: values must be {len(self.log_weights)} rows of real numbers, one a node, got shape "
                f"{tuple(values.shape)}, {values.dtype}"
            )
        return torch.tensordot(self.log_weights.to(values.dtype).exp(), values, dims=1)

    @property
    def mean(self) -> Tensor:
        """Of a new target, ``[N, *positions]``; for classes their probabilities, ``[N, *positions, C]``."""
        return self.average(self.likelihood.mean(self.outputs))

    @property
    def noise(self) -> Tensor:
        """``E Var[y | f]``, shaped like the mean: the part of the variance that no data remove."""
        return self._within if self._noise is None else self._noise

    @property
    def variance(self) -> Tensor:
        """Of a new target: the noise, and the variance of its mean."""
        means = self.likelihood.mean(self.outputs)
        return self._within + self.average((means - self.average(means)).square())

    @property
    def _within(self) -> Tensor:
        return self.average(self.likelihood.variance(self.outputs))

    def log_prob(self, targets: Any) -> Tensor:
        """The log density of targets.

        Args:
            targets: as the likelihood takes them, ``[N, *positions]``.

        Returns:
            ``[N, *positions]``, in nats, times the targets' weights; differentiable.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5)).log_prob(torch.zeros(1, 1))
            tensor([[-0.9189]])
        """
        labels, weights = self.of.labels(targets), self.of.weights(targets)
        each = self.likelihood.log_prob(self.outputs, labels)
        logs = (each + self.log_weights.to(each).reshape(-1, *[1] * (each.ndim - 1))).logsumexp(0)
        return logs if weights is None else logs * weights.to(logs.dtype)

    def cdf(self, values: Tensor) -> Tensor:
        """The distribution function of a new target, ``P(y <= value)``.

        Args:
            values: in the targets' units, shaped like the targets, ``[N, *positions]``.

        Returns:
            Probabilities, like the values.

        Raises:
            ValueError: a likelihood without ``cdf``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5)).cdf(torch.zeros(1, 1))
            tensor([[0.5000]])
        """
        self._require_values("cdf", "values", values)
        return self.average(self.likelihood.cdf(self.outputs, values).to(self.outputs.dtype))

    @torch.no_grad()
    @kinds.takes(level=kinds.real("(0, 1)"))
    def quantile(self, level: float) -> Tensor:
        """The smallest value y with ``P(Y <= y) >= level``, ``[N, *positions]``; not differentiated.

        Args:
            level: between 0 and 1, both excluded.

        Returns:
            Values, counts for likelihoods of counts.

        Raises:
            ValueError: a level out of range; targets without an order, such as classes; a likelihood without ``cdf``.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> likelihoods.poisson().predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 1e-6)).quantile(0.9)
            tensor([[2.]])
        """
        support = self._ordered("quantile")
        low, high = self._bracket(level)
        if support.is_discrete:
            for _ in range(BISECTIONS):
                if not bool((high - low > 1).any()):
                    break
                middle = ((low + high) / 2).floor()
                reached = self.cdf(middle) >= level
                low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            reached = self.cdf(middle) >= level
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return (low + high) / 2

    @kinds.takes(level=kinds.real("(0, 1)"))
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds a target with probability ``level`` (of counts: at least).

        Args:
            level: between 0 and 1. Default 0.9.

        Returns:
            ``(low, high)``, each ``[N, *positions]``, in the targets' units.

        Raises:
            ValueError: as :meth:`quantile`.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> predictive = likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
            >>> predictive.interval(0.95)
            (tensor([[-1.9600]]), tensor([[1.9600]]))
        """
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def crps(self, targets: Tensor) -> Tensor:
        """The continuous ranked probability score of targets, ``[N, *positions]``, in their units; smaller is better.

        Of a Gaussian it is in closed form, of counts and classes in order a sum (their ranked probability score), of others an
        integral, to about 1e-6 of the predictive's width.

        Args:
            targets: ``[N, *positions]``.

        Returns:
            Like the targets, times their weights; differentiable for Gaussian noise.

        Raises:
            ValueError: targets without an order, such as classes; a likelihood without ``cdf``; counts beyond a million.

        Example:
            >>> import torch
            >>> from bayesopt_chain import likelihoods
            >>> predictive = likelihoods.gaussian(0.5).predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 0.5))
            >>> predictive.crps(torch.zeros(1, 1))  # (sqrt(2) - 1) / sqrt(pi)
            tensor([[0.2337]])
        """
        support = self._ordered("crps")
        labels, weights = self.of.labels(targets), self.of.weights(targets)
        self._require_values("crps", "targets", labels)
        labels = labels.to(self.outputs.dtype) if labels.is_floating_point() else labels
        closed = getattr(self.likelihood, "mixture_crps", None)
        if closed is not None:
            score = closed(self.outputs, self.log_weights, labels)
        elif support.is_discrete:
            score = self._summed_score(labels, support)
        else:
            score = self._integrated_score(labels, support)
        return score if weights is None else score * weights.to(score.dtype)

    def _require_values(self, who: str, name: str, values: Any) -> None:
        """Refuse what is no value for every target."""
        kinds.require(who, **{name: (values, kinds.VALUES)})
        if (
            values.dtype == torch.bool
            or any(a not in (1, b) for a, b in zip(values.shape[::-1], self._shape[::-1]))
            or values.ndim > len(self._shape)
        ):
            raise ValueError(
                f"{who}: {name} must be numbers of shape {self._shape}, got shape {tuple(values.shape)}, {values.dtype}"
            )

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

    @property
    def _shape(self) -> tuple[int, ...]:
        """Of the targets, ``[N, *positions]``."""
        return (self.outputs.shape[1], *self.likelihood.grouping(self.outputs.shape[2:]).positions)

    def _centre(self) -> Tensor:
        """A value for every target near which the search begins, 0 where the support has an end."""
        if self.likelihood.support == (LOWEST, HIGHEST, False):
            return self.average(self.likelihood.mean(self.outputs))
        return torch.zeros(self._shape, dtype=self.outputs.dtype, device=self.outputs.device)

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
