"""``python -m benchmarks.suite``: what the tests are and what they take, into ``benchmarks/results/tests.json``.

    python -m benchmarks.suite sizes [REVISION]     statements and tests by folder, of REVISION (53a4d5a) and of the last commit
    python -m benchmarks.suite quick | full         run a tier on two processes: seconds of wall and of processors, tests
    python -m benchmarks.suite make                 the same of ``make test``, which is all that the workflow runs
    python -m benchmarks.suite shuffled SEED        the quick tier in another order (pytest-randomly), in the same figures

Each adds its part to the record. A tier also writes the load of the machine when it began, since seconds of wall count others'
work too; those of processors do not. Revisions are run in folders of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, keep, known
from benchmarks.size import counted, git

ROOT = Path(__file__).parents[1]
PATH = RESULTS / "tests.json"
BEFORE = "53a4d5a"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


def folder(path: str) -> str:
    """The folder of tests that a path is in; ``.`` for files beside the folders."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "."


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    with tempfile.TemporaryDirectory() as made:
        git("worktree", "add", "--detach", f"{made}/tree", revision)
        try:
            yield Path(made) / "tree"
        finally:
            git("worktree", "remove", "--force", f"{made}/tree")


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a command says, run on the package of a folder."""
    path = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def sizes(revision: str = BEFORE) -> dict[str, Any]:
    """Statements and tests, all and those of the quick tier, by folder and in all."""
    found = {}
    for name, commit in (("before", revision), ("after", git("rev-parse", "--short", "HEAD").strip())):
        counts = {kind: Counter[str]() for kind in ("statements", "tests", "quick")}
        with checked_out(commit) as tree:
            for file in (tree / "tests").rglob("*.py"):
                where = folder(file.relative_to(tree).as_posix())
                counts["statements"][where] += counted(file.name, file.read_text())["statements"]
            for tier, marks in (("tests", ""), ("quick", "not slow")):
                said = run(*PYTEST, "--collect-only", "-m", marks, "-p", "no:randomly", "tests", cwd=tree).stdout
                counts[tier].update(folder(line) for line in said.splitlines() if "::" in line)
        folders = {each: {kind: row[each] for kind, row in counts.items()} for each in sorted(counts["statements"])}
        found[name] = {"revision": commit, **{kind: row.total() for kind, row in counts.items()}, "folders": folders}
    return found


def timed(*command: str) -> dict[str, Any]:
    """A run of pytest: seconds of wall and of processors, and how it ended."""
    load, start, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*command)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = {
        "wall": round(time.monotonic() - start, 1),
        "processors": round(spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime, 1),
    }
    ended = Counter[str]()
    for line in re.findall(
        r"^=* ?(.*\d+ (?:passed|failed|errors?).* in [\d.]+s.*)$", done.stdout, re.M
    ):  # one for each run
        ended.update({word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)})
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    of = {"load": round(load, 1), "of": platform.processor()}
    return {"seconds": seconds, **ended, "ended with": done.returncode, "failures": failed, **of}


def main() -> None:
    """Add one part to the record."""
    parts: dict[str, Callable[..., Any]] = {
        "sizes": sizes,
        "quick": lambda: timed(*PYTEST, "-p", "no:randomly"),
        "full": lambda: timed(*PYTEST, "-p", "no:randomly", "-n", "2", "--dist", "worksteal", "tests"),
        "make": lambda: timed("make", "test"),
        "shuffled": lambda seed: {"seed": int(seed), **timed(*PYTEST, f"--randomly-seed={seed}")},
    }
    what, *arguments = sys.argv[1:]
    found, record = parts[what](*arguments), known(PATH)
    record[what] = found if what == "sizes" else [*record.get(what, []), found]
    keep(PATH, record)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
