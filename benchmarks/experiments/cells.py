"""Runs that are made in cells, one for each method and seed: a finished cell is kept in a file and not made again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def folder_of(name: str, settings: Mapping[str, Any]) -> Path:
    """The folder of a run of these settings, made if absent, in the one that ``BAYESOPT_CHAIN_RUNS`` names (default ``runs``)."""
    key = hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:10]
    folder = Path(os.environ.get("BAYESOPT_CHAIN_RUNS") or "runs") / f"{name}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(dict(settings), indent=1) + "\n")
    return folder


def kept(path: Path, make: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The measures of a cell: read from the file ``path``, or made and then kept there, with the process time they took."""
    if not path.exists():
        start = time.process_time()
        cell = {"measures": make(), "seconds": round(time.process_time() - start, 1)}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".tmp")
        written.write_text(json.dumps(cell, indent=1) + "\n")
        written.replace(path)
    return json.loads(path.read_text())["measures"]
