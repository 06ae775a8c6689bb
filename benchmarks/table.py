"""The table of speed in ``docs/speed.md``, from the file that ``python -m benchmarks`` wrote."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "cpu.json"


def table(path: Path = RESULTS) -> str:
    """One line for each ratio that has a target: its median, quartiles and target."""
    lines = ["| work | ours / theirs | ratio (quartiles) | target |", "| --- | --- | --- | --- |"]
    for row in json.loads(path.read_text())["rows"]:
        work = row["work"]
        for r in row["ratios"]:
            ratio = f"{r['ratio']:.3g} ({r['low']:.3g} to {r['high']:.3g})"
            missed = "" if r["ratio"] <= r["target"] else ", missed"
            lines.append(f"| {work} | {r['ours']} / {r['theirs']} | {ratio} | {r['target']:.3g}{missed} |")
            work = ""
    return "\n".join(lines)


def when(path: Path = RESULTS) -> str:
    """Machine, versions and date of the rows."""
    environments = [row["environment"] for row in json.loads(path.read_text())["rows"]]
    dates = sorted({e["date"] for e in environments})
    e = environments[0]
    return f"{e['cpu']}, {e['cores']} cores, torch {e['versions']['torch']}, {' and '.join(dates)}"


if __name__ == "__main__":
    print(f"{when()}\n\n{table()}")
