r"""What a linear sampler samples, solved exactly.

On a quadratic loss with curvature ``K`` the update of a linear sampler is ``x' = A x + B xi``, ``x`` holding the parameters
and every floating-point tensor of the state (:func:`bayesopt_chain.testing._linear_system.closed_loop` reads ``A`` and
``B``). The stationary covariance solves ``X = A X A^T + B B^T``, and its parameter block is returned.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.testing._linear_system import closed_loop


class Unstable(ValueError):
    """The sampler has no stationary distribution on this loss."""


def stationary_covariance(
    tx: Any, curvature: Tensor, params: Any = None, *, state: Any = None, warmup: int = 2, tolerance: float = 1e-9
) -> Tensor:
    """Covariance of the parameters that ``tx`` samples on ``loss = theta^T K theta / 2``.

    Args:
        tx: a sampler whose update is linear in the gradients, the state and the noise (frozen preconditioners included).
        curvature: ``K``, shape ``[d, d]``, symmetric, float64.
        params: tree with ``d`` elements in all, float64 (default: one vector). Only its structure matters.
        state: state to probe at, for instance after a preconditioner was frozen (default: ``init`` and ``warmup`` steps).
        warmup: number of noiseless steps at zero gradient before probing.
        tolerance: how far from linear the update may be, relative to its size.

    Returns:
        Covariance, shape ``[d, d]``, in optree order of the leaves.

    Raises:
        ValueError: the update is not linear.
        Unstable: it has no stationary distribution here.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.sghmc(0.1, momentum=0.9, temperature=0.5)
        >>> round(stationary_covariance(tx, torch.tensor([[2.0]], dtype=torch.float64)).item(), 10)
        0.25
    """
    curvature = curvature.to(torch.float64)
    d = len(curvature)
    params = torch.zeros(d, dtype=torch.float64) if params is None else params
    size = sum(p.numel() for p in optree.tree_leaves(params))
    if size != d:
        raise ValueError(f"stationary_covariance: curvature is for {d} parameters, params has {size}")
    system = closed_loop(tx, curvature, params, state, warmup=warmup, tolerance=tolerance)
    varies = system.varies.nonzero().squeeze(1)
    A, B = system.A[varies][:, varies], system.B[varies]
    full = torch.zeros_like(system.A)
    full[varies[:, None], varies] = solve_lyapunov(A, B @ B.T)
    return full[:d, :d]


def solve_lyapunov(A: Tensor, Q: Tensor) -> Tensor:
    """The solution ``[n, n]`` of ``X = A X A^T + Q``, by doubling.

    Raises:
        Unstable: the spectral radius of ``A`` is not below 1.
    """
    if not len(A):
        return Q
    radius = torch.linalg.eigvals(A).abs().max().item()
    if radius >= 1.0:
        raise Unstable(f"no stationary distribution: the spectral radius is {radius:.6g}; lower lr or momentum")
    X = Q
    for _ in range(60):
        X = X + A @ X @ A.T
        A = A @ A
        if A.abs().max() < 1e-200:
            break
    return (X + X.T) / 2
