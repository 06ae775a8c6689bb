"""``python -m benchmarks.against OTHER_CHECKOUT``: this commit against another, case by case in one paired run.

Two processes, one for each commit, take turns at a case, and the ratios of neighbouring turns, in processor time, are kept.
Every case has processes of its own: where large tensors lie in memory depends on what a process did before, and changes their
cases by a tenth. The other checkout only lends its package: ``git worktree add ../before COMMIT`` makes one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, ROOT, command, commit, keep, known, ratio, stepping

Make = Callable[[Any], Any]  # a chain of a package
Case = Callable[[Any], Callable[[], None]]  # what is timed, of a package


def leaves(shapes: Sequence[Any], device: str = "cpu") -> list[torch.Tensor]:
    return [torch.randn(shape, device=device) for shape in shapes]


def quadratic(params: list[torch.Tensor], batch: Any) -> Any:
    return sum((x * x).sum() for x in params)


def update_and_apply(make: Make, shapes: Sequence[Any], inplace: bool = True) -> Case:
    """``update`` and ``apply_updates``."""

    def case(bc: Any) -> Callable[[], None]:
        import torchopt

        tx, params, grads = make(bc), leaves(shapes), leaves(shapes)
        state = [tx.init(params)]

        def run() -> None:
            given = [g.clone() for g in grads] if inplace else grads
            updates, state[0] = tx.update(given, state[0], params=params, inplace=inplace)
            torchopt.apply_updates(params, updates, inplace=True)

        return run

    return case


def step(
    make: Make, shapes: Sequence[Any], inplace: bool = False, captured: bool = False, at_hand: bool = False
) -> Case:
    """``make_step`` on a quadratic loss, as one program if it is ``captured``, or on gradients that are ``at_hand``."""

    def case(bc: Any) -> Callable[[], None]:
        tx, params = make(bc), leaves(shapes)
        run_step, state = bc.make_step(quadratic, tx, inplace=inplace), tx.init(params)
        if at_hand:
            from bayesopt_chain.loop.loss import Evaluation, Info

            found = Evaluation(leaves(shapes), Info(torch.zeros(()), ()), {}, None)
            object.__setattr__(run_step, "source", lambda *args: found)
        if captured:
            run_step = bc.capture(run_step, params, state, None)
        return stepping(run_step, params, state, None)

    return case


def chains(count: int) -> Case:
    """A step of chains of a network of 10 inputs and 5 hidden units, 60 weights, on 64 data."""

    def loss(params: list[torch.Tensor], batch: Any) -> torch.Tensor:
        w, b, v = params
        return (torch.tanh(batch[0] @ w + b) @ v - batch[1]).square().mean()

    def case(bc: Any) -> Callable[[], None]:
        tx, params, batch = (
            bc.sghmc(0.01, temperature=1e-3),
            bc.stack([leaves([(10, 5), 5, 5])] * count),
            leaves([(64, 10), 64]),
        )
        many = bc.parallel(bc.make_step(loss, tx), count)
        return stepping(many, params, many.init(tx, params), tuple(batch))

    return case


def optim(name: str, shapes: Sequence[Any], **options: Any) -> Case:
    """A class of ``bc.optim``, with another learning rate at every step."""

    def case(bc: Any) -> Callable[[], None]:
        params = [x.requires_grad_() for x in leaves(shapes)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer, steps = getattr(bc.optim, name)(params, lr=1e-3, temperature=1e-4, **options), count(1)

        def run() -> None:
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + 1e-4 * next(steps))
            optimizer.step()

        return run

    return case


def laplace(subset: str, structure: str, predicts: bool = False) -> Case:
    """A fit of a perceptron 784-256-10 to 512 data, or its predictions of 16 inputs."""

    def case(bc: Any) -> Callable[[], None]:
        net = torch.nn.Sequential(torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        data, new = list(zip(torch.randn(4, 128, 784), torch.randint(10, (4, 128)))), torch.randn(16, 784)

        def fit() -> Any:
            how = {"subset": subset, "structure": structure, "tune": None}
            return bc.fit_laplace(net, bc.likelihoods.categorical(), data, **how)

        fitted = fit()
        return (lambda: fitted.predict(new)) if predicts else fit

    return case


def hot(name: str, scheduled: bool = False, **options: Any) -> Make:
    """A chain of that name at a positive temperature, its rate constant or along a cosine."""
    rate = lambda bc: bc.schedules.cosine(1e-3, 10**6) if scheduled else 1e-3  # noqa: E731
    return lambda bc: getattr(bc, name)(rate(bc), temperature=1e-4, **options)


SIZES = {"3 x 16x16": [(16, 16)] * 3, "30 x 64x64": [(64, 64)] * 30, "2 x 1e6": [10**6] * 2}
FORMS = ("update", "pure", "in place")


def at_hand(rate: str, form: str, shapes: Sequence[Any]) -> Case:
    """``sghmc`` on gradients that are at hand: ``update`` and ``apply_updates``, or ``make_step``."""
    make = hot("sghmc", rate == "cosine")
    if form == "update":
        return update_and_apply(make, shapes, inplace=False)
    return step(make, shapes, inplace=form == "in place", at_hand=True)


SMALL, LARGE = [1000] * 60, [10**6] * 10
CASES: dict[str, Case] = {
    "sgd momentum, update + apply, 60 leaves of 1e3": update_and_apply(lambda bc: bc.sgd(1e-3, 0.9), SMALL),
    "sgd momentum, update + apply, 10 leaves of 1e6": update_and_apply(lambda bc: bc.sgd(1e-3, 0.9), LARGE),
    "adam, update + apply, 60 leaves of 1e3": update_and_apply(lambda bc: bc.adam(1e-3), SMALL),
    "adam, update + apply, 10 leaves of 1e6": update_and_apply(lambda bc: bc.adam(1e-3), LARGE),
    "sghmc, update + apply, 60 leaves of 1e3": update_and_apply(hot("sghmc"), SMALL),
    "sghmc, update + apply, 10 leaves of 1e6": update_and_apply(hot("sghmc"), LARGE),
    "sghmc scheduled, update + apply, 60 leaves of 1e3": update_and_apply(hot("sghmc", True), SMALL),
    "sgld scheduled, update + apply, 60 leaves of 1e3": update_and_apply(hot("sgld", True), SMALL),
    "nesterov scheduled, update + apply, 60 leaves of 1e3": update_and_apply(
        hot("sgd", True, momentum=0.9, nesterov=True), SMALL
    ),
    "sghmc scheduled, step in place, 10 leaves of 1e6": step(hot("sghmc", True), LARGE, inplace=True),
    "adam at T > 0, update + apply, 60 leaves of 1e3": update_and_apply(hot("adam"), SMALL),
    "sghmc, step in place, 60 leaves of 1e3": step(hot("sghmc"), SMALL, inplace=True),
    "sghmc, step in place, 10 leaves of 1e6": step(hot("sghmc"), LARGE, inplace=True),
    "bc.optim.SGLD, lr that changes, 60 leaves of 10": optim("SGLD", [10] * 60),
    "bc.optim.SGHMC, lr that changes, 60 leaves of 10": optim("SGHMC", [10] * 60),
    "bc.optim.SGHMC, lr that changes, 4 leaves of 1e6": optim("SGHMC", [10**6] * 4),
    "bc.optim Nesterov, lr that changes, 60 leaves of 10": optim("SGHMC", [10] * 60, nesterov=True),
    "bc.optim.Adam, lr that changes, 60 leaves of 10": optim("Adam", [10] * 60),
    "sghmc scheduled, captured, 6 leaves of 100": step(hot("sghmc", True), [100] * 6, captured=True),
    "sghmc, pure step, 1 leaf of 10": step(hot("sghmc"), [10]),
    "sgd, pure step, 1 leaf of 10": step(lambda bc: bc.sgd(1e-3, 0.9), [10]),
    "4 chains of 60 weights": chains(4),
    "64 chains of 60 weights": chains(64),
    "Laplace fit, last layer, Kronecker": laplace("last_layer", "kronecker"),
    "Laplace fit, all layers, diagonal": laplace("all", "diagonal"),
    "Laplace fit, all layers, Kronecker": laplace("all", "kronecker"),
    "Laplace predictions, last layer, Kronecker": laplace("last_layer", "kronecker", predicts=True),
    **{
        f"sghmc {rate}, {form}, {size}": at_hand(rate, form, shapes)
        for size, shapes in SIZES.items()
        for rate in ("constant", "cosine")
        for form in FORMS
    },
}


def answer(bc: Any, name: str, calls: int, made: dict[str, Callable[[], None]] = {}) -> float:  # noqa: B006
    """Processor seconds of a call of a case, which stands ready until another is asked for."""
    if name not in made:
        made.clear()
        torch.manual_seed(0)
        made[name] = CASES[name](bc)
        made[name]()
    start = time.process_time()
    for _ in range(calls):
        made[name]()
    return (time.process_time() - start) / calls


SERVE = """
import json, sys, torch, bayesopt_chain
sys.path.insert(0, {here!r})
from benchmarks.{module} import answer
torch.set_num_threads(1)
for line in sys.stdin:
    print(json.dumps(answer(bayesopt_chain, *json.loads(line))), flush=True)
