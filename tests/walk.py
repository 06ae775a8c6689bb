"""A chain's own updates, one after another."""

import itertools

import optree
import torch
import torchopt

from bayesopt_chain.testing import NormalProbe


def walk(tx, params, gradient, steps, state=None, inplace=False, **keywords):
    """After each update of ``tx`` the parameters and the state; ``gradient`` and keywords are functions of the parameters."""
    state = tx.init(params) if state is None else state
    for _ in range(steps):
        extra = {name: of(params) for name, of in keywords.items()}
        updates, state = tx.update(gradient(params), state, params=params, inplace=inplace, **extra)
        params = torchopt.apply_updates(params, updates, inplace=inplace)
        yield params, state


def end_of(*args, **kwargs):
    """Parameters and state at the end of :func:`walk`."""
    *_, last = walk(*args, **kwargs)
    return last


def descend(optimizer, loss):
    """One step of an optimizer of torch's down a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def path_of(tx, theta, gradient, normals):
    """The parameters after each update of a chain whose draws are given, a row for each update."""
    state, path = tx.init(theta), []
    for row in normals:
        with NormalProbe(row):
            updates, state = tx.update(gradient(theta), state, params=theta, inplace=False)
        theta = theta + updates
        path.append(theta)
    return torch.stack(path)


def average(of, tx, params, gradient, steps, burn_in, **keywords):
    """The mean of ``of(parameters)`` behind the first ``burn_in`` of some updates in place, and the state at the end."""
    total, params = 0.0, optree.tree_map(torch.clone, params)
    path = walk(tx, params, gradient, steps, inplace=True, **keywords)
    for now, state in itertools.islice(path, burn_in, None):
        total, last = total + of(now), state
    return total / (steps - burn_in), last


def variances(tx, curvature, updates):
    """The variance of one parameter of that curvature after every update, exactly, where it starts at 0 and is linear in draws.

    It is then the sum of the squared responses to each draw: element ``j`` of a vector of parameters is given the draw 1 at
    update ``j`` and 0 else.
    """
    x, out = torch.zeros(updates, dtype=torch.float64), []
    state = tx.init(x)
    for draw in torch.eye(updates, dtype=torch.float64):
        with NormalProbe(draw):
            moves, state = tx.update(curvature * x, state, params=x, inplace=True)
        x += moves
        out.append((x**2).sum())
    return torch.stack(out)
