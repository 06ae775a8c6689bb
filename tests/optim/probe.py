"""What an optimizer class samples on a quadratic loss, by exact probing.

One step is a linear map of the parameters, velocities and remembered draws and of the fresh normals: ``x' = A x + B xi``.
Unit impulses in each, with the normals intercepted, read off ``A`` and ``B``.
"""

from __future__ import annotations

import io
from contextlib import nullcontext

import torch

from bayesopt_chain.testing import NormalProbe


class Probed:
    """A one-leaf optimizer on ``theta^T K theta / 2`` as a linear system."""

    def __init__(self, make, curvature: torch.Tensor, warmup: int = 3, slots=None) -> None:
        self.curvature = curvature
        self.theta = torch.full((len(curvature),), 0.3, dtype=torch.float64, requires_grad=True)
        self.optimizer = make([self.theta])
        for _ in range(warmup):  # states come into being; adaptive rules are frozen here
            self.step()
        self.settle()
        names = ("momentum_buffer", "exp_avg", "noise", "noise_direct")
        state = self.optimizer.state[self.theta]
        self.slots = [self.theta.data, *(state[name] for name in names if name in state)]

    def step(self, normals: torch.Tensor | None = None) -> int:
        """One step with these normals (zeros by default); returns how many it draws."""
        self.theta.grad = self.curvature @ self.theta.detach()
        with NormalProbe(normals) as probe:
            self.optimizer.step()
        return probe.drawn

    def settle(self) -> None:
        """Forget the surplus of earlier falls, which runs out as 1 / n, so that the step is that of constant rates."""
        state = self.optimizer.state[self.theta]
        state.update({name: 0.0 for name in ("noise_surplus", "noise_direct_surplus") if name in state})

    def maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` and ``B`` of the next step; the optimizer's hyperparameters and memory of them go on by one step."""
        here = torch.cat([x.flatten() for x in self.slots]).clone()
        before = {k: v for k, v in self.optimizer.state[self.theta].items() if not torch.is_tensor(v) or v.ndim == 0}
        before = {k: v.clone() if torch.is_tensor(v) else v for k, v in before.items()}
        group = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        n = len(here)

        def image(x: torch.Tensor, normals: torch.Tensor | None) -> tuple[torch.Tensor, int]:
            self.optimizer.param_groups[0].update(group)
            state = self.optimizer.state[self.theta]
            state.update({k: v.clone() if torch.is_tensor(v) else v for k, v in before.items()})
            for slot, piece in zip(self.slots, x.split([s.numel() for s in self.slots])):
                slot.copy_(piece.view(slot.shape))
            drawn = self.step(normals)
            return torch.cat([s.flatten() for s in self.slots]).clone(), drawn

        zero = torch.zeros(n, dtype=torch.float64)
        origin, drawn = image(zero, None)
        assert torch.equal(origin, zero)
        a = torch.stack([image(e, None)[0] for e in torch.eye(n, dtype=torch.float64)], dim=1)
        b = torch.zeros(n, drawn, dtype=torch.float64)
        for k, e in enumerate(torch.eye(drawn, dtype=torch.float64)):
            b[:, k] = image(zero, e)[0]
        image(here, None)
        return a, b

    def stationary(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``A``, ``B`` and the stationary covariance of all slots: ``X = A X A^T + B B^T`` by doubling."""
        a, b = self.maps()
        assert torch.linalg.eigvals(a).abs().max() < 1.0
        x, power = b @ b.mT, a
        for _ in range(60):
            x, power = x + power @ x @ power.mT, power @ power
        return a, b, x

    def covariance(self) -> torch.Tensor:
        """The stationary covariance of the parameters."""
        d = self.theta.numel()
        return self.stationary()[2][:d, :d]


# Steps of an optimizer at gradients that are functions of each parameter


def walk(optimizer, steps=1, gradient=lambda p: 0.5 * p):
    """All parameters behind some steps, in one vector."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        with getattr(optimizer, "sampled", nullcontext)():
            for p in params:
                p.grad = gradient(p.detach())
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in params])


def through_a_file(state):
    """What is loaded of a state without running code from the file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
