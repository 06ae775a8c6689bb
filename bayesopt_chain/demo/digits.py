"""One network, four posteriors: handwritten digits of which some labels are wrong, and two classes that are never shown.

The task was fixed before the seeds that are reported were run: scikit-learn's digits 0 to 7, 400 of them to train on, and three
in ten of their labels replaced by random ones. The test labels are right. The loss is cross entropy, the mean over the data;
``weight_decay = 1 / N`` adds the prior ``N(0, 1)`` of every weight. With momentum, ``temperature=0`` is the optimizer and
finds a mode of the posterior; ``temperature=1 / N`` is SGHMC and draws from it. All chains take the same number of
full-batch gradients from the same initial weights; the single network is the first of the ensemble, the single chain the first
of the parallel ones.

A prediction is the mean over draws of the softmax, ``p = E_w p_w``. Its entropy splits into what more data could not
tell and what the draws disagree about:

    total H(p)  =  aleatoric E_w H(p_w)  +  epistemic H(p) - E_w H(p_w).

A network that is trained until it fits every label is sure of the wrong ones too. The posterior is not, because it averages
over all networks that the labels leave possible. On clean labels the order may turn round: there the posterior at
``T = 1 / N`` is often underconfident (``--wrong 0`` shows it).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import bayesopt_chain as bc
from bayesopt_chain.demo.figure import draw_figure

SEEN = 8  # classes 0 to 7 are trained on; 8 and 9 appear only when the finished posterior is asked about them
METHODS = ("SGD", "SGHMC", "Deep ensemble", "Parallel SGHMC")


class Task(NamedTuple):
    """Images ``[N, 1, 8, 8]`` and labels to train on and to test on; labels of ``SEEN`` and above are never trained on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load(seed: int, data: int = 400, wrong: float = 0.3) -> Task:
    """Train on ``data`` digits 0 to 7, a share ``wrong`` of whose labels is random; test on the others and on all 8 and 9."""
    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 5) / 6  # pixels are 0 to 16, with mean 5 and deviation 6
    g = torch.Generator().manual_seed(seed)
    seen, unseen = (labels < SEEN).nonzero().squeeze(1), (labels >= SEEN).nonzero().squeeze(1)
    seen = seen[torch.randperm(len(seen), generator=g)]
    train, test = seen[:data], torch.cat([seen[data:], unseen])
    replaced = torch.rand(data, generator=g) < wrong
    given = torch.where(replaced, torch.randint(SEEN, (data,), generator=g), labels[train])
    return Task((images[train], given), (images[test], labels[test]))


def network() -> nn.Module:
    """One hidden layer on the 64 pixels, at PyTorch's random initial weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, SEEN))


def probabilities(task: Task, temperature: float, steps: int, chains: int, draws: int, lr: float = 0.1) -> Tensor:
    """Class probabilities of the test images under every draw of every chain, ``[draws, chains, images, classes]``."""
    forward = bc.make_functional(network()).forward

    def loss(params, batch):
        return cross_entropy(forward(params, batch), batch[1])

    tx = bc.sgd(lr, momentum=0.9, weight_decay=1 / len(task.train[1]), temperature=temperature)
    starts = bc.stack([bc.make_functional(network()).params for _ in range(chains)])
    params = {name: p.detach() for name, p in starts.items()}
    step = bc.parallel(bc.make_step(loss, tx), chains)
    thinning = max(1, steps // (2 * draws))  # the first half of the chain is burn-in
    burn_in = steps - draws * thinning
    run = bc.sample(step, params, step.init(tx, params), task.train, steps=steps, burn_in=burn_in, thinning=thinning)
    p = run.predict(forward, [task.test], transform=lambda f: f.softmax(-1), reduce="stack")
    return p.unflatten(0, (draws, chains))


def four_posteriors(task: Task, seed: int, steps: int, chains: int, draws: int) -> dict[str, Tensor]:
    """Class probabilities ``[S, images, classes]`` of every method; they differ in temperature and number of chains."""
    torch.manual_seed(seed)
    optimized = probabilities(task, 0.0, steps, chains, 1)
    torch.manual_seed(seed)
    sampled = probabilities(task, 1 / len(task.train[1]), steps, chains, draws)
    each = (optimized[:, 0], sampled[:, 0], optimized.flatten(0, 1), sampled.flatten(0, 1))
    return dict(zip(METHODS, each))


def scores(p: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE on the seen classes; AUROC of telling the unseen ones apart by either uncertainty."""
    seen = labels < SEEN
    measures = bc.predict.classification_metrics(p.mean(0)[seen].log(), labels[seen])
    u = bc.predict.uncertainty_of_classes(p)
    return {name: measures[name] for name in ("accuracy", "nll", "ece")} | {
        f"auroc_{kind}": bc.predict.detection_auroc(value[seen], value[~seen])
        for kind, value in (("total", u.total), ("epistemic", u.epistemic))
    }


