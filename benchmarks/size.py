"""``python -m benchmarks.size``: how large each room of the package is, and how large it was at an earlier commit.

    python -m benchmarks.size                    a74a265 beside the last commit, into ``benchmarks/results/size.json``
    python -m benchmarks.size --before REVISION

A room is a folder of the package; ``.`` are the files beside them. For each it counts

    files        of Python
    statements   without docstrings, which say how much code there is whatever its line breaks are
    prose        lines of docstrings and comments
    lines        of the files, everything
    native       lines of C++ and CUDA kernels
    Any          how often the type ``Any`` is written
    ignores      of the type checker

Both revisions are read from git, so that neither has to be checked out. The row ``store of runs`` compares what one store
replaced: at a74a265 the files of ``loop/`` that sampled, stored and read draws, now the room ``runs/``, which has identities,
checksums, rescue, compaction, lazy reading and the collector besides.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath

from benchmarks.measure import keep

RESULTS = Path(__file__).parent / "results" / "size.json"
PACKAGE = "bayesopt_chain"
COLUMNS = ("files", "statements", "prose", "lines", "native", "Any", "ignores")
STORE_BEFORE = ("sample", "store", "spread", "layouts", "draws", "checkpoint", "interrupts")  # of loop/ at a74a265


def git(*arguments: str) -> str:
    """What git says to ``arguments``, in the folder of this file's repository."""
    return subprocess.run(
        ["git", "-C", str(Path(__file__).parents[1]), *arguments], check=True, capture_output=True, text=True
    ).stdout


def files_of(revision: str) -> dict[str, str]:
    """The text of every source file of the package, by its path below the package."""
    paths = git("ls-tree", "-r", "--name-only", revision, PACKAGE).split()
    kept = [p for p in paths if PurePosixPath(p).suffix in (".py", ".cpp", ".hpp", ".cu", ".cuh", ".h")]
    return {p.removeprefix(PACKAGE + "/"): git("show", f"{revision}:{p}") for p in kept}


def counted(path: str, text: str) -> Counter[str]:
    """The figures of one file.

    Example:
        >>> text = 'X: Any = 1  # why\\n\\ndef f():\\n    "Say it."\\n    return X\\n'
        >>> [(name, counted("a.py", text)[name]) for name in ("statements", "prose", "lines", "Any")]
        [('statements', 3), ('prose', 2), ('lines', 5), ('Any', 1)]
    """
    lines = text.count("\n")
    if not path.endswith(".py"):
        return Counter(native=lines)
    nodes = list(ast.walk(ast.parse(text)))
    said = [
        node
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    return Counter(
        files=1,
        statements=sum(isinstance(node, ast.stmt) for node in nodes) - len(said),
        prose=sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in said) + len(comments),
        lines=lines,
        Any=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        ignores=sum("type: ignore" in t.string or "pyright: ignore" in t.string for t in comments),
    )


def rooms(files: dict[str, str]) -> dict[str, Counter[str]]:
    """The figures of each room."""
    found: dict[str, Counter[str]] = {}
    for path, text in files.items():
        room = path.split("/")[0] if "/" in path else "."
        found.setdefault(room, Counter()).update(counted(path, text))
    return found


def total(some: list[Counter[str]]) -> dict[str, int]:
    """The sum of some figures, with zeros."""
    both = sum(some, Counter[str]())
    return {name: both[name] for name in COLUMNS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="a74a265")
    parser.add_argument("--after", default="HEAD")
    arguments = parser.parse_args()
    before, after = files_of(arguments.before), files_of(arguments.after)
    was, now = rooms(before), rooms(after)
    table = {
        room: {"before": total([was.get(room, Counter())]), "after": total([now.get(room, Counter())])}
        for room in sorted(was | now)
    }
    table["everything"] = {"before": total(list(was.values())), "after": total(list(now.values()))}
    store = [
        counted(f"loop/{name}.py", before[f"loop/{name}.py"]) for name in STORE_BEFORE if f"loop/{name}.py" in before
    ]
    table["store of runs"] = {"before": total(store), "after": total([now.get("runs", Counter())])}
    names = {
        "before": git("rev-parse", "--short", arguments.before),
        "after": git("rev-parse", "--short", arguments.after),
    }
    record = {"revisions": {when: name.strip() for when, name in names.items()}, "rooms": table}
    keep(RESULTS, record)
    print(f"{'':14}" + "".join(f"{name:>14}" for name in COLUMNS))
    for room, row in table.items():
        print(f"{room:14}" + "".join(f"{row['before'][name]:>7}{row['after'][name]:>7}" for name in COLUMNS))


if __name__ == "__main__":
    main()
