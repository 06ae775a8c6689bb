"""What a batch tells a filter: rows of information, whatever estimator they come from.

    information of the batch = sum_m r_m r_m^T + diag(d)

An observation of a Gaussian likelihood knows its innovations too, each in units of its own noise: the filter then solves
a least-squares problem instead of normal equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision import Dense, Diagonal, LowRank, Precision, Root, Woodbury, unflatten
from bayesopt_chain.tracing import is_hidden
from bayesopt_chain.trees import Tree, as_tensor, paths


class Observation(NamedTuple):
    """A batch of Gaussian observations, linearised. ``rows``: the outputs' Jacobian over the noise's standard deviation,
    leaves ``[M, *leaf.shape]``; ``innovation``: target minus output over the same, ``[M]``; ``count``: 0-d, the data.
    """

    rows: Tree
    innovation: Tensor
    count: Tensor


class Information(NamedTuple):
    """Rows, leaf by leaf ``[M, *leaf.shape]``; the diagonal beside them, if any; the innovations, if known; the data."""

    rows: list[Tensor]
    diagonal: list[Tensor] | None
    innovation: Tensor | None
    count: Tensor


def observe(
    forward: Callable[[Tree, Any], Tensor], variance: float | Tensor = 1.0
) -> Callable[[Tree, Any], Observation]:
    """Linearise a model with Gaussian noise, for a filter's observation form.

    Args:
        forward: ``forward(params, batch) -> outputs [B, *event]``; ``batch = (inputs, targets)``, targets like the outputs.
        variance: of the noise, in the targets' units squared: a number, or a tensor ``[*event]``. Default 1.

    Returns:
        ``estimate(params, batch)``, an :class:`Observation`, to be passed where a filter takes ``curvature``.

    Raises:
        ValueError: a variance that is not positive; targets of another shape than the outputs.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> estimate = bc.ekf.observe(lambda params, batch: batch[0] @ params, variance=0.25)
        >>> observation = estimate(torch.zeros(2, 1), (torch.eye(2), torch.ones(2, 1)))
        >>> observation.innovation
        tensor([2., 2.])
    """
    if not bool(torch.as_tensor(variance > 0).all()):
        raise ValueError(f"ekf.observe: variance must be positive, got {variance}")

    def estimate(params: Tree, batch: Any) -> Observation:
        leaves, structure = optree.tree_flatten(params)

        def outputs(chosen: tuple) -> tuple[Tensor, Tensor]:
            f = forward(optree.tree_unflatten(structure, list(chosen)), batch)
            return f, f

        jacobian, f = torch.func.jacrev(outputs, has_aux=True)(tuple(leaf.detach() for leaf in leaves))
        if batch[1].shape != f.shape:
            raise ValueError(f"ekf.observe: targets {tuple(batch[1].shape)}, outputs {tuple(f.shape)}: make them alike")
        deviation = as_tensor(variance, f.dtype, f.device).sqrt().expand_as(f).reshape(-1)
        rows = [
            j.reshape(f.numel(), *leaf.shape) / deviation.reshape(-1, *[1] * leaf.ndim)
            for j, leaf in zip(jacobian, leaves)
        ]
        count = torch.full((), float(f.shape[0]), dtype=torch.float64, device=f.device)
        innovation = (batch[1] - f).detach().reshape(-1) / deviation
        return Observation(optree.tree_unflatten(structure, [row.detach() for row in rows]), innovation, count)

    return estimate


def information(increment: Any, leaves: list[Tensor], who: str) -> Information:
    """Take an increment apart.

    Raises:
        ValueError: none given, one over other parameters, or an indefinite one.
        TypeError: a structure without rows.
    """
    if increment is None:
        raise ValueError(
            f"{who}: update got no curvature: pass curvature=estimate(params, batch) with an estimator of bc.curvature "
            "(structure 'root'), or bc.ekf.observe (make_step does, given curvature=)"
        )
    if isinstance(increment, Observation):
        rows, diagonal, innovation = increment.rows, None, increment.innovation
    elif isinstance(increment, Root):
        rows, diagonal, innovation = increment.rows, None, None
    elif isinstance(increment, (LowRank, Woodbury)):
        increment = increment.unfactorised() if isinstance(increment, Woodbury) else increment
        rows, diagonal, innovation = increment.rows, increment.diagonal, None
    elif isinstance(increment, Diagonal):
        rows = optree.tree_map(lambda v: v.new_zeros((0, *v.shape)), increment.values)
        diagonal, innovation = increment.values, None
    elif isinstance(increment, Dense):
        rows, diagonal, innovation = unflatten(_root(increment.matrix, who), increment.like), None, None
    else:
        kind = type(increment).__name__
        raise (TypeError if isinstance(increment, Precision) else ValueError)(
            f"{who}: an increment of class {kind} has no rows: use an estimator with structure='root', 'low_rank', "
            "'diagonal' or 'dense', or bc.ekf.observe"
        )
    flat = optree.tree_leaves(rows)
    if [tuple(row.shape[1:]) for row in flat] != [tuple(leaf.shape) for leaf in leaves]:
        raise ValueError(
            f"{who}: the increment is over {dict(zip(paths(rows), [tuple(r.shape[1:]) for r in flat]))}, the parameters have "
            f"the shapes {[tuple(leaf.shape) for leaf in leaves]}: estimate the curvature of these parameters"
        )
    return Information(flat, None if diagonal is None else optree.tree_leaves(diagonal), innovation, increment.count)


def _root(matrix: Tensor, who: str) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    if not is_hidden(values):
        tolerance = 1e3 * torch.finfo(values.dtype).eps * values.abs().max()
        if bool((values < -tolerance).any()):
            raise ValueError(
                f"{who}: the increment is indefinite (eigenvalue {values.min().item():.3g}): use bc.curvature.ggn"
            )
    return values.clamp_min(0).sqrt()[:, None] * vectors.mT
