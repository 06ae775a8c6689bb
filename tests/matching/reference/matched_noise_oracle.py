"""An independent oracle for the matched-noise law, with numpy and scipy only; it shares no code with the library.

A chain of linear links turns a gradient sequence g into displacements, ``theta <- theta - F g`` with ``F = lr b / a``. Noise
of power spectrum ``T Re[(1 + e^{iw}) / F(e^{iw})]`` added to the gradient samples ``exp(-U / T)`` of every quadratic ``U``:
``stationary_variance`` solves the Lyapunov equation of the closed loop.
"""

import numpy as np
from scipy.linalg import solve_discrete_lyapunov


def stationary_variance(b, a, lr, curvature, noise):
    """Var(theta) of theta <- theta - F(curvature * theta + e), e = (c/bn) xi, by simulation in state space."""
    c, bn = noise
    c = c / bn[0]
    a, b, bn = np.asarray(a, float) / a[0], np.asarray(b, float) / a[0], bn / bn[0]
    n_in, n_out, n_xi, n_e = len(b) - 1, len(a) - 1, len(c) - 1, len(bn) - 1
    n = 1 + n_in + n_out + n_xi + n_e  # theta, past inputs, past outputs, past xi, past e
    A, B = np.zeros((n, n)), np.zeros((n, 1))
    T, I, O, X, E = 0, 1, 1 + n_in, 1 + n_in + n_out, 1 + n_in + n_out + n_xi
    e_row, e_xi = np.zeros(n), c[0]
    for k in range(n_xi):
        e_row[X + k] += c[k + 1]
    for k in range(n_e):
        e_row[E + k] -= bn[k + 1]
    u_row, u_xi = e_row.copy(), e_xi
    u_row[T] += curvature
    d_row, d_xi = b[0] * u_row, b[0] * u_xi
    for k in range(n_in):
        d_row[I + k] += b[k + 1]
    for k in range(n_out):
        d_row[O + k] -= a[k + 1]
    A[T, T] = 1
    A[T] -= lr * d_row
    B[T] = -lr * d_xi
    for start, count, row, xi in ((I, n_in, u_row, u_xi), (O, n_out, d_row, d_xi), (E, n_e, e_row, e_xi)):
        if count:
            A[start], B[start] = row, xi
            for k in range(1, count):
                A[start + k, start + k - 1] = 1
    if n_xi:
        B[X] = 1
        for k in range(1, n_xi):
            A[X + k, X + k - 1] = 1
    if max(abs(np.linalg.eigvals(A))) >= 1:
        return np.nan
    return solve_discrete_lyapunov(A, B @ B.T)[0, 0]


def variance_along(lr, curvature, velocity, current, previous):
    """Var(theta) after every step of v <- velocity v + curvature theta + current w_t + previous w_{t-1}, theta <- theta - lr v.

    All but the curvature are sequences over the steps. It starts in the stationary law of the first step, held for ever.
    """
    C, out = None, []
    for l, k, a, b in zip(lr, velocity, current, previous):
        F = np.array([[1 - l * curvature, -l * k, -l * b], [curvature, k, b], [0.0, 0.0, 0.0]])
        G = np.array([-l * a, a, 1.0])
        if C is None:
            assert max(abs(np.linalg.eigvals(F))) < 1
            C = solve_discrete_lyapunov(F, np.outer(G, G))
        C = F @ C @ F.T + np.outer(G, G)
        out.append(C[0, 0])
    return np.array(out)
