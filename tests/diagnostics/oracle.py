"""Exact answers for small problems, by other ways than the library's: every state number probed, every order enumerated.

``affine`` reads ``x' = M x - Gamma n + F xi`` off a chain on a quadratic loss, ``x`` being all parameters and all that
the state holds. The orders are then gone through one by one, with the actual noises of the batches.
"""

import itertools

import torch
from scipy.linalg import solve_discrete_lyapunov

from bayesopt_chain.testing._linear_system import OneUpdate, closed_loop

DOUBLE = torch.float64


def affine(tx, curvature, like):
    """``M, Gamma, F`` with the parameters first."""
    one, eye = OneUpdate(tx, like), torch.eye(len(curvature), dtype=DOUBLE)
    pushes = [[v.reshape(p.shape) for v, p in zip(e.split([p.numel() for p in one.params]), one.params)] for e in eye]
    moved = [torch.cat([x.reshape(-1) for part in one(gradient=push) for x in part]) for push in pushes]
    gamma = -torch.stack(moved, 1)
    reached = (gamma != 0).any(1)
    reached[: len(eye)] = True
    loop = closed_loop(tx, curvature, like, varied=reached)
    keep = loop.varies
    return loop.A[keep][:, keep], gamma[keep], loop.B[keep]


def lyapunov(M, Q):
    return torch.as_tensor(solve_discrete_lyapunov(M.numpy(), Q.numpy(), method="direct"))


def enumerated(M, gamma, noises, order):
    """Covariance that batches with the gradients ``noises`` (rows, sum zero) add: mean over the phases of a period, and
    at its end.

    ``"fixed"``: the mean over all orders of the square of the bias.
    """
    K = len(noises)
    orders = list(itertools.permutations(range(K)))
    if order == "independent":
        X = lyapunov(M, gamma @ (noises.T @ noises / K) @ gamma.T)
        return X, X
    paths = []
    for chosen in orders:
        used = [*chosen, *reversed(chosen)] if order == "palindrome" else chosen
        x, path = torch.zeros(len(M), dtype=DOUBLE), []
        for j in used:
            x = M @ x - gamma @ noises[j]
            path.append(x)
        paths.append(torch.stack(path))
    paths = torch.stack(paths)  # [orders, L, n]
    L = paths.shape[1]
    if order == "fixed":
        start = torch.linalg.solve(torch.eye(len(M), dtype=DOUBLE) - torch.linalg.matrix_power(M, L), paths[:, -1].T).T
        X = torch.zeros_like(M)
        for t in range(L):
            x = paths[:, t] + start @ torch.linalg.matrix_power(M, t + 1).T
            X += x.T @ x / len(orders) / L
        return X, X
    return over_phases(M, [paths[:, t].T @ paths[:, t] / len(orders) for t in range(L)])


def by_recursion(M, gamma, C, K, order):
    """What batches of covariance ``C`` (with replacement) add on average over an epoch of ``K``, step by step."""
    if order == "independent":
        return lyapunov(M, gamma @ C @ gamma.T * (1 - 1 / K))
    S, R, phases = torch.zeros_like(M), torch.zeros_like(gamma), []
    for _ in range(K):
        S, R = M @ S @ M.T + gamma @ C @ gamma.T, M @ R + gamma
        phases.append(S - R @ C @ R.T / K)
    return over_phases(M, phases)[0]


def over_phases(M, phases):
    """Mean over the phases of a period of the covariance that is added in it, ``phases``, and at its end."""
    X, total = lyapunov(torch.linalg.matrix_power(M, len(phases)), phases[-1]), torch.zeros_like(M)
    for Q in phases:
        X = M @ X @ M.T
        total += X + Q
    return total / len(phases), X + phases[-1]


def worst_ratio(full, mean):
    """The largest ratio of variances of any direction that ``full`` has."""
    values, vectors = torch.linalg.eigh(full)
    keep = values > 1e-7 * values.amax()
    white = vectors[:, keep] / values[keep].sqrt()
    return torch.linalg.eigvalsh(white.T @ mean @ white).amax().item()
