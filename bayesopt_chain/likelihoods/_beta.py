"""Targets between 0 and 1, such as rates: the beta distribution around a logit.

y ~ Beta(phi mu, phi (1 - mu)),  mu = sigmoid(f)      E y = mu,   Var y = mu (1 - mu) / (1 + phi)
Fisher information in f: (phi mu (1 - mu))^2 (psi'(phi mu) + psi'(phi (1 - mu)))       (Ferrari and Cribari-Neto, 2004)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.likelihoods._draws import standard_gamma
from bayesopt_chain.likelihoods._incomplete_beta import incomplete_beta
from bayesopt_chain.likelihoods._likelihood import Likelihood, Support


@dataclass(frozen=True, eq=False)
class Beta(Likelihood):
    """See :func:`beta`."""

    precision: float
    name = "beta"
    support = Support(0.0, 1.0, False)
    filler = 0.5

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        a, b = self._shapes(outputs)
        constant = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
        return constant + (a - 1) * targets.log() + (b - 1) * (-targets).log1p()

    def information(self, outputs: Tensor) -> Tensor:
        a, b = self._shapes(outputs)
        trigamma = torch.special.polygamma(1, a) + torch.special.polygamma(1, b)
        return (a * b / self.precision).square() * trigamma

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid() / (1 + self.precision)

    def draw(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        x, y = (standard_gamma(shape, generator) for shape in self._shapes(outputs))
        eps = torch.finfo(outputs.dtype).eps
        return (x / (x + y)).clamp(eps, 1 - eps)

    def cdf(self, outputs: Tensor, values: Tensor) -> Tensor:
        a, b = self._shapes(outputs)
        return incomplete_beta(a, b, values.clamp(0, 1)).to(outputs.dtype)

    def require_values(self, targets: Tensor) -> None:
        wrong = ~((targets > 0) & (targets < 1))
        self._refuse(wrong, targets, "numbers strictly between 0 and 1")

    def _shapes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        least = torch.finfo(outputs.dtype).tiny
        return tuple((self.precision * x.sigmoid()).clamp_min(least) for x in (outputs, -outputs))  # pyright: ignore


def beta(precision: float = 10.0) -> Likelihood:
    """Targets between 0 and 1 from logits of their mean.

    Outputs ``[B, *event]`` are logits of the mean; targets lie strictly between 0 and 1 and have the same shape.

    Args:
        precision: phi, positive: a target's variance is ``mean (1 - mean) / (1 + precision)``. Default 10.

    Returns:
        A :class:`Likelihood`; it raises a ``ValueError`` for targets of another shape or value.

    Raises:
        ValueError: a precision that is not positive.

    Example:
        >>> import torch
        >>> from bayesopt_chain import likelihoods
        >>> likelihoods.beta(2.0).nll(torch.zeros(1, 1), torch.full((1, 1), 0.3))  # uniform
        tensor([0.])
    """
    checks.positive("beta: precision", precision)
    return Beta(float(precision))
