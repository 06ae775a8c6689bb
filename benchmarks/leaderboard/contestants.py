"""The contestants: the one call, plain ensembles of several costs, and two methods without networks; and their scores."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble.call import batch_size_for
from bayesopt_chain.ensemble.data import Data
from bayesopt_chain.ensemble.training import FAN_IN
from bayesopt_chain.likelihoods import Predictive
from bayesopt_chain.posterior import classification_metrics, detection_auroc
from bayesopt_chain.runs import files
from benchmarks.leaderboard.plain import plain
from benchmarks.leaderboard.tasks import Task, shifted
from benchmarks.networks import mlp

WIDTH, MEMBERS = 50, 4


class Result(NamedTuple):
    """Predictions for inputs; of networks ``passes``, gradients of the data for each, and ``said``, a report."""

    predict: Callable[[Tensor], Any]
    about: dict[str, Any]


class Letters(nn.Module):
    """An embedding of letters, convolutions over them, and the largest of each channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.letters, self.words, self.out = nn.Embedding(27, 8), nn.Conv1d(8, 16, 4), nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(self.letters(x).mT).relu().amax(2))


def network(task: Task) -> nn.Module:
    """Two hidden layers of 50 units for tables, convolutions for pixels and letters."""
    if task.name == "authors":
        return Letters(task.classes)
    if task.x.ndim == 4:
        first = [nn.Conv2d(1, 8, 5, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*first, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    return mlp(task.x.shape[1], WIDTH, WIDTH, task.classes or 1)


def called(task: Task, seed: int, **how: Any) -> Any:
    """The one call on a task, told nothing but ``how``; an ensemble that it warns of counts as any other."""
    likelihood = bc.likelihoods.categorical() if task.classes else bc.likelihoods.gaussian()
    try:
        data = task.x, task.y
        return bc.posterior_ensemble(lambda: network(task), data, likelihood, seed=seed, progress=False, **how)
    except bc.ensemble.EnsembleError as err:
        return err.ensemble


def networks_contest(task: Task, seed: int, steps: int, members: int = MEMBERS) -> dict[str, Callable[[], Any]]:
    """The call and the plain ensembles, to be run in this order: what the call cost and found, they are given."""
    size = batch_size_for(len(task.x))
    pair = Data(task.x, task.y, len(task.x)).folds(0.15, seed)
    known: dict[str, Any] = {}

    def call() -> Result:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as path:
            found = called(task, seed, members=members, steps=steps, path=path)
            known["seconds"] = time.process_time() - began
            known["trained"] = files.read_tree(Path(path) / "training.safetensors", torch.device("cpu"))
        known["passes"], known["lr"] = sum(found.report.passes.values()), found.report.chosen["lr"]
        return Result(found.predict, {"passes": known["passes"], "said": str(found.report)})

    def others(count: int, all_steps: int, **options: Any) -> Result:
        torch.manual_seed(1000 * seed)
        made = [network(task) for _ in range(count)]
        folds = [pair[m % 2] for m in range(count)]
        found = plain(made, task.x, task.y, folds, all_steps, size, known["lr"], seed, **options)
        known["plain"] = known.get("plain", found)
        used = bc.likelihoods.categorical() if task.classes else bc.likelihoods.gaussian(found.variance)
        return Result(lambda x: used.mixture(found.outputs(x)), {"passes": all_steps * size / len(task.x)})

    def equal() -> int:
        return round(known["passes"] * len(task.x) / size)

    def same() -> Result:
        trained, params = known["trained"], [*network(task).parameters()]
        fan_in = torch.cat([torch.full((p.numel(),), float(p[0].numel() if p.ndim > 1 else 1)) for p in params])
        precision = torch.stack([fan_in if prior == FAN_IN else torch.ones_like(fan_in) for prior in trained["now"]])
        return others(members, equal(), precision=precision, noise=trained["noise"].flatten())

    def seconds() -> Result:
        reference = known["plain"]
        return others(members, max(20, round((known["seconds"] - reference.build) / reference.step)))

    return {
        "posterior_ensemble": call,
        "plain_ensemble": lambda: others(members, equal()),
        "twice_ensemble": lambda: others(members, 2 * equal()),
        "seconds_ensemble": seconds,
        **({} if task.classes else {"same_prior": same}),
        "one_network": lambda: others(1, equal()),
    }


def peers(task: Task, seed: int) -> dict[str, Callable[[], Result]]:
    """What there is without networks; a Gaussian process of tables with numbers as targets."""
    found = {"gradient_boosting": partial(gradient_boosting, task, seed)}
    if task.classes or task.x.ndim > 2:
        return found
    return {"gaussian_process": partial(gaussian_process, task, seed), **found}


def normal(mean: Any, variance: Any) -> Predictive:
    """A Gaussian prediction, as ours are."""
    mean, variance = (torch.as_tensor(np.asarray(a)).float().reshape(-1, 1) for a in (mean, variance))
    outputs = torch.cat([mean, variance.clamp_min(1e-10).log()], 1)[None]
    return bc.likelihoods.gaussian("learned").mixture(outputs)


def gaussian_process(task: Task, seed: int) -> Result:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    kernel = ConstantKernel() * RBF(task.x.shape[1] ** 0.5) + WhiteKernel(0.1)
    gp = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gp.fit(task.x.numpy(), task.y[:, 0].numpy())

    def predict(x: Tensor) -> Predictive:
        mean, deviation = gp.predict(x.numpy(), return_std=True)
        return normal(mean, deviation**2)

    return Result(predict, {})


def gradient_boosting(task: Task, seed: int) -> Result:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    x, y = task.x.flatten(1).numpy(), task.y.numpy().ravel()
    if task.classes:
        boosted = HistGradientBoostingClassifier(early_stopping=True, random_state=seed).fit(x, y)
        return Result(lambda x: torch.as_tensor(boosted.predict_proba(x.flatten(1).numpy())), {})
    boosted = HistGradientBoostingRegressor(early_stopping=True, random_state=seed)
    variance = np.mean((cross_val_predict(boosted, x, y) - y) ** 2)
    boosted.fit(x, y)
    return Result(lambda x: normal(boosted.predict(x.flatten(1).numpy()), np.full(len(x), variance)), {})


def scored(task: Task, predict: Any) -> dict[str, float]:
    """All scores of a contestant; ``nll`` and ``crps`` in units of the standardised targets."""
    found, elsewhere = predict(task.x_test), predict(shifted(task))
    if task.classes:
        p, q = _probabilities(found), _probabilities(elsewhere)
        metrics = classification_metrics(p.log(), task.y_test)
        ood = detection_auroc(torch.special.entr(p).sum(1), torch.special.entr(q).sum(1))
        return {**{name: metrics[name] for name in ("nll", "ece", "accuracy")}, "ood": ood}
    low, high = found.interval(0.9)
    y = task.y_test
    return {
        "nll": float(-found.log_prob(y).double().mean()),
        "crps": float(found.crps(y).double().mean()),
        "coverage": float(((low <= y) & (y <= high)).double().mean()),
        "rmse": float((found.mean - y).square().mean().sqrt()),
        "ood": detection_auroc(found.variance.flatten(), elsewhere.variance.flatten()),
    }


def _probabilities(found: Any) -> Tensor:
    p = found if torch.is_tensor(found) else found.probabilities
    p = p.detach().double().clamp(1e-12, 1)
    return p / p.sum(1, keepdim=True)
