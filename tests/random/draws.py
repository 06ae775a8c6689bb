"""Draws of the counter-based stream in one call, as tests ask for them."""

import torch

from bayesopt_chain.random.philox import draw_elements, in_tensors, parts_of_leaves, whole_leaves


def leaf(key, step, size, draw, dtype, kind="gaussian"):
    """A whole leaf."""
    return draw_elements(key, step, whole_leaves([size], [draw]), dtype, kind)[0]


def leaf_in_tensors(key, step, size, draw, dtype):
    """A whole leaf's normals by tensor operations."""
    return in_tensors(key, step, whole_leaves([size], [draw]), dtype)


def parts(key, step, runs, draws, dtype, kind="gaussian"):
    """Runs of leaves."""
    return draw_elements(key, step, parts_of_leaves(tuple(runs), tuple(draws)), dtype, kind)


def cut(x, runs):
    """Runs of a whole leaf that has been drawn."""
    return torch.cat([x[..., a : a + n] for a, n in runs], dim=-1)
