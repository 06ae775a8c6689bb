r"""A delay by one step: the update is ``d_t = g_{t-1}``, the response is ``1/z``.

An integrator that moves the parameters by the velocity of the step before contains this delay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import ELEMENTWISE, Link, LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.leaves import zeros
from bayesopt_chain.matching.response import Linear, Response


class DelayState(NamedTuple):
    """The state of a delay.

    Attributes:
        held: what came in at the step before, of the shape of each parameter.
    """

    held: tuple[Tensor, ...]


@dataclass(frozen=True)
class Delay(Link):
    """The link that :func:`delay` returns."""

    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Linear((0.0, 1.0))

    def init(self, leaves: Leaves, context: LinkContext) -> DelayState:
        return DelayState(zeros(leaves))

    def update(self, g: Leaves, state: DelayState, op: TensorOps, context: LinkContext) -> tuple[Leaves, DelayState]:
        kept = [x.clone() for x in g]  # in place the next line overwrites g
        return op.copy(g, state.held), DelayState(tuple(op.put(state.held, kept)))

    def __str__(self) -> str:
        return "delay()"


def delay() -> Chain:
    """Return what came in at the step before, and zeros at the first step.

    A chain with a delay has no matched noise, because the noise would have to be known one step ahead.

    Returns:
        A link; its state holds one tensor for each parameter.

    Raises:
        ValueError: at ``init`` of a chain that has this link and a noise link.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.delay()
        >>> first, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), inplace=False)
        >>> second, state = tx.update([torch.zeros(1)], state, inplace=False)
        >>> first, second
        ([tensor([0.])], [tensor([1.])])
    """
    return Chain((Delay(),))
