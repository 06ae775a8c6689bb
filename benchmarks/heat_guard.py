"""How often the heat guard is wrong: loops that run cold and hot, against many long chains.

    python -m benchmarks.heat_guard                             # about ten core-minutes; goes on where it stopped
    python -m benchmarks.heat_guard --first-seed 60             # the other half of the record
    python -m benchmarks.heat_guard --seeds 1 --kinds linear    # a part of it

Linear and logistic regression on synthetic data, a network of 20 units on scikit-learn's diabetes, the same with one input
eight times as large, so that one direction is hot and the others are not ("narrow"), and a small convolutional network on its
digits. Each starts from its mode: full batches up to 0.9 of the stability limit, independent and reshuffled batches, momenta 0,
0.5, 0.9 and 0.99; accumulation, bfloat16 autocast and clipping on all but the convolutions, dropout on the network.
Chains that are cold at rest start from random weights besides, at five rates.

The truth is the temperature of the same chain over the one asked for, by the virial theorem
``<u (theta - c) u grad U> = T`` along the stiffest directions of the Hessian and the noisiest of the batches, from chains of a
recursion written here (:func:`truth`) that all start at that mode; its standard error comes from the chains. A run is cold
where two standard errors keep it below 1.3, and on full batches; hot where they keep it above 2; in between or unsure it does
not count. What accumulation, a start from random weights and a guard that is not told of epochs see is the plain
loop's chain, whose truth they share. The delay is the step at which a hot run was warned of.

The guard was developed on seeds 20 to 23, and run on seeds 60 and 61 once after each change of its rules.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain.diagnostics.gradient_noise import lanczos
from benchmarks.measure import RESULTS, command, fill
from benchmarks.networks import cnn, descend

COLD, HOT = 1.3, 2.0
FIRST = 20  # the first seed that the guard's constants were not looked at on
STEPS = 1000  # the guard looks at steps 8, 128, 256 and 512
LEAST, MOST = 600, 1500  # steps of the chains that tell the truth
CHAINS = {"linear": 48, "logistic": 48, "network": 48, "narrow": 48, "convolutions": 10}


class Case(NamedTuple):
    """One loop: its model, lr as a share of the stability limit at the mode, momentum, batch size (None: all data), order."""

    kind: str
    share: float
    momentum: float
    batch: int | None
    order: str
    feature: str
    seed: int

    def __str__(self) -> str:
        batches = "full batch" if self.batch is None else f"{self.order} {self.batch}"
        rate = f"{self.share} of the limit, mu {self.momentum}"
        return ", ".join(filter(None, [f"{self.kind} {self.seed}", batches, rate, self.feature]))


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
    if kind in ("network", "narrow"):
        table: Any = load_diabetes()
        y = torch.tensor(table.target).float()[:, None]
        scale = torch.ones(10)
        scale[2] = 8.0 if kind == "narrow" else 1.0
        return torch.tensor(table.data).float() * 20 * scale, (y - y.mean()) / y.std()
    table: Any = load_digits()
    rows = torch.randperm(len(table.target), generator=g)[:300]
    return torch.tensor(table.images).float()[rows, None] / 16, torch.tensor(table.target)[rows]


def model(kind: str, x: Tensor, dropout: float) -> nn.Module:
    """A fresh model."""
    if kind in ("linear", "logistic"):
        return nn.Linear(x.shape[1], 1)
    if kind in ("network", "narrow"):
        return nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Dropout(dropout), nn.Linear(20, 1))
    return cnn(8, [1, 8, 8])


def loss(kind: str, module: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The mean negative log-likelihood."""
    out = module(x)
    if kind in ("linear", "network", "narrow"):
        return (out - y).square().mean() / (2 if kind == "linear" else 1)
    return F.binary_cross_entropy_with_logits(out, y) if kind == "logistic" else F.cross_entropy(out, y)


