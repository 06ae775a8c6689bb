"""One network, four posteriors: handwritten digits, two classes of which are never shown in training.

The loss is cross entropy, the mean over the data; ``weight_decay = 1 / N`` adds the prior ``N(0, 1)`` of every weight.
With momentum, ``temperature=0`` is the optimizer and finds a mode of the posterior; ``temperature=1 / N`` is SGHMC and
draws from it. All chains take the same number of full-batch gradients, from the same initial weights.

A prediction is the mean over draws of the softmax, ``p = E_w p_w``. Its entropy splits into what more data could not
tell and what the draws disagree about:

    total H(p)  =  aleatoric E_w H(p_w)  +  epistemic H(p) - E_w H(p_w).

What to expect (seeds 20 to 23, which were not looked at before the settings were fixed): parallel SGHMC tells unseen digits
apart best in every seed, by either uncertainty, and both many-chain methods beat SGD at it. On the seen digits the
accuracies lie within two points, and the posterior at ``T = 1 / N`` is underconfident, as it usually is on clean labels: its
NLL and ECE are worse than SGD's. A single chain of this length is worse than SGD at telling unseen digits apart too: one
mode is not enough.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, nll_loss
from torchmetrics.functional.classification import multiclass_calibration_error
from torchopt.base import GradientTransformation
from tqdm import tqdm

import bayesopt_chain as bc
from bayesopt_chain.demo.figure import draw_figure

SEEN = 8  # classes 0 to 7 are trained on; 8 and 9 appear only when the finished posterior is asked about them


class Posterior(NamedTuple):
    """A chain of transformations, how many copies of it run, and how many draws each copy keeps."""

    tx: GradientTransformation
    chains: int
    draws: int


def posteriors(N: int, K: int, S: int, lr: float = 0.1) -> dict[str, Posterior]:
    """The four methods for N data, K chains and S draws. Read down the columns: what differs is what you see."""
    # fmt: off
    return {
        "SGD":            Posterior(bc.sgd(lr, momentum=0.9, weight_decay=1 / N, temperature=0.0),   chains=1, draws=1),
        "SGHMC":          Posterior(bc.sgd(lr, momentum=0.9, weight_decay=1 / N, temperature=1 / N), chains=1, draws=S),
        "Deep ensemble":  Posterior(bc.sgd(lr, momentum=0.9, weight_decay=1 / N, temperature=0.0),   chains=K, draws=1),
        "Parallel SGHMC": Posterior(bc.sgd(lr, momentum=0.9, weight_decay=1 / N, temperature=1 / N), chains=K, draws=S),
    }
    # fmt: on


def network() -> nn.Module:
    """One hidden layer on the 64 pixels, at PyTorch's random initial weights."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, SEEN))


