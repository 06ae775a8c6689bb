"""How often the heat guard of ``bc.optim`` is wrong: loops that run cold and hot, against long chains.

    python -m benchmarks.heat_guard               # about ten minutes on one core; writes results/heat_guard.json
    python -m benchmarks.heat_guard --seeds 1     # a third of it

Linear and logistic regression on synthetic data, a network of 20 units on scikit-learn's diabetes, a small convolutional
network on its digits, each from its mode: full batches up to 0.9 of the stability limit, independent and reshuffled batches,
momenta 0, 0.5, 0.9 and 0.99; accumulation, bfloat16 autocast, clipping and dropout on the network. The truth is the temperature
of the same chain along the four stiffest directions of the Hessian at its last draw, by the virial theorem over the second half
of the run. A run is cold below 1.3 times the temperature asked for (full batches in any case), hot above 2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain.diagnostics.top_curvature import lanczos
from benchmarks.measure import environment

COLD, HOT = 1.3, 2.0
STEPS = 2000


class Case(NamedTuple):
    """One loop: its model, lr as a share of the stability limit at the mode, momentum, batch size (None: all data), order."""

    kind: str
    share: float
    momentum: float
    batch: int | None
    order: str
    feature: str
    seed: int


def data(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    g = torch.Generator().manual_seed(seed)
    if kind == "linear":
        width, decades = [5, 20, 60][seed % 3], [0.0, 0.5, 1.0][seed % 3]
        x = torch.randn(1000, width, generator=g) * torch.logspace(0, -decades, width)
        return x, x @ torch.randn(width, 1, generator=g) + torch.randn(1000, 1, generator=g)
    if kind == "logistic":
        x = torch.randn(800, 10, generator=g) * torch.logspace(0, -0.5, 10)
        return x, torch.bernoulli(torch.sigmoid(2 * x @ torch.randn(10, 1, generator=g)), generator=g)
    if kind == "network":
        table = load_diabetes()
        y = torch.tensor(table.target).float()[:, None]
        return torch.tensor(table.data).float() * 20, (y - y.mean()) / y.std()
    table = load_digits()
    rows = torch.randperm(len(table.target), generator=g)[:300]
    return torch.tensor(table.images).float()[rows, None] / 16, torch.tensor(table.target)[rows]


def model(kind: str, x: Tensor, dropout: float) -> nn.Module:
    """A fresh model."""
    if kind in ("linear", "logistic"):
        return nn.Linear(x.shape[1], 1)
    if kind == "network":
        return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Dropout(dropout), nn.Linear(20, 1))
    blocks = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 10))


def loss(kind: str, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean negative log-likelihood."""
    out = module(x)
    if kind in ("linear", "network"):
        return (out - y).square().mean() / (2 if kind == "linear" else 1)
    return F.binary_cross_entropy_with_logits(out, y) if kind == "logistic" else F.cross_entropy(out, y)


