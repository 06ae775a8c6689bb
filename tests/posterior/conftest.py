"""What several of these tests need: a network after some steps of Adam, and a Gaussian's moments as matrices."""

import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import flatten
from tests.walk import descend

FILTERS = ("dense", "diagonal", "low_rank")


def trained(net, likelihood, x, y, steps, lr=0.02, **options):
    optimizer = torch.optim.Adam(net.parameters(), lr, **options)
    for _ in range(steps):
        descend(optimizer, likelihood.nll(net(x), y).mean())
    return net.eval()


def moments(posterior):
    """Mean and covariance across all parameters."""
    return flatten(posterior.mean, posterior.mean), torch.linalg.inv(posterior.precision.to_dense())


def filter_of(name, *args, rank=5, **options):
    return getattr(bc.ekf, name)(*args, **options, **({"rank": rank} if name == "low_rank" else {}))
