r"""A delay of one step, ``d_t = g_{t-1}``: response ``1/z``.

It is what an integrator does that moves the parameters by the old velocity.
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
    """The update of the step before, like each parameter."""

    held: tuple[Tensor, ...]


@dataclass(frozen=True)
class Delay(Link):
    """The link behind :func:`delay`."""

    traits = ELEMENTWISE

    @property
    def response(self) -> Response:
        return Linear((0.0, 1.0))

    def init(self, leaves: Leaves, context: LinkContext) -> DelayState:
        return DelayState(zeros(leaves))

    def update(self, g: Leaves, state: DelayState, op: TensorOps, context: LinkContext) -> tuple[Leaves, DelayState]:
        kept = [x.clone() for x in g]
        return op.copy(g, state.held), DelayState(tuple(op.put(state.held, kept)))

    def __str__(self) -> str:
        return "delay()"


def delay() -> Chain:
    """Pass on what came one step before; zero at first.

    No matched noise exists behind a delay: the noise would have to be known a step ahead.

    Returns:
        A link; its state holds one tensor for each parameter.

    Raises:
        ValueError: at ``init`` of a chain with a noise link, this link beside it.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.links.delay()
        >>> first, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), inplace=False)
        >>> second, state = tx.update([torch.zeros(1)], state, inplace=False)
        >>> first, second
        ([tensor([0.])], [tensor([1.])])
    """
    return Chain((Delay(),))
