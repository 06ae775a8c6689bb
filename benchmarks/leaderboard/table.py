"""The table of a record: means over seeds, and paired differences from the ensemble of equal cost, corrected for the tasks.

    d_s = score of a contestant - score of the reference on split s,     mean d +- t_{n-1, 1 - alpha / (2 k)} sd(d) / sqrt(n)

for k tasks. Smaller scores are better.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

PRIMARY = {"regression": ("nll", "crps"), "series": ("nll", "crps"), "classification": ("nll",)}
COLUMNS = ("nll", "crps", "ece", "coverage", "accuracy", "rmse", "ood", "seconds", "passes")
REFERENCE = "deep_ensemble"


def by_task(record: dict[str, Any]) -> dict[str, dict[str, dict[int, dict[str, float]]]]:
    """``scores[task][contestant][seed]``."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    for key, cell in record["cells"].items():
        name, seed = key.rsplit("-", 1)
        for who, scores in cell.items():
            if "nll" in scores:
                found[name][who][int(seed)] = scores
    return found


def contestants_of(tasks: dict[str, dict[str, Any]]) -> list[str]:
    """All names, those of the first tasks first."""
    return list(dict.fromkeys(who for contestants in tasks.values() for who in contestants))


def interval(differences: list[float], level: float, tasks: int) -> tuple[float, float]:
    """Mean and half width of the corrected interval; infinite for one split."""
    from scipy.stats import t

    n = len(differences)
    mean = sum(differences) / n
    if n < 2:
        return mean, math.inf
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    return mean, float(t.ppf(1 - (1 - level) / (2 * tasks), n - 1)) * deviation / math.sqrt(n)


def paired(record: dict[str, Any], who: str, reference: str, score: str) -> dict[str, tuple[float, float, float]]:
    """Of every task mean difference, half width and the reference's mean."""
    tasks = by_task(record)
    found = {}
    for name, contestants in tasks.items():
        mine, theirs = contestants.get(who, {}), contestants.get(reference, {})
        seeds = [s for s in mine if s in theirs and score in mine[s]]
        if seeds:
            differences = [mine[s][score] - theirs[s][score] for s in seeds]
            mean, half = interval(differences, record["protocol"]["level"], len(tasks))
            found[name] = mean, half, sum(theirs[s][score] for s in seeds) / len(seeds)
    return found


def table(record: dict[str, Any]) -> str:
    """As text."""
    lines = []
    for name, contestants in by_task(record).items():
        held = "held out" if name in record["protocol"]["held out"] else "developed on"
        columns = [c for c in COLUMNS if any(c in s for runs in contestants.values() for s in runs.values())]
        lines += ["", f"{name} ({held})", f"{'':<22}" + "".join(f"{c:>10}" for c in columns)]
        for who, runs in contestants.items():
            means = []
            for c in columns:
                values = [s[c] for s in runs.values() if c in s]
                means.append(f"{sum(values) / len(values):>10.4g}" if values else f"{'':>10}")
            lines.append(f"{who:<22}" + "".join(means))
    for who in contestants_of(by_task(record)):
        if who == REFERENCE:
            continue
        lines += ["", f"{who} minus {REFERENCE} (corrected 95 % intervals; + worse beyond the margin, * better)"]
        for score in ("nll", "crps"):
            for name, (mean, half, reference) in paired(record, who, REFERENCE, score).items():
                margin = 0.02 if score == "nll" else 0.02 * reference
                mark = "*" if mean + half < 0 else "+" if mean - half > margin else "" if mean + half < margin else "?"
                lines.append(f"  {score:<5} {name:<12} {mean:+.4f} +- {half:.4f} {mark}")
    for key, cell in record["cells"].items():
        lines += [f"{key} {who} failed: {scores['failed']}" for who, scores in cell.items() if "failed" in scores]
    return "\n".join(lines)


def verdict(mean: float, half: float, margin: float) -> str:
    """What an interval of a difference says, smaller being better.

    Example:
        >>> from benchmarks.leaderboard.table import verdict
        >>> [verdict(m, 0.01, 0.02) for m in (-0.05, 0.0, 0.015, 0.05)]
        ['better', 'equal', 'undecided', 'worse']
    """
    if mean + half < 0:
        return "better"
    if mean - half > margin:
        return "worse"
    return "equal" if mean + half < margin else "undecided"


