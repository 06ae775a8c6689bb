r"""Which temperature predicts held-out data best, told from the draws of one pilot run.

The pilot starts at a mode ``theta*`` and samples at the temperature ``T`` of the chain. On a quadratic loss draws at ``c T``
are those at ``T``, pulled towards the mode, and a run of ``t`` epochs has widened further than a pilot of ``s`` epochs:

    theta_s(c) = theta* + sqrt(c v(t) / v(s)) (theta_s - theta*),        v(t) = 1 - exp(-2 r t),

``r`` the effective draws an epoch, at which directions of the average curvature relax; stiffer ones were done earlier, so that
the widening errs on the side of colder temperatures. So does a short pilot, whose draws point one way, where those of a long
run or of several chains average out. The score of ``c`` is that of the predictions which the draws make together,

    1/n sum_i log 1/S sum_s p(y_i | theta_s(c)),

on n data that ``theta*`` was trained without. The largest temperature is taken at which draws predict at least as well as the
mode, and the smallest where there is none. Forward passes alone are needed; each counts as a third of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from bayesopt_chain import batches as batch_trees
from bayesopt_chain.trees import Tree


class HeldOutScore(NamedTuple):
    """What a temperature is expected to score on held-out data.

    Attributes:
        factor: the temperature over that of the chain; 0 is the mode, without draws.
        score: mean log probability of a held-out datum.
        difference: to the mode's score.
        error: standard error of the difference, over the data.
    """

    factor: float
    score: float
    difference: float
    error: float


def scores(
    name: str,
    log_prob: Callable[[Any, Any], Any],
    mode: Tree,
    draws: Sequence[Tree],
    held: Any,
    count: int,
    factors: Sequence[float],
    widening: float,
) -> list[HeldOutScore]:
    """The mode's score and those of the factors, largest factor first.

    Raises:
        ValueError: ``log_prob`` does not return one finite number for each datum.
    """
    alone = _log_prob(name, log_prob, mode, held, count)
    found = []
    for factor in sorted(factors, reverse=True):
        pull = math.sqrt(factor * widening)
        each = [
            _log_prob(name, log_prob, optree.tree_map(partial(torch.lerp, weight=pull), mode, draw), held, count, False)
            for draw in draws
        ]
        together = torch.stack(each).logsumexp(0) - math.log(len(each))
        change = together - alone
        error = float(change.std()) / math.sqrt(count)
        found.append(HeldOutScore(factor, float(together.mean()), float(change.mean()), error))
    return [*found, HeldOutScore(0.0, float(alone.mean()), 0.0, 0.0)]


def chosen(rows: Sequence[HeldOutScore]) -> HeldOutScore:
    """The largest factor that scores at least what the mode does, or the smallest of all."""
    *factors, _ = rows
    return next((row for row in factors if row.difference >= 0), factors[-1])


def widening(draws_per_epoch: float, run: float | None, pilot: float) -> float:
    """``v(t) / v(s)``; of a run of unknown length, ``1 / v(s)``."""
    v = -math.expm1(-2.0 * draws_per_epoch * pilot)
    # where hardly anything relaxed, variances grow with time
    return (1.0 if run is None else -math.expm1(-2.0 * draws_per_epoch * max(run, pilot))) / max(v, 1e-12)


def split(name: str, data: Any, size: int, held_out: Any) -> tuple[Any, Any, int]:
    """The data without some rows, these rows, and how many they are.

    Raises:
        TypeError: no whole numbers.
        ValueError: rows that do not exist or stand there twice, fewer than two, or so many that fewer than two are left.
    """
    try:
        rows = torch.as_tensor(held_out, device="cpu")
    except (TypeError, ValueError, RuntimeError) as err:
        raise TypeError(f"{name}: held_out must be a list or tensor of row numbers, got {held_out!r:.60}") from err
    if (
        (rows.numel() and rows.dtype not in (torch.int16, torch.int32, torch.int64, torch.uint8))
        or rows.ndim > 1
        or not rows.ndim
    ):
        raise TypeError(
            f"{name}: held_out must be a list or a 1-d tensor of row numbers, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    rows = rows.long().cpu()
    beyond = rows[(rows < 0) | (rows >= size)]
    if len(rows) < 2 or len(rows) > size - 2 or len(beyond):
        came = f"row {int(beyond[0])}" if len(beyond) else f"{len(rows)} rows"
        raise ValueError(
            f"{name}: held_out must be 2 to {size - 2} rows of the {size} data, in [0, {size}), got {came}"
        )
    if len(rows.unique()) < len(rows):
        raise ValueError(f"{name}: held_out must name each row once")
    kept = torch.ones(size, dtype=torch.bool, device="cpu")
    kept[rows] = False
    left = kept.nonzero()[:, 0]

    def taken(which: Tensor) -> Any:
        return batch_trees.tree_map(lambda x: x[which.to(x.device)], data)

    return taken(left), taken(rows), len(rows)


def _log_prob(
    name: str, log_prob: Callable[[Any, Any], Any], params: Tree, held: Any, count: int, strict: bool = True
) -> Tensor:
    with torch.no_grad():
        out = log_prob(params, held)
    if not isinstance(out, Tensor) or out.shape != (count,) or not out.is_floating_point():
        came = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"{name}: log_prob must return one log probability for each datum, a tensor of shape ({count},), got {came}"
        )
    if strict and not bool(out.isfinite().all()):
        raise ValueError(f"{name}: log_prob must be finite at params, on every held-out datum")
    return out.double().nan_to_num(-math.inf, -math.inf, -math.inf).clamp_min(-1e4)
