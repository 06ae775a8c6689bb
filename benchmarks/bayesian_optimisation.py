"""Bayesian optimisation with a network's Laplace posterior and with a Gaussian process, by BoTorch.

    python -m benchmarks.bayesian_optimisation            # Branin, Hartmann-6 and a noisy Branin; regret of every step

Each run begins with 2 d + 2 random points; each step trains the model anew, maximises qLogNEI and evaluates its point. The
network (two layers of 32 and tanh) is trained to the mode of its joint, its prior and noise tuned by the evidence over all
layers (``structure="root"``), outcomes standardised. The process is BoTorch's ``SingleTaskGP``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.botorch import LinearizedModel

PROBLEMS: dict[str, tuple[Callable[..., object], float]] = {
    "Branin": (Branin, 0.0),
    "Hartmann-6": (Hartmann, 0.0),
    "noisy Branin": (Branin, 5.0),
}


def network(x: Tensor, y: Tensor) -> LinearizedModel:
    """A network trained on standardised outcomes, and its Laplace posterior."""
    transform = Standardize(1)
    z, _ = transform(y)
    transform.eval()
    d = x.shape[1]
    module = nn.Sequential(nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in module.parameters())
        ((module(x) - z).square().mean() + 1e-3 * decay / len(x)).backward()
        optimizer.step()
    fitted = bc.fit_laplace(module.eval(), bc.likelihoods.gaussian(0.01), [(x, z)], subset="all", structure="root")
    return LinearizedModel.of(fitted, outcome_transform=transform)


def process(x: Tensor, y: Tensor) -> SingleTaskGP:
    """BoTorch's default."""
    model = SingleTaskGP(x, y, outcome_transform=Standardize(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def regret(make: Callable[[Tensor, Tensor], object], name: str, seed: int, steps: int) -> list[float]:
    """The best noiseless value so far below the optimum, after every step."""
    torch.manual_seed(seed)
    kind, noise = PROBLEMS[name]
    problem = kind(negate=True).double()
    low, high = problem.bounds
    true = lambda u: problem(low + (high - low) * u)[:, None]  # noqa: E731
    d = problem.dim
    x = torch.rand(2 * d + 2, d)
    y = true(x) + noise * torch.randn(len(x), 1)
    unit = torch.stack([torch.zeros(d), torch.ones(d)])
    found = []
    for _ in range(steps):
        model = make(x, y)
        sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
        acquisition = qLogNoisyExpectedImprovement(model, x, sampler=sampler, prune_baseline=False, cache_root=False)
        point, _ = optimize_acqf(acquisition, unit, q=1, num_restarts=2, raw_samples=64, options={"maxiter": 30})
        x = torch.cat([x, point.detach()])
        y = torch.cat([y, true(point.detach()) + noise * torch.randn(1, 1)])
        found.append(float(problem.optimal_value - true(x).max()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--figure", type=Path, default=None)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    curves = {}
    for name in options.problems:
        for label, make in (("network, Laplace", network), ("Gaussian process", process)):
            runs = torch.tensor([regret(make, name, seed, options.steps) for seed in range(options.seeds)])
            curves[name, label] = runs
            middle = runs.median(0).values
            print(f"{name:14s} {label:18s} median regret " + " ".join(f"{r:.3g}" for r in middle[4::5]), flush=True)
    if options.figure:
        draw(curves, options.figure)


def draw(curves: dict[tuple[str, str], Tensor], path: Path) -> None:
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in curves))
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3), squeeze=False)
    for axis, name in zip(axes[0], names):
        for (problem, label), runs in curves.items():
            if problem == name:
                steps = range(1, runs.shape[1] + 1)
                axis.plot(steps, runs.median(0).values, label=label)
                axis.fill_between(steps, runs.quantile(0.25, 0), runs.quantile(0.75, 0), alpha=0.2)
        axis.set(title=name, xlabel="step", ylabel="regret", yscale="log")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
