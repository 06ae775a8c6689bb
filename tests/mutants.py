"""Mutants by rule: the package with one expression changed, which the nearest tests have to notice.

    python -m tests.mutants [--rooms core matching] [--each 10] [--seed 0] [--anew]
    python -m tests.mutants --gone

``--anew`` forgets the record, and begins with the last commit. Another ``--seed`` adds mutants of the last commit, and
``--gone`` makes those again, in the last commit, that were noticed by a test which is no longer there, or by none; their rows
have that commit. Of each room ``--each`` expressions
are drawn at random: a sum becomes a difference, ``<`` becomes ``<=``, ``and`` becomes ``or``, a number grows, a sign or a
``not`` goes. Messages, annotations and imports are left alone. Each mutant is made in a copy of what is committed, so that the
tree is never touched, and the quick tests of its room run on it until one fails, first those of the files that name most of
what the changed file defines, last the slow ones of these files. The table, with those that lived, goes to
``benchmarks/results/mutants.json`` after each; a second call goes on where the first one stopped, at the same commit.

One that lives is a test that is missing, or a change that makes no difference.
"""

from __future__ import annotations

import ast
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import command, keep, known

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
TESTS = {
    "core": ["tests/core", "tests/test_laws.py"],
    "matching": ["tests/matching", "tests/core", "tests/test_laws.py"],
    "engine": [
        "tests/engine",
        "tests/random",
        "tests/test_laws.py",
        "tests/samplers",
        "tests/loop/test_parallel.py",
        "tests/test_roads.py",
    ],
    "optim": ["tests/optim", "tests/diagnostics/test_doctor.py", "tests/distributed"],
    "likelihoods": ["tests/likelihoods", "tests/posterior"],
    "posterior": ["tests/posterior"],
    "runs": ["tests/runs", "tests/distributed"],
}
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert, ast.arguments, ast.AnnAssign)
SECONDS = 1800  # a mutant that runs longer than that has been noticed too
FIRST = 4  # files of tests that run before the others of the room are even read


class Site(NamedTuple):
    """An expression that a rule changes: where it stands, and what becomes of it."""

    file: str
    number: int
    line: int
    change: str


def changed(node: ast.AST) -> ast.AST | None:
    """What the rules make of a node; ``None``: nothing."""
    if isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in SWAPS:
        return type(node)(**{**vars(node), "op": SWAPS[type(node.op)]()})
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.IfExp):
        return ast.IfExp(node.test, node.orelse, node.body)
    return None


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every expression that a rule changes: its parent, the field and the index there, and the node."""
    for name, value in ast.iter_fields(tree):
        for i, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, LEFT_ALONE) or name in ("annotation", "returns"):
                continue
            if isinstance(node, ast.expr) and changed(node) is not None:
                yield tree, name, i, node
            yield from places(node)


def sites(file: Path, root: Path) -> list[Site]:
    """All mutants of a file. Of equal changes on one line all but the first say which they are."""
    at, found, before = file.relative_to(root).as_posix(), list[Site](), Counter[tuple[int, str]]()
    for k, (_, _, _, node) in enumerate(places(ast.parse(file.read_text()))):
        change = f"{ast.unparse(node)} -> {ast.unparse(changed(node))}"  # type: ignore[arg-type]
        before[node.lineno, change] += 1  # type: ignore[attr-defined]
        which = f", the {nth}. of the line" if (nth := before[node.lineno, change]) > 1 else ""  # type: ignore[attr-defined]
        found.append(Site(at, k, node.lineno, change + which))  # type: ignore[attr-defined]
    return found


def mutated(text: str, number: int) -> str:
    """The text of a file with one of its expressions changed."""
    tree = ast.parse(text)
    parent, name, i, node = list(places(tree))[number]
    if i is None:
        setattr(parent, name, changed(node))
    else:
        getattr(parent, name)[i] = changed(node)
    return ast.unparse(ast.fix_missing_locations(tree))


def nearest(copy: Path, changed_file: str, tests: list[str]) -> list[str]:
    """The files of tests of a room, first those that name most of what a file of the package defines."""
    path = Path(changed_file)
    tree = ast.parse((copy / changed_file).read_text())
    named = (ast.FunctionDef, ast.ClassDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, named) and not node.name.startswith("__")}
    names |= {path.stem.strip("_")}

    def score(file: Path) -> int:
        alike = 3 * (path.stem.strip("_") in file.stem)
        return alike + len(names & set(re.findall(r"\w+", file.read_text())))

    given = [copy / test for test in tests]
    files = [file for test in given for file in ([test] if test.is_file() else sorted(test.rglob("test_*.py")))]
    return [file.relative_to(copy).as_posix() for file in sorted(files, key=score, reverse=True)]


def failures(copy: Path, files: list[str], *options: str, tier: str = "not slow") -> list[str]:
    """Tests of a tier of these files that fail in a copy of the repository; how pytest ended, where none of them says."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", tier, "-p", "no:cacheprovider", "-n", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *files], cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    found = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found or (
        [f"pytest ended with {done.returncode}"] if done.returncode not in (0, 5) else []
    )  # 5: no test of the tier


