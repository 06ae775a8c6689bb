"""The page of a record, and the goal of the protocol as code.

Of a task, d is the mean over seeds of the call's score minus the plain ensemble's on the same split, and e the standard error
of that mean. Smaller scores are better.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from statistics import fmean, stdev
from typing import Any

from benchmarks import measure

OURS, REFERENCE = "posterior_ensemble", "plain_ensemble"
Scores = dict[str, dict[str, dict[int, dict[str, float]]]]


def by_task(record: dict[str, Any]) -> Scores:
    """``scores[task][contestant][seed]`` of the seeds that every task has, in the order of the protocol."""
    found: Any = defaultdict(lambda: defaultdict(dict))
    known = record["protocol"]["seen before"] + record["protocol"]["new"]
    keys = sorted((key.rsplit("-", 1) for key in record["cells"]), key=lambda pair: known.index(pair[0]))
    tasks = Counter(seed for _, seed in keys)
    for name, seed in keys:
        for who, scores in record["cells"][f"{name}-{seed}"].items():
            if "nll" in scores and tasks[seed] == max(tasks.values()):
                found[name][who][int(seed)] = scores
    return found


def paired(tasks: Scores, score: str, who: str = OURS, reference: str = REFERENCE) -> dict[str, tuple[float, float]]:
    """``(d, e)`` of every task; of one seed e is infinite."""
    found = {}
    for name, runs in tasks.items():
        both = [s for s in runs.get(who, {}) if s in runs.get(reference, {}) and score in runs[who][s]]
        if d := [runs[who][s][score] - runs[reference][s][score] for s in both]:
            found[name] = fmean(d), stdev(d) / len(d) ** 0.5 if len(d) > 1 else math.inf
    return found


def goal(record: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """Each part of the protocol's goal: whether it is met, and the numbers."""
    from scipy.stats import wilcoxon

    asked, tasks = record["protocol"]["goal"], by_task(record)
    nll, crps, found = paired(tasks, "nll"), paired(tasks, "crps"), {}
    for name, every in (("NLL", nll), ("CRPS", crps)):
        means = [d for d, _ in every.values()]
        p = float(wilcoxon(means, alternative="less").pvalue)
        better = sum(d < 0 for d in means)
        found[f"signed ranks of {name}"] = p <= 0.05, f"{better} of {len(means)} tasks better, p = {p:.3f}"
    sure = asked["beyond standard errors"]
    worse = [n for n, (d, e) in nll.items() if d > asked["worse by"] and d > sure * e]
    found["no task worse"] = not worse, ", ".join(worse) or "none"
    covered = fmean(
        fmean(s["coverage"] for s in runs[OURS].values())
        for runs in tasks.values()
        if "coverage" in next(iter(runs[OURS].values()))
    )
    low, high = asked["coverage"]
    found["coverage of 90 % intervals"] = low <= covered <= high, f"{covered:.3f}, mean of the tasks"
    classes = {n: nll[n] for n in nll if n not in crps}
    lost = [n for n, (d, e) in classes.items() if d > 0.005 and d > sure * e]
    found["classes never worse"] = not lost, ", ".join(lost) or "none"
    return found


def means_of(runs: dict[int, dict[str, float]], score: str) -> float:
    """Over the seeds; NaN where there is none."""
    values = [s[score] for s in runs.values() if score in s]
    return fmean(values) if values else math.nan


def markdown(record: dict[str, Any]) -> str:
    """The goal, the differences from the plain ensemble by task, every contestant's means, and what failed, for a page."""
    tasks, new = by_task(record), record["protocol"]["new"]
    seeds = sorted({s for runs in tasks.values() for s in runs[OURS]})
    nll, crps, rows, means = paired(tasks, "nll"), paired(tasks, "crps"), [], []
    for name, runs in tasks.items():
        cells = [f"{d[name][0]:+.3f} +- {d[name][1]:.3f}" if name in d else "" for d in (nll, crps)]
        cells += [f"{means_of(runs[who], 'coverage'):.2f}".replace("nan", "") for who in (OURS, REFERENCE)]
        rows.append([f"{name}{'*' * (name in new)}", *cells])
    goals = [(part, "met" if met else "**not met**", said) for part, (met, said) in goal(record).items()]
    for who in dict.fromkeys(w for runs in tasks.values() for w in runs):
        cells = [f"{means_of(runs[who], 'nll'):.3f}" if who in runs else "" for runs in tasks.values()]
        for score, digits in (("coverage", 3), ("ece", 3), ("ood", 2), ("seconds", 1)):
            values = [means_of(runs[who], score) for runs in tasks.values() if who in runs]
            known = [value for value in values if not math.isnan(value)]
            cells.append(f"{fmean(known):.{digits}f}" if known else "")
        means.append([who, *cells])
    failed = [
        f"\n{key}: {who} failed, {scores['failed']}\n"
        for key, cell in record["cells"].items()
        for who, scores in cell.items()
        if "failed" in scores
    ]
    return f"""Seeds {", ".join(map(str, seeds))}; differences are call minus plain ensemble of equal gradients, +- one \
paired standard error; smaller is better. New tasks are marked *.

{measure.markdown(("task", "NLL", "CRPS", "coverage", "of the plain one"), rows)}

{measure.markdown(("goal", "", ""), goals)}

Mean NLL of every contestant; then means over tasks of coverage, calibration error, the area under the curve \
of telling permuted inputs, and processor seconds:

{measure.markdown(("", *tasks, "coverage", "ECE", "OOD", "seconds"), means)}
{"".join(failed)}"""
