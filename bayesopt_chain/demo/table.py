"""The tables, and what they say in words: what is won and what is lost against each of the others.

    d_s = score of the posterior - score of the other under split s,     mean d +- t_{n-1, 1 - alpha / (2 k)} sd(d) / sqrt(n)

for k tasks: intervals of 95 %, corrected for their number (Bonferroni). Smaller scores are better, but for ``unseen``.
"""

from __future__ import annotations

import math
import statistics
import textwrap

from scipy.stats import t

from bayesopt_chain.demo.contestants import ENSEMBLE, LAPLACE, METHODS, NETWORK, POSTERIOR

Cells = dict[str, dict[str, list[dict[str, float]]]]  # scores of every seed by task and method

LEVEL = 0.95
WIDE = 84  # letters in a line
SHOWN = {
    "nll": "negative log likelihood (lower is better)",
    "error": "error: share of wrong classes; of diabetes the root mean squared error (lower is better)",
    "miscovered": "calibration error; of diabetes how far the coverage of 90 % intervals is from it (lower is better)",
    "unseen": "area under the ROC curve of telling digits never trained on (higher is better)",
    "cost": "cost in gradients of a network for each datum, as a share of the posterior's",
}

NAMES = {"nll": "likelihood", "error": "error", "miscovered": "calibration", "unseen": "telling unseen digits"}


def difference(cells: Cells, task: str, who: str, other: str, score: str = "nll") -> tuple[float, float]:
    """Mean and half width of the corrected interval of a paired difference; infinite for one split."""
    mine, theirs = ([row[score] for row in cells[task][name]] for name in (who, other))
    gaps = [a - b for a, b in zip(mine, theirs, strict=True)]
    mean, n = statistics.fmean(gaps), len(gaps)
    if n < 2:
        return mean, math.inf
    return mean, float(t.ppf(1 - (1 - LEVEL) / (2 * len(cells)), n - 1)) * statistics.stdev(gaps) / math.sqrt(n)


def verdict(mean: float, half: float) -> str:
    """What an interval of a difference says, smaller being better.

    Example:
        >>> from bayesopt_chain.demo.table import verdict
        >>> [verdict(mean, 0.01) for mean in (-0.02, 0.005, 0.02)]
        ['won', 'undecided', 'lost']
    """
    return "won" if mean + half < 0 else "lost" if mean - half > 0 else "undecided"


def rows(cells: Cells, score: str) -> list[str]:
    """The means of a score over the seeds, a row for each task that has it."""
    widths = [len(name) + 2 for name in METHODS]
    found = [" " * 19 + "".join(f"{name:>{width}}" for name, width in zip(METHODS, widths))]
    for task, by in cells.items():
        if score in by[POSTERIOR][0]:
            whole = statistics.fmean(row["cost"] for row in by[POSTERIOR]) if score == "cost" else 1.0
            means = [statistics.fmean(row[score] for row in by[name]) / whole for name in METHODS]
            found.append(f"{task:19}" + "".join(f"{mean:>{width}.3f}" for mean, width in zip(means, widths)))
    return found


def differences(cells: Cells, other: str) -> list[str]:
    """The posterior's negative log likelihood minus another's, with intervals and what they say, a row for each task."""
    found = []
    for task in cells:
        mean, half = difference(cells, task, POSTERIOR, other)
        about = f" +- {half:.3f}   {verdict(mean, half)}" if half < math.inf else "   one split has no interval"
        found.append(f"{task:19}{mean:+8.3f}{about}")
    return found


def said(cells: Cells) -> str:
    """In words what the posterior wins and loses, computed from the cells; where the intervals hold 0 nothing is said."""
    sentences = []
    for other in (NETWORK, LAPLACE, ENSEMBLE):
        found: dict[str, list[str]] = {"won": [], "lost": []}
        for score, name in NAMES.items():
            by: dict[str, list[str]] = {"won": [], "lost": [], "undecided": []}
            for task, by_method in cells.items():
                if score in by_method[POSTERIOR][0]:
                    mean, half = difference(cells, task, POSTERIOR, other, score)
                    by[verdict(-mean if score == "unseen" else mean, half)].append(task)
            for word, parts in found.items():
                parts += [f"{name} on {', '.join(by[word])}"] if by[word] else []
        sentences.append(
            f"The posterior against {'' if other == NETWORK else 'the '}{other}: "
            f"won {'; '.join(found['won']) or 'nothing'}. Lost {'; '.join(found['lost']) or 'nothing'}."
        )
    sentences.append("Whatever is not named is undecided by these splits.")
    return "\n".join(textwrap.fill(sentence, WIDE) for sentence in sentences)


def text(cells: Cells) -> str:
    """All tables, and what they say."""
    parts = []
    for score, title in SHOWN.items():
        if any(score in by[POSTERIOR][0] for by in cells.values()):
            parts += [title, *rows(cells, score), ""]
    for other, name in ((NETWORK, NETWORK), (ENSEMBLE, f"the {ENSEMBLE}")):
        parts += [
            f"negative log likelihood of the posterior minus that of {name}: means over the splits, {LEVEL:.0%} intervals",
            f"corrected for {len(cells)} tasks",
            *differences(cells, other),
            "",
        ]
    return "\n".join([*parts, said(cells)])