def noticed(copy: Path, site: Site, tests: list[str], ill: list[str]) -> str:
    """Which test fails first on a mutant, of those that pass without it; empty where none does."""
    file, ordered = copy / site.file, nearest(copy, site.file, tests)
    text = file.read_text()
    try:
        file.write_text(mutated(text, site.number))
        for part, tier in ((ordered[:FIRST], "not slow"), (ordered[FIRST:], "not slow"), (ordered[:FIRST], "slow")):
            if part and (found := failures(copy, part, "-x", *(f"--deselect={test}" for test in ill), tier=tier)):
                return found[0]
    except subprocess.TimeoutExpired:
        return "runs without end"
    finally:
        file.write_text(text)
    return ""


def is_gone(copy: Path, by: str) -> bool:
    """Whether a copy of the repository lacks the test that noticed a mutant."""
    file, _, name = by.partition("::")
    name = name.partition("[")[0].split("::")[-1]
    return bool(name) and not ((copy / file).exists() and name in (copy / file).read_text())


def tried(copy: Path, site: Site, tests: list[str], ill: list[str]) -> dict[str, Any]:
    """The row of a mutant."""
    start = time.monotonic()
    by = noticed(copy, site, tests, ill)
    print(f"{site.file}:{site.line}: {site.change}: {by or 'LIVES'}", flush=True)
    row = {"where": f"{site.file}:{site.line}", "change": site.change, "noticed by": by}
    return {**row, "seconds": round(time.monotonic() - start)}


def write(record: dict[str, Any]) -> None:
    """Keep the table with how many of its mutants lived."""
    record["lived"] = sum(not row["noticed by"] for row in record["mutants"])
    keep(RESULTS, record)


def main() -> None:
    """Draw mutants, run the tests of each, and keep the table."""
    args = command(rooms=list(TESTS), each=10, seed=0, anew=False, gone=False)
    git = lambda *what: subprocess.run(["git", *what], cwd=ROOT, check=True, capture_output=True)  # noqa: E731
    commit = git("rev-parse", "--short", "HEAD").stdout.decode().strip()
    record: dict[str, Any] = known(RESULTS)
    if args.anew or not record:
        record = {"commit": commit, "seed": args.seed, "mutants": []}
    of_the_row = {} if args.seed == record["seed"] else {"commit": commit, "seed": args.seed}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        archive = git("archive", commit if args.gone or of_the_row else record["commit"]).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        if args.gone:
            again(record, copy, commit)
            return
        for room in args.rooms:
            ill = record.setdefault("fail without a mutant", {})
            if room not in ill:
                ill[room] = failures(copy, TESTS[room])
            every = [
                site for file in sorted((copy / "bayesopt_chain" / room).rglob("*.py")) for site in sites(file, copy)
            ]
            for site in random.Random(f"{room} {args.seed}").sample(every, min(args.each, len(every))):
                where = f"{site.file}:{site.line}"
                if any(row["where"] == where and row["change"] == site.change for row in record["mutants"]):
                    continue
                record["mutants"].append(tried(copy, site, TESTS[room], ill[room]) | of_the_row)
                write(record)


def again(record: dict[str, Any], copy: Path, commit: str) -> None:
    """Make the mutants that lived, or whose test has gone, anew in a copy of a commit, where their lines are as they were.

    Of those that lived, the ones whose lines are no longer there go.
    """
    ill = dict[str, list[str]]()  # by room, the tests that fail without a mutant
    for row in [*record["mutants"]]:
        if row["noticed by"] and not is_gone(copy, row["noticed by"]):
            continue
        file, _, number = row["where"].partition(":")
        before = subprocess.check_output(["git", "show", f"{row.get('commit', record['commit'])}:{file}"], cwd=ROOT)
        line = before.decode().splitlines()[int(number) - 1]
        now = (copy / file).read_text().splitlines() if (copy / file).exists() else []
        there = sites(copy / file, copy) if now else ()  # in a file that is gone, too, there are none
        alike = [x for x in there if x.change == row["change"] and now[x.line - 1] == line]
        if not alike:
            print(f"{row['where']}: {row['change']} is no longer there in {commit}", flush=True)
            if not row["noticed by"]:
                record["mutants"].remove(row)
            continue
        if (room := file.split("/")[1]) not in ill:
            ill[room] = failures(copy, TESTS[room])
        anew = tried(copy, alike[0], TESTS[room], ill[room])
        record["mutants"][record["mutants"].index(row)] = row | anew | {"commit": commit}
        write(record)


if __name__ == "__main__":
    main()
