"""The tables of ``docs/speed.md``, from the records: of speed (``python -m benchmarks``), and of Laplace fits beside peers
(``python -m benchmarks.curvature_fit``).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from benchmarks.measure import RESULTS, known, markdown

ROWS = known(RESULTS / "cpu.json")["rows"]
OURS, FLOOR = "bayesopt_chain", "passes alone"  # of the contenders of a fit
PHASES, TARGET = ("factors", "fit", "tune", "predict"), 0.9  # of a fit; of the fastest peer's time


def table(rows: list[dict[str, Any]] = ROWS) -> str:
    """One line for each ratio that has a target: its median, quartiles and target."""
    lines = []
    for row in rows:
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


def fits() -> str:
    """How many phases of the record are at most at the target beside the fastest peer, and a table of the others, with the
    time of the passes alone over the peer's.
    """
    found = []
    for (case, rows), phase in itertools.product(known(RESULTS / "curvature_fit.json")["cases"].items(), PHASES):
        timed = {who: row[phase] for who, row in rows.items() if "ratio" in row.get(phase, ())}
        floor = timed.pop(FLOOR, {}).get("ms", math.nan)
        peers = {who: row["ratio"] for who, row in timed.items() if who != OURS}
        if peers:
            who = max(peers, key=lambda name: peers[name])
            found.append((case, phase, who, peers[who], floor / timed[who]["ms"]))
    above = [(*where, f"{ratio:.2f}", f"{floor:.2f}") for *where, ratio, floor in found if ratio > TARGET]
    head = ("network, weights, structure", "phase", "fastest peer", "ours", "passes alone")
    most = f"{len(found) - len(above)} of {len(found)} rows are at most {TARGET}; the others are"
    return f"{most}\n\n{markdown(head, above)}"


if __name__ == "__main__":
    print(f"{when()}\n\n{table()}\n\n{fits()}")
