r"""How draws of a standard normal become matched noise: a constant filter, and a rule for changing rates and temperatures.

Both classes turn the fresh draws ``xi`` of one leaf and the tensors remembered from earlier steps into the noise ``e`` of this
step:

* :class:`Filtered` is the constant filter ``e = c(1/z) / d(1/z) xi`` in transposed direct form. It takes one draw a step and
  remembers ``max(len(c), len(d)) - 1`` tensors. If the temperature changes, the filter is that of the temperature 1 and its
  output is multiplied by ``sqrt(T_t)``. It has no rule for a gain that changes.
* :class:`Scheduled` is for ``f = direct + momentum_gain / (1 - mu/z)``: SGD, heavy-ball momentum, or both in parallel, which
  is Nesterov's momentum. Each of these branches has noise of its own by the rule of
  :func:`bayesopt_chain.matching.law.scheduled_noise`. That rule holds in units in which the gradient enters with weight 1.
  With a changing gain ``G_t`` in front of the noise, the noise is therefore multiplied by ``G_t``, and the rule is asked
  whether ``mu G_{t-1} / G_t`` can be the factor of the last velocity. The noises ``e1`` and ``e2`` of two branches are
  added to the one input of the link as

      (r0 + r1) e_t = r0 e1_t + r1 (e2_t + k delta_{t-1}),      delta_t = k delta_{t-1} + e2_t - e_t,

  where ``delta`` is what the velocity of the second branch still lacks.

At a step of rate 0 the parameters do not move, but the gradient enters the velocity: ``v = q + g`` has the right variance, but
``Cov(theta, v)`` is ``+T / 2`` in place of ``-T / 2``. The reversed velocity ``-v`` has the stationary law, so the next step
starts from it and is exact. The part of the noise that was still to come is added at once. SGD has no velocity and keeps its
draw for the next step. The direct branch of Nesterov's momentum keeps its draw too, which is not exact beside a velocity that
is reversed: the covariance of the two branches' ``q`` is then ``K T / 2`` in place of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayesopt_chain.matching import law


class Conditions(NamedTuple):
    """The values at one step of everything that changes with time: numbers, or float64 tensors ``[leaves]``.

    Attributes:
        temperature: ``T_t``, in units of the loss.
        rate: the product of all changing gains. At a step where that product is 0, the product at the last step that moved the
            parameters, or 0 before the first such step.
        front: the product of the changing gains in front of the place where the noise enters.
        moves: whether the product of all changing gains is not 0 at this step.
        surplus: for each branch, the surplus ``c_t`` that this step leaves to the next one
            (:func:`bayesopt_chain.matching.law.scheduled_noise`).
    """

    temperature: Any
    rate: Any = 1.0
    front: Any = 1.0
    moves: Any = True
    surplus: tuple[Any, ...] = (0.0, 0.0)


class Weights(NamedTuple):
    """The coefficients of one branch at one step, whose noise is ``current xi_t + previous xi_{t-1}``.

    Attributes:
        current: the factor of the fresh draw.
        previous: the factor of the last step's draw.
        moves: whether the parameters move; where False, SGD remembers its old draw in place of the fresh one.
        velocity_scale: the factor by which the link's velocity is multiplied before the step; ``None`` without velocity.
        share: the share of the fresh draw's variance that the position feels, not the velocity alone:
            ``alpha_t^2 / (alpha_t^2 + c_t)``. This share of ``current xi_t`` acts once more in the next step.
    """

    current: Any
    previous: Any
    moves: Any
    velocity_scale: Any
    share: Any


def pick(condition: Any, x: Any, y: Any) -> Any:
    """``x`` where the condition holds and ``y`` elsewhere: ``torch.where``, or a choice between numbers.

    Args:
        condition: a tensor of booleans, or one boolean.
        x, y: numbers or tensors that broadcast with the condition.

    Example:
        >>> pick(True, 1.0, 2.0), pick(torch.tensor([True, False]), 1.0, 2.0)
        (1.0, tensor([1., 2.]))
    """
    return torch.where(condition, x, y) if isinstance(condition, Tensor) else x if condition else y


@dataclass(frozen=True)
class Filtered:
    """Noise of a constant response, by the filter ``c(1/z) / d(1/z)``.

    Attributes:
        c, d: the coefficients of numerator and denominator, lowest power of ``1/z`` first, ``d[0] = 1``.
        draws: how many fresh draws a step takes.
        velocity: whether a branch with momentum has a rule of its own; never here.

    Example:
        >>> mean_of_two = Filtered((0.5, 0.5))
        >>> e, memory = mean_of_two.step([torch.ones(2)], [torch.zeros(2)])
        >>> e, mean_of_two.step([torch.ones(2)], memory)[0]
        (tensor([0.5000, 0.5000]), tensor([1., 1.]))
    """

    c: tuple[float, ...]
    d: tuple[float, ...] = (1.0,)
    draws = 1
    velocity = False

    @property
    def memory(self) -> int:
        """How many tensors of the shape of the leaf are remembered from one step to the next."""
        return max(len(self.c), len(self.d)) - 1

    def deferring(self) -> Filtered | None:
        """The white noise of which a velocity keeps a part for the next step; ``None`` unless it is ``c (xi_t + xi_{t-1})``."""
        return Filtered(self.c[:1]) if self.d == (1.0,) and len(self.c) == 2 and self.c[0] == self.c[1] else None

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Any, tuple[Any, ...]]:
        """The factors of one step under a schedule.

        Args:
            now, before: the conditions of this step and of the last one.

        Returns:
            The factor of the filter's output, ``None`` in the place of the factor of a velocity, and an empty tuple in that of
            the surpluses.
        """
        return law.root(now.temperature, pick), None, ()

    def step(self, fresh: list[Tensor], memory: list[Tensor], level: Any = None) -> tuple[Tensor, list[Tensor]]:
        """One step of the filter for one leaf.

        Args:
            fresh: one draw, of the leaf's shape; it may be overwritten.
            memory: what the last step returned, as many tensors as :attr:`memory` says; zeros at the first step.
            level: the factor of the output, from :meth:`coefficients`; ``None`` for 1.

        Returns:
            The noise, of the leaf's shape, and the new memory.
        """
        (xi,) = fresh
        # If all coefficients of c are equal, one product serves all of them, and no second tensor of the leaf's size is made.
        alike = all(v == self.c[0] for v in self.c)
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
    """Noise of SGD, momentum or Nesterov's momentum under a changing learning rate or temperature.

    Attributes:
        branches: ``(gain, mu)`` of each branch ``gain / (1 - mu/z)``, at most two. The branch of SGD has ``mu = 0`` and comes
            first.
        head: the constant gain in front of the place where the noise enters, by which the noise is multiplied.
        order: 2 for matched noise, 1 for white noise.
        decay: ``mu s / lr`` of a decoupled weight decay behind the only branch
            (:func:`bayesopt_chain.matching.law.level`).
        defers: whether the velocity keeps what the next step still needs of a draw, so that no draw is remembered.
    """

    branches: tuple[tuple[float, float], ...]
    head: float
    order: int
    decay: float = 0.0
    defers: bool = False

    @classmethod
    def of(cls, b: Sequence[float], a: Sequence[float], head: float, order: int) -> Scheduled | None:
        """The noise of the response ``b / a`` under a schedule.

        Args:
            b, a: numerator and denominator, lowest power of ``1/z`` first, without zeros at the end.
            head: the constant gain in front of the place where the noise enters.
            order: 2 for matched noise, 1 for white noise.

        Returns:
            The noise, or ``None`` if ``b / a`` is neither SGD nor heavy-ball momentum nor both of them in parallel with gains
            that are not negative.

        Example:
            >>> Scheduled.of((1.0,), (1.0, -0.9), head=1.0, order=2).branches
            ((1.0, 0.9),)
        """
        if len(a) == 1 and len(b) == 1:
            return cls(((b[0] / a[0], 0.0),), head, order)
        if len(a) != 2 or len(b) > 2:
            return None
        mu, (b0, b1) = -a[1] / a[0], [*(v / a[0] for v in b), 0.0][:2]
        direct = -b1 / mu  # partial fractions: (b0 + b1/z) / (1 - mu/z) = direct + gain / (1 - mu/z)
        gain = b0 - direct
        if not (mu > 0 and direct >= 0 and gain >= 0):
            return None
        if order == 1:  # white noise knows the response at w = 0 only, so one branch of the same response there serves
            return cls((((1.0 - mu) * direct + gain, mu),), head, order)
        return cls(tuple([x for x in ((direct, 0.0), (gain, mu)) if x[0] > 0.0]), head, order)

    @property
    def velocity(self) -> bool:
        """Whether one of the branches has momentum, so that a link keeps a velocity that may have to be rescaled."""
        return self.branches[-1][1] > 0

    @property
    def draws(self) -> int:
        """How many fresh draws a step takes."""
        return len(self.branches)

    @property
    def memory(self) -> int:
        """How many tensors of the shape of the leaf are remembered from one step to the next."""
        return 0 if self.order == 1 or self.defers else 2 * len(self.branches) - 1

    def deferring(self) -> Scheduled | None:
        """The white noise of which a velocity keeps a part for the next step; ``None`` if this noise has no such form."""
        return replace(self, defers=True) if self.order == 2 and len(self.branches) == 1 else None

    def coefficients(self, now: Conditions, before: Conditions) -> tuple[Any, Any, tuple[Any, ...]]:
        """The coefficients of one step.

        Args:
            now, before: the conditions of this step and of the last one.

        Returns:
            The weights of each branch, the factor by which the velocity is multiplied before the step (``None`` without
            velocity), and the surplus that each branch leaves to the next step.
        """
        # A rate of 0 means that the parameters have not moved yet: no noise now, or no earlier step to be continued.
        runs, began = now.rate != 0, before.rate != 0
        rate, temperature = pick(runs, now.rate, 1.0), pick(runs, now.temperature, 0.0)
        last, last_temperature = pick(began, before.rate, rate), pick(began, before.temperature, temperature)
        last_front = pick(began, before.front, now.front)
        moved = pick(began, before.moves, began == began)
        weights, surplus, scale = list[Weights](), list[Any](), None
        for (gain, mu), c in zip(self.branches, before.surplus):
            level = law.level(rate * gain, mu, temperature, self.decay)
            last_level = law.level(last * gain, mu, last_temperature, self.decay)
            # The momentum of the link, in units of the velocity in which the gradient enters with weight 1.
            own = mu * (last_front / pick(now.front > 0, now.front, 1.0))
            if self.order == 1:
                k = law.white_noise(level, last_level._replace(half=pick(began, last_level.half, 0.0)), mu, where=pick)
            else:
                if mu:
                    # The draw of a step of rate 0 does not move the parameters, and the step after it reverses the velocity.
                    level = level._replace(half=pick(now.moves, level.half, 0.0))
                    last_mu = pick(moved, mu + 0.0 * rate, -1.0)
                    last_level = last_level._replace(half=pick(moved, last_level.half, 0.0), momentum=last_mu)
                c = pick(began, c, 0.0)
                k = law.scheduled_noise(level, last_level, c, own, where=pick)
            surplus.append(k.surplus if mu else pick(now.moves, k.surplus, c))
            alpha2 = temperature * level.half
            share = alpha2 / pick(alpha2 + k.surplus > 0, alpha2 + k.surplus, 1.0)
            previous = pick(began, k.previous * now.front, 0.0)
            if mu:
                front = now.front / pick(last_front > 0, last_front, 1.0)
                # The quotient need not be exactly 1 in floating point, and at a factor of 1 the velocity is to keep its bits.
                scale = pick(k.velocity == own, 1.0 + 0.0 * front, k.velocity / mu * front)
            weights.append(Weights(k.current * now.front, previous, now.moves, scale, share))
        return tuple(weights), scale, tuple(surplus)

    def step(self, fresh: list[Tensor], memory: list[Tensor], c: Any) -> tuple[Tensor, list[Tensor]]:
        """One step of the noise for one leaf.

        Args:
            fresh: as many draws as :attr:`draws` says, of the leaf's shape.
            memory: what the last step returned, as many tensors as :attr:`memory` says; zeros at the first step. It has the
                last draw of each branch, and with two branches ``delta``.
            c: the weights of each branch, from :meth:`coefficients`.

        Returns:
            The noise, of the leaf's shape, and the new memory.
        """
        if not self.memory:
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
