"""Rooms that need a library which is not installed are not collected."""

from importlib.util import find_spec

NEEDS = {"bayesopt_chain/botorch": "botorch", "bayesopt_chain/sklearn.py": "sklearn"}

collect_ignore = [room for room, library in NEEDS.items() if not find_spec(library)]
