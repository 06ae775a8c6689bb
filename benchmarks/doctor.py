"""How often the doctor is wrong: runs that are right and runs that are not, networks among both.

    python -m benchmarks.doctor                    # about ten minutes; goes on where it stopped
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
from functools import partial
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_diabetes, load_wine
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import doctor
from benchmarks.measure import RESULTS, command, fill
from benchmarks.networks import descend

N, B = 300, 20
T, OF_WINES = 1 / N, 1 / 178
HOT, COLD = {"heated", "diverged"}, {"cold", "short", "mixing", "burn-in", "modes"}
RIGHT = set[str]()


class Problem(NamedTuple):
    """Data, their loss with the prior, starts of so many chains, and predictions to judge by (``None``: parameters)."""

    data: tuple[Tensor, Tensor]
    loss: Callable[[Any, Any], Tensor]
    start: Callable[[int], dict[str, Tensor]]
    of: Callable[[Any], Tensor] | None = None


def squares(p: dict[str, Tensor]) -> Any:
    return sum(t.square().sum() for t in p.values())


def regression(seed: int) -> Problem:
    """A linear regression with the prior N(0, 1)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=g)
    y = x @ torch.tensor([1.0, -1.0, 0.5, 0.0]) + torch.randn(N, generator=g)

    def loss(p: Any, batch: Any) -> Tensor:
        return (batch[0] @ p["w"] + p["b"] - batch[1]).square().mean() / 2 + p["w"].square().sum() / (2 * N)

    return Problem(
        (x, y), loss, lambda c: {"w": 0.3 * torch.randn(c, 4, generator=g), "b": 0.3 * torch.randn(c, generator=g)}
    )


