"""``python -m benchmarks.experiments NAME --scale smoke|small|full``: run an experiment and keep its record."""

from __future__ import annotations

import argparse
import importlib
import json

from benchmarks.experiments.common import SCALES, Experiment, averaged, keep, record

NAMES = ("why_bayes", "double_well", "pima", "mnist", "imdb", "lora", "llama")


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return importlib.import_module(f"benchmarks.experiments.{name}").EXPERIMENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--seeds", type=int, default=None, help="number of seeds (default: the scale's)")
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    result = record(experiment(arguments.name), arguments.scale, seeds=arguments.seeds, first_seed=arguments.first_seed)
    print(json.dumps(averaged(result), indent=1))
    print(f"{result['seconds']} s; kept in {keep(result)}")


if __name__ == "__main__":
    main()
