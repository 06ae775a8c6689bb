r"""A delay of one step, ``d_t = g_{t-1}``: response ``1/z``. What an integrator does that drifts with the old velocity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from bayesopt_chain.core.chain import Chain, Rule
from bayesopt_chain.core.leaves import zeros_like
from bayesopt_chain.core.response import Linear


class DelayState(NamedTuple):
    """The update of the step before, like each parameter."""

    held: tuple[Tensor, ...]


@dataclass(frozen=True)
class Delay(Rule):
    """The rule behind :func:`delay`."""

    response = Linear((0.0, 1.0))

    def init(self, params):
        return DelayState(zeros_like(params))

    def update(self, g, state, params, ctx):
        out, held = [], []
        for x, h in zip(g, state.held):
            if x is None:
                out.append(None)
                held.append(h)
            elif ctx.inplace:
                kept = x.clone()
                out.append(x.copy_(h))
                held.append(h.copy_(kept))
            else:
                out.append(h.clone())
                held.append(x.clone())
        return out, DelayState(tuple(held))

    def __str__(self) -> str:
        return "delay()"


def delay() -> Chain:
    """Pass on what came one step before; zero at first.

    No matched noise exists behind a delay: the noise would have to be known a step ahead.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.delay()
        >>> first, state = tx.update([torch.ones(1)], tx.init([torch.zeros(1)]), inplace=False)
        >>> second, state = tx.update([torch.zeros(1)], state, inplace=False)
        >>> first, second
        ([tensor([0.])], [tensor([1.])])
    """
    return Chain((Delay(),))
