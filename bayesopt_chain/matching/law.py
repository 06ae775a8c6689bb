r"""The law of matched noise: the spectrum that the noise of a chain of linear links must have so that the chain samples.

Let ``z`` be the shift by one step and ``x = 1/z`` the delay by one step. A chain of linear links turns gradients ``g`` into
displacements, ``theta <- theta - F g``, with the rational transfer function ``F = lr * b(x) / a(x)``. A weight decay ``w_j``
that stands behind links with the transfer function ``H_j`` adds ``w_j theta`` to their output. Divided by ``F``, the equation
of motion in a loss ``U`` is

    A(z) theta + grad U(theta) = -e,        A(z) = (z - 1) / F + sum_j w_j / H_j,

where ``e`` is the noise that is added to the gradient. If ``U`` is quadratic with curvature ``K``, then ``theta = -chi e``
with the response ``chi = 1 / (A + K)``, which is strictly causal. Let the power spectrum of ``e`` at the frequency ``w`` be

    Psi(w) = T cot(w / 2) Im A(e^{iw})                                                         (matched noise)

Then ``theta`` has the spectrum ``-T cot(w/2) Im chi``. Because the average of ``cot(w/2) sin(n w)`` over all frequencies is
one for every ``n >= 1``, the variance of ``theta`` is ``T chi(z=1) = T / (A(1) + K)``. This is exactly the variance of the
Gibbs distribution of ``U`` plus a Gaussian prior of precision ``A(1) = sum_j w_j / H_j(1)``, for every curvature and every
stable learning rate. Without weight decay ``Psi`` is ``T Re[(1 + z) / F]``. The proof is in docs/theory.md.

To compute the spectrum, write ``A = N / b`` with a Laurent polynomial ``N``, and let ``m_k`` be the coefficients of
``M(z) = N(z) b(z)``; on the unit circle ``b(z)`` is the complex conjugate of ``b(x)``. With the Chebyshev polynomials of the
second kind, ``sin(k w) cot(w/2) = (1 + cos w) U_{k-1}(cos w)``,

    Psi = T (1 + cos w) r(w) / |b|^2,        r = sum_{k>=1} (m_k - m_{-k}) U_{k-1}(cos w).

Matched noise exists if and only if ``r >= 0`` at every frequency. The spectral factor ``q`` of minimum phase, ``r = |q|^2``
(Wilson's Newton iteration), gives the filter that turns white noise ``xi`` of unit variance into matched noise:

    e = sqrt(T / 2) (1 + x) q(x) / b(x) xi.

For SGD and for heavy-ball momentum ``q`` and ``b`` are constants, so that the noise is proportional to the mean of two
consecutive draws. SGD with this noise is the method of Leimkuhler and Matthews 2013.

This module is arithmetic on coefficient tuples. In every polynomial the lowest power of ``x`` comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

Poly = tuple[float, ...]


class NoMatchedNoise(ValueError):
    """Raised where no noise that is added to the input of the linear links has the spectrum that the law asks for."""


def add(p: Sequence[float], q: Sequence[float]) -> Poly:
    """The sum of two polynomials.

    Example:
        >>> add((1.0, 2.0), (3.0,))
        (4.0, 2.0)
    """
    return tuple([x + y for x, y in zip_longest(p, q, fillvalue=0.0)])


def multiply(p: Sequence[float], q: Sequence[float]) -> Poly:
    """The product of two polynomials.

    Example:
        >>> multiply((1.0, 1.0), (1.0, -1.0))
        (1.0, 0.0, -1.0)
    """
    out = [0.0] * (len(p) + len(q) - 1)
    for i, pi in enumerate(p):
        for j, qj in enumerate(q):
            out[i + j] += pi * qj
    return tuple(out)


def trim(p: Sequence[float]) -> list[float]:
    """The polynomial without its trailing zero coefficients; one coefficient is always kept.

    Example:
        >>> trim((1.0, 0.5, 0.0))
        [1.0, 0.5]
    """
    p = list(p)
    while len(p) > 1 and p[-1] == 0.0:
        p.pop()
    return p


def is_stable(p: Sequence[float]) -> bool:
    """Whether the filter ``1 / p(x)`` is stable, decided by the Schur-Cohn step-down recursion.

    Args:
        p: the coefficients of the polynomial.

    Returns:
        True if every zero of ``p`` in the plane of ``z`` lies strictly inside the unit circle.

    Example:
        >>> is_stable((1.0, -0.9)), is_stable((1.0, -1.0))
        (True, False)
    """
    p = trim(p)
    # The recursion needs no roots, which would be inaccurate where several of them lie close to each other.
    while len(p) > 1:
        if p[0] == 0.0 or not abs(k := p[-1] / p[0]) < 1.0:
            return False
        p = [pi - k * pr for pi, pr in zip(p[:-1], reversed(p[1:]))]
    return p[0] != 0.0


def spectrum(b: Sequence[float], a: Sequence[float]) -> Poly:
    """The polynomial ``r`` of a chain without weight decay, where ``A = (z - 1) / F``.

    Args:
        b, a: numerator and denominator of ``F = b / a``, the learning rate included.

    Returns:
        ``(r_0, r_1, ...)``, where ``r(w) = r_0 + sum_k r_k (z^k + z^-k)``.

    Example:
        >>> [round(v, 6) for v in spectrum((0.1,), (1.0, -0.9))]  # heavy ball: lr (1 - momentum)
        [0.01]
    """
    return _excess(b, multiply((1.0, -1.0), a), 1)


def decay_spectrum(b: Sequence[float], numerator: Sequence[float]) -> Poly:
    """The polynomial that a weight decay adds to ``r``.

    Args:
        b: the numerator of ``F``.
        numerator: the numerator ``N`` of ``w / H = N / b``.

    Returns:
        Coefficients in the same form as those of :func:`spectrum`.
    """
    return _excess(b, numerator, 0)


def _excess(b: Sequence[float], numerator: Sequence[float], lead: int) -> Poly:
    """The coefficients ``(r_0, r_1, ...)`` of ``r = r_0 + sum_k r_k (z^k + z^{-k})`` for ``A = z^lead N(x) / b``."""
    odd = [0.0] * max(lead + len(b), len(numerator) - lead)  # m_k - m_{-k} of M = z^lead N(x) b(z)
    for i, ni in enumerate(numerator):
        for k, bk in enumerate(b):
            power = lead - i + k
            odd[abs(power)] += math.copysign(1.0, power) * ni * bk
    r = [0.0, 0.0]
    # On the circle U_{k-1} = z^{k-1} + z^{k-3} + ... + z^{-(k-1)}, hence r_{k-1} = odd_k + r_{k+1}.
    for k in range(len(odd) - 1, 0, -1):
        r.insert(0, odd[k] + r[1])
    return tuple(r[:-2])


def spectral_factor(r: Sequence[float]) -> Poly:
    """The polynomial ``q`` of minimum phase with ``|q|^2 = r`` on the unit circle, by Wilson's Newton iteration.

    Args:
        r: the coefficients of ``r = r_0 + sum_k r_k (z^k + z^-k)``.

    Returns:
        The coefficients of ``q``, as many as ``r`` has after coefficients of the size of rounding errors are dropped.

    Raises:
        NoMatchedNoise: ``r`` is negative somewhere on the circle.

    Example:
        >>> [round(v, 6) for v in spectral_factor((1.25, 0.5))]  # |1 + x / 2|^2 = 1.25 + 0.5 (z + 1/z)
        [1.0, 0.5]
    """
    scale = sum(map(abs, r))
    # A last coefficient that is only a rounding error would raise the degree of q and change nothing else.
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
        # Newton's equations are singular if r has a zero on the circle; this moves such a zero just inside.
        r[0] += 1e-12 * scale - lowest
    n = len(r)
    # The iteration keeps minimum phase, so it starts from a constant, whose phase is minimal.
    q = [math.sqrt(r[0])] + [0.0] * (n - 1)
    for _ in range(200):
        rows = [[(q[j - k] if j >= k else 0.0) + (q[j + k] if j + k < n else 0.0) for j in range(n)] for k in range(n)]
        rhs = [r[k] + sum(q[j] * q[j + k] for j in range(n - k)) for k in range(n)]
        new = _solve(rows, rhs)
        if max(abs(x - y) for x, y in zip(new, q, strict=True)) <= 1e-16 * math.sqrt(scale):
            return tuple(new)
        q = new
    return tuple(q)


def _solve(rows: list[list[float]], rhs: list[float]) -> list[float]:
    """Solve a dense linear system by Gaussian elimination with partial pivoting; ``rows`` are those of the matrix."""
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
    """The filter ``c(x) / d(x)`` that turns white noise of unit variance into matched noise at the temperature 1.

    Args:
        r: the sum of :func:`spectrum` and of every :func:`decay_spectrum`.
        b: the numerator of ``F``.
        order: 2 for matched noise. 1 for white noise whose power at every frequency is that of matched noise at ``w = 0``;
            then the variance that the chain samples is too large at finite learning rates.

    Returns:
        The coefficients of ``c`` and of ``d``, with ``d[0] = 1``.

    Raises:
        NoMatchedNoise: the spectrum is negative at some frequency (two strong momenta one after the other, for example),
            or ``1 / b`` is unstable.

    Example:
        >>> b, a = (0.1,), (1.0, -0.9)  # heavy ball, lr = 0.1
        >>> c, d = noise_filter(spectrum(b, a), b)
        >>> [round(v, 6) for v in c], d  # proportional to the mean of two draws: c_0 = c_1 = sqrt((1 - momentum) / (2 lr))
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
    """The variances that one branch ``gain / (1 - mu/z)`` of a response needs at one step, as numbers or 0-d tensors.

    Attributes:
        temperature: ``T_t``, in units of the loss.
        half: ``alpha_t^2 / T_t`` of :func:`scheduled_noise`, the variance per unit temperature with which the fresh draw enters
            this step, and with which it enters the next step once more.
        arrives: ``A_t / T_t`` of :func:`scheduled_noise`, the variance per unit temperature of the velocity that the next step
            finds.
        momentum: ``mu_t``, the factor by which the velocity is multiplied on its way to the next step.
    """

    temperature: Any
    half: Any
    arrives: Any
    momentum: Any


