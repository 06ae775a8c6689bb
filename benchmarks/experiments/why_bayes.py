r"""Why Bayes (Figure 1 of the paper): what a posterior knows that a point estimate does not.

    gap          regression with no data in the middle: does the predictive widen there?
    far          two classes, and inputs far from both: does the predictive stay sure?
    continual    regression in three episodes: is the first one forgotten?

SGD, Laplace, mean-field VI, an extended Kalman filter and parallel SGHMC on one small tanh network. ``nll_gap`` and
``nll_data`` are negative log likelihoods (nats a datum) of held-out data inside and outside the gap; ``far`` is the mean
probability of the likelier class far from the data (0.5 knows nothing); ``forgotten`` is the rise of the first episode's
squared error from after the first episode to after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import bayesopt_chain as bc
from benchmarks.experiments.common import Experiment, Table, laplace_at, log_mean, stepped

NOISE = 0.1  # standard deviation of the regression's targets
Params = dict[str, Tensor]


def network(inputs: int, hidden: int) -> Params:
    """A random tanh network of two hidden layers."""
    layers = list(enumerate(pairwise((inputs, hidden, hidden, 1))))
    weights = {f"w{i}": torch.randn(n, m) / math.sqrt(n) for i, (n, m) in layers}
    return weights | {f"b{i}": torch.zeros(m) for i, (_, m) in layers}


def forward(params: Params, batch: Any) -> Tensor:
    """Outputs ``[B, 1]`` for inputs ``[B, inputs]``."""
    x = batch[0]
    for i in range(2):
        x = (x @ params[f"w{i}"] + params[f"b{i}"]).tanh()
    return x @ params["w2"] + params["b2"]


def function(x: Tensor) -> Tensor:
    return (3 * x).sin() + 0.3 * x


def regression(n: int, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Noisy values of the function at random places."""
    x = low + (high - low) * torch.rand(n, 1)
    return x, function(x) + NOISE * torch.randn(n, 1)


