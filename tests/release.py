"""``python -m tests.release``: what is left to do before this version is uploaded. Nothing is printed when nothing is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bayesopt_chain.version import __version__

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "repository.invalid"


def left_to_do(root: Path = ROOT) -> list[str]:
    """One sentence for each thing that stands in the way of a release."""
    found = []
    for name in ("pyproject.toml", "CITATION.cff"):
        if PLACEHOLDER in (root / name).read_text():
            found.append(f"{name}: {PLACEHOLDER} stands for the owner's addresses; write the real ones")
    changelog = (root / "CHANGELOG.md").read_text()
    headline = re.search(r"^## (\S+) \((.*)\)$", changelog, re.MULTILINE)
    if headline is None or headline[1] != __version__:
        found.append(f"CHANGELOG.md: its first entry is not version {__version__}")
    elif headline[2] == "unreleased":
        found.append(f"CHANGELOG.md: version {__version__} has no date")
    if f"version: {__version__}\n" not in (root / "CITATION.cff").read_text():
        found.append(f"CITATION.cff: its version is not {__version__}")
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout
    if changed:
        found.append(f"git: {len(changed.splitlines())} files differ from the last commit")
    return found


if __name__ == "__main__":
    every = left_to_do()
    print(*every, sep="\n")
    sys.exit(bool(every))
