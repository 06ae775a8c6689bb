"""``python -m benchmarks.laplace_default``: what the default of ``bc.fit_laplace`` does to networks as people train them.

    python -m benchmarks.laplace_default                       # the networks that the rule was made with, five seeds
    python -m benchmarks.laplace_default --further             # six that were looked at once, after the rule was done
    python -m benchmarks.laplace_default --further --only oscillator            # one row of that table anew
    python -m benchmarks.laplace_default --peer                # laplace-torch's marginal likelihood on the same networks
    python -m benchmarks.laplace_default --name "before"         # a table of its own, as of another version of the package

Each network is trained on part of a small data set of scikit-learn's, or a drawn one. A row has the test negative log
likelihood of the network itself (for regression with the variance of its training residuals), how much a default fit changes
it in the mean over seeds and for the worst of them, and for regression the coverage of 90 % intervals.
``benchmarks/results/laplace_default.json`` holds one table a name, ``laplace_default.md`` what the documentation shows of it.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, keep, known, markdown


class Task(NamedTuple):
    """Data, split; the network to train; how; the likelihood of its outputs."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    net: nn.Module
    steps: int
    lr: float = 1e-2
    decay: float = 0.0
    kind: str = "classes"


def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.ReLU, norm: bool = False) -> nn.Sequential:
    """A network of these widths."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), *([nn.LayerNorm(b)] if norm else []), act()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


class Residual(nn.Module):
    """Two convolutions with batch norm and a skip connection."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.two, self.norm_two = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_one(self.one(x)))
        return F.relu(self.norm_two(self.two(y)) + self.skip(x))


class Attentive(nn.Module):
    """One layer of attention over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Linear(8, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.reshape(-1, 8, 8))).mean(1))


def resnet() -> nn.Sequential:
    """A small one with batch norm."""
    stem = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*stem, Residual(16, 16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def conv() -> nn.Sequential:
    """Two convolutions."""
    body = (nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*body, nn.Linear(256, 10))


def split(x: Tensor, y: Tensor, n: int, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Standardised inputs (and real targets), n for training."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = x[order], y[order]
    x = (x - x[:n].mean(0)) / x[:n].std(0).clamp_min(0.3 * float(x[:n].std(0).mean()))  # some pixels hardly vary
    if y.is_floating_point():
        y = (y - y[:n].mean(0)) / y[:n].std(0)
    return (x[:n], y[:n]), (x[n:], y[n:])


def sklearn(name: str, **options: Any) -> tuple[Tensor, Tensor]:
    """A data set by the name of its function."""
    import sklearn.datasets

    maker = getattr(sklearn.datasets, name)
    x, y = maker(return_X_y=True) if name.startswith("load") else maker(**options)
    y = torch.tensor(y)
    return torch.tensor(x, dtype=torch.float32), y.float().reshape(len(y), -1) if y.is_floating_point() else y.long()


def gap(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A sine with a gap in its inputs; tests are everywhere."""
    torch.manual_seed(seed)
    f = lambda x: torch.sin(3 * x) + 0.1 * torch.randn_like(x)  # noqa: E731
    x = torch.cat([torch.rand(40, 1) - 1.5, torch.rand(40, 1) + 0.5])
    new = 3 * torch.rand(200, 1) - 1.5
    return (x, f(x)), (new, f(new))


def noisy(data: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], share: float, classes: int) -> Any:
    """A share of all labels drawn anew."""
    return tuple((x, torch.where(torch.rand(len(y)) < share, torch.randint(classes, (len(y),)), y)) for x, y in data)


def digits(seed: int, n: int = 700) -> Any:
    """Images of 8 x 8."""
    return split(*sklearn("load_digits"), n, seed)


def regression(name: str, n: int, seed: int, **options: Any) -> Any:
    """A split of a data set with real targets."""
    made = {} if name.startswith("load") else {"n_samples": n + 400, "random_state": seed, **options}
    return split(*sklearn(name, **made), n, seed)


def counts(seed: int) -> Any:
    """Counts whose log rate is a nonlinear function."""
    torch.manual_seed(seed)
    x = torch.randn(600, 4)
    y = torch.poisson((0.5 + x[:, :1].sin() + 0.5 * x[:, 1:2] * x[:, 2:3]).exp().clamp_max(50))
    return (x[:200], y[:200]), (x[200:], y[200:])


def two(seed: int) -> Any:
    """Two targets, one ten times as noisy."""
    torch.manual_seed(seed)
    x = torch.randn(600, 3)
    y = torch.cat([x[:, :1].sin() + 0.1 * torch.randn(600, 1), x[:, :2].prod(1, keepdim=True) + torch.randn(600, 1)], 1)
    return split(x, y, 200, seed)


