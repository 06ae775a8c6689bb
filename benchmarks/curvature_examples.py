"""laplace-torch's README, regression, calibration and marginal-likelihood examples, and the same with this library.

    python -m benchmarks.curvature_examples            # about a minute on one core
    python -m benchmarks.curvature_examples --rounds 1

Each example is a pair of functions over the same trained model and data. Lines are those of the two bodies as the formatter
leaves them, without blank ones and imports; times are medians over rounds in which the two take turns; the numbers are what the
examples print. Data are made here (a sine with noise; scikit-learn's digits), since the originals load networks from
elsewhere. Validation tries nine priors in both (theirs tries 100 unless told otherwise), and theirs runs with BackPACK (its
default back end took more than 150 s for the diagonal of 1,360 parameters). Writes
`benchmarks/results/curvature_examples.json`.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.posterior import train_by_evidence
from benchmarks.measure import keep

RESULTS = Path(__file__).parent / "results"
Numbers = dict[str, float]

# README, first example: the diagonal over all weights, prior by a validation set, probit predictions


def readme_theirs(model: nn.Module, train: DataLoader, valid: DataLoader, x: Tensor) -> Tensor:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="diag", backend=BackPackGGN)
    la.fit(train)
    la.optimize_prior_precision(method="gridsearch", val_loader=valid, grid_size=9)
    return la(x, link_approx="probit")


def readme_ours(model: nn.Module, train: DataLoader, valid: DataLoader, x: Tensor) -> Tensor:
    options = {"subset": "all", "structure": "diagonal", "tune": "validation", "validation": valid}
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), train, **options)
    return fitted.predict(x, method="probit")


# README, second example: the derivatives of the evidence by prior and noise


def derivatives_theirs(model: nn.Module, train: DataLoader, prior: Tensor, noise: Tensor) -> Tensor:
    from laplace import Laplace

    la = Laplace(model, "regression")
    la.fit(train)
    ml = la.log_marginal_likelihood(prior, noise)
    ml.backward()
    return ml


def derivatives_ours(model: nn.Module, train: DataLoader, prior: Tensor, noise: Tensor) -> Tensor:
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(), train, tune=None)
    ml = fitted.log_evidence_at(prior, noise**-2)
    ml.backward()
    return ml


# The regression example: the full covariance, prior and noise by the evidence, error bars


def regression_theirs(model: nn.Module, train: DataLoader, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from laplace import Laplace

    la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    la.fit(train)
    log_prior, log_sigma = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    hyper_optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    for _ in range(1000):
        hyper_optimizer.zero_grad()
        neg_marglik = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        neg_marglik.backward()
        hyper_optimizer.step()
    f_mu, f_var = la(x)
    return f_mu, f_var[..., 0] + la.sigma_noise.detach() ** 2, -neg_marglik.detach()


def regression_ours(model: nn.Module, train: DataLoader, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(), train, subset="all", structure="dense")
    prediction = fitted.predict(x)
    return prediction.mean, prediction.variance, fitted.log_evidence


# The calibration example: the last layer in Kronecker structure, prior by the evidence


def calibration_theirs(model: nn.Module, train: DataLoader, test: DataLoader) -> Tensor:
    from laplace import Laplace

    la = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(train)
    la.optimize_prior_precision(method="marglik")
    return torch.cat([la(x) for x, _ in test])


def calibration_ours(model: nn.Module, train: DataLoader, test: DataLoader) -> Tensor:
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), train)
    return fitted.predict(test)


# The second half of the regression example: training by the evidence


def training_theirs(model: nn.Module, train: DataLoader) -> tuple[Any, Callable, Tensor]:
    from laplace import marglik_training
    from laplace.curvature import BackPackGGN

    options = {"hessian_structure": "full", "backend": BackPackGGN, "prior_structure": "scalar", "n_epochs_burnin": 50}
    la, model, margliks, _ = marglik_training(
        model, train, "regression", n_epochs=500, optimizer_kwargs={"lr": 1e-2}, marglik_frequency=10, **options
    )
    return la, lambda x: (la(x)[0], la(x)[1][..., 0] + la.sigma_noise**2), -torch.tensor(min(margliks))


def training_ours(model: nn.Module, train: DataLoader) -> tuple[Any, Callable, Tensor]:
    options = {"structure": "dense", "optimizer": lambda p: torch.optim.Adam(p, lr=1e-2), "every": 10, "burn_in": 50}
    training = train_by_evidence(model, bc.likelihoods.gaussian(), train, epochs=500, **options)
    fitted = training.fitted
    return fitted, lambda x: (fitted.predict(x).mean, fitted.predict(x).variance), fitted.log_evidence


def lines(function: Callable) -> int:
    """Lines of the body, without blank ones and imports."""
    body = [line.strip() for line in inspect.getsource(function).splitlines()[1:]]
    return sum(bool(line) and not line.startswith("from ") for line in body)


def of_classes(p: Tensor, y: Tensor) -> Numbers:
    measures = bc.posterior.classification_metrics(p.clamp_min(1e-30).log(), y)
    return {name: float(measures[name]) for name in ("nll", "ece", "accuracy")}


def of_regression(mean: Tensor, variance: Tensor, y: Tensor, evidence: Tensor) -> Numbers:
    nll = 0.5 * ((y - mean).square() / variance + (2 * torch.pi * variance).log()).mean()
    return {"nll": nll.item(), "log evidence": evidence.item()}


def sine() -> tuple[nn.Module, DataLoader, tuple[Tensor, Tensor]]:
    """150 points of a sine with noise 0.3, and a network trained on them."""
    torch.manual_seed(711)
    x = 8 * torch.rand(150, 1)
    y = torch.sin(x) + 0.3 * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4, lr=1e-2)
    for _ in range(1000):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    new = 8 * torch.rand(500, 1)
    return model.eval(), DataLoader(TensorDataset(x, y), 150), (new, torch.sin(new) + 0.3 * torch.randn_like(new))


def digits() -> tuple[nn.Module, DataLoader, DataLoader, DataLoader]:
    """A convolutional network of 1,360 parameters trained on 900 digits for too long, 100 to validate, the rest to test."""
    from sklearn.datasets import load_digits

    torch.manual_seed(7777)
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(y))
    parts = torch.utils.data.random_split(data, [900, 100, len(data) - 1000])
    train, valid, test = (DataLoader(part, 128) for part in parts)
    body = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*body, nn.Linear(96, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(40):
        for a, b in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return model.eval(), train, valid, test


def examples() -> dict[
    str, tuple[Callable, Callable, Callable[[Callable], Callable[[], Any]], Callable[[Any], Numbers]]
]:
    """Name: theirs, ours, from one of them to what is timed, from its result to its numbers."""
    network, train, valid, test = digits()
    targets, inputs = torch.cat([y for _, y in test]), torch.cat([x for x, _ in test])
    fitted, points, (new, y) = sine()
    torch.manual_seed(0)
    fresh = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))

    def derivatives(run: Callable) -> Callable[[], Any]:
        def timed() -> tuple[Tensor, ...]:
            prior, noise = torch.tensor([2.0], requires_grad=True), torch.tensor([0.3], requires_grad=True)
            ml = run(copy.deepcopy(fitted), points, prior, noise)
            return ml.detach(), prior.grad, noise.grad

        return timed

    return {
        "README: diagonal, validation, probit": (
            readme_theirs,
            readme_ours,
            lambda run: lambda: run(copy.deepcopy(network), train, valid, inputs),
            lambda p: of_classes(p, targets),
        ),
        "README: derivatives of the evidence": (
            derivatives_theirs,
            derivatives_ours,
            derivatives,
            lambda got: dict(zip(("log evidence", "by prior", "by noise"), (x.item() for x in got))),
        ),
        "regression": (
            regression_theirs,
            regression_ours,
            lambda run: lambda: run(copy.deepcopy(fitted), points, new),
            lambda got: of_regression(got[0], got[1], y, got[2]),
        ),
        "calibration": (
            calibration_theirs,
            calibration_ours,
            lambda run: lambda: run(copy.deepcopy(network), train, test),
            lambda p: of_classes(p, targets),
        ),
        "training by the evidence": (
            training_theirs,
            training_ours,
            lambda run: lambda: run(copy.deepcopy(fresh), points),
            lambda got: of_regression(*got[1](new), y, got[2]),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    report: dict[str, Any] = {"rounds": rounds, "examples": {}}
    for name, (theirs, ours, timed, numbers) in examples().items():
        rows: dict[str, Any] = {}
        times: dict[str, list[float]] = {"laplace-torch": [], "bayesopt_chain": []}
        for _ in range(rounds):
            for who, function in (("laplace-torch", theirs), ("bayesopt_chain", ours)):
                run = timed(function)
                start = time.perf_counter()
                result = run()
                times[who].append(time.perf_counter() - start)
                rows[who] = {"lines": lines(function), **numbers(result)}
        for who in rows:
            rows[who]["seconds"] = statistics.median(times[who])
        report["examples"][name] = rows
        print(name)
        for who, row in rows.items():
            print(f"  {who:16s}", "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)
    keep(RESULTS / "curvature_examples.json", report)


if __name__ == "__main__":
    main()
