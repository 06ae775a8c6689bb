"""``python -m tests.manylinux FOLDER``: wheels of the folder that hold libraries are made fit for every Linux they run on.

auditwheel copies the OpenMP library into the wheel and names the oldest glibc that will do. A wheel of Python files is left.
Before that each is unpacked and drawn from without a compiler: it holds a library for each kernel and each level of processor,
loads one of them, and draws what the checkout draws.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bayesopt_chain.random.compiled import LEVELS

DRAW = """
import torch, bayesopt_chain as bc
torch.manual_seed(0)
tx, p = bc.sghmc(0.1, 0.9, temperature=1.0), [torch.zeros(1000)]
state = tx.init(p)
for _ in range(3):
    updates, state = tx.update(p, state, params=p)
print(updates[0].tolist())
"""


def drawn(root: Path, **environment: str) -> str:
    """What the package in a folder draws."""
    command = [sys.executable, "-W", "error", "-c", DRAW]
    return subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    ).stdout


def checked(wheel: Path) -> None:
    """Refuse a wheel that lacks a library, or draws something else than the checkout does."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        kernels, libraries = (sum(name.endswith(end) for name in names) for end in (".cpp", ".so"))
        levels = len(LEVELS) if platform.machine() == "x86_64" else 1
        if libraries != kernels * levels:
            raise SystemExit(f"{wheel.name}: {libraries} libraries for {kernels} kernels at {levels} levels")
        packed.extractall(folder)
        if drawn(Path(folder), CXX="no-such-compiler", PYTHONPATH="") != drawn(Path(__file__).parents[1]):
            raise SystemExit(f"{wheel.name}: draws other numbers than the checkout")


def main() -> None:
    folder = Path(sys.argv[1])
    for wheel in folder.glob("*-linux_*.whl"):
        checked(wheel)
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
        subprocess.run(command, check=True)
        wheel.unlink()


if __name__ == "__main__":
    main()
