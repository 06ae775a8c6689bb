"""Refusing arguments of the wrong kind by their names, before anything happens."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MOST = 1 << 53  # what an index can count to


def require_whole(who: str, name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number, too small, or so large that nothing could count to it.

    Raises:
        ValueError: naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST:
        raise ValueError(f"{who}: {name} must be a whole number, at least {least}, got {repr(value)[:100]}")


def require_callable(who: str, name: str, value: Any, what: str) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: naming the argument.
    """
    if not callable(value):
        raise TypeError(f"{who}: {name} must be {what}, got {type(value).__name__}")


def require_one_of(who: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse another word than these.

    Raises:
        ValueError: naming the argument.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{who}: {name} is {' or '.join(map(repr, choices))}, got {repr(value)[:100]}")


def require_iterable(who: str, name: str, value: Any, what: str) -> Iterable[Any]:
    """The argument, if it can be gone through.

    Raises:
        TypeError: naming the argument.
    """
    if not hasattr(value, "__iter__") or isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{who}: {name} must be {what}, got {type(value).__name__}")
    return value


def paths_of(who: str, name: str, value: Any) -> list[Path]:
    """The directories that a path, a pattern, or a list of them names; the name of what is there is no pattern.

    Raises:
        TypeError: what is no path.
    """
    given = value if isinstance(value, (list, tuple)) else [value]
    for one in given:
        if not isinstance(one, (str, os.PathLike)) or isinstance(one, bytes):
            raise TypeError(
                f"{who}: {name} must be a directory, a pattern, or a list of them, got {type(one).__name__}"
            )
    named = [[g] if os.path.lexists(g) or not glob.has_magic(g) else sorted(glob.glob(g)) for g in map(str, given)]
    return [Path(p) for paths in named for p in paths]
