"""Predicts with the model linearised at the posterior's mean, which is where a Gauss-Newton posterior belongs.

    f(theta) ~ f(mean) + J (theta - mean)   =>   f ~ N(f(mean), J Lambda^-1 J^T),   J [E, P] of one datum's E outputs

The rows of J come a chunk of data at a time. For diagonal and Kronecker precisions a layer's rows g x^T are not
formed: in the eigenbasis Lambda is diagonal, and the covariance is sum_oi g_ko g_lo x_i^2 / lambda_oi (Immer et al.
2021 for the model).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from bayesopt_chain.curvature._chunks import Chunk, make_plan, pull_back, unpack
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Diagonal, Eigenbasis, Precision
from bayesopt_chain.trees import Tree, common_dtype, flatten


@torch.no_grad()
def linearized(
    forward: Callable[[Tree, Any], Tensor], posterior: Gaussian, batch: Any, *, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the outputs under a Gaussian posterior.

    Args:
        forward: `forward(params, batch) -> outputs [B, *event]`; a datum's outputs depend on that datum only.
        posterior: its mean is a tree that `forward` takes; any precision structure.
        batch: `(inputs, targets)`; the targets are only handed on to `forward` and may be None.
        chunk_bytes: bound on the rows and activations held at once; one datum with all its outputs is the least
        possible.
            Default as in `curvature.ggn`.

    Returns:
        `(mean [B, *event], covariance [B, E, E])`, E the number of outputs of a datum. Observation noise is not
        included.

    Raises:
        ValueError: for a singular precision, or a forward function that mixes data.

    >>> import torch
    >>> from bayesopt_chain import predict
    >>> from bayesopt_chain.posterior.gaussian import Gaussian
    >>> from bayesopt_chain.precision import Diagonal
    >>> posterior = Gaussian(torch.ones(2, 1), Diagonal(torch.full((2, 1), 4.0), torch.tensor(1.0)))
    >>> mean, covariance = predict.linearized(lambda w, batch: batch[0] @ w, posterior, (torch.ones(1, 2), None))
    >>> mean, covariance
    (tensor([[2.]]), tensor([[[0.5000]]]))
    """
    unpack(batch)
    params, precision = posterior.mean, posterior.precision.factorised()
    plan = make_plan(forward, params, batch)
    in_basis = isinstance(precision, (Diagonal, Eigenbasis))
    sizes = [leaf.numel() for leaf in optree.tree_leaves(params)]
    formed = max(sizes) if in_basis else 3 * sum(sizes)
    covariance_of = _in_basis if in_basis else _by_rows
    means, covariances = [], []
    for chunk in pull_back(
        forward, params, batch, _unit_factors, plan, chunk_bytes, formed, sum(sizes), factors_together=True
    ):
        means.append(chunk.outputs)
        covariances.append(covariance_of(chunk, params, precision))
        del chunk  # before the next one is made
    return torch.cat(means[::-1]), torch.cat(covariances[::-1])  # chunks come last data first


def _unit_factors(outputs: Tensor, targets: Any) -> Tensor:
    """Return factors `[E, b, *event]` whose pullbacks are the rows of the Jacobian."""
    entries = outputs[0].numel()
    units = torch.eye(entries, dtype=outputs.dtype, device=outputs.device).reshape(entries, 1, *outputs.shape[1:])
    return units.expand(entries, *outputs.shape)


def _in_basis(chunk: Chunk, params: Tree, precision: Diagonal | Eigenbasis) -> Tensor:
    """Sum the leaves' parts in the basis in which the precision is diagonal."""
    bases = None if isinstance(precision, Diagonal) else list(zip(*map(optree.tree_leaves, precision[:2])))
    values = optree.tree_leaves(precision.values)
    total: Any = 0
    for leaf, kind, of_input, of_output in chunk.gradients:
        x, g = of_input(), of_output()
        variance = values[leaf].reciprocal().reshape(kind.shape)
        if bases is not None:
            x, g = kind.rotated(x, g, *bases[leaf])
        total = total + kind.covariance(x, g, variance)
    return total


def _by_rows(chunk: Chunk, params: Tree, precision: Precision) -> Tensor:
    """Solve for the Jacobian's rows."""
    leaves, structure = optree.tree_flatten(params)
    formed = {leaf: kind.rows(x(), g()) for leaf, kind, x, g in chunk.gradients}
    rows = optree.tree_unflatten(
        structure, [formed[i].reshape((*formed[i].shape[:2], *leaf.shape)) for i, leaf in enumerate(leaves)]
    )
    solved = flatten(precision.solve(rows), params)
    return torch.einsum("kbp,lbp->bkl", flatten(rows, params).to(common_dtype(params)), solved)
