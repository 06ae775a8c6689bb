"""A package that loads each of its names when it is first asked for.

Importing everything at once takes half a second, most of it for diagnostics, curvature and posteriors that a training script
never names. So ``import bayesopt_chain`` reads only the list of names (its stub, ``__init__.pyi``, which type checkers and
editors read too, so that each name is written once), and ``bc.sghmc`` imports the file that has it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the stub beside it.

    Args:
        package: the package's ``globals()``. What was asked for is kept there, so that the second time costs nothing.
    """
    name = package["__name__"]
    homes, public = dict[str, tuple[str, str]](), list[str]()  # by name its module, and its name there; and ``__all__``
    for statement in ast.parse(Path(package["__file__"]).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            homes |= {name.asname or name.name: (statement.module, name.name) for name in statement.names}
        elif isinstance(statement, ast.Assign):
            public = ast.literal_eval(statement.value)  # __all__, the one assignment

    def load(attribute: str) -> Any:
        if attribute not in homes:
            raise AttributeError(
                f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=sys.modules[name]
            )
        module, there = homes[attribute]
        held = vars(import_module(module))
        found = held[there] if there in held else import_module(f"{module}.{there}")  # a name in a file, or a file
        package[attribute] = found
        return found

    return load, lambda: sorted({*package, *homes}), public