def level(rate: Any, momentum: Any, temperature: Any, decay: Any = 0.0) -> Level:
    """The :class:`Level` of momentum with decoupled weight decay, ``v <- mu v + g + e``, ``theta <- (1 - s) theta - rate v``.

    Weight decay needs no rule of its own, because ``theta`` then follows the same process as without weight decay at the
    momentum ``mu (1 - s)`` and the curvature ``K + (1 - mu) s / rate``.

    Args:
        rate: the learning rate ``lr``.
        momentum: ``mu``; 0 for SGD.
        temperature: ``T``, in units of the loss.
        decay: ``mu s / rate``, where ``s`` is the fraction of the parameters that one step removes.

    Returns:
        The level, whose entries are of the same kind as the arguments.

    Example:
        >>> level(0.5, 0.5, 1.0)  # alpha^2 = T (1 - mu) / (2 lr), A = T (1 + mu) / (2 lr)
        Level(temperature=1.0, half=0.5, arrives=1.5, momentum=0.5)
    """
    return Level(
        temperature, 0.5 * ((1.0 - momentum) / rate + decay), 0.5 * ((1.0 + momentum) / rate - decay), momentum
    )


class ScheduleCoefficients(NamedTuple):
    """The coefficients of one step of noise under a schedule, ``v <- velocity v + g + current w_t + previous w_{t-1}``.

    Attributes:
        current: the factor of the fresh draw ``w_t``.
        previous: the factor of the last step's draw ``w_{t-1}``.
        velocity: the factor of the last step's velocity.
        surplus: ``c_t`` of :func:`scheduled_noise`, which the next step needs.
    """

    current: Any
    previous: Any
    velocity: Any
    surplus: Any


