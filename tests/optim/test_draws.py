"""The noise that is really drawn: fresh at every step, independent between leaves and streams, of the right size."""

import math

import pytest
import torch

import bayesopt_chain as bc
from tests.optim.stepping import walk

N, T = 4000, 0.7
FIVE_SIGMA = 5 * math.sqrt(2 / N)  # of a variance estimated from N independent normals: false alarms 6e-7 a check


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("SGLD", dict(lr=0.5)),
        ("SGHMC", dict(lr=0.2)),
        ("SGD", dict(lr=0.2, momentum=0.8, nesterov=True)),
        ("RMSprop", dict(lr=0.002, momentum=0.5, freeze_after=1)),  # D = 0.01: an effective lr of 0.2
    ],
)
def test_real_draws_give_the_variance_T_over_curvature(name, kwargs):
    """4000 independent chains on a unit quadratic, the variance over chains after 200 steps."""
    theta = torch.full((N,), 0.1, requires_grad=True)
    optimizer = getattr(bc.optim, name)([theta], temperature=T, **kwargs)
    assert abs(walk(optimizer, 200, torch.clone).square().mean() / T - 1.0) < FIVE_SIGMA