def stiffest(kind: str, module: nn.Module, x: Tensor, y: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The four largest eigenvalues of the Hessian with weight decay, and their eigenvectors."""
    params = list(module.parameters())

    def product(v: Tensor) -> Tensor:
        g = torch.autograd.grad(loss(kind, module, x, y), params, create_graph=True)
        of_product = torch.autograd.grad(torch.cat([x.reshape(-1) for x in g]) @ v, params)
        return torch.cat([x.reshape(-1) for x in of_product]) + decay * v  # of convolutions they are strided

    return lanczos(product, nn.utils.parameters_to_vector(params).detach(), 4, max_products=30)


def batches(n: int, size: int | None, order: str):
    """Row numbers without end."""
    while True:
        if size is None:
            yield torch.arange(n)
        elif order == "independent":
            yield torch.randint(n, (size,))
        else:
            yield from torch.randperm(n).split(size)[: n // size]


def truth(case: Case, module: nn.Module, x: Tensor, y: Tensor, lr: float, largest: float) -> tuple[float, float]:
    """The temperature over ``1 / N`` along the hottest of eight directions, and its standard error.

    Matched noise at constant rates is ``v' = mu v + g + sqrt(2 T (1 - mu) / lr) (xi + xi_before) / 2``,
    ``theta' = theta - lr v'``: no code of the library moves these chains.
    """
    n, mu, chains = len(x), case.momentum, CHAINS[case.kind]
    decay = 1 / n
    shapes = {name: p.detach() for name, p in module.named_parameters()}
    sizes = [p.numel() for p in shapes.values()]

    def value(theta: Tensor, rows: Tensor, training: bool) -> Tensor:
        module.train(training)
        parts = {k: part.view_as(p) for (k, p), part in zip(shapes.items(), theta.split(sizes))}
        with torch.autocast("cpu", torch.bfloat16, enabled=case.feature == "bfloat16" and training):
            return loss(case.kind, lambda rows: functional_call(module, parts, (rows,)), x[rows], y[rows]).float()

    def force(theta: Tensor, rows: Tensor) -> Tensor:
        return grad(value)(theta, rows, True)

    forces, everything = vmap(force, randomness="different"), torch.arange(n)
    full = vmap(lambda theta: grad(value)(theta, everything, False) + decay * theta, chunk_size=16)
    theta = nn.utils.parameters_to_vector(module.parameters()).detach().expand(chains, -1).clone()
    v, before = torch.zeros_like(theta), torch.randn_like(theta)
    orders = [batches(n, case.batch, case.order) for _ in range(chains)]
    forget = (1 - mu) / (lr * largest)  # steps in which the stiffest direction forgets itself
    steps = int(min(max(LEAST, 40 * forget), MOST))
    size = (2 / n * (1 - mu) / lr) ** 0.5 / 2
    places, forced, noise = list[Tensor](), list[Tensor](), list[Tensor]()
    for t in range(steps):
        g = forces(theta, torch.stack([next(order) for order in orders]))
        if case.feature == "clipping":
            g = g * (50.0 / g.norm(dim=1, keepdim=True)).clamp(max=1.0)
        g = g + decay * theta
        if t >= steps // 3 and t % max(1, steps // 100) == 0:
            places.append(theta)
            forced.append(full(theta))
            noise.append(g - forced[-1])
        fresh = torch.randn_like(theta)
        v = mu * v + g + size * (fresh + before)
        before, theta = fresh, theta - lr * v
        if not bool(theta.isfinite().all()):
            return math.inf, 0.0
    nn.utils.vector_to_parameters(theta[0], module.parameters())
    along = [stiffest(case.kind, module.eval(), x, y, decay)[1].double()]
    if case.batch is not None:
        along.append(torch.linalg.svd(torch.cat(noise).double(), full_matrices=False)[2][:4])
    u = torch.cat(along).T
    away = torch.stack(places).double() @ u
    each = ((away - away.mean((0, 1))) * (torch.stack(forced).double() @ u)).mean(0) * n  # [chains, directions]
    mean, error = each.mean(0), each.std(0) / math.sqrt(chains)
    hottest = int(mean.argmax())
    return float(mean[hottest]), float(error[hottest])


def trained(module: nn.Module, sampler: torch.optim.Optimizer, case: Case, x: Tensor, y: Tensor) -> None:
    """A plain loop."""
    for rows in itertools.islice(batches(len(x), case.batch, case.order), STEPS):
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


FROM_INIT = "from initialisation"
SAME_CHAIN = ("accumulation", "untold", FROM_INIT)  # as the plain loop


@functools.cache
def prepared(case: Case) -> tuple[nn.Module, Tensor, Tensor, float, tuple[float | None, float | None]]:
    """All that goes before the loop; ``feature`` is empty where it leaves the chain as it is.

    Returns:
        A model at its mode, inputs and targets, the learning rate, and the truth with its error where it has to be asked (full
        batches are cold).
    """
    torch.manual_seed(case.seed)
    x, y = data(case.kind, case.seed)
    decay = 1 / len(x)
    module = model(case.kind, x, 0.2 if case.feature == "dropout" else 0.0)
    adam = torch.optim.Adam(module.parameters(), lr=0.02 if case.kind != "convolutions" else 0.005, weight_decay=decay)
    descend(adam, lambda: loss(case.kind, module.eval(), x, y), 400)
    largest = float(stiffest(case.kind, module, x, y, decay)[0][0])
    largest *= 1.0 if case.kind in ("linear", "logistic") else 2.5  # it is that much larger at draws
    lr = case.share * 2 * (1 + case.momentum) / largest
    found = None, None
    if case.batch is not None or case.feature == "dropout":
        found = truth(case, copy.deepcopy(module), x, y, lr, largest)
    return module, x, y, lr, found


def run(case: Case) -> dict[str, Any]:
    """One loop with its guard, and its truth from long chains."""
    like = case._replace(feature="" if case.feature in SAME_CHAIN else case.feature)
    mode, x, y, lr, (heat, error) = prepared(like)
    torch.manual_seed(case.seed + 1)
    module, n = model(case.kind, x, 0.0) if case.feature == FROM_INIT else copy.deepcopy(mode), len(x)
    K = n // case.batch if case.batch and case.order == "reshuffled" and case.feature != "untold" else None
    guard = bc.diagnostics.HeatGuard(K)
    sampler = bc.optim.SGHMC(
        module.train().parameters(), lr, case.momentum, temperature=1 / n, weight_decay=1 / n, heat_guard=guard
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained(module, sampler, case, x, y)
    readings = [{k: round(v, 4) if isinstance(v, float) else v for k, v in h._asdict().items()} for h in guard.readings]
    warned = any(word in str(w.message) for w in caught for word in ("heat this chain", "heats this chain"))
    return {
        **case._asdict(),
        "truth": heat,
        "standard_error": error,
        "warned": warned,
        "delay": readings[-1]["end"] if warned else None,
        "readings": readings,
    }


def cases(seeds: int, first: int = FIRST) -> list[Case]:
    """All loops."""
    cold = [
        (0.1, 0.9),
        (0.6, 0.9),
        (0.9, 0.9),
        (0.9, 0.0),
        (0.6, 0.0),
        (0.6, 0.5),
        (0.9, 0.5),
        (0.3, 0.99),
        (0.9, 0.99),
    ]
    mixed = [
        (0.05, 0.9, 32, "reshuffled"),
        (0.05, 0.9, 32, "independent"),
        (0.005, 0.9, 32, "reshuffled"),
        (0.005, 0.9, 32, "independent"),
        (0.0005, 0.9, 32, "independent"),
        (0.02, 0.99, 32, "reshuffled"),
        (0.0005, 0.99, 32, "independent"),
        (0.0002, 0.99, 50, "independent"),
        (0.2, 0.5, 100, "reshuffled"),
        (0.1, 0.5, 32, "independent"),
        (0.001, 0.5, 32, "reshuffled"),
        (0.2, 0.0, 32, "reshuffled"),
        (0.005, 0.0, 32, "independent"),
    ]
    three, some, both = ("linear", "logistic", "network"), range(first, first + seeds), range(first, first + 2 * seeds)

    def full(kind: str, at: tuple[float, float], feature: str, seed: int) -> Case:
        return Case(kind, *at, None, "independent", feature, seed)

    def batch(kind: str, numbers: Sequence[int], feature: str, seed: int) -> list[Case]:
        return [Case(kind, *mixed[i], feature, seed) for i in numbers]

    of_all = [(kind, seed) for kind in three for seed in some]
    changed = [(kind, feature) for kind in three for feature in ("accumulation", "bfloat16", "clipping")]
    changed += [("network", "dropout"), ("network", "untold")]
    from_init = [*of_all, *(("convolutions", seed) for seed in some)]
    blocks = [
        [full(kind, at, "", seed) for kind in three for seed in (some if kind == "network" else both) for at in cold],
        *(batch(kind, range(13), "", seed) for kind, seed in of_all),
        *(batch(kind, (0, 2, 3, 5), feature, seed) for kind, feature in changed for seed in some),
        [full(kind, (0.3, 0.9), feature, seed) for kind, feature in changed if feature != "untold" for seed in some],
        *(
            batch(kind, (2, 3) if kind == "convolutions" else (2, 4, 10, 11, 12), FROM_INIT, seed)
            for kind, seed in from_init
        ),
        [full(kind, at, FROM_INIT, seed) for kind, seed in from_init for at in cold[:2]],
        *(batch("narrow", (0, 1, 2, 3, 4, 9), "", seed) for seed in some),
        [full("convolutions", (share, 0.9), "", seed) for share in (0.02, 0.6) for seed in some],
        *(batch("convolutions", range(4), "", seed) for seed in some),
    ]
    return [case for block in blocks for case in block]


def table(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts of what the guard said against the truth."""
    rows = [{"cell": cell, **row} for cell, row in cells.items()]
    cold = [r for r in rows if r["truth"] is None or r["truth"] + 2 * r["standard_error"] < COLD]
    hot = [r for r in rows if r["truth"] is not None and r["truth"] - 2 * r["standard_error"] > HOT]
    told = [r for r in cold if r["feature"] != "untold"]
    delays = sorted(r["delay"] or STEPS for r in hot)
    return {
        "cold runs": len(told),
        "false alarms": [r["cell"] for r in told if r["warned"]],
        "cold runs, epochs untold": len(cold) - len(told),
        "false alarms, epochs untold": [r["cell"] for r in cold if r["warned"] and r not in told],
        "hot runs": len(hot),
        "misses": [r["cell"] for r in hot if not r["warned"]],
        "delay of hot runs, quartiles": [delays[i * (len(delays) - 1) // 4] for i in range(5)] if delays else [],
        "neither": len(rows) - len(cold) - len(hot),
    }


if __name__ == "__main__":
    args = command(seeds=2, first_seed=FIRST, kinds=[*CHAINS], out=RESULTS / "heat_guard.json")
    wanted = [c for c in cases(args.seeds, args.first_seed) if c.kind in args.kinds]
    rows = [(("rows", str(case)), functools.partial(run, case)) for case in wanted]
    print(fill(args.out, rows, lambda record: {"table": table(record["rows"])})["table"])
