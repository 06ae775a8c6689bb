"""``python -m benchmarks.suite``: what the tests are and what they take, into ``benchmarks/results/tests.json``.

    python -m benchmarks.suite sizes [REVISION]     statements and tests by folder, of REVISION (53a4d5a) and of the last commit
    python -m benchmarks.suite quick | full         run a tier on two processes: seconds of wall and of processors, tests
    python -m benchmarks.suite make                 the same of ``make test``, which is all that the workflow runs
    python -m benchmarks.suite shuffled SEED        the quick tier in another order (pytest-randomly), in the same figures
    python -m benchmarks.suite coverage [REVISION]  lines and branches of the package that the quick tier runs (coverage.py)
    python -m benchmarks.suite mutants              change the package in each place of :data:`MUTANTS`, and run what may notice

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.measure import keep
from benchmarks.size import counted, git

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tests.json"
BEFORE = "53a4d5a"
TIERS = {"quick": [], "full": ["-n", "2", "--dist", "worksteal", "tests"]}
PLUGINS = {"shuffled": "pytest_randomly", "coverage": "pytest_cov"}
RANKS = "tests/distributed/test_"

# What is changed where it first stands, in which file of the package, from what to what, and the tests that are run.
MUTANTS = [
    (
        "a boundary of a piecewise schedule comes a step late", "schedules.py",
        "torch.where(t >= boundary, torch.full_like(t, value), out)",
        "torch.where(t > boundary, torch.full_like(t, value), out)", "tests/samplers/test_schedules.py",
    ),
    (
        "where chains do not divide, one rank too many has one more", "distributed/ranks.py",
        "each + (rank < more))", "each + (rank <= more))", f"{RANKS}steps.py -k over_ranks",
    ),
    (
        "two neighbouring chains have one key", "distributed/ranks.py",
        "^ splitmix64(~chain &", "^ splitmix64(~(chain // 2) &", f"{RANKS}steps.py -k keys",
    ),
    (
        "pieces of a checkpoint always cover it", "distributed/checkpoint.py",
        "return not any(corners.values())", "return True", f"{RANKS}damaged_checkpoints.py",
    ),
    (
        "digests of a checkpoint are not compared", "distributed/checkpoint.py",
        "or _sha256(folder / file) != digests.get(file)", "", f"{RANKS}damaged_checkpoints.py",
    ),
    (
        "the curvature of a Bernoulli likelihood is p, not p (1 - p)", "likelihoods/_classes.py",
        "return outputs.sigmoid() * (-outputs).sigmoid()", "return outputs.sigmoid()", "tests/likelihoods",
    ),
    (
        "a dense precision draws by the inverse of L, not of its transpose", "precision/_dense.py",
        "torch.linalg.solve_triangular(self.factor.mT, columns, upper=True)",
        "torch.linalg.solve_triangular(self.factor, columns, upper=False)", "tests/precision",
    ),
    (
        "variances of a Kronecker precision by |v|, not v^2", "precision/_kronecker.py",
        "_times(v.square(), values.mT)", "_times(v.abs(), values.mT)", "tests/precision",
    ),
    (
        "a run draws a step early", "runs/run.py",
        "(step - self.burn_in) % self.thinning == 0", "(step - self.burn_in) % self.thinning == self.thinning - 1",
        "tests/runs/test_sample.py",
    ),
    (
        "two keys under one averaged gradient are not seen", "distributed/witness.py",
        "if other[1] != mine[1] and other[2] != mine[2]:", "if other[1] == mine[1] and other[2] != mine[2]:",
        f"{RANKS}engines.py -k ddp",
    ),
    (
        "the rank that failed first is not named", "distributed/ranks.py",
        "if first != mine and", "if first == mine and", f"{RANKS}witness.py -k named",
    ),
    (
        "IVON's momentum takes a gradient with the weight of the past", "optim/ivon.py",
        "v.mul_(beta1).add_(g, alpha=1.0 - beta1)", "v.mul_(beta1).add_(g, alpha=beta1)", "tests/optim/test_ivon.py",
    ),
]  # fmt: skip


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


def pytest(*arguments: str, cwd: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    """What pytest says, run on the package of a folder."""
    path = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, **options)


def sizes(revision: str = BEFORE) -> dict[str, Any]:
    """Statements and tests, all and those of the quick tier, by folder and in all."""
    found = {}
    for name, commit in (("before", revision), ("after", git("rev-parse", "--short", "HEAD").strip())):
        statements, tests = Counter[str](), {"tests": Counter[str](), "quick": Counter[str]()}
        for path in git("ls-tree", "-r", "--name-only", commit, "tests").split():
            if path.endswith(".py"):
                statements[folder(path)] += counted(path, git("show", f"{commit}:{path}"))["statements"]
        with checked_out(commit) as tree:
            for tier, marks in (("tests", ""), ("quick", "not slow")):
                said = pytest("--collect-only", "-m", marks, "-p", "no:randomly", "tests", cwd=tree).stdout
                tests[tier].update(folder(line) for line in said.splitlines() if "::" in line)
        rows = {"statements": statements, **tests}
        folders = {each: {kind: row[each] for kind, row in rows.items()} for each in sorted(statements)}
        found[name] = {"revision": commit, **{kind: row.total() for kind, row in rows.items()}, "folders": folders}
    return found


def make() -> subprocess.CompletedProcess[str]:
    """What ``make test`` says."""
    return subprocess.run(["make", "test"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def timed(run: Callable[..., subprocess.CompletedProcess[str]], *arguments: str) -> dict[str, Any]:
    """A run of pytest: seconds of wall and of processors, and how it ended."""
    load, start, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run(*arguments)
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


def coverage(revision: str = "HEAD") -> dict[str, Any]:
    """Lines and branches of the package that the quick tier runs in its own process."""
    with checked_out(revision) as tree, tempfile.TemporaryDirectory() as out:
        report = ["--cov=bayesopt_chain", "--cov-branch", f"--cov-report=json:{out}/cov.json"]
        pytest("-n", "2", "-m", "not slow", "-p", "no:randomly", *report, "tests", cwd=tree)
        totals = json.loads(Path(out, "cov.json").read_text())["totals"]
    kept = ("covered_lines", "num_statements", "covered_branches", "num_branches", "percent_covered")
    return {"revision": git("rev-parse", "--short", revision).strip(), **{name: totals[name] for name in kept}}


def mutants() -> list[dict[str, Any]]:
    """Each mutant, whether a test failed, and the first that did."""
    found = []
    with checked_out("HEAD") as tree:
        for what, file, old, new, tests in MUTANTS:
            path = tree / "bayesopt_chain" / file
            text = path.read_text()
            assert old in text, what
            path.write_text(text.replace(old, new, 1))
            done = pytest("-x", "-m", "", "-p", "no:randomly", *tests.split(), cwd=tree)
            path.write_text(text)
            (by,) = re.findall(r"^FAILED (\S+)", done.stdout, re.M)[:1] or [None]
            found.append({"what": what, "file": file, "caught": done.returncode == 1, "by": by})
    return found


def main(what: str, *arguments: str) -> None:
    """Add one part to the record."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if find_spec(PLUGINS.get(what, "pytest")) is None:
        sys.exit(f"{what} needs a plugin: pip install {PLUGINS[what].replace('_', '-')}")
    if what in TIERS:
        record.setdefault(what, []).append(timed(pytest, "-p", "no:randomly", *TIERS[what]))
    elif what == "make":
        record.setdefault(what, []).append(timed(make))
    elif what == "shuffled":
        seed = arguments[0]
        record.setdefault(what, []).append({"seed": int(seed), **timed(pytest, f"--randomly-seed={seed}")})
    elif what == "coverage":
        record.setdefault(what, []).append(coverage(*arguments))
    else:
        record[what] = {"sizes": sizes, "mutants": mutants}[what](*arguments)
    keep(RESULTS, record)
    print(json.dumps(record[what], indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
