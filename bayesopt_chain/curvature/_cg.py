"""Solves linear systems with a curvature matrix that exists only as a product, so that Newton steps need no matrix.

    x_{t+1} = x_t + a_t p_t,   r_{t+1} = r_t - a_t A p_t,   p_{t+1} = M r_{t+1} + b_t p_t
    a_t = r_t^T M r_t / p_t^T A p_t,   b_t = r_{t+1}^T M r_{t+1} / r_t^T M r_t

Preconditioned conjugate gradients (Hestenes and Stiefel 1952) for symmetric positive definite A, M ~ A^-1. Damping
solves with ``A + damping I`` (Martens 2010). All leaves of a tree are one vector here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.precision import flatten, unflatten
from bayesopt_chain.trees import Tree, require_like


class CGInfo(NamedTuple):
    """How a solve ended.

    Attributes:
        iterations: how many were run.
        residual: ``|b - (A + damping I) x|``.
        converged: whether the residual is within the tolerances.
    """

    iterations: int
    residual: float
    converged: bool


@checks.takes(
    product=checks.FUNCTION,
    b=checks.TREE,
    damping=checks.SCALAR,
    preconditioner=checks.FUNCTION.or_none(),
    rtol=checks.NUMBER,
    atol=checks.NUMBER,
    maxiter=checks.WHOLE.or_none(),
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
) -> tuple[Tree, CGInfo]:
    """Solve ``(A + damping I) x = b`` for a symmetric positive definite matrix, on the device of ``b``.

    Args:
        product: ``x -> A x``, from a tree like ``b`` to another.
        b: right-hand side, a tree.
        damping: added to the diagonal of A, such as a prior precision: a non-negative number or 0-d tensor. Default 0.
        x0: where to start; default zero.
        preconditioner: ``r -> M r``, M near ``(A + damping I)^-1``, such as the ``solve`` of a diagonal or Kronecker
            precision.
        rtol, atol: stop once ``|r| <= max(rtol |b|, atol)``.
        maxiter: the most iterations that are run; default 10 times the number of unknowns.

    Returns:
        ``(x, CGInfo)``.

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

    def applied(f: Callable[[Tree], Tree], v: Tensor) -> Tensor:
        return flatten(f(unflatten(v, b)), b)

    def conditioned(v: Tensor) -> Tensor:
        return v if preconditioner is None else applied(preconditioner, v)

    r = flatten(b, b)
    x, bound = 0.0 * r, max(rtol * float(r.norm()), atol)
    if x0 is not None:
        require_like(x0, b, "x0")
        x = flatten(x0, b)
        r = r - applied(product, x) - damping * x
    p = z = conditioned(r)
    iterations = 0
    while float(r.norm()) > bound and iterations < (10 * r.numel() if maxiter is None else maxiter):
        Ap = applied(product, p) + damping * p
        curvature = p @ Ap
        if curvature <= 0:
            raise ValueError(
                "the matrix is not positive definite along a search direction: add a prior precision, or use the GGN"
            )
        a = (r @ z) / curvature
        before, x, r = r @ z, x + a * p, r - a * Ap
        z = conditioned(r)
        p = z + (r @ z) / before * p
        iterations += 1
    residual = float(r.norm())
    return unflatten(x, b), CGInfo(iterations, residual, residual <= bound)
