r"""``python -m benchmarks.leaderboard.ablations``: the recipe with one thing changed, on the tasks that it was developed on.

Every variant is a cell (task, seed, variant) of a record, written as soon as it is done; a call goes on where the record stops.
A variant that differs from the recipe from one stage on takes the stages before it from the recipe's folder, so that it starts
from the same networks, bit for bit, and costs what is different. Written beside the record is a table of paired differences
from the recipe, for the pages.

Replica exchange among the levels is not a variant but a number: levels at temperatures ``T_1 < T_2``, whose chains lie at mean
losses ``L_1`` and ``L_2`` a datum, exchange draws with a probability of about

    exp((1 / T_1 - 1 / T_2) N (L_1 - L_2)),

which the cells of the variant with two levels hold.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import optree

RECORD = Path(__file__).parents[1] / "results" / "leaderboard_ablations.json"
STAGES = ("rate", "pilot", "stop", "prior", "modes", "ladder of pilots", "ladder of modes", "stack")


class Variant(NamedTuple):
    """What is changed.

    Attributes:
        since: the first stage that differs from the recipe's; earlier ones are the recipe's own.
        options: arguments of the call.
        changes: names within ``bayesopt_chain.ensemble`` and what they become.
    """

    since: str = "rate"
    options: Mapping[str, Any] = MappingProxyType({})
    changes: Mapping[str, Any] = MappingProxyType({})


def fan_in(params: Any) -> Any:
    """Squares of all parameters, those of weights times their fan-in: the penalty of a prior of variance 1 / fan-in."""
    return sum(p.square().sum() * (p[0].numel() if p.ndim > 1 else 1) for p in params.values())


def by_evidence(
    problem: Any, held: Any, ended: Any, stopped: Any, *, lr: float, steps: int, stages: Any
) -> dict[str, Any]:
    """The stage of the prior with precision and noise by the evidence of a Kronecker Laplace posterior around every pilot.

    The geometric means over members and layers are taken. As in the recipe the pilots train on with them for 0.15 of the steps;
    a mode depends on noise times precision alone, so that training at its own noise takes the precision times the noise.
    """
    from bayesopt_chain import fit_laplace
    from bayesopt_chain.ensemble.cost import FORWARD
    from bayesopt_chain.ensemble.pilot import descend
    from bayesopt_chain.ensemble.prior import SHARE
    from bayesopt_chain.ensemble.problem import last_of
    from bayesopt_chain.modules.functional import write_back

    logs, noises = [], []
    params, buffers = stopped.last()
    for m, rows in enumerate(problem.rows(True)):
        module = copy.deepcopy(problem.members.still.module)
        write_back(module, {k: x[m] for k, x in params.items()}, {k: x[m] for k, x in buffers.items()})
        fitted = fit_laplace(module, problem.likelihood, [problem.data.take(rows)], subset="all")
        logs += [math.log(float(x)) for x in optree.tree_leaves(fitted.prior_precision)]
        noises.append(-math.log(float(fitted.likelihood_scale)))
    precision, factor = math.exp(sum(logs) / len(logs)), math.exp(sum(noises) / len(noises))
    period = max(1, round(SHARE * steps))
    drawn, cost = descend(
        replace(problem, prior_precision=precision * factor),
        *ended.last(),
        lr=lr,
        period=period,
        steps=period,
        held_out=True,
        checkpoints=1,
        seed=20,
        path=stages.folder("prior", "0"),
    )
    params, buffers = last_of(drawn, ended.last()[1])
    return {
        "precision": precision * factor,
        "moved": True,
        "params": params,
        "buffers": buffers,
        "factor": factor,
        "tried": [(precision * factor, math.nan)],
        "passes": {"prior": cost + 1 + FORWARD},
    }


VARIANTS: dict[str, Variant] = {
    "recipe": Variant(),
    "no chains": Variant("stack", {"method": "ensemble", "prior_precision": "held out"}),
    "no chains, prior precision 1": Variant("prior", {"method": "ensemble"}),
    "prior precision 1": Variant("prior", {"prior_precision": 1.0}),
    "prior precision 25": Variant("rate", {"prior_precision": 25.0}),
    "prior and noise by the evidence": Variant("prior", {}, {"recipe.strengthen": by_evidence}),
    "prior scaled by fan-in": Variant(
        "rate", {}, {"problem.Problem.penalty": staticmethod(fan_in), "prior.FIRST": 5.0}
    ),
    "first step of the prior 5": Variant("prior", {}, {"prior.FIRST": 5.0}),
    "no held-out stop": Variant("stop", {}, {"stop.SURE": math.inf}),
    "modes by a restart at the full rate": Variant("modes", {}, {"modes.RATE": 1.0}),
    "levels .3 and 1": Variant("ladder of pilots", {"temperatures": (0.3, 1.0)}),
    "chains four times as long": Variant("ladder of pilots", {}, {"ladder.SHARE": 0.4}),
    "chains on minibatches": Variant("ladder of pilots", {}, {"ladder.FEW": 0}),
    "levels count equally": Variant("stack", {}, {"stack.ITERATIONS": 0}),
    "no pseudo-data in stacking": Variant("stack", {}, {"stack.PSEUDO_DATA": 0.0}),
    "no scale of logits": Variant("stack", {}, {"scale.SURE": math.inf}),
}


def group(name: str, seed: int, files: dict[str, str], **options: Any) -> None:
    """Variants of one split, the recipe first, one after the other in one process; ``options`` are for all of them."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.leaderboard.tasks import split

    task = split(name, seed)
    with TemporaryDirectory() as folder:
        places = {variant: Path(folder) / variant.replace(" ", "_") for variant in files}
        for variant, file in files.items():
            start, passed = time.process_time(), time.perf_counter()
            if variant != "recipe":
                _shared(places["recipe"], places[variant], VARIANTS[variant].since)
            found = run(task, seed, VARIANTS[variant], places[variant], **options)
            found |= {"cpu seconds": time.process_time() - start, "seconds": time.perf_counter() - passed}
            temporary = Path(f"{file}.{os.getpid()}")
            temporary.write_text(json.dumps(found, indent=1))
            os.replace(temporary, file)


