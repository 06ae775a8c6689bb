r"""Replica exchange (parallel tempering) with noisy losses (Deng, Feng, Gao, Liang and Lin, 2020).

Chains ``i = 1 ... n`` run SGHMC at temperatures ``T_1 < ... < T_n``, stacked on axis 0 of every parameter. Neighbours ``i, j``
exchange their positions with probability

    min(1, exp(b (L_i - L_j) - b^2 s^2 / F)),        b = 1 / T_i - 1 / T_j,

``L`` being unbiased estimates of the loss with independent normal errors of variance ``s^2`` each: the error of
``b (L_i - L_j)`` has variance ``2 b^2 s^2``, so that without the minimum the correction ``b^2 s^2`` makes the expected
exponential exactly that of the true losses. ``F > 1`` (``correction_factor``) trades that for more swaps.

Odd and even pairs take turns. A chain that moves to another temperature keeps its gradient, and its velocity scaled by
``sqrt(T_new / T_old)``. The noise is white (order 1), since matched noise uses the previous draw, which was made at the other
temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.checks import MOMENTUM, POSITIVE, factory_takes, number
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.core.state import zeros
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.matching.response import SelfContainedSampler
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.samplers._in_front import CLIPPING, require_all_parameters, require_in_front

_SWAP_STREAM = 0x2545F4914F6CDD1D


class ReplicaExchangeState(NamedTuple):
    """What the chains remember.

    Attributes:
        key, count: of the random stream, 0-d int64.
        velocity: one tensor for each parameter, chains stacked on axis 0.
        temperature: of each chain, float64 ``[n]``.
        accepted: swaps of each pair of neighbours so far, int64 ``[n - 1]``.
        proposed: proposals of each pair so far, int64 ``[n - 1]``.
    """

    key: Tensor
    step: Tensor
    velocity: tuple[Tensor, ...]
    temperature: Tensor
    accepted: Tensor
    proposed: Tensor


@dataclass(frozen=True)
class ReplicaExchange(Keyed):
    """The link behind :func:`replica_exchange`."""

    lr: float
    momentum: float
    temperatures: tuple[float, ...]
    loss_variance: float
    correction_factor: float
    swap_every: int
    name = "replica_exchange"
    traits = Traits(
        response=SelfContainedSampler(),
        extra_kwargs=frozenset({"loss"}),
        required_kwargs=frozenset({"loss"}),
        needs_params=True,
        checks_gradients=True,
        needs_all_gradients=True,
        acts_on_particles=True,
    )

    def init(self, leaves: Leaves, context: LinkContext) -> ReplicaExchangeState:
        require_all_parameters(
            self, "replica_exchange", "chains that swap a part of them would not exchange their losses"
        )
        why = "swaps are accepted by the loss alone, so that a prior would be missing there; write it into the loss"
        require_in_front(context, "replica_exchange", (CLIPPING,), why)
        n = len(self.temperatures)
        for i, p in zip(context.scope.index, leaves):
            if p.ndim == 0 or p.shape[0] != n:
                raise ValueError(
                    f"replica_exchange: params must be stacked for {n} chains on axis 0, but leaf {i} has shape "
                    f"{tuple(p.shape)}; use bc.stack([...])"
                )
        key, count = self.start(leaves, context)
        pairs = torch.zeros(n - 1, dtype=torch.int64, device=key.device)
        temperature = torch.tensor(self.temperatures, dtype=torch.float64, device=key.device)
        return ReplicaExchangeState(key, count, zeros(leaves), temperature, pairs, pairs.clone())

    def update(
        self, g: Leaves, state: ReplicaExchangeState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, ReplicaExchangeState]:
        loss = context.extra.get("loss")
        n = len(self.temperatures)
        if loss is None or tuple(loss.shape) != (n,):
            came = "nothing" if loss is None else f"shape {tuple(loss.shape)}"
            raise ValueError(
                f"replica_exchange: update needs loss=, the losses of the {n} chains as a tensor [{n}], got {came}; "
                "bc.make_step passes them"
            )
        order, accepted, proposed = self.exchange(loss, state)
        temperature = state.temperature
        heat = torch.sqrt(temperature / temperature[order])
        strength = torch.sqrt(temperature * (2.0 * (1.0 - self.momentum) / self.lr))
        moves, velocity = [], []
        for x, p, v, (xi,) in zip(g, context.params, state.velocity, self.normals(state, g, context)):
            here = order.to(x.device)
            v = v[here] * _along(heat, x) * self.momentum + x[here] + xi * _along(strength, x)
            velocity.append(v)
            moves.append(p[here] - p - self.lr * v)
        count = op.next_count(state.step)
        accepted, proposed = op.put((state.accepted, state.proposed), [accepted, proposed])
        velocity = tuple(op.put(state.velocity, velocity))
        new = ReplicaExchangeState(state.key, count, velocity, temperature, accepted, proposed)
        return op.put(g, moves), new

    def exchange(self, loss: Tensor, state: ReplicaExchangeState) -> tuple[Tensor, Tensor, Tensor]:
        """Which chain each temperature continues, ``[n]``, and the counts of accepted and proposed swaps."""
        n = len(self.temperatures)
        uniform = torch.empty(1, n - 1, dtype=torch.float64, device=loss.device)
        variables = keyed_stream.Variables(kind="uniform")
        ((u,),) = variables.draw(state.key ^ _SWAP_STREAM, state.step, [uniform])
        pair = torch.arange(n - 1, device=loss.device)
        turn = torch.div(state.step, self.swap_every, rounding_mode="floor") % 2
        proposing = (pair % 2 == turn) & (state.step % self.swap_every == 0) & (state.step > 0)
        swap = proposing & (u < torch.exp(self.log_acceptance(loss.detach().to(torch.float64), state.temperature)))
        up = torch.nn.functional.pad(swap, (0, 1)).to(torch.int64)  # swaps with the next hotter chain
        down = torch.nn.functional.pad(swap, (1, 0)).to(torch.int64)
        order = torch.arange(n, device=loss.device) + up - down
        return order, state.accepted + swap, state.proposed + proposing

    def log_acceptance(self, loss: Tensor, temperature: Tensor) -> Tensor:
        """Logarithm of the swap probabilities of neighbours before the minimum with 1, ``[n - 1]``."""
        beta = 1.0 / temperature
        b = beta[:-1] - beta[1:]
        return b * (loss[:-1] - loss[1:]) - b * b * (self.loss_variance / self.correction_factor)


def _along(values: Tensor, x: Tensor) -> Tensor:
    """One value for each chain, shaped to multiply the stacked tensor ``x``."""
    return values.to(x.dtype).to(x.device).reshape(-1, *[1] * (x.ndim - 1))


@factory_takes(lr=POSITIVE, momentum=MOMENTUM, correction_factor=number("[1, inf)"))
def replica_exchange(
    lr: float,
    momentum: float = 0.0,
    *,
    temperatures: Sequence[float],
    loss_variance: float = 0.0,
    correction_factor: float = 1.0,
    swap_every: int = 1,
    generator: torch.Generator | None = None,
) -> Chain:
    """SGLD or SGHMC at several temperatures, whose chains exchange positions (Deng et al., 2020).

    Args:
        lr: learning rate, positive.
        momentum: in [0, 1).
        temperatures: at least two, positive and increasing. Chain 0 is the coldest: its samples are the ones you want.
        loss_variance: variance ``s^2`` of each chain's loss estimate; 0 for full-batch losses.
        correction_factor: ``F >= 1``; 1 is unbiased.
        swap_every: updates between proposals.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain for parameters stacked on axis 0. Its ``update`` takes ``loss=``, ``[n]``; the state counts swaps.

    Raises:
        ValueError: fewer than two temperatures, temperatures that do not increase, an argument out of range; at ``init``,
            parameters that are not stacked, a mask or a group, weight decay or a prior in front, which the swaps would not
            count; at ``update``, missing losses or a missing gradient.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.samplers.replica_exchange(0.01, temperatures=(0.1, 1.0))
        >>> step = bc.make_step(lambda p, batch: (p**2).sum(), tx)
        >>> params = torch.zeros(2, 3)
        >>> params, state, info = step(params, tx.init(params), ())
        >>> params.shape, info.loss.shape
        (torch.Size([2, 3]), torch.Size([2]))
    """
    temperatures = tuple(float(t) for t in temperatures)
    if len(temperatures) < 2:
        raise ValueError(
            f"replica_exchange: temperatures must hold at least two chains, got {len(temperatures)}; "
            "one chain has nobody to exchange with, use bc.sgld or bc.sghmc"
        )
    if sorted(set(temperatures)) != list(temperatures):
        raise ValueError(f"replica_exchange: temperatures must increase, got {temperatures}; put the coldest first")
    link = ReplicaExchange(
        lr, momentum, temperatures, loss_variance, correction_factor, swap_every, generator=generator
    )
    return Chain((link,))