def run(
    seed: int = 0,
    seeds: int = 10,
    steps: int = 1000,
    chains: int = 5,
    draws: int = 20,
    data: int = 400,
    wrong: float = 0.3,
    figure: str | Path = "demo.png",
) -> dict:
    """Sample the four posteriors for every seed, print the table, draw the first seed's figure; returns what was printed."""
    print(
        f"digits 0-7: N = {data} to train on, {wrong:.0%} of their labels random; digits 8 and 9 are never trained on"
    )
    print(f"{seeds} seeds from {seed}, {chains} chains of {steps} full-batch gradients\n")
    tables = []
    for each in tqdm(range(seed, seed + seeds), unit="seed", disable=None):
        task = load(each, data, wrong)
        found = four_posteriors(task, each, steps, chains, draws)
        tables.append({name: scores(p, task.test[1]) for name, p in found.items()})
        if each == seed:
            parts = {name: (p.mean(0), *bc.predict.uncertainty_of_classes(p)[1:]) for name, p in found.items()}
            draw_figure(figure, parts, task.test[0].squeeze(1), task.test[1], SEEN, tables[0])
    print_table(tables)
    print(f"\nfigure of seed {seed}: {figure}")
    settings = {"steps": steps, "chains": chains, "draws": draws, "N": data, "wrong": wrong}
    return {"seeds": list(range(seed, seed + seeds)), **settings, "tables": tables}


def print_table(tables: list[dict[str, dict[str, float]]]) -> None:
    """One row per method, mean over seeds, and in how many of them the posterior beat the single network."""
    print(f"\n{'':16}{'seen digits, test set':^30}{'unseen digits, AUROC':^22}")
    print(f"{'':16}{'accuracy':>10}{'NLL':>10}{'ECE':>10}{'total':>10}{'epistemic':>12}")
    for name in METHODS:
        row = {key: statistics.fmean(table[name][key] for table in tables) for key in tables[0][name]}
        print(
            f"{name:16}{row['accuracy']:10.3f}{row['nll']:10.4f}{row['ece']:10.4f}"
            f"{row['auroc_total']:10.3f}{row['auroc_epistemic']:12.3f}"
        )
    print(
        "\nMean over seeds. Accuracy and AUROC: higher is better; NLL and ECE: lower is better. A single network has no"
    )
    print("epistemic uncertainty, so its AUROC there is a coin's 0.5.")
    for name in METHODS[1:]:
        wins = sum(table[name]["nll"] < table["SGD"]["nll"] for table in tables)
        print(f"{name}: lower NLL than the single network in {wins} of {len(tables)} seeds")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bayesopt_chain.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="the first: of data, initial weights and noise (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=10, help="how many (%(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="gradients per chain (%(default)s)")
    parser.add_argument("--chains", type=int, default=5, help="of the ensemble and of parallel SGHMC (%(default)s)")
    parser.add_argument("--draws", type=int, default=20, help="kept per chain by the samplers (%(default)s)")
    parser.add_argument("--data", type=int, default=400, help="digits to train on (%(default)s)")
    parser.add_argument("--wrong", type=float, default=0.3, help="share of their labels replaced (%(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("demo.png"), help="where to write it (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    options = vars(parser.parse_args(arguments))
    for name in ("seeds", "steps", "chains", "draws", "data"):
        if options[name] < 1:
            parser.error(f"--{name} must be at least 1, got {options[name]}")
    if not 0 <= options["wrong"] <= 1:
        parser.error(f"--wrong is a share between 0 and 1, got {options['wrong']}")
    if 2 * options["draws"] > options["steps"]:
        parser.error(
            f"--draws {options['draws']} exceeds half of --steps {options['steps']}; the first half is burn-in"
        )
    path = options.pop("json")
    result = run(**options)
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n")
