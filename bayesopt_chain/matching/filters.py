r"""The ways a stream of normals becomes matched noise: a fixed filter, and rules for rates that change.

All turn the fresh draws ``xi`` of one leaf and what they remember of earlier ones into the noise ``e`` of this step:

* :class:`Filtered`: ``e = c(1/z) / d(1/z) xi`` in transposed direct form, one draw, ``max(len(c), len(d)) - 1`` remembered
  tensors. Where the temperature changes the filter is that of unit temperature, and its value is multiplied by ``sqrt(T_t)``.
  In front of a gain ``lr_t`` that changes, among links that can scale all they remember, it is ``sqrt(T_t / lr_t)``, and the
  memory ``x`` of those links is multiplied by ``sqrt(lr_{t-1} / lr_t)`` before a step. Where no force acts ``sqrt(lr_t) x_t``
  then does not notice the schedule, so that the memory has the variance that belongs to ``lr_t`` at once.
* :class:`Scheduled`: ``f = direct + momentum_gain / (1 - mu/z)``, SGD and heavy ball in parallel, each with noise by
  the rule of :func:`bayesopt_chain.matching.law.scheduled_noise`, in units in which the gradient enters with weight 1:
  behind a changing gain ``G_b`` the noise is ``G_b`` times that, and the last velocity counts ``mu G_b' / G_b``.
  Branch noises ``e1`` and ``e2`` meet at the link's one input as

      (r0 + r1) e_t = r0 e1_t + r1 (e2_t + k delta_{t-1}),      delta_t = k delta_{t-1} + e2_t - e_t,

  ``delta`` being what the second branch's velocity still lacks.

A step of rate 0 moves nothing, but its gradient enters the velocity: ``v = q + g``, of the right variance, with
``Cov(theta, v) = +T / 2``. Reversed it has the stationary law again. So the next step takes ``-v`` for what it finds, exactly;
noise that was still owed enters at once, and SGD, which has no velocity, keeps its draw. Nesterov's direct branch keeps its
draw too, which is not exact beside a velocity that is reversed: ``Cov(q1, q2)`` is then ``K T / 2`` and not 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.matching import law


class Conditions(NamedTuple):
    """What changes with time, at one step: numbers, or float64 tensors with an entry for each leaf."""

    temperature: Any
    # the product of all changing gains; where it is 0 that of the last step that moved, 0 before the first
    rate: Any = 1.0
    front: Any = 1.0  # those in front of the place where the noise enters
    moves: Any = True  # whether the rate of this step is not 0
    surplus: tuple[Any, ...] = (0.0, 0.0)  # what this step leaves behind, by branch


class Weights(NamedTuple):
    """One branch's noise of one step, ``current xi_t + previous xi_{t-1}``; what it does to the velocity before."""

    current: Any
    previous: Any
    moves: Any  # where False, SGD keeps its old draw
    velocity_scale: Any


def pick(condition: Any, x: Any, y: Any) -> Any:
    """``torch.where``, for numbers too."""
    return torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y


@dataclass(frozen=True)
class Filtered:
    """Noise of a constant response; ``rescales`` if the links' memory is multiplied where a gain behind it changes."""

    c: tuple[float, ...]
    d: tuple[float, ...] = (1.0,)
    rescales: bool = False
    draws = 1
    velocity = False

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return max(len(self.c), len(self.d)) - 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Any, tuple[Any, ...]]:
        """The level of this step's noise, what the links' memory is multiplied by before the step, and no surplus."""
        if not self.rescales:
            return law.root(now.temperature, pick), None, ()
        here, last = (x.front * x.front / pick(x.rate > 0, x.rate, 1.0) for x in (now, before))  # G_b / G_a
        here = pick(now.moves, here, last)
        began = (before.rate > 0) & (last > 0)
        ratio = pick(began, here / pick(last > 0, last, 1.0), 1.0)
        return law.root(now.temperature * here, pick), law.root(ratio, pick), ()

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
    decay: float = 0.0  # ``mu s / lr`` of a decoupled weight decay behind the only branch

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
    def velocity(self) -> bool:
        """Whether a link remembers a velocity."""
        return self.branches[-1][1] > 0

    @property
    def draws(self) -> int:
        """Fresh draws in a step."""
        return len(self.branches)

    @property
    def memory(self) -> int:
        """How many tensors like a leaf it remembers."""
        return 0 if self.order == 1 else 2 * len(self.branches) - 1

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Any, tuple[Any, ...]]:
        """The weights of each branch, what the velocity is multiplied by before the step, and the surpluses it leaves."""
        runs, began = now.rate != 0, before.rate != 0
        rate, heat = pick(runs, now.rate, 1.0), pick(runs, now.temperature, 0.0)
        last, last_heat = pick(began, before.rate, rate), pick(began, before.temperature, heat)
        last_front = pick(began, before.front, now.front)
        moved = pick(began, before.moves, began == began)
        weights, surplus, scale = list[Weights](), list[Any](), None
        for (gain, mu), c in zip(self.branches, before.surplus):
            this = law.level(rate * gain, mu, heat, self.decay)
            that = law.level(last * gain, mu, last_heat, self.decay)
            own = mu * (last_front / pick(now.front > 0, now.front, 1.0))
            if self.order == 1:
                k = law.white_noise(this, that._replace(half=pick(began, that.half, 0.0)), mu, where=pick)
            else:
                if mu:  # a step of rate 0 has no draw in common with the position, and is reversed
                    this = this._replace(half=pick(now.moves, this.half, 0.0))
                    turned = pick(moved, mu + 0.0 * rate, -1.0)
                    that = that._replace(half=pick(moved, that.half, 0.0), momentum=turned)
                c = pick(began, c, 0.0)
                k = law.scheduled_noise(this, that, c, own, where=pick)
            surplus.append(k.surplus if mu else pick(now.moves, k.surplus, c))
            previous = pick(began, k.previous * now.front, 0.0)
            if mu:
                front = now.front / pick(last_front > 0, last_front, 1.0)
                scale = pick(k.velocity == own, 1.0 + 0.0 * front, k.velocity / mu * front)
            weights.append(Weights(k.current * now.front, previous, now.moves, scale))
        return tuple(weights), scale, tuple(surplus)

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """The noise and the new memory."""
        if self.order == 1:
            return fresh[0] * (self.head * c[0].current), []
        e = [x * k.current + m * k.previous for x, m, k in zip(fresh, memory, c)]
        drawn = [x if mu else pick(k.moves, x, m) for x, m, k, (_, mu) in zip(fresh, memory, c, self.branches)]
        if len(e) == 1:
            return self.head * e[0], drawn
        (r0, _), (r1, mu) = self.branches
        kept = mu * c[1].velocity_scale * memory[2]
        total = (r0 * e[0] + r1 * (e[1] + kept)) / (r0 + r1)
        return self.head * total, [*drawn, kept + e[1] - total]


Process = Filtered | Scheduled
