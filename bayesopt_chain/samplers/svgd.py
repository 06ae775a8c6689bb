r"""Stein variational gradient descent (Liu and Wang, 2016), as a link over particles stacked on axis 0.

With ``n`` particles ``x_i``, their gradients ``g_j`` and the kernel ``k_ij = exp(-|x_i - x_j|^2 / (2 h^2))``,

    u_i = (1 / n) sum_j k_ij (g_j + T (x_j - x_i) / h^2),        theta <- theta - lr u:

the first term is gradient descent smoothed by the kernel, the second pushes particles apart. The particles settle to represent
``exp(-loss / T)``; at T = 0 they descend. One particle is plain gradient descent at any T. The bandwidth is given, or by the
median rule ``h^2 = median_{i != j} |x_i - x_j|^2 / (2 log(n + 1))``. Deterministic: no noise, no key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.compose import chain
from bayesopt_chain.core.chain import Chain
from bayesopt_chain.core.link import Link, LinkContext, Traits
from bayesopt_chain.core.op import Leaves, TensorOps
from bayesopt_chain.links.learning_rate import scale_by_neg_lr
from bayesopt_chain.matching.response import Refused
from bayesopt_chain.samplers._in_front import CLIPPING, PRIORS, require_in_front
from bayesopt_chain.schedules import ScalarOrSchedule, is_zero, now


class SteinState(NamedTuple):
    """Updates seen, 0-d int64."""

    step: Tensor


@dataclass(frozen=True)
class Stein(Link):
    """The link behind :func:`scale_by_stein_kernel`."""

    temperature: ScalarOrSchedule
    bandwidth: float | str
    name = "scale_by_stein_kernel"
    traits = Traits(
        response=Refused(
            "its particles share gradients, so no noise for each alone is matched; leave the noise link out"
        ),
        needs_params=True,
        checks_gradients=True,
        acts_on_particles=True,
    )

    def init(self, leaves: Leaves, context: LinkContext) -> SteinState:
        if not is_zero(self.temperature):
            why = (
                "the gradients would be of another size than the repulsion: another temperature; write it behind. Only "
                "clipping, weight decay and priors may stand in front"
            )
            require_in_front(context, "scale_by_stein_kernel", (PRIORS, CLIPPING), why)
        sizes = {p.shape[0] if p.ndim else 0 for p in leaves}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "scale_by_stein_kernel: params must be particles stacked on axis 0, the same number in every leaf, got shapes "
                f"{[tuple(p.shape) for p in leaves]}; use bc.stack([...])"
            )
        return SteinState(torch.zeros((), dtype=torch.int64, device=leaves[0].device))

    def update(self, g: Leaves, state: SteinState, op: TensorOps, context: LinkContext) -> tuple[Leaves, SteinState]:
        n = g[0].shape[0]
        x = torch.cat([p.reshape(n, -1) for p in context.params], dim=1)
        square = (x.unsqueeze(0) - x.unsqueeze(1)).square().sum(-1)
        h2 = self.squared_bandwidth(square)
        kernel = torch.exp(-square / (2.0 * h2))
        smooth = kernel @ torch.cat([y.reshape(n, -1) for y in g], dim=1)
        if not is_zero(self.temperature):
            temperature = checks.at_this_step("temperature", now(self.temperature, state.step))
            if isinstance(temperature, Tensor):
                temperature = temperature.to(x.dtype)
            smooth = smooth + temperature * (kernel @ x - kernel.sum(1, keepdim=True) * x) / h2
        parts = (smooth / n).split([y[0].numel() for y in g], dim=1)
        moves = [part.reshape(y.shape) for part, y in zip(parts, g)]
        return op.put(g, moves), SteinState(op.next_count(state.step))

    def squared_bandwidth(self, square: Tensor) -> Tensor | float:
        if self.bandwidth != "median":
            return float(self.bandwidth) ** 2
        n = square.shape[0]
        if n == 1:
            return 1.0
        off = ~torch.eye(n, dtype=torch.bool, device=square.device)
        middle = square.detach().masked_fill(~off, math.inf).flatten().sort().values[(n * (n - 1) - 1) // 2]
        return torch.where(middle > 0, middle, torch.ones_like(middle)) / (2.0 * math.log(n + 1.0))


@checks.factory_takes()
def scale_by_stein_kernel(temperature: ScalarOrSchedule, *, bandwidth: float | str = "median") -> Chain:
    """Replace the gradients of stacked particles by the Stein variational force; put any optimizer behind it.

    Args:
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; 0 leaves the particles without repulsion. At every
            update the particles flow towards the target at its temperature.
        bandwidth: ``h``, positive, or ``"median"``.

    Returns:
        A link for parameters stacked on axis 0.

    Raises:
        ValueError: an argument out of range; at ``init``, leaves that do not stack the same number of particles, or, at a
            temperature, a gain or preconditioner in front.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.samplers.scale_by_stein_kernel(1.0), bc.adam(1e-2))
        >>> particles = torch.randn(5, 2)
        >>> updates, state = tx.update(particles.clone(), tx.init(particles), params=particles, inplace=False)
        >>> updates.shape
        torch.Size([5, 2])
    """
    if not (isinstance(bandwidth, str) and bandwidth == "median"):
        checks.POSITIVE("scale_by_stein_kernel: bandwidth", bandwidth)
    return Chain((Stein(temperature, bandwidth),))


@checks.factory_takes()
def svgd(lr: ScalarOrSchedule, *, temperature: ScalarOrSchedule, bandwidth: float | str = "median") -> Chain:
    """Stein variational gradient descent (Liu and Wang, 2016). At ``temperature=0`` it is gradient descent smoothed by
    the kernel.

    Args:
        lr: learning rate: number, 0-d tensor or schedule.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; 0 leaves the particles without repulsion. At every
            update the particles flow towards the target at its temperature.
        bandwidth: ``h``, positive, or ``"median"``.

    Returns:
        A chain for parameters stacked on axis 0.

    Raises:
        ValueError: an argument out of range; at ``init``, leaves that do not stack the same number of particles, or, at a
            temperature, a gain or preconditioner in front.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, particles = bc.samplers.svgd(0.1, temperature=1.0), torch.randn(5, 2)
        >>> step = bc.make_step(lambda p, batch: (p**2).sum() / 2, tx)
        >>> particles, state, info = step(particles, tx.init(particles), ())
    """
    return chain(scale_by_stein_kernel(temperature, bandwidth=bandwidth), scale_by_neg_lr(lr))
