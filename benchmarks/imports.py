"""``python -m benchmarks.imports``: what the package adds to a process that has imported torch and torchopt.

Each row is the time of one statement, in a new process for each repetition, behind ``import torch, torchopt``:

    warm    Python's compiled files lie on disk, as at every import but the first
    cold    those of the package do not (those of torch and torchopt do), as at the first import behind an installation

``import bayesopt_chain`` loads nothing else; names are loaded when they are asked for, so that the second statement says what a
training loop pays before its first step. Quartiles of processor and wall time go to
``benchmarks/results/imports.json``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "imports.json"
STATEMENTS = {
    "import bayesopt_chain": "import bayesopt_chain",
    "and the names of a loop": "import bayesopt_chain as bc; bc.optim.SGHMC; bc.sghmc; bc.make_step; bc.sample",
}
PROBE = """
import time, torch, torchopt
wall, processor = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - wall, time.process_time() - processor)
"""


def seconds(statement: str, compiled: Path) -> tuple[float, float]:
    """Wall and processor time of a statement in a new process, whose compiled files lie in ``compiled``."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(compiled), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", PROBE.format(statement)]
    said = subprocess.run(run, check=True, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1])
    wall, processor = map(float, said.stdout.split())
    return wall, processor


def forget(compiled: Path) -> None:
    """Remove the compiled files of the package."""
    for folder in list(compiled.rglob("bayesopt_chain")):
        shutil.rmtree(folder, ignore_errors=True)


def measured(repetitions: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Quartiles of each statement, warm and cold, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder)
        for statement in STATEMENTS.values():
            seconds(statement, compiled)  # compiles torch and torchopt
        found: dict[str, dict[str, list[tuple[float, float]]]] = {name: {"warm": [], "cold": []} for name in STATEMENTS}
        for _ in range(repetitions):
            for name, statement in STATEMENTS.items():
                forget(compiled)
                found[name]["cold"].append(seconds(statement, compiled))
                found[name]["warm"].append(seconds(statement, compiled))
    return {
        name: {
            how: {clock: statistics.quantiles(times) for clock, times in zip(("wall", "processor"), zip(*pairs))}
            for how, pairs in rows.items()
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    rows = measured(arguments.repetitions)
    from benchmarks.measure import keep

    keep(RESULTS, {"repetitions": arguments.repetitions, "seconds": rows})
    for name, row in rows.items():
        for how, clocks in row.items():
            print(f"{name:26}{how:6}" + "".join(f"{clock:>11} {times[1]:.3f} s" for clock, times in clocks.items()))


if __name__ == "__main__":
    main()
