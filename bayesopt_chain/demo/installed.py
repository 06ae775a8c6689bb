"""``python -m bayesopt_chain.demo.installed``: the packages of this environment with their sizes on disk."""

from __future__ import annotations

from importlib.metadata import Distribution, distributions
from pathlib import Path


def size_of(package: Distribution) -> int:
    """Bytes of the files that the package's own list names and that are there."""
    files = (Path(str(package.locate_file(name))) for name in package.files or ())
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> None:
    """Print a line for each package, the largest first, and the sum."""
    sizes = {f"{p.metadata['Name']} {p.version}": size_of(p) for p in distributions()}
    for name, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        print(f"  {size / 1e6:8.1f} MB  {name}")
    print(f"  {sum(sizes.values()) / 1e6:8.1f} MB  {len(sizes)} packages")


if __name__ == "__main__":
    main()
