"""The tables of ``docs/speed.md``, from the records: of speed (``python -m benchmarks``, on processors of AMD and Intel) and of
Laplace fits beside peers (``python -m benchmarks.curvature_fit``).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from benchmarks.measure import RESULTS, known, markdown

RECORDS = {file: known(RESULTS / file)["rows"] for file in ("cpu.json", "cpu_intel.json") if (RESULTS / file).exists()}
OURS, FLOOR = "bayesopt_chain", "passes alone"  # of the contenders of a fit
PHASES, TARGET = ("factors", "fit", "tune", "predict"), 0.9  # of a fit; of the fastest peer's time


def table(*records: list[dict[str, Any]]) -> str:
    """One line for each ratio that has a target: its median and quartiles on the processor of each record, and the target."""
    records = records or tuple(RECORDS.values())
    ratios = [{(row["work"], r["ours"], r["theirs"]): r for row in rows for r in row["ratios"]} for rows in records]
    lines = []
    for work, keys in itertools.groupby(dict.fromkeys(itertools.chain(*ratios)), key=lambda key: key[0]):
        for i, key in enumerate(keys):
            found = [of.get(key) for of in ratios]
            target = next(r["target"] for r in found if r)
            lines.append((work if i == 0 else "", " / ".join(key[1:]), *map(_ratio, found), f"{target:.3g}"))
    return markdown(("work", "ours / theirs", *(rows[0]["environment"]["cpu"] for rows in records), "target"), lines)


def _ratio(r: dict[str, Any] | None) -> str:
    if r is None:
        return ""
    missed = "" if r["ratio"] <= r["target"] else ", missed"
    return f"{r['ratio']:.3g} ({r['low']:.3g} to {r['high']:.3g}){missed}"


def machines() -> str:
    """Processors, versions and dates of the records."""
    described = []
    for rows in RECORDS.values():
        dates = sorted({row["environment"]["date"] for row in rows})
        e = rows[0]["environment"]
        described.append(f"{e['cpu']}, {e['cores']} cores, torch {e['versions']['torch']}, {' and '.join(dates)}")
    return "; ".join(described) + "."


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
    print(machines(), table(), fits(), sep="\n\n")
