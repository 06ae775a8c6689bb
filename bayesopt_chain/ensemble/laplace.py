"""Laplace: of every mode, :func:`bayesopt_chain.fit_laplace` of its last layer, and predictions by the linearised outputs.

The outputs of a member are Gaussian, and stand in the mixture by the nodes that its likelihood has for them
(:meth:`bayesopt_chain.likelihoods.Likelihood.nodes`). Prior and noise are tuned by the evidence: no held-out scale is put on
top.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bayesopt_chain import batches
from bayesopt_chain.ensemble.cost import FORWARD, passes
from bayesopt_chain.ensemble.ensemble import Ensemble
from bayesopt_chain.ensemble.recipe import Plan, finished, held_of, train
from bayesopt_chain.likelihoods import Predictive
from bayesopt_chain.modules.functional import write_back
from bayesopt_chain.posterior import FittedLaplace, fit_laplace
from bayesopt_chain.posterior.predictions import batches_of

AT_ONCE = 1000


@dataclass(frozen=True)
class LaplaceEnsemble(Ensemble):
    """A Laplace posterior around every member; made by ``method="laplace"``.

    Attributes:
        fits: one :class:`bayesopt_chain.FittedLaplace` a member.
        modes: the deep ensemble that the fits are of, with a held-out scale: what ``method="ensemble"`` returns.
    """

    fits: tuple[FittedLaplace, ...] = ()
    modes: Ensemble | None = None

    def predict(self, data: Any) -> Predictive:
        """The predictive distribution of new targets; see :meth:`Ensemble.predict`."""
        given = list(batches_of(data))
        if not given:
            raise ValueError("predict: data has no batches")
        outputs, logs, noises = [], [], []
        for fit in self.fits:
            parts = [fit.likelihood.nodes(*fit.outputs([(x, None)])) for x, _ in given]
            size = max(len(nodes) for nodes, _ in parts)
            if any(len(nodes) != size for nodes, _ in parts):  # finer nodes for some inputs: take all data at once
                found = fit.outputs([(x, None) for x, _ in given])
                parts = [fit.likelihood.nodes(*found)]
            outputs.append(torch.cat([nodes for nodes, _ in parts], 1))
            logs.append(parts[0][1])
            noises.append(fit.likelihood_scale)
        logs = [x.to(outputs[0]) - torch.tensor(float(len(self.fits)), device="cpu").log() for x in logs]
        scale = torch.stack(noises).mean(0)
        likelihood = self.fits[0].model.likelihood.scaled(scale) if self.likelihood.has_noise_scale else self.likelihood
        return likelihood.mixture(torch.cat(outputs), torch.cat(logs))

    def save(self, path: str | Path) -> None:
        """Refused: write the fits themselves.

        Args:
            path: not used.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "save: a Laplace ensemble is kept by its fits: bc.save(path, fit.state_dict()) for each of ensemble.fits, or "
            "posterior_ensemble(..., path=), which returns at once when called again"
        )


def laplace(plan: Plan) -> Ensemble:
    """Training, and a fit of every mode."""
    plan, found = train(plan)
    problem = plan.problem
    made = finished(plan, found, [held_of(found, found.pilots)], [found.modes], [], {})
    params, buffers = found.modes.last()
    leaves, spec = batches.flatten((problem.data.inputs, problem.data.targets))
    loader = [spec.unflatten([x[i : i + AT_ONCE] for x in leaves]) for i in range(0, problem.data.size, AT_ONCE)]
    fits = []
    for m in range(problem.count):
        module = copy.deepcopy(problem.members.still.module)
        write_back(module, {k: x[m] for k, x in params.items()}, {k: x[m] for k, x in buffers.items()})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fit_laplace: on training data")
            fits.append(fit_laplace(module, found.likelihood, loader))
    # one pass for features and curvature together
    cost = passes(1, problem.data.size, problem.data.size, FORWARD)
    said = "laplace: the last layer of every mode, its prior and noise by the evidence."
    report = replace(made.report, passes={**made.report.passes, "laplace": cost}, said=[*made.report.said[:-1], said])
    return LaplaceEnsemble(made.levels, made.weights, 1.0, made.likelihood, report, made.problem, tuple(fits), made)
