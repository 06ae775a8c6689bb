r"""A linear last layer with Gaussian noise: its evidence and its mode, exact in float64 whatever the posterior's structure.

    y_no = w_o^T x_n + b_o + e_no,    e_no ~ N(0, v_o),    w_o ~ N(mu_o, 1 / delta),    b_o ~ N(beta_o, 1 / delta_b)

For each output, with t = y - X mu - beta, n rows, a = sqrt(n) mean(x), tau = sqrt(n) mean(t), X_c = U diag(s) V^T the features
less their mean, u = U^T t and e = s^2 / v, the evidence ``log N(t; 0, v I + X X^T / delta + 1 1^T / delta_b)`` is

    log Z = - [ n log 2 pi v + |t_c - U u|^2 / v + sum_i u_i^2 / v delta / (e_i + delta) + sum_i log(1 + e_i / delta) ] / 2
            - [ (tau - a^T m)^2 / q + log(q / v) ] / 2,
    m = V s u / v / (e + delta),    q = v + a^T M^-1 a + n / delta_b,    M = X_c^T X_c / v + delta:

first what the centred targets say, then their mean given that. Every term is bounded by the data: the part of the residual that
the features explain enters as ``u_i^2 / v e_i / (e_i + delta)``, never as a gradient divided by an eigenvalue that was computed
apart from it. The mode is m moved by the mean,

    w = mu + m + M^-1 a (tau - a^T m) / q,        b = beta + sqrt(n) / delta_b (tau - a^T m) / q.

Without a bias X is not centred and the second line is left out. Weights multiply the squares of rows. The data enter by the
triangular factor of ``[1, X, T]`` alone, which takes up batch by batch and whose first row is the mean: (1 + D + E)^2 numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.curvature._plan import Affine
from bayesopt_chain.curvature._structures import require_dense_fits
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Dense, shape_only
from bayesopt_chain.trees import paths, size

LEAST = 1e-6  # of the targets' variance: what the noise keeps at least
TINY = 1e-200


class Rows(NamedTuple):
    """What a last layer needs of the data, in groups of outputs that see the same features.

    Attributes:
        rows: ``[G, n, 1 + D + K]``, rows with the Gram matrix of ones, features and targets; no ones where there is no bias.
        noise: the likelihood's variance, ``[G, K]``; G K is the number of outputs, and G or K is 1.
        entries: the sum of the targets' weights, ``[G, K]``.
        constant: of the log likelihood, ``- sum w log(2 pi noise) / 2``, 0-d.
        features: D, a 0-d tensor of int64.
    """

    rows: Tensor
    noise: Tensor
    entries: Tensor
    constant: Tensor
    features: Tensor

    def add(self, other: Rows) -> Rows:
        """The rows of both; more than twice as many as columns are brought to triangular form."""
        rows = torch.cat([self.rows, other.rows], 1)
        if rows.shape[1] > 2 * rows.shape[2]:
            rows = torch.linalg.qr(rows, mode="r").R
        return self._replace(rows=rows, entries=self.entries + other.entries, constant=self.constant + other.constant)

    def precision(self, layer: Affine, params: Any, count: int) -> Dense:
        """The data part of the parameters' precision in dense structure, of ``count`` data."""
        require_dense_fits(size(params), self.rows.dtype, self.rows.device)
        design = self.rows[:, :, : self.rows.shape[2] - self.noise.shape[1]]
        blocks = ((design.mT @ design)[:, None] / self.noise[..., None, None]).flatten(0, 1)  # of each output (b, w)
        place = torch.arange(blocks[..., 0].numel(), device=blocks.device).reshape(len(blocks), -1)
        entries = {str(layer.bias): place[:, :1], layer.weight: place[:, -int(self.features) :]}
        order = torch.cat([entries[name].flatten() for name in paths(params)])
        matrix = torch.block_diag(*blocks)[order][:, order]
        return Dense(matrix, shape_only(params), matrix.new_tensor(count))

    def with_prior(self, precision: Tensor) -> Rows:
        """For a prior precision of the weights ``[E, D]``: the rows in which it is 1, outputs apart."""
        outputs, features = precision.shape
        design, targets = self.rows.split([self.rows.shape[2] - self.noise.shape[1], self.noise.shape[1]], 2)
        scale = torch.cat([precision.new_ones(outputs, design.shape[2] - features), precision.rsqrt()], 1)
        targets = targets.movedim(2, 1).reshape(outputs, -1, 1)
        rows = torch.cat([design * scale[:, None], targets], 2)
        return self._replace(rows=rows, noise=self.noise.reshape(-1, 1), entries=self.entries.reshape(-1, 1))


