r"""A network one trusts: seven posteriors of one network on MNIST, on clean labels, on few and on wrong ones.

The network has one hidden layer on images averaged over blocks of ``pool x pool`` pixels. It is trained on digits 0 to 7
alone; 8 and 9 are the inputs that it should know nothing about. Three tasks, fixed beforehand:

    clean    ``data`` images with their labels
    few      ``few`` images with their labels
    noisy    ``noisy`` images, a share of whose labels was replaced by random ones; the test labels are right

The loss is the mean cross entropy with the prior ``N(0, 1)`` of every weight; gradients are of the whole training set, but for
SWAG, which lives on the noise of minibatches. Chains and ensemble start from the same weights and take the same number of
gradients. ``auroc`` is of telling 8 and 9 from the others by the entropy of the predictive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

import bayesopt_chain as bc
from benchmarks.experiments.common import Experiment, Table, data_folder, laplace_at, log_mean, stepped

SEEN = 8  # classes 0 to 7 are trained on
TASKS = ("clean", "few", "noisy")


class Task(NamedTuple):
    """Training set, test set of seen digits, and images of unseen ones; images are ``[N, pixels]``."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unseen: Tensor


def read(pool: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images scaled to mean 0 and deviation 1 (about) and labels, of training and test."""
    with numpy.load(data_folder() / "mnist" / "mnist.npz") as file:
        arrays = [torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")]
    images = [(avg_pool2d(x[:, None].float() / 255, pool) - 0.13) / 0.31 for x in arrays[::2]]
    return images[0].flatten(1), arrays[1].long(), images[1].flatten(1), arrays[3].long()


def make_task(name: str, s: Mapping[str, Any], seed: int) -> Task:
    """One of the three tasks."""
    x, y, x_test, y_test = read(s["pool"])
    g = torch.Generator().manual_seed(seed)
    seen = (y < SEEN).nonzero().squeeze(1)
    rows = seen[torch.randperm(len(seen), generator=g)[: s["data" if name == "clean" else name]]]
    x, y = x[rows], y[rows].clone()
    if name == "noisy":
        wrong = torch.rand(len(y), generator=g) < s["share"]
        y = torch.where(wrong, torch.randint(SEEN, (len(y),), generator=g), y)
    known, unknown = (y_test < SEEN).nonzero().squeeze(1), (y_test >= SEEN).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=g)[: s["test"]]]
    unknown = unknown[torch.randperm(len(unknown), generator=g)[: s["test"] // 4]]
    return Task((x, y), (x_test[known], y_test[known]), x_test[unknown])


def network(s: Mapping[str, Any]) -> nn.Sequential:
    """One hidden layer, at PyTorch's random initial weights."""
    return nn.Sequential(nn.Linear((28 // s["pool"]) ** 2, s["hidden"]), nn.GELU(), nn.Linear(s["hidden"], SEEN))


class Work(NamedTuple):
    """What every method is given."""

    task: Task
    s: Mapping[str, Any]
    forward: Callable[[Any, Any], Tensor]
    params: dict[str, Tensor]  # of all chains, stacked

    @property
    def n(self) -> int:
        return len(self.task.train[0])

    @property
    def inputs(self) -> Tensor:
        """Seen and unseen test images."""
        return torch.cat([self.task.test[0], self.task.unseen])

    def loss(self, params: Any, batch: Any) -> Tensor:
        """Mean negative log posterior per datum: the mean cross entropy with the prior's share."""
        prior = sum((p**2).sum() for p in params.values())
        return cross_entropy(self.forward(params, batch), batch[1]) + prior / (2 * self.n)

    def run(self, tx: Any, draws: int) -> bc.Draws:
        """All chains: ``draws`` from the second half."""
        steps = self.s["steps"]
        chains = bc.parallel(bc.make_step(self.loss, tx), self.s["chains"])
        burn_in = steps // 2 if draws > 1 else steps - 1
        thinning = max(1, (steps - burn_in) // draws)
        state = chains.init(tx, self.params)
        return bc.sample(chains, self.params, state, self.task.train, steps=steps, burn_in=burn_in, thinning=thinning)

    def classes(self, draws: Any) -> Tensor:
        """Log probabilities of the test images ``[S, T, C]`` under draws stacked on axis 0."""
        return torch.vmap(lambda p: self.forward(p, (self.inputs, None)))(draws).log_softmax(-1).detach()


def sghmc(w: Work, share: float) -> Tensor:
    """Parallel chains at a share of the Bayesian temperature ``1 / N``."""
    draws = w.run(bc.sghmc(w.s["lr"], 0.9, temperature=share / w.n), w.s["draws"])
    return w.classes({name: p.flatten(0, 1) for name, p in draws.params.items()})


def multi_swag(w: Work, start: dict[str, Tensor]) -> Tensor:
    """Every optimizer goes on with minibatches and a constant lr, and its iterates make a Gaussian."""
    size = min(100, w.n // 2)
    every = w.n // size
    swag = bc.swag(rank=w.s["rank"], every=every)
    tx = bc.chain(bc.sgd(w.s["swag_lr"], momentum=0.9), swag)
    out = []
    for k in range(w.s["chains"]):
        epochs = [torch.randperm(w.n)[: every * size].split(size) for _ in range(2 * w.s["rank"])]
        batches = [tuple(part[rows] for part in w.task.train) for epoch in epochs for rows in epoch]
        params, state = stepped(w.loss, tx, {name: p[k] for name, p in start.items()}, batches, len(batches))
        out.append(w.classes(swag.posterior(state, params).sample((w.s["draws"],))))
    return torch.cat(out)


def last_layer(w: Work, mode: dict[str, Tensor]) -> Tensor:
    """The optimizer's network with a Gaussian on its last layer, by the whole GGN; draws of the linearised logits."""
    forward, kept = bc.curvature.subset(w.forward, mode, "2")
    posterior = laplace_at(kept, forward, bc.likelihoods.categorical(), w.task.train)
    return w.classes({**{n: p.expand(100, *p.shape) for n, p in mode.items()}, **posterior.sample((100,))})


def ivon(w: Work) -> Tensor:
    """Variational inference in one run."""
    params = {name: p[0] for name, p in w.params.items()}
    tx = bc.vi.ivon(w.s["ivon_lr"], temperature=1 / w.n, init_hessian=0.1)
    params, state = stepped(w.loss, tx, params, w.task.train, w.s["steps"])
    return w.classes(tx.posterior(state, params).sample((100,)))


def predictions(name: str, s: Mapping[str, Any], seed: int) -> tuple[Task, dict[str, Tensor]]:
    """The task, and of every method the log probabilities of all test images under its draws, ``[S, T, C]``."""
    task = make_task(name, s, seed)
    forward = bc.make_functional(network(s)).forward
    starts = [bc.make_functional(network(s)).params for _ in range(s["chains"])]
    w = Work(task, s, forward, {n: p.detach() for n, p in bc.stack(starts).items()})
    ensemble = w.run(bc.sgd(s["lr"], momentum=0.9), 1)[-1]  # the optimizer of every start
    members = w.classes(ensemble)
    return task, {
        "SGD": members[:1],
        "last-layer Laplace": last_layer(w, {n: p[0] for n, p in ensemble.items()}),
        "IVON": ivon(w),
        "deep ensemble": members,
        "MultiSWAG": multi_swag(w, ensemble),
        "SGHMC, T = 1/N": sghmc(w, 1.0),
        "SGHMC, T = 0.1/N": sghmc(w, 0.1),
    }


def measures(task: Task, log_p: Tensor) -> dict[str, float]:
    """Of log probabilities ``[S, T, C]``."""
    mean = log_mean(log_p)
    known, unknown = mean[: len(task.test[0])], mean[len(task.test[0]) :]
    out = bc.posterior.classification_metrics(known, task.test[1])
    entropy = [torch.special.entr(p.exp()).sum(-1) for p in (known, unknown)]
    return {name: out[name] for name in ("accuracy", "nll", "ece")} | {"auroc": bc.posterior.detection_auroc(*entropy)}


def run(settings: Mapping[str, Any], seed: int) -> Table:
    """Every method on every task; the measures carry the task's name."""
    table: Table = {}
    for name in TASKS:
        task, found = predictions(name, settings, seed)
        for method, log_p in found.items():
            row = {f"{name} {measure}": value for measure, value in measures(task, log_p).items()}
            table[method] = table.get(method, {}) | row
    return table


def says(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """One sentence on what came out."""
    parts, wins = [], []
    for name in TASKS:
        one, bayes, cold = (table[m][f"{name} nll"]["mean"] for m in ("SGD", "SGHMC, T = 1/N", "SGHMC, T = 0.1/N"))
        wins += [name] * (bayes < one)
        best = min(table, key=lambda m: table[m][f"{name} nll"]["mean"])
        parts.append(
            f"{name}: one network {one:.3f}, T = 1/N {bayes:.3f}, a tenth of it {cold:.3f}, lowest "
            f"{table[best][f'{name} nll']['mean']:.3f} ({best})"
        )
    return f"NLL, {'; '.join(parts)}. At T = 1/N the posterior beats one network on: {', '.join(wins) or 'none'}."


EXPERIMENT = Experiment(
    "mnist",
    "A network one trusts (MNIST)",
    "none of its figures: it shows the walk on other data, and reports that colder posteriors do better there",
    {
        "smoke": {"data": 200, "few": 50, "noisy": 100, "share": 0.3, "test": 200, "pool": 4, "hidden": 8}
        | {"steps": 60, "chains": 2, "draws": 3, "rank": 2, "lr": 0.05, "swag_lr": 0.05, "ivon_lr": 0.1},
        "small": {"data": 3000, "few": 100, "noisy": 1000, "share": 0.3, "test": 2000, "pool": 4, "hidden": 32}
        | {"steps": 1000, "chains": 4, "draws": 20, "rank": 10, "lr": 0.05, "swag_lr": 0.02, "ivon_lr": 0.1},
        "full": {"data": 3000, "few": 100, "noisy": 1000, "share": 0.3, "test": 8000, "pool": 1, "hidden": 128}
        | {"steps": 20_000, "chains": 10, "draws": 100, "rank": 20, "lr": 0.05, "swag_lr": 0.02, "ivon_lr": 0.1},
    },
    {"smoke": 1, "small": 3, "full": 10},
    run,
    says,
)