def scheduled_noise(
    now: Level, before: Level, surplus: Any, momentum: Any, *, where: Callable[..., Any]
) -> ScheduleCoefficients:
    r"""Matched noise of one branch at a step whose learning rate, momentum or temperature differs from the last step's.

    The noise is exact wherever ``A_t`` below does not fall, so along every falling learning rate. docs/theory.md has the proofs
    at length.

    **Setting.** The branch is ``v_t = k v_{t-1} + g_t + e_t``, ``theta_{t+1} = theta_t - lr_t v_t``. Let ``q_t`` be the
    velocity that a step finds before its gradient and its fresh draw ``xi_t`` are added:

        v_t = q_t + g_t + alpha_t xi_t,        q_{t+1} = mu_t v_t + alpha_t xi_t,
        alpha_t^2 = T_t (1 - mu_t) / (2 lr_t),    A_t = T_t (1 + mu_t) / (2 lr_t).

    **Theorem.** At a constant temperature ``T`` every step leaves the law ``Var theta = T / K, Cov(theta, q) = -T / 2,
    Var q = A_t`` invariant, for every curvature ``K``. *Proof.* ``Cov(theta, v) = -T/2 + T = T/2`` and
    ``Var v = A - T K + T K + alpha^2 = T / lr``, hence ``Var theta' = T/K - lr T + lr T = T/K``. From
    ``Cov(theta', v) = T/2 - T = -T/2`` and ``Cov(theta', xi) = -lr alpha`` follows
    ``Cov(theta', q') = -mu T/2 - lr alpha^2 = -T/2``. Last, ``Var q' = mu^2 T / lr + (1 + 2 mu) alpha^2 = A``.

    **A falling rate.** Of the three moments only ``A_t`` depends on the learning rate and on the momentum. Where ``A`` grows
    (the rate falls or the momentum rises), the next step is therefore exact as well if an independent draw ``zeta_t`` of
    variance ``A_t - A_{t-1}`` is added to ``q_t``. The noise

        e_t = alpha_t xi_t + alpha_{t-1} xi_{t-1} + (A_t - A_{t-1})^(1/2) zeta_t

    takes two draws a step and is correlated between neighbouring steps only. The same process with one draw ``w_t`` a step is

        e_t = a_t w_t + b_t w_{t-1},    a_t^2 = alpha_t^2 + c_t,    b_t = alpha_{t-1}^2 / a_{t-1},
        c_t = A_t - A_{t-1} + s_{t-1},    s_t = alpha_t^2 c_t / (alpha_t^2 + c_t).

    The only number to remember is the *surplus* ``c_t >= 0``, the part of the variance of ``w_t`` that only the velocity
    needed. At constant rates it is 0.

    **The factor of the velocity** ``k`` is ``mu_{t-1}``. The current ``momentum`` ``m`` of the optimizer can be used instead
    where

        c_t = A_t - A_{t-1} - (alpha_{t-1} d)^2 + (1 - d)^2 s_{t-1} >= 0,    d = (m - mu_{t-1}) / (1 - mu_{t-1}).

    Then ``b_t`` is multiplied by ``1 - d``. ``Cov(theta, q)`` stays the same, because more of it comes from the velocity and
    less from the previous draw.

    **A rising rate** that the surplus does not cover (``c_t < 0``) has no exact noise: ``|Cov(theta, q)|`` would have to stay
    the same while ``Var q`` falls below ``A_{t-1} - s_{t-1}``, which is the least variance of any mixture of velocity and
    previous draw with that covariance. Of all mixtures of the variance ``A_t``, ``q`` multiplied by
    ``g = (A_t / (A_{t-1} - s_{t-1}))^(1/2)`` has the largest covariance. It is used, so that ``k = g mu_{t-1}``, ``b_t`` is
    multiplied by ``g``, and ``c_t = 0``. The next ``Var theta`` is then wrong by the factor
    ``1 - (1 - g) lr_t K (1 - lr_t K)``; docs/theory.md has a table of the errors.

    **A changing temperature** cannot be followed exactly, since ``Var theta`` would have to jump. The process at the lower of
    the two temperatures is continued exactly. The rest is an independent process: if ``T`` rises it starts from rest, and if
    ``T`` falls it gets no more noise. Therefore ``c_t`` counts ``A_t - A_{t-1}`` at the lower temperature. At constant learning
    rate and momentum ``K Var theta`` goes monotonically from the old temperature to the new one, as fast as the chain forgets
    its state. A velocity is never rescaled because of a temperature.

    Args:
        now, before: the levels of this step and of the last one. ``before.half = 0`` says that the last draw did not move the
            position, so that it does not enter again. ``before.momentum = -1`` says that the velocity has to be reversed, as
            after a step of learning rate 0.
        surplus: ``c_{t-1}``; 0 at the first step.
        momentum: ``m``, the factor by which the optimizer multiplies the last velocity, in units of the velocity in which the
            gradient enters with weight 1.
        where: ``where(condition, x, y)`` selects ``x`` where the condition holds, and ``y`` elsewhere; ``torch.where`` for
            tensors.

    Returns:
        The coefficients of this step, of the kind (numbers or tensors) of the levels.

    Example:
        >>> pick = lambda condition, x, y: x if condition else y
        >>> before, now = level(0.1, 0.5, 1.0), level(0.05, 0.5, 1.0)
        >>> first = scheduled_noise(now, before, 0.0, 0.5, where=pick)  # the rate halves: A grows by (1 + mu) / (2 lr) = 7.5
        >>> [round(x, 6) for x in first]
        [3.535534, 1.581139, 0.5, 7.5]
        >>> round(scheduled_noise(now, now, first.surplus, 0.5, where=pick).surplus, 6)  # the surplus decays step by step
        3.0
    """
    last_temperature = before.temperature
    alpha2 = last_temperature * before.half  # alpha_{t-1}^2
    a2 = alpha2 + surplus  # a_{t-1}^2
    share = alpha2 / where(a2 > 0, a2, 1.0)
    b, s = share * root(a2, where), surplus * share  # b_t and s_{t-1}
    least_variance = last_temperature * before.arrives - s
    growth = now.arrives - before.arrives
    c_own = last_temperature * growth + s  # c_t if the velocity is multiplied by mu_{t-1}
    mu = before.momentum
    d = (momentum - mu) / (1.0 - mu)
    c_optimizer = c_own - d * (d * alpha2 + (2.0 - d) * s)  # c_t if the velocity is multiplied by m
    # Without a draw to take less of (alpha_{t-1} = 0) another momentum would change Cov(theta, q).
    fits = (c_optimizer >= 0) & ((alpha2 > 0) | (momentum == mu))
    # Both branches of ``where`` are computed, so the divisor is made 1 where the quotient is not needed and could be 0/0.
    g = root(where(c_own < 0, last_temperature * now.arrives / where(c_own < 0, least_variance, 1.0), 1.0), where)
    excess = where(now.temperature < last_temperature, (last_temperature - now.temperature) * growth, 0.0)
    c = where(fits, c_optimizer, c_own) - excess
    c = where(c > 0, c, 0.0)
    return ScheduleCoefficients(
        current=root(now.temperature * now.half + c, where),
        previous=where(fits, 1.0 - d, g) * b,
        velocity=where(fits, momentum, g * mu),
        surplus=c,
    )


