r"""The noise that makes a chain of linear links sample, derived from the chain's own response.

Notation. ``x = 1/z`` is the one-step delay. A chain of linear links turns gradients ``g`` into displacements,
``theta <- theta - F g``, with the rational response ``F = lr * b(x) / a(x)``; a weight decay ``w_j`` met after the
links with response ``H_j`` adds ``w_j theta`` there. Dividing the closed loop by ``F``,

    A(z) theta + grad U(theta) = -e,        A(z) = (z - 1) / F + sum_j w_j / H_j,

where ``e`` is noise added to the gradient. For a quadratic ``U`` with curvature ``K`` the response of ``theta`` is
``chi = 1 / (A + K)``, which is strictly causal. Choosing the power spectrum of ``e`` as

    Psi(w) = T cot(w / 2) Im A(e^{iw})                                                         (matched noise)

gives ``theta`` the spectrum ``-T cot(w/2) Im chi``, and since ``cot(w/2) sin(n w)`` averages to one for every
``n >= 1`` its variance is ``T chi(z=1) = T / (A(1) + K)``: exactly the Gibbs variance of ``U`` plus the prior
``A(1) = sum_j w_j / H_j(1)``, for every curvature and every stable learning rate. Without decay ``Psi`` reduces to
``T Re[(1 + z) / F]``.

Write ``A = N / b`` with a Laurent polynomial ``N`` and ``M(z) = N(z) b(z)`` (``b(z)`` being the conjugate of ``b(x)`` on
the circle). With ``m_k`` its coefficients and ``sin(k w) cot(w/2) = (1 + cos w) U_{k-1}(cos w)``,

    Psi = T (1 + cos w) r(w) / |b|^2,        r = sum_{k>=1} (m_k - m_{-k}) U_{k-1}(cos w).

The noise exists iff ``r >= 0``. Factoring ``r = |q|^2`` with ``q`` of minimum phase leaves the filter

    e = sqrt(T / 2) (1 + x) q(x) / b(x) xi,        xi white, unit variance.

For SGD and heavy-ball momentum ``q`` and ``b`` are constants: the noise is the mean of two consecutive draws.

This module is plain arithmetic on coefficient tuples, lowest power of ``x`` first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

Poly = tuple[float, ...]


class NoMatchedNoise(ValueError):
    """The response admits no matched noise at the head of the linear part."""


def add(p: Sequence[float], q: Sequence[float]) -> Poly:
    """Sum of two polynomials."""
    return tuple([x + y for x, y in zip_longest(p, q, fillvalue=0.0)])


def multiply(p: Sequence[float], q: Sequence[float]) -> Poly:
    """Product of two polynomials."""
    out = [0.0] * (len(p) + len(q) - 1)
    for i, pi in enumerate(p):
        for j, qj in enumerate(q):
            out[i + j] += pi * qj
    return tuple(out)


def trim(p: Sequence[float]) -> list[float]:
    """The polynomial without zeros at the end."""
    p = list(p)
    while len(p) > 1 and p[-1] == 0.0:
        p.pop()
    return p


def is_stable(p: Sequence[float]) -> bool:
    """Whether ``1 / p(x)`` is a stable filter: the Schur-Cohn step-down recursion, without roots."""
    p = trim(p)
    while len(p) > 1:
        if p[0] == 0.0 or not abs(k := p[-1] / p[0]) < 1.0:
            return False
        p = [pi - k * pr for pi, pr in zip(p[:-1], reversed(p[1:]))]
    return p[0] != 0.0


def spectrum(b: Sequence[float], a: Sequence[float]) -> Poly:
    """The factor ``r`` of a chain with ``F = b / a`` and no decay, ``A = (z - 1) / F``."""
    return _excess(b, multiply((1.0, -1.0), a), 1)


def decay_spectrum(b: Sequence[float], numerator: Sequence[float]) -> Poly:
    """What weight decay ``w / H`` adds to ``r``, written over the denominator ``b``."""
    return _excess(b, numerator, 0)


def _excess(b: Sequence[float], numerator: Sequence[float], lead: int) -> Poly:
    """``(r_0, r_1, ...)`` of ``r = r_0 + sum_k r_k (z^k + z^{-k})`` for ``A = z^lead N(x) / b``."""
    odd = [0.0] * max(lead + len(b), len(numerator) - lead)  # m_k - m_{-k} of M = z^lead N(x) b(z)
    for i, ni in enumerate(numerator):
        for k, bk in enumerate(b):
            power = lead - i + k
            odd[abs(power)] += math.copysign(1.0, power) * ni * bk
    r = [0.0, 0.0]
    # U_{k-1} = z^{k-1} + z^{k-3} + ... + z^{-(k-1)}, so that r_{k-1} = odd_k + r_{k+1}
    for k in range(len(odd) - 1, 0, -1):
        r.insert(0, odd[k] + r[1])
    return tuple(r[:-2])


def spectral_factor(r: Sequence[float]) -> Poly:
    """Minimum-phase ``q`` with ``|q|^2 = r`` on the unit circle (Wilson's Newton iteration).

    Raises:
        NoMatchedNoise: ``r`` is negative somewhere on the circle.
    """
    scale = sum(map(abs, r))
    r = trim([0.0 if abs(v) < 1e-14 * scale else v for v in r])
    if len(r) == 1 and r[0] >= 0.0:
        return (math.sqrt(r[0]),)
    grid = 720
    lowest = min(
        r[0] + 2 * sum(v * math.cos(math.pi * i * k / grid) for k, v in enumerate(r) if k) for i in range(grid + 1)
    )
    if lowest < -1e-12 * scale:
        raise NoMatchedNoise(f"the noise spectrum would be negative ({lowest:.3g} relative to {scale:.3g})")
    if len(r) > 1 and lowest < 1e-12 * scale:
        r[0] += 1e-12 * scale - lowest  # a zero on the circle, where Newton's equations are singular, moves just inside
    n = len(r)
    q = [math.sqrt(r[0])] + [0.0] * (n - 1)
    for _ in range(200):
        rows = [[(q[j - k] if j >= k else 0.0) + (q[j + k] if j + k < n else 0.0) for j in range(n)] for k in range(n)]
        rhs = [r[k] + sum(q[j] * q[j + k] for j in range(n - k)) for k in range(n)]
        new = _solve(rows, rhs)
        if max(abs(x - y) for x, y in zip(new, q)) <= 1e-16 * math.sqrt(scale):
            return tuple(new)
        q = new
    return tuple(q)


def _solve(rows: list[list[float]], rhs: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting."""
    n = len(rhs)
    m = [[*row, y] for row, y in zip(rows, rhs)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda j: abs(m[j][i]))
        m[i], m[pivot] = m[pivot], m[i]
        for j in range(i + 1, n):
            f = m[j][i] / m[i][i]
            m[j] = [x - f * y for x, y in zip(m[j], m[i])]
    x = [0.0] * n
    for i in reversed(range(n)):
        x[i] = (m[i][n] - sum(m[i][j] * x[j] for j in range(i + 1, n))) / m[i][i]
    return x


def noise_filter(r: Sequence[float], b: Sequence[float], order: int = 2) -> tuple[Poly, Poly]:
    """The filter ``c(x) / d(x)``, ``d[0] = 1``, at unit temperature; ``order=1`` is white noise of the level at ``w = 0``.

    Raises:
        NoMatchedNoise: no noise at the head of this response is matched to it (two strong cascaded momenta, say).

    Example:
        >>> b, a = (0.1,), (1.0, -0.9)  # heavy ball, lr = 0.1
        >>> c, d = noise_filter(spectrum(b, a), b)
        >>> [round(v, 6) for v in c], d  # the mean of two consecutive draws, of variance 2 (1 - momentum) / lr
        ([0.707107, 0.707107], (1.0,))
    """
    if not is_stable(b):
        raise NoMatchedNoise(f"the response's numerator {tuple(b)} has no stable inverse")
    level = r[0] + 2 * sum(r[1:])
    if level < 0.0:
        raise NoMatchedNoise("the noise spectrum would be negative at w = 0")
    if order == 1:
        return (math.sqrt(2.0 * level) / abs(sum(b)),), (1.0,)
    c = tuple([v / (math.sqrt(2.0) * abs(b[0])) for v in multiply((1.0, 1.0), spectral_factor(r))])
    return c, tuple([v / b[0] for v in b])


class Level(NamedTuple):
    """What one branch ``gain / (1 - mu/z)`` asks of its noise at one step, with numbers or 0-d tensors.

    ``half`` and ``arrives`` hold per unit temperature: ``alpha^2 / T`` and ``A / T`` of :func:`scheduled_noise`.
    """

    temperature: Any
    half: Any
    arrives: Any
    momentum: Any  # what multiplies the velocity on its way to the next step


def level(rate: Any, momentum: Any, temperature: Any, decay: Any = 0.0) -> Level:
    """The level of ``v <- mu v + g + e``, ``theta <- (1 - s) theta - rate v``, with ``decay = mu s / rate``.

    With decay the same process as without, of momentum ``mu (1 - s)`` under the curvature ``K + (1 - mu) s / rate``.
    """
    return Level(
        temperature, 0.5 * ((1.0 - momentum) / rate + decay), 0.5 * ((1.0 + momentum) / rate - decay), momentum
    )


class ScheduleCoefficients(NamedTuple):
    """One step of scheduled noise, ``v <- velocity v + g + current w_t + previous w_{t-1}``, and the surplus it leaves."""

    current: Any
    previous: Any
    velocity: Any
    surplus: Any


def scheduled_noise(
    now: Level, before: Level, surplus: Any, momentum: Any, *, where: Callable[..., Any]
) -> ScheduleCoefficients:
    r"""Matched noise of a branch whose rate, momentum or temperature just changed: exact wherever rates fall.

    With ``v_t = k v_{t-1} + g_t + e_t``, ``theta_{t+1} = theta_t - lr_t v_t`` call ``q_t`` what a step finds before its
    gradient comes, ``v_t = q_t + g_t + alpha_t xi_t``, with

        alpha_t^2 = T_t (1 - mu_t) / (2 lr_t),    A_t = T_t (1 + mu_t) / (2 lr_t),    q_{t+1} = mu_t v_t + alpha_t xi_t.

    **Theorem.** At constant ``T`` every step leaves the law ``Var theta = T / K, Cov(theta, q) = -T / 2, Var q = A_t``
    invariant, for every curvature ``K``. Only ``A_t`` knows of lr and mu. So where ``A`` grows (a rate falls, a momentum
    rises) an independent draw of variance ``A_t - A_{t-1}`` added to ``q_t`` makes the next step exact as well. *Proof.*
    ``Cov(theta, v) = -T/2 + T = T/2`` and ``Var v = A - T K + T K + alpha^2 = T / lr``, hence ``Var theta' = T/K - lr T +
    lr T = T/K``; ``Cov(theta', v) = T/2 - T = -T/2`` and ``Cov(theta', xi) = -lr alpha`` give ``Cov(theta', q') = -mu T/2
    - lr alpha^2 = -T/2``; and ``Var q' = mu^2 T / lr + (1 + 2 mu) alpha^2 = A``.

    The noise ``e_t = alpha_t xi_t + alpha_{t-1} xi_{t-1} + (A_t - A_{t-1})^(1/2) zeta_t`` correlates with its neighbours
    only. One draw a step gives the same process,

        e_t = a_t w_t + b_t w_{t-1},    a_t^2 = alpha_t^2 + c_t,    b_t = alpha_{t-1}^2 / a_{t-1},
        c_t = A_t - A_{t-1} + s_{t-1},    s_t = alpha_t^2 c_t / (alpha_t^2 + c_t),

    with one number to remember, the ``surplus`` ``c_t >= 0``: how much of ``w_t`` only the velocity needed. At constant
    rates it stays 0. ``k`` is ``mu_{t-1}``; the optimizer's own ``momentum`` ``m`` serves instead where

        c_t = A_t - A_{t-1} - (alpha_{t-1} d)^2 + (1 - d)^2 s_{t-1} >= 0,    d = (m - mu_{t-1}) / (1 - mu_{t-1}),

    with ``b_t`` times ``1 - d``: ``Cov(theta, q)`` is the same with more of the velocity and less of the old draw.

    **A rise** that the surplus does not cover has no exact noise: ``|Cov(theta, q)|`` would have to stay while ``Var q``
    falls below ``A_{t-1} - s_{t-1}``, the least that any mixture of velocity and old draw has with that covariance. Of all
    mixtures of variance ``A_t`` the one whose covariance is largest is ``q`` itself times ``g = (A_t / (A_{t-1} -
    s_{t-1}))^(1/2)``, and that is taken: ``k = g mu_{t-1}``, ``b_t`` times ``g``, ``c_t = 0``. At once ``Var theta`` is then
    off by the factor ``1 - (1 - g) lr_t K (1 - lr_t K)``; docs/theory.md has the table.

    **A temperature** that changes cannot be followed exactly, since ``Var theta`` would have to jump. The process at the
    lower of two temperatures goes on, exactly; what is between them is an independent process that starts from rest (``T``
    rises) or gets no more noise (``T`` falls), so that ``c_t`` counts ``A_t - A_{t-1}`` at the lower one. At constant lr and mu
    ``K Var theta`` then goes from the old temperature to the new one without ever turning or overshooting: the variance of
    what started from rest is a sum of squares that gets longer, and that of what is left alone lacks such a sum. It arrives as
    fast as the chain forgets; a velocity is never rescaled for a temperature.

    Args:
        now, before: the levels of this step and of the last one. ``half = 0`` before is a velocity that has no draw in
            common with the position, and ``momentum = -1`` one to be reversed, as after a step of rate 0.
        surplus: ``c_{t-1}``.
        momentum: what the optimizer multiplies the last velocity by, in units in which the gradient enters with weight 1.
        where: ``where(condition, x, y)`` selects.

    Example:
        >>> pick = lambda condition, x, y: x if condition else y
        >>> before, now = level(0.1, 0.5, 1.0), level(0.05, 0.5, 1.0)
        >>> first = scheduled_noise(now, before, 0.0, 0.5, where=pick)  # the rate halves: A grows by (1 + mu) / (2 lr)
        >>> [round(x, 6) for x in first]
        [3.535534, 1.581139, 0.5, 7.5]
        >>> round(scheduled_noise(now, now, first.surplus, 0.5, where=pick).surplus, 6)  # and is forgotten slowly
        3.0
    """
    heat = before.temperature
    felt = heat * before.half  # alpha_{t-1}^2
    drawn = felt + surplus  # a_{t-1}^2
    share = felt / where(drawn > 0, drawn, 1.0)
    owed, slack = share * root(drawn, where), surplus * share
    has = heat * before.arrives - slack  # Var q
    grows = now.arrives - before.arrives
    lack = heat * grows + slack
    mu = before.momentum
    d = (momentum - mu) / (1.0 - mu)
    room = lack - d * (d * felt + (2.0 - d) * slack)
    fits = (room >= 0) & ((felt > 0) | (momentum == mu))  # the optimizer's own momentum will do
    g = root(where(lack < 0, heat * now.arrives / where(lack < 0, has, 1.0), 1.0), where)
    cools = where(now.temperature < heat, (heat - now.temperature) * grows, 0.0)
    c = where(fits, room, lack) - cools
    c = where(c > 0, c, 0.0)
    return ScheduleCoefficients(
        current=root(now.temperature * now.half + c, where),
        previous=where(fits, 1.0 - d, g) * owed,
        velocity=where(fits, momentum, g * mu),
        surplus=c,
    )


def white_noise(now: Level, before: Level, momentum: float, *, where: Callable[..., Any]) -> ScheduleCoefficients:
    """White noise (order 1) of a branch whose rate or temperature just changed: ``Var v`` arrives at ``T_t / lr_t``.

    Where a rate rises by more than ``1 / mu^2`` the velocity, which would be too hot without any noise, is first rescaled.
    Behind a change of temperature the variance stays between the old and the new value, but may turn on its way.
    """
    arrives, arrived = (2.0 / (1.0 - momentum) * x.half for x in (now, before))  # 1 / lr, and what decay adds
    rises = (arrived > 0) & (arrives < momentum * momentum * arrived)
    k = where(rises, root(arrives / where(arrived > 0, arrived, 1.0), where), momentum + 0.0 * arrives)
    e = 2.0 / (1.0 + momentum) * (now.temperature * arrives - k * k * before.temperature * arrived)
    return ScheduleCoefficients(root(where(e > 0, e, 0.0), where), 0.0 * e, k, 0.0 * e)


def root(x: Any, where: Callable[..., Any]) -> Any:
    """Square root, whose derivative at 0 counts as 0."""
    return where(x == 0, 0.0, where(x == 0, 1.0, x) ** 0.5)
