"""What a last layer of many classes costs, and what the diagonal factor of its outputs leaves out.

    python -m benchmarks.many_classes        # a minute on one core; writes results/many_classes.json

Networks of 20-64-C units on 1,000 data around C centres: processor seconds of ``bc.fit_laplace`` with its defaults and of four
predictions, the second time that both run; more than 1,000 classes have a diagonal factor. Of 200 classes, after 0, 40 and 200
steps of training, the variances of a diagonal factor against those of the matrix at the prior and dispersion that the matrix
was tuned to, at 20 inputs that were seen and 20 others: of targets (classes of probability above 0.001), of outputs, and of
their differences from the likeliest output's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.measure import keep

RESULTS = Path(__file__).parent / "results" / "many_classes.json"
DATA, FEATURES, SIZES, STEPS = 1000, 64, (200, 1000, 2500, 10_000), (0, 40, 200)


def problem(
    classes: int, steps: int = 0, data: int = DATA, features: int = FEATURES
) -> tuple[nn.Module, Tensor, Tensor]:
    """Inputs around a centre for each class, and a network of ``features`` hidden units, trained for some steps."""
    torch.manual_seed(0)
    centres, y = torch.randn(classes, 20), torch.randint(classes, (data,))
    x = centres[y] + 0.7 * torch.randn(data, 20)
    network = nn.Sequential(nn.Linear(20, features), nn.Tanh(), nn.Linear(features, classes))
    optimizer = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval(), x, y


def cost(classes: int) -> dict[str, float]:
    network, x, y = problem(classes)
    seconds = {}
    for _ in range(2):
        began = time.process_time()
        fitted = bc.fit_laplace(network, bc.likelihoods.categorical(), [(x, y)])
        seconds["fit, seconds"] = time.process_time() - began
        fitted.predict(x[:4])
        seconds["four predictions, seconds"] = time.process_time() - began - seconds["fit, seconds"]
    return {**seconds, "diagonal": float("diagonal" in repr(fitted))}


def errors(steps: int) -> dict[str, Any]:
    """Relative errors, mean and largest."""
    network, x, y = problem(200, steps)
    network, x = network.double(), x.double()
    likelihood = bc.likelihoods.categorical()
    exact = bc.fit_laplace(network, likelihood, [(x, y)])
    rough = bc.fit_laplace(network, likelihood, [(x, y)], diagonal_above=100, tune=None)
    at = torch.cat([x[:20], torch.randn(20, 20, dtype=x.dtype)])
    mean, wanted = exact.outputs(at)
    tuned = {"prior_precision": exact.prior_precision, "likelihood_scale": exact.likelihood_scale}
    found = rough.outputs(at, **tuned).covariance * exact.covariance_scale
    top, rows = mean.argmax(-1), torch.arange(len(at))
    is_other = torch.arange(200) != top[:, None]

    def variances(covariance: Tensor) -> dict[str, Tensor]:
        own = covariance.diagonal(dim1=1, dim2=2)
        between = own + own[rows, top, None] - 2 * covariance[rows, top]
        return {
            "targets": likelihood.predictive(mean, covariance).variance,
            "outputs": own,
            "differences": torch.where(is_other, between, 1),
        }

    of = variances(wanted)
    is_possible = likelihood.predictive(mean, wanted).mean > 1e-3
    out: dict[str, Any] = {"prior precision of the weights": float(exact.prior_precision["2.weight"])}
    for name, value in variances(found).items():
        error = (value / of[name] - 1).abs()
        error = error[is_possible] if name == "targets" else error
        out[name] = {"mean": float(error.mean()), "largest": float(error.max())}
    return out


def main() -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = {"classes": {}, "steps of training": {}}
    for classes in SIZES:
        record["classes"][str(classes)] = cost(classes)
        print(classes, record["classes"][str(classes)], flush=True)
    for steps in STEPS:
        record["steps of training"][str(steps)] = errors(steps)
        print(steps, json.dumps(record["steps of training"][str(steps)]), flush=True)
    keep(RESULTS, record)


if __name__ == "__main__":
    main()
