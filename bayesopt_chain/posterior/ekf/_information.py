"""What a batch tells a filter: rows of information, whatever estimator they come from.

    information of the batch = sum_m r_m r_m^T

An observation of a Gaussian likelihood knows its innovations too, each in units of its own noise: the filter then solves
a least-squares problem instead of normal equations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain.precision import Precision
from bayesopt_chain.trees import Tree, as_tensor, paths


class Observation(NamedTuple):
    """A batch of Gaussian observations, linearised. ``rows``: the outputs' Jacobian over the noise's standard deviation,
    leaves ``[M, *leaf.shape]``; ``innovation``: target minus output over the same, ``[M]``; ``count``: 0-d, the data.
    """

    rows: Tree
    innovation: Tensor
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


class Information(NamedTuple):
    """Rows, leaf by leaf ``[M, *leaf.shape]``; the innovations, ``[M]``, if known; the number of data."""

    rows: list[Tensor]
    innovation: Tensor | None
    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]


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

    Args:
        increment: a precision that has rows, or an :class:`Observation`.
        leaves: the parameters'.
        who: the filter, for the errors.

    Raises:
        ValueError: none given, one over other parameters, or an indefinite one.
        TypeError: a structure without rows.
    """
    if isinstance(increment, Observation):
        rows, innovation = increment.rows, increment.innovation
    elif isinstance(increment, Precision):
        rows, innovation = _rows(increment, who), None
    else:
        came = "no curvature" if increment is None else f"curvature of class {type(increment).__name__}"
        raise ValueError(
            f"{who}: update got {came}: pass curvature=estimate(params, batch) with an estimator of bc.curvature "
            "(structure='root'), or bc.ekf.observe (make_step does, given curvature=)"
        )
    flat = optree.tree_leaves(rows)
    if [tuple(row.shape[1:]) for row in flat] != [tuple(leaf.shape) for leaf in leaves]:
        raise ValueError(
            f"{who}: the increment is over {dict(zip(paths(rows), [tuple(r.shape[1:]) for r in flat]))}, the parameters have "
            f"the shapes {[tuple(leaf.shape) for leaf in leaves]}: estimate the curvature of these parameters"
        )
    return Information(flat, innovation, increment.count)


def of_moving(known: Information, moves: list[bool]) -> Information:
    """What is known of the leaves that move, the others being fixed: the rows of a fixed leaf are zero."""
    return known._replace(rows=[row if m else torch.zeros_like(row) for row, m in zip(known.rows, moves)])


def _rows(increment: Precision, who: str) -> Tree:
    try:
        return increment.as_rows()
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"{who}: {error}. A filter needs all rows of the batch: curvature of structure='root' (or 'dense'), or "
            "bc.ekf.observe. With a diagonal in their place the mean diverges where features are correlated. Where the rows do "
            "not fit, take smaller batches, or bc.vi.von, whose lr bounds the step"
        ) from None
