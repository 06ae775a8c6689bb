"""The command: every task under every seed, in as many processes as there are cores, up to two, with a line for each.

A line is printed as soon as a task is done, to a terminal and to a file alike.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bayesopt_chain.demo.contestants import METHODS, contestants
from bayesopt_chain.demo.figure import draw_figure
from bayesopt_chain.demo.scores import scores, sureness
from bayesopt_chain.demo.table import text
from bayesopt_chain.demo.tasks import DIGITS, NAMES, SEEN, WRONG, load

PICTURED = "mislabelled digits"  # the task of the figure's second half


def cell(name: str, seed: int, steps: int) -> dict[str, Any]:
    """All contestants on one task under one seed: scores by method, seconds, and of the pictured task how sure they are."""
    began, busy, task = time.perf_counter(), time.process_time(), load(name, seed)
    found: dict[str, Any] = {"scores": {}, "sure": {}}
    for who, (predict, cost) in contestants(task, seed, steps).items():
        prediction = predict(task.test[0])
        elsewhere = predict(task.unseen) if len(task.unseen) else None
        found["scores"][who] = {**scores(task, prediction, elsewhere), "cost": cost}
        if name == PICTURED:
            found["sure"][who] = sureness(task, prediction, elsewhere)
    return {**found, "seconds": time.perf_counter() - began, "busy": time.process_time() - busy}


def _alone() -> None:
    """Let a worker compute in one thread, since there is one for each core."""
    torch.set_num_threads(1)


def cells_of(wanted: list[tuple[str, int, int]], workers: int) -> Iterator[tuple[tuple[str, int, int], dict[str, Any]]]:
    """What :func:`cell` found for each, as it comes."""
    if workers == 1:
        yield from ((each, cell(*each)) for each in wanted)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_alone) as pool:
        running = {pool.submit(cell, *each): each for each in wanted}
        for done in as_completed(running):
            yield running[done], done.result()


def run(tasks: tuple[str, ...], seeds: int, steps: int, workers: int, figure: str | Path) -> dict[str, Any]:
    """Run every contestant on every task, print lines, tables and words, draw the figure; returns what was found."""
    print(
        f"{seeds} splits of {', '.join(tasks)} (data of scikit-learn).\n"
        f"Half of the data to train on; of the digits {DIGITS}, all of them 0 to {SEEN - 1}: 8 and 9 are never trained on.\n"
        f"Of the mislabelled digits {WRONG:.0%} of the labels to train on are random.\n"
        f"Networks of two hidden layers of 50 units, {steps} steps of training; the ensemble and its Laplace posteriors train\n"
        f"as much longer as costs what the posterior costs. {workers} process{'es' if workers > 1 else ''}.\n",
        flush=True,
    )
    began = time.perf_counter()
    wanted = [(name, seed, steps) for seed in range(seeds) for name in tasks]
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for (name, seed, _), one in cells_of(wanted, workers):
        found[name, seed] = one
        nll = ", ".join(f"{who} {one['scores'][who]['nll']:.3f}" for who in METHODS)
        print(f"[{len(found):>2}/{len(wanted)}] {name}, seed {seed}: {nll} ({one['seconds']:.0f} s)", flush=True)
    everywhere = range(seeds)
    cells = {n: {who: [found[n, s]["scores"][who] for s in everywhere] for who in METHODS} for n in tasks}
    sure = {who: [found[PICTURED, s]["sure"][who] for s in everywhere] for who in METHODS} if PICTURED in tasks else {}
    print(f"\n{text(cells)}\n")
    draw_figure(figure, cells, sure, PICTURED)
    seconds = time.perf_counter() - began
    busy = sum(one["busy"] for one in found.values())
    print(f"figure: {figure}\n{seconds:.0f} seconds; the contestants took {busy:.0f} seconds of processor time")
    return {"steps": steps, "seeds": seeds, "seconds": seconds, "processor_seconds": busy, "cells": cells}


def main(arguments: list[str] | None = None) -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m bayesopt_chain.demo",
        description="A posterior by one call, against one network, its ensemble and last-layer Laplace.",
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--tasks", default=",".join(NAMES), help="separated by commas (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="splits of every task (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of the first training of every network (%(default)s)")
    parser.add_argument("--workers", type=int, default=min(2, cores), help="processes (%(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("demo.png"), help="where to write it (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write all scores here")
    options = vars(parser.parse_args(arguments))
    for name, least in (("seeds", 1), ("steps", 20), ("workers", 1)):
        if options[name] < least:
            parser.error(f"--{name} must be at least {least}, got {options[name]}")
    asked = tuple(name.strip() for name in options.pop("tasks").split(","))
    unknown = [name for name in asked if name not in NAMES]
    if unknown:
        parser.error(f"--tasks has {unknown[0]!r}; choose from {', '.join(NAMES)}")
    path = options.pop("json")
    result = run(asked, **options)
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