"""


class Worker:
    """A process that answers by a benchmark of this checkout, with the package of another one."""

    def __init__(self, checkout: Path, module: str = "against") -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-c", SERVE.format(here=str(ROOT), module=module)]
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *question: Any) -> Any:
        """What ``answer`` of the benchmark says."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()


if __name__ == "__main__":
    path = RESULTS / "against.json"
    given = command(other=Path, rounds=15, processes=2, only="")
    here, there = ROOT, given.other.resolve()
    both, before = {"this": commit(here), "other": commit(there)}, known(path)
    if given.only and before["commits"] != both:
        raise SystemExit(f"{path.name} is of {before['commits']}, not of {both}: measure all cases")
    # cases measured again take their places among the others of the same two commits
    rows = {row["case"]: row for row in before["rows"]} if given.only else {}
    for name in (case for case in CASES if given.only in case):
        times: dict[str, list[float]] = {"this": [], "other": []}
        for _ in range(given.processes):
            workers = {"this": Worker(here), "other": Worker(there)}
            calls = max(1, int(0.05 / max(workers["this"].ask(name, 3), 1e-6)))
            workers["other"].ask(name, calls)
            for _ in range(given.rounds):
                for who, worker in workers.items():
                    times[who].append(worker.ask(name, calls))
            for worker in workers.values():
                worker.stop()
        about = {"case": name, "processes": given.processes, "rounds": given.rounds}
        rows[name] = about | ratio(times, "this", "other")
        print(f"{name:52} {rows[name]['ratio']:.3f} ({rows[name]['low']:.3f} to {rows[name]['high']:.3f})", flush=True)
        keep(path, {"commits": both, "rows": list(rows.values())})
