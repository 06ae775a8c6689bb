"""``python -m benchmarks.suite``: what the tests are and what they take, into ``benchmarks/results/tests.json``.

    python -m benchmarks.suite sizes              statements and tests by folder
    python -m benchmarks.suite quick | full       run a tier on two processes: seconds of wall and of processors, tests
    python -m benchmarks.suite make               the same of ``make test``, which is all that the workflow runs
    python -m benchmarks.suite shuffled SEED      the quick tier in another order (pytest-randomly), in the same figures

Each adds to its part of the record. A tier also writes the load of the machine when it began, since seconds of wall count
others' work too; those of processors do not.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.measure import RESULTS, ROOT, commit, keep, known
from benchmarks.size import statements

PATH = RESULTS / "tests.json"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def folder(path: str) -> str:
    """The folder of tests that a path is in; ``.`` for files beside the folders."""
    return path.split("/")[1] if path.count("/") > 1 else "."


def run(*command: str) -> str:
    """What a command says, run on the package of this checkout."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout


def sizes() -> dict[str, Any]:
    """Statements and tests, all and those of the quick tier, by folder and in all."""
    counts = {kind: Counter[str]() for kind in ("statements", "tests", "quick")}
    for file in (ROOT / "tests").rglob("*.py"):
        where = folder(file.relative_to(ROOT).as_posix())
        counts["statements"][where] += statements(file.read_text())
    for tier, marks in (("tests", ""), ("quick", "not slow")):
        said = run(*PYTEST, "--collect-only", "-m", marks, "-p", "no:randomly", "tests")
        counts[tier].update(folder(line) for line in said.splitlines() if "::" in line)
    folders = {each: {kind: row[each] for kind, row in counts.items()} for each in sorted(counts["statements"])}
    return {"revision": commit(), **{kind: row.total() for kind, row in counts.items()}, "folders": folders}


def timed(*command: str) -> dict[str, Any]:
    """A run of pytest: seconds of wall and of processors, and how it ended."""
    load, start, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    said = run(*command)
    wall, spent = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime
    ended = Counter[str]()
    # one line for each run
    for line in re.findall(r"^=* ?(.*\d+ (?:passed|failed|errors?).* in [\d.]+s.*)$", said, re.M):
        ended.update({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)})
    return {
        "seconds": {"wall": round(wall, 1), "processors": round(processors, 1)},
        **ended,
        "failures": re.findall(r"^(?:FAILED|ERROR|make: \*\*\*) (\S+)", said, re.M),
        "load": round(load, 1),
        "of": platform.processor(),
    }


if __name__ == "__main__":
    parts: dict[str, Callable[..., Any]] = {
        "sizes": sizes,
        "quick": lambda: timed(*PYTEST, "-p", "no:randomly"),
        "full": lambda: timed(*PYTEST, "-p", "no:randomly", "-n", "2", "--dist", "worksteal", "tests"),
        "make": lambda: timed("make", "test"),
        "shuffled": lambda seed: {"seed": int(seed), **timed(*PYTEST, f"--randomly-seed={seed}")},
    }
    what, *arguments = sys.argv[1:]
    found, record = parts[what](*arguments), known(PATH)
    keep(PATH, record | {what: [*record.get(what, []), found]})
    print(json.dumps(found, indent=1))
