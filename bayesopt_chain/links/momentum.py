r"""Momentum: ``v <- mu v + (1 - dampening) g``, response ``(1 - dampening) / (1 - mu/z)``; Nesterov's ``g + mu v``.

Where matched noise of constant lr and temperature acts right in front of it, the velocity also carries the half of that
noise that acts in the next step (:mod:`bayesopt_chain.core.matching`): ``mu`` times it is then a Langevin sampler's
velocity, of variance ``temperature (1 + mu) / (2 lr)`` where nothing is dampened.

As in PyTorch the first gradient is not dampened; which step is the first is part of the state, for each leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.arguments import checked_types
from bayesopt_chain.core import counters
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.foreign import recognises
from bayesopt_chain.core.leaves import each, keep, zeros_like
from bayesopt_chain.core.link import Rule
from bayesopt_chain.core.response import Linear, Response


class TraceState(NamedTuple):
    """Velocity of each leaf; with dampening also how many gradients it has seen (else ``count`` is empty)."""

    trace: tuple[Tensor, ...]
    count: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Momentum(Rule):
    """The rule behind :func:`add_momentum`."""

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    moment_requires_grad: bool = False

    @property
    def takes_factors(self) -> bool:
        return not (self.dampening or self.nesterov or self.moment_requires_grad)

    @property
    def keeps_echo(self) -> bool:
        return not self.nesterov

    @property
    def response(self) -> Response:
        mu = float(self.momentum)
        b = (1.0 + mu, -mu) if self.nesterov else (1.0 - self.dampening,)
        return Linear(b, (1.0, -mu))

    def init(self, params):
        count = counters.zeros(params) if self.dampening else ()
        return TraceState(zeros_like(params, requires_grad=self.moment_requires_grad), count)

    def update(self, g, state, params, ctx):
        mu, alpha = self.momentum, 1.0 - self.dampening
        before = ctx.scaled(state.trace)
        if ctx.factors is not None:
            # apply_updates goes from the first leaf to the last: this way each finds in cache what the other left there
            for t, x, factor in reversed(tuple(zip(before, g, ctx.factors, strict=True))):
                if x is not None:
                    _accumulate_and_scale(t, x, mu, factor)
            return g, TraceState(ctx.echoed(before), state.count)

        def plain(t: Tensor, x: Tensor) -> Tensor:
            return (t.mul_(mu) if ctx.inplace else t.mul(mu)).add_(x)

        def dampened(t: Tensor, x: Tensor, count: Tensor) -> Tensor:
            out = torch.where(count == 0, t + x, t.mul(mu).add_(x, alpha=alpha))
            return t.copy_(out) if ctx.inplace else out

        trace = keep(dampened, g, before, state.count) if self.dampening else keep(plain, g, before)
        count = counters.increment(state.count, g, ctx.inplace)
        if self.nesterov:
            out = each(lambda x, t: (x.add_ if ctx.inplace else x.add)(t, alpha=mu), g, trace)
        else:
            out = each(lambda x, t: x.copy_(t) if ctx.inplace else t.clone(), g, trace)
        return out, TraceState(ctx.echoed(trace), count)

    def __str__(self) -> str:
        words = [repr(self.momentum)]
        words += [f"dampening={self.dampening}"] if self.dampening else []
        words += ["nesterov=True"] if self.nesterov else []
        return f"add_momentum({', '.join(words)})"


BLOCK = 2**20  # elements; two float32 blocks fit a third-level cache, and smaller ones cost calls
_ONE = {dtype: torch.ones((), dtype=dtype) for dtype in (torch.float32, torch.float64)}


def _accumulate_and_scale(t: Tensor, x: Tensor, mu: float, factor: Any) -> None:
    """``t <- mu t + x; x <- factor t``, block after block while they are in cache: the bits of ``mul_``, ``add_``, ``mul_``.

    ``x + mu t / 1`` is one pass, in which the division keeps product and sum apart, each rounded by itself. What writes
    into ``out`` is not differentiated and takes other shapes for granted; those are left to the three.
    """
    if t.dtype != x.dtype or t.shape != x.shape or (torch.is_grad_enabled() and _requires_grad(t, factor)):
        x.copy_(t.mul_(mu).add_(x)).mul_(factor)
        return
    one = _ONE.get(t.dtype) if t.device.type == "cpu" else None
    parts = [(t, x)]
    if t.numel() > BLOCK and t.is_contiguous() and x.is_contiguous():
        parts = zip(t.view(-1).split(BLOCK), x.view(-1).split(BLOCK))
    for part, into in parts:
        if one is None:
            part.mul_(mu).add_(into)
        else:
            torch.addcdiv(into, part, one, value=mu, out=part)
        torch.mul(part, factor, out=into)


def _requires_grad(*values: Any) -> bool:
    return any(torch.is_tensor(x) and x.requires_grad for x in values)


@checked_types
def add_momentum(
    momentum: float = 0.9, dampening: float = 0.0, nesterov: bool = False, *, moment_requires_grad: bool = False
) -> Chain:
    """Accumulate gradients into a velocity, as ``torch.optim.SGD`` does.

    Args:
        momentum: decay ``mu`` of the velocity; 0 makes this the identity. Below 1 where noise is injected.
        dampening: the gradient enters with weight ``1 - dampening``, the first one with weight 1.
        nesterov: return ``g + mu v`` instead of ``v``; needs a momentum and no dampening.
        moment_requires_grad: create the velocity with ``requires_grad=True``, for meta-learning.

    Returns:
        A link whose state is one tensor like each parameter.

    Raises:
        ValueError: negative momentum; Nesterov without momentum or with dampening.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.add_momentum(0.5)
        >>> state = tx.init([torch.zeros(1)])
        >>> for _ in range(2):
        ...     updates, state = tx.update([torch.ones(1)], state, inplace=False)
        >>> updates
        [tensor([1.5000])]
    """
    if not momentum >= 0.0:
        raise ValueError(f"Invalid momentum value: {momentum}; it must not be negative")
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    if momentum == 0.0:
        return Chain(())
    return Chain((Momentum(momentum, dampening, nesterov, moment_requires_grad),))


@recognises("_trace.<locals>.update_fn")
def _torchopts_trace(link, cells):
    return add_momentum(cells["momentum"], cells["dampening"], cells["nesterov"]).rules