def rows_of(likelihood: Likelihood, layer: Affine, means: Any, features: Tensor, targets: Any) -> Rows:
    """The rows of a batch, around the prior's means (float64)."""
    x = features.to(torch.float64)
    start = layer(means, (x, None))
    t = (likelihood.labels(targets).to(torch.float64) - start).flatten(0, -2)
    noise = likelihood.variance(start).flatten(0, -2)
    x = x.flatten(0, -2)
    width = torch.tensor(x.shape[1], device="cpu")
    design = x if layer.bias is None else torch.cat([x.new_ones(len(x), 1), x], 1)
    weights = likelihood.weights(targets)
    w = torch.ones_like(t) if weights is None else weights.to(t).reshape(t.shape)
    constant = -0.5 * (w * (2 * math.pi * noise).log()).sum()
    if weights is None and torch.as_tensor(likelihood.noise_variance, device=t.device).ndim <= 1:
        return Rows(torch.cat([design, t], 1)[None], noise[:1], w.sum(0)[None], constant, width)
    both = torch.cat([design.expand(t.shape[1], *design.shape), t.mT[..., None]], 2)
    rows = (w / noise).sqrt().mT[..., None] * both
    return Rows(rows, torch.ones_like(t[:1].mT), w.sum(0)[:, None], constant, width)


