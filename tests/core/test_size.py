"""What a reader has to go through to know what a call does: budgets of files, functions and statements.

Air, comments and docstrings are free. ``python -m benchmarks.route`` prints the figures, and which functions they are of.
"""

import ast
import json
from pathlib import Path

import pytest

import bayesopt_chain as bc
from benchmarks import size
from benchmarks.route import CALLS, measured

PACKAGE = Path(bc.__file__).parent
BUDGETS = {  # files, functions
    "update": (8, 31),
    "make_step": (11, 42),
    "sample": (34, 257),
    "optim": (6, 16),  # one file is the heat guard, one keeps Ctrl-C out of a step
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_call_stays_within_its_budget(name):
    found = measured(name)
    files, functions = BUDGETS[name]
    assert len(found.files) <= files, found.files
    assert len(found.functions) <= functions, found.functions


def test_every_budget_is_of_a_call_that_the_table_shows():
    assert set(BUDGETS) <= set(CALLS)


def statements(room: str) -> int:
    """The statements of a room, docstrings left out."""
    nodes = [node for f in sorted((PACKAGE / room).glob("*.py")) for node in ast.walk(ast.parse(f.read_text()))]
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in nodes
    )


def test_core_and_matching_stay_within_their_statements():
    assert statements("core") + statements("matching") <= 1057


def test_the_record_of_sizes_has_every_room_of_today():
    rooms = json.loads(size.RESULTS.read_text())["rooms"]
    today = {f.name for f in PACKAGE.iterdir() if (f / "__init__.py").exists()}
    assert today <= {name for name, row in rooms.items() if row["after"]["statements"]}


def test_sizes_are_counted_without_docstrings_and_comments():
    bare = "def f(x: Any) -> Any:\n    return x\n"
    told = 'def f(x: Any) -> Any:\n    """Say\n    it."""\n    # why\n    return x  # type: ignore\n'
    assert dict(size.counted("a.py", bare)) == {
        "files": 1,
        "statements": 2,
        "prose": 0,
        "lines": 2,
        "Any": 2,
        "ignores": 0,
    }
    assert dict(size.counted("a.py", told)) == {
        "files": 1,
        "statements": 2,
        "prose": 4,
        "lines": 5,
        "Any": 2,
        "ignores": 1,
    }
    assert dict(size.counted("a.cpp", "int x;\n")) == {"native": 1}
