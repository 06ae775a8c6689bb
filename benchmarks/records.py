"""Which records are older than the code that they measured: ``python -m benchmarks.records``.

A record is as old as the commit that it was measured at, as it says itself, or where history has no such commit, the one that
wrote it last. Beside it stand the commits that have since changed the benchmark or the rooms that it measures (``ROOMS``; all
of the package where it is not named there), so that whoever quotes a number sees whether it may have moved. The table goes to
``benchmarks/results/records.md``.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import RESULTS, ROOT, git, known, markdown

ROOMS = {
    "ablation": ["ensemble"],
    "acquisition": ["posterior"],
    "adapters": ["lora"],
    "against": ["engine", "links", "core"],
    "calibration": ["testing", "samplers", "posterior"],
    "captures": ["loop/capture"],
    "cpu": ["engine", "loop", "optim", "links", "core", "random"],
    "cpu_intel": ["engine", "loop", "optim", "links", "core", "random"],
    "constants": ["ensemble"],
    "cuda_ahead": ["engine", "random"],
    "curvature_examples": ["curvature", "precision", "posterior"],
    "curvature_fit": ["curvature", "precision", "posterior"],
    "digests": ["engine", "links", "core"],
    "doctor": ["diagnostics"],
    "forces": ["posterior"],
    "gpu": ["engine", "loop", "optim", "random"],
    "heat_guard": ["diagnostics/heat_guard.py"],
    "heat_guard_cost": ["diagnostics/heat_guard.py"],
    "heat_guard_loops": ["diagnostics/heat_guard.py"],
    "images": ["posterior"],
    "influence": ["posterior", "precision"],
    "laplace_default": ["posterior", "curvature", "likelihoods"],
    "leaderboard": ["ensemble"],
    "learning_coefficient": ["diagnostics"],
    "many_classes": ["posterior", "curvature", "likelihoods"],
    "parallel": ["loop", "engine", "links", "core"],
    "ranks": ["distributed", "optim", "runs"],
    "rates": ["optim", "engine"],
    "redrawn": ["optim", "random"],
    "runs": ["runs", "loop"],
    "scaling": ["engine", "links"],
    "soak": ["runs"],
}


def row(file: Path) -> tuple[str, str, str, int]:
    """Name, commit and date of a record, and how many commits have changed its code since."""
    at = str(known(file).get("environment", {}).get("commit")).removesuffix("+")  # "+": and what was not committed
    if at not in git("log", "--format=%H").split():
        at = git("log", "-1", "--format=%H", "--", str(file)).strip()
    commit, date = git("log", "-1", "--format=%h %cs", at).split()
    code = [f"bayesopt_chain/{room}" for room in ROOMS.get(file.stem, [""])]
    benchmark = ROOT / known(file).get("command", f"python -m benchmarks.{file.stem}").split()[2].replace(".", "/")
    code += [str(place) for place in (benchmark, benchmark.with_suffix(".py")) if place.exists()]
    return file.name, commit, date, len(git("log", "--format=%h", f"{commit}..HEAD", "--", *code).split())


def table() -> str:
    """The records, those whose code has changed most since then first."""
    rows = [row(file) for file in RESULTS.glob("*.json") if git("log", "-1", "--", str(file))]
    head = ("record", "measured at", "on", "commits to its code since")
    return markdown(head, sorted(rows, key=lambda r: -r[3])) + "\n"


if __name__ == "__main__":
    (RESULTS / "records.md").write_text(table())
    print(table())
