"""What is uploaded: a wheel and a source archive that are complete, and metadata in order."""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import bayesopt_chain as bc
from bayesopt_chain.version import __version__
from benchmarks.measure import RESULTS, known
from tests.forked import forked
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
    assert bool(waiting) == bool([line for line in left_to_do() if PLACEHOLDER in line])
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


# What a user may type, and what ``import bayesopt_chain`` costs and leaves for later


ASKED = [
    "bc.optim.SGHMC; bc.sample; bc.fit_laplace; bc.diagnostics.doctor",
    "tx = bc.links.add_momentum(0.9); p = torch.zeros(2); s = tx.init(p); tx.update(p, s, params=p); tx.chain(tx)",
    "bc.posterior.train_by_evidence",
    "tx = bc.sghmc(0.1, temperature=0.1); p = torch.ones(2, 3)\n"
    "chains = bc.parallel(bc.make_step(lambda p, b: (p**2).sum(), tx), 2); chains(p, chains.init(tx, p), ())",
    "tx, p = bc.sgld(0.1, temperature=1.0), [torch.zeros(300)]; tx.update(p, tx.init(p), params=p)",
]
NOTHING, WITHOUT_TRITON = "", "sys.modules['triton'] = None; [getattr(bc, name) for name in bc.__all__]"


@functools.cache
def imported_by() -> dict[str, set[str]]:
    """What ``import bayesopt_chain`` and each of some statements behind it import, beside torch and torchopt."""
    program = "import sys, torch; known = {{*sys.modules}}; import bayesopt_chain as bc; {}\nprint(*({{*sys.modules}} - known))"
    statements = [NOTHING, WITHOUT_TRITON, *ASKED]
    said = forked(*map(program.format, statements))
    return {statement: {*names.split()} for statement, names in zip(statements, said, strict=True)}


def test_importing_the_package_loads_no_room_of_it_and_all_names_can_be_listed():
    ours = {name for name in imported_by()[NOTHING] if name.startswith("bayesopt")}
    assert ours == {"bayesopt_chain", "bayesopt_chain._lazy"}
    assert {*bc.__all__, "__version__"} <= {*dir(bc)}
    with pytest.raises(AttributeError, match="no attribute 'sghmcc'"):
        bc.sghmcc  # noqa: B018


def test_all_names_are_there_without_triton():
    assert "bayesopt_chain.engine" in imported_by()[WITHOUT_TRITON]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked_for_first_is_there_and_loads_neither_tensors_over_ranks_nor_a_compiler(asked):
    """Inductor's code cache, which a first draw once loaded, took 164 MB and 3.8 seconds of processor time."""
    heavy = {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "sympy", "arviz", "sklearn", "pandas"}
    assert not heavy & imported_by()[asked]


def test_the_record_of_the_imports_time_is_within_three_tenths_of_a_second():
    """The names of a loop included, once Python has compiled them."""
    rows = known(RESULTS / "imports.json")["seconds"]
    assert rows.keys() == {"import bayesopt_chain", "and the names of a loop"}
    times = [row["warm"]["wall"][1] for row in rows.values()] + [rows["import bayesopt_chain"]["cold"]["wall"][1]]
    assert max(times) < 0.3


NAMESPACES = [name for name in bc.__all__ if inspect.ismodule(getattr(bc, name))]
OBJECTS = [name for name in bc.__all__ if name not in NAMESPACES]


def test_the_root_has_at_most_78_names_four_of_them_links_and_nothing_else():
    assert len(bc.__all__) == len(set(bc.__all__)) <= 78
    public = {name for name in vars(bc) if not name.startswith("_") and not inspect.ismodule(getattr(bc, name))}
    assert public == set(OBJECTS)
    both = {name for name in bc.links.__all__ if name in bc.__all__}
    assert both == {"add_momentum", "inject_langevin_noise", "scale_by_neg_lr", "scale_by_preconditioner"}
    assert all(getattr(bc, name) is getattr(bc.links, name) for name in both)


def test_every_namespace_has_a_page_in_the_reference():
    """The pages are made from each ``__all__``, so that no name can be missing on one."""
    conf = (Path(__file__).parents[1] / "docs" / "conf.py").read_text()
    (titles,) = re.findall(r"^TITLES = (\{.*?^\})", conf, re.M | re.S)
    assert set(NAMESPACES) <= set(ast.literal_eval(titles))


def test_a_namespace_says_what_it_is_and_names_what_it_holds():
    for name in NAMESPACES:
        module = getattr(bc, name)
        assert module.__doc__ and module.__all__, f"bc.{name} wants a docstring and an __all__"
        assert len(module.__all__) == len(set(module.__all__))
        for member in module.__all__:
            assert not member.startswith("_") and hasattr(module, member), f"bc.{name}.{member}"
            assert inspect.getdoc(getattr(module, member)), f"bc.{name}.{member} wants a docstring"
