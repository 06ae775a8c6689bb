r"""One direction of curvature under a chain, for many learning rates at once: stability, heat, and how fast it forgets.

In the coordinates of :mod:`._response` (gain one) a direction of curvature ``y`` follows ``x' = M x - Gamma n + F xi`` with

    M = [[1 - d y, c], [b y, A]],      Gamma = [d, -b],      F = [f, E].

``y`` is proportional to the learning rate, and nothing else of a chain with matched noise is, so that one reading of the chain
serves all rates. Three answers follow, each for a whole tensor ``y``:

    unit_excess      what batch noise of covariance 1 adds to the variance of the parameter. Independent batches:
                     X = M X M^T + Gamma Gamma^T. Reshuffled epochs of K steps: the mean over an epoch of
                     X_t = M^t X_0 M^tT + S_t - R_t R_t^T / K, S_t = sum_{i<t} M^i Gamma Gamma^T M^iT, R_t =
                     sum_{i<t} M^i Gamma.
                     (S, R R^T, R, 1) goes from one step to the next by one matrix, whose power by repeated squaring makes an
                     epoch of any length as cheap as a short one.
    variance         of the parameter without batch noise
    forgetting       the integrated autocorrelation time of theta^2 in steps, 1 + 2 sum_t rho_t^2 (for a Gaussian chain the
                     autocorrelation of the square is the square of the autocorrelation); sum_t (M^t S)_00^2 / S_00^2 is the
                     quadratic form of X = M^T X M + e e^T

The same equations as in :mod:`bayesopt_chain.diagnostics.heating`, which solves them for coupled directions, one
rate at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.diagnostics._response import Group

STABLE = 1.0 - 1e-12  # spectral radii from here on count as divergence


class Directions(NamedTuple):
    """Systems of directions, ``[..., n, n]``, ``[n]`` and ``[n, m]``; where a direction diverges ``M`` is replaced by 0."""

    M: Tensor
    Gamma: Tensor
    F: Tensor
    stable: Tensor


def directions(group: Group, y: Tensor, limit: float | None = None) -> Directions:
    """The systems of directions of curvature ``y``, prior included, in coordinates of gain one.

    With a ``limit`` those below it count as stable; without one the eigenvalues are asked.
    """
    s = len(group.b)
    M = torch.zeros(*y.shape, 1 + s, 1 + s, dtype=torch.float64, device=y.device)
    M[..., 0, 0] = 1.0 - group.d * y
    M[..., 0, 1:] = group.c
    M[..., 1:, 0] = group.b * y[..., None]
    M[..., 1:, 1:] = group.A
    stable = torch.linalg.eigvals(M).abs().amax(-1) < STABLE if limit is None else y < limit
    M = torch.where(stable[..., None, None], M, 0.0)
    return Directions(M, torch.cat([group.d[None], -group.b]), torch.cat([group.f[None], group.E]), stable)


def variance(of: Directions) -> Tensor:
    """The variance of the parameter without batch noise."""
    return _lyapunov(of.M, of.F @ of.F.T)[..., 0, 0]


def forgetting(of: Directions) -> Tensor:
    """The integrated autocorrelation time of the parameter's square, in steps; infinite where it diverges."""
    S = _lyapunov(of.M, of.F @ of.F.T)
    rho = S[..., :, 0] / S[..., :1, 0]
    seen = torch.zeros(of.M.shape[-1], of.M.shape[-1], dtype=torch.float64, device=of.M.device)
    seen[0, 0] = 1.0
    X = _lyapunov(of.M.mT, seen)
    times = 2.0 * torch.einsum("...i,...ij,...j->...", rho, X, rho) - 1.0
    return torch.where(of.stable, times, torch.inf)


def unit_excess(of: Directions, steps: float, reshuffled: bool) -> Tensor:
    """What batches of covariance 1, drawn with replacement, add to the parameter's variance; mean over an epoch of
    so many steps.

    Independent batches of different data have ``1 - 1 / steps`` of that covariance, which is counted here.
    """
    noise = torch.outer(of.Gamma, of.Gamma)
    if not reshuffled:
        return _lyapunov(of.M, noise)[..., 0, 0] * (1.0 - 1.0 / steps)
    n = of.M.shape[-1]
    square, one = n * n, 2 * n * n + n  # the places of R R^T, and of the number 1, behind those of S
    step = torch.zeros(*of.M.shape[:-2], one + 2, one + 2, dtype=torch.float64, device=of.M.device)
    both = _kron(of.M)
    R_with_gamma = torch.einsum("...ij,k->...ikj", of.M, of.Gamma).reshape(*of.M.shape[:-2], square, n)
    gamma_with_R = torch.einsum("...ij,k->...kij", of.M, of.Gamma).reshape(*of.M.shape[:-2], square, n)
    step[..., :square, :square] = both
    step[..., :square, one] = noise.reshape(-1)
    step[..., square : 2 * square, square : 2 * square] = both
    step[..., square : 2 * square, 2 * square : one] = R_with_gamma + gamma_with_R
    step[..., square : 2 * square, one] = noise.reshape(-1)
    step[..., 2 * square : one, 2 * square : one] = of.M
    step[..., 2 * square : one, one] = of.Gamma
    step[..., one, one] = 1.0
    # the last place adds up the variance at the steps gone by
    step[..., one + 1, one + 1] = 1.0
    step[..., one + 1, 0], step[..., one + 1, square] = 1.0, -1.0 / steps
    whole = int(steps + 1e-9)
    epoch = torch.linalg.matrix_power(step, whole)
    added = (epoch[..., :square, one] - epoch[..., square : 2 * square, one] / steps).reshape(of.M.shape)
    start = _lyapunov(torch.linalg.matrix_power(of.M, whole), added)
    # the sum has the variances before each of the steps, and that at an epoch's end is that at its beginning
    total = epoch[..., one + 1, one] + (epoch[..., one + 1, :square] * start.flatten(-2)).sum(-1)
    return total / whole


def _kron(M: Tensor) -> Tensor:
    """``vec(X) -> vec(M X M^T)``, row by row."""
    n = M.shape[-1]
    return torch.einsum("...ij,...kl->...ikjl", M, M).reshape(*M.shape[:-2], n * n, n * n)


def _lyapunov(M: Tensor, Q: Tensor) -> Tensor:
    """``X = M X M^T + Q`` for many small ``M``."""
    n = M.shape[-1]
    Q = Q.expand(*M.shape[:-2], n, n)
    eye = torch.eye(n * n, dtype=torch.float64, device=M.device)
    return torch.linalg.solve(eye - _kron(M), Q.reshape(*M.shape[:-2], n * n)).reshape(Q.shape)
