"""``python -m benchmarks.size``: how large each room is, beside its aim and an earlier commit, and what a call runs through.

    python -m benchmarks.size                    53a4d5a beside the last commit, into ``benchmarks/results/size.{json,md}``
    python -m benchmarks.size --before REVISION

A room is one folder of the package or several, as ``ROOMS`` says; ``everything`` is the package with all of them. Counted are
files of Python and their statements without docstrings, which say how much code there is whatever its line breaks are.

Both revisions are read from git, so that neither has to be checked out. *Routes* are those of :mod:`benchmarks.route`, of this
checkout. An aim that is missed stands in ``MISSED`` with the reason; ``tests/core/test_size.py`` holds the others.
"""

from __future__ import annotations

import ast

from benchmarks.measure import RESULTS, command, git, keep, markdown
from benchmarks.route import measured

PATH = RESULTS / "size.json"
PACKAGE = "bayesopt_chain"
ROOMS: dict[str, tuple[int, tuple[str, ...]]] = {  # the aim, and where it is
    "chain": (1050, ("core", "matching")),
    "links": (1300, ("links", "compose.py", "schedules.py")),
    "samplers": (1050, ("samplers", "optimizers.py")),
    "engine": (1900, ("engine", "fused", "loop/capture", "capture")),
    "random": (500, ("random",)),
    "optim": (1150, ("optim",)),
    "loop": (1400, ("loop", "data", "gradients")),
    "likelihoods": (1100, ("likelihoods",)),
    "curvature": (2500, ("curvature", "precision")),
    "posterior": (2700, ("posterior", "fitting", "predict", "vi", "ekf")),
    "runs": (2200, ("runs",)),
    "diagnostics": (1700, ("diagnostics",)),
    "observables": (500, ("diagnostics/observables",)),
    "influence and acquisition": (450, ("posterior/_influence.py", "posterior/_acquisition.py")),
    "export": (250, ("posterior/export.py",)),
    "ensemble": (1200, ("ensemble",)),
    "distributed": (750, ("distributed",)),
    "testing": (550, ("testing",)),
    "adapters": (500, ("lora",)),
    "base and contrib": (950, ("",)),  # what is left
}
AIMS = {room: aim for room, (aim, _) in ROOMS.items()} | {"everything": 22_500}
FILES = 190
ROUTES = {  # files, and functions where there is an aim
    "update": (9, 35),
    "update, cosine": (9, 35),
    "adam_sghmc": (10, 50),
    "make_step": (11, 40),
    "optim, SGHMC": (6, 20),
    "optim, Adam": (8, 35),
    "sample": (25, None),
    "fit_laplace": (20, None),
    "posterior_ensemble": (35, None),
}
MISSED = {
    "everything": "the rooms below",
    "likelihoods": "ten likelihoods, with their own moments and draws in closed form, and what each refuses",
    "observables": "pilots that choose rate and momentum, and measure what chains cannot be trusted with",
    "base and contrib": "arguments and their messages (270), BoTorch, scikit-learn and plots (310)",
}


def files_of(revision: str) -> dict[str, str]:
    """The text of every source file of the package, by its path below the package."""
    paths = [path for path in git("ls-tree", "-r", "--name-only", revision, PACKAGE).split() if path.endswith(".py")]
    return {path.removeprefix(PACKAGE + "/"): git("show", f"{revision}:{path}") for path in paths}


def statements(text: str) -> int:
    """Statements of a file, without docstrings and other strings that stand alone.

    Example:
        >>> statements('X: Any = 1  # why\\n\\ndef f():\\n    "Say it."\\n    return X\\n')
        3
    """
    nodes = list(ast.walk(ast.parse(text)))
    alone = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return sum(isinstance(node, ast.stmt) for node in nodes) - sum(isinstance(value.value, str) for value in alone)


def room_of(path: str) -> str:
    """The room of a file: the one whose folder or file is the longest beginning of the path."""
    fits = {
        room: max((len(p) for p in at if not p or f"{path}/".startswith(f"{p}/")), default=-1)
        for room, (_, at) in ROOMS.items()
    }
    return max(fits, key=lambda room: fits[room])


def rooms(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Files and statements of each room, and of everything."""
    found = {room: {"files": 0, "statements": 0} for room in ROOMS}
    for path, text in files.items():
        room = found[room_of(path)]
        room["files"] += 1
        room["statements"] += statements(text)
    return found | {
        "everything": {kind: sum(room[kind] for room in found.values()) for kind in ("files", "statements")}
    }


def over(found: dict[str, dict[str, int]]) -> set[str]:
    """The rooms that are larger than their aims."""
    larger = {room for room, aim in AIMS.items() if found[room]["statements"] > aim}
    return larger | ({"files"} if found["everything"]["files"] > FILES else set())


if __name__ == "__main__":
    given = command(before="53a4d5a", after="HEAD")
    was, now = rooms(files_of(given.before)), rooms(files_of(given.after))
    routes = {name: measured(name) for name in ROUTES}
    keep(
        PATH,
        {
            "revisions": {when: git("rev-parse", "--short", it).strip() for when, it in vars(given).items()},
            "rooms": {room: {"before": was[room], "after": now[room]} for room in now},
            "routes": {name: {"files": len(r.files), "functions": len(r.functions)} for name, r in routes.items()},
        },
    )
    larger = over(now)
    of_rooms = [
        (room, *row.values(), AIMS[room], was[room]["statements"], MISSED[room] if room in larger else "")
        for room, row in now.items()
    ]
    of_routes = [
        (name, len(r.files), ROUTES[name][0], len(r.functions), ROUTES[name][1] or "none", MISSED.get(name, ""))
        for name, r in routes.items()
    ]
    tables = [
        markdown(("room", "files", "statements", "aim", "before", ""), of_rooms),
        markdown(("route", "files", "aim", "functions", "aim", ""), of_routes),
    ]
    PATH.with_suffix(".md").write_text("\n\n".join(tables) + "\n")
    print(*tables, sep="\n\n")
