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
independently.

A branch at constant ``mu, b, h, s, T`` has

    e_t = alpha (xi_t + xi_{t-1}),    alpha^2 = T (1 - mu) / 2 * level,    level = b / h * (1 + mu s / (1 - mu)),

the mean of two draws, exact for every quadratic loss. In the splitting picture behind it the velocity *arrives* at the
variance ``A_t = T_t (1 + mu_t) / 2 * level_t``. Where anything changes from step to step, the velocity has to arrive at
the next step's variance:

    e_t = alpha_t xi_t + (s' - k alpha_{t-1}) xi_{t-1},      s'^2 = A_t - k^2 A_{t-1}   (clamped at 0),      k = mu_t,

except where ``A / T`` falls by more than ``mu^2`` (a rise of lr, such as a warm restart): there the velocity is first
multiplied by ``k / mu``, ``k^2 = (A_t / T_t) / (A_{t-1} / T_{t-1})``. A falling temperature never rescales. This is
:func:`bayesopt_chain.matching.law.scheduled_momentum_noise` with a momentum that may move too (``OneCycleLR``,
``CyclicLR``); where it moves, the position's half of the noise is that of ``mu_{t-1}`` and the velocity's that of
``mu_t``, an error of the order of the change of mu in one step. Without momentum nothing needs to be known of the step
before.

A step with ``h = 0`` moves nothing. Its velocity decays undisturbed, so the rule goes on from ``T_{t-1} mu^2``.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Before(NamedTuple):
    """The last step that drew. Each number has a name of its own in ``optimizer.state[p]``: ``noise_level`` and so on."""

    level: float
    momentum: float
    temperature: float


class Linear(NamedTuple):
    """The numbers of torch's step for one leaf; the velocity's name in ``optimizer.state[p]``, or ``None``."""

    step_size: float
    momentum: float = 0.0
    gain: float = 1.0
    velocity: str | None = None
    direct: float = 0.0
    shrink: float = 0.0


class Noise(NamedTuple):
    """``e = current xi_t + previous xi_{t-1}``, ``e_1 = direct (xi_t + xi_{t-1})`` with draws of its own."""

    current: float
    previous: float
    velocity_scale: float
    direct: float
    before: Before | None


def noise_of(linear: Linear, temperature: float, before: Before | None) -> Noise:
    """The noise of one step at ``temperature > 0``; ``before`` is the last one's, ``None`` where there is no draw yet.

    Example:
        >>> step = Linear(step_size=0.1, momentum=0.9, velocity="momentum_buffer")
        >>> first = noise_of(step, 0.5, None)
        >>> noise_of(step, 0.5, first.before)[:3]       # sqrt(T (1 - mu) / (2 lr)), twice
        (0.5, 0.5, 1.0)
    """
    h, mu = linear.step_size, linear.momentum
    direct = math.sqrt(temperature / (2.0 * linear.direct)) if linear.direct > 0.0 else 0.0
    if h == 0.0:
        kept = before._replace(temperature=before.temperature * mu * mu) if before is not None else None
        return Noise(0.0, 0.0, 1.0, direct, kept)
    level = linear.gain / h * (1.0 + mu * linear.shrink / (1.0 - mu))
    alpha = math.sqrt(0.5 * temperature * (1.0 - mu) * level)
    now = Before(level, mu, temperature)
    if before is None:
        return Noise(alpha, 0.0, 1.0, direct, now)
    if mu == 0.0:
        return Noise(alpha, alpha, 1.0, direct, now)
    level_before, mu_before, temperature_before = before
    arrives, arrived = 0.5 * (1.0 + mu) * level, 0.5 * (1.0 + mu_before) * level_before
    k = mu if arrives >= mu * mu * arrived else math.sqrt(arrives / arrived)
    fresh = max(temperature * arrives - k * k * temperature_before * arrived, 0.0)
    alpha_before = math.sqrt(0.5 * temperature_before * (1.0 - mu_before) * level_before)
    return Noise(alpha, math.sqrt(fresh) - k * alpha_before, k / mu, direct, now)
