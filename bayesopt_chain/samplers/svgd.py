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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain import checks
from bayesopt_chain.core.chain import Chain, Rule, chain
from bayesopt_chain.core.response import Refused
from bayesopt_chain.links import own_noise
from bayesopt_chain.links.langevin_noise import Temperature
from bayesopt_chain.links.learning_rate import ScalarOrSchedule, scale_by_neg_lr


class SteinState(NamedTuple):
    """Updates seen, 0-d int64."""

    count: Tensor


@dataclass(frozen=True)
class Stein(Rule):
    """The rule behind :func:`scale_by_stein_kernel`."""

    temperature: Any
    bandwidth: float | str
    response = Refused("its particles share gradients, so no noise for each alone is matched; leave the noise link out")

    def init(self, params):
        sizes = {p.shape[0] if p.ndim else 0 for p in params if p is not None}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "scale_by_stein_kernel: params must be particles stacked on axis 0, the same number in every leaf, got shapes "
                f"{[tuple(p.shape) for p in params if p is not None]}; use bc.stack([...])"
            )
        device = next(p.device for p in params if p is not None)
        return SteinState(torch.zeros((), dtype=torch.int64, device=device))

    def update(self, g, state, params, ctx):
        if params is None:
            raise ValueError("scale_by_stein_kernel: update needs the particles; pass params=params")
        live = [i for i, x in enumerate(g) if x is not None]
        if not live:
            return g, SteinState(own_noise.tick(state.count, ctx.inplace))
        n = g[live[0]].shape[0]
        x = torch.cat([params[i].reshape(n, -1) for i in live], dim=1)
        square = (x.unsqueeze(0) - x.unsqueeze(1)).square().sum(-1)
        h2 = self.squared_bandwidth(square)
        kernel = torch.exp(-square / (2.0 * h2))
        force = torch.cat([g[i].reshape(n, -1) for i in live], dim=1)
        smooth = kernel @ force
        if not own_noise.is_zero(self.temperature):
            temperature = own_noise.now(self.temperature, state.count)
            if torch.is_tensor(temperature):
                temperature = temperature.to(x.dtype)
            apart = kernel @ x - kernel.sum(1, keepdim=True) * x
            smooth = smooth + temperature * apart / h2
        parts = (smooth / n).split([g[i][0].numel() for i in live], dim=1)
        out: list = [None] * len(g)
        for i, part in zip(live, parts):
            out[i] = part.reshape(g[i].shape)
        return own_noise.emit(g, out, ctx.inplace), SteinState(own_noise.tick(state.count, ctx.inplace))

    def squared_bandwidth(self, square: Tensor) -> Tensor | float:
        if self.bandwidth != "median":
            return float(self.bandwidth) ** 2
        n = square.shape[0]
        if n == 1:
            return 1.0
        off = ~torch.eye(n, dtype=torch.bool, device=square.device)
        middle = square.detach().masked_fill(~off, math.inf).flatten().sort().values[(n * (n - 1) - 1) // 2]
        return torch.where(middle > 0, middle, torch.ones_like(middle)) / (2.0 * math.log(n + 1.0))

    def __str__(self) -> str:
        return f"scale_by_stein_kernel({checks.show(self.temperature)}, bandwidth={self.bandwidth!r})"


def scale_by_stein_kernel(temperature: Temperature, *, bandwidth: float | str = "median") -> Chain:
    """Replace the gradients of stacked particles by the Stein variational force; put any optimizer behind it.

    Args:
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; 0 leaves the particles without repulsion.
        bandwidth: ``h``, positive, or ``"median"``.

    Returns:
        A link for parameters stacked on axis 0.

    Raises:
        ValueError: an argument out of range; at ``init``, leaves that do not stack the same number of particles.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx = bc.chain(bc.samplers.scale_by_stein_kernel(1.0), bc.adam(1e-2))
        >>> particles = torch.randn(5, 2)
        >>> updates, state = tx.update(particles.clone(), tx.init(particles), params=particles, inplace=False)
        >>> updates.shape
        torch.Size([5, 2])
    """
    checks.temperature(temperature)
    if bandwidth != "median":
        checks.positive("scale_by_stein_kernel: bandwidth", bandwidth)
    return Chain((Stein(temperature, bandwidth),))


def svgd(lr: ScalarOrSchedule, *, temperature: Temperature, bandwidth: float | str = "median") -> Chain:
    """Stein variational gradient descent (Liu and Wang, 2016). At ``temperature=0`` it is gradient descent smoothed by
    the kernel.

    Args:
        lr: learning rate: number, 0-d tensor or schedule.
        temperature: ``1 / N`` for a loss that is a mean over ``N`` data; 0 leaves the particles without repulsion.
        bandwidth: ``h``, positive, or ``"median"``.

    Returns:
        A chain for parameters stacked on axis 0.

    Raises:
        ValueError: an argument out of range; at ``init``, leaves that do not stack the same number of particles.

    Example:
        >>> import torch, bayesopt_chain as bc
        >>> tx, particles = bc.samplers.svgd(0.1, temperature=1.0), torch.randn(5, 2)
        >>> step = bc.make_particle_step(lambda p, batch: (p**2).sum() / 2, tx)
        >>> particles, state, info = step(particles, tx.init(particles), ())
    """
    return chain(scale_by_stein_kernel(temperature, bandwidth=bandwidth), scale_by_neg_lr(lr))
