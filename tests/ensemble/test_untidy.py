"""Untidy data: units, outputs of different noise, duplicates, a constant that does better."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc


def ensemble(x, y, outputs):
    torch.manual_seed(0)

    def make():
        return nn.Sequential(nn.Linear(x.shape[1], 8), nn.Tanh(), nn.Linear(8, outputs))

    return bc.posterior_ensemble(make, (x, y), bc.likelihoods.gaussian(), members=2, steps=300, lr=0.01, progress=False)


@pytest.mark.slow
def test_each_output_has_a_noise_of_its_own():
    """One of variance .0025 and one of 1: intervals of .9 cover .8 to .97 of 300 targets of either."""
    torch.manual_seed(0)
    x = torch.rand(300, 1) * 2 - 1
    y = torch.cat([x + 0.05 * torch.randn(300, 1), -x + torch.randn(300, 1)], 1)
    low, high = ensemble(x, y, 2).predict(x).interval(0.9)
    cover = ((low < y) & (y < high)).double().mean(0)
    assert bool(((cover > 0.8) & (cover < 0.97)).all()), cover


@pytest.mark.slow
def test_targets_of_a_million_are_fitted():
    torch.manual_seed(0)
    x = torch.randn(200, 3)
    y = 1e6 + 1e5 * x[:, :1] + 1e4 * torch.randn(200, 1)
    found = ensemble(x, y, 1).predict(x)
    assert float((found.mean - y).square().mean() / y.var()) < 0.1