def oscillator(seed: int) -> Any:
    """Place and speed of a damped oscillator at a time, of a frequency and a damping; the speed is measured worse."""
    torch.manual_seed(seed)
    t, w, d = 3 * torch.rand(700, 1), 1 + 2 * torch.rand(700, 1), torch.rand(700, 1)
    place = (-d * t).exp() * (w * t).cos()
    speed = -(-d * t).exp() * (d * (w * t).cos() + w * (w * t).sin())
    y = torch.cat([place + 0.05 * torch.randn(700, 1), speed + 0.5 * torch.randn(700, 1)], 1)
    return split(torch.cat([t, w, d], 1), y, 250, seed)


R = {"kind": "regression"}


def tasks(seed: int) -> dict[str, Callable[[], Task]]:
    """The networks of a seed; made when they are asked for."""
    return {
        "ResNet, digits": lambda: Task(*digits(seed), resnet(), 150, 3e-3, 5e-4),
        "overtrained MLP, digits": lambda: Task(*digits(seed, 300), mlp(64, 128, 128, 10), 1500, 1e-3),
        "decayed MLP, digits": lambda: Task(*digits(seed), mlp(64, 64, 10), 200, 1e-2, 1e-1),
        "undertrained MLP, digits": lambda: Task(*digits(seed), mlp(64, 64, 10), 15, 3e-3),
        "convolutions, digits": lambda: Task(*digits(seed), conv(), 200, 3e-3),
        "noisy labels, digits": lambda: Task(*noisy(digits(seed), 0.2, 10), mlp(64, 64, 10), 60, 5e-3),
        "MLP, wine": lambda: Task(*split(*sklearn("load_wine"), 90, seed), mlp(13, 32, 3), 100),
        "MLP, iris": lambda: Task(*split(*sklearn("load_iris"), 75, seed), mlp(4, 32, 3), 200),
        "MLP, moons": lambda: Task(*regression("make_moons", 100, seed, noise=0.2), mlp(2, 32, 32, 2), 300),
        "MLP, ten blobs": lambda: Task(
            *regression("make_blobs", 200, seed, centers=10, cluster_std=1.5), mlp(2, 50, 50, 10), 500
        ),
        "diabetes": lambda: Task(*regression("load_diabetes", 240, seed), mlp(10, 32, 1), 60, **R),
        "overtrained, diabetes": lambda: Task(
            *regression("load_diabetes", 240, seed), mlp(10, 50, 50, 1), 150, 3e-3, **R
        ),
        "gap": lambda: Task(*gap(seed), mlp(1, 50, 50, 1, act=nn.Tanh), 500, **R),
        "friedman 1, 120": lambda: Task(
            *regression("make_friedman1", 120, seed, noise=1.0), mlp(10, 50, 50, 1), 80, 3e-3, **R
        ),
        "friedman 1, 480": lambda: Task(
            *regression("make_friedman1", 480, seed, noise=1.0), mlp(10, 50, 50, 1, act=nn.Tanh), 100, 3e-3, **R
        ),
        "friedman 3": lambda: Task(*regression("make_friedman3", 200, seed, noise=0.1), mlp(4, 64, 1), 300, **R),
        "two outputs": lambda: Task(*two(seed), mlp(3, 40, 40, 2, act=nn.Tanh), 400, **R),
    }


def further(seed: int) -> dict[str, Callable[[], Task]]:
    """Six that the rule has not seen."""
    return {
        "LayerNorm, breast cancer": lambda: Task(
            *split(*sklearn("load_breast_cancer"), 250, seed), mlp(30, 64, 64, 2, norm=True), 200, 3e-3
        ),
        "attention, digits": lambda: Task(*digits(seed, 900), Attentive(), 250, 3e-3),
        "circles": lambda: Task(
            *regression("make_circles", 120, seed, noise=0.15, factor=0.6), mlp(2, 40, 40, 2, act=nn.Tanh), 300
        ),
        "counts": lambda: Task(*counts(seed), mlp(4, 40, 40, 1), 150, 5e-3, kind="counts"),
        "oscillator": lambda: Task(*oscillator(seed), mlp(3, 48, 48, 2, act=nn.SiLU), 250, 5e-3, **R),
        "friedman 2, GELU": lambda: Task(
            *regression("make_friedman2", 150, seed, noise=50.0), mlp(4, 64, 64, 1, act=nn.GELU), 400, **R
        ),
    }


LIKELIHOODS = {
    "classes": bc.likelihoods.categorical,
    "regression": bc.likelihoods.gaussian,
    "counts": bc.likelihoods.poisson,
}


def trained(task: Task) -> nn.Module:
    """By AdamW on batches of 64."""
    likelihood = LIKELIHOODS[task.kind]()
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=task.lr, weight_decay=task.decay)
    x, y = task.train
    for _ in range(task.steps):
        for part in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            likelihood.nll(task.net(x[part]), y[part]).mean().backward()
            optimizer.step()
    return task.net.eval()


