r"""A posterior with four modes, and who finds them (Figure 3 of the paper).

    U(x) = sum_i x_i^4 / 10 - x_i^2,   x in R^2,   T = 1

Each coordinate has the modes +-sqrt(5) behind a barrier of 2.5. The distance of draws to the truth is the Wasserstein
distance of each coordinate's marginal, by quadrature, averaged over the two; ``modes`` is the total variation of the shares
of the four quadrants from 1/4 each. All sampling methods take the same number of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import bayesopt_chain as bc
from benchmarks.experiments.common import Experiment, Table, stepped


def potential(x: Tensor, batch: Any = None) -> Tensor:
    """Negative log density of ``[..., 2]``, up to a constant."""
    return (x**4 / 10 - x**2).sum(-1)


class Truth(NamedTuple):
    """The marginal of one coordinate on a grid."""

    x: Tensor
    cdf: Tensor

    @classmethod
    def make(cls, points: int = 20001, limit: float = 6.0) -> Truth:
        """By quadrature; the tail beyond the limit weighs less than 1e-40."""
        x = torch.linspace(-limit, limit, points, dtype=torch.float64)
        p = (-(x**4 / 10 - x**2)).exp()
        cdf = p.cumsum(0)
        return cls(x, cdf / cdf[-1])

    def wasserstein(self, draws: Tensor) -> float:
        """Mean over coordinates of the integral of |F - F_n| for draws ``[S, 2]``."""
        out = []
        for column in draws.to(torch.float64).T:
            empirical = torch.searchsorted(column.sort().values, self.x, right=True) / len(column)
            out.append(torch.trapezoid((empirical - self.cdf).abs(), self.x))
        return torch.stack(out).mean().item()


def modes(draws: Tensor) -> float:
    """Total variation of the shares of the four quadrants from 1/4 each."""
    quadrant = (draws[:, 0] > 0).long() * 2 + (draws[:, 1] > 0).long()
    share = torch.bincount(quadrant, minlength=4) / len(draws)
    return (share - 0.25).abs().sum().item() / 2


def deep_ensemble(s: Mapping[str, Any]) -> Tensor:
    """Optimizers from random starts."""
    tx, x = bc.sgd(s["lr"], momentum=0.9), torch.randn(s["chains"], 2)
    chains = bc.parallel(bc.make_step(potential, tx), s["chains"])
    return bc.sample(chains, x, chains.init(tx, x), None, steps=300, burn_in=299).params[-1]


def serial(s: Mapping[str, Any]) -> Tensor:
    """One chain."""
    tx, x = bc.sghmc(s["lr"], 0.9, temperature=1.0), torch.zeros(2)
    step = bc.make_step(potential, tx)
    return bc.sample(step, x, tx.init(x), None, steps=s["gradients"], burn_in=s["gradients"] // 10).params


def parallel(s: Mapping[str, Any]) -> Tensor:
    """Many chains, each with its share of the gradients."""
    tx, x = bc.sghmc(s["lr"], 0.9, temperature=1.0), torch.randn(s["chains"], 2)
    chains, steps = bc.parallel(bc.make_step(potential, tx), s["chains"]), s["gradients"] // s["chains"]
    return bc.sample(chains, x, chains.init(tx, x), None, steps=steps, burn_in=steps // 2).params.flatten(0, 1)


def variational(s: Mapping[str, Any]) -> Tensor:
    """A Gaussian with independent coordinates; draws from it."""
    tx, x = bc.vi.mean_field(bc.adam(1e-2), temperature=1.0, init_scale=0.2, n_samples=8), torch.zeros(2)
    x, state = stepped(potential, tx, x, None, s["gradients"] // 8)
    return tx.posterior(state, x).sample((s["draws"],))


def laplace(s: Mapping[str, Any]) -> Tensor:
    """A Gaussian at a mode, with the Hessian there; draws from it."""
    tx, x = bc.sgd(s["lr"], momentum=0.9), torch.randn(2)
    x, _ = stepped(potential, tx, x, None, 300)
    covariance = torch.linalg.inv(torch.func.hessian(potential)(x))
    return x + torch.randn(s["draws"], 2) @ torch.linalg.cholesky(covariance).T


METHODS = {
    "deep ensemble": deep_ensemble,
    "SGHMC, one chain": serial,
    "SGHMC, parallel": parallel,
    "VI, mean field": variational,
    "Laplace": laplace,
}


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """Every method's distances, and those of exact independent draws as the floor."""
    truth = Truth.make()
    exact = torch.stack(
        [truth.x[torch.searchsorted(truth.cdf, torch.rand(settings["draws"], dtype=torch.float64))] for _ in range(2)],
        1,
    )
    draws = {name: method(settings) for name, method in METHODS.items()} | {"exact draws": exact}
    return {name: {"wasserstein": truth.wasserstein(x), "modes": modes(x)} for name, x in draws.items()}


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One sentence on what came out."""
    best = min((m for m in METHODS), key=lambda m: table[m]["wasserstein"]["mean"])
    gaussian = min(table[m]["wasserstein"]["mean"] for m in ("VI, mean field", "Laplace"))
    return (
        f"As in the figure, the Gaussians hold on to one mode or the middle (distance {gaussian:.2f} at best); "
        f"closest is {best} ({table[best]['wasserstein']['mean']:.3f}; as many exact draws: "
        f"{table['exact draws']['wasserstein']['mean']:.3f})."
    )


EXPERIMENT = Experiment(
    "double_well",
    "Double well",
    "Figure 3: VI covers one mode or the middle, a deep ensemble finds the modes without their width, SGHMC draws from all",
    {
        "smoke": {"lr": 0.05, "gradients": 2000, "chains": 50, "draws": 2000},
        "small": {"lr": 0.05, "gradients": 100_000, "chains": 500, "draws": 20_000},
        "full": {"lr": 0.05, "gradients": 1_000_000, "chains": 2000, "draws": 200_000},
    },
    {"smoke": 1, "small": 5, "full": 10},
    run,
    says,
)
