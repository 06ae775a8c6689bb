r"""The Rauch-Tung-Striebel smoother: what the later batches say of the earlier parameters.

With the filtered mean m and covariance P, the move ``theta_next = F (theta + v) + w``, ``w ~ N(0, Q)`` and, where the filter
forgets, ``v ~ N(0, (1 / forgetting - 1) P)``, and the smoothed m_s, P_s of the step after,

    G  = P F^T (F P / forgetting F^T + Q)^-1
    m <- m + G (m_s - F m)
    P <- (I - G F) P (I - G F)^T + G (F V F^T + Q) G^T + G P_s G^T,     V = (1 / forgetting - 1) P,

a sum of squares, carried as a root through one orthogonal rotation (Rauch, Tung and Striebel, 1965; Bierman, 1977). It is
exact where the transition is linear and the observations are linear and Gaussian.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.posterior.ekf._motion import Motion
from bayesopt_chain.posterior.ekf._structures import DenseRoot, DiagonalInformation, Structure
from bayesopt_chain.precision._triangular import lower_root
from bayesopt_chain.trees import flatten

Moments = tuple[Tensor, Tensor]  # mean [P] and a root of the covariance, [P, P] or [P]: its diagonal


def last(structure: Structure, state: Any, mean: list[Tensor]) -> Moments:
    """The filtered moments."""
    flat = flatten(mean, mean)
    if isinstance(structure, DenseRoot):
        return flat.to(state.root.dtype), _inverse(state.root).mT
    return flat, flatten(list(state.precision), mean).rsqrt()


def smoothed(structure: Structure, state: Any, mean: list[Tensor], motion: Motion, after: Moments) -> Moments:
    """The smoothed moments of one step from those of the step after."""
    m, root = last(structure, state, mean)
    if isinstance(structure, DiagonalInformation):
        return _smoothed_diagonal(m, root, mean, motion, after)
    predicted = structure.predict(state, motion, mean).root
    identity = torch.eye(len(m), dtype=root.dtype, device=root.device)
    f = _as_matrix(motion.transition, mean, identity)
    gain = root @ root.mT @ f.mT @ predicted @ predicted.mT
    left = identity - gain @ f
    forgot = max(1 / float(motion.forgetting) - 1, 0.0) ** 0.5
    pieces = [left @ root, gain @ after[1]]
    if forgot:
        pieces.append(gain @ f @ root * forgot)
    if motion.noise is not None:
        pieces.append(gain @ _noise_root(motion.noise, mean, identity))
    return m + gain @ (after[0] - f @ m), lower_root(torch.cat(pieces, dim=1).mT)


def _smoothed_diagonal(m: Tensor, root: Tensor, mean: list[Tensor], motion: Motion, after: Moments) -> Moments:
    p = root.square()
    a = torch.ones_like(m) if motion.transition is None else flatten(motion.transition, mean)
    q = torch.zeros_like(m) if motion.noise is None else flatten(motion.noise, mean)
    inflated = p / motion.forgetting
    gain = p * a / (a.square() * inflated + q)
    variance = (1 - gain * a).square() * p + gain.square() * (a.square() * (inflated - p) + q + after[1].square())
    return m + gain * (after[0] - a * m), variance.sqrt()


def precision_root(root: Tensor) -> Tensor:
    """The lower root of the precision from a root of the covariance, ``[P, P]``."""
    return lower_root(_inverse(lower_root(root.mT)))


def _inverse(lower: Tensor) -> Tensor:
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False)


def _as_matrix(transition: Tensor | list[Tensor] | None, mean: list[Tensor], identity: Tensor) -> Tensor:
    if transition is None:
        return identity
    return transition.to(identity.dtype) if isinstance(transition, Tensor) else torch.diag(flatten(transition, mean))


def _noise_root(noise: Tensor | list[Tensor], mean: list[Tensor], identity: Tensor) -> Tensor:
    return noise.to(identity.dtype) if isinstance(noise, Tensor) else torch.diag(flatten(noise, mean).sqrt())
