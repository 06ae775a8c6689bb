"""What is left to rules where nothing is said: batch size, steps, the noise and the rate to train with.

batch_size    all data up to 128 of them, else the power of two nearest to N / 16, from 32 to 256
steps         300 passes over the data, from 4,000 to 20,000 steps
noise         of Gaussian targets 0.02 of each output's variance while training (held-out data choose the one to predict with)
lr            of Adam the largest of 0.01, 0.003 and 0.001 that comes within 5 % of the best descent of the loss, each tried on
              one network for a tenth of the steps (3 / (10 M) of the training, which the report counts)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bayesopt_chain.ensemble.cost import passes
from bayesopt_chain.ensemble.problem import Problem
from bayesopt_chain.likelihoods import Likelihood, gaussian, weighted
from bayesopt_chain.optimizers.functional import adam

RATES = (1e-2, 3e-3, 1e-3)
NOISE = 0.02  # of the targets' variance
WITHIN = 0.05


def batch_size_for(size: int) -> int:
    """The batch size for so many data.

    Example:
        >>> from bayesopt_chain.ensemble.plan import batch_size_for
        >>> [batch_size_for(n) for n in (100, 300, 1000, 50_000)]
        [100, 32, 64, 256]
    """
    return size if size <= 128 else min(256, max(32, 2 ** round(math.log2(size / 16))))


def steps_for(size: int, batch_size: int) -> int:
    """The steps of training for so many data in such batches.

    Example:
        >>> from bayesopt_chain.ensemble.plan import steps_for
        >>> [steps_for(n, 32) for n in (100, 300, 1000, 50_000)]
        [4000, 4000, 9300, 20000]
    """
    return min(20_000, max(4000, 300 * (size // batch_size)))


def training_likelihood(likelihood: Likelihood, targets: Any) -> Likelihood:
    """The likelihood to train with: of Gaussian noise of a known variance, noise in proportion to the targets'."""
    if not likelihood.has_noise_scale:
        return likelihood
    labels, weights = likelihood.labels(targets), likelihood.weights(targets)
    w = torch.ones_like(labels) if weights is None else weights.to(labels.dtype)
    mean = (w * labels).sum(0) / w.sum(0).clamp_min(1e-30)
    variance = (w * (labels - mean).square()).sum(0) / w.sum(0).clamp_min(1e-30)
    if not bool((variance > 0).all()):
        raise ValueError(
            "posterior_ensemble: an output's targets are all equal, so that there is no noise to find: leave that output out"
        )
    trained = gaussian(NOISE * variance)
    return weighted(trained) if weights is not None else trained


def rate(problem: Problem, lr: float | None, steps: int) -> dict[str, Any]:
    """The learning rate to train with, and what finding it cost."""
    if lr is not None:
        return {"lr": float(lr), "passes": {}, "losses": []}
    problem.progress.stage("rate")
    tried = max(10, steps // 10)
    names = (problem.members.params, problem.members.buffers)
    params, buffers = ({k: x[:1].expand(len(RATES), *x.shape[1:]).clone() for k, x in t.items()} for t in names)
    rates = torch.tensor(RATES, device="cpu")

    def tx(lr: Any) -> Any:
        return adam(lr)

    drawn = problem.run(tx, params, buffers, held_out=False, steps=tried, each={"lr": rates}, seed=1)
    trace = torch.as_tensor(drawn.loss[:], device="cpu").double()  # [steps, rates]; fewer where a rate diverged
    first, last = trace[0].mean(), trace[-max(1, len(trace) // 3) :].mean(0).nan_to_num(math.inf, math.inf, math.inf)
    if not bool(last.isfinite().any()):
        raise ValueError(
            f"posterior_ensemble: training diverges at every rate of {RATES}: standardise the data, or pass lr="
        )
    close = last <= last.min() + WITHIN * (first - last.min()).abs()
    found = next(lr for lr, good in zip(RATES, close.tolist()) if good)
    _, _, b = problem.batches(False, full=False)
    cost = passes(len(trace), b, problem.data.size, share=len(RATES) / problem.count)
    return {"lr": found, "passes": {"rate": cost}, "losses": last.tolist()}
