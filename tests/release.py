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
    project, citation, changelog = (
        (root / name).read_text() for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    )
    version, date = re.findall(r"^## (\S+) \((.*)\)$", changelog, re.MULTILINE)[0]
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True).stdout
    owner = f"{PLACEHOLDER} stands for the owner's addresses; write the real ones"
    found = {
        f"pyproject.toml: {owner}": PLACEHOLDER in project,
        f"CITATION.cff: {owner}": PLACEHOLDER in citation,
        f"CHANGELOG.md: its first entry is not version {__version__}": version != __version__,
        f"CHANGELOG.md: version {__version__} has no date": date == "unreleased",
        f"CITATION.cff: its version is not {__version__}": f"version: {__version__}\n" not in citation,
        f"git: {len(changed.splitlines())} files differ from the last commit": bool(changed),
    }
    return [line for line, is_left in found.items() if is_left]


if __name__ == "__main__":
    sys.exit("\n".join(left_to_do()) or 0)
