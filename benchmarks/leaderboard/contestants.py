"""The contestants: each a function of a task and a seed that returns predictions, with the cost where it is comparable.

What a user would write stands in the function; its lines are counted. Networks are the same, and so are the noise and the scale
of the ensembles.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import Predictive
from benchmarks.leaderboard.tasks import Task

WIDTH, GP_MOST = 50, 2000


class Result(NamedTuple):
    """Predictions for inputs; passes over the data for each of four networks, where there is such a number; a report."""

    predict: Callable[[Tensor], Any]
    passes: float | None = None
    said: str = ""


def network(task: Task, dropout: float = 0.0) -> nn.Module:
    """Two hidden layers of 50 units."""
    out = task.classes or 1
    drop = [nn.Dropout(dropout)] if dropout else []
    first = [nn.Linear(task.x.shape[1], WIDTH), nn.ReLU(), *drop]
    return nn.Sequential(*first, nn.Linear(WIDTH, WIDTH), nn.ReLU(), *drop, nn.Linear(WIDTH, out))


def likelihood(task: Task) -> bc.likelihoods.Likelihood:
    """Of the task's targets."""
    return bc.likelihoods.categorical() if task.classes else bc.likelihoods.gaussian()


def normal(mean: Any, variance: Any) -> Predictive:
    """A Gaussian prediction, as ours are."""
    mean, variance = (torch.as_tensor(np.asarray(a)).float().reshape(-1, 1) for a in (mean, variance))
    outputs = torch.cat([mean, variance.clamp_min(1e-10).log()], 1)[None]
    return bc.likelihoods.gaussian("learned").mixture(outputs)


def ours(task: Task, seed: int, **options: Any) -> Result:
    ensemble = bc.posterior_ensemble(
        lambda: network(task), (task.x, task.y), likelihood(task), seed=seed, progress=False, **options
    )
    return Result(ensemble.predict, sum(ensemble.report.passes.values()), str(ensemble.report))


def posterior_ensemble(task: Task, seed: int) -> Result:
    return ours(task, seed)


def deep_ensemble(task: Task, seed: int) -> Result:
    """The same networks, steps, folds and scale, with the usual prior."""
    return ours(task, seed, prior_precision=1.0)


def twice_ensemble(task: Task, seed: int) -> Result:
    """The same with twice the steps."""
    from bayesopt_chain.ensemble.call import batch_size_for, steps_for

    return ours(task, seed, prior_precision=1.0, steps=2 * steps_for(len(task.x), batch_size_for(len(task.x))))


def mc_dropout(task: Task, seed: int) -> Result:
    fitted = bc.posterior_ensemble(
        lambda: network(task, 0.1), (task.x, task.y), likelihood(task), members=1, prior_precision=1.0, seed=seed,
        progress=False,
    )  # fmt: skip
    module, lik = fitted.modules()[0].train(), fitted.likelihood

    def predict(x: Tensor) -> Predictive:
        with torch.no_grad():
            wider, outputs = lik.widened(torch.stack([module(x) for _ in range(50)]), fitted.factor)
        return wider.mixture(outputs)

    return Result(predict)


def trained(task: Task, seed: int) -> nn.Module:
    """One network, trained as the members are, for what starts from a trained network."""
    fitted = bc.posterior_ensemble(
        lambda: network(task), (task.x, task.y), likelihood(task), members=1, prior_precision=1.0, seed=seed,
        progress=False, standardize=False,
    )  # fmt: skip
    return fitted.modules()[0]


def last_layer_laplace(task: Task, module: nn.Module) -> Result:
    return _laplace(task, module, subset="last_layer")


def kronecker_laplace(task: Task, module: nn.Module) -> Result:
    return _laplace(task, module, subset="all")


def _laplace(task: Task, module: nn.Module, subset: str) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = bc.fit_laplace(module, likelihood(task), [(task.x, task.y)], subset=subset)
    return Result(lambda x: fitted.predict(x) if task.classes else fitted.predict(x, method="linearized"))


def laplace_torch(task: Task, module: nn.Module) -> Result | None:
    try:
        from laplace import Laplace
    except ImportError:
        return None
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(task.x, task.y), 256)
    kind = "classification" if task.classes else "regression"
    la = Laplace(module, kind, subset_of_weights="last_layer", hessian_structure="kron")
    la.fit(loader)
    if task.classes:
        la.optimize_prior_precision(method="marglik")
        return Result(lambda x: la(x, link_approx="probit"))
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([log_prior, log_sigma], lr=0.1)
    for _ in range(100):
        adam.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        adam.step()

    def predict(x: Tensor) -> Predictive:
        mean, variance = la(x)
        return normal(mean.detach(), variance.detach().reshape(-1) + la.sigma_noise.item() ** 2)

    return Result(predict)


def gaussian_process(task: Task, seed: int) -> Result | None:
    if task.classes or len(task.x) > GP_MOST:
        return None
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

    return Result(predict)


def gradient_boosting(task: Task, seed: int) -> Result:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import cross_val_predict

    x, y = task.x.numpy(), task.y.numpy().ravel()
    if task.classes:
        boosted = HistGradientBoostingClassifier(early_stopping=True, random_state=seed).fit(x, y)
        return Result(lambda x: torch.as_tensor(boosted.predict_proba(x.numpy())))
    boosted = HistGradientBoostingRegressor(early_stopping=True, random_state=seed)
    variance = np.mean((cross_val_predict(boosted, x, y) - y) ** 2)
    boosted.fit(x, y)
    return Result(lambda x: normal(boosted.predict(x.numpy()), np.full(len(x), variance)))


def lines(function: Callable) -> int:
    """Lines of code of a contestant, without its signature, docstring and imports; of ours the one call."""
    text = [line.strip() for line in inspect.getsource(function).splitlines()]
    return sum(bool(t) and not t.startswith(("def ", '"""', "#", "from ", "import ", ")")) for t in text)
