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
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import RESULTS, command, keep, known, ratio


def leaves(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.randn(n) for n in sizes]


def update_and_apply(make: Callable[[Any], Any], sizes: list[int]) -> Callable[[Any], Callable[[], None]]:
    """``update`` in place and ``apply_updates``."""

    def case(bc: Any) -> Callable[[], None]:
        import torchopt

        tx, params, grads = make(bc), leaves(sizes), leaves(sizes)
        state = [tx.init(params)]

        def run() -> None:
            updates, state[0] = tx.update([g.clone() for g in grads], state[0], params=params, inplace=True)
            torchopt.apply_updates(params, updates, inplace=True)

        return run

    return case


def step(make: Callable[[Any], Any], sizes: list[int], inplace: bool) -> Callable[[Any], Callable[[], None]]:
    """``make_step`` on a quadratic loss."""

    def case(bc: Any) -> Callable[[], None]:
        tx, params = make(bc), leaves(sizes)
        run_step = bc.make_step(lambda p, batch: sum((x * x).sum() for x in p), tx, inplace=inplace)
        now = [params, tx.init(params)]

        def run() -> None:
            now[0], now[1], _ = run_step(now[0], now[1], None)

        return run

    return case


def optim(name: str, sizes: list[int], **options: Any) -> Callable[[Any], Callable[[], None]]:
    """A class of ``bc.optim``, with another learning rate at every step."""

    def case(bc: Any) -> Callable[[], None]:
        params = [x.requires_grad_() for x in leaves(sizes)]
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer, steps = getattr(bc.optim, name)(params, lr=1e-3, temperature=1e-4, **options), count(1)

        def run() -> None:
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + 1e-4 * next(steps))
            optimizer.step()

        return run

    return case


def given(
    lr: Callable[[Any], Any], shape: tuple[int, ...], count: int, form: str
) -> Callable[[Any], Callable[[], None]]:
    """``sghmc`` on gradients that are at hand: ``update`` and ``apply_updates``, or ``make_step``."""

    def case(bc: Any) -> Callable[[], None]:
        import torchopt

        tx, params = bc.sghmc(lr(bc), temperature=1e-4), [torch.randn(shape) for _ in range(count)]
        grads = [torch.randn(shape) for _ in range(count)]
        now = [params, tx.init(params)]
        run_step = bc.make_step(lambda p, batch: p[0].sum(), tx, inplace=form == "in place")
        object.__setattr__(run_step, "source", _at_hand(bc, grads))

        def update() -> None:
            updates, now[1] = tx.update(grads, now[1], params=params, inplace=False)
            torchopt.apply_updates(params, updates, inplace=True)

        def move() -> None:
            now[0], now[1], _ = run_step(now[0], now[1], None)

        return update if form == "update" else move

    return case


def _at_hand(bc: Any, grads: list[torch.Tensor]) -> Any:
    from bayesopt_chain.loop.loss import Evaluation, Info

    found = Evaluation(grads, Info(torch.zeros(()), ()), {}, None)
    return lambda *args: found


RATES = {"constant": lambda bc: 1e-3, "cosine": lambda bc: bc.schedules.cosine(1e-3, 10**6)}
SIZES = {"3 x 16x16": ((16, 16), 3), "30 x 64x64": ((64, 64), 30), "2 x 1e6": ((10**6,), 2)}


def captured(make: Callable[[Any], Any], sizes: list[int]) -> Callable[[Any], Callable[[], None]]:
    """``make_step`` on a quadratic loss as one program."""

    def case(bc: Any) -> Callable[[], None]:
        tx, params = make(bc), leaves(sizes)
        now = [params, tx.init(params)]
        run_step = bc.capture(bc.make_step(lambda p, batch: sum((x * x).sum() for x in p), tx), *now, None)

        def run() -> None:
            now[0], now[1], _ = run_step(now[0], now[1], None)

        return run

    return case


def philox(bc: Any, tx: Any) -> Any:
    """The counter-based stream: a commit with two of them is asked for it."""
    return bc.with_stream(tx, "philox") if hasattr(bc, "with_stream") else tx


