"""``python -m benchmarks.experiments.report`` writes ``benchmarks/RESULTS.md`` from the records; no number is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.experiments.__main__ import NAMES, experiment
from benchmarks.experiments.common import RESULTS, SCALES, averaged

PAGE = Path(__file__).parents[1] / "RESULTS.md"


def section(name: str, folder: Path = RESULTS) -> str:
    """One experiment: what the paper reports, what was measured at the largest scale on record, and one sentence."""
    it = experiment(name)
    lines = [f"## {it.title}", "", f"The paper: {it.paper}.", ""]
    paths = [folder / f"{name}-{scale}.json" for scale in reversed(SCALES)]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        return "\n".join([*lines, "Not run yet.", ""])
    result = json.loads(path.read_text())
    table, e = averaged(result), result["environment"]
    measures = list(it.shown) or list(dict.fromkeys(m for row in table.values() for m in row))
    lines += [f"| method | {' | '.join(measures)} |", "| --- |" + " --- |" * len(measures)]
    for method, row in table.items():
        cells = [cell(row[m], len(result["seeds"])) if m in row else "" for m in measures]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    lines += [
        "",
        it.says(table),
        "",
        f"Scale {result['scale']}, {seeds_of(result)}, {result['seconds']} s (load {e['load'][0]:.0f} on "
        f"{e['cores']} cores), {e['date']}, {e['cpu']}, {versions_of(e)}. Mean over seeds (range). Settings: "
        f"{', '.join(f'{k} {v}' for k, v in result['settings'].items())}.",
        "",
    ]
    return "\n".join(lines)


def cell(value: Mapping[str, float], seeds: int) -> str:
    """The mean, and the range where there are several seeds."""
    return f"{value['mean']:.3g}" + (f" ({value['low']:.3g} to {value['high']:.3g})" if seeds > 1 else "")


def seeds_of(result: Mapping[str, Any]) -> str:
    """``seed 0`` or ``seeds 0 to 4``."""
    first, last = result["seeds"][0], result["seeds"][-1]
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def versions_of(environment: Mapping[str, Any]) -> str:
    """``torch 2.13.0, ...``, of what was installed."""
    return ", ".join(f"{name} {v}" for name, v in environment["versions"].items() if v and name != "triton")


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    made = "Made by `python -m benchmarks.experiments.report` from the records in `benchmarks/experiments/results`."
    head = f"# Results\n\n{made}\n"
    return "\n".join([head, *(section(name, folder) for name in NAMES)])


if __name__ == "__main__":
    PAGE.write_text(page())
