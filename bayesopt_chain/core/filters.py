r"""The two ways a stream of normals becomes matched noise: a fixed filter, and scheduled momentum.

Both turn the fresh draws ``xi`` of one leaf and what they remember of earlier ones into the noise ``e`` of this step:

* :class:`Filtered`: ``e = sqrt(T) c(1/z) / d(1/z) xi`` in transposed direct form, one draw, ``max(len(c), len(d)) - 1``
  remembered tensors.
* :class:`Scheduled`: ``f = direct + momentum_gain / (1 - mu/z)``, SGD and heavy ball in parallel, each with noise by
  the rule of :func:`bayesopt_chain.core.law.scheduled_momentum_noise`. Branch noises ``e1`` and ``e2`` meet at
  the link's one input as

      (r0 + r1) e_t = r0 e1_t + r1 (e2_t + k delta_{t-1}),      delta_t = k delta_{t-1} + e2_t - e_t,

  ``delta`` being what the second branch's velocity still lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.core.law import scheduled_momentum_noise


class Conditions(NamedTuple):
    """Temperature and gains of one step: ``inverse = G_b / G_a`` and ``square = G_b^2`` (see ``core.matching``)."""

    temperature: float | Tensor
    inverse: float | Tensor = 1.0
    square: float | Tensor = 1.0


def root_of(t: Tensor) -> Tensor:
    """Square root, whose derivative at 0 counts as 0."""
    return torch.where(t == 0, 0.0 * t, torch.where(t == 0, t + 1.0, t).sqrt())


@dataclass(frozen=True)
class Filtered:
    """Noise of a constant response."""

    c: tuple[float, ...]
    d: tuple[float, ...]
    draws = 1

    @property
    def memory(self) -> int:
        return max(len(self.c), len(self.d)) - 1

    def coefficients(self, now: Conditions, before: Conditions | None):
        t = now.temperature
        root = math.sqrt(t) if isinstance(t, (int, float)) else root_of(t)
        return [root * v for v in self.c], None

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory; the ``fresh`` draw may be overwritten."""
        (xi,) = fresh
        if not memory:
            return xi.mul_(c[0]) if isinstance(c[0], float) else xi * c[0], []
        constant = isinstance(c[0], float) and all(v == c[0] for v in c)  # then the draw itself is not needed again
        first = xi.mul_(c[0]) if constant else xi * c[0]
        y = first + memory[0]
        new = []
        for k in range(1, len(memory) + 1):
            if k < len(c):
                w = first if c[k] is c[0] or (isinstance(c[k], float) and c[k] == c[0]) else xi * c[k]
            else:
                w = torch.zeros_like(xi)
            if k < len(self.d):
                w = w - self.d[k] * y
            if k < len(memory):
                w = w + memory[k]
            new.append(w)
        return y, new


@dataclass(frozen=True)
class Scheduled:
    """Noise of SGD, momentum or Nesterov under a changing learning rate or temperature."""

    direct: float
    momentum_gain: float
    momentum: float
    decay_level: float  # what decoupled weight decay adds to 1 / lr
    head: float
    order: int

    @property
    def both(self) -> bool:
        return self.order == 2 and self.direct > 0.0 and self.momentum_gain > 0.0

    @property
    def draws(self) -> int:
        return 2 if self.both else 1

    @property
    def memory(self) -> int:
        return 0 if self.order == 1 else 3 if self.both else 1

    def coefficients(self, now: Conditions, before: Conditions):
        mu = self.momentum

        def rule(gain: float, momentum: float):
            levels = (c.inverse / gain + self.decay_level * c.square for c in (now, before))
            return scheduled_momentum_noise(
                momentum,
                *levels,
                now.temperature,  # pyright: ignore[reportCallIssue]
                before.temperature,  # pyright: ignore[reportCallIssue]
                order=self.order,
                where=torch.where,  # pyright: ignore[reportCallIssue]
            )

        if self.order == 1:
            out = (rule((1.0 - mu) * self.direct + self.momentum_gain, mu),)
        elif self.both:
            out = (rule(self.direct, 0.0), rule(self.momentum_gain, mu))
        else:
            out = (rule(self.direct + self.momentum_gain, mu),)
        return out, (out[-1].velocity_scale if mu else None)

    def step(self, xi: list[Tensor], memory: list[Tensor], coefficients) -> tuple[Tensor, list[Tensor]]:
        if self.order == 1:
            return xi[0] * (self.head * coefficients[0].current), []
        e = [x * c.current + m * c.previous for x, m, c in zip(xi, memory, coefficients)]
        if not self.both:
            return self.head * e[0], list(xi)
        r0, r1 = self.direct, self.momentum_gain
        kept = self.momentum * coefficients[1].velocity_scale * memory[2]
        total = (r0 * e[0] + r1 * (e[1] + kept)) / (r0 + r1)
        return self.head * total, [*xi, kept + e[1] - total]


Process = Filtered | Scheduled
