r"""The ways a stream of normals becomes matched noise: a fixed filter, and rules for rates that change.

All turn the fresh draws ``xi`` of one leaf and what they remember of earlier ones into the noise ``e`` of this step:

* :class:`Filtered`: ``e = sqrt(T) c(1/z) / d(1/z) xi`` in transposed direct form, one draw, ``max(len(c), len(d)) - 1``
  remembered tensors.
* :class:`Scheduled`: ``f = direct + momentum_gain / (1 - mu/z)``, SGD and heavy ball in parallel, each with noise by
  the rule of :func:`bayesopt_chain.core.law.scheduled_momentum_noise`. Branch noises ``e1`` and ``e2`` meet at
  the link's one input as

      (r0 + r1) e_t = r0 e1_t + r1 (e2_t + k delta_{t-1}),      delta_t = k delta_{t-1} + e2_t - e_t,

  ``delta`` being what the second branch's velocity still lacks.
* :class:`Rescaled`: any constant response ``f`` behind the gain ``lr_t``, ``e_t = sqrt(T_t / lr_t) c(1/z) / d(1/z) xi``, if the
  memory ``x`` of its links is multiplied by ``sqrt(lr_{t-1} / lr_t)`` before a step. Where no force acts ``sqrt(lr_t) x_t``
  then does not notice the schedule, so that the memory has the variance that belongs to ``lr_t`` at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.core import law


class Conditions(NamedTuple):
    """Temperature and gains of one step: ``inverse = G_b / G_a`` and ``square = G_b^2`` (see ``core.matching``)."""

    temperature: Any  # numbers, or float64 tensors with an entry for each leaf
    inverse: Any = 1.0
    square: Any = 1.0


@dataclass(frozen=True)
class Filtered:
    """Noise of a constant response."""

    c: tuple[float, ...]
    d: tuple[float, ...]
    draws = 1

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return max(len(self.c), len(self.d)) - 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Tensor | None]:
        """The factors of the draws at these temperatures; a velocity is never rescaled."""
        t = now.temperature
        root = law.root(t, torch.where) if isinstance(t, Tensor) else math.sqrt(t)
        return [root * v for v in self.c], None

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory; the ``fresh`` draw may be overwritten."""
        (xi,) = fresh
        alike = isinstance(c[0], float) and all(v == c[0] for v in c)  # then the draw itself is not needed again
        first = xi.mul_(c[0]) if alike else xi * c[0]
        y = first + memory[0] if memory else first
        new: list[Tensor] = []
        for k in range(1, len(memory) + 1):
            w = torch.zeros_like(xi) if k >= len(c) else first if alike else xi * c[k]
            w = w - self.d[k] * y if k < len(self.d) else w
            new.append(w + memory[k] if k < len(memory) else w)
        return y, new


@dataclass(frozen=True)
class Rescaled(Filtered):
    """Noise of a constant response next to gains that change, of links whose memory is rescaled with the gains."""

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Tensor | None]:
        """The level of the unit noise, and what the links' memory is multiplied by before the step."""
        began = before.inverse > 0
        ratio = torch.where(began, now.inverse / torch.where(began, before.inverse, 1.0), 1.0)
        return law.root(now.temperature * now.inverse, torch.where), law.root(ratio, torch.where)

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        unit, new = super().step(fresh, memory, list(self.c))
        return unit * c, new


@dataclass(frozen=True)
class Scheduled:
    """Noise of SGD, momentum or Nesterov under a changing learning rate or temperature."""

    direct: float
    momentum_gain: float
    momentum: float
    decay_level: float  # what decoupled weight decay adds to 1 / lr
    head: float
    order: int

    @classmethod
    def of(cls, b: Sequence[float], a: Sequence[float], head: float, order: int) -> Scheduled | None:
        """The noise of ``b / a`` if that is SGD, heavy ball, or both in parallel with gains that are not negative."""
        b, a = law.trim(b), law.trim(a)
        if len(a) == 1 and len(b) == 1:
            return cls(b[0] / a[0], 0.0, 0.0, 0.0, head, order)
        if len(a) != 2 or len(b) > 2:
            return None
        mu = -a[1] / a[0]
        b = [*(v / a[0] for v in b), 0.0]
        direct = -b[1] / mu
        gain = b[0] - direct
        return cls(direct, gain, mu, 0.0, head, order) if mu > 0 and direct >= 0 and gain >= 0 else None

    @property
    def both(self) -> bool:
        """Whether two branches draw, each for itself."""
        return self.order == 2 and self.direct > 0.0 and self.momentum_gain > 0.0

    @property
    def draws(self) -> int:
        """Fresh draws in a step."""
        return 2 if self.both else 1

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return 0 if self.order == 1 else 3 if self.both else 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Tensor | None]:
        """Those of each branch, and what the velocity is multiplied by before the step."""
        mu, total = self.momentum, self.direct + self.momentum_gain
        branches = ((self.direct, 0.0), (self.momentum_gain, mu)) if self.both else ((total, mu),)
        if self.order == 1:
            branches = (((1.0 - mu) * self.direct + self.momentum_gain, mu),)
        out = tuple([self._rule(gain, momentum, now, before) for gain, momentum in branches])
        return out, (out[-1].velocity_scale if mu else None)

    def _rule(self, gain: float, momentum: float, now: Conditions, before: Conditions) -> law.ScheduleCoefficients:
        level, last = (c.inverse / gain + self.decay_level * c.square for c in (now, before))
        heat, last_heat = now.temperature, before.temperature
        return law.scheduled_momentum_noise(momentum, level, last, heat, last_heat, order=self.order, where=torch.where)

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory."""
        if self.order == 1:
            return fresh[0] * (self.head * c[0].current), []
        e = [x * k.current + m * k.previous for x, m, k in zip(fresh, memory, c)]
        if not self.both:
            return self.head * e[0], list(fresh)
        r0, r1 = self.direct, self.momentum_gain
        kept = self.momentum * c[1].velocity_scale * memory[2]
        total = (r0 * e[0] + r1 * (e[1] + kept)) / (r0 + r1)
        return self.head * total, [*fresh, kept + e[1] - total]


Process = Filtered | Scheduled