def verdicts(record: dict[str, Any]) -> dict[str, list[str]]:
    """What the intervals of every task say, corrected for the tasks of this record."""
    said: dict[str, list[str]] = defaultdict(list)
    for score in ("nll", "crps"):
        for name, (mean, half, reference) in paired(record, "posterior_ensemble", REFERENCE, score).items():
            said[name].append(verdict(mean, half, 0.02 if score == "nll" else 0.02 * reference))
    return said


def outcome(of: str, said: dict[str, list[str]]) -> str:
    """A sentence on the goal of the protocol."""
    good = [name for name, words in said.items() if set(words) <= {"better", "equal"}]
    won = [name for name, words in said.items() if set(words) == {"better"}]
    goal = len(good) == len(said) and 2 * len(won) >= len(said) > 0
    return (
        f"{of} (intervals corrected for {len(said)}): within the margins on {len(good)} of {len(said)} and surely better on "
        f"{len(won)}, so that the goal of the protocol is {'met' if goal else 'not met'}."
    )


def markdown(record: dict[str, Any]) -> str:
    """The differences from the ensemble of equal cost, the goal, and every contestant's mean, for a page."""
    if not record["cells"]:
        return "No task has been run with this version.\n"
    held_out, tasks = record["protocol"]["held out"], by_task(record)
    lines = ["| task | | score | seeds | posterior ensemble | ensemble of equal cost | difference | |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    said = verdicts(record)
    for name, contestants in tasks.items():
        for score in ("nll", "crps"):
            found = paired(record, "posterior_ensemble", REFERENCE, score).get(name)
            if found is None:
                continue
            mean, half, reference = found
            what = verdict(mean, half, 0.02 if score == "nll" else 0.02 * reference)
            kind = "held out" if name in held_out else "developed on"
            seeds = len(set(contestants["posterior_ensemble"]) & set(contestants[REFERENCE]))
            width = f" +- {half:.3f}" if half < math.inf else ""
            lines.append(
                f"| {name} | {kind} | {score.upper()} | {seeds} | {reference + mean:.3f} | {reference:.3f} "
                f"| {mean:+.3f}{width} | {what} |"
            )
    lines += ["", outcome("All tasks", said)]
    untouched = {**record, "cells": {k: c for k, c in record["cells"].items() if k.rsplit("-", 1)[0] in held_out}}
    if 0 < len(by_task(untouched)) < len(tasks):
        lines += ["", outcome("The held-out tasks by themselves", verdicts(untouched))]
    lines += ["", everyone(record)]
    return "\n".join(lines) + "\n"


def everyone(record: dict[str, Any]) -> str:
    """One line a contestant: its negative log likelihood on every task, other scores as means over tasks, and lines of code."""
    tasks, counted = by_task(record), record.get("about", {}).get("lines", {})
    lines = [
        "Means over the seeds of the negative log likelihood, then means over tasks: coverage of 90 % intervals (regressions "
        "and series), calibration error (classes), area under the curve of telling permuted inputs, seconds; and the lines "
        "that a user writes after the data are there:",
        "",
        "| | " + " | ".join(tasks) + " | coverage | ECE | OOD | seconds | lines |",
        "| --- |" + " --- |" * (len(tasks) + 5),
    ]
    for who in contestants_of(tasks):

        def mean(task: str, score: str, who: str = who) -> list[float]:
            """Over the seeds; nothing where it did not run."""
            values = [s[score] for s in tasks[task].get(who, {}).values() if score in s]
            return [sum(values) / len(values)] if values else []

        cells = [f"{m:.3f}" for name in tasks for m in mean(name, "nll") or [math.nan]]
        for score, digits in (("coverage", 2), ("ece", 3), ("ood", 2), ("seconds", 1)):
            means = [m for name in tasks for m in mean(name, score)]
            cells.append(f"{sum(means) / len(means):.{digits}f}" if means else "")
        cells.append(str(counted.get(who, "")))
        lines.append(f"| {who} | " + " | ".join(cells).replace("nan", "") + " |")
    return "\n".join(lines)
