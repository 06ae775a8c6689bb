"""Soak: what a hostile or absent-minded world does to a run on disk, again and again.

    python -m benchmarks.soak --kills 400            SIGKILL at random moments
    python -m benchmarks.soak --rank-kills 200       the same of all ranks at once, on 1, 2 or 4 of them
    python -m benchmarks.soak --interrupts 30        two Ctrl-Cs, 20 to 300 ms apart
    python -m benchmarks.soak --damages 1000         a file flipped, zeroed, cut or grown; goes on where it was stopped

A killed run must end as the run that nobody killed; between two kills every file is compared with its checksums. Two Ctrl-Cs
lose no finished draw. Of a damaged file no draw is wrong, and the error names it. Results go to
``benchmarks/results/soak.json``, after every killed run, every pair of Ctrl-Cs and every 50 damages.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bayesopt_chain as bc
from benchmarks.measure import RESULTS, command, known
from benchmarks.runs import record
from tests.distributed.ranks import _called, begun, ended, run, server
from tests.distributed.toys import must_be, sampled
from tests.runs.test_hostile import every_damage_is_seen
from tests.runs.test_nothing_lost import interrupted_twice

PATH = RESULTS / "soak.json"


def launched(size: int | None, function: Callable[..., Any], args: tuple, options: dict[str, Any]) -> Any:
    """A pool and the process in it for each rank (``None``: one process without ranks), and what they will have returned."""
    if size is None:
        pool = ProcessPoolExecutor(1, server(), torch.set_num_threads, (1,))
        return [(pool, pool.submit(os.getpid).result())], [pool.submit(function, *args, **options)]
    group = begun(size)
    return group, [pool.submit(_called, 1, function, args, options) for pool, _ in group]


def killed_at_random(path: Path, kills: int, seed: int, kind: str, sizes: tuple[int | None, ...]) -> int:
    """Kill a run at random moments, each time on one of these numbers of ranks (``None``: a process that knows of none).

    Then let it end, and compare it with the run in one process that nobody killed.

    Returns:
        How many launches still ran when they were killed.
    """
    moments, steps, hit = random.Random(seed), 300 * kills, 0
    given: dict[str, Any] = {"thinning": 7, **({"n": 4} if kind == "chains" else {})}
    for _ in range(kills):
        group, results = launched(moments.choice(sizes), sampled, (kind, path, steps), {**given, "seconds": 0.02})
        wait(results, moments.uniform(0.1, 0.6))
        hit += not all([result.done() for result in results])
        ended(group)
        wait(results)  # behind this the processes are dead
        with suppress(FileNotFoundError):  # of a run that had not begun
            bc.Draws.open(path).verify()
    want = sampled(kind, None, steps, **given)
    for part in run(sampled, None if None in sizes else 2, kind, path, steps, **given):
        must_be(part, want, 1e-6 if kind == "one" and None not in sizes else 0.0)
    return hit


def killed(
    count: int, seed: int, kinds: Sequence[str], sizes: tuple[int | None, ...], rounds: int = 10
) -> Iterator[dict[str, Any]]:
    """SIGKILLs, shared among so many runs, whose kinds take turns: the figures after each of them."""
    done = round = 0
    while done < count:
        with tempfile.TemporaryDirectory() as folder:
            kind = kinds[(seed + round) % len(kinds)]
            done += killed_at_random(Path(folder) / "run", max(1, count // rounds), seed + round, kind, sizes)
        round += 1
        yield {"kills": done, "of": count, "runs": round, "draws lost, doubled or torn": 0}  # else it has raised


def interrupted(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Pairs of Ctrl-Cs: the figures after each of them."""
    pairs = lost = 0
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for wrong, seconds in interrupted_twice(Path(folder), count, seed):
            pairs, lost, slowest = pairs + 1, lost + wrong, max(slowest, seconds)
            yield {"pairs": pairs, "of": count, "lost": lost, "slowest end, seconds": round(slowest, 1)}


def damaged(count: int, seed: int, some: int = 50) -> Iterator[dict[str, Any]]:
    """Damaged files, so many at a time: the figures so far, those of the record among them where it has the same seed."""
    before = known(PATH).get("damages", {})
    goes_on = before.get("seed") == seed and before.get("files", count) < count
    done, wrong, unnamed = (before[name] if goes_on else 0 for name in ("files", "wrong", "unnamed"))
    while done < count:
        now = min(some, count - done)
        with tempfile.TemporaryDirectory() as folder:
            bad, nameless = every_damage_is_seen(Path(folder), now, seed + done)
        done, wrong, unnamed = done + now, wrong + bad, unnamed + nameless
        yield {"files": done, "of": count, "seed": seed, "wrong": wrong, "unnamed": unnamed}


if __name__ == "__main__":
    args = command(kills=0, rank_kills=0, interrupts=0, damages=0, seed=0)
    begin = time.monotonic()
    for name, count, what in (
        ("kills", args.kills, partial(killed, kinds=["one"], sizes=(None,))),
        ("kills on ranks", args.rank_kills, partial(killed, kinds=["chains", "shards", "one"], sizes=(1, 2, 4))),
        ("interrupts", args.interrupts, interrupted),
        ("damages", args.damages, damaged),
    ):
        for figures in what(count, args.seed) if count else ():
            print(name, figures, flush=True)
            record(name, {**figures, "seconds": int(time.monotonic() - begin)}, PATH)
