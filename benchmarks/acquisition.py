"""Active learning on scikit-learn's digits: which images to label next, by five rules and at random.

    python -m benchmarks.acquisition        # a quarter of an hour on one core; writes its record and docs/acquisition.png

A network of 64-32-10 units is trained to the optimum of ``sum of losses + |theta|^2 / 4`` on 20 labelled digits; then ten more
are labelled at a time, up to 150, of a pool of 1,000 in which every image stands twice, as in the repeated MNIST of Kirsch et
al. (2019). Its posterior is Laplace's over all layers with Kronecker factors at the same prior, its outputs 200 draws of
linearised functions; ``BALD`` takes the ten largest mutual informations, EPIG asks for labels of 100 unlabelled images. Means
over five seeds of pool and start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bayesopt_chain as bc
from benchmarks.influence import at_optimum
from benchmarks.measure import keep

PRIOR, SEEDS, START, BATCH, LABELS = 0.5, 5, 20, 10, 150
RESULTS = Path(__file__).parent / "results" / "acquisition.json"
PICTURE = Path(__file__).parents[1] / "docs" / "acquisition.png"


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    """The network at its optimum."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return at_optimum(net, x, y, PRIOR, max_iter=100)


def by_draws(rule: Callable[[Any, Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """A rule on the predictives of the pool and of 100 images of it, over the same 200 functions."""

    def choose(fitted: Any, pool: Tensor) -> Tensor:
        some = pool[torch.randperm(len(pool))[:100]]
        drawn = fitted.functional_samples(torch.cat([pool, some]), samples=200)
        of = fitted.likelihood.mixture
        return rule(of(drawn[:, : len(pool)]), of(drawn[:, len(pool) :]))

    return choose


RULES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "random": lambda fitted, pool: torch.randperm(len(pool))[:BATCH],
    "BALD": by_draws(lambda pool, _: pool.epistemic.topk(BATCH).indices),
    "BatchBALD": by_draws(lambda pool, _: bc.posterior.batch_bald(pool, BATCH, configurations=2000).indices),
    "EPIG": by_draws(lambda pool, targets: bc.posterior.epig(pool, targets).topk(BATCH).indices),
    "D-optimal": lambda fitted, pool: bc.posterior.d_optimal(fitted.predictive(pool, joint=True), BATCH).indices,
}


def curve(rule: str, seed: int) -> list[float]:
    """Test accuracies at 20, 30, ..., 150 labels."""
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    x, y = images[order].float() / 16, labels[order]
    test, pool = (x[500:], y[500:]), (torch.cat([x[:500]] * 2), torch.cat([y[:500]] * 2))
    have = torch.zeros(len(pool[1]), dtype=torch.bool)
    have[torch.randperm(len(pool[1]), generator=generator)[:START]] = True
    torch.manual_seed(seed)
    found = []
    while True:
        train = pool[0][have], pool[1][have]
        net = trained(*train, seed)
        found.append(float((net(test[0]).argmax(1) == test[1]).float().mean()))
        if have.sum() >= LABELS:
            return found
        torch.manual_seed(1000 * seed + int(have.sum()))
        fitted = bc.fit_laplace(
            net,
            bc.likelihoods.categorical(),
            [train],
            subset="all",
            structure="kronecker",
            tune=None,
            prior_precision=PRIOR,
        )
        free = (~have).nonzero()[:, 0]
        if rule == "D-optimal":  # its joint covariance is that of all outputs: of a random third of the pool
            free = free[torch.randperm(len(free))[:300]]
        have[free[RULES[rule](fitted, pool[0][free])]] = True


def main() -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "labels": list(range(START, LABELS + 1, BATCH)),
        "rules": {},
    }
    for rule in RULES:
        curves = torch.tensor([curve(rule, seed) for seed in range(SEEDS)])
        error = curves.std(0) / SEEDS**0.5
        record["rules"][rule] = {"accuracy": curves.mean(0).tolist(), "standard error": error.tolist()}
        print(rule, [round(a, 3) for a in curves.mean(0).tolist()], flush=True)
        keep(RESULTS, record)
    picture(record).savefig(PICTURE)


def picture(record: dict[str, Any]) -> Any:
    """Accuracy against labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained", dpi=130)
    ax = figure.subplots()
    for rule, row in record["rules"].items():
        mean, error = torch.tensor(row["accuracy"]), torch.tensor(row["standard error"])
        (line,) = ax.plot(record["labels"], mean, label=rule, color="black" if rule == "random" else None)
        ax.fill_between(record["labels"], mean - error, mean + error, alpha=0.15, color=line.get_color())
    ax.set_xlabel("labelled digits")
    ax.set_ylabel("test accuracy")
    ax.legend()
    return figure


if __name__ == "__main__":
    main()
