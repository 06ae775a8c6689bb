r"""The largest eigenvalues of a symmetric matrix that exists only as a product: Lanczos' method.

    beta_{n+1} q_{n+1} = A q_n - alpha_n q_n - beta_n q_{n-1},      alpha_n = q_n^T A q_n,

made orthogonal to all earlier ``q``; the eigenpairs ``(theta, y)`` of the tridiagonal matrix give those of ``A``, with
the residual ``beta |y_last|``. Where ``beta`` vanishes (``A`` has fewer different eigenvalues than steps) the iteration goes on
from a new random vector, so that multiple eigenvalues are found too. Lanczos (1950); products with the Hessian: Pearlmutter
(1994).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import curvature, kinds
from bayesopt_chain.diagnostics.gradient_noise import scalar, take

Product = Callable[[Tensor], Tensor]


@kinds.takes()
def hessian_product(
    loss: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], *, max_batches: int = 100
) -> Callable[[Any], Any]:
    """The Hessian of the mean loss over batches as a product ``v -> H v`` on trees like ``params``.

    Args:
        loss, params: as for :func:`gradient_noise`.
        batches: of one size; ``bc.epochs(...)`` gives those of its current epoch. They are kept.
        max_batches: use at most so many.

    Returns:
        The product, a function of a tree that returns a tree.

    Raises:
        ValueError: no batch.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> def loss(w, batch):
        ...     return (batch @ w).square().mean() / 2
        >>> batches = [torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])]
        >>> product = bc.diagnostics.hessian_product(loss, torch.zeros(2), batches)
        >>> product(torch.ones(2))
        tensor([2., 8.])
    """
    used = take(batches, max_batches)[0][0]
    if not used:
        raise ValueError("hessian_product: batches is empty; pass at least one")
    leaves, spec = optree.tree_flatten(params)
    here = [leaf.detach() for leaf in leaves]

    def product(tree: Any) -> Any:
        along = optree.tree_leaves(tree)
        total: list[Tensor] | None = None
        for batch in used:

            def value(chosen: list[Tensor], batch: Any = batch) -> Tensor:
                return scalar(loss, optree.tree_unflatten(spec, chosen), batch)

            _, mine = curvature.hvp(value, (here,), (along,))
            total = list(mine) if total is None else [x + y for x, y in zip(total, mine)]
        assert total is not None
        return optree.tree_unflatten(spec, [x.detach() / len(used) for x in total])

    return product


def trace(product: Callable[[Any], Any], params: Any, roots: Sequence[Tensor] | None = None, probes: int = 4) -> float:
    """``tr(R H R)`` by random signs (Hutchinson, 1990), ``R`` a diagonal that broadcasts to each leaf (default: ones)."""
    generator, (leaves, spec) = torch.Generator().manual_seed(0), optree.tree_flatten(params)
    total = 0.0
    for _ in range(probes):
        signs = [torch.randint(0, 2, x.shape, generator=generator, device="cpu").to(x) * 2 - 1 for x in leaves]
        v = signs if roots is None else [sign * root for sign, root in zip(signs, roots)]
        total += sum(float((x * y).sum()) for x, y in zip(v, optree.tree_leaves(product(spec.unflatten(v)))))
    return total / probes


def lanczos(
    product: Product, like: Tensor, rank: int, *, tolerance: float = 1e-3, max_products: int = 120
) -> tuple[Tensor, Tensor]:
    """The ``rank`` largest eigenvalues, descending, and their eigenvectors as rows.

    Args:
        product: ``v -> A v`` on vectors like ``like``.
        like: a vector of the size, dtype and device wanted.
        rank: how many; fewer come back where the matrix has fewer.
        tolerance: stop once every residual is below this, relative to the largest eigenvalue.
        max_products: stop after so many products at the latest.
    """
    generator = torch.Generator().manual_seed(0)
    n, most = like.numel(), min(like.numel(), max_products)
    basis = like.new_zeros(most, n)
    T = torch.zeros(most + 1, most + 1, dtype=torch.float64, device="cpu")

    def fresh(k: int) -> Tensor:
        start = torch.randn(n, generator=generator, dtype=torch.float64, device="cpu").to(like)
        return _unit(_orthogonal(start, basis[:k]))

    q, values, vectors = fresh(0), T[0, :0], T[:0, :0]
    for k in range(most):
        basis[k] = q
        image = product(q)
        T[k, k] = float(q @ image)
        rest = _orthogonal(image, basis[: k + 1])
        beta = float(rest.norm())
        values, vectors = torch.linalg.eigh(T[: k + 1, : k + 1])
        scale = max(float(values.abs().amax()), 1e-30)
        found = vectors[:, -rank:]
        restart = beta <= 1e-6 * scale
        if k + 1 >= min(rank, most) and not restart and bool((beta * found[-1].abs() <= tolerance * scale).all()):
            break
        if k + 1 < most:
            q = fresh(k + 1) if restart else rest / beta
            T[k, k + 1] = T[k + 1, k] = 0.0 if restart else beta
    chosen = vectors[:, -rank:].flip(1)
    return values[-rank:].flip(0), chosen.T.to(like) @ basis[: len(vectors)]


def _orthogonal(v: Tensor, basis: Tensor) -> Tensor:
    for _ in range(2):
        v = v - basis.T @ (basis @ v)
    return v


def _unit(v: Tensor) -> Tensor:
    return v / v.norm()
