"""What every experiment shares: scales, seeds, the record that is kept, where data come from, and when a claim is decided.

Long ones are made in cells, one for each method and seed: a finished cell is kept in a file and not made again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bayesopt_chain as bc
from benchmarks import measure

RESULTS = Path(__file__).parent / "results"
SCALES = ("smoke", "small", "full")
Table = dict[str, dict[str, float]]  # method -> measure -> value
RULE = (
    "Confirmed or contradicted: the mean of the paired differences is further from zero than they are from one another. Where "
    "there is no difference this happens by chance in 30 of 100 cases with two seeds, in 8 with three, in 2 with four"
)


@dataclass(frozen=True)
class Experiment:
    """An experiment: ``run(settings, seed)`` returns a table of methods and measures.

    ``settings`` has the arguments of every scale; ``paper`` is what the paper reports, in one sentence; ``says`` makes one
    honest sentence on the difference from the averaged table. ``shown`` are the measures on the page, all of them by default.
    """

    name: str
    title: str
    paper: str
    settings: Mapping[str, Mapping[str, Any]]
    seeds: Mapping[str, int]
    run: Callable[[Mapping[str, Any], int], Table]
    says: Callable[[Mapping[str, Mapping[str, Mapping[str, float]]]], str]
    shown: tuple[str, ...] = ()


def record(experiment: Experiment, scale: str, *, seeds: int | None = None, first_seed: int = 0) -> dict[str, Any]:
    """Run an experiment over its seeds; returns what is kept of it.

    Its seconds are those of its cells, several calls together, or of this call where it has none.
    """
    if scale not in SCALES:
        raise ValueError(f"scale is one of {SCALES}, got {scale!r}")
    settings = experiment.settings[scale]
    tables, start = [], time.time()
    for seed in range(first_seed, first_seed + (seeds or experiment.seeds[scale])):
        torch.manual_seed(seed)
        tables.append(experiment.run(settings, seed))
    run = list(range(first_seed, first_seed + len(tables)))
    seconds = spent(experiment.name, settings, run) or time.time() - start
    return {
        "experiment": experiment.name,
        "scale": scale,
        "settings": dict(settings),
        "seeds": run,
        "seconds": round(seconds, 1),
        "tables": tables,
    }


def keep(result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Write a record beside the code."""
    path = folder / f"{result['experiment']}-{result['scale']}.json"
    measure.keep(path, dict(result))
    return path


def averaged(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean, lowest and highest over seeds of every measure of every method."""

    def over(method: str, name: str) -> dict[str, float]:
        values = [table[method][name] for table in result["tables"]]
        return {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}

    return {method: {name: over(method, name) for name in row} for method, row in result["tables"][0].items()}


def stepped(loss: Callable[[Any, Any], Tensor], tx: Any, params: Any, batch: Any, steps: int, state: Any = None) -> Any:
    """Parameters and state after so many steps on one batch, or a list of them, from a state or the first one."""
    state = tx.init(params) if state is None else state
    return bc.sample(bc.make_step(loss, tx), params, state, batch, steps=steps, burn_in=steps - 1).last


def laplace_at(mode: Any, forward: Callable[[Any, Any], Tensor], likelihood: Any, data: Any) -> bc.Gaussian:
    """The Gaussian at a mode with the dense GGN, under the prior N(0, 1) of every weight."""
    tx: Any = bc.laplace()
    increment = bc.curvature.ggn(forward, likelihood, structure="dense")(mode, data)
    _, state = tx.update(mode, tx.init(mode), params=mode, inplace=False, curvature=increment)
    return tx.posterior(state, mode, prior_precision=1.0)


def data_folder() -> Path:
    """Where the data lie: the folder that ``BAYESOPT_CHAIN_DATA`` names.

    Raises:
        FileNotFoundError: the variable is not set, or names no folder.
    """
    folder = os.environ.get("BAYESOPT_CHAIN_DATA", "")
    if not folder or not Path(folder).is_dir():
        raise FileNotFoundError(
            f"BAYESOPT_CHAIN_DATA is {folder!r}: set it to the folder with the data, laid out as docs/references.md says"
        )
    return Path(folder)


def verified(path: Path, sha256: str) -> Path:
    """The path, after comparing the file with its checksum."""
    got = hashlib.sha256(path.read_bytes()).hexdigest()
    if got != sha256:
        raise ValueError(
            f"{path} has the SHA-256 {got}, not {sha256}: it is not the file the experiments were made with"
        )
    return path


def folder_of(name: str, settings: Mapping[str, Any]) -> Path:
    """The folder of a run of these settings, in the one that ``BAYESOPT_CHAIN_RUNS`` names (default ``runs``).

    Other settings have another folder; but other temperatures make further cells beside those that are there.
    """
    same = {name: value for name, value in settings.items() if name != "temperatures"}
    key = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:10]
    return Path(os.environ.get("BAYESOPT_CHAIN_RUNS") or "runs") / f"{name}-{key}"


def slug(name: str) -> str:
    """A method's name as the name of a file."""
    return re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-")


def kept(folder: Path, name: str, make: Callable[[Path], dict[str, float]]) -> dict[str, float]:
    """The measures of a cell: read from its file in ``folder``, or made and then kept there, with the process time they took.

    ``make`` is given a folder for its chains, in which an interrupted cell goes on.
    """
    path = folder / f"{slug(name)}.json"
    if not path.exists():
        start = time.process_time()
        cell = {"measures": make(folder / slug(name)), "seconds": round(time.process_time() - start, 1)}
        measure.keep(path, cell)
    return json.loads(path.read_text())["measures"]


def spent(name: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> float:
    """Process time of the finished cells of these seeds, in seconds."""
    cells = [path for seed in seeds for path in (folder_of(name, settings) / f"seed-{seed}").glob("*.json")]
    return sum(json.loads(path.read_text())["seconds"] for path in cells)


def finished(step: Any, params: Any, state: Any, batches: Any, steps: int, path: Path, **how: Any) -> bc.Draws:
    """A run in its folder, where it goes on after an interruption; by default its last parameters alone.

    Raises:
        RuntimeError: the run was interrupted, or diverged.
    """
    run = bc.sample(step, params, state, batches, steps=steps, path=path, **{"burn_in": steps - 1, **how})
    if not run.complete:
        raise RuntimeError(f"{path} is not finished: {run.why}. The same command goes on from its last checkpoint")
    return run


def log_mean(log_p: Tensor) -> Tensor:
    """The logarithm of the mean over axis 0."""
    return log_p.logsumexp(0) - math.log(len(log_p))


def takeaway(claim: str, difference: Mapping[str, float]) -> str:
    """The claim with what the seeds say of it; it says that ``difference`` is below zero.

    ``difference`` holds the mean, the lowest and the highest value over the seeds, each seed a paired comparison. Confirmed or
    contradicted: the mean is further from zero than the values are from one another, so that all of them have its sign. One
    seed decides nothing, and two decide little: :data:`RULE` says how often independent normal values around zero do it.
    """
    mean, low, high = (difference[name] for name in ("mean", "low", "high"))
    decided = low < high and abs(mean) > high - low
    verdict = "undecided" if not decided else "confirmed" if mean < 0 else "contradicted"
    return f"{claim}: {verdict} ({mean:+.3g}, {low:+.3g} to {high:+.3g})"


def minus(difference: Mapping[str, float]) -> dict[str, float]:
    """The difference the other way round."""
    return {"mean": -difference["mean"], "low": -difference["high"], "high": -difference["low"]}
