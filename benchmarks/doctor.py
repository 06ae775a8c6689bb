"""How often the doctor is wrong: runs that are right and runs that are not, networks among both.

    python -m benchmarks.doctor --workers 2        # about ten core-minutes; goes on where it stopped
    python -m benchmarks.doctor --only network     # those whose name has this word

Right runs: exact independent draws, slow chains with ten to twenty effective draws each, a far start whose burn-in was long
enough, seven samplers on linear regression, logistic regression, a network of 20 units on scikit-learn's diabetes with full
batches and with reshuffled ones that the momentum remembers for an epoch, and one of 16 units that classifies its wines
(networks are judged by their predictions). Wrong runs: rates that heat, losses that are sums, temperatures 1/b and 1, chains
that are too short, stand still, are one chain twice (bit for bit, some draws behind, or by one seed from different starts),
drift together, start far away, sit in two modes, do not leave the mode, hold NaN, run away, and priors a thousand times too
strong. A wrong run counts as found where the doctor names one of the kinds that it has. Runs of an odd number were held out:
no constant of the doctor was changed for one. ``exact`` runs came later: independent draws of a linear regression that are few,
of more parameters than data, in batches of which the last is short, beside a frozen leaf; and draws that jump once, stop, lie
elsewhere in one chain, or have twice or half of the temperature.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optree
import torch
from sklearn.datasets import load_diabetes, load_wine

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, work_out

N, B = 300, 20
Expected = set[str]


def regression(seed: int, decay: float = 1.0):
    """Data and loss of a linear regression with the prior N(0, 1)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=g)
    y = x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + torch.randn(N, generator=g)

    def loss(p, batch):
        return (batch[0] @ p["w"] + p["b"] - batch[1]).square().mean() / 2 + decay / (2 * N) * p["w"].square().sum()

    return (x, y), loss, lambda c: {"w": 0.3 * torch.randn(c, 4, generator=g), "b": 0.3 * torch.randn(c, generator=g)}


