"""``python -m benchmarks.rates``: a step of ``bc.optim`` with torch's cosine scheduler over one at a constant rate.

The two take turns, in processor time on one thread, and the scheduler's own step counts. ``torch.optim.SGD`` with the same
scheduler stands beside. The record is ``results/rates.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.contestants import adaptive
from benchmarks.measure import RESULTS, command, keep, ratio, take_turns

SIZES = {"3 x 16x16": [(16, 16)] * 3, "30 x 64x64": [(64, 64)] * 30, "2 x 1e6": [(10**6,)] * 2}
HOT: dict[str, Any] = {"lr": 1e-3, "temperature": 1e-4}
CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "bc.optim.SGHMC": lambda params: bc.optim.SGHMC(params, **HOT),
    "bc.optim.Adam": lambda params: bc.optim.Adam(params, **HOT),
    "torch.optim.SGD": lambda params: torch.optim.SGD(params, 1e-3, 0.9),
}


def main() -> None:
    """Measure and write the record."""
    command()
    rows: list[dict[str, Any]] = []
    for name, make in CLASSES.items():
        for size, shapes in SIZES.items():
            runs = {"constant": adaptive(make, shapes), "scheduler": adaptive(make, shapes, scheduled=True)}
            times = take_turns(runs, rounds=101, clock=time.process_time)
            rows.append({"class": name, "leaves": size, **ratio(times, "scheduler", "constant")})
            rows[-1]["constant_us"] = 1e6 * min(times["constant"])
            print(rows[-1])
    keep(RESULTS / "rates.json", {"rows": rows})


if __name__ == "__main__":
    main()