SMALL, LARGE = [1000] * 60, [10**6] * 10
CASES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "sgd momentum, update + apply, 60 leaves of 1e3": update_and_apply(lambda bc: bc.sgd(1e-3, 0.9), SMALL),
    "sgd momentum, update + apply, 10 leaves of 1e6": update_and_apply(lambda bc: bc.sgd(1e-3, 0.9), LARGE),
    "adam, update + apply, 60 leaves of 1e3": update_and_apply(lambda bc: bc.adam(1e-3), SMALL),
    "adam, update + apply, 10 leaves of 1e6": update_and_apply(lambda bc: bc.adam(1e-3), LARGE),
    "sghmc, update + apply, 60 leaves of 1e3": update_and_apply(lambda bc: bc.sghmc(1e-3, temperature=1e-4), SMALL),
    "sghmc, update + apply, 10 leaves of 1e6": update_and_apply(lambda bc: bc.sghmc(1e-3, temperature=1e-4), LARGE),
    "sghmc philox, update + apply, 60 leaves of 1e3": update_and_apply(
        lambda bc: philox(bc, bc.sghmc(1e-3, temperature=1e-4)), SMALL
    ),
    "sghmc scheduled, update + apply, 60 leaves of 1e3": update_and_apply(
        lambda bc: bc.sghmc(bc.schedules.cosine(1e-3, 10**6), temperature=1e-4), SMALL
    ),
    "sgld scheduled, update + apply, 60 leaves of 1e3": update_and_apply(
        lambda bc: bc.sgld(bc.schedules.cosine(1e-3, 10**6), temperature=1e-4), SMALL
    ),
    "nesterov scheduled, update + apply, 60 leaves of 1e3": update_and_apply(
        lambda bc: bc.sgd(bc.schedules.cosine(1e-3, 10**6), 0.9, nesterov=True, temperature=1e-4), SMALL
    ),
    "sghmc scheduled, step in place, 10 leaves of 1e6": step(
        lambda bc: bc.sghmc(bc.schedules.cosine(1e-3, 10**6), temperature=1e-4), LARGE, True
    ),
    "adam at T > 0, update + apply, 60 leaves of 1e3": update_and_apply(
        lambda bc: bc.adam(1e-3, temperature=1e-4), SMALL
    ),
    "sghmc, step in place, 60 leaves of 1e3": step(lambda bc: bc.sghmc(1e-3, temperature=1e-4), SMALL, True),
    "sghmc, step in place, 10 leaves of 1e6": step(lambda bc: bc.sghmc(1e-3, temperature=1e-4), LARGE, True),
    "bc.optim.SGLD, lr that changes, 60 leaves of 10": optim("SGLD", [10] * 60),
    "bc.optim.SGHMC, lr that changes, 60 leaves of 10": optim("SGHMC", [10] * 60),
    "bc.optim.SGHMC, lr that changes, 4 leaves of 1e6": optim("SGHMC", [10**6] * 4),
    "bc.optim Nesterov, lr that changes, 60 leaves of 10": optim("SGHMC", [10] * 60, nesterov=True),
    "bc.optim.Adam, lr that changes, 60 leaves of 10": optim("Adam", [10] * 60),
    "sghmc scheduled, captured, 6 leaves of 100": captured(
        lambda bc: bc.sghmc(bc.schedules.cosine(1e-3, 10**6), temperature=1e-4), [100] * 6
    ),
    "sghmc, pure step, 1 leaf of 10": step(lambda bc: bc.sghmc(1e-3, temperature=1e-4), [10], False),
    "sgd, pure step, 1 leaf of 10": step(lambda bc: bc.sgd(1e-3, 0.9), [10], False),
    **{
        f"sghmc {rate}, {form}, {size}": given(lr, *leaves_of, form)
        for size, leaves_of in SIZES.items()
        for rate, lr in RATES.items()
        for form in ("update", "pure", "in place")
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


HERE = Path(__file__).parents[1]
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
        command = [sys.executable, "-W", "ignore", "-c", SERVE.format(here=str(HERE), module=module)]
        self.process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *question: Any) -> Any:
        """What ``answer`` of the benchmark says."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def seconds(self, name: str, calls: int) -> float:
        """Seconds a call."""
        return self.ask(name, calls)

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def commit(path: Path) -> str:
    """The commit of a checkout."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=path, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    path = RESULTS / "against.json"
    given = command(other=Path, rounds=15, processes=2, only="")
    here, there = HERE, given.other.resolve()
    both, before = {"this": commit(here), "other": commit(there)}, known(path)
    if given.only and before["commits"] != both:
        raise SystemExit(f"{path.name} is of {before['commits']}, not of {both}: measure all cases")
    # cases measured again take their places among the others of the same two commits
    rows = {row["case"]: row for row in before["rows"]} if given.only else {}
    for name in (case for case in CASES if given.only in case):
        times: dict[str, list[float]] = {"this": [], "other": []}
        for _ in range(given.processes):
            workers = {"this": Worker(here), "other": Worker(there)}
            calls = max(1, int(0.05 / max(workers["this"].seconds(name, 3), 1e-6)))
            workers["other"].seconds(name, calls)
            for _ in range(given.rounds):
                for who, worker in workers.items():
                    times[who].append(worker.seconds(name, calls))
            for worker in workers.values():
                worker.stop()
        about = {"case": name, "processes": given.processes, "rounds": given.rounds}
        rows[name] = about | ratio(times, "this", "other")
        print(f"{name:52} {rows[name]['ratio']:.3f} ({rows[name]['low']:.3f} to {rows[name]['high']:.3f})", flush=True)
        keep(path, {"commits": both, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
