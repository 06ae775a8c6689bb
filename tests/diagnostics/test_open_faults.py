"""A fault of the heat guard that still stands, with the right answer; the issue "One adviser" removes the mark."""

import warnings

import pytest
import torch
from torch import nn

import bayesopt_chain as bc


@pytest.mark.xfail(strict=True, reason="issue One adviser: the guard is to look at windows of fixed length")
def test_batches_that_heat_nineteen_fold_are_said_within_620_steps():
    """20 epochs of 31 batches at lr .1: 18.9 times the variance of the posterior."""
    torch.manual_seed(0)
    x, y, model = torch.randn(1000, 5), torch.randn(1000, 1), nn.Linear(5, 1)
    optimizer = bc.optim.SGHMC(model.parameters(), lr=0.1, temperature=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            for rows in torch.randperm(1000).split(32):
                optimizer.zero_grad()
                (0.5 * (model(x[rows]) - y[rows]) ** 2).mean().backward()
                optimizer.step()
    assert any("variance" in str(x.message) for x in caught)
