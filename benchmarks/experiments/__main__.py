"""``python -m benchmarks.experiments NAME --scale smoke|small|full``: run an experiment and keep its record.

``NAME`` is one of why_bayes, double_well, pima, mnist, imdb, lora and llama; ``--seeds`` is the number of seeds, by default
that of the scale.
"""

from __future__ import annotations

import importlib
import json

from benchmarks.experiments.common import Experiment, averaged, keep, record
from benchmarks.measure import command

NAMES = ("why_bayes", "double_well", "pima", "mnist", "imdb", "lora", "llama")


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"NAME is one of {NAMES}, got {name!r}")
    return importlib.import_module(f"benchmarks.experiments.{name}").EXPERIMENT


if __name__ == "__main__":
    given = command(name=str, scale="small", seeds=0, first_seed=0)
    result = record(experiment(given.name), given.scale, seeds=given.seeds, first_seed=given.first_seed)
    print(json.dumps(averaged(result), indent=1))
    print(f"{result['seconds']} s; kept in {keep(result)}")
