"""What an optimizer class samples on a quadratic loss, by exact probing.

One step is a linear map of the parameters, velocities and remembered draws and of the fresh normals: ``x' = A x + B xi``.
Unit impulses in each, with the normals intercepted, read off ``A`` and ``B``. The classes work element by element, so that one
leaf holds a copy of the parameters for each impulse, and one step answers all of them.
"""

from __future__ import annotations

import io
from contextlib import nullcontext

import torch

from bayesopt_chain.testing import NormalProbe

SLOTS = ("momentum_buffer", "exp_avg", "noise", "noise_direct")
DRAWS = 2  # at most, of each element in a step


class Probed:
    """A one-leaf optimizer on ``theta^T K theta / 2`` as a linear system."""

    def __init__(self, make, curvature: torch.Tensor, warmup: int = 3) -> None:
        self.curvature = curvature
        copies = 2 + len(curvature) * (1 + len(SLOTS) + DRAWS)  # the system as it is, one at rest, and one an impulse
        self.whole = torch.full((copies, len(curvature)), 0.3, dtype=torch.float64, requires_grad=True)
        self.theta = self.whole.data[0]
        self.optimizer = make([self.whole])
        self.state = self.optimizer.state[self.whole]
        for _ in range(warmup):  # states come into being; adaptive rules are frozen here
            self.step()
        self.settle()
        self.slots = [self.whole.data, *(self.state[name] for name in SLOTS if name in self.state)]

    def step(self, normals: torch.Tensor | None = None) -> int:
        """One step with these normals (zeros by default); returns how many it draws."""
        self.whole.grad = self.whole.detach() @ self.curvature
        with NormalProbe(normals) as probe:
            self.optimizer.step()
        return probe.drawn

    def settle(self) -> None:
        """Forget the surplus of earlier falls, which runs out as 1 / n, so that the step is that of constant rates."""
        self.state.update({name: 0.0 for name in ("noise_surplus", "noise_direct_surplus") if name in self.state})

    def maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` and ``B`` of the next step, which is made."""
        copies, d = self.whole.shape
        n = d * len(self.slots)
        inputs, normals = (
            torch.zeros(copies, n, dtype=torch.float64),
            torch.zeros(DRAWS, copies, d, dtype=torch.float64),
        )
        inputs[0] = torch.cat([slot[0] for slot in self.slots])
        inputs[2 : 2 + n] = torch.eye(n)
        normals[:, 2 + n : 2 + n + DRAWS * d] = (
            torch.eye(DRAWS * d, dtype=torch.float64).view(-1, DRAWS, d).transpose(0, 1)
        )
        for slot, piece in zip(self.slots, inputs.split(d, dim=1)):
            slot.copy_(piece)
        self.step(normals.flatten())
        after = torch.cat(self.slots, dim=1)
        assert not after[1].any()
        for slot in self.slots:
            slot.copy_(slot[0].clone().expand_as(slot))
        return after[2 : 2 + n].T, after[2 + n : 2 + n + DRAWS * d].T

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
        d = len(self.theta)
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
