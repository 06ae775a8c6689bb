"""What ``bc.sample`` costs: time over the bare loop for a step of a small CNN, memory of a long run, many small draws.

    python -m benchmarks.runs

Times are medians over blocks of the bare loop, the bare loop again (A/A, which says what the machine's noise is),
``bc.sample`` in memory and ``bc.sample`` to disk, at one draw in 10 steps (``overhead`` says what is compared). Results go to
``benchmarks/results/runs.json``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.contestants import functional_step
from benchmarks.measure import RESULTS, command, environment, from_start, keep, known, spread, take_turns


def record(name: str, figures: Any, path: Path = RESULTS / "runs.json") -> None:
    """Add figures to a record."""
    keep(path, known(path) | {name: {"commit": environment()["commit"], **figures}})


def cnn() -> tuple[Any, Any, Any, Any]:
    """A step of a small CNN in place, its parameters, state and batch."""
    return functional_step("small_cnn", bc.sghmc(1e-3, temperature=1e-4), inplace=True)


class Timed:
    """A step that keeps the seconds that each call took, and is in all else the step that it holds."""

    def __init__(self, step: Any) -> None:
        self.step, self.seconds = step, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        out = self.step(*arguments)
        self.seconds.append(time.perf_counter() - begin)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


def overhead(blocks: int, steps: int) -> dict[str, Any]:
    """What ``bc.sample`` costs beyond the steps, as a fraction of their time: within each run, and by pairs of runs.

    Within a run it is the time outside of the step over the time in it, which lie side by side: the machine's changes of pace
    cancel; the bare loop beside it has the same clock, whose own time (.1 %) is taken off. What the run does to the step itself
    (caches) it leaves out: that is the median of the times of the steps over that of the bare loops, which passes over the
    moments in which the machine did something else.
    """
    step, params, state, batch = cnn()

    def bare(step: Any) -> None:
        from_start(step, params, state, lambda: batch, steps)()

    def memory(step: Any) -> None:
        bc.sample(step, params, state, batch, steps=steps, thinning=10)

    def disk(step: Any) -> None:
        folder = tempfile.mkdtemp(dir=scratch.name)  # taken away behind the last block: a run does not delete itself
        bc.sample(step, params, state, batch, steps=steps, thinning=10, path=folder)

    def timed(fn: Any) -> tuple[float, float]:
        """The median time of a step, and the time outside of the steps over that in them."""
        counted, begin = Timed(step), time.perf_counter()
        fn(counted)
        wall = time.perf_counter() - begin
        return statistics.median(counted.seconds), wall / sum(counted.seconds) - 1

    scratch = tempfile.TemporaryDirectory()
    ways = {"bare again (A/A)": bare, "memory": memory, "disk": disk}
    for fn in ways.values():
        fn(step)
    within, inside = ({name: list[float]() for name in ways} for _ in range(2))
    before, _ = timed(bare)
    for _ in range(blocks):
        for name, fn in ways.items():
            (own, own_outside), (after, outside) = timed(fn), timed(bare)
            within[name].append(own_outside - outside)
            inside[name].append(2 * own / (before + after) - 1)
            before = after
    scratch.cleanup()
    return {
        "blocks": blocks,
        "steps": steps,
        "time outside of the step over time in it": {name: spread(x) for name, x in within.items()},
        "median time of a step over that in the bare loops before and after": {n: spread(x) for n, x in inside.items()},
    }


def many(draws: int, rounds: int) -> dict[str, Any]:
    """Seconds of a run of many small draws, to disk and in memory in turn, and of reading them all."""
    tx, params = bc.sgld(0.1, temperature=0.1), {"w": torch.zeros(10)}
    step = bc.make_step(lambda p, batch: (p["w"] ** 2).sum(), tx)

    def run(path: str | None = None) -> None:
        read = bc.sample(step, params, tx.init(params), None, steps=draws, path=path).params["w"]
        if len(read) != draws:
            raise RuntimeError(f"{len(read)} of {draws} draws are there")

    with tempfile.TemporaryDirectory() as scratch:
        contestants = {"memory": run, "disk": lambda: run(tempfile.mkdtemp(dir=scratch))}
        times = take_turns(contestants, rounds, seconds=0.0)
    return {
        "draws": draws,
        "seconds": {name: statistics.median(x) for name, x in times.items()},
        "disk over memory": spread([a / b for a, b in zip(times["disk"], times["memory"])]),
    }


def resident() -> float:
    """Resident memory of this process that no file backs, in MiB; this needs Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def growth(steps: int, thinning: int, warm_up: float = 0.1) -> dict[str, Any]:
    """Memory of a run to disk, from the end of the warm-up to its last step."""
    step, params, state, batch = cnn()
    seen: dict[int, float] = {}

    def watch(it: Any) -> None:
        if it.step % max(1, steps // 100) == 0:
            seen[it.step] = resident()

    with tempfile.TemporaryDirectory() as folder:
        how: dict[str, Any] = {"path": folder, "checkpoint_seconds": 0.5, "callbacks": [watch]}
        bc.sample(step, params, state, batch, steps=steps, thinning=thinning, **how)
    after = [x for n, x in seen.items() if n > warm_up * steps]
    fifth = len(after) // 5
    first, last = (statistics.median(x) for x in (after[:fifth], after[-fifth:]))
    return {
        "steps": steps,
        "draws": steps // thinning,
        "MiB at first": first,
        "MiB at last": last,
        "growth": last / first - 1,
    }


if __name__ == "__main__":
    arguments = command(blocks=15, steps=2000, long=20_000, draws=10_000)
    for name, figures in (
        ("overhead", overhead(arguments.blocks, arguments.steps)),
        ("memory", growth(arguments.long, 20)),
        ("many small draws", many(arguments.draws, 7)),
    ):
        record(name, figures)
        print(name, json.dumps(figures, indent=1), flush=True)