def _shared(recipe: Path, mine: Path, since: str) -> None:
    """Copy the recipe's stages before one of them."""
    mine.mkdir(parents=True)
    for stage in STAGES[: STAGES.index(since)]:
        shutil.copy(recipe / f"{stage}.safetensors", mine / f"{stage}.safetensors")


def run(task: Any, seed: int, variant: Variant, place: Path, **options: Any) -> dict[str, Any]:
    """Scores and passes of one variant, with what its levels did."""
    import bayesopt_chain as bc
    from benchmarks.leaderboard.contestants import likelihood, network
    from benchmarks.leaderboard.scores import scored

    with ExitStack() as changed:
        for key, value in variant.changes.items():
            changed.enter_context(mock.patch(f"bayesopt_chain.ensemble.{key}", value))
        fitted = bc.posterior_ensemble(
            lambda: network(task),
            (task.x, task.y),
            likelihood(task),
            seed=seed,
            progress=False,
            path=place,
            **{**options, **variant.options},
        )
        return {
            **scored(task, fitted.predict),
            "passes": sum(fitted.report.passes.values()),
            "data": len(task.x),
            "levels": fitted.report.levels,
            "prior_precision": fitted.report.chosen["prior_precision"],
            "said": str(fitted.report),
        }


def swap(levels: list[dict[str, float]], data: int) -> float:
    """The logarithm of the probability that the two hottest levels exchange draws, at their mean losses.

    Example:
        >>> from benchmarks.leaderboard.ablations import swap
        >>> cold, hot = {"temperature": 0.5, "excess": 0.1}, {"temperature": 1.0, "excess": 0.3}
        >>> round(swap([cold, hot], 100), 6)                       # (2 - 1) * 100 * (0.1 - 0.3)
        -20.0
    """
    (a, b) = levels[-2:]
    return (1 / a["temperature"] - 1 / b["temperature"]) * data * (a["excess"] - b["excess"])


