r"""How noisy the targets are, against what the likelihood says: the dispersion of a fit.

For the loss ``l_n = -log p(y_n | f_n)`` of datum n with outputs f_n, its gradient g_n in the outputs has the covariance F_n,
the Fisher information of the outputs, if the targets are distributed as the likelihood says. The dispersion is the factor by
which the squares of the gradients differ from that,

    phi = sum_n |g_n|^2 / sum_n tr F_n  *  D / (D - gamma),      gamma = tr (Lambda^-1 J^T F J) = sum_i (1 - delta_i Sigma_ii),

with D the number of independent entries of all targets (one a regression's output, C - 1 a label of C classes), Lambda the
posterior's precision, Sigma its inverse, delta the prior precision and J the Jacobian of all outputs. The second factor is
that of an unbiased variance: a fit of gamma well determined parameters takes gamma of D residuals. Of a regression phi is the
residual sum of squares over ``variance (D - gamma)``, of classes the sum of ``|y - p|^2`` over that of ``1 - |p|^2``,
corrected so. phi below 1 says that labels are cleaner than the model's probabilities or its noise variance, as in data sets
from which doubtful cases were taken out; phi above 1 that they are noisier (McCullagh and Nelder, "Generalized Linear
Models", 1989, chapter 9; for |g|^2 against F: White, "Maximum likelihood estimation of misspecified models", 1982).

What it says of draws. Since ``(d^2 p / df^2) / p = g g^T - d^2 l / df^2``, outputs ``f_n + e`` with ``e ~ N(0, t S_n)`` have

    log E_e p(y_n | f_n + e) - log p(y_n | f_n) = t / 2 tr S_n (g_n g_n^T - d^2 l_n / df^2) + O(t^2).

Where the outputs' covariance S is that of the posterior at temperature 1 / N and t is N T, ``sum_n tr S_n F_n = gamma``:
averaging over draws at temperature T changes the log score of N new data by ``N T gamma (phi_new - 1) / 2`` to first order,
with phi_new their dispersion around the mode's outputs. Averages over warm draws gain where targets are noisier than the mode
says, and lose where they are cleaner.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.trees import size

ROUNDING = 1e-6  # of the degrees of freedom that are left, as a share


class Scatter(NamedTuple):
    """Sums over targets, 0-d float64: squares of the gradients in the outputs, Fisher information, independent entries D."""

    squares: Tensor
    information: Tensor
    independent: Tensor

    def add(self, other: Scatter) -> Scatter:
        """Of the data of both."""
        return Scatter(*(a + b for a, b in zip(self, other)))

    def dispersion(self, gamma: Tensor) -> Tensor:
        """phi where the data determine ``gamma`` parameters, 0-d."""
        left = (self.independent - gamma).clamp_min(ROUNDING * self.independent)
        return self.squares / self.information * self.independent / left


def scatter_of(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Scatter:
    """The sums of a batch."""
    outputs = outputs.detach()
    root, grouping = likelihood.root(outputs, targets), likelihood.grouping(outputs.shape[1:])
    weights, count = likelihood.weights(targets), math.prod(grouping.positions)
    if weights is None:
        weights = outputs.new_ones((outputs.shape[0], *grouping.positions))
    # a target of weight w counts w times: its gradient is w times that of one, its information too
    own = grouping.over_outputs(weights.to(outputs.dtype), outputs.shape)
    slopes = likelihood.gradient(outputs, targets).detach() / own.clamp_min(torch.finfo(own.dtype).tiny).sqrt()
    return Scatter(
        slopes.to(torch.float64).square().sum(),
        root.diagonal().detach().to(torch.float64).sum(),
        weights.to(torch.float64).sum() * root.columns / count,
    )


def effective_parameters(posterior: Gaussian, prior_precision: Any, factor: float = 1.0) -> Tensor:
    """gamma, the number of parameters that the data determine, 0-d float64: between 0 and the number of kept parameters.

    ``factor`` is what the covariance was multiplied by.
    """
    variance = optree.tree_leaves(posterior.marginal_variance)
    prior = optree.tree_leaves(optree.tree_broadcast_prefix(prior_precision, posterior.mean))
    free = [
        (v.to(torch.float64) * torch.as_tensor(d, dtype=torch.float64, device=v.device)).sum()
        for v, d in zip(variance, prior)
    ]
    return size(posterior.mean) - torch.stack(free).sum() / factor


def dispersion(total: Scatter, gamma: Tensor) -> float:
    """phi.

    Raises:
        ValueError: as :meth:`bayesopt_chain.FittedLaplace.dispersion`.
    """
    if not total.information > 0:
        raise ValueError(
            "dispersion: the outputs leave the targets no variance at all: the model is certain of every one"
        )
    if not total.independent - gamma > ROUNDING * total.independent:
        raise ValueError(
            f"dispersion: the fit determines {gamma:.4g} parameters by {total.independent:.4g} entries of the targets, so that "
            "no residual tells their noise: pass a prior precision above 0, or more data"
        )
    return float(total.dispersion(gamma))