def logistic(seed: int) -> Problem:
    """A logistic regression with the prior N(0, 1)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=g)
    y = torch.bernoulli(torch.sigmoid(x @ torch.tensor([2.0, -1.0, 0.0, 1.0])), generator=g)

    def loss(p: Any, batch: Any) -> Tensor:
        logits = batch[0] @ p["w"] + p["b"]
        return binary_cross_entropy_with_logits(logits, batch[1]) + p["w"].square().sum() / (2 * N)

    return Problem((x, y), loss, lambda c: {"w": torch.randn(c, 4, generator=g), "b": torch.randn(c, generator=g)})


def modes(chains: int, shapes: dict[str, tuple[int, ...]], loss: Any, data: Any, seed: int) -> dict[str, Tensor]:
    """Starts for chains of a network: random weights, trained by Adam."""
    g = torch.Generator().manual_seed(seed)
    p = {k: (0.3 * torch.randn(chains, *s, generator=g)).requires_grad_() for k, s in shapes.items()}
    adam = torch.optim.Adam(p.values(), 0.02)
    descend(adam, lambda: sum(loss({k: t[i] for k, t in p.items()}, data) for i in range(chains)), 500)
    return {k: t.detach() for k, t in p.items()}


def network(seed: int, stretched: float = 1.0) -> Problem:
    """Diabetes, 20 units, prior N(0, 1) on every weight, noise variance 1/2 of standardised targets; starts at modes.

    One input may be ``stretched`` by a factor, so that few directions are much stiffer than the others.
    """
    table = load_diabetes()
    rows = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(seed))[:N]
    x, y = torch.tensor(table.data).float()[rows] * 20, torch.tensor(table.target).float()[rows]
    y = (y - y.mean()) / y.std()
    x[:, 2] *= stretched

    def forward(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["W"] + p["a"]) @ p["v"][..., None])[..., 0] + p["b"]

    def loss(p: Any, batch: Any) -> Tensor:
        return (forward(p, batch[0]) - batch[1]).square().mean() + squares(p) / (2 * N)

    shapes = {"W": (10, 20), "a": (20,), "v": (20,), "b": ()}
    return Problem((x, y), loss, lambda c: modes(c, shapes, loss, (x, y), seed), lambda p: forward(p, x[:10]))


def wines(seed: int) -> Problem:
    """178 wines in three classes, 16 units, prior N(0, 1) on every weight; starts at modes."""
    table = load_wine()
    rows = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(table.data).float()[rows], torch.tensor(table.target)[rows]
    x = (x - x.mean(0)) / x.std(0)

    def forward(p: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ p["W"] + p["a"][..., None, :]) @ p["V"] + p["b"][..., None, :]

    def loss(p: Any, batch: Any) -> Tensor:
        return cross_entropy(forward(p, batch[0]), batch[1]) + squares(p) / (2 * len(y))

    shapes = {"W": (13, 16), "a": (16,), "V": (16, 3), "b": (3,)}
    start = partial(modes, shapes=shapes, loss=loss, data=(x, y), seed=seed)
    return Problem((x, y), loss, start, lambda p: forward(p, x[::18]).softmax(-1)[..., :2])


def sampled(
    problem: Problem, tx: Any, *, batch: int | None = None, steps: int = 1000, burn_in: int = 200, thinning: int = 4,
    params: Any = None, order: Any = "reshuffled",
) -> bc.Draws:  # fmt: skip
    """Draws of four chains."""
    torch.manual_seed(0)
    step = bc.parallel(bc.make_step(problem.loss, tx), 4)
    params = problem.start(4) if params is None else params
    batches = [problem.data] if batch is None else bc.epochs(problem.data, batch, order=order)
    return bc.sample(step, params, step.init(tx, params), batches, steps=steps, burn_in=burn_in, thinning=thinning)


def judged(draws: bc.Draws, tx: Any, problem: Problem) -> Any:
    return doctor(draws, tx, problem.loss, [problem.data], of=problem.of)


def loop(make: Callable[[int], Problem], tx: Any, summed: bool = False, **how: Any) -> Callable[[int], Any]:
    """The verdict on a loop of this chain, by seed; ``summed``: its loss is a sum over the batch."""

    def run(seed: int) -> Any:
        problem = make(seed)
        if summed:
            problem = problem._replace(loss=lambda p, batch, mean=problem.loss: len(batch[0]) * mean(p, batch))
        given = {name: value(seed) if callable(value) else value for name, value in how.items()}
        return judged(sampled(problem, tx, **given), tx, problem)

    return run


def changed(change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> Callable[[int], Any]:
    """The verdict on draws of the linear regression, ``[draws, chains, *]``, after a change."""

    def run(seed: int) -> Any:
        problem, tx = regression(seed), bc.sghmc(0.1, temperature=T)
        draws = {name: x.clone() for name, x in sampled(problem, tx).params.items()}
        return judged(of_stacked(change(draws) or draws), tx, problem)

    return run


def of_stacked(draws: dict[str, Tensor]) -> bc.Draws:
    """Draws ``[draws, chains, *]``."""
    trees = [dict(zip(draws, leaves)) for leaves in zip(*draws.values())]
    return bc.Draws.from_trees(trees, chains=next(iter(draws.values())).shape[1])


class Exact(NamedTuple):
    """Independent draws ``[draws, chains, P]`` of the posterior of a linear regression with noise and prior of variance 1."""

    w: Tensor
    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, seed: int, draws: int, chains: int, P: int = 4, n: int = N, times: float = 1.0) -> Exact:
        """Of P parameters and n data, at a temperature ``times`` that of the posterior."""
        g = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(n, P, generator=g) / (P / 4) ** 0.5
        y = x @ torch.randn(P, generator=g) + torch.randn(n, generator=g)
        precision = (x.T @ x + torch.eye(P)).double()
        root = torch.linalg.cholesky(torch.linalg.inv(precision) * times)
        mean = torch.linalg.solve(precision, (x.T @ y).double())
        return cls((mean + torch.randn(draws, chains, P, generator=g).double() @ root.T).float(), x, y)


def exact(
    *size: int, change: Callable[[Tensor], None] | None = None, batch: int = N, frozen: bool = False, **of: Any
) -> Callable[[int], Any]:
    """The verdict on exact draws after a change, with the prior as weight decay, by seed.

    Args:
        size, of: arguments of :meth:`Exact.make`.
        batch: data in a batch; default: all.
        frozen: put a leaf that is not sampled beside them.
    """

    def loss(p: Any, rows: Any) -> Tensor:
        pinned = 50 * (p["still"] - 1).square().sum() if frozen else 0.0
        return (rows[0] @ p["w"] - rows[1]).square().mean() / 2 + pinned

    def run(seed: int) -> Any:
        w, x, y = Exact.make(seed, *size, **of)
        if change is not None:
            change(w)
        leaves, tx = {"w": w}, bc.sgd(0.1, momentum=0.9, weight_decay=1 / len(x), temperature=1 / len(x))
        if frozen:
            leaves["still"] = torch.ones(*w.shape[:2], 2)
            tx = bc.partition({True: tx, False: bc.sgd(0.0)}, {"w": True, "still": False})
        return doctor(of_stacked(leaves), tx, loss, [*zip(x.split(batch), y.split(batch))])

    return run


def jumped(w: Tensor) -> None:
    """Each chain jumps once, by thirty standard deviations, to one side or the other."""
    half, some = len(w) // 2, (w.shape[1] + 1) // 2
    w[half:, :some] += 2.0
    w[:half, some:] += 2.0


def elsewhere(w: Tensor) -> None:
    """One chain is thirty standard deviations away."""
    w[:, 3] += 2.0


def stopped(w: Tensor) -> None:
    """One chain repeats a draw from the middle on."""
    w[len(w) // 2 :, 0] = w[len(w) // 2, 0]


def far(seed: int) -> dict[str, Tensor]:
    """Starts a hundred posterior standard deviations away and more, for four chains of the linear regression."""
    g = torch.Generator().manual_seed(seed)
    return {"w": 50 + torch.randn(4, 4, generator=g), "b": torch.randn(4, generator=g)}


def independent(seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    return doctor(of_stacked({"w": torch.randn(100 + 50 * seed, 4, 5 + 40 * seed, generator=g)}))


def slow(seed: int) -> Any:
    """Ten to twenty effective draws a chain."""
    g = torch.Generator().manual_seed(seed)
    x, forgets = [torch.randn(4, 5, generator=g)], 0.9
    for _ in range(400 - 100 * (seed % 2)):
        x.append(forgets * x[-1] + (1 - forgets**2) ** 0.5 * torch.randn(4, 5, generator=g))
    return doctor(of_stacked({"w": torch.stack(x)}))


def drifts(seed: int) -> Any:
    """All chains rise together."""
    g = torch.Generator().manual_seed(seed)
    rises = torch.linspace(0, (3.3, 16.7)[seed // 2], 400)
    return doctor(of_stacked({"w": torch.randn(400, 4, 4, generator=g) + rises[:, None, None]}))


def one_seed(seed: int) -> Any:
    """Four chains from different starts, by one seed."""
    problem, tx, runs = regression(seed), bc.sghmc(0.1, temperature=T), []
    for i in range(4):
        torch.manual_seed(7)
        w = {"w": torch.full((4,), float(i)), "b": torch.tensor(0.0)}
        step = bc.make_step(problem.loss, tx)
        runs.append(bc.sample(step, w, tx.init(w), [problem.data], steps=1500, burn_in=500, thinning=5).params)
    return judged(of_stacked({name: torch.stack([run[name] for run in runs], 1) for name in runs[0]}), tx, problem)


def nan(x: dict[str, Tensor]) -> None:
    x["w"][7, 0, 0] = torch.nan


def twice(x: dict[str, Tensor]) -> None:
    for leaf in x.values():
        leaf[:, 1] = leaf[:, 0]


def behind(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """A chain that is another one, three draws behind."""
    for leaf in x.values():
        leaf[3:, 1] = leaf[:-3, 0].clone()
    return {name: leaf[3:] for name, leaf in x.items()}


def still(x: dict[str, Tensor]) -> None:
    for leaf in x.values():
        leaf[:, 2] = leaf[0, 2]


def apart(x: dict[str, Tensor]) -> None:
    x["w"][:, :2] += 1.0


def frozen(x: dict[str, Tensor]) -> None:
    x["b"][:] = x["b"][0]


def runs() -> dict[str, tuple[set[str], Callable[[], Any]]]:
    """By name the kinds of which the doctor has to name one, none for a right run, and what gives its verdict."""
    sghmc, of_wines = partial(bc.sghmc, temperature=T), partial(bc.sghmc, temperature=OF_WINES)
    longer = {"steps": 4000, "burn_in": 1500, "thinning": 12}
    cool = {"batch": 150, "steps": 5000, "burn_in": 2000, "thinning": 12}
    white = {"order": "independent", "steps": 2500}
    strong = bc.sgd(0.005, momentum=0.9, weight_decay=1000 / N, temperature=T)
    at_start = {"params": far, "burn_in": 0}
    with_seeds = [
        ("independent draws", 6, RIGHT, independent),
        ("few effective draws", 4, RIGHT, slow),
        ("linear, far start, finished burn-in", 2, RIGHT, loop(regression, sghmc(0.1), params=far, steps=2000, burn_in=600)),
        ("exact, 12 draws of 2 chains", 6, RIGHT, exact(12, 2)),
        ("exact, 20 draws of 20 chains", 6, RIGHT, exact(20, 20)),
        ("exact, 400 parameters, 30 data", 6, RIGHT, exact(60, 4, P=400, n=30)),
        ("exact, a short last batch", 6, RIGHT, exact(60, 4, batch=92)),
        ("exact, beside a frozen leaf", 6, RIGHT, exact(60, 4, frozen=True)),
        ("linear, sgld", 2, RIGHT, loop(regression, bc.sgld(0.5, temperature=T))),
        ("linear, sghmc", 2, RIGHT, loop(regression, sghmc(0.1))),
        ("linear, sghmc, small lr", 2, RIGHT, loop(regression, sghmc(0.03))),
        ("linear, momentum 0.5", 2, RIGHT, loop(regression, sghmc(0.3, 0.5))),
        ("linear, nesterov", 2, RIGHT, loop(regression, bc.sgd(0.1, momentum=0.9, nesterov=True, temperature=T))),
        ("linear, dampening", 2, RIGHT, loop(regression, bc.sgd(0.3, momentum=0.9, dampening=0.5, temperature=T))),
        ("linear, preconditioned", 2, RIGHT, loop(regression, bc.chain(bc.scale_by_preconditioner(0.5), sghmc(0.2)))),
        ("logistic", 4, RIGHT, loop(logistic, sghmc(0.5))),
        ("network, full batch", 3, RIGHT, loop(network, sghmc(0.04), **longer)),
        ("network, cool batches", 3, RIGHT, loop(network, sghmc(0.02, 0.93), **cool)),
        ("wines, full batch", 3, RIGHT, loop(wines, of_wines(0.2), **longer)),
        ("linear, hot batches", 2, HOT, loop(regression, sghmc(0.1), batch=B)),
        ("linear, warm independent batches", 2, HOT, loop(regression, sghmc(0.02), batch=B, order="independent")),
        ("logistic, hot batches", 2, HOT, loop(logistic, sghmc(1.0), batch=B)),
        ("network, hot batches", 2, HOT | {"scale"}, loop(network, sghmc(0.03), batch=B, **white)),
        ("linear, sum of a batch", 2, {"scale"}, loop(regression, sghmc(1e-3), summed=True)),
        ("logistic, temperature 1", 2, {"scale"}, loop(logistic, bc.sghmc(0.1, temperature=1.0))),
        ("linear, temperature 1/b", 2, {"scale"}, loop(regression, bc.sghmc(0.1, temperature=1 / B))),
        ("network, temperature 1/b", 2, {"scale"}, loop(network, bc.sghmc(0.005, temperature=1 / B))),
        ("wines, hot batches", 2, HOT, loop(wines, of_wines(0.5), batch=16, **white)),
        ("wines, temperature 1", 2, {"scale"}, loop(wines, bc.sghmc(0.1, temperature=1.0))),
        ("wines, sum of a batch", 2, {"scale"}, loop(wines, of_wines(1e-3), summed=True)),
        ("wines, rate too small", 2, COLD, loop(wines, of_wines(1e-6), steps=1500)),
        ("network, rate too small", 2, COLD, loop(network, sghmc(1e-7), steps=1500)),
        ("logistic, rate too small", 2, COLD, loop(logistic, sghmc(1e-4), steps=1500)),
        ("linear, lr beyond the limit", 2, {"diverged", "nonfinite"}, loop(regression, sghmc(9.0), steps=400, burn_in=0)),
        ("linear, far start", 2, {"burn-in", "mixing", "modes"},
         loop(regression, bc.sgld(0.004, temperature=T), steps=2000, **at_start)),
        ("linear, far start with momentum", 2, {"burn-in"}, loop(regression, sghmc(0.1), steps=800, **at_start)),
        ("linear, eight draws", 2, {"short", "mixing", "burn-in", "modes"},
         loop(regression, sghmc(0.01), steps=80, burn_in=0, thinning=10)),
        ("linear, decay a thousand times too strong", 2, {"prior"}, loop(regression, strong, steps=4000)),
        ("linear, one seed from four starts", 2, {"duplicate"}, one_seed),
        ("linear, a copy three draws behind", 2, {"duplicate"}, changed(behind)),
        ("common drift", 4, {"mixing"}, drifts),
        ("exact, one jump", 6, {"mixing", "short"}, exact(60, 4, change=jumped)),
        ("exact, one of 50 chains elsewhere", 6, {"modes"}, exact(60, 50, change=elsewhere)),
        ("exact, a chain that stops", 6, {"dead"}, exact(60, 2, change=stopped)),
        ("exact, at twice the temperature", 6, {"heated"}, exact(60, 4, times=2.0)),
        ("exact, at half the temperature", 6, {"cold"}, exact(60, 4, times=0.5)),
        ("linear, nan", 1, {"nonfinite"}, changed(nan)),
        ("linear, twice", 1, {"duplicate"}, changed(twice)),
        ("linear, still", 1, {"dead"}, changed(still)),
        ("linear, modes", 1, {"modes"}, changed(apart)),
        ("linear, a leaf that stands still", 1, {"dead"}, changed(frozen)),
    ]  # fmt: skip
    return {
        f"{name} {seed}" if seeds > 1 else name: (kinds, partial(made, seed))
        for name, seeds, kinds, made in with_seeds
        for seed in range(seeds)
    }


def run(name: str) -> dict[str, Any]:
    """One run and its verdict."""
    kinds, made = runs()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = made()
    is_right = bool(found.kinds & kinds) if kinds else found.is_healthy
    return {
        "expected": sorted(kinds),
        "found": sorted(found.kinds),
        "first": found.findings[0].kind if found.findings else "",
        "right": is_right,
        "findings": [finding.says for finding in found.findings],
    }


def table(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How the doctor's verdicts go with what the runs are, by their names."""

    def counts(fits: Callable[[str], bool]) -> dict[str, Any]:
        some = [row for name, row in rows.items() if fits(name)]
        good, bad = ([r for r in some if bool(r["expected"]) is flag] for flag in (False, True))
        return {
            "right runs": len(good),
            "called wrong": sum(not r["right"] for r in good),
            "wrong runs": len(bad),
            "fault named": sum(r["right"] for r in bad),
            "fault named first": sum(r["first"] in r["expected"] for r in bad),
            "called healthy": sum(not r["found"] for r in bad),
        }

    return {
        **counts(lambda name: True),
        "networks": counts(lambda name: name.startswith(("network", "wines"))),
        "held out": counts(lambda name: name.endswith(("1", "3", "5"))),
        "not as they should": [name for name, row in rows.items() if not row["right"]],
    }


if __name__ == "__main__":
    args = command(only="", out=RESULTS / "doctor.json")
    cells = ((("rows", name), partial(run, name)) for name in runs() if args.only in name)
    print(fill(args.out, cells, lambda record: {"table": table(record["rows"])})["table"])
