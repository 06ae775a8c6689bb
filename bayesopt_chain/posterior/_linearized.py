"""Predicts with the model linearised at the posterior's mean, which is where a Gauss-Newton posterior belongs.

    f(theta) ~ f(mean) + J (theta - mean)   =>   f ~ N(f(mean), J Lambda^-1 J^T),   J [E, P] of one datum's E outputs

The rows of J come a chunk of data at a time. Where the precision is diagonal in a basis u_i (x) v_j of every layer
(diagonal and Kronecker precisions), a layer's rows g x^T are not formed: in that basis the covariance is
``sum_oi g_ko g_lo x_i^2 / lambda_oi``. A dense precision has its factor L: the covariance is ``V^T V`` with ``L V = J^T``.
The linearised model is that of Immer et al. 2021.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
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
from bayesopt_chain.posterior._joint import ROW_BYTES, needs_graph, with_graph
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import LayerBases, Precision
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
        >>> import bayesopt_chain as bc
        >>> from bayesopt_chain.posterior.gaussian import Gaussian
        >>> from bayesopt_chain.precision import Diagonal
        >>> posterior = Gaussian(torch.ones(2, 1), Diagonal(torch.full((2, 1), 4.0), torch.tensor(1.0)))
        >>> mean, covariance = bc.posterior.linearized(lambda w, batch: batch[0] @ w, posterior, (torch.ones(1, 2), None))
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
    sizes = [leaf.numel() for leaf in optree.tree_leaves(params)]
    if isinstance(forward, Affine) and batch[0].ndim == 2:
        mean = forward(params, batch)
        row = 3 * sum(sizes) * mean.shape[1] * mean.element_size()
        at_once = len(mean) if bases else max(1, (ROW_BYTES if chunk_bytes is None else chunk_bytes) // row)
        parts = [_of_affine(forward, params, x, bases, precision) for x in batch[0].split(at_once)]
        return mean, torch.cat(parts)
    formed = max(sizes) if bases else 3 * sum(sizes)

    def run(plan: TapPlan, check: Check) -> tuple[Tensor, Tensor]:
        means, covariances = [], []
        demand = Demand(formed, sum(sizes), columns_together=True)
        for chunk in BatchPullback(forward, params, batch, None, _every_output, demand, chunk_bytes).chunks(
            plan, check
        ):
            means.append(chunk.outputs)
            covariances.append(_in_bases(chunk, bases) if bases else _by_rows(_rows(chunk), params, precision))
            del chunk  # before the next one is made
        return torch.cat(means[::-1]), torch.cat(covariances[::-1])  # chunks come last data first

    return checks.run(params, batch, lambda: make_plan(forward, params, batch), run)


def _of_affine(forward: Affine, params: Any, x: Tensor, bases: list[LayerBases] | None, precision: Precision) -> Tensor:
    """The covariance of ``W x + b``, whose output gradients are the unit vectors, those of one datum for all.

    With U and V the bases of W and v its variances there it is ``U diag(v (V^T x)^2) U^T``, and likewise of b.
    """
    uses, seen = forward.uses(params, x.to(wide(x.dtype)))
    units = torch.eye(params[forward.weight].shape[0], dtype=wide(x.dtype), device=x.device)[:, None]
    gradients = [
        (use.leaf, use.kind, use.canonical.x(inputs, len(x)), use.canonical.g(inputs, units, 1))
        for use, inputs in zip(uses, seen)
    ]
    if bases:
        return reduce(torch.add, (_in_basis(kind, of_x, g, bases[leaf]) for leaf, kind, of_x, g in gradients))
    all_data = {leaf: kind.rows(of_x, g.expand(len(g), len(x), *g.shape[2:])) for leaf, kind, of_x, g in gradients}
    return _by_rows(all_data, params, precision)


def _every_output(outputs: Tensor, targets: Any) -> Elementwise:
    """Return the root whose columns pull back to the rows of the Jacobian."""
    return Elementwise(torch.ones_like(outputs))


def _rows(chunk: Chunk) -> dict[int, Tensor]:
    """The Jacobian's rows, by the number of a leaf."""
    return {leaf: kind.rows(of_input(), of_output()) for leaf, kind, of_input, of_output, _ in chunk.gradients}


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


def _by_rows(formed: dict[int, Tensor], params: Tree, precision: Precision) -> Tensor:
    """``J Lambda^-1 J^T`` of every datum, ``[b, K, K]``, from each leaf's rows ``[K, b, d0, d1]`` of J, by its number."""
    leaves, structure = optree.tree_flatten(params)
    parts = [formed[i].reshape((*formed[i].shape[:2], *leaf.shape)) for i, leaf in enumerate(leaves)]
    rows = optree.tree_unflatten(structure, parts)
    flat, factor = flatten(rows, params), precision.lower_factor()
    if factor is None:
        return torch.einsum("kbp,lbp->bkl", flat.to(common_dtype(params)), flatten(precision.solve(rows), params))
    columns = flat.reshape(-1, flat.shape[2]).mT.to(factor.dtype)
    solved = torch.linalg.solve_triangular(factor, columns, upper=False)
    by_datum = solved.reshape(-1, *flat.shape[:2]).permute(2, 1, 0)
    return by_datum @ by_datum.mT
