"""Runs of links lowered to one sweep. A lowered run is itself a link over the same entries of the state.

v <- mu v + g;  u <- f v        momentum and a constant learning rate, block after block while both are in cache
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayesopt_chain.core.link import At, Link
from bayesopt_chain.core.op import Leaves, Op, are_small
from bayesopt_chain.links.learning_rate import Scale
from bayesopt_chain.links.momentum import Momentum, TraceState
from bayesopt_chain.tracing import is_transformed

BLOCK = 2**20  # elements; two float32 blocks fit a third-level cache, and smaller ones cost calls
_ONE = {dtype: torch.ones((), dtype=dtype) for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True)
class MomentumThenScale(Link):
    """Momentum and a constant factor behind it, with the bits of the two links."""

    momentum: Momentum
    scale: Scale

    def update(self, g: Leaves, states: Any, op: Op, at: At) -> tuple[Leaves, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first: TraceState = states[0]
        mu, factor = self.momentum.momentum, self.scale.sign * self.scale.step_size  # pyright: ignore[reportOperatorIssue]
        if op.inplace and not are_small(g) and not is_transformed() and all(map(_is_plain, first.trace, g)):
            # apply_updates goes from the first leaf to the last: this way each finds in cache what the other left there
            for t, x in reversed(list(zip(first.trace, g))):
                _sweep(t, x, mu, factor)  # pyright: ignore[reportArgumentType]
            return g, states
        v = op.average(first.trace, mu, g)
        return op.mul(op.put(g, v), factor), (first._replace(trace=tuple(v)), states[1])


def _is_plain(t: Tensor, x: Tensor) -> bool:
    """Whether what writes into ``out`` is right here: it is not differentiated and takes shapes for granted."""
    same = t.dtype == x.dtype and t.shape == x.shape and t.device.type == "cpu" and t.dtype in _ONE
    return same and not (t.requires_grad or x.requires_grad)


def _sweep(t: Tensor, x: Tensor, mu: float, factor: float) -> None:
    """``t <- mu t + x; x <- factor t``: the bits of ``mul_``, ``add_``, ``mul``.

    ``x + mu t / 1`` is one pass, in which the division keeps product and sum apart, each rounded by itself.
    """
    parts = [(t, x)]
    if t.numel() > BLOCK and t.is_contiguous() and x.is_contiguous():
        parts = zip(t.view(-1).split(BLOCK), x.view(-1).split(BLOCK))
    one = _ONE[t.dtype]
    for part, into in parts:
        torch.addcdiv(into, part, one, value=mu, out=part)
        torch.mul(part, factor, out=into)


def lower(links: Sequence[Link], plan: Any) -> dict[int, tuple[tuple[int, ...], Link]]:
    """By its first link, every run that can be swept at once; ``plan.order`` has the links without those of noise."""
    runs: dict[int, tuple[tuple[int, ...], Link]] = {}
    for i, k in zip(plan.order, plan.order[1:]):
        m, s = links[i], links[k]
        if type(m) is not Momentum or m.nesterov or m.dampening or m.moment_requires_grad:
            continue
        if type(s) is Scale and isinstance(s.step_size, (int, float)):
            runs[i] = ((i, k), MomentumThenScale(m, s))
    return runs