def markdown(cells: dict[str, dict[str, Any]]) -> str:
    """Mean differences from the recipe with their standard errors over tasks and seeds, each task's, and the cost."""
    keys = sorted({tuple(key.split("/")[:2]) for key in cells})
    tasks = list(dict.fromkeys(name for name, _ in keys))
    lines = ["| variant | cost | " + " | ".join(tasks) + " | all |", "| --- | --- |" + " --- |" * (len(tasks) + 1)]
    for variant in VARIANTS:
        mine = {key: cells.get("/".join((*key, variant))) for key in keys}
        both = {key: (x, cells["/".join((*key, "recipe"))]) for key, x in mine.items() if x is not None}
        if not both:
            continue
        if variant == "recipe":
            row = [_mean([a["nll"] for (name, _), (a, _) in both.items() if name == task], "") for task in tasks]
            lines.append(f"| recipe | 1 | {' | '.join(row)} | |")
            continue
        differences = {key: a["nll"] - b["nll"] for key, (a, b) in both.items()}
        row = [_mean([d for (name, _), d in differences.items() if name == task], "+") for task in tasks]
        cost = sum(a["passes"] / b["passes"] for a, b in both.values()) / len(both)
        lines.append(f"| {variant} | {cost:.2f} | {' | '.join(row)} | {_mean(list(differences.values()), '+')} |")
    seeds = sorted({seed for _, seed in keys})
    logs = [
        swap(x["levels"], x["data"])
        for key, x in cells.items()
        if key.endswith("/levels .3 and 1") and len(x["levels"]) == 3
    ]
    lines += ["", f"Seeds {', '.join(seeds)}; means, with standard errors where there are several splits."]
    if logs:
        lines[-1] += (
            f" The two levels would exchange draws with a probability of e^{max(logs):.0f} at most, over the {len(logs)} "
            "splits where both were kept."
        )
    return "\n".join(lines) + "\n"


def _mean(values: list[float], sign: str) -> str:
    if not values:
        return ""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:{sign}.3f}"
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return f"{mean:{sign}.3f} +- {deviation / math.sqrt(len(values)):.3f}"


def main(serve: Callable[..., Any] = ProcessPoolExecutor) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=["sunspots", "caravan", "concrete", "meats"])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--table", action="store_true", help="write record and table of the cells that are there")
    given = parser.parse_args()
    folder = given.record.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    groups = {}
    for seed in given.seeds:
        for name in given.tasks:
            files = {v: folder / f"{name}-{seed}-{v.replace(' ', '_')}.json" for v in VARIANTS if v in given.variants}
            left = {v: str(f) for v, f in files.items() if not f.exists()}
            if left:  # the others start from the recipe's stages
                groups[name, seed] = {"recipe": str(folder / f"{name}-{seed}-recipe.json"), **left}
    if not given.table:
        spawn = multiprocessing.get_context("spawn")
        with serve(given.workers, mp_context=spawn) as pool:
            running = {pool.submit(group, *key, files): key for key, files in groups.items()}
            for future in as_completed(running):
                future.result()
                print(*running[future], "done", flush=True)
    cells = {
        f"{name}/{seed}/{variant}": json.loads(file.read_text())
        for name in given.tasks
        for seed in given.seeds
        for variant in VARIANTS
        if (file := folder / f"{name}-{seed}-{variant.replace(' ', '_')}.json").exists()
    }
    given.record.write_text(json.dumps(cells, indent=1) + "\n")
    given.record.with_suffix(".md").write_text(markdown(cells))
    print(markdown(cells))


if __name__ == "__main__":
    main()
