"""How often the heat guard is wrong, when it warns, and what it costs: loops that run cold and hot, against many long chains.

    python -m benchmarks.heat_guard                                # about four minutes a seed; goes on where it stopped
    python -m benchmarks.heat_guard --seeds 1 --kinds regression   # a part of it
    python -m benchmarks.heat_guard --kinds cost                   # what the guard takes of eleven loops

The models are those of :mod:`benchmarks.doctor`: linear and logistic regression, a network on scikit-learn's diabetes and one
on its wines; and the first network with one input eight times as large, so that one direction is hot and the others are not
("narrow"). Each starts at its mode: full batches up to 0.9 of the stability limit, independent and reshuffled batches, momenta
0, 0.5, 0.9 and 0.99. Those that are cold at rest start from random weights besides, at seven rates. ``bc.make_step`` moves all.

The truth is the temperature of the same chain over the one asked for, by the virial theorem
``<u (theta - c) u grad U> = T`` along the stiffest directions of the Hessian and the noisiest of the batches, from chains of a
recursion written here that all start at that mode; its standard error comes from the chains. A run is cold where two standard
errors keep it below 1.3, and on full batches; hot where they keep it above 2; in between or unsure it does not count. The delay
is the step at which a hot run was warned of. The guard may be wrong in one cold run of 100 and miss one hot run of 20.

The guard was developed on seeds 20 to 23, and run on seeds 60 and 61 once after each change of its rules, by an earlier form of
this command. Seeds up to 94 have been looked at since: judge a change of its rules on later ones.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from optree.integrations.torch import tree_ravel
from torch import Tensor
from torch.func import grad, hessian, vmap

import bayesopt_chain as bc
from benchmarks import doctor
from benchmarks.measure import RESULTS, command, fill, from_start, markdown
from benchmarks.networks import descend

COLD, HOT = 1.3, 2.0
STEPS = 2000  # the guard looks at steps 8, 128, 256, 512 and 1,024
CHAINS, LEAST, MOST = 48, 600, 1500  # chains that tell the truth, and their steps
PROBLEMS: dict[str, Callable[[int], doctor.Problem]] = {
    "regression": doctor.regression,
    "logistic": doctor.logistic,
    "network": doctor.network,
    "narrow": partial(doctor.network, stretched=8.0),
    "wines": doctor.wines,
}
FULL = [  # lr over the stability limit at the mode, momentum, and order of the batches
    (0.1, 0.9, "full"), (0.6, 0.9, "full"), (0.9, 0.9, "full"), (0.9, 0.0, "full"), (0.6, 0.0, "full"), (0.6, 0.5, "full"),
    (0.9, 0.5, "full"), (0.3, 0.99, "full"), (0.9, 0.99, "full"),
]  # fmt: skip
MIXED = [
    (0.05, 0.9, "reshuffled"), (0.05, 0.9, "independent"), (0.005, 0.9, "reshuffled"), (0.005, 0.9, "independent"),
    (0.02, 0.99, "reshuffled"), (0.02, 0.9, "independent"), (0.2, 0.5, "reshuffled"), (0.1, 0.5, "independent"),
    (0.2, 0.0, "reshuffled"),
]  # fmt: skip
COOL = [
    (0.0002, 0.9, "independent"), (0.0002, 0.99, "reshuffled"), (0.00005, 0.99, "independent"), (0.0005, 0.5, "reshuffled"),
    (0.002, 0.0, "independent"),
]  # fmt: skip
LOOPS = [  # leaves, and elements of each
    (1, 5), (1, 1000), (1, 10**6), (4, 64), (4, 5000), (10, 10**5), (30, 64), (30, 5000), (60, 64), (60, 1667), (300, 64),
]  # fmt: skip


class Model:
    """A model at its mode, a vector, as far as a loop and its truth need it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.problem = PROBLEMS[kind](seed)
        params = {name: x[0].clone().requires_grad_() for name, x in self.problem.start(1).items()}
        descend(torch.optim.Adam(params.values(), 0.02), lambda: self.problem.loss(params, self.problem.data), 400)
        self.mode, self.unravel = tree_ravel({name: x.detach() for name, x in params.items()})
        self.rows = torch.arange(len(self.problem.data[1]))
        # of networks it is that much larger at draws
        growth = 1.0 if kind in ("regression", "logistic") else 2.5
        self.largest = growth * float(torch.linalg.eigvalsh(hessian(self.loss)(self.mode, self.rows))[-1])

    def loss(self, theta: Tensor, rows: Tensor) -> Tensor:
        """The mean over these rows, with the prior."""
        return self.problem.loss(self.unravel(theta), self.batch(rows))

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """These data."""
        return tuple([x[rows] for x in self.problem.data])

    def rate(self, share: float, mu: float) -> float:
        """The learning rate at so large a share of the stability limit."""
        return share * 2 * (1 + mu) / self.largest

    def batches(self, order: str) -> Iterator[Tensor]:
        """Row numbers without end."""
        n = len(self.rows)
        while True:
            if order == "full":
                yield self.rows
            elif order == "independent":
                yield torch.randint(n, (doctor.B,))
            else:
                yield from torch.randperm(n).split(doctor.B)[: n // doctor.B]


model = functools.cache(Model)


@functools.cache
def truth(kind: str, seed: int, share: float, mu: float, order: str) -> tuple[float, float]:
    """The temperature over the one asked for along the hottest of eight directions, and its standard error.

    Matched noise at constant rates is ``v' = mu v + g + sqrt(2 T (1 - mu) / lr) (xi + xi_before) / 2``,
    ``theta' = theta - lr v'``: no code of the library moves these chains.
    """
    it = model(kind, seed)
    torch.manual_seed(seed)
    n, lr, force = len(it.rows), it.rate(share, mu), vmap(grad(it.loss))
    theta, everything = it.mode.expand(CHAINS, -1).clone(), it.rows.expand(CHAINS, -1)
    v, before = torch.zeros_like(theta), torch.randn_like(theta)
    orders = [it.batches(order) for _ in range(CHAINS)]
    # forty times the steps in which the stiffest direction forgets itself
    steps = int(min(max(LEAST, 40 * (1 - mu) / (lr * it.largest)), MOST))
    size, seen = (2 / n * (1 - mu) / lr) ** 0.5 / 2, list[tuple[Tensor, Tensor, Tensor]]()
    for t in range(steps):
        g = force(theta, torch.stack([next(rows) for rows in orders]))
        if t >= steps // 3 and t % max(1, steps // 100) == 0:
            forced = force(theta, everything)
            seen.append((theta, forced, g - forced))
        fresh = torch.randn_like(theta)
        v = mu * v + g + size * (fresh + before)
        before, theta = fresh, theta - lr * v
        if not bool(theta.isfinite().all()):
            return math.inf, 0.0
    at, forced, noise = (torch.stack(x).double() for x in zip(*seen))
    stiffest = torch.linalg.eigh(hessian(it.loss)(theta[0], it.rows).double())[1][:, -4:]
    noisiest = torch.linalg.svd(noise.flatten(0, 1), full_matrices=False)[2][:4]
    u = torch.cat([stiffest, noisiest.T], 1)
    each = (((at - at.mean((0, 1))) @ u) * (forced @ u)).mean(0) * n  # [chains, directions]
    hottest = int(each.mean(0).argmax())
    return float(each.mean(0)[hottest]), float(each.std(0)[hottest]) / math.sqrt(CHAINS)


def run(kind: str, seed: int, share: float, mu: float, order: str, start: str) -> dict[str, Any]:
    """One loop with its guard, and its truth from long chains; full batches are cold.

    Args:
        kind, seed: of the model.
        share: lr over the stability limit at the mode.
        mu: the momentum.
        order: of the batches; "full" for all data at every step.
        start: "mode", or "prior" for random weights.
    """
    it, (heat, error) = model(kind, seed), (1.0, 0.0) if order == "full" else truth(kind, seed, share, mu, order)
    torch.manual_seed(seed + 1)
    guard = bc.diagnostics.HeatGuard(len(it.rows) // doctor.B if order == "reshuffled" else None)
    tx = bc.sghmc(it.rate(share, mu), mu, temperature=1 / len(it.rows))
    step, rows = bc.make_step(it.problem.loss, tx, heat_guard=guard), it.batches(order)
    params = it.unravel(it.mode if start == "mode" else 0.3 * torch.randn_like(it.mode))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_start(step, params, step.init(params), lambda: it.batch(next(rows)), STEPS)()
    said = [str(w.message) for w in caught if " this chain" in str(w.message)]
    readings = [{name: float(f"{x:.4g}") for name, x in heat._asdict().items()} for heat in guard.readings]
    delay = guard.readings[-1].end if said else None
    return {"kind": kind, "truth": heat, "error": error, "delay": delay, "said": said, "readings": readings}


class Timed(bc.diagnostics.HeatGuard):
    """A guard that adds up the processor time of its looks."""

    spent = 0.0

    def watch(self, tx: Any, params: Any, state: Any, grads: Any) -> None:
        began = time.thread_time()
        super().watch(tx, params, state, grads)
        self.spent += time.thread_time() - began


def _noise(params: list[Tensor], batch: tuple[float, list[Tensor]]) -> Tensor:
    """A loss whose gradient is the batch: small everywhere, and a number more in five elements."""
    hot, rest = batch
    return sum((x * y).sum() for x, y in zip(params, rest)) + hot * params[0][:5].sum()


def cost(leaves: int, width: int) -> dict[str, float]:
    """Milliseconds of processor time that the guard takes of 1,000 steps, and its share of them: in a loop whose batches are
    cold, in those a little below the warning (half the sampler's own noise in one direction; the mean of five loops, as it is
    chance which windows end early), and in one so hot that all windows are full, which is not warned of."""
    torch.manual_seed(0)
    params, found = [torch.randn(width) for _ in range(leaves)], dict[str, float]()
    for name, size, loops in (("cold", 1e-3, 1), ("warm", 1.0, 5), ("full windows", 9.0, 1)):
        guards, taken = [Timed(above=0.6 if name == "warm" else math.inf) for _ in range(loops)], 0.0
        for guard in guards:
            rest = itertools.cycle([[1e-3 * torch.randn(width) for _ in range(leaves)] for _ in range(7)])
            batches = zip((size / 5**0.5 * torch.randn(1000)).tolist(), rest)
            step = bc.make_step(_noise, bc.sghmc(1e-4, temperature=1e-3), heat_guard=guard)
            loop, began = from_start(step, params, step.init(params), partial(next, batches), 1000), time.thread_time()
            loop()
            taken += time.thread_time() - began
        spent = sum([guard.spent for guard in guards])
        found |= {f"ms, {name}": 1e3 * spent / loops, f"share, {name}": spent / (taken - spent)}
    return found


def table(rows: dict[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What the guard said against the truth, by model and of all, under ``HEAD``."""
    out = list[tuple[Any, ...]]()
    for kind in [*PROBLEMS, "all"]:
        some = [row for row in rows.values() if kind in ("all", row["kind"])]
        cold = [row for row in some if row["truth"] + 2 * row["error"] < COLD]
        hot = [row for row in some if row["truth"] - 2 * row["error"] > HOT]
        delays = sorted(row["delay"] or math.inf for row in hot)
        quartiles = ", ".join(f"{delays[i * (len(delays) - 1) // 4]:.0f}" for i in range(5)) if delays else ""
        counts = len(cold), sum(bool(row["said"]) for row in cold), len(hot), sum(not row["said"] for row in hot)
        out.append((kind, *counts, quartiles, len(some) - len(cold) - len(hot)))
    return out


HEAD = ("model", "cold runs", "false alarms", "hot runs", "misses", "delay of hot runs, quartiles", "neither")

if __name__ == "__main__":
    args = command(seeds=2, first_seed=80, kinds=[*PROBLEMS, "cost"], out=RESULTS / "heat_guard.json")
    seeds, kinds = range(args.first_seed, args.first_seed + args.seeds), filter(PROBLEMS.get, args.kinds)
    starts = [(*rate, "mode") for rate in FULL + MIXED + COOL] + [(*rate, "prior") for rate in FULL[:2] + COOL]
    loops = [(kind, seed, *start) for kind, seed, start in itertools.product(kinds, seeds, starts)]
    cells: list[Any] = [(("rows", ", ".join(map(str, loop))), partial(run, *loop)) for loop in loops]
    cells += [(("cost", f"{a} of {b}"), partial(cost, a, b)) for a, b in LOOPS if "cost" in args.kinds]
    record = fill(args.out, cells, lambda record: {"table": table(record.get("rows", {}))})
    print(markdown(HEAD, record["table"]))
