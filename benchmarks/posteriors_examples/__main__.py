"""``python -m benchmarks.posteriors_examples [name ...]``: lines, seconds and numbers of both, side by side.

Lines are those of the two functions, without blank ones, docstrings and imports.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import torch

NAMES = ("league", "double_well", "pima", "yacht", "continual_lora")


def example(name: str) -> Any:
    """The module of an example."""
    return importlib.import_module(f"benchmarks.posteriors_examples.{name}")


def lines(function: Callable[..., Any]) -> int:
    """Lines of code of a function, as formatted."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = tree.body[0]
    assert isinstance(body, ast.FunctionDef)
    counted = [node for node in body.body if not isinstance(node, ast.Import | ast.ImportFrom)][1:]
    source = inspect.getsource(function).splitlines()
    return sum(bool(source[i].strip()) for node in counted for i in range(node.lineno - 1, node.end_lineno or 0))


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        module, results, seconds = example(name), [], []
        problem = module.data()
        for function in (module.theirs, module.ours):
            torch.manual_seed(1)
            began = time.perf_counter()
            results.append(function(problem))
            seconds.append(time.perf_counter() - began)
        print(f"{name:45s} {'posteriors':>12s} {'ours':>12s} {'may differ by':>14s}")
        print(f"  {'lines':43s} {lines(module.theirs):12d} {lines(module.ours):12d}")
        print(f"  {'seconds':43s} {seconds[0]:12.2f} {seconds[1]:12.2f}")
        for label, (a, b, apart) in module.compare(*results).items():
            print(f"  {label:43s} {a:12.4f} {b:12.4f} {apart:14.4g}{'' if abs(a - b) <= apart else '   DIFFERS'}")
