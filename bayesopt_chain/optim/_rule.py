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

A momentum that falls to 0 is refused, since torch's step would discard the velocity, a part of which should still move the
parameter. A step with ``h = 0`` does not move the parameter. It adds the rest of the last draw to the velocity, which is
reversed before the next step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from bayesopt_chain.matching import law
from bayesopt_chain.matching.filters import pick


class Before(NamedTuple):
    """The numbers of the last step that drew noise, on which the noise of the next step depends.

    ``optimizer.state[p]`` holds each number under its name with the prefix ``noise_``, as ``noise_half``.

    Attributes:
        temperature, half, arrives, momentum: of the momentum branch, as in :class:`bayesopt_chain.matching.law.Level`, in
            whose place this stands.
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
    direct_half: float = 0.0
    direct_surplus: float = 0.0


class Linear(NamedTuple):
    """The numbers of torch's step for one leaf, in the symbols of the module.

    Attributes:
        step_size: ``h``.
        momentum: ``mu``.
        gain: ``b``.
        direct: ``h_1``.
        shrink: ``s``.
        square_decay: the decay of the averaged squared gradient; 1 if that no longer learns.
        correction: the factor of the root of the average that corrects its bias in the first updates.
        velocity: the name of ``V`` in ``optimizer.state[p]``; ``None`` without a velocity.
        kind: the kind of step by its number in :mod:`bayesopt_chain.engine.optimizer_cpu`; ``None`` if that lacks it.
        square: the name of the averaged squared gradient in ``optimizer.state[p]``; ``None`` for SGD.
        branches: how many branches have a noise of their own, 2 with Nesterov's momentum.
    """

    step_size: float
    momentum: float = 0.0
    gain: float = 1.0
    direct: float = 0.0
    shrink: float = 0.0
    square_decay: float = 1.0
    correction: float = 1.0
    velocity: str | None = None
    kind: int | None = None
    square: str | None = None
    branches: int = 1


class Noise(NamedTuple):
    """The coefficients of the noise of one step, with ``w_t`` the standard normals of step ``t``.

    Attributes:
        momentum, direct: ``(previous, current)`` of ``e = previous w_{t-1} + current w_t``, and of ``e_1``, whose draws are
            independent of those of ``e``.
        velocity_scale: the factor by which the velocity is multiplied before torch's step.
        before: the numbers that the next step needs; ``None`` if nothing was drawn yet.
    """

    momentum: tuple[float, float] = (0.0, 0.0)
    direct: tuple[float, float] = (0.0, 0.0)
    velocity_scale: float = 1.0
    before: Before | None = None


@lru_cache(maxsize=64)  # many steps have the numbers of the last one
def noise_of(linear: Linear, temperature: float, before: Before | None) -> Noise:
    """Compute the noise of one step.

    Args:
        linear: the numbers of torch's step.
        temperature: ``T > 0``.
        before: the numbers of the last step that drew noise; ``None`` before the first draw.

    Returns:
        The coefficients of the noise.

    Example:
        >>> step = Linear(step_size=0.1, momentum=0.9, velocity="momentum_buffer")
        >>> first = noise_of(step, 0.5, None)
        >>> second = noise_of(step, 0.5, first.before)
        >>> second.momentum, second.velocity_scale  # sqrt(T (1 - mu) / (2 lr)), twice
        ((0.5, 0.5), 1.0)
    """
    step_size, momentum, gain, direct, shrink = linear[:5]
    last: Any = before
    if (rate := step_size * gain) > 0.0:
        now, own, scale = law.level(rate, momentum, temperature, momentum * shrink / rate), momentum, 1.0
        if last is not None:
            # after a step of momentum 0 the buffer is of an older step and has no part in the motion
            own = momentum * last.gain / gain if last.momentum else 0.0
        k = law.scheduled_noise(now, last or now, last.surplus if last else 0.0, own, where=pick)
        if last is not None and momentum and not (last.momentum and k.velocity == own):
            scale = k.velocity * gain / (momentum * last.gain)
        after = Before(*now, gain, k.surplus)
        noise = Noise((gain * k.previous if last else 0.0, gain * k.current), velocity_scale=scale, before=after)
    elif last is not None and momentum:
        # A step of rate 0 does not move the parameter. The velocity still gets the noise that the last step left to it. The
        # next step owes nothing to the last draw (half = 0) and reverses the velocity (momentum = -1).
        k = law.scheduled_noise(last._replace(half=0.0), last, last.surplus, last.momentum, where=pick)
        after = last._replace(half=0.0, momentum=-1.0, gain=gain, surplus=k.surplus)
        scale = last.momentum * gain / (momentum * last.gain)
        noise = Noise((gain * k.previous, gain * k.current), velocity_scale=scale, before=after)
    else:  # with neither a rate nor a draw there is no noise, and nothing to remember
        noise = Noise(before=before)
    if direct > 0.0 and noise.before is not None:
        # the direct branch is one of momentum 0 with the rate h_1
        now, surplus = law.level(direct, 0.0, temperature), 0.0
        then, goes_on = now, 0.0
        if last is not None and last.direct_half > 0.0:
            then, goes_on = law.Level(last.temperature, last.direct_half, last.direct_half, 0.0), 1.0
            surplus = last.direct_surplus
        k = law.scheduled_noise(now, then, surplus, 0.0, where=pick)
        after = noise.before._replace(direct_half=now.half, direct_surplus=k.surplus)
        noise = noise._replace(direct=(goes_on * k.previous, k.current), before=after)
    return noise
