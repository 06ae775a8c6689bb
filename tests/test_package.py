"""What is uploaded: a wheel and a source archive that are complete, and metadata in order."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from bayesopt_chain.version import __version__
from tests.release import PLACEHOLDER, left_to_do

ROOT = Path(__file__).parents[1]
CHECKOUT = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a checkout: archives lack the tools' folders")


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.slow
@CHECKOUT
def test_the_wheel_and_the_source_archive_are_complete_and_the_archive_passes_tests_of_its_own(tmp_path):
    clone, out = tmp_path / "clone", tmp_path / "dist"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    # Kernels are compiled, and drawn from, by `make package`: here they would take most of the time.
    built = run("-m", "build", "--no-isolation", "--outdir", str(out), ".", cwd=clone, CXX="no-such-compiler")
    assert built.returncode == 0, built.stderr
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")

    checked = run("-m", "twine", "check", "--strict", str(wheel), str(archive), cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout

    names = set(zipfile.ZipFile(wheel).namelist())
    ours = {
        str(f.relative_to(clone))
        for f in (clone / "bayesopt_chain").rglob("*")
        if f.suffix in (".py", ".pyi", ".typed", ".cpp", ".hpp")
    }
    assert ours <= names, f"not in the wheel: {sorted(ours - names)[:5]}"
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]

    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = [packed.read(name).decode() for name in names if name.endswith("METADATA")]
    links = re.findall(r"\]\(([^)]*)\)", metadata)
    assert links and not [link for link in links if not link.startswith(("https://", "#"))]

    assert wheel.name.endswith("-py3-none-any.whl") and not [name for name in names if name.endswith(".so")]

    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"bayesopt_chain-{__version__}"
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=clone, text=True).split())
    missing = {name for name in tracked if not (unpacked / name).exists() and not name.startswith(".")}
    assert not missing, f"not in the source archive: {sorted(missing)[:5]}"
    tests = ("tests/random/test_stream.py", "--doctest-glob=*.md", "README.md")
    passed = run("-m", "pytest", "-q", "-n", "0", *tests, cwd=unpacked)
    assert passed.returncode == 0, passed.stdout[-2000:]


@CHECKOUT
def test_a_release_with_the_owners_placeholder_is_refused():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    waiting = [url for url in urls.values() if PLACEHOLDER in url]
    refused = [line for line in left_to_do() if PLACEHOLDER in line]
    assert bool(waiting) == bool(refused)
    assert not [line for line in left_to_do() if line.startswith("CITATION.cff: its version")]


def test_the_workflow_runs_the_oldest_and_the_newest_torch_that_are_admitted():
    text = (
        (ROOT / ".github" / "workflows" / "ci.yml").read_text()
        if (ROOT / ".github").exists()
        else pytest.skip("archive")
    )
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [pin for pin in pins if pin.startswith("torch>")]
    low, high = (bound.strip("torch>=<") for bound in torch.split(","))
    major, minor = high.split(".")
    assert f'torch: "{low}.*"' in text and f'torch: "{major}.{int(minor) - 1}.*"' in text
