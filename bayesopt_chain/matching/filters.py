r"""The ways a stream of normals becomes matched noise: a fixed filter, and rules for rates that change.

All turn the fresh draws ``xi`` of one leaf and what they remember of earlier ones into the noise ``e`` of this step:

* :class:`Filtered`: ``e = c(1/z) / d(1/z) xi`` in transposed direct form, one draw, ``max(len(c), len(d)) - 1`` remembered
  tensors. Where the temperature changes the filter is that of unit temperature, and its value is multiplied by ``sqrt(T_t)``.
  In front of a gain ``lr_t`` that changes, among links that can scale all they remember, it is ``sqrt(T_t / lr_t)``, and the
  memory ``x`` of those links is multiplied by ``sqrt(lr_{t-1} / lr_t)`` before a step. Where no force acts ``sqrt(lr_t) x_t``
  then does not notice the schedule, so that the memory has the variance that belongs to ``lr_t`` at once.
* :class:`Scheduled`: ``f = direct + momentum_gain / (1 - mu/z)``, SGD and heavy ball in parallel, each with noise by
  the rule of :func:`bayesopt_chain.matching.law.scheduled_momentum_noise`. Branch noises ``e1`` and ``e2`` meet at
  the link's one input as

      (r0 + r1) e_t = r0 e1_t + r1 (e2_t + k delta_{t-1}),      delta_t = k delta_{t-1} + e2_t - e_t,

  ``delta`` being what the second branch's velocity still lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.matching import law


class Conditions(NamedTuple):
    """Temperature and gains of one step: ``inverse = G_b / G_a`` and ``square = G_b^2`` (see ``matching.noise_inputs``)."""

    temperature: Any  # numbers, or float64 tensors with an entry for each leaf
    inverse: Any = 1.0
    square: Any = 1.0


@dataclass(frozen=True)
class Filtered:
    """Noise of a constant response; ``rescales`` if the links' memory is multiplied where a gain behind it changes."""

    c: tuple[float, ...]
    d: tuple[float, ...] = (1.0,)
    rescales: bool = False
    draws = 1

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return max(len(self.c), len(self.d)) - 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Tensor | None]:
        """The level of this step's noise, and what the links' memory is multiplied by before the step."""
        if not self.rescales:
            return law.root(now.temperature, torch.where), None
        began = before.inverse > 0
        ratio = torch.where(began, now.inverse / torch.where(began, before.inverse, 1.0), 1.0)
        return law.root(now.temperature * now.inverse, torch.where), law.root(ratio, torch.where)

    def step(self, fresh: list[Tensor], memory: list[Tensor], level: Any = None) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory; the ``fresh`` draw may be overwritten."""
        (xi,) = fresh
        alike = all(v == self.c[0] for v in self.c)  # then the draw itself is not needed again
        first = xi.mul_(self.c[0]) if alike else xi * self.c[0]
        y = first + memory[0] if memory else first
        new: list[Tensor] = []
        for k in range(1, len(memory) + 1):
            w = torch.zeros_like(xi) if k >= len(self.c) else first if alike else xi * self.c[k]
            w = w - self.d[k] * y if k < len(self.d) else w
            new.append(w + memory[k] if k < len(memory) else w)
        return y if level is None else y * level, new


@dataclass(frozen=True)
class Scheduled:
    """Noise of SGD, momentum or Nesterov under a changing learning rate or temperature, by branches ``gain / (1 - mu/z)``."""

    branches: tuple[tuple[float, float], ...]  # (gain, mu); SGD's has mu = 0
    head: float
    order: int
    decay_level: float = 0.0  # what decoupled weight decay adds to 1 / lr

    @classmethod
    def of(cls, b: Sequence[float], a: Sequence[float], head: float, order: int) -> Scheduled | None:
        """The noise of ``b / a`` if that is SGD, heavy ball, or both in parallel with gains that are not negative."""
        b, a = law.trim(b), law.trim(a)
        if len(a) == 1 and len(b) == 1:
            return cls(((b[0] / a[0], 0.0),), head, order)
        if len(a) != 2 or len(b) > 2:
            return None
        mu, (b0, b1) = -a[1] / a[0], [*(v / a[0] for v in b), 0.0][:2]
        direct = -b1 / mu
        gain = b0 - direct
        if not (mu > 0 and direct >= 0 and gain >= 0):
            return None
        if order == 1:  # white noise, of the level at w = 0
            return cls((((1.0 - mu) * direct + gain, mu),), head, order)
        return cls(tuple([x for x in ((direct, 0.0), (gain, mu)) if x[0] > 0.0]), head, order)

    @property
    def draws(self) -> int:
        """Fresh draws in a step."""
        return len(self.branches)

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return 0 if self.order == 1 else 2 * len(self.branches) - 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Tensor | None]:
        """Those of each branch, and what the velocity is multiplied by before the step."""
        out = list[law.ScheduleCoefficients]()
        for gain, mu in self.branches:
            level, last = (x.inverse / gain + self.decay_level * x.square for x in (now, before))
            heat = now.temperature, before.temperature
            out.append(law.scheduled_momentum_noise(mu, level, last, *heat, order=self.order, where=torch.where))
        return tuple(out), out[-1].velocity_scale if self.branches[-1][1] else None

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory."""
        if self.order == 1:
            return fresh[0] * (self.head * c[0].current), []
        e = [x * k.current + m * k.previous for x, m, k in zip(fresh, memory, c)]
        if len(e) == 1:
            return self.head * e[0], list(fresh)
        (r0, _), (r1, mu) = self.branches
        kept = mu * c[1].velocity_scale * memory[2]
        total = (r0 * e[0] + r1 * (e[1] + kept)) / (r0 + r1)
        return self.head * total, [*fresh, kept + e[1] - total]


Process = Filtered | Scheduled
