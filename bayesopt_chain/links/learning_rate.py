"""Scaling by a step size: a number, a tensor that is read at every update, or a schedule of the update count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain import checks
from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core import counters
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.foreign import recognises
from bayesopt_chain.core.leaves import each
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Linear, Rate, Response
from bayesopt_chain.tracing import is_hidden

ScalarOrSchedule = float | Tensor | Callable[[Tensor], Any]


class ScaleByScheduleState(NamedTuple):
    """Updates seen by each leaf: 0-d int64 tensors."""

    count: tuple[Tensor, ...]


@dataclass(frozen=True)
class Scale(Rule):
    """Multiply by ``sign * step_size``."""

    step_size: ScalarOrSchedule
    sign: int = 1

    @cached_property
    def is_schedule(self) -> bool:
        return callable(self.step_size) and not torch.is_tensor(self.step_size)

    @property
    def response(self) -> Response:
        if self.is_schedule or torch.is_tensor(self.step_size):
            return Rate(self.sign)
        return Linear((float(self.sign * self.step_size),))

    def init(self, params):
        return ScaleByScheduleState(counters.zeros(params)) if self.is_schedule else EmptyState()

    def rate(self, state, n: int) -> list[Tensor]:
        """Magnitude of the gain now, for each of ``n`` leaves."""
        if self.is_schedule:
            return counters.each(lambda c: counters.scalar(self.step_size(c), c.device), state.count)
        return [self.step_size] * n

    def factors(self, state, n: int, g=None) -> list:
        if self.is_schedule:
            return counters.each(self._signed, state.count, g)
        return [-self.step_size if self.sign < 0 else self.step_size] * n

    def update(self, g, state, params, ctx):
        factors = None if ctx.done else self.factors(state, len(g), g)
        if self.is_schedule:
            state = ScaleByScheduleState(counters.increment(state.count, g, ctx.inplace))
        if ctx.done:
            return g, state
        return each(Tensor.mul_ if ctx.inplace else _times, g, factors), state

    def _signed(self, count: Tensor):
        return -self.step_size(count) if self.sign < 0 else self.step_size(count)

    def __str__(self) -> str:
        shown = checks.show(self.step_size)
        return f"scale_by_neg_lr({shown})" if self.sign < 0 else f"scale({shown})"


def _times(x: Tensor, factor: Any) -> Tensor:
    """The product, in the dtype of ``x`` where a float64 schedule would promote a 0-d parameter."""
    out = x.mul(factor)
    return out.to(x.dtype) if x.ndim == 0 and torch.is_tensor(factor) and factor.dtype == torch.float64 else out


@checked_types
def scale_by_neg_lr(lr: ScalarOrSchedule) -> Chain:
    """Multiply by ``-lr``: the link that turns gradients into a descent.

    Args:
        lr: learning rate: a number, a 0-d tensor read at every update (so that it can change under a captured step), or
            a schedule ``count -> lr`` of the number of updates so far.

    Raises:
        ValueError: a negative number.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_neg_lr(0.5)
        >>> tx.update([torch.ones(2)], tx.init([torch.ones(2)]), inplace=False)[0]
        [tensor([-0.5000, -0.5000])]
    """
    if not (callable(lr) or isinstance(lr, Real) or torch.is_tensor(lr)):
        raise TypeError(f"Invalid learning rate: {lr!r}; it must be a number, a 0-d tensor or a schedule")
    hidden = torch.is_tensor(lr) and is_hidden(lr)
    if not (callable(lr) or hidden or lr >= 0.0):
        raise ValueError(f"Invalid learning rate: {lr}; it must be a number >= 0, a 0-d tensor or a schedule")
    return Chain((Scale(lr, -1),))


@checked_types
def scale(step_size: float) -> Chain:
    """Multiply by ``step_size``.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale(2.0)
        >>> tx.update([torch.ones(2)], tx.init([torch.ones(2)]), inplace=False)[0]
        [tensor([2., 2.])]
    """
    return Chain((Scale(step_size),))


@checked_types
def scale_by_schedule(step_size_fn: Callable[[Tensor], Any]) -> Chain:
    """Multiply by ``step_size_fn(count)``, a positive function of the number of updates so far.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_schedule(lambda count: 1 / (1 + count))
        >>> tx.update([torch.ones(1)], tx.init([torch.ones(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((Scale(step_size_fn),))


@recognises("_scale.<locals>.update_fn")
def _torchopts_scale(link, cells):
    return (Scale(cells["step_size"]),)


@recognises("_scale_by_schedule.<locals>.update_fn")
def _torchopts_schedule(link, cells):
    fn = cells["step_size_fn"]
    if fn.__qualname__ == "_scale_by_neg_lr.<locals>.schedule_wrapper":
        return (Scale(inspect.getclosurevars(fn).nonlocals["lr"], -1),)
    return (Scale(fn),)