def flat(tensors) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def stiffest(kind: str, module: nn.Module, x: Tensor, y: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The four largest eigenvalues of the Hessian with weight decay, and their eigenvectors."""
    params = list(module.parameters())

    def product(v: Tensor) -> Tensor:
        parts = [a.view_as(p) for a, p in zip(v.split([p.numel() for p in params]), params)]
        g = torch.autograd.grad(loss(kind, module, x, y), params, create_graph=True)
        return flat(torch.autograd.grad(sum((a * b).sum() for a, b in zip(g, parts)), params)) + decay * v

    return lanczos(product, flat(params), 4, max_products=30)


def batches(n: int, size: int | None, order: str):
    """Row numbers without end."""
    while True:
        if size is None:
            yield slice(None)
        elif order == "independent":
            yield torch.randint(n, (size,))
        else:
            yield from torch.randperm(n).split(size)[: n // size]


def temperature(kind: str, module: nn.Module, draws: list[Tensor], x: Tensor, y: Tensor, decay: float) -> float:
    """Of the draws, along the stiffest directions, over ``1 / N``; the largest."""
    theta = torch.stack(draws).double()
    if not bool(torch.isfinite(theta).all()):
        return math.inf
    params = list(module.eval().parameters())
    forces = []
    for row in reversed(draws):  # the last one stays, for the Hessian
        nn.utils.vector_to_parameters(row, params)
        forces.insert(0, flat(torch.autograd.grad(loss(kind, module, x, y), params)).double() + decay * row.double())
    nn.utils.vector_to_parameters(draws[-1], params)
    _, along = stiffest(kind, module, x, y, decay)
    half = len(theta) // 2
    centre = torch.cat([theta[half:].mean(0).expand(half, -1), theta[:half].mean(0).expand(len(theta) - half, -1)])
    virial = ((theta - centre) @ along.T.double()) * (torch.stack(forces) @ along.T.double())
    return float(virial.mean(0).max()) * len(x)


def run(case: Case) -> dict:
    """One loop with its guard."""
    torch.manual_seed(case.seed)
    x, y = data(case.kind, case.seed)
    n, decay = len(x), 1 / len(x)
    module = model(case.kind, x, 0.2 if case.feature == "dropout" else 0.0)
    adam = torch.optim.Adam(module.parameters(), lr=0.02 if case.kind != "convolutions" else 0.005, weight_decay=decay)
    for _ in range(400):
        adam.zero_grad()
        loss(case.kind, module, x, y).backward()
        adam.step()
    largest = float(stiffest(case.kind, module.eval(), x, y, decay)[0][0])
    largest *= 1.0 if case.kind in ("linear", "logistic") else 2.5  # it is that much larger at draws
    K = n // case.batch if case.batch and case.order == "reshuffled" else None
    guard = bc.diagnostics.HeatGuard(K, share=math.inf)
    lr = case.share * 2 * (1 + case.momentum) / largest
    sampler = bc.optim.SGHMC(
        module.train().parameters(), lr, case.momentum, temperature=1 / n, weight_decay=decay, heat_guard=guard
    )
    draws: list[Tensor] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t, rows in enumerate(itertools.islice(batches(n, case.batch, case.order), STEPS)):
            sampler.zero_grad()
            if case.feature == "accumulation":
                for part in rows.chunk(2):
                    (loss(case.kind, module, x[part], y[part]) * len(part) / len(rows)).backward()
            else:
                with torch.autocast("cpu", torch.bfloat16, enabled=case.feature == "bfloat16"):
                    value = loss(case.kind, module, x[rows], y[rows])
                value.float().backward()
            if case.feature == "clipping":
                nn.utils.clip_grad_norm_(module.parameters(), 50.0)
            sampler.step()
            if t >= STEPS // 2 and t % 10 == 0:
                draws.append(flat(module.parameters()))
    truth = temperature(case.kind, module, draws, x, y, decay)
    readings = [heat._asdict() for heat in guard.readings]
    warned = any("heat this chain" in str(w.message) for w in caught)
    return {**case._asdict(), "truth": truth, "warned": warned, "readings": readings}


def cases(seeds: int) -> list[Case]:
    """All loops."""
    cold = [(0.1, 0.9), (0.6, 0.9), (0.9, 0.9), (0.9, 0.0), (0.6, 0.0), (0.3, 0.5), (0.3, 0.99)]
    mixed = [
        (0.05, 0.9, 32, "reshuffled"),
        (0.05, 0.9, 32, "independent"),
        (0.005, 0.9, 32, "reshuffled"),
        (0.0005, 0.9, 32, "independent"),
        (0.02, 0.99, 32, "reshuffled"),
        (0.2, 0.5, 100, "reshuffled"),
        (0.0002, 0.99, 50, "independent"),
    ]
    out: list[Case] = []
    for kind in ("linear", "logistic", "network"):
        for seed in range(3 * seeds if kind != "network" else seeds):
            out += [Case(kind, *c, None, "independent", "", seed) for c in cold]
            out += [Case(kind, *c, "", seed) for c in mixed]
    for feature in ("accumulation", "bfloat16", "clipping", "dropout"):
        out += [Case("network", *c, feature, 0) for c in mixed]
    for seed in range(seeds):
        out += [Case("convolutions", 0.02, 0.9, None, "independent", "", seed)]
        out += [Case("convolutions", *c, "", seed) for c in mixed[:4]]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heat_guard", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "heat_guard.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, began = [], time.perf_counter()
    for case in cases(args.seeds):
        rows.append(run(case))
        last = rows[-1]["readings"][-1]["rho"] if rows[-1]["readings"] else math.nan
        print(
            f"{case!s:<130} truth {rows[-1]['truth']:8.3g}  rho {last:8.3g}  {'warned' if rows[-1]['warned'] else ''}"
        )
    full = [r for r in rows if r["batch"] is None]
    cold = [r for r in rows if r["truth"] < COLD and r["batch"] is not None] + full
    hot = [r for r in rows if r["truth"] > HOT and r["batch"] is not None]
    table = {
        "cold runs": len(cold),
        "false alarms": sum(r["warned"] for r in cold),
        "hot runs": len(hot),
        "misses": sum(not r["warned"] for r in hot),
        "runs in between": len(rows) - len(cold) - len(hot),
    }
    print(table)
    out = {"environment": environment(), "seconds": time.perf_counter() - began, "table": table, "rows": rows}
    args.out.write_text(json.dumps(out, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
