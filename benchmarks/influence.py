"""How well influence predicts retraining: the linear datamodelling score on scikit-learn's digits.

    python -m benchmarks.influence        # four minutes on one core; writes results/influence.json and docs/influence.png

A network of 64-32-10 units is trained to the optimum of ``sum of losses + |theta|^2 / 2`` on 500 digits, and again, from the
same start, on 100 random halves of them. The score (Ilyas et al., 2022; Park et al., 2023) is the rank correlation over the
100 halves of a test digit's loss after retraining with what the influences of the data left out add up to, averaged over 200
test digits. Where kronfluence can be imported its EK-FAC influences of the same network are scored too, with the same prior as
damping.
"""

from __future__ import annotations

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc
from benchmarks.measure import keep

TRAIN, TEST, HALVES, PRIOR = 500, 200, 100, 1.0
RESULTS = Path(__file__).parent / "results" / "influence.json"
PICTURE = Path(__file__).parents[1] / "docs" / "influence.png"


def at_optimum(net: nn.Sequential, x: Tensor, y: Tensor, prior: float, **search: Any) -> nn.Sequential:
    """The network where ``sum of losses + prior |theta|^2 / 2`` is least, by L-BFGS."""
    lbfgs = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe", **search)

    def objective() -> Tensor:
        lbfgs.zero_grad()
        total = cross_entropy(net(x), y, reduction="sum")
        total = total + prior / 2 * sum(p.square().sum() for p in net.parameters())
        total.backward()
        return total

    lbfgs.step(objective)
    return net.eval()


def trained(x: Tensor, y: Tensor) -> nn.Sequential:
    """The network at its optimum, from one start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    return at_optimum(net, x, y, PRIOR, max_iter=400, tolerance_grad=1e-6, history_size=20)


def losses(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return cross_entropy(net(x), y, reduction="none")


def ours(net: nn.Module, train: Any, test: Any) -> dict[str, tuple[Tensor, float]]:
    """Influences ``[TEST, TRAIN]`` and seconds, by method."""
    found = {}
    categorical = bc.likelihoods.categorical()

    def fit(structure: str, subset: str = "all", **options: Any) -> Any:
        told = {"structure": structure, "subset": subset, "tune": None, "prior_precision": PRIOR}
        return bc.fit_laplace(net, categorical, [train], **told, **options)

    for name, make in {
        "dense": lambda: fit("dense"),
        "EKFAC": lambda: fit("kronecker", basis=fit("kronecker").seen.precision),
        "Kronecker": lambda: fit("kronecker"),
        "diagonal": lambda: fit("diagonal"),
        "last layer, dense": lambda: fit("dense", "last_layer"),
    }.items():
        began = time.perf_counter()
        fitted = make()
        found[name] = bc.influence(fitted, train, test, leverage=False), time.perf_counter() - began
        if name == "dense":
            began = time.perf_counter()
            found["dense, leverage"] = bc.influence(fitted, train, test), time.perf_counter() - began
    gradients = [
        bc.curvature.per_sample(
            torch.func.grad(lambda p, b: cross_entropy(torch.func.functional_call(net, p, b[0]), b[1]))
        )(dict(net.named_parameters()), data)
        for data in (test, train)
    ]
    of_test, of_train = (torch.cat([g.flatten(1) for g in some.values()], 1).detach() for some in gradients)
    found["products of gradients"] = of_test @ of_train.mT, 0.0
    return found


def kronfluence(net: nn.Module, train: Any, test: Any) -> tuple[Tensor, float]:
    """EK-FAC influences by kronfluence, whose damping is per datum."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.utils.data import TensorDataset

    class Digits(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0] if sample else batch[1]
            return cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return cross_entropy(model(batch[0]), batch[1], reduction="sum")

    began = time.perf_counter()
    task = Digits()
    copy = trained(*train)
    model = prepare_model(copy, task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer(analysis_name="digits", model=model, task=task, cpu=True, output_dir=folder)
        kinds = {"activation_covariance_dtype": torch.float64, "gradient_covariance_dtype": torch.float64}
        kinds |= {"lambda_dtype": torch.float64, "eigendecomposition_dtype": torch.float64}
        analyzer.fit_all_factors("ekfac", TensorDataset(*train), 500, factor_args=FactorArguments("ekfac", **kinds))
        scores = ScoreArguments(
            damping_factor=PRIOR / TRAIN,
            per_sample_gradient_dtype=torch.float64,
            precondition_dtype=torch.float64,
            score_dtype=torch.float64,
        )
        analyzer.compute_pairwise_scores(
            "digits", "ekfac", TensorDataset(*test), TensorDataset(*train), 200, score_args=scores
        )
        found = analyzer.load_pairwise_scores("digits")["all_modules"].double()
    return found / TRAIN, time.perf_counter() - began


def ranks(x: Tensor) -> Tensor:
    return x.argsort(-1).argsort(-1).double()


def score(influence: Tensor, left_out: Tensor, after: Tensor) -> tuple[float, float]:
    """The mean over queries of the rank correlation over halves, and its standard error; ``after`` ``[HALVES, TEST]``."""
    predicted = (influence.double() @ left_out.mT.double()).mT
    pairs = torch.stack([ranks(predicted.mT), ranks(after.mT)], 1)
    each = torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs])
    return float(each.mean()), float(each.std() / len(each) ** 0.5)


