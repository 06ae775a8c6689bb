"""Solves linear systems with a curvature matrix that exists only as a product, so that Newton steps need no matrix.

    x_{t+1} = x_t + a_t p_t,   r_{t+1} = r_t - a_t A p_t,   p_{t+1} = M r_{t+1} + b_t p_t
    a_t = r_t^T M r_t / p_t^T A p_t,   b_t = r_{t+1}^T M r_{t+1} / r_t^T M r_t

Preconditioned conjugate gradients (Hestenes and Stiefel 1952) for symmetric positive definite A, M ~ A^-1. Damping
solves with ``A + damping I`` (Martens 2010).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.trees import Tree, require_like, size


class CGInfo(NamedTuple):
    """How a solve ended.

    Attributes:
        iterations: how many were run.
        residual: ``|b - A x|`` for each system, ``[*batch]``.
        converged: bool, ``[*batch]``.
    """

    iterations: int
    residual: Tensor
    converged: Tensor


@checks.takes(
    product=checks.FUNCTION,
    b=checks.TREE,
    damping=checks.SCALAR,
    preconditioner=checks.FUNCTION.or_none(),
    rtol=checks.NUMBER,
    atol=checks.NUMBER,
    maxiter=checks.WHOLE.or_none(),
    batch_ndim=checks.whole(0),
)
def cg(
    product: Callable[[Tree], Tree],
    b: Tree,
    *,
    damping: float | Tensor = 0.0,
    x0: Tree | None = None,
    preconditioner: Callable[[Tree], Tree] | None = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    batch_ndim: int = 0,
) -> tuple[Tree, CGInfo]:
    """Solve ``(A + damping I) x = b`` for a symmetric positive definite matrix, on the device of ``b``.

    Args:
        product: ``x -> A x``, from a tree like ``b`` to another.
        b: right-hand side, a tree. With ``batch_ndim = k`` the first k axes of every leaf number independent
            right-hand sides.
        damping: added to the diagonal of A, such as a prior precision: a non-negative number or 0-d tensor. Default 0.
        x0: where to start; default zero.
        preconditioner: ``r -> M r``, M near ``(A + damping I)^-1``, such as the ``solve`` of a diagonal or Kronecker
            precision.
        rtol, atol: stop a system once ``|r| <= max(rtol |b|, atol)``.
        maxiter: the most iterations that are run; default 10 times the number of unknowns of one system.
        batch_ndim: number of batch axes.

    Returns:
        ``(x, CGInfo)``. A system that has converged is not moved again.

    Raises:
        ValueError: when the matrix is not positive definite along a search direction, the damping is negative, or x0
            is not like b.

    Example:
        >>> import torch
        >>> from bayesopt_chain import curvature
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> x, info = curvature.cg(lambda x: A @ x, torch.tensor([3.0, 0.0]))
        >>> x.round(decimals=4), info.iterations
        (tensor([ 2., -1.]), 2)
    """
    if float(damping) < 0:
        raise ValueError(f"damping={float(damping)}: pass a number that is not negative")
    M = preconditioner or (lambda r: r)
    x = optree.tree_map(torch.zeros_like, b) if x0 is None else x0
    require_like(x, b, "x0")
    r = b if x0 is None else optree.tree_map(torch.sub, b, _damped(product, damping, x))
    z = M(r)
    p, rz = z, _dot(r, z, batch_ndim)
    bound = torch.clamp(rtol * _dot(b, b, batch_ndim).sqrt(), min=atol)
    unknowns = size(b) // max(1, bound.numel())
    iterations = 0
    while iterations < (10 * unknowns if maxiter is None else maxiter):
        active = _dot(r, r, batch_ndim).sqrt() > bound
        if not bool(active.any()):
            break
        Ap = _damped(product, damping, p)
        curvature = _dot(p, Ap, batch_ndim)
        if bool((active & (curvature <= 0)).any()):
            raise ValueError(
                "the matrix is not positive definite along a search direction: add a prior precision, or use the GGN"
            )
        # a system that has converged takes steps of 0, and is not divided by a curvature that may be 0
        a = torch.where(active, rz / torch.where(active, curvature, 1), 0)
        x, r = _plus(x, a, p, batch_ndim), _plus(r, -a, Ap, batch_ndim)
        z = M(r)
        new = _dot(r, z, batch_ndim)
        p = _plus(z, torch.where(active, new / torch.where(active, rz, 1), 0), p, batch_ndim)
        rz = new
        iterations += 1
    residual = _dot(r, r, batch_ndim).sqrt()
    return x, CGInfo(iterations, residual, residual <= bound)


def _damped(product: Callable[[Tree], Tree], damping: float | Tensor, x: Tree) -> Tree:
    return optree.tree_map(lambda u, v: u + damping * v, product(x), x)


def _dot(a: Tree, b: Tree, batch_ndim: int) -> Tensor:
    products = [(u * v).flatten(batch_ndim).sum(-1) if u.ndim > batch_ndim else u * v for u, v in _pairs(a, b)]
    total = products[0]
    for product in products[1:]:
        total = total + product
    return total


def _plus(x: Tree, scale: Tensor, p: Tree, batch_ndim: int) -> Tree:
    return optree.tree_map(
        lambda u, v: u + scale.to(v.dtype).reshape(scale.shape + (1,) * (v.ndim - batch_ndim)) * v, x, p
    )


def _pairs(a: Tree, b: Tree) -> Any:
    return zip(optree.tree_leaves(a), optree.tree_leaves(b))
