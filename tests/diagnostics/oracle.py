"""Exact answers for small problems, by other ways than the library's: every state number probed, every order enumerated.

``affine`` reads ``x' = M x - Gamma n + F xi`` off a chain on a quadratic loss, ``x`` being all parameters and all that
the state holds. The orders are then gone through one by one, with the actual noises of the batches.
"""

import itertools

import optree
import torch
from scipy.linalg import solve_discrete_lyapunov

from bayesopt_chain.testing import NormalProbe

DOUBLE = torch.float64


def affine(tx, curvature, like):
    """``M, Gamma, F`` with the parameters first."""
    leaves, spec = optree.tree_flatten(like)
    sizes = [leaf.numel() for leaf in leaves]
    d = sum(sizes)

    def tree(v):
        return optree.tree_unflatten(spec, [p.reshape(t.shape) for p, t in zip(v.split(sizes), leaves)])

    zero = torch.zeros(d, dtype=DOUBLE)
    state = tx.init(tree(zero))
    with NormalProbe():
        for _ in range(2):
            _, state = tx.update(tree(zero), state, params=tree(zero), inplace=False)
    entries, state_spec = optree.tree_flatten(state)
    moving = [i for i, t in enumerate(entries) if torch.is_tensor(t) and t.is_floating_point()]
    base = torch.cat([zero, *(entries[i].reshape(-1).to(DOUBLE) for i in moving)])

    def advance(x, n, xi):
        now = list(entries)
        theta, *parts = x.split([d, *(entries[i].numel() for i in moving)])
        for i, part in zip(moving, parts):
            now[i] = part.reshape(entries[i].shape)
        with NormalProbe(xi) as probe:
            updates, new = tx.update(
                tree(curvature @ theta + n), optree.tree_unflatten(state_spec, now), params=tree(theta), inplace=False
            )
        new = optree.tree_leaves(new)
        move = torch.cat([u.reshape(-1) for u in optree.tree_leaves(updates)])
        return torch.cat([theta + move, *(new[i].reshape(-1) for i in moving)]), probe.drawn

    origin, drawn = advance(base, zero, None)
    eye = torch.eye(len(base), dtype=DOUBLE)
    gamma = torch.stack([origin - advance(base, e, None)[0] for e in torch.eye(d, dtype=DOUBLE)], dim=1)
    noise = torch.stack([advance(base, zero, e)[0] - origin for e in torch.eye(drawn, dtype=DOUBLE)], dim=1)
    reached = (gamma != 0).any(1) | (noise != 0).any(1)
    reached[:d] = True
    M = torch.stack([advance(base + e, zero, None)[0] - origin for e in eye], dim=1)
    for _ in range(4):
        reached |= (M[:, reached] != 0).any(1)
    keep = reached.nonzero().squeeze(1)
    return M[keep][:, keep], gamma[keep], noise[keep]


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
