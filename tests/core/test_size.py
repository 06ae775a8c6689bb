"""The core stays small enough to be read in one sitting, and an update short enough to be followed."""

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


def test_building_initialising_and_updating_sghmc_stays_short():
    params = {"w": torch.zeros(3), "b": torch.zeros(2)}

    def whole():
        tx = bc.sghmc(0.1, temperature=0.01)
        tx.update({"w": torch.ones(3), "b": torch.ones(2)}, tx.init(params), params=params)

    functions, lines = entered_and_run(whole)
    assert len(functions) <= 90, sorted(f"{Path(c.co_filename).name}:{c.co_qualname}" for c in functions)
    assert len(lines) <= 350


def test_the_core_can_be_read_in_one_sitting():
    files = sorted((PACKAGE / "core").glob("*.py"))
    lines = sum(len(f.read_text().splitlines()) for f in files)
    statements = sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for f in files
        for node in ast.walk(ast.parse(f.read_text()))
    )
    assert lines <= 1150 and statements <= 600, (lines, statements)
