"""Rooms that need a library which is not installed are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("botorch") else ["bayesopt_chain/botorch"]