def main() -> None:
    torch.set_num_threads(1)
    images, labels = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].double() / 16, labels[order]
    train, test = (images[:TRAIN], labels[:TRAIN]), (images[TRAIN : TRAIN + TEST], labels[TRAIN : TRAIN + TEST])
    net = trained(*train)
    generator = torch.Generator().manual_seed(1)
    kept = torch.stack([torch.randperm(TRAIN, generator=generator)[: TRAIN // 2] for _ in range(HALVES)])
    left_out = torch.ones(HALVES, TRAIN, dtype=torch.bool).scatter(1, kept, False)
    began = time.perf_counter()
    after = torch.stack([losses(trained(train[0][rows], train[1][rows]), *test) for rows in kept])
    seconds = time.perf_counter() - began
    found = ours(net, train, test)
    if find_spec("kronfluence"):
        found["kronfluence, EK-FAC"] = kronfluence(net, train, test)
    rows = {}
    for name, (influence, took) in found.items():
        mean, error = score(influence, left_out, after)
        rows[name] = {"score": mean, "standard error": error, "seconds": took}
        print(f"{name:24s} {mean:.3f} +- {error:.3f}   {took:.1f} s")
    accuracy = float((net(test[0]).argmax(1) == test[1]).double().mean())
    record = {"retraining seconds": seconds, "test accuracy": accuracy, "rows": rows}
    keep(RESULTS, record)
    picture(images, labels, found["EKFAC"][0], losses(net, *test)).savefig(PICTURE)


def picture(images: Tensor, labels: Tensor, influence: Tensor, loss: Tensor) -> Any:
    """The four test digits of the largest loss, each beside the data that help and hurt it most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.4), layout="constrained", dpi=130)
    grid = figure.subplots(4, 7)
    for row, query in zip(grid, loss.argsort(descending=True)[:4].tolist()):
        order = influence[query].argsort(descending=True)
        shown = [TRAIN + query, *order[:3].tolist(), *order[-3:].tolist()]
        for k, (ax, n) in enumerate(zip(row, shown)):
            ax.imshow(images[n].reshape(8, 8), cmap="gray_r")
            change = f", {float(influence[query, n]):+.2f}" if k else ""
            ax.set_title(f"{int(labels[n])}{change}", fontsize=9)
            ax.set_xticks([])
            ax.set_yticks([])
    for k, title in {0: "test digit", 2: "without them its loss rises", 5: "without them it falls"}.items():
        grid[0, k].text(0.5, 1.45, title, transform=grid[0, k].transAxes, ha="center", fontsize=10)
    return figure


if __name__ == "__main__":
    main()
