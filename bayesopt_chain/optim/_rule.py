r"""Compute the noise that matches one step of a torch optimizer whose hyperparameters may change from step to step.

For one element, torch's step is

    V' = mu V + b g,        theta' = (1 - s) theta - h V' - h_1 g                               (torch's step)

where ``g`` is the gradient with the coupled weight decay and the sign of ``maximize``, ``V`` the velocity
(``momentum_buffer``, ``exp_avg``), ``mu`` the momentum, ``b`` the gain of the gradient, ``h`` the step size of the velocity,
``h_1`` the step size of the gradient itself (Nesterov, else 0), and ``s = lr * weight_decay`` of a decoupled decay. After
torch's step the noise is added:

    V' += e,    theta' -= h e + h_1 e_1                                                         (noise)

The displacement ``theta' - theta`` is the sum of a momentum branch and a direct branch. The spectrum of matched noise,
``T cot(w/2) Im[(z - 1 + s) F*]`` (:mod:`bayesopt_chain.matching.law`), is linear in the response ``F``, so that each branch is
matched by itself: ``e`` and ``e_1`` are drawn independently, with coefficients from
:func:`bayesopt_chain.matching.law.scheduled_noise`. In the units of that function the momentum branch has the velocity
``v = V / b`` and the learning rate ``h b``, and torch's step multiplies its last velocity by ``mu_t b_{t-1} / b_t``. If the
function asks for another factor, the buffer is multiplied by the ratio of the two before torch's step. At constant
hyperparameters ``e = b alpha (w_t + w_{t-1})``, with ``w_t`` standard normal.

If ``mu_t = 0``, torch's step discards the velocity. The part of it that should still move the parameter is added after
torch's step, ``theta -= h_t k_t V_{t-1} / b_{t-1}`` with ``k`` of the function above, and the next step starts from a buffer of
zeros. A step with ``h = 0`` does not move the parameter. It adds the rest of the last draw to the velocity, which is reversed
before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from bayesopt_chain.matching import law


class Clock(NamedTuple):
    """The number of an update, counted from 1, and the product of NAdam's momenta of all earlier updates."""

    updates: int
    mu_product: float = 1.0


class Before(NamedTuple):
    """The numbers of the last step that drew noise, on which the noise of the next step depends.

    ``optimizer.state[p]`` holds each number under its name with the prefix ``noise_``, as ``noise_half``.

    Attributes:
        temperature, half, arrives, momentum: the :class:`bayesopt_chain.matching.law.Level` of the momentum branch.
        gain: ``b``.
        surplus: the surplus that :func:`bayesopt_chain.matching.law.scheduled_noise` passes on to the next step.
        direct_half: ``half`` of the direct branch; 0 if there was no direct branch.
        direct_surplus: the surplus of the direct branch.
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
        """The level of the momentum branch."""
        return law.Level(*self[:4])


class Linear(NamedTuple):
    """The numbers of torch's step for one leaf, in the symbols of the module.

    Attributes:
        step_size: ``h``.
        momentum: ``mu``.
        gain: ``b``.
        velocity: the name of ``V`` in ``optimizer.state[p]``; ``None`` without a velocity.
        direct: ``h_1``.
        shrink: ``s``.
    """

    step_size: float
    momentum: float = 0.0
    gain: float = 1.0
    velocity: str | None = None
    direct: float = 0.0
    shrink: float = 0.0


@dataclass(slots=True)
class Noise:
    """The coefficients of the noise of one step, with ``w_t`` the standard normals of step ``t``.

    Attributes:
        current, previous: ``e = current w_t + previous w_{t-1}``.
        velocity_scale: the factor by which the velocity is multiplied before torch's step.
        discarded: after a step of momentum 0, the factor of the old velocity that is subtracted from the parameter.
        direct, direct_previous: ``e_1 = direct w_t + direct_previous w_{t-1}``, with draws independent of those of ``e``.
        before: the numbers that the next step needs; ``None`` if nothing was drawn yet.
    """

    current: float = 0.0
    previous: float = 0.0
    velocity_scale: float = 1.0
    discarded: float = 0.0
    direct: float = 0.0
    direct_previous: float = 0.0
    before: Before | None = None


@lru_cache(maxsize=64)
def noise_of(linear: Linear, temperature: float, before: Before | None) -> Noise:
    """Compute the noise of one step. At constant rates every step asks for the noise of the last one, which is kept.

    Args:
        linear: the numbers of torch's step.
        temperature: ``T > 0``.
        before: the numbers of the last step that drew noise; ``None`` before the first draw.

    Returns:
        The coefficients of the noise, which must not be changed.

    Example:
        >>> step = Linear(step_size=0.1, momentum=0.9, velocity="momentum_buffer")
        >>> first = noise_of(step, 0.5, None)
        >>> second = noise_of(step, 0.5, first.before)
        >>> second.current, second.previous, second.velocity_scale  # sqrt(T (1 - mu) / (2 lr)), twice
        (0.5, 0.5, 1.0)
    """
    noise = Noise(before=before)
    # with neither a rate nor a draw there is no noise, and nothing to remember
    if linear.step_size * linear.gain > 0.0:
        _momentum_branch(noise, linear, temperature, before)
    elif before is not None and linear.momentum:
        _momentum_branch_at_rest(noise, linear, before)
    if linear.direct > 0.0 and noise.before is not None:
        # the direct branch is one of momentum 0 with the rate h_1
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


def _momentum_branch(noise: Noise, linear: Linear, temperature: float, before: Before | None) -> None:
    """Set the noise of the momentum branch for a step of positive rate ``h b``."""
    mu, b, rate = linear.momentum, linear.gain, linear.step_size * linear.gain
    now = law.level(rate, mu, temperature, mu * linear.shrink / rate)
    if before is None:
        k = law.scheduled_noise(now, now, 0.0, mu, where=_pick)
    else:
        # after a step of momentum 0 the buffer is of an older step and has no part in the motion
        own = mu * before.gain / b if before.momentum else 0.0
        k = law.scheduled_noise(now, before.level, before.surplus, own, where=_pick)
        noise.previous = b * k.previous
        if not mu:
            noise.discarded = linear.step_size * k.velocity / before.gain
        elif not (before.momentum and k.velocity == own):
            noise.velocity_scale = k.velocity * b / (mu * before.gain)
    noise.current = b * k.current
    noise.before = Before(*now, b, k.surplus, 0.0, 0.0)


def _momentum_branch_at_rest(noise: Noise, linear: Linear, before: Before) -> None:
    """Set the noise of the momentum branch for a step of rate 0, which does not move the parameter.

    The velocity still gets the noise that the last step left to it. The next step reverses it, since a momentum of -1 is
    remembered.
    """
    last = before.level
    k = law.scheduled_noise(last._replace(half=0.0), last, before.surplus, last.momentum, where=_pick)
    noise.current, noise.previous = linear.gain * k.current, linear.gain * k.previous
    noise.velocity_scale = last.momentum * linear.gain / (linear.momentum * before.gain)
    # half = 0: the next step owes nothing to the last draw; momentum = -1: it reverses the velocity
    noise.before = before._replace(half=0.0, momentum=-1.0, gain=linear.gain, surplus=k.surplus)


def _pick(condition: bool, x: float, y: float) -> float:
    """Select one of two numbers, as ``torch.where`` does for tensors."""
    return x if condition else y
