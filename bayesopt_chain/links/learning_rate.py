"""Scaling by a step size: ``u <- sign * step_size * u``.

The step size is a number, a 0-d tensor that is read at every update, or a schedule, which is a function of the number of
updates so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torchopt.base import EmptyState

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import new_counts
from bayesopt_chain.engine.parts import Part, Scales
from bayesopt_chain.matching.response import Linear, Rate, Response
from bayesopt_chain.schedules import ScalarOrSchedule, by_count, is_schedule, returned, scalar


class ScaleByScheduleState(NamedTuple):
    """The state of a scaling by a schedule.

    Attributes:
        count: how many updates each leaf has had, 0-d int64.
    """

    count: tuple[Tensor, ...]  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class Scale(Link):
    """The link that multiplies by ``sign * step_size``.

    Attributes:
        step_size: a number, a 0-d tensor or a schedule.
        sign: 1 or -1.
    """

    step_size: ScalarOrSchedule
    sign: int = 1
    traits = Traits(on_shards="elementwise")

    @property
    def response(self) -> Response:
        # A tensor counts as a gain that changes, because its owner may write a new value into it between two updates.
        if callable(self.step_size) or isinstance(self.step_size, Tensor):
            return Rate(self.sign)
        return Linear((float(self.sign * self.step_size),))

    @property
    def part(self) -> Part | None:
        return Scales(self.step_size, self.sign)

    def init(self, leaves: Leaves, context: LinkContext) -> Any:
        return ScaleByScheduleState(new_counts(leaves)) if is_schedule(self.step_size) else EmptyState()

    def rate(self, state: Any, n: int) -> list[Any]:
        if is_schedule(schedule := self.step_size):
            return by_count(lambda c: scalar(schedule(c), c.device), state.count)
        return [self.step_size] * n

    def factors(self, state: Any, n: int) -> Any:
        """The signed factor of each of ``n`` leaves, or one factor for all of them."""
        size: Any = self.step_size
        if is_schedule(size):
            return by_count(lambda c: self.sign * returned(size(c)), state.count)
        return self.sign * size

    def update(self, g: Leaves, state: Any, op: TensorOps, context: LinkContext) -> tuple[Leaves, Any]:
        g = op.mul(g, self.factors(state, len(g)))
        return g, ScaleByScheduleState(op.count(state.count)) if is_schedule(self.step_size) else state

    def __str__(self) -> str:
        shown = checks.show(self.step_size)
        return f"scale_by_neg_lr({shown})" if self.sign < 0 else f"scale({shown})"


@checks.link_takes(lr=checks.number("[0, inf]", tensor=True, schedule=True))
def scale_by_neg_lr(lr: ScalarOrSchedule) -> Chain:
    """Multiply by ``-lr``, so that the updates go down the gradient.

    Args:
        lr: the learning rate, a number, a 0-d tensor or a schedule. A tensor is read at every update, so that the learning
            rate can change while a captured step is replayed. A schedule takes the number of updates so far and returns the
            learning rate.

    Returns:
        A link; its state counts the updates if ``lr`` is a schedule.

    Raises:
        TypeError: ``lr`` is neither a number nor a tensor nor a function.
        ValueError: ``lr`` is a negative number.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.scale_by_neg_lr(0.5)
        >>> tx.update([torch.ones(2)], tx.init([torch.ones(2)]), inplace=False)[0]
        [tensor([-0.5000, -0.5000])]
    """
    return Chain((Scale(lr, -1),))


@checks.link_takes()
def scale(step_size: float) -> Chain:
    """Multiply by ``step_size``.

    Args:
        step_size: a number; a negative one makes the updates go down the gradient.

    Returns:
        A link without state.

    Raises:
        TypeError: ``step_size`` is not a number.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale(2.0)
        >>> tx.update([torch.ones(2)], tx.init([torch.ones(2)]), inplace=False)[0]
        [tensor([2., 2.])]
    """
    return Chain((Scale(step_size),))


@checks.link_takes()
def scale_by_schedule(step_size_fn: Callable[[Tensor], Any]) -> Chain:
    """Multiply by ``step_size_fn(count)``, a positive function of the number of updates so far.

    Args:
        step_size_fn: takes the count, a 0-d int64 tensor, and returns a number or a 0-d tensor.

    Returns:
        A link; its state counts the updates.

    Raises:
        TypeError: ``step_size_fn`` is not a function.
        ValueError: at ``init`` and ``update`` of a chain with noise, a factor that is negative or not finite.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.scale_by_schedule(lambda count: 1 / (1 + count))
        >>> tx.update([torch.ones(1)], tx.init([torch.ones(1)]), inplace=False)[0]
        [tensor([1.])]
    """
    return Chain((Scale(step_size_fn),))
