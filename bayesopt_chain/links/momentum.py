r"""Links that remember gradients ``g``: momentum accumulates them into a velocity ``v``, as in ``torch.optim.SGD``.

    v <- mu v + (1 - dampening) g,        response  (1 - dampening) / (1 - mu/z)

The update is ``v``, or ``g + mu v`` for Nesterov's momentum.

If matched noise enters directly in front of the momentum, at a constant learning rate and temperature, the velocity also keeps
the half of that noise that acts in the next step (:mod:`bayesopt_chain.matching.noise_inputs`). Then ``mu v`` is the velocity
of a Langevin sampler, with variance ``temperature (1 + mu) / (2 lr)`` if the dampening is 0.

As in PyTorch the first gradient is not dampened. The state counts gradients for each leaf, so that it knows which is the first.

A delay by one step is the update ``d_t = g_{t-1}``, of response ``1/z``. An integrator that moves the parameters by the
velocity of the step before contains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.checks import FROM_ZERO, link_takes
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import new_counts, zeros
from bayesopt_chain.engine.parts import Accumulates, Part
from bayesopt_chain.matching.response import Linear, Response


class TraceState(NamedTuple):
    """The state of momentum.

    Attributes:
        trace: the velocity of each leaf.
        count: how many gradients each leaf has had, 0-d int64; empty without dampening.
    """

    trace: tuple[Tensor, ...]
    count: tuple[Tensor, ...] = ()  # pyright: ignore[reportIncompatibleMethodOverride]


@dataclass(frozen=True)
class Momentum(Link):
    """The link that :func:`add_momentum` returns, with the same arguments."""

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    moment_requires_grad: bool = False
    traits = Traits(on_shards="elementwise", velocity="trace", carries=True)

    @property
    def response(self) -> Response:
        mu = float(self.momentum)
        return Linear((1.0 + mu, -mu) if self.nesterov else (1.0 - self.dampening,), (1.0, -mu))

    @property
    def part(self) -> Part | None:
        return None if self.dampening or self.moment_requires_grad else Accumulates(self.momentum, self.nesterov)

    def init(self, leaves: Leaves, context: LinkContext) -> TraceState:
        count = new_counts(leaves) if self.dampening else ()
        return TraceState(zeros(leaves, requires_grad=self.moment_requires_grad), count)

    def update(self, g: Leaves, state: TraceState, op: TensorOps, context: LinkContext) -> tuple[Leaves, TraceState]:
        mu, v, count = self.momentum, list(state.trace), state.count
        if self.dampening:
            # Counters are not read, because that would wait for the device; the first gradient is chosen by ``torch.where``.
            new = [
                torch.where(c == 0, t + x, t.mul(mu).add(x, alpha=1.0 - self.dampening)) for t, x, c in zip(v, g, count)
            ]
            v, count = op.put(v, new), op.count(count)
        else:
            v = op.average(v, mu, g)
        return op.add(g, v, alpha=mu) if self.nesterov else op.copy(g, v), TraceState(tuple(v), count)

    def __str__(self) -> str:
        words = [repr(self.momentum)]
        words += [f"dampening={self.dampening}"] if self.dampening else []
        words += ["nesterov=True"] if self.nesterov else []
        return f"add_momentum({', '.join(words)})"


@link_takes(momentum=FROM_ZERO)
def add_momentum(
    momentum: float = 0.9, dampening: float = 0.0, nesterov: bool = False, *, moment_requires_grad: bool = False
) -> Chain:
    """Accumulate gradients into a velocity, as ``torch.optim.SGD`` does.

    Args:
        momentum: the factor ``mu`` by which a step multiplies the velocity; 0 makes this link the identity. In a chain with
            noise it must be below 1.
        dampening: the gradient is added with the weight ``1 - dampening``, the first one with the weight 1.
        nesterov: whether the update is ``g + mu v`` instead of ``v``; this needs a momentum and no dampening.
        moment_requires_grad: create the velocity with ``requires_grad=True``, for meta-learning.

    Returns:
        A link whose state has one tensor of the shape of each parameter.

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
    if nesterov and (momentum <= 0.0 or dampening != 0.0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    if momentum == 0.0:
        return Chain(())
    return Chain((Momentum(momentum, dampening, nesterov, moment_requires_grad),))


class DelayState(NamedTuple):
    """The state of a delay.

    Attributes:
        held: what came in at the step before, of the shape of each parameter.
    """

    held: tuple[Tensor, ...]


@dataclass(frozen=True)
class Delay(Link):
    """The link that :func:`delay` returns."""

    name = "delay"
    traits = Traits(on_shards="elementwise", response=Linear((0.0, 1.0)))

    def init(self, leaves: Leaves, context: LinkContext) -> DelayState:
        return DelayState(zeros(leaves))

    def update(self, g: Leaves, state: DelayState, op: TensorOps, context: LinkContext) -> tuple[Leaves, DelayState]:
        kept = [x.clone() for x in g]  # in place the next line overwrites g
        return op.copy(g, state.held), DelayState(tuple(op.put(state.held, kept)))


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