def white_noise(now: Level, before: Level, momentum: float, *, where: Callable[..., Any]) -> ScheduleCoefficients:
    """White noise (order 1) of one branch at a step whose learning rate or temperature differs from the last step's.

    The noise is chosen such that the variance of the velocity is ``T_t / lr_t`` after this step. If the learning rate rises by
    more than the factor ``1 / mu^2``, that variance would be exceeded without any noise, and the velocity is first rescaled.
    After a change of temperature the variance of ``theta`` stays between the old and the new value, but it need not change
    monotonically.

    Args:
        now, before: the levels of this step and of the last one; ``before.half = 0`` says that there is no velocity yet.
        momentum: ``mu``, which does not change.
        where: ``where(condition, x, y)`` selects ``x`` where the condition holds, and ``y`` elsewhere.

    Returns:
        The coefficients of this step. ``previous`` and ``surplus`` are 0, because white noise needs no earlier draw.

    Example:
        >>> now = level(0.1, 0.5, 1.0)  # at constant rates the variance is 2 T (1 - mu) / lr
        >>> k = white_noise(now, now, 0.5, where=lambda condition, x, y: x if condition else y)
        >>> round(k.current**2, 6), k.velocity
        (10.0, 0.5)
    """
    # The variances of the velocity per unit temperature: 1 / lr, and the part that comes from weight decay.
    variance, last_variance = (2.0 / (1.0 - momentum) * x.half for x in (now, before))
    rises = (last_variance > 0) & (variance < momentum * momentum * last_variance)
    k = where(rises, root(variance / where(last_variance > 0, last_variance, 1.0), where), momentum + 0.0 * variance)
    e = 2.0 / (1.0 + momentum) * (now.temperature * variance - k * k * before.temperature * last_variance)
    return ScheduleCoefficients(root(where(e > 0, e, 0.0), where), 0.0 * e, k, 0.0 * e)


def root(x: Any, where: Callable[..., Any]) -> Any:
    """The square root of a number or tensor; its derivative at 0 is 0 in place of infinity.

    Args:
        x: the numbers, none negative.
        where: selects by a condition, as in :func:`scheduled_noise`.

    Returns:
        The root, of the kind and shape of ``x``.
    """
    return where(x == 0, 0.0, where(x == 0, 1.0, x) ** 0.5)
