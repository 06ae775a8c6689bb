"""The core does not grow, nor what one update runs through. Aims: 1,150 lines, 600 statements; 90 functions, 350 lines run."""

import ast
import sys
from pathlib import Path

import torch

import bayesopt_chain as bc

PACKAGE = Path(bc.__file__).parent


def entered_and_run(fn) -> tuple[set, set]:
    """Functions of the package that a call enters, and lines of it that run."""
    functions, lines = set(), set()

    def trace(frame, event, arg):
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return None
        if event == "call":
            functions.add(code)
        elif event == "line":
            lines.add((code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    finally:
        sys.settrace(before)
    return functions, lines


def test_building_initialising_and_updating_sghmc_runs_through_no_more_than_it_does():
    params = {"w": torch.zeros(3), "b": torch.zeros(2)}

    def whole():
        tx = bc.sghmc(0.1, temperature=0.01)
        tx.update({"w": torch.ones(3), "b": torch.ones(2)}, tx.init(params), params=params)

    whole()  # a kernel is loaded once in a process
    functions, lines = entered_and_run(whole)
    named = [
        c for c in functions if not c.co_name.startswith("<")
    ]  # comprehensions count with the function they stand in
    assert len(named) <= 90, sorted(f"{Path(c.co_filename).name}:{c.co_name}" for c in named)
    assert len(lines) <= 475


def lines_and_statements(room: str) -> tuple[int, int]:
    """Lines of a room, and statements without docstrings."""
    texts = [f.read_text() for f in sorted((PACKAGE / room).glob("*.py"))]
    statements = sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for text in texts
        for node in ast.walk(ast.parse(text))
    )
    return sum(len(text.splitlines()) for text in texts), statements


def test_the_core_and_the_matching_do_not_grow():
    core, matching = lines_and_statements("core"), lines_and_statements("matching")
    assert core[0] <= 900 and core[1] <= 514, core
    assert matching[0] <= 820 and matching[1] <= 405, matching
