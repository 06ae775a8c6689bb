"""Transforms that need a draw or curvature, dressed as plain ones for the laws that every link obeys."""

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


def filtering(tx, make):
    """Gives ``update`` an increment over the parameters."""

    def update(updates, state, *, params=None, inplace=True, **extra):
        return tx.update(updates, state, params=params, curvature=make(updates, params), inplace=inplace, **extra)

    return GradientTransformation(tx.init, update)


def unit_diagonal(grads, params):
    return Diagonal(optree.tree_map(torch.ones_like, params), torch.tensor(4.0, dtype=torch.float64))


def unit_rows(grads, params):
    """A row for each parameter, so that no row mixes leaves."""
    leaves, spec = optree.tree_flatten(params)
    rows = torch.eye(sum(p.numel() for p in leaves), dtype=leaves[0].dtype).split([p.numel() for p in leaves], 1)
    shaped = [row.reshape(-1, *p.shape).to(p.dtype) for row, p in zip(rows, leaves)]
    return Root(optree.tree_unflatten(spec, shaped), torch.tensor(4.0, dtype=torch.float64))


def two_rows(grads, params):
    rows = optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)
    return Root(rows, torch.tensor(4.0, dtype=torch.float64))


def per_sample(grads, params):
    """Two data whose mean gradient is the given one."""
    filled = _each(lambda g, p: torch.zeros_like(p) if g is None else g, params, params)
    filled = optree.tree_map(
        lambda g, p: None if p is None else torch.stack([p + 1, p - 1]) + (0 if g is None else g),
        grads,
        params,
        none_is_leaf=True,
    )
    return filled
