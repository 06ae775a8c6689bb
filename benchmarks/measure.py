"""Paired timing: the contestants take turns, so that a busy machine is busy for all, and ratios are taken turn by turn."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


def take_turns(
    contestants: dict[str, Callable],
    rounds: int = 15,
    seconds: float = 0.02,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds for one call of each contestant, ``rounds`` times, each time over calls that last ``seconds`` or more.

    A turn begins with a call that is not timed, in which a contestant finds its data again. ``clock=time.process_time``
    counts this process's own time, for work on one thread of a machine that others use too.
    """
    calls = {}
    for name, run in contestants.items():
        run()
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(seconds / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contestants.items():
                run()
                start = clock()
                for _ in range(calls[name]):
                    run()
                times[name].append((clock() - start) / calls[name])
    finally:
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Median of the paired ratios, their quartiles, and the ratio of the shortest times."""
    pairs = [a / b for a, b in zip(times[ours], times[theirs])]
    low, median, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {"ratio": median, "low": low, "high": high, "of_shortest": min(times[ours]) / min(times[theirs])}


def environment() -> dict:
    """Machine, versions and date, kept with every result."""
    packages = ("torch", "torchopt", "optree", "numpy", "posteriors", "blackjax", "jax", "triton", "laplace-torch")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def keep(path: Path, record: dict) -> None:
    """Write a record behind the command that made it, with commit, machine, versions and date of now."""
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    command = " ".join(["python -m", module.removesuffix(".__main__"), *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    head = {"command": command, "environment": environment()}
    written.write_text(json.dumps(head | record | head, indent=1) + "\n")
    written.replace(path)


def _commit() -> str | None:
    """The commit of this working copy, with a plus sign where its code differs; ``None`` outside of git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ":/*.py"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
