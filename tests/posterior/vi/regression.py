"""One Bayesian linear regression with a known posterior, for all methods."""

from typing import NamedTuple

import torch

import bayesopt_chain as bc

N = 20
PRIOR, VARIANCE = 0.7, 0.25
likelihood = bc.likelihoods.gaussian(VARIANCE)


class Problem(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    start: dict
    prior: float
    variance: float

    @property
    def features(self):
        """The Jacobian in (b, w), ``[N, 4]``."""
        return torch.cat([torch.ones(N, 1), self.x], 1)

    def tree(self, flat):
        return {"b": flat[0], "w": flat[1:].reshape(3, 1)}


def problem():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator) @ torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    y = x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.3 + 0.5 * torch.randn(N, 1, generator=generator)
    return Problem(x, y, {"b": torch.zeros(()), "w": torch.zeros(3, 1)}, PRIOR, VARIANCE)


def forward(params, batch):
    return batch[0] @ params["w"] + params["b"]


def negative_log_likelihood(params, batch):
    return likelihood.nll(forward(params, batch), batch[1]).mean()


def log_posterior_loss(params, batch):
    squares = params["w"].square().sum() + params["b"].square()
    return negative_log_likelihood(params, batch) + 0.5 * PRIOR * squares / N


def exact(data):
    """Mean and covariance of the posterior, in optree order."""
    precision = data.features.T @ data.features / data.variance + data.prior * torch.eye(4)
    return torch.linalg.solve(precision, data.features.T @ data.y[:, 0] / data.variance), torch.linalg.inv(precision)
