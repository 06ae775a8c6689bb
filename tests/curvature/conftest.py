"""Models small enough for the naive construction of their curvature."""

import optree
import pytest
import torch
from torch import nn
from torch.func import functional_call


@pytest.fixture(autouse=True)
def doubles(double_precision):
    """Of every test here."""


def of_module(module):
    """A module as (forward, params)."""
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return lambda params, batch: functional_call(module, params, (batch[0],)), params


def naive_rows(forward, params, batch, factors):
    """Every J_b^T s_kb, `[K, B, P]`, from the whole Jacobian."""
    leaves, structure = optree.tree_flatten(params)
    outputs = forward(params, batch)
    jacobians = torch.func.jacrev(
        lambda *leaves: forward(optree.tree_unflatten(structure, leaves), batch), tuple(range(len(leaves)))
    )(*leaves)
    flat = torch.cat([j.reshape(*outputs.shape[:1], outputs[0].numel(), -1) for j in jacobians], -1)
    s = factors(outputs, batch[1])
    return torch.einsum("kbc,bcp->kbp", s.reshape(s.shape[0], s.shape[1], -1), flat)


def naive(forward, params, batch, factors):
    rows = naive_rows(forward, params, batch, factors).flatten(0, 1)
    return rows.T @ rows


def block_diagonal(matrix, params):
    """The leaves' diagonal blocks of a dense matrix."""
    mask = torch.block_diag(*[torch.ones(leaf.numel(), leaf.numel()) for leaf in optree.tree_leaves(params)])
    return matrix * mask


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, dilation=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.Linear(4, 3),
    ).eval()
