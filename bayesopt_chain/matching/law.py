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
    for k in range(
        len(odd) - 1, 0, -1
    ):  # U_{k-1} = z^{k-1} + z^{k-3} + ... + z^{-(k-1)}, so that r_{k-1} = odd_k + r_{k+1}
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


class ScheduleCoefficients(NamedTuple):
    """Coefficients of one step of scheduled momentum: ``e = current * xi + previous * xi_previous``."""

    current: Any
    previous: Any
    velocity_scale: Any


def scheduled_momentum_noise(
    momentum: float,
    level: Any,
    level_before: Any,
    temperature: Any,
    temperature_before: Any,
    *,
    order: int,
    where: Callable[..., Any],
) -> ScheduleCoefficients:
    r"""Noise of a heavy-ball link whose learning rate or temperature just changed.

    ``v <- k v + g + e``, ``theta <- theta - lr v``; ``level = 1 / lr`` (0 where no step has moved yet). In the
    splitting picture (``lr' = 2 lr / (1 + mu)``) the velocity ``u`` must arrive at the variance ``T / lr'``:

        p = u - g,   theta += lr'/2 (p + k p + s xi),   u <- k p + s' xi,
        s^2  = (1 - mu^2) T_t / lr'_t,   s'^2 = T_{t+1} / lr'_{t+1} - k^2 T_t / lr'_t   (clamped at 0),

    ``k = mu``, except where a rise of lr makes ``mu^2 / lr'_t > 1 / lr'_{t+1}``: there the velocity is first scaled so
    that ``k = sqrt(lr'_t / lr'_{t+1})``. A falling temperature never rescales. Written for ``v = -(p + s xi / (1 + mu))``,
    as a chain runs it, one step is

        e_{t+1} = alpha_{t+1} xi_{t+1} + (s' - k alpha_t) xi_t,        alpha = s / (1 + mu),

    and the factor ``k / mu`` for the velocity. At constant lr and T both coefficients are ``sqrt(T (1 - mu) / (2 lr))``.
    A restart (a rise of lr) is not exact. Cosine cycles of 500 updates, momentum 0.5, 0.9 and 0.99, variance relative to
    ``T / k`` over a cycle by the largest ``lr k``:

        0.3   -21 % to  +37 %, root mean square  7 %        2   -22 % to +201 %, root mean square  43 %
        0.5   -25 % to  +54 %, root mean square 10 %        3   -34 % to +606 %, root mean square 115 %
        1     -16 % to  +99 %, root mean square 18 %

    ``order=1`` draws white noise ``e^2 = 2 / (1 + mu) (T_{t+1} / lr_{t+1} - k^2 T_t / lr_t)`` instead.

    All arguments but ``momentum`` and ``order`` may be numbers or 0-d tensors; ``where(condition, x, y)`` selects.
    """
    mu = momentum
    rises = (level_before > 0) * (level < mu * mu * level_before)
    safe = where(level_before > 0, level_before, level_before + 1.0)
    k = where(rises, (level / safe) ** 0.5, mu + 0.0 * level)
    arrive = temperature * level - k * k * temperature_before * level_before
    arrive = where(arrive <= 0, 0.0 * arrive, arrive)
    scale = where(rises, k / mu if mu else 1.0 + 0.0 * level, 1.0 + 0.0 * level)
    if order == 1:
        return ScheduleCoefficients(root(2.0 / (1.0 + mu) * arrive, where), None, scale)
    alpha = root(0.5 * (1.0 - mu) * temperature * level, where)
    alpha_before = root(0.5 * (1.0 - mu) * temperature_before * level_before, where)
    return ScheduleCoefficients(alpha, root(0.5 * (1.0 + mu) * arrive, where) - k * alpha_before, scale)


def root(x: Any, where: Callable[..., Any]) -> Any:
    """Square root, whose derivative at 0 counts as 0."""
    return where(x == 0, 0.0 * x, where(x == 0, x + 1.0, x) ** 0.5)
