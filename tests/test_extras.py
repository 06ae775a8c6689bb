"""Packages that come with an extra: a call that needs one which is missing says so first, with the line that installs it."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc

ROOT = Path(bc.__file__).parent
FILE = ROOT.parent / "pyproject.toml"
PROJECT = tomllib.loads(FILE.read_text())["project"] if FILE.exists() else None
BRINGS = {"arviz-stats": "arviz_stats", "scikit-learn": "sklearn", "curvlinops-for-pytorch": "curvlinops"}
FOR_USERS = {
    "runs",
    "diagnostics",
    "metrics",
    "plot",
    "botorch",
    "sklearn",
    "curvlinops",
    "testing",
    "trainers",
    "demo",
}


def never(*args, **kwargs):
    raise AssertionError("ran before the missing package was named")


def a_run(**options):
    tx, w = bc.sghmc(0.1, temperature=0.1), torch.zeros(2)
    step = bc.make_step(never, tx)
    return bc.sample(step, w, tx.init(w), None, steps=2, **options)


class Lazy:
    """Batches of which no more than the first may be looked at."""

    def __iter__(self):
        yield torch.zeros(4, 2), torch.zeros(4, 1)
        never()


def a_fit():
    return bc.fit_laplace(torch.nn.Linear(2, 1).eval(), bc.likelihoods.gaussian(), Lazy(), progress=True)


DRAWS = bc.Draws.from_trees([{"w": torch.randn(2)} for _ in range(8)])
PROBABILITIES = torch.tensor([[0.9, 0.1]]).log()
CALLS = {
    ("tqdm", "runs", "sample"): lambda _: a_run(progress=True),
    ("tqdm", "runs", "fit_laplace"): lambda _: a_fit(),
    ("arviz_stats", "diagnostics", "r_hat"): lambda _: bc.diagnostics.r_hat(DRAWS),
    ("arviz_stats", "diagnostics", "ess"): lambda _: bc.diagnostics.ess(DRAWS),
    ("arviz_stats", "diagnostics", "doctor"): lambda _: bc.diagnostics.doctor(DRAWS, of=never),
    ("scipy", "diagnostics", "doctor"): lambda _: bc.diagnostics.doctor(DRAWS, of=never),
    ("arviz", "diagnostics", "to_arviz"): lambda _: DRAWS.to_arviz(),
    ("arviz", "diagnostics", "traces"): lambda _: bc.plot.traces(DRAWS),
    ("matplotlib", "plot", "traces"): lambda _: bc.plot.traces(DRAWS),
    ("torchmetrics", "metrics", "classes"): lambda _: bc.posterior.classification_metrics(
        PROBABILITIES, torch.tensor([0])
    ),
    ("sklearn", "metrics", "auroc"): lambda _: bc.posterior.detection_auroc(torch.zeros(2), torch.ones(2)),
    ("curvlinops", "curvlinops", "operator"): lambda _: bc.curvature.linear_operator(
        never, bc.likelihoods.gaussian(1.0), torch.zeros(2), [torch.zeros(1)]
    ),
}


@pytest.mark.parametrize("package, extra, call", CALLS)
def test_a_missing_package_is_named_before_anything_runs(package, extra, call, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)  # Python's own mark of a module that cannot be imported
    line = re.escape(f"needs {package}: pip install 'bayesopt_chain[{extra}]'")
    with pytest.raises(ModuleNotFoundError, match=line):
        CALLS[package, extra, call](tmp_path)


@pytest.mark.parametrize(
    "module, package",
    [
        ("sklearn", "sklearn"),
        ("testing.strategies", "hypothesis"),
        ("testing.fixtures", "pytest"),
        ("botorch", "botorch"),
    ],
)
def test_a_module_that_needs_a_package_names_it(module, package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(f"bayesopt_chain.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"bayesopt_chain\.{module} needs {package}: pip install"):
        __import__(f"bayesopt_chain.{module}")


def test_every_import_of_an_extra_is_checked_first():
    """A file that imports one calls ``installed`` with its name, or goes on without it on purpose."""
    own = {"torch", "torchopt", "optree", "numpy", "bayesopt_chain", *sys.stdlib_module_names}
    elsewhere = {  # their callers check
        "lora/adapters.py": {"peft"},  # the model that is given is one of peft's
        "botorch.py": {"linear_operator"},
        "runs/inference_data.py": {"arviz", "xarray"},
        "diagnostics/convergence.py": {"scipy"},
        "random/_triton.py": {"triton"},
    }
    for file in ROOT.rglob("*.py"):
        text = re.sub(r"if TYPE_CHECKING:\n(    .*\n|\n)*", "", file.read_text())
        wanted = {*re.findall(r"^ *(?:from (\w+)\S* import|import (\w+))", re.sub(r">>>.*", "", text), re.MULTILINE)}
        named = {*re.findall(r"\"(\w+)\"", " ".join(re.findall(r"installed\([^)]*\)", text)))}
        foreign = {a or b for a, b in wanted} - own - elsewhere.get(file.relative_to(ROOT).as_posix(), set())
        assert foreign <= named or "suppress(ImportError)" in text, (file, foreign - named)


@pytest.mark.skipif(PROJECT is None, reason="an installed package has no pyproject.toml beside it")
def test_extras_that_are_named_exist_bring_the_package_and_stand_in_the_readme():
    extras = PROJECT["optional-dependencies"]
    for file in ROOT.rglob("*.py"):
        for extra, packages in re.findall(r"installed\(f?\"[^\"]*\", \"(\w+)\"((?:, \"\w+\")+)\)", file.read_text()):
            if "no_such_package" in packages or file.name == "checks.py":
                continue
            brought = {re.split(r"[><=;\[ ]", line)[0] for line in extras[extra]}
            brought = {BRINGS.get(name, name) for name in brought}
            wanted = {name for name in re.findall(r"\"(\w+)\"", packages) if name != "gpytorch"}  # with botorch
            assert wanted <= brought, (file, wanted, brought)
    readme = (ROOT.parent / "README.md").read_text()
    assert {extra for extra in FOR_USERS if f"`{extra}`" in readme} == FOR_USERS