def logistic(seed: int):
    """Data and loss of a logistic regression with the prior N(0, 1)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=g)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([2.0, -1.0, 0.0, 1.0])), generator=g)

    def loss(p, batch):
        z = batch[0] @ p["w"] + p["b"]
        return torch.nn.functional.binary_cross_entropy_with_logits(z, batch[1]) + p["w"].square().sum() / (2 * N)

    return (x, y), loss, lambda c: {"w": torch.randn(c, 4, generator=g), "b": torch.randn(c, generator=g)}


def modes(chains, shapes, loss, data, seed):
    """Starts for chains of a network: random weights, trained by Adam."""
    g = torch.Generator().manual_seed(seed)
    p = {k: (0.3 * torch.randn(chains, *s, generator=g)).requires_grad_() for k, s in shapes.items()}
    adam = torch.optim.Adam(p.values(), 0.02)
    for _ in range(500):
        adam.zero_grad()
        sum(loss({k: t[i] for k, t in p.items()}, data) for i in range(chains)).backward()
        adam.step()
    return {k: t.detach() for k, t in p.items()}


def network(seed: int, decay: float = 1.0):
    """Diabetes, 20 units, prior N(0, 1) on every weight, noise variance 1/2 of standardised targets; starts at modes."""
    table = load_diabetes()
    rows = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(seed))[:N]
    x = torch.tensor(table.data).float()[rows] * 20
    y = torch.tensor(table.target).float()[rows]
    y = (y - y.mean()) / y.std()

    def forward(p, x):
        return (torch.tanh(x @ p["W"] + p["a"]) @ p["v"][..., None])[..., 0] + p["b"]

    def loss(p, batch):
        prior = sum(t.square().sum() for t in optree.tree_leaves(p))
        return (forward(p, batch[0]) - batch[1]).square().mean() + decay * prior / (2 * N)

    def start(c):
        return modes(c, {"W": (10, 20), "a": (20,), "v": (20,), "b": ()}, loss, (x, y), seed)

    return (x, y), loss, start, lambda p: forward(p, x[:10])


def wines(seed: int, decay: float = 1.0):
    """178 wines in three classes, 16 units, prior N(0, 1) on every weight; starts at modes."""
    table = load_wine()
    rows = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(table.data).float()[rows]
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(table.target)[rows]

    def forward(p, x):
        return torch.tanh(x @ p["W"] + p["a"][..., None, :]) @ p["V"] + p["b"][..., None, :]

    def loss(p, batch):
        prior = sum(t.square().sum() for t in optree.tree_leaves(p))
        outputs = forward(p, batch[0])
        return torch.nn.functional.cross_entropy(outputs, batch[1]) + decay * prior / (2 * len(y))

    def start(c):
        return modes(c, {"W": (13, 16), "a": (16,), "V": (16, 3), "b": (3,)}, loss, (x, y), seed)

    return (x, y), loss, start, lambda p: forward(p, x[::18]).softmax(-1)[..., :2]


def sampled(
    problem, tx, *, batch=None, steps=1000, burn_in=200, thinning=4, params=None, order="reshuffled", loss=None
):
    """Draws of four chains."""
    data, own, start = problem[:3]
    torch.manual_seed(0)
    step = bc.parallel(bc.make_step(loss or own, tx), 4)
    params = start(4) if params is None else params
    batches = [data] if batch is None else bc.epochs(data, batch, order=order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return bc.sample(step, params, step.init(tx, params), batches, steps=steps, burn_in=burn_in, thinning=thinning)


class Exact:
    """Independent draws of the posterior of a linear regression with noise and prior of variance 1.

    Args:
        draws, chains: how many.
        P, n: parameters and data.
        times: the temperature that the draws have, over that of the posterior.
    """

    def __init__(self, seed: int, draws: int, chains: int, P: int = 4, n: int = N, times: float = 1.0):
        g = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(n, P, generator=g) / (P / 4) ** 0.5
        y = x @ torch.randn(P, generator=g) + torch.randn(n, generator=g)
        precision = (x.T @ x + torch.eye(P)).double()
        root = torch.linalg.cholesky(torch.linalg.inv(precision) * times)
        mean = torch.linalg.solve(precision, (x.T @ y).double())
        self.w = (mean + torch.randn(draws, chains, P, generator=g).double() @ root.T).float()
        self.x, self.y, self.n = x, y, n

    def judged(self, batch: int | None = None, frozen: bool = False):
        """What the doctor says of these draws, with the prior as weight decay.

        Args:
            batch: data in a batch; ``None``: all.
            frozen: put a leaf that is not sampled beside them.
        """
        tx = bc.sgd(0.1, momentum=0.9, weight_decay=1 / self.n, temperature=1 / self.n)

        def loss(p, rows):
            pinned = 50 * (p["still"] - 1).square().sum() if frozen else 0.0
            return (rows[0] @ p["w"] - rows[1]).square().mean() / 2 + pinned

        chains = self.w.shape[1]
        still = {"still": torch.ones(chains, 2)} if frozen else {}
        if frozen:
            tx = bc.partition({True: tx, False: bc.sgd(0.0)}, {"w": True, "still": False})
        draws = bc.Draws.from_trees([{"w": w, **still} for w in self.w], chains=chains)
        return bc.diagnostics.doctor(
            draws, tx, loss, [*zip(self.x.split(batch or self.n), self.y.split(batch or self.n))]
        )

    def jumped(self):
        """Each chain jumps once, by thirty standard deviations, to one side or the other."""
        half, chains = len(self.w) // 2, self.w.shape[1]
        self.w[half:, : (chains + 1) // 2] += 2.0
        self.w[:half, (chains + 1) // 2 :] += 2.0
        return self.judged()

    def elsewhere(self):
        """One chain is thirty standard deviations away."""
        self.w[:, 3] += 2.0
        return self.judged()

    def stopped(self):
        """One chain repeats a draw from the middle on."""
        half = len(self.w) // 2
        self.w[half:, 0] = self.w[half, 0]
        return self.judged()


def far(seed):
    """Starts a hundred posterior standard deviations away and more, for four chains of the linear regression."""
    g = torch.Generator().manual_seed(seed)
    return {"w": 50 + torch.randn(4, 4, generator=g), "b": torch.randn(4, generator=g)}


def judged(draws, tx, problem, *, loss=None, **kwargs):
    of = {"of": problem[3]} if len(problem) > 3 else {}
    data = problem[0]
    return bc.diagnostics.doctor(draws, tx, loss or problem[1], [data], **of, **kwargs)


def right() -> dict[str, Callable]:
    T = 1 / N
    out: dict[str, Callable] = {}
    for seed in range(6):

        def independent(seed=seed):
            g = torch.Generator().manual_seed(seed)
            x = torch.randn(100 + 50 * seed, 4, 5 + 40 * seed, generator=g)
            return bc.diagnostics.doctor(bc.Draws.from_trees([{"w": t} for t in x], chains=4))

        out[f"independent draws {seed}"] = independent
    for seed in range(4):

        def slow(seed=seed):
            g = torch.Generator().manual_seed(seed)
            x, forgets = [torch.randn(4, 5, generator=g)], 0.9
            for _ in range(400 - 100 * (seed % 2)):
                x.append(forgets * x[-1] + (1 - forgets**2) ** 0.5 * torch.randn(4, 5, generator=g))
            return bc.diagnostics.doctor(bc.Draws.from_trees([{"w": t} for t in x], chains=4))

        out[f"few effective draws {seed}"] = slow
    for seed in range(2):
        out[f"linear, far start, finished burn-in {seed}"] = lambda seed=seed: (
            lambda p, tx: judged(sampled(p, tx, params=far(seed), steps=2000, burn_in=600), tx, p)
        )(regression(seed), bc.sghmc(0.1, temperature=T))
    for seed in range(6):
        out[f"exact, 12 draws of 2 chains {seed}"] = lambda seed=seed: Exact(seed, 12, 2).judged()
        out[f"exact, 20 draws of 20 chains {seed}"] = lambda seed=seed: Exact(seed, 20, 20).judged()
        out[f"exact, 400 parameters, 30 data {seed}"] = lambda seed=seed: Exact(seed, 60, 4, P=400, n=30).judged()
        out[f"exact, a short last batch {seed}"] = lambda seed=seed: Exact(seed, 60, 4).judged(batch=92)
        out[f"exact, beside a frozen leaf {seed}"] = lambda seed=seed: Exact(seed, 60, 4).judged(frozen=True)
    samplers = {
        "sgld": lambda: bc.sgld(0.5, temperature=T),
        "sghmc": lambda: bc.sghmc(0.1, temperature=T),
        "sghmc, small lr": lambda: bc.sghmc(0.03, temperature=T),
        "momentum 0.5": lambda: bc.sghmc(0.3, 0.5, temperature=T),
        "nesterov": lambda: bc.sgd(0.1, momentum=0.9, nesterov=True, temperature=T),
        "dampening": lambda: bc.sgd(0.3, momentum=0.9, dampening=0.5, temperature=T),
        "preconditioned": lambda: bc.chain(bc.scale_by_preconditioner(0.5), bc.sghmc(0.2, temperature=T)),
    }
    for name, make in samplers.items():
        for seed in range(2):
            out[f"linear, {name} {seed}"] = lambda make=make, seed=seed: (lambda p, tx: judged(sampled(p, tx), tx, p))(
                regression(seed), make()
            )
    for seed in range(4):
        out[f"logistic {seed}"] = lambda seed=seed: (lambda p, tx: judged(sampled(p, tx), tx, p))(
            logistic(seed), bc.sghmc(0.5, temperature=T)
        )
    for seed in range(3):
        out[f"network, full batch {seed}"] = lambda seed=seed: (
            lambda p, tx: judged(sampled(p, tx, steps=4000, burn_in=1500, thinning=12), tx, p)
        )(network(seed), bc.sghmc(0.04, temperature=T))
        out[f"network, cool batches {seed}"] = lambda seed=seed: (
            lambda p, tx: judged(sampled(p, tx, batch=150, steps=5000, burn_in=2000, thinning=12), tx, p)
        )(network(seed), bc.sghmc(0.02, 0.93, temperature=T))
        out[f"wines, full batch {seed}"] = lambda seed=seed: (
            lambda p, tx: judged(sampled(p, tx, steps=4000, burn_in=1500, thinning=12), tx, p)
        )(wines(seed), bc.sghmc(0.2, temperature=1 / 178))
    return out


def wrong() -> dict[str, tuple[Expected, Callable]]:
    T = 1 / N
    out: dict[str, tuple[Expected, Callable]] = {}

    def add(name: str, kinds: Expected, problem: Callable, make: Callable, **how):
        judge = how.pop("judge", {})

        def run():
            p, tx = problem(), make()
            loss = how.get("loss")
            loss = loss(p) if loss is not None else None
            draws = sampled(p, tx, **{**how, "loss": loss})
            return judged(draws, tx, p, loss=loss, **judge)

        out[name] = kinds, run

    def summed(p):
        return lambda params, batch: len(batch[0]) * p[1](params, batch)

    hot, cold = {"heated", "diverged"}, {"cold", "short", "mixing", "burn-in", "modes"}
    for seed in range(2):
        p, q, n = (lambda s=seed, f=f: f(s) for f in (regression, logistic, network))
        add(f"linear, hot batches {seed}", hot, p, lambda: bc.sghmc(0.1, temperature=T), batch=B)
        add(f"linear, warm independent batches {seed}", hot, p, lambda: bc.sghmc(0.02, temperature=T), batch=B,
            order="independent")  # fmt: skip
        add(f"logistic, hot batches {seed}", hot, q, lambda: bc.sghmc(1.0, temperature=T), batch=B)
        add(f"network, hot batches {seed}", hot | {"scale"}, n, lambda: bc.sghmc(0.03, temperature=T), batch=B,
            order="independent", steps=2500)  # fmt: skip
        add(f"linear, sum of a batch {seed}", {"scale"}, p, lambda: bc.sghmc(1e-3, temperature=T), loss=summed)
        add(f"logistic, temperature 1 {seed}", {"scale"}, q, lambda: bc.sghmc(0.1, temperature=1.0))
        add(f"linear, temperature 1/b {seed}", {"scale"}, p, lambda: bc.sghmc(0.1, temperature=1 / B))
        add(f"network, temperature 1/b {seed}", {"scale"}, n, lambda: bc.sghmc(0.005, temperature=1 / B))
        w = lambda s=seed: wines(s)  # noqa: E731
        add(f"wines, hot batches {seed}", hot, w, lambda: bc.sghmc(0.5, temperature=1 / 178), batch=16,
            order="independent", steps=2500)  # fmt: skip
        add(f"wines, temperature 1 {seed}", {"scale"}, w, lambda: bc.sghmc(0.1, temperature=1.0))
        add(f"wines, sum of a batch {seed}", {"scale"}, w, lambda: bc.sghmc(1e-3, temperature=1 / 178), loss=summed)
        add(f"wines, rate too small {seed}", cold, w, lambda: bc.sghmc(1e-6, temperature=1 / 178), steps=1500)
        add(f"network, rate too small {seed}", cold, n, lambda: bc.sghmc(1e-7, temperature=T), steps=1500)
        add(f"logistic, rate too small {seed}", cold, q, lambda: bc.sghmc(1e-4, temperature=T), steps=1500)
        add(f"linear, lr beyond the limit {seed}", {"diverged", "nonfinite"}, p, lambda: bc.sghmc(9.0, temperature=T),
            steps=400, burn_in=0)  # fmt: skip

    for seed in range(2):
        p = lambda s=seed: regression(s)  # noqa: E731
        add(f"linear, far start {seed}", {"burn-in", "mixing", "modes"}, p, lambda: bc.sgld(0.004, temperature=T),
            params=far(seed), steps=2000, burn_in=0)  # fmt: skip
        add(f"linear, far start with momentum {seed}", {"burn-in"}, p, lambda: bc.sghmc(0.1, temperature=T),
            params=far(seed), steps=800, burn_in=0)  # fmt: skip
        add(f"linear, eight draws {seed}", {"short", "mixing", "burn-in", "modes"}, p, lambda: bc.sghmc(0.01, temperature=T),
            steps=80, burn_in=0, thinning=10)  # fmt: skip
        strong = lambda s=seed: regression(s, decay=1.0)  # noqa: E731
        add(f"linear, decay a thousand times too strong {seed}", {"prior"}, strong,
            lambda: bc.sgd(0.005, momentum=0.9, weight_decay=1000 / N, temperature=T), steps=4000)  # fmt: skip

    def one_seed(seed):
        problem, tx = regression(seed), bc.sghmc(0.1, temperature=T)
        runs = []
        for i in range(4):
            torch.manual_seed(7)
            w = {"w": torch.full((4,), float(i)), "b": torch.tensor(0.0)}
            step = bc.make_step(problem[1], tx)
            runs.append(bc.sample(step, w, tx.init(w), [problem[0]], steps=1500, burn_in=500, thinning=5))
        trees = [optree.tree_map(lambda *x: torch.stack(x), *(r[i] for r in runs)) for i in range(len(runs[0]))]
        return judged(bc.Draws.from_trees(trees, chains=4), tx, problem)

    def behind(seed):
        problem, tx = regression(seed), bc.sghmc(0.1, temperature=T)
        draws = sampled(problem, tx)
        trees = [optree.tree_map(torch.clone, draws[i]) for i in range(len(draws))]
        for t, late in zip(trees[:-3], trees[3:]):
            for k, x in late.items():
                x[1] = t[k][0]
        return judged(bc.Draws.from_trees(trees[3:], chains=4), tx, problem)

    def drifts(seed):
        g = torch.Generator().manual_seed(seed)
        rises = torch.linspace(0, (3.3, 16.7)[seed // 2], 400)
        x = torch.randn(400, 4, 4, generator=g) + rises[:, None, None]
        return bc.diagnostics.doctor(bc.Draws.from_trees([{"w": t} for t in x], chains=4))

    for seed in range(2):
        out[f"linear, one seed from four starts {seed}"] = {"duplicate"}, lambda seed=seed: one_seed(seed)
        out[f"linear, a copy three draws behind {seed}"] = {"duplicate"}, lambda seed=seed: behind(seed)
    for seed in range(4):
        out[f"common drift {seed}"] = {"mixing"}, lambda seed=seed: drifts(seed)

    def broken(change):
        p, tx = regression(0), bc.sghmc(0.1, temperature=T)
        draws = sampled(p, tx)
        trees = [optree.tree_map(torch.clone, draws[i]) for i in range(len(draws))]
        change(trees)
        return bc.diagnostics.doctor(bc.Draws.from_trees(trees, chains=4), tx, p[1], [p[0]])

    def nan(trees):
        trees[7]["w"][0, 0] = torch.nan

    def twice(trees):
        for t in trees:
            for x in t.values():
                x[1] = x[0]

    def still(trees):
        for t in trees:
            for k, x in t.items():
                x[2] = trees[0][k][2]

    def modes(trees):
        for t in trees:
            t["w"][:2] += 1.0

    def frozen(trees):
        for t in trees:
            t["b"][:] = trees[0]["b"]

    for seed in range(6):
        out[f"exact, one jump {seed}"] = {"mixing", "short"}, lambda seed=seed: Exact(seed, 60, 4).jumped()
        out[f"exact, one of 50 chains elsewhere {seed}"] = {"modes"}, lambda seed=seed: Exact(seed, 60, 50).elsewhere()
        out[f"exact, a chain that stops {seed}"] = {"dead"}, lambda seed=seed: Exact(seed, 60, 2).stopped()
        out[f"exact, at twice the temperature {seed}"] = (
            {"heated"},
            lambda seed=seed: Exact(seed, 60, 4, times=2.0).judged(),
        )
        out[f"exact, at half the temperature {seed}"] = (
            {"cold"},
            lambda seed=seed: Exact(seed, 60, 4, times=0.5).judged(),
        )

    changes = {"nonfinite": nan, "duplicate": twice, "dead": still, "modes": modes}
    for kind, change in changes.items():
        out[f"linear, {change.__name__}"] = {kind}, lambda change=change: broken(change)
    out["linear, a leaf that stands still"] = {"dead"}, lambda: broken(frozen)
    return out


def run(name: str) -> dict[str, Any]:
    """One run and its verdict."""
    good, bad = right(), wrong()
    kinds, made = (set[str](), good[name]) if name in good else bad[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = made()
    is_right = bool(found.kinds & kinds) if kinds else found.is_healthy
    says = [finding.says for finding in found.findings]
    return {
        "expected": sorted(kinds),
        "found": sorted(found.kinds),
        "first": found.findings[0].kind if found.findings else "",
        "right": is_right,
        "findings": says,
        "says": ("" if is_right else "WRONG ") + ", ".join(sorted(found.kinds)),
    }


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How the doctor's verdicts go with what the runs are."""
    rows = [r for r in rows if "failed" not in r]
    good, bad = ([r for r in rows if bool(r["expected"]) is flag] for flag in (False, True))

    def counts(good: list, bad: list) -> dict[str, Any]:
        return {
            "right runs": len(good),
            "called wrong": sum(not r["right"] for r in good),
            "wrong runs": len(bad),
            "fault named": sum(r["right"] for r in bad),
            "fault named first": sum(r["first"] in r["expected"] for r in bad),
            "called healthy": sum(not r["found"] for r in bad),
        }

    def of_networks(rows: list) -> list:
        return [r for r in rows if r["cell"].startswith(("network", "wines"))]

    def held_out(rows: list) -> list:
        return [r for r in rows if r["cell"].endswith(("1", "3", "5"))]

    return {
        **counts(good, bad),
        "networks": counts(of_networks(good), of_networks(bad)),
        "held out": counts(held_out(good), held_out(bad)),
        "not as they should": [r["cell"] for r in rows if not r["right"]],
    }


def main() -> None:
    args = command(workers=1, only="", out=RESULTS / "doctor.json")
    names = [name for name in [*right(), *wrong()] if args.only in name]
    names.sort(key=lambda name: not name.startswith(("network", "wines")))  # the longest first
    print(table(work_out(run, names, args.out, workers=args.workers, summary=table)))


if __name__ == "__main__":
    main()
