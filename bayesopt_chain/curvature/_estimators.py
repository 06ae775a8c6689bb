"""Estimators of curvature: what the batch says about the parameters' precision, for any likelihood in any structure.

    ggn               sum_b J_b^T H_b J_b,  H_b the expected Hessian of the loss in the outputs (exact output factors)
    fisher            the same from labels drawn from the model (Monte Carlo), unbiased
    empirical_fisher  sum_b g_b g_b^T,      g_b the gradient of the loss at the observed target
    hessian           sum_b d^2 loss_b / d theta^2, which may be indefinite

All are *summed* over the batch, in units of the likelihood (nats), so that adding the increments of any split of the
data gives the increment of the whole. J_b is the Jacobian of one datum's outputs in the parameters.
Rademacher root-probes estimate a diagonal from `probes` backward passes: with independent signs e_kb,
(sum_kb e_kb J_b^T s_kb)^2 has the diagonal as its mean, variance at most 2 d^2, and is never negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._chunks import (
    Factors,
    Forward,
    batch_size,
    make_plan,
    part,
    plain_kernels,
    pull_back,
    require_separate,
    unpack,
)
from bayesopt_chain.curvature._memory import require_dense_fits
from bayesopt_chain.curvature._structures import structure_sum
from bayesopt_chain.likelihoods import Likelihood
from bayesopt_chain.precision import Dense, Diagonal, Eigenbasis, Kronecker, Precision, shape_only, unflatten
from bayesopt_chain.precision._algebra import as_count
from bayesopt_chain.trees import Tree, common_dtype, flatten, size

Estimate = Callable[[Tree, Any], Precision]

PRODUCT_BYTES = 2**25  # the default bound on what Hessian products and probes hold at once

STRUCTURES = ("dense", "root", "diagonal", "kronecker", "low_rank", "block")


def ggn(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    probes: int | None = None,
    rank: int = 10,
    sharing: str = "expand",
    basis: Kronecker | Eigenbasis | None = None,
    generator: torch.Generator | None = None,
    chunk_bytes: int | None = None,
) -> Estimate:
    """Estimate the generalised Gauss-Newton matrix, exactly.

    Args:
        forward: `forward(params, batch) -> outputs [B, *event]`; `batch = (inputs, targets)`, tensors with one entry
        a datum on
            the first axis. A datum's outputs may depend on that datum only.
        likelihood: from `bayesopt_chain.likelihoods`; gives the expected Hessian in the outputs.
        structure: "dense", "root", "diagonal", "kronecker", "low_rank" or "block" (one dense block a parameter).
        probes: estimate a diagonal from this many root-probes instead of exactly; None, the default, is exact.
        rank: how many directions "low_rank" keeps.
        sharing: "expand" or "reduce": how Kronecker factors treat a weight used at many positions.
        basis: a Kronecker precision in whose eigenbasis the curvature is measured (EKFAC); with "kronecker" only.
        generator: for probes; None is the global one.
        chunk_bytes: bound on the activations, output gradients and rows held at once, besides the result (and one
            convolution's per-datum weight gradients, 2 MB). One datum and one factor are the least possible. Default:
            as much as the result, at least 1 MiB, and at least what 32 data need for one factor.

    Returns:
        `estimate(params, batch)`, a precision summed over the batch, with `count` = B.

    Raises:
        ValueError: for an unknown structure; a parameter that the structure cannot describe (named); batch norm in
        train mode;
            outputs that mix data; a likelihood whose output Hessian is not positive semidefinite.
        MemoryError: for a dense structure that cannot fit, before anything is allocated.

    >>> import torch
    >>> from bayesopt_chain import curvature, likelihoods
    >>> forward = lambda params, batch: batch[0] @ params["w"]
    >>> estimate = curvature.ggn(forward, likelihoods.gaussian(), structure="dense")
    >>> estimate({"w": torch.zeros(2, 1)}, (torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1))).to_dense()
    tensor([[1., 2.],
            [2., 4.]])
    """
    options = {"rank": rank, "sharing": sharing, "basis": basis}
    if probes is not None:
        _require_probed_diagonal(structure, probes)
        return _probed(forward, likelihood.factors, probes, generator, chunk_bytes)
    return _estimator(forward, likelihood.factors, structure, chunk_bytes, options)


def fisher(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    samples: int = 1,
    rank: int = 10,
    sharing: str = "expand",
    basis: Kronecker | Eigenbasis | None = None,
    generator: torch.Generator | None = None,
    chunk_bytes: int | None = None,
) -> Estimate:
    """Estimate the Fisher information matrix from `samples` labels a datum, drawn from the model; unbiased.

    Its cost does not grow with the number of outputs. The exact Fisher is `ggn`. Other arguments, results and errors:
    `ggn`.

    >>> import torch
    >>> from bayesopt_chain import curvature, likelihoods
    >>> forward = lambda params, batch: batch[0] @ params
    >>> estimate = curvature.fisher(forward, likelihoods.bernoulli(), generator=torch.Generator().manual_seed(0))
    >>> estimate(torch.zeros(2, 1), (torch.ones(3, 2), torch.ones(3, 1))).count
    tensor(3., dtype=torch.float64)
    """
    if samples < 1:
        raise ValueError(f"samples={samples}: pass at least 1, or use curvature.ggn, which is exact")

    def factors(outputs: Tensor, targets: Any) -> Tensor:
        return likelihood.sampled_factors(outputs, samples, generator)

    return _estimator(forward, factors, structure, chunk_bytes, {"rank": rank, "sharing": sharing, "basis": basis})


def empirical_fisher(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "diagonal",
    *,
    rank: int = 10,
    sharing: str = "expand",
    basis: Kronecker | Eigenbasis | None = None,
    chunk_bytes: int | None = None,
) -> Estimate:
    """Estimate the sum of squared gradients at the observed targets. Arguments, results and errors: `ggn`.

    It is not the Fisher information unless the model is right and trained; Kunstner et al. 2019 say what goes wrong.

    >>> import torch
    >>> from bayesopt_chain import curvature, likelihoods
    >>> forward = lambda params, batch: batch[0] @ params
    >>> estimate = curvature.empirical_fisher(forward, likelihoods.gaussian())
    >>> estimate(torch.zeros(1, 1), (torch.ones(1, 1), torch.full((1, 1), 3.0))).diag()
    tensor([[9.]])
    """
    options = {"rank": rank, "sharing": sharing, "basis": basis}
    return _estimator(forward, likelihood.empirical_factors, structure, chunk_bytes, options)


def hessian(
    forward: Forward,
    likelihood: Likelihood,
    structure: str = "dense",
    *,
    probes: int | None = None,
    generator: torch.Generator | None = None,
    chunk_bytes: int | None = None,
) -> Estimate:
    """Take the Hessian of the batch's summed loss, `"dense"` or `"diagonal"`, by Hessian-vector products.

    It may be indefinite, so that it has no root: structures that need one are refused, and `solve` raises where the
    precision is not positive definite. The diagonal is exact by P products, or with `probes` Hutchinson's estimate
    `mean v * (H v)`, unbiased. `chunk_bytes` bounds the products held at once. Other arguments and errors: `ggn`.

    >>> import torch
    >>> from bayesopt_chain import curvature, likelihoods
    >>> estimate = curvature.hessian(lambda params, batch: batch[0] * params, likelihoods.poisson())
    >>> estimate(torch.tensor(0.0), (torch.full((1, 1), 2.0), torch.ones(1, 1))).to_dense()
    tensor([[4.]])
    """
    if structure not in ("dense", "diagonal"):
        raise ValueError(
            f"structure={structure!r}: a Hessian may be indefinite and has no root; use 'dense' or 'diagonal', or "
            f"curvature.ggn"
        )
    if probes is not None:
        _require_probed_diagonal(structure, probes)

    @torch.no_grad()
    def estimate(params: Tree, batch: Any) -> Precision:
        unpack(batch)
        like, n = shape_only(params), batch_size(batch)
        plan = make_plan(forward, params, batch)
        require_separate(forward, params, batch, plan)
        if structure == "dense":
            require_dense_fits(size(params), common_dtype(params), plan.probe.device)
        activations = sum(leaf.numel() for leaf in plan.probe_outputs) + plan.probe.numel()
        data = max(1, min(n, (chunk_bytes or PRODUCT_BYTES) // (16 * activations * plan.probe.element_size())))
        total: Any = 0
        for start in range(0, n, data):
            chunk = part(batch, start, min(n, start + data))
            products = _hessian_products(forward, likelihood, params, chunk, like)
            if probes is not None:
                total = total + _hutchinson(products, params, like, probes, generator)
            else:
                total = total + _columns(products, params, chunk_bytes, structure == "diagonal")
        count = as_count(n, plan.probe.device)
        return Dense(total, like, count) if structure == "dense" else Diagonal(unflatten(total, like), count)

    return estimate


def _estimator(
    forward: Forward, factors: Factors, structure: str, chunk_bytes: int | None, options: dict[str, Any]
) -> Estimate:
    _require_structure(structure)

    @torch.no_grad()
    def estimate(params: Tree, batch: Any) -> Precision:
        unpack(batch)
        total = structure_sum(structure, params, **options)
        plan = make_plan(forward, params, batch)
        for chunk in pull_back(
            forward,
            params,
            batch,
            factors,
            plan,
            chunk_bytes,
            total.formed(),
            total.held(),
            total.accepts,
            few_data=total.few_data,
        ):
            total.add(chunk)
            del chunk  # before the next one is made
        return total.finish(as_count(batch_size(batch), plan.probe.device))

    return estimate


def _probed(
    forward: Forward, factors: Factors, probes: int, generator: torch.Generator | None, chunk_bytes: int | None
) -> Estimate:
    @torch.no_grad()
    def estimate(params: Tree, batch: Any) -> Diagonal:
        unpack(batch)
        n = batch_size(batch)
        plan = make_plan(forward, params, batch)
        require_separate(forward, params, batch, plan)
        activations = sum(leaf.numel() for leaf in plan.probe_outputs) + plan.probe.numel()
        data = max(1, min(n, (chunk_bytes or PRODUCT_BYTES) // (8 * activations * plan.probe.element_size())))
        total = optree.tree_map(torch.zeros_like, params)
        for start in range(0, n, data):
            chunk = part(batch, start, min(n, start + data))
            outputs, vjp = torch.func.vjp(lambda p, chunk=chunk: forward(p, chunk), params)
            s = factors(outputs.detach(), unpack(chunk)[1])
            for _ in range(probes):
                signs = _signs(s.shape[:2], s, generator)
                (v,) = vjp((s * signs.reshape(*s.shape[:2], *[1] * (s.ndim - 2))).sum(0))
                total = optree.tree_map(lambda t, leaf: t + leaf.square() / probes, total, v)
        return Diagonal(total, as_count(n, plan.probe.device))

    return estimate


def _hessian_products(forward: Forward, likelihood: Likelihood, params: Tree, chunk: Any, like: Tree) -> Any:
    """Return `products(V [M, P]) -> H V [M, P]`: the gradient's pullback, which for a symmetric matrix is the
    product."""

    def loss(vector: Tensor) -> Tensor:
        outputs = forward(unflatten(vector, like), chunk)
        return likelihood.nll(outputs, unpack(chunk)[1]).sum()

    def linearise() -> Any:
        _, vjp = torch.func.vjp(torch.func.grad(loss), flatten(params, like))
        return vjp

    def products(vectors: Tensor) -> Tensor:
        return torch.vmap(lambda v: vjp(v)[0])(vectors)

    vjp = linearise()
    try:
        products(torch.zeros(1, size(like), dtype=common_dtype(params), device=vjp_device(params)))
    except (RuntimeError, NotImplementedError):
        with plain_kernels():
            vjp = linearise()
    return products


def vjp_device(params: Tree) -> torch.device:
    """Return the device of the first leaf."""
    return optree.tree_leaves(params)[0].device


def _columns(products: Any, params: Tree, chunk_bytes: int | None, diagonal: bool) -> Tensor:
    """Return the Hessian `[P, P]`, or its diagonal `[P]`, from products with unit vectors, a chunk of them at a
    time.
    """
    parameters, dtype, device = size(params), common_dtype(params), vjp_device(params)
    item = torch.empty((), dtype=dtype).element_size()
    at_once = max(1, (chunk_bytes or PRODUCT_BYTES) // (3 * parameters * item))
    result = torch.zeros(parameters, dtype=dtype, device=device) if diagonal else None
    result = result if diagonal else torch.zeros(parameters, parameters, dtype=dtype, device=device)
    for start in range(0, parameters, at_once):
        stop = min(parameters, start + at_once)
        units = torch.zeros(stop - start, parameters, dtype=dtype, device=device)
        units[:, start:stop].fill_diagonal_(1)
        rows = products(units)
        result[start:stop] = rows[:, start:stop].diagonal() if diagonal else rows
    return result


def _hutchinson(products: Any, params: Tree, like: Tree, probes: int, generator: torch.Generator | None) -> Tensor:
    signs = _signs((probes, size(like)), flatten(params, like), generator)
    return sum(v * products(v[None])[0] for v in signs) / probes


def _signs(shape: Any, like: Tensor, generator: torch.Generator | None) -> Tensor:
    bits = torch.randint(0, 2, tuple(shape), generator=generator, device=like.device)
    return (2 * bits - 1).to(like.dtype)


def _require_structure(structure: str) -> None:
    if structure not in STRUCTURES:
        raise ValueError(f"structure={structure!r}: pass one of {', '.join(STRUCTURES)}")


def _require_probed_diagonal(structure: str, probes: int) -> None:
    if structure != "diagonal" or probes < 1:
        raise ValueError(f"probes={probes} with structure={structure!r}: probes (at least 1) estimate a diagonal only")
