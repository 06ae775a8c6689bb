"""The table of speed in ``docs/speed.md``, from the file that ``python -m benchmarks`` wrote."""

from __future__ import annotations

from benchmarks.measure import RESULTS, known, markdown

ROWS = known(RESULTS / "cpu.json")["rows"]


def table() -> str:
    """One line for each ratio that has a target: its median, quartiles and target."""
    lines = []
    for row in ROWS:
        work = row["work"]
        for r in row["ratios"]:
            ratio = f"{r['ratio']:.3g} ({r['low']:.3g} to {r['high']:.3g})"
            missed = "" if r["ratio"] <= r["target"] else ", missed"
            lines.append((work, f"{r['ours']} / {r['theirs']}", ratio, f"{r['target']:.3g}{missed}"))
            work = ""
    return markdown(("work", "ours / theirs", "ratio (quartiles)", "target"), lines)


def when() -> str:
    """Machine, versions and date of the rows."""
    environments = [row["environment"] for row in ROWS]
    dates = sorted({e["date"] for e in environments})
    e = environments[0]
    return f"{e['cpu']}, {e['cores']} cores, torch {e['versions']['torch']}, {' and '.join(dates)}"


if __name__ == "__main__":
    print(f"{when()}\n\n{table()}")
