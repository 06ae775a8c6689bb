"""What it costs to make the last draw again in every step instead of keeping it: ``keep_draws=False`` of ``bc.optim.SGHMC``.

    python -m benchmarks.redrawn

Both optimizers step in turn on the same gradients, ten leaves of one size, one thread. Times are of the process; a ratio is the
median over turns of (made again / kept), beside the ratios' quartiles. Numbers of a parameter are counted in the states.
Results go to ``benchmarks/results/redrawn.json``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.measure import keep

RESULTS = Path(__file__).parent / "results" / "redrawn.json"
LEAVES = 10


def optimizer(parameters: int, keep_draws: bool) -> torch.optim.Optimizer:
    """On leaves with gradients."""
    leaves = [torch.nn.Parameter(torch.randn(parameters // LEAVES)) for _ in range(LEAVES)]
    for leaf in leaves:
        leaf.grad = torch.randn_like(leaf)
    options: dict[str, Any] = {"momentum": 0.9, "temperature": 1e-3, "heat_guard": None}
    return bc.optim.SGHMC(leaves, lr=1e-3, keep_draws=keep_draws, **options)


def numbers(made: torch.optim.Optimizer) -> float:
    """How many numbers of a parameter's shape the state holds."""
    held = [x for state in made.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.ndim]
    return sum(x.numel() for x in held) / sum(p.numel() for group in made.param_groups for p in group["params"])


def seconds(made: torch.optim.Optimizer, steps: int) -> float:
    """Of the process, for one step."""
    start = time.process_time()
    for _ in range(steps):
        made.step()
    return (time.process_time() - start) / steps


def compared(parameters: int, turns: int) -> dict[str, Any]:
    """One size."""
    kept, again = optimizer(parameters, True), optimizer(parameters, False)
    steps = max(2, 2_000_000 // parameters)
    for made in (kept, again):
        seconds(made, steps)
    pairs = [(seconds(kept, steps), seconds(again, steps)) for _ in range(turns)]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    return {
        "ms kept": 1e3 * statistics.median(a for a, _ in pairs),
        "ms made again": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": middle,
        "quartiles": [low, high],
        "numbers kept": numbers(kept),
        "numbers made again": numbers(again),
    }


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {str(parameters): compared(parameters, given.turns) for parameters in (10**4, 10**5, 10**6, 10**7)}
    keep(RESULTS, {"turns": given.turns, "rows": rows})
    for parameters, row in rows.items():
        low, high = row["quartiles"]
        print(
            f"{int(parameters):>10,}  {row['ratio']:.2f} ({low:.2f} to {high:.2f})  {row['numbers made again']:.1f} numbers"
        )


if __name__ == "__main__":
    main()