class Regression:
    """The decomposition of :class:`Rows`: a prior and a noise cost a few operations on the singular values.

    Args:
        data: of all batches.
    """

    def __init__(self, data: Rows) -> None:
        features, outputs = int(data.features), data.noise.shape[1]
        self.data, self.has_bias = data, data.rows.shape[2] > features + outputs
        factor = torch.linalg.qr(data.rows, mode="r").R
        top, below = factor[:, :1], factor[:, self.has_bias :, self.has_bias :]
        self.mean, self.tau = top[:, 0, 1 : 1 + features], top[:, 0, 1 + features :]  # times the root of n
        self.root = top[:, 0, :1]
        x, t = below.split([features, outputs], 2)
        u, self.s, self.vt = torch.linalg.svd(x, full_matrices=False)
        self.u = u.mT @ t
        self.rest = (t - u @ self.u).square().sum(1)
        self.total = t.square().sum(1)
        self.along = (self.vt @ self.mean[..., None])[..., 0] if self.has_bias else self.s
        full = self.vt.shape[1] == features
        across = self.mean - (self.along[:, None] @ self.vt)[:, 0] if self.has_bias and not full else None
        self.across = torch.zeros_like(self.mean) if across is None else across

    def least_noise(self) -> Tensor:
        """The lower limit of each output's noise, in units of the likelihood's variance, ``[E]``: a share of the targets'
        variance, or the rounding of float32 targets.

        Raises:
            ValueError: an output whose targets are all at the prior's mean, so that nothing says how large noise can be.
        """
        level = self.total + (self.tau.square() if self.has_bias else 0)
        if bool(((level == 0) & (self.data.entries > 0)).any()):
            raise ValueError(
                "fit_laplace: every target of an output equals what the prior's mean says (0 without prior_mean=), so that "
                "nothing says how large the noise is: give it (likelihoods.gaussian(variance), tune_noise=False)"
            )
        norm = self.data.noise * self.data.entries.clamp_min(1)
        rounding = torch.finfo(torch.float32).eps ** 2 * (self.tau.square() if self.has_bias else self.total)
        return ((LEAST * self.total + rounding) / norm).clamp_min(TINY).reshape(-1)

    def noise_bounds(self) -> tuple[Tensor, Tensor]:
        """The least noise of each output, and that which explains all its targets, in units of the likelihood's variance,
        ``[E]``; of an output without targets as given."""
        least = self.least_noise()
        whole = (self.total / self.data.noise / self.data.entries.clamp_min(1)).reshape(-1)
        return least, torch.where(self.data.entries.reshape(-1) > 0, whole.maximum(least), 1)

    def units(self) -> tuple[Tensor, Tensor]:
        """Where a search starts: prior precisions of weights and biases with which features explain targets of this size,
        0-d."""
        count = self.data.entries.sum().clamp_min(1)
        squares = self.total.sum() / count
        whole = squares + (self.tau.square().sum() / count if self.has_bias else 0)
        rounding = torch.finfo(torch.float32).eps ** 2
        small = torch.where(
            whole > 0, rounding * whole, self.data.noise.mean()
        )  # targets at the prior's mean: the noise
        spread = self.s.square().sum() / count * self.u.shape[2]
        if self.has_bias:  # of features that are all the same, their size
            level = self.mean.square().sum() / count * self.u.shape[2]
            spread = torch.where(spread > rounding * level, spread, level)
        return spread.clamp_min(TINY) / (squares + small), 1 / (whole + small)

    def at(self, delta: Tensor, of_bias: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The log evidence (0-d) and the mode less the prior's mean: weights ``[E, D]``, biases ``[E]``.

        Args:
            delta: prior precision of the weights, 0-d.
            of_bias: of the biases, 0-d or ``[E]``; None for a layer without.
            scale: noise of ``noise / scale``, 0-d or ``[E]``.
        """
        v = self.data.noise / self._by_group(scale)
        e = self.s.square()[..., None] / v[:, None]
        share = self.u / v[:, None] / (e + delta)
        fit = (self.u * share).sum(1) * delta
        lost = self.rest / v + fit + (e / delta).log1p().sum(1)
        weights = (self.s[..., None] * share).mT @ self.vt  # [G, K, D]
        bias = torch.zeros_like(v)
        if self.has_bias and of_bias is not None:
            of_bias = of_bias.expand(v.numel()).reshape(v.shape).clamp_min(TINY)
            gap = self.tau - (self.along[..., None] * self.s[..., None] * share).sum(1)
            far = self.across.square().sum(-1, keepdim=True) / delta.clamp_min(TINY)
            q = v + (self.along.square()[..., None] / (e + delta)).sum(1) + far + self.root.square() / of_bias
            lost = lost + gap.square() / q + (q / v).log()
            move = (self.along[..., None] / (e + delta)).mT @ self.vt + (self.across / delta.clamp_min(TINY))[:, None]
            weights = weights + move * (gap / q)[..., None]
            bias = self.root / of_bias * gap / q
        evidence = self.data.constant + 0.5 * ((self.data.entries * self._by_group(scale).log()).sum() - lost.sum())
        return evidence, weights.reshape(v.numel(), -1), bias.reshape(-1)

    def solved(self, delta: Tensor, of_bias: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`at` for a prior precision of the weights that broadcasts with ``[E, D]``."""
        if delta.numel() == 1:
            return self.at(delta.reshape(()), of_bias, scale)
        each = delta.expand(self.data.noise.numel(), int(self.data.features))
        evidence, weights, bias = Regression(self.data.with_prior(each)).at(delta.new_ones(()), of_bias, scale)
        return evidence, weights * each.rsqrt(), bias

    def residual(self, delta: Tensor, of_bias: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Of each output at the mode, ``[E]``: squares in units of the likelihood's variance, and determined parameters."""
        _, weights, bias = self.at(delta, of_bias, scale)
        move = torch.cat([bias[:, None], weights], 1) if self.has_bias else weights
        outputs = self.data.noise.shape[1]
        design, targets = self.data.rows.split([move.shape[1], outputs], 2)
        left = targets - design @ move.reshape(len(design), outputs, -1).mT
        e = self.s.square()[..., None] * (self._by_group(scale) / self.data.noise)[:, None]
        gamma = (e / (e + delta)).sum(1) + int(self.has_bias)
        return (left.square().sum(1) / self.data.noise).reshape(-1), gamma.reshape(-1)

    def _by_group(self, scale: Tensor) -> Tensor:
        return scale.reshape(self.data.noise.shape) if scale.ndim else scale
