"""Simulation-based calibration of four methods on four small models: who is right, who is too narrow, and who is only near.

    python -m benchmarks.calibration [--simulations 200]

Parameters are drawn from the prior N(0, I), data from the model, and the rank of every parameter and of the log likelihood
among 99 draws of each method is counted (``bc.testing.sbc``). Two of the models are linear and Gaussian, where Laplace, the
filter and the full Gaussian of VI are exact; independent Gaussians are not, and chains have to be right on all four. Results go
to ``benchmarks/results/calibration.json``, and a second call goes on where the first stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, fill

DRAWS = 99


class Model(NamedTuple):
    """Inputs ``[N, D]``, what the model makes of them and of parameters ``[P]``, and the law of targets."""

    inputs: Tensor
    forward: Callable[[Tensor, Tensor], Tensor]
    likelihood: Any
    size: int
    lr: float

    def nll(self, params: Tensor, batch: Any) -> Tensor:
        """The mean negative log likelihood of inputs and targets."""
        return self.likelihood.nll(self.forward(params, batch[0]), batch[1]).mean()

    def loss(self, params: Tensor, targets: Tensor) -> Tensor:
        """With the prior's share."""
        return self.nll(params, (self.inputs, targets)) + params.square().sum() / (2 * len(self.inputs))


def models() -> dict[str, Model]:
    """A line whose two coefficients are tied, groups with a common mean, counts, and labels."""
    g = torch.Generator().manual_seed(0)
    time_of, gaussian = torch.linspace(0, 2, 8), bc.likelihoods.gaussian
    line = torch.stack([torch.ones(8), time_of], 1)
    groups = torch.cat(
        [torch.ones(12, 1), torch.eye(4).repeat_interleave(3, 0)], 1
    )  # a mean, and four deviations from it
    counts, labels = torch.randn(10, 2, generator=g) / 2, torch.randn(40, 3, generator=g)

    def linear(params: Tensor, x: Tensor) -> Tensor:
        return x @ params

    return {
        "line": Model(line, linear, gaussian(1.0), 2, 0.1),
        "groups": Model(groups, linear, gaussian(1.0), 5, 0.2),
        "counts": Model(counts, linear, bc.likelihoods.poisson(), 2, 0.05),
        "labels": Model(labels, linear, bc.likelihoods.bernoulli(), 3, 0.5),
    }


def sghmc(m: Model, y: Tensor) -> Tensor:
    """Chains at T = 1 / N on all data, one for each simulation."""
    step = bc.make_step(m.loss, bc.sghmc(m.lr, momentum=0.9, temperature=1 / len(m.inputs)))
    chains, start = bc.parallel(step, len(y), batch_dim=0), torch.zeros(len(y), m.size)
    state, steps = chains.init(step.tx, start, seed=1), 200 + DRAWS * 40
    return bc.sample(chains, start, state, y, steps=steps, burn_in=200, thinning=40).params


def ends(chains: Any, tx: Any, start: Tensor, batches: Any, steps: int, seed: int | None = None) -> Any:
    """Where chains end, and their states."""
    state = chains.init(tx, start, seed=seed)
    return bc.sample(chains, start, state, batches, steps=steps, burn_in=steps - 1).last


def laplace(m: Model, y: Tensor) -> Tensor:
    """The mode, by the same chains at T = 0, and a Gaussian with the curvature there."""
    step, start = bc.make_step(m.loss, bc.sgd(m.lr, momentum=0.9)), torch.zeros(len(y), m.size)
    chains = bc.parallel(step, len(y), batch_dim=0)
    out: list[Tensor] = []
    tx: Any = bc.laplace()
    estimate: Any = bc.curvature.ggn(lambda p, b: m.forward(p, b[0]), m.likelihood, "dense")
    for mode, targets in zip(ends(chains, step.tx, start, y, 3000)[0], y):
        _, state = tx.update(mode, tx.init(mode), curvature=estimate(mode, (m.inputs, targets)), inplace=False)
        out.append(tx.posterior(state, mode, prior_precision=1.0).sample((DRAWS,)))
    return torch.stack(out, 1)


def of_chains(tx: Any, params: Any, state: Any) -> Tensor:
    """Draws of the posterior of each chain."""
    pairs = zip(bc.unstack(params), bc.unstack(state))
    return torch.stack([tx.posterior(each, mean).sample((DRAWS,)) for mean, each in pairs], 1)


def variational(family: Callable[..., Any]) -> Callable[[Model, Tensor], Tensor]:
    """A Gaussian of a family, by Adam with a falling rate."""

    def fit(m: Model, y: Tensor) -> Tensor:
        n, start = len(m.inputs), torch.zeros(len(y), m.size)
        rate = lambda count: 0.03 * (1 - 0.99 * torch.clamp(count / 4000, max=1.0))  # noqa: E731
        tx = family(bc.adam(rate), temperature=1 / n, weight_decay=1 / n, init_scale=0.3, n_samples=4)
        chains = bc.parallel(bc.make_step(lambda p, y: m.nll(p, (m.inputs, y)), tx), len(y), batch_dim=0)
        return of_chains(tx, *ends(chains, tx, start, y, 4000, seed=2))

    return fit


def kalman(m: Model, y: Tensor) -> Tensor:
    """The extended Kalman filter, which sees each datum once."""
    tx, start = bc.ekf.dense(prior_precision=1.0), torch.zeros(len(y), m.size)
    estimate = bc.ekf.observe(lambda p, b: m.forward(p, b[0]), m.likelihood)
    chains = bc.parallel(bc.make_step(None, tx, curvature=estimate), len(y), batch_dim=0)
    data = [(x.expand(len(y), 1, -1), y[:, i : i + 1]) for i, x in enumerate(m.inputs)]
    return of_chains(tx, *ends(chains, tx, start, data, len(data)))


METHODS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "SGHMC": sghmc,
    "Laplace": laplace,
    "VI, full covariance": variational(bc.vi.dense),
    "VI, mean field": variational(bc.vi.mean_field),
    "EKF": kalman,
}


def judged(m: Model, method: Callable[[Model, Tensor], Tensor], simulations: int) -> dict[str, Any]:
    """What the ranks of one method on one model say."""
    torch.manual_seed(3)
    found = bc.testing.sbc(
        lambda y: method(m, y),
        prior=lambda g: torch.randn(m.size, generator=g),
        simulator=lambda p, g: m.likelihood.draw(m.forward(p, m.inputs), g),
        quantities=lambda p, y: {"parameter": p, "log likelihood": -m.nll(p, (m.inputs, y))},
        simulations=simulations,
        together=True,
    )
    return {"p": float(f"{found.p_value:.2g}"), "said": str(found).partition("; ")[2]}


if __name__ == "__main__":
    given = command(simulations=200, out=RESULTS / "calibration.json")
    cells = [
        (("calibration", f"{name}, {method}"), partial(judged, m, posterior, given.simulations))
        for name, m in models().items()
        for method, posterior in METHODS.items()
    ]
    fill(given.out, cells, simulations=given.simulations, draws=DRAWS)
