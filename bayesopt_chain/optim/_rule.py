r"""What noise one step of torch's optimizers takes, when everything may have changed since the last one.

For one element, torch's step is (``g`` the gradient it works with, coupled weight decay and sign included)

    V' = mu V + b g,        theta' = (1 - s) theta - h V' - h_1 g.                              (torch's step)

``V`` is the velocity (``momentum_buffer``, ``exp_avg``), ``mu`` its momentum, ``b`` its gain, ``h`` the step size,
``h_1`` that of a gradient which goes to the parameter directly (Nesterov), and ``s = lr * weight_decay`` of a decoupled
decay. Behind it comes

    V' += e,    theta' -= h e + h_1 e_1                                                         (noise)

The displacement ``theta' - theta`` is a sum of a momentum branch and a direct branch; the spectrum that matched noise
asks of a sum of branches is the sum of what it asks of each (:mod:`bayesopt_chain.matching.law`, where it reads
``T cot(w/2) Im[(z - 1 + s) F*]``, linear in ``F``), so that ``e`` and ``e_1`` are matched each by itself and drawn
independently, both by :func:`bayesopt_chain.matching.law.scheduled_noise`. In its units the momentum branch is ``v = V / b``
at the rate ``h b``; its last velocity counts ``mu_t b_{t-1} / b_t``, and where the rule asks for another momentum than that
the buffer is multiplied by their ratio before torch's step. At constant numbers ``e = b alpha (w_t + w_{t-1})``.

Where ``mu_t`` is 0 torch forgets the velocity: what the rule still wants of it goes to the parameter behind torch's
step, ``theta -= h_t k_t V_{t-1} / b_{t-1}``, and the next step starts from a buffer of zeros. A step with ``h = 0`` moves
nothing; its velocity is reversed before the next step, and SGD keeps its draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bayesopt_chain.matching import law


class Before(NamedTuple):
    """The last step that drew. Each number has a name of its own in ``optimizer.state[p]``: ``noise_half`` and so on.

    Attributes:
        temperature, half, arrives, momentum: its :class:`bayesopt_chain.matching.law.Level`.
        gain: ``b``.
        surplus: what it leaves to the next step.
        direct_half: ``half`` of the direct branch, 0 where there was none.
        direct_surplus: what that leaves.
    """

    temperature: float
    half: float
    arrives: float
    momentum: float
    gain: float
    surplus: float
    direct_half: float
    direct_surplus: float

    @property
    def level(self) -> law.Level:
        """That of the momentum branch."""
        return law.Level(*self[:4])


class Linear(NamedTuple):
    """The numbers of torch's step for one leaf; the velocity's name in ``optimizer.state[p]``, or ``None``."""

    step_size: float
    momentum: float = 0.0
    gain: float = 1.0
    velocity: str | None = None
    direct: float = 0.0
    shrink: float = 0.0


@dataclass(slots=True)
class Noise:
    """``e = current w_t + previous w_{t-1}``, ``e_1`` likewise with draws of its own, and what happens to the velocity."""

    current: float = 0.0
    previous: float = 0.0
    velocity_scale: float = 1.0  # of the buffer, before torch's step
    coasts: float = 0.0  # how much of the buffer goes to the parameter behind a step that forgets it
    direct: float = 0.0
    direct_previous: float = 0.0
    before: Before | None = None  # what the next step has to know


def noise_of(linear: Linear, temperature: float, before: Before | None) -> Noise:
    """The noise of one step at ``temperature > 0``; ``before`` is the last one's, ``None`` where there is no draw yet.

    Example:
        >>> step = Linear(step_size=0.1, momentum=0.9, velocity="momentum_buffer")
        >>> first = noise_of(step, 0.5, None)
        >>> second = noise_of(step, 0.5, first.before)
        >>> second.current, second.previous, second.velocity_scale  # sqrt(T (1 - mu) / (2 lr)), twice
        (0.5, 0.5, 1.0)
    """
    noise = Noise(before=before)
    if linear.step_size * linear.gain > 0.0:
        _moving(noise, linear, temperature, before)
    elif before is not None and linear.momentum:
        _standing(noise, linear, before)
    if linear.direct > 0.0 and noise.before is not None:
        now = law.level(linear.direct, 0.0, temperature)
        if before is not None and before.direct_half:
            half = before.direct_half
            then = law.Level(before.temperature, half, half, 0.0)
            k = law.scheduled_noise(now, then, before.direct_surplus, 0.0, where=_pick)
            noise.direct_previous = k.previous
        else:
            k = law.scheduled_noise(now, now, 0.0, 0.0, where=_pick)
        noise.direct = k.current
        noise.before = noise.before._replace(direct_half=now.half, direct_surplus=k.surplus)
    return noise


def _moving(noise: Noise, linear: Linear, temperature: float, before: Before | None) -> None:
    """The momentum branch of a step that moves."""
    mu, b, rate = linear.momentum, linear.gain, linear.step_size * linear.gain
    now = law.level(rate, mu, temperature, mu * linear.shrink / rate)
    if before is None:
        k = law.scheduled_noise(now, now, 0.0, mu, where=_pick)
    else:
        # behind a step of momentum 0 the buffer is an old one, of which nothing is wanted
        own = mu * before.gain / b if before.momentum else 0.0
        k = law.scheduled_noise(now, before.level, before.surplus, own, where=_pick)
        noise.previous = b * k.previous
        if not mu:
            noise.coasts = linear.step_size * k.velocity / before.gain
        elif not (before.momentum and k.velocity == own):
            noise.velocity_scale = k.velocity * b / (mu * before.gain)
    noise.current = b * k.current
    noise.before = Before(*now, b, k.surplus, 0.0, 0.0)


def _standing(noise: Noise, linear: Linear, before: Before) -> None:
    """The momentum branch of a step of rate 0: its velocity gets what noise it is owed, and is reversed next."""
    last = before.level
    k = law.scheduled_noise(last._replace(half=0.0), last, before.surplus, last.momentum, where=_pick)
    noise.current, noise.previous = linear.gain * k.current, linear.gain * k.previous
    noise.velocity_scale = last.momentum * linear.gain / (linear.momentum * before.gain)
    noise.before = before._replace(half=0.0, momentum=-1.0, gain=linear.gain, surplus=k.surplus)


def _pick(condition: bool, x: float, y: float) -> float:
    return x if condition else y
