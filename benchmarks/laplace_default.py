"""``python -m benchmarks.laplace_default``: what the default of ``bc.fit_laplace`` does to networks as people train them.

    python -m benchmarks.laplace_default                # the networks that the rule was made with, five seeds
    python -m benchmarks.laplace_default --further      # six that were looked at once, after the rule was done
    python -m benchmarks.laplace_default --peer         # laplace-torch's marginal likelihood on the same networks
    python -m benchmarks.laplace_default --name before  # a table of its own, as of another version of the package

Each network is trained on part of a small data set of scikit-learn's, or a drawn one. A row has the test negative log
likelihood of the network itself (for regression with the variance of its training residuals), how much a default fit changes
it in the mean over seeds and for the worst of them, and for regression the coverage of 90 % intervals.
``benchmarks/results/laplace_default.json`` holds one table a name, ``laplace_default.md`` what the documentation shows of it.
A row that the record has is left as it is: take it out to measure it again, or write to another file by ``--out``. ``--only``
takes the networks whose name has these words.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, fill, markdown
from benchmarks.networks import Attention, Pair, cnn, descend, mlp, resnet, sklearn, split

SEEDS = 5
categorical, gaussian, poisson = bc.likelihoods.categorical, bc.likelihoods.gaussian, bc.likelihoods.poisson


class Task(NamedTuple):
    """Training and test data of a seed, a network, how it is trained, and the likelihood of its outputs."""

    data: Callable[[int], tuple[Pair, Pair]]
    net: Callable[[], nn.Module]
    steps: int
    lr: float = 1e-2
    decay: float = 0.0
    likelihood: Callable[..., Any] = categorical


Fit = Callable[[nn.Module, Any, Pair, Pair], tuple[float, float | None]]  # of a network, its likelihood and data


def gap(seed: int) -> tuple[Pair, Pair]:
    """A sine with a gap in its inputs; tests are everywhere."""
    torch.manual_seed(seed)

    def f(x: Tensor) -> Tensor:
        return torch.sin(3 * x) + 0.1 * torch.randn_like(x)

    x = torch.cat([torch.rand(40, 1) - 1.5, torch.rand(40, 1) + 0.5])
    new = 3 * torch.rand(200, 1) - 1.5
    return (x, f(x)), (new, f(new))


def noisy_digits(seed: int) -> Any:
    """A fifth of all labels drawn anew."""
    data = sklearn("load_digits", 700, seed)
    return tuple((x, torch.where(torch.rand(len(y)) < 0.2, torch.randint(10, (len(y),)), y)) for x, y in data)


def counts(seed: int) -> tuple[Pair, Pair]:
    """Counts whose log rate is a nonlinear function."""
    torch.manual_seed(seed)
    x = torch.randn(600, 4)
    y = torch.poisson((0.5 + x[:, :1].sin() + 0.5 * x[:, 1:2] * x[:, 2:3]).exp().clamp_max(50))
    return (x[:200], y[:200]), (x[200:], y[200:])


def two(seed: int) -> tuple[Pair, Pair]:
    """Two targets, one ten times as noisy."""
    torch.manual_seed(seed)
    x = torch.randn(600, 3)
    y = torch.cat([x[:, :1].sin() + 0.1 * torch.randn(600, 1), x[:, :2].prod(1, keepdim=True) + torch.randn(600, 1)], 1)
    return split(x, y, 200, seed)


def oscillator(seed: int) -> tuple[Pair, Pair]:
    """Place and speed of a damped oscillator at a time, of a frequency and a damping; the speed is measured worse."""
    torch.manual_seed(seed)
    t, w, d = 3 * torch.rand(700, 1), 1 + 2 * torch.rand(700, 1), torch.rand(700, 1)
    place = (-d * t).exp() * (w * t).cos()
    speed = -(-d * t).exp() * (d * (w * t).cos() + w * (w * t).sin())
    y = torch.cat([place + 0.05 * torch.randn(700, 1), speed + 0.5 * torch.randn(700, 1)], 1)
    return split(torch.cat([t, w, d], 1), y, 250, seed)


def of_pixels(make: Callable[[], nn.Module]) -> nn.Sequential:
    """A network of images ``[1, 8, 8]``, given their 64 pixels."""
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), make())


def of_rows() -> nn.Module:
    """Attention over the rows of an image."""
    return Attention(nn.Sequential(nn.Unflatten(1, (8, 8)), nn.Linear(8, 16)), 16, 2, 32)


# RULE, of which the rule was made, and FURTHER ones that it has not seen
REGRESSION: dict[str, Any] = {"likelihood": gaussian}
DIGITS, DIABETES, FRIEDMAN = (partial(sklearn, name) for name in ("load_digits", "load_diabetes", "make_friedman1"))
RULE = {
    "ResNet, digits": Task(partial(DIGITS, 700), partial(of_pixels, partial(resnet, 1, [16], 2)), 150, 3e-3, 5e-4),
    "overtrained MLP, digits": Task(partial(DIGITS, 300), partial(mlp, 64, 128, 128, 10), 1500, 1e-3),
    "decayed MLP, digits": Task(partial(DIGITS, 700), partial(mlp, 64, 64, 10), 200, 1e-2, 1e-1),
    "undertrained MLP, digits": Task(partial(DIGITS, 700), partial(mlp, 64, 64, 10), 15, 3e-3),
    "convolutions, digits": Task(
        partial(DIGITS, 700), partial(of_pixels, partial(cnn, 8, [1, 8, 16], padding=0, pools=(1, 1))), 200, 3e-3
    ),
    "noisy labels, digits": Task(noisy_digits, partial(mlp, 64, 64, 10), 60, 5e-3),
    "MLP, wine": Task(partial(sklearn, "load_wine", 90), partial(mlp, 13, 32, 3), 100),
    "MLP, iris": Task(partial(sklearn, "load_iris", 75), partial(mlp, 4, 32, 3), 200),
    "MLP, moons": Task(partial(sklearn, "make_moons", 100, noise=0.2), partial(mlp, 2, 32, 32, 2), 300),
    "MLP, ten blobs": Task(
        partial(sklearn, "make_blobs", 200, centers=10, cluster_std=1.5), partial(mlp, 2, 50, 50, 10), 500
    ),
    "diabetes": Task(partial(DIABETES, 240), partial(mlp, 10, 32, 1), 60, **REGRESSION),
    "overtrained, diabetes": Task(partial(DIABETES, 240), partial(mlp, 10, 50, 50, 1), 150, 3e-3, **REGRESSION),
    "gap": Task(gap, partial(mlp, 1, 50, 50, 1, act=nn.Tanh), 500, **REGRESSION),
    "friedman 1, 120": Task(partial(FRIEDMAN, 120, noise=1.0), partial(mlp, 10, 50, 50, 1), 80, 3e-3, **REGRESSION),
    "friedman 1, 480": Task(
        partial(FRIEDMAN, 480, noise=1.0), partial(mlp, 10, 50, 50, 1, act=nn.Tanh), 100, 3e-3, **REGRESSION
    ),
    "friedman 3": Task(partial(sklearn, "make_friedman3", 200, noise=0.1), partial(mlp, 4, 64, 1), 300, **REGRESSION),
    "two outputs": Task(two, partial(mlp, 3, 40, 40, 2, act=nn.Tanh), 400, **REGRESSION),
}
FURTHER = {
    "LayerNorm, breast cancer": Task(
        partial(sklearn, "load_breast_cancer", 250), partial(mlp, 30, 64, 64, 2, norm=True), 200, 3e-3
    ),
    "attention, digits": Task(partial(DIGITS, 900), of_rows, 250, 3e-3),
    "circles": Task(
        partial(sklearn, "make_circles", 120, noise=0.15, factor=0.6), partial(mlp, 2, 40, 40, 2, act=nn.Tanh), 300
    ),
    "counts": Task(counts, partial(mlp, 4, 40, 40, 1), 150, 5e-3, likelihood=poisson),
    "oscillator": Task(oscillator, partial(mlp, 3, 48, 48, 2, act=nn.SiLU), 250, 5e-3, **REGRESSION),
    "friedman 2, GELU": Task(
        partial(sklearn, "make_friedman2", 150, noise=50.0), partial(mlp, 4, 64, 64, 1, act=nn.GELU), 400, **REGRESSION
    ),
}


def trained(task: Task, seed: int) -> tuple[nn.Module, Pair, Pair]:
    """A network by AdamW on batches of 64, its training data, and tests."""
    torch.manual_seed(seed)
    (x, y), test = task.data(seed)
    net, likelihood = task.net(), task.likelihood()
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.lr, weight_decay=task.decay)
    for _ in range(task.steps):
        for part in torch.randperm(len(x)).split(64):
            descend(optimizer, lambda: likelihood.nll(net(x[part]), y[part]).mean())  # noqa: B023
    return net.eval(), (x, y), test


@torch.no_grad()
def own(net: nn.Module, likelihood: Any, train: Pair, test: Pair) -> float:
    """Test loss of the network itself."""
    x, y = test
    variance = [(net(train[0]) - train[1]).square().mean().clamp_min(1e-12)] if likelihood is gaussian else []
    return likelihood(*variance).nll(net(x), y).mean().item() / y[0].numel()


def ours(net: nn.Module, likelihood: Any, train: Pair, test: Pair) -> tuple[float, float | None]:
    """Test loss of a default fit, and the coverage of its 90 % intervals."""
    x, y = test
    fitted = bc.fit_laplace(net, likelihood(), list(zip(*(part.split(64) for part in train))))
    if likelihood is categorical:
        p: Any = fitted.predict(x)
        return nn.functional.nll_loss(p.log(), y).item(), None
    predictive = fitted.predictive(x)
    low, high = predictive.interval(0.9)
    return -predictive.log_prob(y).mean().item(), ((low <= y) & (y <= high)).double().mean().item()


def peer(net: nn.Module, likelihood: Any, train: Pair, test: Pair) -> tuple[float, float | None]:
    """The same of laplace-torch: last layer, Kronecker, prior (and noise) by its marginal likelihood."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    if likelihood is poisson:
        return math.nan, None
    x, y = test
    kind = "classification" if likelihood is categorical else "regression"
    fit = Laplace(net, kind, subset_of_weights="last_layer", hessian_structure="kron")
    fit.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*train), 64))
    if likelihood is categorical:
        fit.optimize_prior_precision(method="marglik")
        return nn.functional.nll_loss(fit(x, link_approx="probit").log(), y).item(), None
    logs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    adam = torch.optim.Adam(logs, lr=0.1)  # its documented recipe for a regression's prior and noise
    descend(adam, lambda: -fit.log_marginal_likelihood(logs[0].exp(), logs[1].exp()), 300)
    mean, covariance = fit(x)
    variance = covariance.diagonal(dim1=1, dim2=2) + fit.sigma_noise.detach() ** 2
    covered = ((y - mean).abs() <= 1.6449 * variance.sqrt()).double().mean().item()
    return nn.functional.gaussian_nll_loss(mean, y, variance, full=True).item(), covered