def sample(posterior: Posterior, train: tuple[Tensor, Tensor], images: Tensor, steps: int, bar: tqdm) -> Tensor:
    """Class probabilities of ``images`` under every kept draw: shape (chains * draws, images, classes)."""
    model = network()

    def loss(params, batch):
        x, label = batch
        return cross_entropy(functional_call(model, params, (x,)), label)

    def predict(params, x):
        return functional_call(model, params, (x,)).softmax(-1)

    chains = bc.parallel(bc.make_step(loss, posterior.tx), posterior.chains)
    params = bc.stack([dict(network().named_parameters()) for _ in range(posterior.chains)])
    state = chains.init(posterior.tx, params)

    thinning = max(1, steps // (2 * posterior.draws))  # the first half of the chain is burn-in
    kept = {steps - i * thinning for i in range(posterior.draws)}
    probabilities = []
    for t in range(1, steps + 1):
        params, state, info = chains(params, state, train)
        if t in kept:
            probabilities.append(torch.vmap(predict, in_dims=(0, None))(params, images).detach())
        bar.set_postfix_str(f"loss {info.loss.mean():.3f}", refresh=False)
        bar.update()
    return torch.cat(probabilities)


def split_uncertainty(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic part, in nats, of the entropy of the mean prediction.

    Args:
        probabilities: shape (draws, data, classes), sums to 1 over the last axis.

    Returns:
        Two tensors of shape (data,), neither negative; the second is the mutual information of label and weights.

    Example:
        >>> import torch
        >>> two_sure_draws_that_disagree = torch.eye(2)[:, None]
        >>> split_uncertainty(two_sure_draws_that_disagree)
        (tensor([0.]), tensor([0.6931]))
    """
    total = torch.special.entr(probabilities.mean(0)).sum(-1)
    aleatoric = torch.special.entr(probabilities).sum(-1).mean(0)
    return aleatoric, (total - aleatoric).clamp(min=0)


def scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, NLL and ECE on the seen classes; AUROC of telling the unseen ones apart by either uncertainty."""
    seen = labels < SEEN
    mean, label = probabilities.mean(0)[seen], labels[seen]
    aleatoric, epistemic = split_uncertainty(probabilities)
    return {
        "accuracy": float(accuracy_score(label, mean.argmax(-1))),
        "nll": float(nll_loss(mean.log(), label)),
        "ece": float(multiclass_calibration_error(mean, label, num_classes=SEEN, n_bins=15)),
        "auroc_total": float(roc_auc_score(~seen, aleatoric + epistemic)),
        "auroc_epistemic": float(roc_auc_score(~seen, epistemic)),
    }


def load(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train on 60 % of the digits 0 to 7; test on the other 40 % and on all digits 8 and 9."""
    images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    images = (images.float().reshape(-1, 1, 8, 8) - 5) / 6  # pixels are 0 to 16, with mean 5 and deviation 6
    (seen,), (unseen,) = (labels < SEEN).nonzero(as_tuple=True), (labels >= SEEN).nonzero(as_tuple=True)
    train, held_out = train_test_split(seen, train_size=0.6, stratify=labels[seen], random_state=seed)
    test = torch.cat([torch.as_tensor(held_out), unseen])
    return (images[train], labels[train]), (images[test], labels[test])


def run(seed: int = 0, steps: int = 2000, chains: int = 8, draws: int = 25, figure: str | Path = "demo.png") -> dict:
    """Sample the four posteriors, print the table, draw the figure; returns what was printed."""
    train, (images, labels) = load(seed)
    N, unseen = len(train[0]), int((labels >= SEEN).sum())
    methods = posteriors(N, chains, draws)
    print(
        f"digits 0-7: N = {N} to train on, {len(labels) - unseen} to test; digits 8 and 9: {unseen}, never trained on"
    )
    print(f"seed {seed}, {steps} full-batch gradients per chain\n")

    probabilities, table = {}, {}
    with tqdm(total=steps * sum(m.chains for m in methods.values()), unit="gradient", disable=None) as bar:
        for name, method in methods.items():
            bar.set_description(f"{name:14}")
            torch.manual_seed(seed)
            start = time.perf_counter()
            probabilities[name] = sample(method, train, images, steps, bar)
            seconds = time.perf_counter() - start
            table[name] = {"draws": len(probabilities[name]), **scores(probabilities[name], labels), "seconds": seconds}

    print_table(table)
    draw_figure(
        figure,
        {name: (p.mean(0), *split_uncertainty(p)) for name, p in probabilities.items()},
        images.squeeze(1),
        labels,
        SEEN,
        table,
    )
    print(f"\nfigure: {figure}")
    return {"seed": seed, "steps": steps, "chains": chains, "N": N, "methods": table}


def print_table(table: dict[str, dict[str, float]]) -> None:
    """One row per method, and how to read it."""
    print(f"\n{'':16}{'':>7}{'seen digits, test set':^30}{'unseen digits, AUROC':^22}")
    print(f"{'':16}{'draws':>7}{'accuracy':>11}{'NLL':>9}{'ECE':>9}{'total':>10}{'epistemic':>11}{'time':>9}")
    for name, row in table.items():
        print(
            f"{name:16}{row['draws']:7d}{row['accuracy']:11.3f}{row['nll']:9.4f}{row['ece']:9.4f}"
            f"{row['auroc_total']:10.3f}{row['auroc_epistemic']:11.3f}{row['seconds']:7.1f} s"
        )
    print(
        "\nAccuracy and AUROC: higher is better; NLL and ECE: lower is better. A single network has no epistemic"
        "\nuncertainty, so its AUROC there is a coin's 0.5."
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bayesopt_chain.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the split, the initial weights and the noise (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=2000, help="gradients per chain (%(default)s)")
    parser.add_argument("--chains", type=int, default=8, help="of the ensemble and of parallel SGHMC (%(default)s)")
    parser.add_argument("--draws", type=int, default=25, help="kept per chain by the samplers (%(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("demo.png"), help="where to write it (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the table here")
    options = vars(parser.parse_args(arguments))
    for name in ("steps", "chains", "draws"):
        if options[name] < 1:
            parser.error(f"--{name} must be at least 1, got {options[name]}")
    if options["draws"] > options["steps"]:
        parser.error(f"--draws {options['draws']} exceeds --steps {options['steps']}; a step gives at most one draw")
    path = options.pop("json")
    result = run(**options)
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n")