def ours(task: Task) -> tuple[float, float | None]:
    """Test loss of a default fit, and the coverage of its 90 % intervals."""
    x, y = task.train
    loader = [(x[i : i + 64], y[i : i + 64]) for i in range(0, len(x), 64)]
    fitted = bc.fit_laplace(task.net, LIKELIHOODS[task.kind](), loader)
    if task.kind == "classes":
        p = fitted.predict(task.test[0])
        return nn.functional.nll_loss(p.log(), task.test[1]).item(), None
    predictive = fitted.predictive(task.test[0])
    low, high = predictive.interval(0.9)
    covered = ((low <= task.test[1]) & (task.test[1] <= high)).double().mean().item()
    return -predictive.log_prob(task.test[1]).mean().item(), covered


def own(task: Task) -> float:
    """Test loss of the network itself."""
    likelihood = LIKELIHOODS[task.kind]()
    with torch.no_grad():
        if task.kind == "regression":
            v = (task.net(task.train[0]) - task.train[1]).square().mean().clamp_min(1e-12)
            likelihood = bc.likelihoods.gaussian(v)
        return likelihood.nll(task.net(task.test[0]), task.test[1]).mean().item() / task.test[1][0].numel()


def peer(task: Task) -> tuple[float, float | None]:
    """The same of laplace-torch: last layer, Kronecker, prior (and noise) by its marginal likelihood."""
    from laplace import Laplace

    if task.kind == "counts":
        return math.nan, None
    kind = {"classes": "classification"}.get(task.kind, task.kind)
    fit = Laplace(task.net, kind, subset_of_weights="last_layer", hessian_structure="kron")
    fit.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*task.train), 64))
    if task.kind == "classes":
        fit.optimize_prior_precision(method="marglik")
        return nn.functional.nll_loss(fit(task.test[0], link_approx="probit").log(), task.test[1]).item(), None
    logs = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(logs, lr=0.1)
    for _ in range(300):  # its documented recipe for a regression's prior and noise
        optimizer.zero_grad()
        (-fit.log_marginal_likelihood(logs[0].exp(), logs[1].exp())).backward()
        optimizer.step()
    mean, covariance = fit(task.test[0])
    variance = covariance.diagonal(dim1=1, dim2=2) + fit.sigma_noise.detach() ** 2
    loss = nn.functional.gaussian_nll_loss(mean, task.test[1], variance, full=True).item()
    covered = ((task.test[1] - mean).abs() <= 1.6449 * variance.sqrt()).double().mean().item()
    return loss, covered


def row(
    name: str, of_seed: Callable[[int], dict[str, Callable[[], Task]]], seeds: int, fit: Callable
) -> dict[str, Any]:
    """One network over the seeds."""
    changes, owns, covered, seconds = [], [], [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        task = of_seed(seed)[name]()
        trained(task)
        start = time.process_time()
        try:
            loss, coverage = fit(task)
        except (ValueError, RuntimeError) as error:
            print(f"  {name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
            loss, coverage = math.inf, None
        seconds.append(time.process_time() - start)
        owns.append(own(task))
        changes.append(loss - owns[-1])
        covered.append(coverage)
    out = {"network": statistics.mean(owns), "change": statistics.mean(changes), "worst": max(changes)}
    out["coverage"] = statistics.mean(covered) if None not in covered else None
    return {**out, "seconds": statistics.mean(seconds)}


def page(record: dict[str, Any]) -> str:
    """The networks, those that were looked at once last: the change in nats, in brackets the worst seed's."""
    fits = {"this library": "default", "its default before": "before", "laplace-torch 0.3": "laplace-torch"}
    lines = []
    for more in ("", ", further"):
        for network, ours in record["default" + more].items():
            cells = [record[table + more].get(network, {}) for table in fits.values()]
            said = [
                f"{c['change']:+.3f} ({c['worst']:+.3f})" if c and c["change"] == c["change"] else "" for c in cells
            ]
            lines.append((network + more.replace(", further", " *"), f"{ours['network']:.3f}", *said))
    return markdown(("network", "its test NLL", *fits), lines) + "\n"


if __name__ == "__main__":
    given = command(seeds=5, only="", further=False, peer=False, name="default")
    warnings.simplefilter("ignore")
    of_seed, fit = further if given.further else tasks, peer if given.peer else ours
    table = ("laplace-torch" if given.peer else given.name) + (", further" if given.further else "")
    record = known(RESULTS / "laplace_default.json")
    rows = record[table] = record.get(table, {}) if given.only else {}
    for network in (name for name in of_seed(0) if given.only in name):
        rows[network] = row(network, of_seed, given.seeds, fit)
        print(f"{network:26s} {rows[network]}", flush=True)
        if given.seeds >= 3:
            keep(RESULTS / "laplace_default.json", record)
    (RESULTS / "laplace_default.md").write_text(page(record))
