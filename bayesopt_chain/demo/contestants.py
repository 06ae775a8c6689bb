"""The contestants, each by one call: what a user has today, and the posterior.

All are networks of two hidden layers of 50 units, trained by Adam in the same batches at a rate found in the same way, for as
many steps, with a scale of noise or logits that held-out data choose. Cost is counted in gradients of a network for each datum.
The members of the ensemble also get the Laplace posteriors; the single network is trained once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.demo.tasks import Task

METHODS: tuple[str, ...] = ("one network", "last-layer Laplace", "deep ensemble", "posterior")
NETWORK, LAPLACE, ENSEMBLE, POSTERIOR = METHODS
MEMBERS = 4


class Contestant(NamedTuple):
    """From inputs ``[N, D]`` to a predictive distribution, and what it cost, in gradients of a network for each datum."""

    predict: Callable[[Tensor], bc.likelihoods.Predictive]
    cost: float


def contestants(task: Task, seed: int, steps: int) -> dict[str, Contestant]:
    """All of ``METHODS``, fitted."""
    likelihood = bc.likelihoods.categorical() if task.classes else bc.likelihoods.gaussian()

    def make_model() -> nn.Module:
        hidden = [nn.Linear(task.train[0].shape[1], 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(50, task.classes or 1))

    same = {"seed": seed, "progress": False}
    posterior = bc.posterior_ensemble(make_model, task.train, likelihood, members=MEMBERS, steps=steps, **same)
    plain = bc.posterior_ensemble(
        make_model, task.train, likelihood, members=MEMBERS, steps=steps, prior_precision=1.0, **same
    )
    network = bc.posterior_ensemble(
        make_model, task.train, likelihood, members=1, steps=steps, prior_precision=1.0, **same
    )
    laplace = [fit_of(module, likelihood, task) for module in plain.modules()]
    laplace_cost = MEMBERS * (sum(plain.report.passes.values()) + 1 / 3)

    def mixed(x: Tensor) -> bc.likelihoods.Predictive:
        """Of the Laplace posteriors of all members, each by the nodes that its likelihood has for Gaussian outputs."""
        nodes, logs = zip(*(fit.likelihood.nodes(*fit.outputs([(x, None)])) for fit in laplace))
        scale = sum(float(fit.likelihood_scale) for fit in laplace) / len(laplace)
        used = laplace[0].model.likelihood.scaled(scale) if likelihood.has_noise_scale else likelihood
        weights = torch.cat([log - math.log(len(laplace)) for log in logs])
        return used.mixture(torch.cat(nodes), weights)

    return {
        NETWORK: Contestant(network.predict, sum(network.report.passes.values())),
        LAPLACE: Contestant(mixed, laplace_cost),
        ENSEMBLE: Contestant(plain.predict, MEMBERS * sum(plain.report.passes.values())),
        POSTERIOR: Contestant(posterior.predict, MEMBERS * sum(posterior.report.passes.values())),
    }


def fit_of(module: nn.Module, likelihood: bc.likelihoods.Likelihood, task: Task) -> bc.posterior.FittedLaplace:
    """The last-layer Laplace posterior of a network, its prior and noise by the evidence."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fit_laplace: on training data")
        return bc.fit_laplace(module, likelihood, [task.train])
