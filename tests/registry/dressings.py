"""Transforms that ask for a draw, a curvature, a loss or several chains, dressed as plain ones for the laws."""

import optree
import torch
from torchopt.base import GradientTransformation

from bayesopt_chain.precision import Diagonal, Root


def _each(function, *trees):
    return optree.tree_map(lambda *xs: None if xs[0] is None else function(*xs), *trees, none_is_leaf=True)


def drawing(tx, **further):
    """Gives ``update`` the gradient at its draw of a loss with unit curvature, for the gradient it gets at the mean."""

    def update(updates, state, *, params=None, inplace=True, **extra):
        draw = tx.sample(state, params)
        grads = _each(lambda g, theta, p: g + (theta - p), updates, draw.params, params)
        for name, make in further.items():
            extra[name] = make(grads, params)
        return tx.update(grads, state, params=params, draw=draw, inplace=inplace, **extra)

    return GradientTransformation(tx.init, update)


def fed(tx, **keywords):
    """Gives ``update`` further keywords, computed from gradients and parameters."""

    def update(updates, state, *, params=None, inplace=True, **extra):
        more = {k: fn(updates, params) for k, fn in keywords.items()}
        return tx.update(updates, state, params=params, inplace=inplace, **more, **extra)

    return GradientTransformation(tx.init, update)


def two_chains(tx):
    """Gives a transform of stacked chains two of them, the second half a unit off, and shows the first."""

    def beside(tree, distance):
        return optree.tree_map(lambda p: torch.stack([p, p + distance]), tree)

    def init(params):
        return tx.init(beside(params, 0.5))

    def update(updates, state, *, params=None, inplace=True, **extra):
        moves, state = tx.update(beside(updates, 0.0), state, params=beside(params, 0.5), inplace=inplace, **extra)
        return optree.tree_map(lambda x: x[0], moves), state

    return GradientTransformation(init, update)


def unit_diagonal(grads, params):
    return Diagonal(optree.tree_map(torch.ones_like, params), torch.tensor(4.0, dtype=torch.float64))


def unit_rows(grads, params):
    """A row for each parameter, so that no row mixes leaves."""
    leaves, spec = optree.tree_flatten(params)
    size = sum(p.numel() for p in leaves)
    rows = torch.eye(size, dtype=leaves[0].dtype, device=leaves[0].device).split([p.numel() for p in leaves], 1)
    shaped = [row.reshape(-1, *p.shape).to(p.dtype) for row, p in zip(rows, leaves)]
    return Root(optree.tree_unflatten(spec, shaped), torch.tensor(4.0, dtype=torch.float64))


def two_rows(grads, params):
    rows = optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)
    return Root(rows, torch.tensor(4.0, dtype=torch.float64))


def like_params(value: float):
    """A keyword that is a tree like the gradients, filled with ``value``."""
    return lambda updates, params: optree.tree_map(lambda x: torch.full_like(x, value), updates)


def stacked_losses(updates, params):
    """Half the squared norm of each of two stacked chains."""
    return sum((p.detach() ** 2).reshape(2, -1).sum(1) for p in optree.tree_leaves(params)) / 2


def half_square(updates, params):
    """Half the squared norm of all parameters."""
    return sum((p.detach() ** 2).sum() for p in optree.tree_leaves(params)) / 2