def gap_data(n: int) -> tuple[Tensor, Tensor]:
    """Data on both sides of a gap between -0.5 and 0.7."""
    sides = regression(n // 2, -1.5, -0.5), regression(n // 2, 0.7, 1.5)
    return torch.cat([s[0] for s in sides]), torch.cat([s[1] for s in sides])


def two_classes(n: int) -> tuple[Tensor, Tensor]:
    """Two noisy half moons."""
    t = torch.rand(n) * math.pi
    label = (torch.rand(n) < 0.5).float()
    x = torch.stack([t.cos() + label * (1 - 2 * t.cos()), t.sin() * (1 - 2 * label) + 0.5 * label], 1)
    return x + 0.1 * torch.randn(n, 2), label[:, None]


class Task(NamedTuple):
    """A likelihood with its loss: mean negative log posterior per datum under the prior N(0, 1) on every weight."""

    likelihood: Any
    nll: Callable[[Tensor, Tensor], Tensor]


REGRESSION = Task(bc.likelihoods.gaussian(NOISE**2), lambda f, y: ((f - y) ** 2).mean() / (2 * NOISE**2))
CLASSES = Task(bc.likelihoods.bernoulli(), lambda f, y: binary_cross_entropy_with_logits(f, y))


def loss_of(task: Task) -> Callable[[Params, Any], Tensor]:
    return lambda params, batch: task.nll(forward(params, batch), batch[1])


def trained(task: Task, data: Any, params: Params, s: Mapping[str, Any]) -> Params:
    """The mode, by SGD with momentum on the whole set."""
    tx = bc.chain(bc.links.add_decayed_weights(1 / len(data[0])), bc.adam(1e-2))
    return stepped(loss_of(task), tx, params, data, s["steps"])[0]


Predictive = Callable[[Tensor], Tensor]  # inputs -> outputs at draws [S, B, 1]


def sgd(task: Task, data: Any, s: Mapping[str, Any]) -> Predictive:
    mode = trained(task, data, network(data[0].shape[1], s["hidden"]), s)
    return lambda x: forward(mode, (x, None))[None]


def linearized(posterior: bc.Gaussian, draws: int) -> Predictive:
    """Draws of the outputs of the linearised network."""
    posterior = posterior.factorised()

    def predictive(x: Tensor) -> Tensor:
        mean, covariance = bc.posterior.linearized(forward, posterior, (x, None))
        return mean + covariance.diagonal(dim1=-2, dim2=-1).sqrt() * torch.randn(draws, *mean.shape)

    return predictive


def laplace(task: Task, data: Any, s: Mapping[str, Any]) -> Predictive:
    """Linearised, with the dense GGN at the mode."""
    mode = trained(task, data, network(data[0].shape[1], s["hidden"]), s)
    return linearized(laplace_at(mode, forward, task.likelihood, data), s["draws"])


def variational(task: Task, data: Any, s: Mapping[str, Any]) -> Predictive:
    params, n = network(data[0].shape[1], s["hidden"]), len(data[0])
    tx = bc.vi.mean_field(bc.adam(1e-2), temperature=1 / n, init_scale=0.02, n_samples=4, weight_decay=1 / n)
    params, state = stepped(loss_of(task), tx, params, data, s["steps"])
    draws = tx.posterior(state, params).sample((s["draws"],))
    return lambda x: torch.vmap(lambda p: forward(p, (x, None)))(draws)


def kalman(task: Task, data: Any, s: Mapping[str, Any]) -> Predictive:
    """A dense extended Kalman filter: one pass over random batches, then its Gaussian, linearised."""
    params = network(data[0].shape[1], s["hidden"])
    tx, step = filtered(task)
    params, state = in_batches(step, params, tx.init(params), data)
    return linearized(tx.posterior(state, params), s["draws"])


def filtered(task: Task) -> tuple[Any, Any]:
    """The filter and its step."""
    tx = bc.ekf.dense(lr=1.0, prior_precision=1.0)
    return tx, bc.make_step(loss_of(task), tx, curvature=bc.curvature.ggn(forward, task.likelihood, structure="root"))


def in_batches(step: Any, params: Params, state: Any, data: Any) -> Any:
    """After one pass over random batches of ten."""
    batches = [(data[0][rows], data[1][rows]) for rows in torch.randperm(len(data[0])).split(10)]
    return bc.sample(step, params, state, batches, steps=len(batches), burn_in=len(batches) - 1).last


def sghmc(task: Task, data: Any, s: Mapping[str, Any]) -> Predictive:
    n, k = len(data[0]), s["chains"]
    params = bc.stack([network(data[0].shape[1], s["hidden"]) for _ in range(k)])
    tx = bc.sgd(s["lr"][task is CLASSES], momentum=0.9, weight_decay=1 / n, temperature=1 / n)
    chains = bc.parallel(bc.make_step(loss_of(task), tx), k)
    steps = s["sghmc_steps"]
    draws = bc.sample(
        chains, params, chains.init(tx, params), data, steps=steps, burn_in=steps // 2, thinning=max(1, steps // 20)
    )
    flat = {name: leaf.flatten(0, 1) for name, leaf in draws.params.items()}
    return lambda x: torch.vmap(lambda p: forward(p, (x, None)))(flat)


METHODS = {"SGD": sgd, "Laplace": laplace, "VI": variational, "EKF": kalman, "SGHMC, parallel": sghmc}


def nll(outputs: Tensor, y: Tensor) -> float:
    """Negative log of the average likelihood over draws, nats a datum."""
    log_p = -((outputs - y) ** 2) / (2 * NOISE**2) - math.log(NOISE * math.sqrt(2 * math.pi))
    return -log_mean(log_p).mean().item()


def continual(s: Mapping[str, Any]) -> dict[str, float]:
    """Three episodes side by side on the line; the EKF keeps its Gaussian, SGD only its mean."""
    episodes = [regression(s["data"], low, low + 1.0) for low in (-1.5, -0.5, 0.5)]
    adam, (kalman_filter, step), out = bc.adam(1e-2), filtered(REGRESSION), {}

    def descended(params: Params, state: Any, data: Any) -> tuple[Params, Any]:
        return stepped(loss_of(REGRESSION), adam, params, data, s["steps"], state)

    for name, tx, learned in (("SGD", adam, descended), ("EKF", kalman_filter, partial(in_batches, step))):
        torch.manual_seed(7)
        params, errors = network(1, s["hidden"]), []
        state = tx.init(params)
        for data in episodes:
            params, state = learned(params, state, data)
            errors.append(((forward(params, episodes[0]) - function(episodes[0][0])) ** 2).mean().item())
        out[name] = errors[-1] - errors[0]
    return out


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """All methods on the gap and the classes; SGD and the filter on the episodes."""
    data, classes = gap_data(settings["data"]), two_classes(settings["data"])
    inside, outside = regression(500, -0.4, 0.6), gap_data(500)
    angle = torch.rand(500) * 2 * math.pi
    far = 8.0 * torch.stack([angle.cos(), angle.sin()], 1)
    table: Table = {}
    for name, method in METHODS.items():
        predictive, classifier = method(REGRESSION, data, settings), method(CLASSES, classes, settings)
        p = classifier(far).sigmoid().mean(0)
        table[name] = {
            "nll_gap": nll(predictive(inside[0]), inside[1]),
            "nll_data": nll(predictive(outside[0]), outside[1]),
            "far": torch.maximum(p, 1 - p).mean().item(),
        }
    for name, value in continual(settings).items():
        table[name]["forgotten"] = value
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One sentence on what came out."""
    point = table["SGD"]
    better = [m for m in METHODS if m != "SGD" and table[m]["nll_gap"]["mean"] < point["nll_gap"]["mean"]]
    modest = min(METHODS, key=lambda m: table[m]["far"]["mean"])
    first = [table[m]["forgotten"]["mean"] for m in ("SGD", "EKF")]
    return (
        f"In the gap {len(better)} of 4 posteriors have a lower NLL than SGD ({', '.join(better)}). Far from the classes SGD "
        f"is sure at {point['far']['mean']:.2f}, {modest} at {table[modest]['far']['mean']:.2f}. After three episodes SGD's "
        f"error on the first rose by {first[0]:.3f}, the filter's by {first[1]:.3f}."
    )


EXPERIMENT = Experiment(
    "why_bayes",
    "Why Bayes",
    "Figure 1: posteriors widen where there are no data, stay unsure far away, and do not forget earlier episodes",
    {
        "smoke": {
            "data": 40,
            "hidden": 10,
            "steps": 150,
            "draws": 50,
            "chains": 4,
            "sghmc_steps": 200,
            "lr": (2e-4, 2e-2),
        },
        "small": {
            "data": 100,
            "hidden": 20,
            "steps": 1500,
            "draws": 500,
            "chains": 16,
            "sghmc_steps": 4000,
            "lr": (2e-4, 2e-2),
        },
        "full": {
            "data": 200,
            "hidden": 50,
            "steps": 10_000,
            "draws": 2000,
            "chains": 100,
            "sghmc_steps": 50_000,
            "lr": (1e-4, 1e-2),
        },
    },
    {"smoke": 1, "small": 5, "full": 10},
    run,
    says,
)
