r"""The rate of a chain at a temperature ``T``: the smaller of what stability and the noise of the batches allow.

stability    a direction of curvature ``k`` under momentum ``mu`` follows  x'' = (1 + mu - lr k) x' - mu x,  which is stable for
             lr k < 2 (1 + mu); of any linear chain it is the rate at which its closed loop has spectral radius 1. ``k`` is
             looked for where a pilot goes: in singular models and networks it is some times larger there than at the mode.
             A chain far below the limit takes a share ``MARGIN`` of it.
heat         batches whose gradient has the covariance ``C`` make the diffusion  dt (2 T + eta C),  eta = lr / (1 - mu)  in a
             time of ``eta`` a step. To first order in ``eta`` that changes the mean of ``f`` by  E[eta C : Hess phi] / 2, where
             phi solves  T lap phi - grad U . grad phi = E f - f. Of the virial  f = theta . grad U  it is  phi =
             |theta|^2 / 2, whatever ``U``: so the virial grows by  eta tr(C) / 2,  and a loss of degree ``p`` by ``1 / p`` of
             that:

                 E[U] / T  grows by  lr tr(C) / (4 T (1 - mu))   for a quadratic, half as much for a quartic.

             A direction of a quadratic is hotter by ``lr C_i / (2 T (1 - mu))`` (Mandt, Hoffman and Blei, 2017); for other
             chains and orders of batches: :mod:`bayesopt_chain.diagnostics.heating`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MARGIN = 0.1  # share of the stability limit


def rate(stability: float, heat: Callable[[float], float], tolerance: float, margin: float = MARGIN) -> float:
    """The learning rate of a chain.

    Args:
        stability: the rate from which on it diverges.
        heat: what the noise of the batches adds at a rate; it grows with the rate.
        tolerance: how much it may add.
        margin: share of ``stability``.

    Returns:
        The largest rate, to a hundredth, that is at most ``margin * stability`` and adds at most ``tolerance``.

    Raises:
        ValueError: there is none.
    """
    return largest(lambda lr: heat(lr) <= tolerance, margin * stability)


def largest(allowed: Callable[[float], bool], most: float) -> float:
    """The largest number that is allowed, ``most`` at most, to a hundredth.

    Raises:
        ValueError: there is none.
    """
    low = high = most
    while not allowed(low):
        low, high = low / 4, low
        if low < 1e-30:
            raise ValueError(
                "no learning rate is small enough for stability and tolerance; look at the noise of the gradients first, and "
                "for NaN in loss and batches"
            )
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


def heat_of_noise(lr: float, momentum: float, temperature: float) -> float:
    """What independent batches add to ``E[U] / T`` of a quadratic under momentum, for each unit of ``tr(C)``."""
    return lr / (4 * temperature * (1 - momentum))
