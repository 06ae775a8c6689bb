r"""A lattice random walk: every parameter moves one lattice constant up or down, whatever its gradient.

    theta <- theta + delta b,      b = +-1,      P(b = +1) = (1 - sqrt(lr / (2 T)) g) / 2,      delta = sqrt(2 T lr),

the probability being clamped to [0, 1]. The move has SGLD's mean ``-lr g`` and variance ``2 T lr - lr^2 g^2``: it is of weak
order 1, like SGLD, and takes one random bit instead of a normal number. Its length does not depend on the gradient, so that the
chain comes back from steep places of the loss from which SGLD diverges. In one dimension detailed balance holds on the lattice,
``pi(x + delta) / pi(x) = P_up(x) / P_down(x + delta)``, so that its law is known exactly.

At T = 0 the lattice constant is 0 and nothing would move, so that no optimizer is the limit: temperature 0 is refused.

Duffield et al., "Lattice random walk discretisations of stochastic differential equations" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import LinkContext
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.keyed import Keyed
from bayesopt_chain.schedules import ScalarOrSchedule, now, root


class LatticeState(NamedTuple):
    """The key and the count of the random stream, 0-d int64; nothing is remembered for a parameter."""

    key: Tensor
    step: Tensor


@dataclass(frozen=True)
class Lattice(Keyed):
    """The link behind :func:`lattice_walk`."""

    lr: float
    temperature: ScalarOrSchedule
    name = "lattice_walk"

    def init(self, leaves: Leaves, context: LinkContext) -> LatticeState:
        return LatticeState(*self.start(leaves, context))

    def update(
        self, g: Leaves, state: LatticeState, op: TensorOps, context: LinkContext
    ) -> tuple[Leaves, LatticeState]:
        temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
        uniform = self.normals(state, g, context, 1, "uniform")
        delta = root(2.0 * temperature * self.lr)
        tilt = self.lr / delta
        moves = [
            delta * torch.where(u < 0.5 * (1.0 - tilt * x), torch.ones_like(x), -torch.ones_like(x))
            for x, (u,) in zip(g, uniform)
        ]
        moves = [
            torch.where(torch.isnan(x), x, move) for x, move in zip(g, moves)
        ]  # the comparison above would hide it
        return op.put(g, moves), LatticeState(state.key, op.next_count(state.step))


@checks.factory_takes(
    lr=checks.POSITIVE,
    temperature=checks.number(
        "(0, inf)", tensor=True, schedule=True, hint="its steps have length 0 there; use bc.sgd to optimise"
    ),
)
def lattice_walk(lr: float, *, temperature: ScalarOrSchedule, generator: torch.Generator | None = None) -> Chain:
    """Langevin sampling by steps of ``+-sqrt(2 T lr)``, up or down with odds set by the gradient (Duffield et al., 2025).

    Args:
        lr: learning rate, positive. Gradients beyond ``sqrt(2 T / lr)`` are clipped.
        temperature: positive number, 0-d tensor or schedule; ``1 / N`` for a loss that is a mean over ``N`` data. A step
            remembers nothing of the last one: a new temperature acts at once on the noise, and on the variance as fast as
            the walk forgets.
        generator: source of the random key (default: torch's global generator).

    Returns:
        A chain without memory for the parameters. Updates have no gradient with respect to the gradients.

    Raises:
        ValueError: temperature 0 (nothing would move), or an argument out of range.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, params = bc.samplers.lattice_walk(0.02, temperature=1.0), torch.zeros(3)
        >>> updates, state = tx.update(torch.ones(3), tx.init(params), params=params, inplace=False)
        >>> updates.abs()
        tensor([0.2000, 0.2000, 0.2000])
    """
    return Chain((Lattice(lr, temperature, generator=generator),))
