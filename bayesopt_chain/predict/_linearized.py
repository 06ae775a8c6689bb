"""Predicts with the model linearised at the posterior's mean, which is where a Gauss-Newton posterior belongs.

    f(theta) ~ f(mean) + J (theta - mean)   =>   f ~ N(f(mean), J Lambda^-1 J^T),   J [E, P] of one datum's E outputs

The rows of J come a chunk of data at a time. Where the precision is diagonal in a basis u_i (x) v_j of every layer
(diagonal and Kronecker precisions), a layer's rows g x^T are not formed: in that basis the covariance is
``sum_oi g_ko g_lo x_i^2 / lambda_oi``. The linearised model is that of Immer et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain import kinds
from bayesopt_chain.curvature._affine import Affine
from bayesopt_chain.curvature._checks import Check, Checks
from bayesopt_chain.curvature._chunks import BatchPullback, Chunk, Demand
from bayesopt_chain.curvature._kinds import Kind
from bayesopt_chain.curvature._plan import TapPlan, make_plan
from bayesopt_chain.likelihoods._roots import Elementwise
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import LayerBases, Precision
from bayesopt_chain.predict._joint import needs_graph, with_graph
from bayesopt_chain.trees import Tree, common_dtype, flatten, wide


@kinds.takes(forward=kinds.FUNCTION, batch=kinds.BATCH, joint=kinds.BOOL, chunk_bytes=kinds.WHOLE)
def linearized(
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    *,
    joint: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the outputs under a Gaussian posterior.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; a datum's outputs depend on that datum only.
        posterior: its mean is a tree that ``forward`` takes; any precision structure.
        batch: any tree of tensors with one entry a datum on the first axis, handed on to ``forward``; for a pair
            ``(inputs, targets)`` the targets may be None.
        joint: whether the covariance is that of all data together. Default False: of each datum's own outputs.
        chunk_bytes: bound on the rows and activations held at once; one datum with all its outputs is the least
            possible. Default as in :func:`bayesopt_chain.curvature.ggn`.

    Returns:
        ``(mean [B, *event], covariance [B, E, E])``, E the number of outputs of a datum; with ``joint`` the covariance is
        ``[B E, B E]``, data first. Observation noise is not included. Where the batch or the precision asks for gradients,
        or inside a transformation of ``torch.func``, both have them; the rows of the Jacobian are then held.

    Raises:
        ValueError: for a singular precision, or a forward function that mixes data.

    Example:
        >>> import torch
        >>> from bayesopt_chain import predict
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> posterior = Gaussian(torch.ones(2, 1), Diagonal(torch.full((2, 1), 4.0), torch.tensor(1.0)))
        >>> mean, covariance = predict.linearized(lambda w, batch: batch[0] @ w, posterior, (torch.ones(1, 2), None))
        >>> mean.item(), covariance.item()
        (2.0, 0.5)
    """
    return linearized_by(Checks(), forward, posterior, batch, joint, chunk_bytes)


def linearized_by(
    checks: Checks,
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    joint: bool = False,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, with the checks that earlier batches of this forward function have passed."""
    if joint or needs_graph(batch, posterior.precision, posterior.mean):
        with torch.set_grad_enabled(needs_graph(batch, posterior.precision, posterior.mean)):
            mean, covariance = with_graph(forward, posterior, batch, joint)
    else:
        mean, covariance = _without_graph(checks, forward, posterior, batch, chunk_bytes)
    return mean.to(covariance.dtype), covariance  # of a model in bfloat16 both are float32


@torch.no_grad()
def _without_graph(
    checks: Checks,
    forward: Callable[[Tree, Any], Tensor],
    posterior: Gaussian,
    batch: Any,
    chunk_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    params, precision = posterior.mean, posterior.precision.factorised()
    bases = precision.layer_bases()
    if isinstance(forward, Affine) and bases and batch[0].ndim == 2:
        return forward(params, batch), _of_affine(forward, params, batch[0], bases)
    sizes = [leaf.numel() for leaf in optree.tree_leaves(params)]
    formed = max(sizes) if bases else 3 * sum(sizes)

    def run(plan: TapPlan, check: Check) -> tuple[Tensor, Tensor]:
        means, covariances = [], []
        demand = Demand(formed, sum(sizes), columns_together=True)
        for chunk in BatchPullback(forward, params, batch, None, _every_output, demand, chunk_bytes).chunks(
            plan, check
        ):
            means.append(chunk.outputs)
            covariances.append(_in_bases(chunk, bases) if bases else _by_rows(chunk, params, precision))
            del chunk  # before the next one is made
        return torch.cat(means[::-1]), torch.cat(covariances[::-1])  # chunks come last data first

    return checks.run(params, batch, lambda: make_plan(forward, params, batch), run)


def _of_affine(forward: Affine, params: Any, x: Tensor, bases: list[LayerBases]) -> Tensor:
    """The covariance of ``W x + b``: with U and V the bases of W and v its variances there, ``U diag(v (V^T x)^2) U^T``, and
    likewise of b. The output gradients are the unit vectors, those of one datum for all.
    """
    uses, seen = forward.uses(params, x.to(wide(x.dtype)))
    units = torch.eye(params[forward.weight].shape[0], dtype=wide(x.dtype), device=x.device)[:, None]
    parts = [
        _in_basis(use.kind, use.canonical.x(inputs, len(x)), use.canonical.g(inputs, units, 1), bases[use.leaf])
        for use, inputs in zip(uses, seen)
    ]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _every_output(outputs: Tensor, targets: Any) -> Elementwise:
    """Return the root whose columns pull back to the rows of the Jacobian."""
    return Elementwise(torch.ones_like(outputs))


def _in_bases(chunk: Chunk, bases: list[LayerBases]) -> Tensor:
    """Sum the leaves' parts in the bases in which the precision is diagonal."""
    total: Any = 0
    for leaf, kind, of_input, of_output, _ in chunk.gradients:
        total = total + _in_basis(kind, of_input(), of_output(), bases[leaf])
    return total


def _in_basis(kind: Kind, x: Tensor, g: Tensor, basis: LayerBases) -> Tensor:
    left, right, values = basis
    if left is not None and right is not None:
        kind, x, g = kind.rotated(x, g, left, right)
    return kind.covariance(x, g, values.reciprocal().reshape(kind.shape))


def _by_rows(chunk: Chunk, params: Tree, precision: Precision) -> Tensor:
    """Solve for the Jacobian's rows."""
    leaves, structure = optree.tree_flatten(params)
    formed = {leaf: kind.rows(x(), g()) for leaf, kind, x, g, _ in chunk.gradients}
    rows = optree.tree_unflatten(
        structure, [formed[i].reshape((*formed[i].shape[:2], *leaf.shape)) for i, leaf in enumerate(leaves)]
    )
    solved = flatten(precision.solve(rows), params)
    return torch.einsum("kbp,lbp->bkl", flatten(rows, params).to(common_dtype(params)), solved)
