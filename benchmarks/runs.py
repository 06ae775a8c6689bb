"""What ``bc.sample`` costs: memory over a long run to disk, and time over the bare loop for a step of a small CNN.

    python -m benchmarks.runs

Times are medians of paired blocks, in turn: the bare loop, the bare loop again (A/A, which says what the machine's noise is),
``bc.sample`` in memory, ``bc.sample`` to disk, at one draw in 10 steps. Results go to ``benchmarks/results/runs.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import bayesopt_chain as bc

RESULTS = Path(__file__).parent / "results" / "runs.json"


def record(name: str, figures: Any, results: Path = RESULTS) -> None:
    """Add figures to the results."""
    known = json.loads(results.read_text()) if results.exists() else {}
    machine = (
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} thread"
    )
    known[name] = {"machine": machine, **figures}
    results.parent.mkdir(exist_ok=True)
    results.write_text(json.dumps(known, indent=1) + "\n")


def cnn() -> tuple[Any, Any, Any, Any]:
    """A step of a CNN with two convolutions on 32 images of 16 x 16, its parameters, state and batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(32 * 25, 10),
    )  # fmt: skip
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(params: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    tx = bc.sghmc(1e-3, temperature=1e-4)
    return (
        bc.make_step(loss, tx, inplace=True),
        params,
        tx.init(params),
        (torch.randn(32, 1, 16, 16), torch.arange(32) % 10),
    )


def overhead(blocks: int, steps: int) -> dict[str, Any]:
    """Time of ``bc.sample`` over the bare loop, by pairs."""
    step, params, state, batch = cnn()

    def bare() -> None:
        p, s = params, state
        for _ in range(steps):
            p, s, _ = step(p, s, batch)

    def memory() -> None:
        bc.sample(step, params, state, batch, steps=steps, thinning=10)

    def disk() -> None:
        with tempfile.TemporaryDirectory() as folder:
            bc.sample(step, params, state, batch, steps=steps, thinning=10, path=folder)

    def timed(fn: Any) -> float:
        begin = time.perf_counter()
        fn()
        return time.perf_counter() - begin

    bare()
    rows: dict[str, list[float]] = {"bare again (A/A)": [], "memory": [], "disk": []}
    for _ in range(blocks):
        base = timed(bare)
        for name, fn in zip(rows, (bare, memory, disk)):
            again = timed(fn)
            rows[name].append(again / base - 1)
            base = timed(bare)
    return {
        "blocks": blocks,
        "steps": steps,
        **{name: {"median": statistics.median(x), "quartiles": statistics.quantiles(x)} for name, x in rows.items()},
    }


def resident() -> float:
    """Resident memory of this process that no file backs, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc/self/status; this needs Linux")


def growth(steps: int, thinning: int, warm_up: float = 0.1) -> dict[str, Any]:
    """Memory of a run to disk, from the end of the warm-up to its last step."""
    step, params, state, batch = cnn()
    seen: dict[int, float] = {}

    def watch(it: Any) -> None:
        if it.step % max(1, steps // 100) == 0:
            seen[it.step] = resident()

    with tempfile.TemporaryDirectory() as folder:
        bc.sample(
            step,
            params,
            state,
            batch,
            steps=steps,
            thinning=thinning,
            path=folder,
            checkpoint_seconds=0.5,
            callbacks=[watch],
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--long", type=int, default=20_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, figures in (
        ("overhead", overhead(arguments.blocks, arguments.steps)),
        ("memory", growth(arguments.long, 20)),
    ):
        record(name, figures)
        print(name, json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main()
