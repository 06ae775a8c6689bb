"""When is it right to say that a constant predicts better than the networks of the one call? By outcomes, on simulated data.

    z = mean (l_ensemble - l_constant) / its standard error        on the folds that members left out
    d = mean (l_ensemble - l_constant)                             on 4,000 fresh data

For several bounds it counts the runs with z below it, those of them that were wrong (d >= 0), and of all runs that are truly
worse (d < -0.02) those that were caught. Signals are 0, .25, .5 and 1 times ``sin x1 + x2 x3 / 2`` in eight inputs, with noise
of variance 1 or as log odds.

python -m benchmarks.constants            # ten minutes of processor time; a run in the record is not repeated
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import held

RECORD = Path(__file__).parent / "results" / "constants.json"
SIGNALS = {"null": 0.0, "weak": 0.25, "some": 0.5, "clear": 1.0}
FIRST, LATER = ("null", "weak", "some", "null class", "weak class"), ("some", "clear", "clear class")
WANTED = [(kind, n, seed) for seed in range(6) for kind in FIRST for n in (100, 400)]
WANTED += [(kind, n, seed) for seed in range(10, 14) for kind in LATER for n in (60, 100, 400)]
BOUNDS = (-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 1.0, 2.0)


def made(kind: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    x, noise = torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)
    f = SIGNALS[kind.split()[0]] * (x[:, :1].sin() + 0.5 * x[:, 1:2] * x[:, 2:3])
    if "class" in kind:
        return x, (torch.rand(n, generator=generator) < torch.sigmoid(2 * f[:, 0] - 0.8)).long()
    return x, f + noise


def run(kind: str, n: int, seed: int) -> dict[str, float]:
    """z and d of one run."""
    generator = torch.Generator().manual_seed(100 * seed + n)
    (x, y), (new, truth), classes = made(kind, n, generator), made(kind, 4000, generator), "class" in kind
    seen, whole = list[Tensor](), held.z_of

    def z_of(difference: Tensor) -> float:
        seen.append(difference)
        return whole(difference)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 1 + classes))

    likelihood = bc.likelihoods.categorical() if classes else bc.likelihoods.gaussian()
    held.z_of = z_of
    try:
        ensemble = bc.posterior_ensemble(network, (x, y), likelihood, steps=600, lr=0.01, seed=seed, progress=False)
    except bc.ensemble.EnsembleError as err:
        ensemble = err.ensemble
    finally:
        held.z_of = whole
    share = y.double().mean()
    constant: Any = torch.distributions.Normal(y.double().mean(), y.double().std())
    of_constant = torch.where(truth == 1, share.log(), (1 - share).log()) if classes else constant.log_prob(truth)[:, 0]
    fresh = ensemble.predict(new).log_prob(truth).flatten() - of_constant
    return {
        "z": whole(seen[-1]),
        "held": float(seen[-1].mean()),
        "test": float(fresh.mean()),
    }  # the last is the constant's


def counted(runs: list[dict[str, float]]) -> dict[str, dict[str, int]]:
    """Of each bound how many runs are below it, how many of them wrongly, and how many that are worse are caught."""

    def count(test: Callable[[dict[str, float]], bool]) -> int:
        return sum(map(test, runs))

    return {
        f"{b:g}": {
            "below": count(lambda r, b=b: r["z"] < b),
            "wrong": count(lambda r, b=b: r["z"] < b and r["test"] >= 0),
            "caught": count(lambda r, b=b: r["z"] < b and r["test"] < -0.02),
            "worse": count(lambda r: r["test"] < -0.02),
        }
        for b in BOUNDS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=RECORD)
    record = parser.parse_args().record
    torch.set_num_threads(1)
    runs = json.loads(record.read_text())["runs"] if record.exists() else {}
    for kind, n, seed in WANTED:
        if (key := f"{kind} {n} {seed}") not in runs:
            runs[key] = run(kind, n, seed)
        record.write_text(json.dumps({"bounds": counted(list(runs.values())), "runs": runs}, indent=1) + "\n")
    print(json.dumps(counted(list(runs.values())), indent=1))


if __name__ == "__main__":
    main()
