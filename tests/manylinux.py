"""``python -m tests.manylinux FOLDER``: wheels of the folder that hold libraries are made fit for every Linux they run on.

auditwheel copies the OpenMP library into the wheel and names the oldest glibc that will do. A wheel of Python files is left.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    for wheel in folder.glob("*-linux_*.whl"):
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
        subprocess.run(command, check=True)
        wheel.unlink()


if __name__ == "__main__":
    main()
