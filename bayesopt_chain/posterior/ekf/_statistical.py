r"""Statistical linearisation: a line through a likelihood's mean, fitted over the whole Gaussian of its outputs.

For C outputs f ~ N(m, S) that are observed together, ``S = L L^T``, ``f = m + L z``, and a target y with conditional mean
h(f) and covariance V(f),

    mu = E[h],   D = E[h z^T],   A = D L^-1,   R = E[V] + E[(h - mu - D z) (h - mu - D z)^T],

so that ``y = mu + A (f - m) + N(0, R)`` has the mean, the covariance and the covariance with f of the model. R is a sum of
squares: positive definite under every quadrature with positive weights. A filter is given ``R^-1/2 A`` and ``R^-1/2 (y - mu)``.

    bernoulli      h = sigmoid(f),   V = h (1 - h)
    poisson        mu = exp(m + S / 2),   A = mu,   R = mu + mu^2 (exp(S) - 1 - S)
    categorical    h = softmax(f),   V = diag(h) - h h^T, without the last class

Means over one output are by the trapezoidal rule on 129 points within 8.5 deviations: to 1e-10 for a variance of 25, 1e-6
for 100. Over C classes they are by a product of Gauss-Hermite rules, as many nodes an axis as make 2,048 in all, and beyond six
classes by the 2 C points ``+- sqrt(C) e_i`` (third order).

Garcia-Fernandez, Tronarp and Särkkä, "Gaussian process classification using posterior linearization", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Moments = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Outputs ``[G, C]``, targets ``[G]``, covariances ``[G, C, C]`` to the slopes ``R^-1/2 A`` ``[G, K, C]``, the innovations
``R^-1/2 (y - mu)`` ``[G, K]`` and the log probabilities of the targets ``[G]``."""

BUDGET, FLOOR = 2048, 1e-10  # FLOOR: variance of the outputs below which h is a straight line in float64


@lru_cache(maxsize=1)
def fine_grid() -> tuple[Tensor, Tensor]:
    """Nodes and weights ``[129]`` for means over a standard normal."""
    z = torch.linspace(-8.5, 8.5, 129, dtype=torch.float64)
    w = torch.exp(-z.square() / 2)
    return z, w / w.sum()


@lru_cache(maxsize=16)
def gauss_hermite(nodes: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights, ``[nodes]`` each, for means over a standard normal (Golub and Welsch, 1969)."""
    off = torch.arange(1, nodes, dtype=torch.float64).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return values, vectors[0].square()


@lru_cache(maxsize=16)
def cubature(dimensions: int) -> tuple[Tensor, Tensor]:
    """Nodes ``[N, dimensions]`` and positive weights ``[N]`` for means over standard normals, exact to third order at least."""
    per_axis = min(int(BUDGET ** (1 / dimensions) + 1e-9), 32)
    if per_axis < 3:
        eye = math.sqrt(dimensions) * torch.eye(dimensions, dtype=torch.float64)
        return torch.cat([eye, -eye]), torch.full((2 * dimensions,), 0.5 / dimensions, dtype=torch.float64)
    nodes, weights = gauss_hermite(per_axis)
    every = torch.cartesian_prod(*[nodes] * dimensions).reshape(-1, dimensions)
    return every, torch.cartesian_prod(*[weights] * dimensions).reshape(-1, dimensions).prod(-1)


def _bernoulli(f: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z, w = (x.to(f.device) for x in fine_grid())
    f, deviation = f[:, 0], s[:, 0, 0].clamp_min(FLOOR).sqrt()
    logits = f[:, None] + deviation[:, None] * z
    h = logits.sigmoid()
    mu, along = h @ w, (h * z) @ w
    residual = h - mu[:, None] - along[:, None] * z
    noise = ((h * (-logits).sigmoid() + residual.square()) @ w).clamp_min(torch.finfo(h.dtype).tiny)
    y = y.to(f.dtype)
    chance = torch.where(y[:, None] > 0.5, h, (-logits).sigmoid()) @ w
    return (along / deviation * noise.rsqrt())[:, None, None], ((y - mu) * noise.rsqrt())[:, None], chance.log()


def _poisson(f: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z, w = (x.to(f.device) for x in fine_grid())
    f, s, y = f[:, 0], s[:, 0, 0], y.to(f.dtype)
    mu = (f + s / 2).exp()
    noise = mu + mu.square() * (s.expm1() - s)
    log_rate = f[:, None] + s.clamp_min(0).sqrt()[:, None] * z
    log_chance = y[:, None] * log_rate - log_rate.exp() - torch.lgamma(y + 1)[:, None] + w.log()
    return (mu * noise.rsqrt())[:, None, None], ((y - mu) * noise.rsqrt())[:, None], log_chance.logsumexp(-1)


def _categorical(f: Tensor, y: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    classes = f.shape[-1]
    z, w = (x.to(f.device) for x in cubature(classes))
    eye = torch.eye(classes, dtype=f.dtype, device=f.device)
    lower = torch.linalg.cholesky_ex(s + FLOOR * (1 + s.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]) * eye).L
    h = (f[:, None] + z @ lower.mT).softmax(-1)  # [G, N, C]
    mu = (w[:, None] * h).sum(1)
    along = (w[:, None] * h).mT @ z  # [G, C, C]
    residual = h - mu[:, None] - z @ along.mT
    noise = torch.diag_embed(mu) - (w[:, None] * h).mT @ h + (w[:, None] * residual).mT @ residual
    root = torch.linalg.cholesky_ex(noise[:, :-1, :-1]).L
    slope = torch.linalg.solve_triangular(lower, along, upper=False, left=False)[:, :-1]
    hit = (y[:, None] == torch.arange(classes, device=f.device)).to(f.dtype)
    innovation = (hit - mu)[:, :-1, None]
    white = torch.linalg.solve_triangular(root, torch.cat([slope, innovation], -1), upper=False)
    return white[..., :-1], white[..., -1], mu.gather(1, y[:, None])[:, 0].log()


MOMENTS: dict[str, Moments] = {"bernoulli": _bernoulli, "poisson": _poisson, "categorical": _categorical}
