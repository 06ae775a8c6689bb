"""What every command here stands on: its options, paired timing, cells that are worked out once, records, a table.

Contestants take turns, so that a busy machine is busy for all, and ratios are taken turn by turn. A command that is stopped
goes on where it stopped: cells that its record holds are not worked out again.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def command(**options: Any) -> argparse.Namespace:
    """The options of a command, which runs on one thread from here on; its module's docstring is what ``--help`` says.

    Args:
        options: by name their defaults, whose type is that of what is given; ``False`` for a switch, a list for several values,
            a type in place of a default for an argument that has to be given.
    """
    parser = argparse.ArgumentParser(
        prog=_name(),
        description=sys.modules["__main__"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, type):
            parser.add_argument(name, type=default)
        elif default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="*", type=type(default[0]), default=default)
        else:
            parser.add_argument(flag, type=type(default), default=default)
    torch.set_num_threads(1)
    return parser.parse_args()


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


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stepping(step: Callable[..., Any], params: Any, state: Any, batch: Any) -> Callable[[], None]:
    """A call that makes the next step on a batch."""
    now = [params, state]

    def run() -> None:
        now[:] = step(*now, batch)[:2]

    return run


def carried(program: Callable[[Any], tuple[Any, Any]], first: Any) -> Callable[[], None]:
    """A call that hands a program what it returned first the last time, and ``first`` at first."""
    now = [first]

    def run() -> None:
        now[0], _ = program(now[0])

    return run


def from_start(
    step: Callable[..., Any], params: Any, state: Any, batch: Callable[[], Any], steps: int
) -> Callable[[], None]:
    """A call that makes ``steps`` steps from the same start, each on the batch that ``batch()`` gives."""

    def run() -> None:
        now = params, state
        for _ in range(steps):
            *now, _ = step(*now, batch())

    return run


def one_by_one(*calls: Callable[[], Any]) -> Callable[[], None]:
    """A call that makes these calls."""

    def run() -> None:
        for call in calls:
            call()

    return run


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles."""
    return {"median": statistics.median(values), "quartiles": statistics.quantiles(values)}


def ratio(times: dict[str, list[float]], ours: str, theirs: str) -> dict[str, float]:
    """Median of the paired ratios, their quartiles, and the ratio of the shortest times."""
    pairs = [a / b for a, b in zip(times[ours], times[theirs])]
    low, median, high = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {"ratio": median, "low": low, "high": high, "of_shortest": min(times[ours]) / min(times[theirs])}


def environment() -> dict:
    """Machine, versions and date, kept with every result."""
    packages = ("torch", "torchopt", "optree", "numpy", "posteriors", "blackjax", "jax", "triton", "laplace-torch")
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {package: installed.get(package) for package in packages},
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.system(),
    }


def known(path: Path) -> dict[str, Any]:
    """The record in a file, empty where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep(path: Path, record: dict) -> None:
    """Write a record behind the command that made it, with commit, machine, versions and date of now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".part")
    head = {"command": " ".join([_name(), *sys.argv[1:]]), "environment": environment()}
    written.write_text(json.dumps(head | record | head, indent=1) + "\n")
    written.replace(path)


def fill(
    path: Path,
    cells: Iterable[tuple[Sequence[str], Callable[[], Any]]],
    more: Callable[[dict[str, Any]], dict[str, Any]] = lambda record: {},
    **settings: Any,
) -> dict[str, Any]:
    """Work out the cells that a record lacks. It is written after each, so that a command that is stopped goes on there.

    Args:
        path: of the record.
        cells: keys that lead through the record to a cell, and what works it out.
        more: what stands beside the cells, made of the record: tables and means.
        settings: what all cells of the record have in common, which stands beside them too.

    Returns:
        The record, with other cells that it has.

    Raises:
        SystemExit: the cells that the record has are of other settings.
    """
    record = known(path)
    others = {name: record[name] for name, value in settings.items() if record.get(name, value) != value}
    if others:
        raise SystemExit(
            f"{path} has cells of {others}, not {settings}: write to another file by --out, or take it away"
        )
    for (*outer, name), work_out in cells:
        at = record
        for key in outer:
            at = at.setdefault(key, {})
        if name not in at:
            at[name] = work_out()
            print(*outer, name, at[name], flush=True)
            record.update(settings | more(record))
            keep(path, record)
    return record


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table for a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _name() -> str:
    """How the module that runs is started again, without the paths of this machine; ``python -c ...`` of lines that call it."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return f"python -m {main.__spec__.name.removesuffix('.__main__')}"
    file = Path(getattr(main, "__file__", "/")).resolve()
    if not file.is_relative_to(ROOT):
        return "python -c ..."
    return f"python -m {'.'.join(file.relative_to(ROOT).with_suffix('').parts)}"


def git(*arguments: str, of: Path = ROOT) -> str:
    """What git says to ``arguments``, of a working copy (default: this one)."""
    return subprocess.run(["git", "-C", str(of), *arguments], check=True, capture_output=True, text=True).stdout


def commit(checkout: Path = ROOT) -> str | None:
    """The commit of a working copy (default: this one), with a plus sign where its code differs; ``None`` outside of git."""
    try:
        changed = git("diff", "--name-only", "HEAD", "--", ":/*.py", of=checkout)
        return git("rev-parse", "HEAD", of=checkout).strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
