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

    functions, lines = entered_and_run(whole)
    named = [
        c for c in functions if not c.co_name.startswith("<")
    ]  # comprehensions count with the function they stand in
    assert len(named) <= 107, sorted(f"{Path(c.co_filename).name}:{c.co_name}" for c in named)
    assert len(lines) <= 548


def test_the_core_does_not_grow():
    files = sorted((PACKAGE / "core").glob("*.py"))
    lines = sum(len(f.read_text().splitlines()) for f in files)
    statements = sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for f in files
        for node in ast.walk(ast.parse(f.read_text()))
    )
    assert lines <= 1685 and statements <= 950, (lines, statements)
