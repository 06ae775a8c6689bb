"""The contestants, each by one call: what a user has today, and the posterior.

All are networks of two hidden layers of 50 units, trained by Adam in the same batches at a rate found in the same way, with a
stop and a scale of noise or logits that held-out data choose. Cost is counted in gradients of a network for each datum. The
posterior goes first; the ensemble, whose members also get the Laplace posteriors, then trains as much longer as makes its cost
the same. The single network is trained once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.demo.tasks import Task
from bayesopt_chain.ensemble.laplace import LaplaceEnsemble

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
    spent = posterior.report.passes
    once = sum(spent.get(stage, 0.0) for stage in ("rate", "pilot", "scores", "modes"))
    longer = math.ceil(steps * sum(spent.values()) / once)
    laplace = bc.posterior_ensemble(
        make_model, task.train, likelihood, members=MEMBERS, steps=longer, method="laplace", **same
    )
    assert isinstance(laplace, LaplaceEnsemble) and laplace.modes is not None
    network = bc.posterior_ensemble(
        make_model, task.train, likelihood, members=1, steps=steps, method="ensemble", **same
    )
    return {
        NETWORK: Contestant(network.predict, sum(network.report.passes.values())),
        **{
            name: Contestant(fitted.predict, MEMBERS * sum(fitted.report.passes.values()))
            for name, fitted in ((LAPLACE, laplace), (ENSEMBLE, laplace.modes), (POSTERIOR, posterior))
        },
    }
