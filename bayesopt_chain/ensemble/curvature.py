"""The largest curvature of each member's energy, by the power method on all members at once.

    u <- H u / |u|,     k = |H u| / |u|

A bound from below, which the third of the stability limit that is taken of it makes safe.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain import batches
from bayesopt_chain.curvature import hvp
from bayesopt_chain.ensemble.cost import PRODUCT, passes
from bayesopt_chain.ensemble.problem import Problem, Tensors

ROWS = 1500


def top(
    problem: Problem,
    params: Tensors,
    buffers: Tensors,
    likelihood: Any,
    start: Tensors | None,
    *,
    held_out: bool,
    products: int,
    seed: int,
) -> tuple[Tensor, Tensors, float]:
    """The largest curvatures ``[M]``, the vectors that were reached, and the passes."""
    n = problem.data_of(held_out)
    rows = problem.rows(held_out) or [torch.arange(n, device="cpu")] * problem.count
    used = min(n, ROWS)
    # one draw of rows for all members: a large data set may be sorted
    picked = torch.randperm(n, generator=torch.Generator().manual_seed(seed), device="cpu")[:used].sort().values
    data = problem.data.take(torch.stack([mine[picked] for mine in rows]))
    loss = problem.loss(n, likelihood, still=True)
    carries = problem.carries(True)

    def energy(p: Any, b: Any, batch: Any) -> Tensor:
        return loss(p, batch, b)[0] if carries else loss(p, batch)

    def product(p: Any, b: Any, u: Any, batch: Any) -> Any:
        return hvp(lambda q: energy(q, b, batch), (p,), (u,))[1]

    def slope(p: Any, b: Any, batch: Any) -> Any:
        leaves = {k: x.detach().requires_grad_() for k, x in p.items()}
        grads = torch.autograd.grad(energy(leaves, b, batch), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads))

    def differences(p: Any, b: Any, u: Any, batch: Any) -> Any:
        """For layers without second derivatives: a central difference of gradients."""
        h = 1e-3 * (1 + norm(p)) / (norm(u) + 1e-30)
        up, down = ({k: x + s * h * u[k] for k, x in p.items()} for s in (1, -1))
        return {k: (x - slope(down, b, batch)[k]) / (2 * h) for k, x in slope(up, b, batch).items()}

    def norm(tree: Any) -> Tensor:
        return torch.stack([x.square().sum() for x in tree.values()]).sum().sqrt()

    leaves, spec = batches.flatten(data)

    def every(u: Tensors) -> Tensors:
        if not problem.loop:
            with suppress(RuntimeError):  # an operation may lack second derivatives
                return torch.vmap(lambda p, b, v, *x: product(p, b, v, spec.unflatten(list(x))))(
                    params, buffers, u, *leaves
                )
        each = []
        for i in range(problem.count):
            p, b, v = ({k: x[i] for k, x in t.items()} for t in (params, buffers, u))
            each.append(differences(p, b, v, spec.unflatten([x[i] for x in leaves])))
        return {k: torch.stack([x[k] for x in each]) for k in u}

    generator = torch.Generator().manual_seed(seed)
    u = start or {k: torch.randn(x.shape, generator=generator, device="cpu").to(x) for k, x in params.items()}

    def norms(tree: Tensors) -> Tensor:
        return torch.stack([x.flatten(1).square().sum(1) for x in tree.values()]).sum(0).sqrt()

    for _ in range(products):
        size = norms(u)
        u = every({k: x / size.reshape(-1, *[1] * (x.ndim - 1)) for k, x in u.items()})
        u = {k: x.detach() for k, x in u.items()}
    return norms(u), u, passes(products, used, problem.data.size, PRODUCT)
