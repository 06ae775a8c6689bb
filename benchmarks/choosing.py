"""The two measurements of docs/choosing.md: temperature and calibration, and where a sampler starts.

    python -m benchmarks.choosing              # writes benchmarks/results/choosing.md

Digits of scikit-learn with clean labels, 400 to train on and 1,000 to test. A network 64-64-10, five chains of SGHMC
from the ends of five trainings; and an LSTM over the eight rows of an image, sampled from random weights and from a
training's end.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc

N, CHAINS = 400, 5
HERE = Path(__file__).parent
RESULTS = HERE / "results" / "choosing.md"


class Rows(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(-1, 8, 8))[0][:, -1])


def data():
    """Training and test pairs."""
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images.float()[order] / 16, labels[order]
    return (images[:N], labels[:N]), (images[N : N + 1000], labels[N : N + 1000])


def measures(draws, forward, test) -> str:
    """Accuracy, NLL, calibration error."""
    log_p = draws.predict(forward, [test], transform=lambda f: f.log_softmax(-1), reduce="log_mean_exp")
    m = bc.posterior.classification_metrics(log_p, test[1])
    return f"{m['accuracy']:.3f} | {m['nll']:.3f} | {m['ece']:.3f}"


def of_temperature(steps: int = 1500) -> list[str]:
    """What the temperature does to calibration on clean labels."""
    torch.manual_seed(0)
    train, test = data()
    nets = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)) for _ in range(CHAINS)]
    forward = bc.make_functional(nets[0]).forward
    start = bc.stack([bc.make_functional(net).params for net in nets])

    def loss(params, batch):
        return cross_entropy(forward(params, batch), batch[1])

    def run(tx, params, like=None, **options):
        step = bc.make_step(loss, tx)
        chains = bc.parallel(step, CHAINS)
        singles = zip(bc.unstack(params), [None] * CHAINS if like is None else bc.unstack(like))
        state = bc.stack([step.init(p, like=s) for p, s in singles])
        return bc.sample(chains, params, state, train, steps=steps, **options)

    ensemble = run(bc.sgd(0.2, 0.9, weight_decay=1 / N), start, burn_in=steps - 1)
    one = bc.Draws.from_trees([bc.unstack(ensemble.last[0])[0]])
    lines = ["| | accuracy | NLL | calibration error |", "| --- | --- | --- | --- |"]
    lines.append(f"| one network | {measures(one, forward, test)} |")
    for share in (1.0, 0.3, 0.1, 0.01):
        tx = bc.sgd(0.2, 0.9, weight_decay=1 / N, temperature=share / N)
        draws = run(tx, *ensemble.last, burn_in=steps // 3, thinning=steps // 60)
        lines.append(f"| {CHAINS} chains, T = {share:g} / N | {measures(draws, forward, test)} |")
    return [*lines, f"| ensemble of {CHAINS} | {measures(ensemble, forward, test)} |"]


def of_start(steps: int = 1000) -> list[str]:
    """Where a sampler of an LSTM at T = 1 / N gets to, from random weights and from a training's end."""
    torch.manual_seed(0)
    train, test = data()
    forward, start, _ = bc.make_functional(Rows())

    def loss(params, batch):
        return cross_entropy(forward(params, batch), batch[1])

    def run(tx, params, **options):
        return bc.sample(bc.make_step(loss, tx), params, tx.init(params), train, steps=steps, **options)

    trained = run(bc.adam(3e-3), start, burn_in=steps - 1)
    lines = ["| | accuracy | NLL | calibration error |", "| --- | --- | --- | --- |"]
    lines.append(f"| trained by Adam | {measures(trained, forward, test)} |")
    for where, params in (("random weights", start), ("the training's end", trained.last[0])):
        tx = bc.chain(bc.links.add_decayed_weights(1 / N), bc.sgld(0.02, temperature=1 / N))
        draws = run(tx, params, burn_in=steps // 2, thinning=steps // 20)
        lines.append(f"| SGLD at T = 1 / N from {where} | {measures(draws, forward, test)} |")
    return lines


def of_mnist() -> str:
    """NLL of a network, of posteriors at T = 1 / N and a tenth of it, and of an ensemble, from the record on MNIST."""
    record = json.loads((HERE / "experiments" / "results" / "mnist-small.json").read_text())
    methods = "SGD", "SGHMC, T = 1/N", "SGHMC, T = 0.1/N", "deep ensemble"

    def nll(labels: str, method: str) -> float:
        values = [table[method][f"{labels} nll"] for table in record["tables"]]
        return sum(values) / len(values)

    clean, noisy = ([f"{nll(labels, method):.3f}" for method in methods] for labels in ("clean", "noisy"))
    return (
        f"NLL {clean[0]} for one network, {clean[1]} at `T = 1 / N`, {clean[2]} at a tenth of it, {clean[3]} for an ensemble; "
        f"with wrong labels {noisy[0]}, {noisy[1]}, {noisy[2]} and {noisy[3]}"
    )


if __name__ == "__main__":
    RESULTS.write_text("\n".join([*of_temperature(), "", *of_start(), ""]))
    print(RESULTS.read_text(), of_mnist(), sep="\n")
