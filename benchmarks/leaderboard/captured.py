"""``python -m benchmarks.leaderboard.captured``: whether the one call's steps pay for being captured, on the league's network.

For the steps of training (Adam, minibatches, each member its own rows) and of chains (SGHMC, all data) of four members, in one
process on one thread: process time of a step as it is and captured, in turns; process time of the capture with its compiler,
on an empty cache and on one that holds the program; and from these the steps at which a capture has paid for itself, beside
the steps that the rule of ``bc.posterior_ensemble`` takes for so many data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "results" / "leaderboard_captured.json"
ROUNDS = 9


def spent() -> float:
    """Process time so far, with that of children that have ended, in seconds."""
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def measured(name: str, timed: bool) -> dict[str, Any]:
    """Both steps of one task in this process."""
    import torch

    torch.set_num_threads(1)
    import bayesopt_chain as bc
    from bayesopt_chain.ensemble.ladder import LEAST_STEPS, SHARE, Sghmc
    from bayesopt_chain.ensemble.plan import steps_for
    from bayesopt_chain.ensemble.problem import started
    from benchmarks.leaderboard.contestants import likelihood, network
    from benchmarks.leaderboard.tasks import split
    from benchmarks.measure import ratio, take_turns

    task = split(name, 0)
    quick = {"steps": 20, "lr": 0.01, "progress": False, "method": "ensemble"}
    problem = bc.posterior_ensemble(lambda: network(task), (task.x, task.y), likelihood(task), **quick).problem
    n, params = problem.data.size, problem.members.params
    rows, axis, size = problem.batches(True, full=False)
    steps = steps_for(n, size)
    training = bc.make_step(problem.loss(n, still=False), bc.adam(bc.schedules.cosine(0.01, steps)))
    chain, rates = Sghmc(0.9, 1 / n), torch.full((problem.count,), 1e-3)
    energy = problem.loss(n, still=True)
    kinds: dict[str, Any] = {
        "training": (
            bc.parallel(training, problem.count, batch_dim=axis),
            training.tx,
            rows if isinstance(rows, tuple) else rows.batch(0, 0),
            int(1.45 * steps),
        ),
        "chains": (
            bc.parallel(lambda lr: bc.make_step(energy, chain(lr)), problem.count, each={"lr": rates}),
            chain,
            problem.data.take(None),
            2 * max(LEAST_STEPS, int(SHARE * steps * size / n)),
        ),
    }
    found = {}
    for kind, (chains, tx, batch, taken) in kinds.items():
        state = started(chains, tx, params, problem.members.buffers, 0)
        before, wall = spent(), time.perf_counter()
        fast = bc.capture(chains, params, state, batch)
        fast(params, state, batch)
        row: dict[str, Any] = {"capture_cpu_s": spent() - before, "capture_wall_s": time.perf_counter() - wall}
        if timed:
            places: dict[str, Any] = {"eager": (params, state), "captured": (params, state)}

            def turn(which: str, step: Any, places: Any = places, batch: Any = batch) -> None:
                places[which] = step(*places[which], batch)[:2]

            contestants = {
                "eager": lambda turn=turn, chains=chains: turn("eager", chains),
                "captured": lambda turn=turn, fast=fast: turn("captured", fast),
            }
            with torch.no_grad():
                times = take_turns(contestants, rounds=ROUNDS, seconds=0.1, clock=time.process_time)
            row |= {
                "eager_ms": 1e3 * min(times["eager"]),
                "captured_ms": 1e3 * min(times["captured"]),
                **ratio(times, "captured", "eager"),
                "steps": taken,
            }
        found[kind] = row
    return {"data": n, "batch": size, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=["sunspots", "concrete"])
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one, given.timed)))
        return
    from benchmarks.measure import environment

    record: dict[str, Any] = {"about": environment(), "tasks": {}}
    for name in given.tasks:
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "XDG_CACHE_HOME": cache}
            first, second = (
                json.loads(
                    subprocess.run(
                        [sys.executable, "-m", "benchmarks.leaderboard.captured", "--one", name, *more],
                        env=env,
                        check=True,
                        capture_output=True,
                        text=True,
                    ).stdout.splitlines()[-1]
                )
                for more in (["--timed"], [])
            )
        for kind in ("training", "chains"):
            row = first[kind]
            row["found_cpu_s"] = second[kind]["capture_cpu_s"]
            gained = (row["eager_ms"] - row["captured_ms"]) / 1e3
            row["pays_after"] = round(row["capture_cpu_s"] / gained) if gained > 0 else None
        record["tasks"][name] = first
        given.record.write_text(json.dumps(record, indent=1) + "\n")
        print(name, json.dumps(first), flush=True)


if __name__ == "__main__":
    main()
