"""Runs that are made in cells, one for each method and seed: a finished cell is kept in a file and not made again.

Also how a sentence on a difference is decided from its values over seeds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bayesopt_chain as bc
from benchmarks.measure import keep

RULE = (
    "Confirmed or contradicted: the mean of the paired differences is further from zero than they are from one another. Where "
    "there is no difference this happens by chance in 30 of 100 cases with two seeds, in 8 with three, in 2 with four"
)


def folder_of(name: str, settings: Mapping[str, Any]) -> Path:
    """The folder of a run of these settings, in the one that ``BAYESOPT_CHAIN_RUNS`` names (default ``runs``).

    It is made if absent. Other settings have another folder.
    """
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:10]
    folder = Path(os.environ.get("BAYESOPT_CHAIN_RUNS") or "runs") / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(dict(settings), indent=1) + "\n")
    return folder


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
        keep(path, cell)
    return json.loads(path.read_text())["measures"]


def spent(name: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> float:
    """Process time of the finished cells of these seeds, in seconds."""
    cells = [path for seed in seeds for path in (folder_of(name, settings) / f"seed-{seed}").glob("*.json")]
    return sum(json.loads(path.read_text())["seconds"] for path in cells)


def last(run: bc.Draws) -> Any:
    """The last draw of a finished run.

    Raises:
        RuntimeError: the run was interrupted, or diverged.
    """
    if not run.complete:
        raise RuntimeError(f"the run is not finished: {run.why}. The same command goes on from its last checkpoint")
    return run[-1]


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