def row(task: Task, fit: Fit, seeds: int = SEEDS) -> dict[str, Any]:
    """One network over the seeds; a fit that is refused has an infinite loss."""
    found = []
    for seed in range(seeds):
        net, train, test = trained(task, seed)
        start = time.process_time()
        try:
            loss, coverage = fit(net, task.likelihood, train, test)
        except (ValueError, RuntimeError) as error:
            print(f"  seed {seed}: {type(error).__name__}: {error}", flush=True)
            loss, coverage = math.inf, None
        seconds, before = time.process_time() - start, own(net, task.likelihood, train, test)
        found.append((before, loss - before, coverage, seconds))
    owns, changes, covered, seconds = zip(*found)
    return {
        "network": statistics.mean(owns),
        "change": statistics.mean(changes),
        "worst": max(changes),
        "coverage": statistics.mean(covered) if None not in covered else None,
        "seconds": statistics.mean(seconds),
    }


def page(record: dict[str, Any]) -> str:
    """The networks, those that were looked at once last: the change in nats, in brackets the worst seed's."""
    fits = {"this library": "default", "its default before": "before", "laplace-torch 0.3": "laplace-torch"}
    lines = []
    for more in ("", ", further"):
        for network, ours in record.get("default" + more, {}).items():
            cells = [record.get(table + more, {}).get(network, {"change": math.nan}) for table in fits.values()]
            said = ["" if math.isnan(c["change"]) else f"{c['change']:+.3f} ({c['worst']:+.3f})" for c in cells]
            lines.append((network + more.replace(", further", " *"), f"{ours['network']:.3f}", *said))
    return markdown(("network", "its test NLL", *fits), lines) + "\n"


if __name__ == "__main__":
    given = command(only="", further=False, peer=False, name="default", out=RESULTS / "laplace_default.json")
    warnings.simplefilter("ignore")
    table = ("laplace-torch" if given.peer else given.name) + (", further" if given.further else "")
    tasks, fit = FURTHER if given.further else RULE, peer if given.peer else ours
    cells = (((table, name), partial(row, task, fit)) for name, task in tasks.items() if given.only in name)
    given.out.with_suffix(".md").write_text(page(fill(given.out, cells)))
