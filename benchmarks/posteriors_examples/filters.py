"""``python -m benchmarks.posteriors_examples.filters``: one update of a filter beside posteriors', small models, in turns.

An update is outputs, gradient, curvature and new state: theirs with ``per_sample=True``, the faster of their two forms, ours
as ``make_step(None, tx, curvature=bc.ekf.observe(...))``. A ratio is the median over turns, with quartiles; the target is 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.measure import ratio, take_turns

TARGET = 0.8


def logistic(parameters: int, data: int) -> tuple[Any, Any, Callable[..., Any], Any]:
    """Parameters, a batch, the forward function and the likelihood of a logistic regression."""
    x, y = torch.randn(data, parameters), torch.randint(0, 2, (data,)).float()
    return torch.zeros(parameters), (x, y), lambda p, batch: batch[0] @ p, bc.likelihoods.bernoulli()


def network(data: int) -> tuple[Any, Any, Callable[..., Any], Any]:
    """The same of a network of 81 parameters."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    forward, params, _ = bc.make_functional(net)
    return params, (torch.randn(data, 3), torch.randn(data, 1)), forward, bc.likelihoods.gaussian()


def league() -> tuple[Any, Any, Callable[..., Any], Any]:
    """The same of the skills of 20 players and one match."""
    batch = torch.tensor([[3, 7]]), torch.ones(1)
    return torch.zeros(20), batch, lambda p, b: p[b[0][:, 0]] - p[b[0][:, 1]], bc.likelihoods.bernoulli()


CASES = {
    "logistic, 8 parameters, 1 datum": lambda: logistic(8, 1),
    "logistic, 8 parameters, 32 data": lambda: logistic(8, 32),
    "logistic, 30 parameters, 32 data": lambda: logistic(30, 32),
    "network, 81 parameters, 1 datum": lambda: network(1),
    "network, 81 parameters, 32 data": lambda: network(32),
    "league of 20, 1 match": league,
}


def contestants(case: str, kind: str) -> dict[str, Callable[[], Any]]:
    """One update of each; their dense filter starts narrow, since it fails where the data outweigh the prior."""
    import posteriors

    torch.manual_seed(0)
    params, batch, forward, likelihood = CASES[case]()

    def log_likelihood(p, b):
        return -likelihood.nll(forward(p, b), b[1]), torch.tensor([])

    module = {"dense": posteriors.ekf.dense_fisher, "diagonal": posteriors.ekf.diag_fisher}[kind]
    options = {"init_cov": 1e-4} if kind == "dense" else {}
    theirs = module.build(log_likelihood, lr=1.0, per_sample=True, **options)
    other, tx = theirs.init(params), getattr(bc.ekf, kind)()
    step, state = bc.make_step(None, tx, curvature=bc.ekf.observe(forward, likelihood)), tx.init(params)
    return {"posteriors": lambda: theirs.update(other, batch), "ours": lambda: step(params, state, batch)}


def main() -> None:
    """Print the table."""
    print(f"{'':36s}{'':10s}{'posteriors':>12s}{'ours':>10s}{'ratio':>8s}   quartiles")
    for case in CASES:
        for kind in ("dense", "diagonal"):
            times = take_turns(contestants(case, kind), rounds=31)
            r = ratio(times, "ours", "posteriors")
            a, b = (1e6 * min(times[who]) for who in ("posteriors", "ours"))
            over = "" if r["ratio"] <= TARGET else "   over the target"
            print(
                f"{case:36s}{kind:10s}{a:9.0f} us{b:7.0f} us{r['ratio']:8.2f}   {r['low']:.2f} to {r['high']:.2f}{over}"
            )


if __name__ == "__main__":
    main()
