"""``python -m benchmarks.experiments.report`` writes ``benchmarks/RESULTS.md`` from the records; no number is typed by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.experiments.__main__ import NAMES, experiment
from benchmarks.experiments.common import RESULTS, SCALES, averaged
from benchmarks.measure import known, markdown

PAGE = Path(__file__).parents[1] / "RESULTS.md"


def section(name: str, folder: Path = RESULTS) -> str:
    """One experiment: what the paper reports, what was measured at the largest scale on record, and one sentence."""
    it = experiment(name)
    head = f"## {it.title}\n\nThe paper: {it.paper}.\n"
    found = next(filter(None, (known(folder / f"{name}-{scale}.json") for scale in reversed(SCALES))))
    table, e, seeds = averaged(found), found["environment"], found["seeds"]
    measures = list(it.shown) or list(dict.fromkeys(m for row in table.values() for m in row))
    rows = [
        (method, *(cell(row[m], len(seeds)) if m in row else "" for m in measures)) for method, row in table.items()
    ]
    of_seeds = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    versions = ", ".join(f"{package} {v}" for package, v in e["versions"].items() if v and package != "triton")
    return f"""{head}
{markdown(("method", *measures), rows)}

{it.says(table)}

Scale {found["scale"]}, {of_seeds}, {found["seconds"]} s (load {e["load"][0]:.0f} on {e["cores"]} cores), \
{e["date"]}, {e["cpu"]}, {versions}. Mean over seeds (range). \
Settings: {", ".join(f"{k} {v}" for k, v in found["settings"].items())}.
"""


def cell(value: Mapping[str, float], seeds: int) -> str:
    """The mean, and the range where there are several seeds."""
    return f"{value['mean']:.3g}" + (f" ({value['low']:.3g} to {value['high']:.3g})" if seeds > 1 else "")


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    made = (
        "Made by `python -m benchmarks.experiments.report` from the records in `benchmarks/experiments/results`. Each says on "
        "which day it was measured: its seconds are those of the code of that day, and a step's time now stands on the page on "
        "speed."
    )
    return "\n".join([f"# Results\n\n{made}\n", *(section(name, folder) for name in NAMES)])


if __name__ == "__main__":
    PAGE.write_text(page())
