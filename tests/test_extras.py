"""Packages that come with an extra: a call that needs one which is missing says so first, with the line that installs it."""

import re
import sys
import tomllib
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure
from torchmetrics.functional.classification import multiclass_calibration_error

import bayesopt_chain as bc
from tests.refusals import refused

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
    return bc.sample(bc.make_step(never, tx), w, tx.init(w), None, steps=2, **options)


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
    ("scipy", "diagnostics", "negative_binomial"): lambda _: bc.likelihoods.negative_binomial().cdf(
        torch.zeros(1, 1), torch.ones(1, 1)
    ),
    ("matplotlib", "plot", "bands"): lambda _: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3))),
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
        "random/philox_cuda.py": {"triton"},
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


# Pictures show the numbers that they say they show, and refuse what they cannot draw


matplotlib.use("agg")


def probabilities(n=400, classes=3):
    torch.manual_seed(1)
    return (2 * torch.randn(n, classes)).softmax(-1), torch.randint(classes, (n,))


def gaussian(means, variance=1.0):
    """A Gaussian prediction at known means."""
    return bc.likelihoods.gaussian(variance).predictive(means[:, None], torch.zeros(len(means), 1, 1))


def test_a_band_is_the_interval_of_the_prediction_in_the_order_of_the_inputs():
    x = torch.tensor([2.0, 0.0, 1.0])
    prediction = gaussian(x**2)
    ax = bc.plot.bands(x, prediction, levels=(0.9,))
    (band,) = ax.collections
    low, high = (end[:, 0] for end in prediction.interval(0.9))
    corners = torch.as_tensor(band.get_paths()[0].vertices)
    for place in (0, 1, 2):
        at = corners[corners[:, 0] == x[place]][:, 1]
        assert at.min() == pytest.approx(float(low[place]), abs=1e-5)
        assert at.max() == pytest.approx(float(high[place]), abs=1e-5)
    assert ax.lines[0].get_xdata().tolist() == [0.0, 1.0, 2.0]


def test_the_calibration_error_in_the_legend_is_that_of_torchmetrics():
    p, targets = probabilities()
    want = multiclass_calibration_error(p, targets, 3, n_bins=10).item()
    label = bc.plot.reliability(p, targets, bins=10).get_legend_handles_labels()[1][-1]
    assert label == f"ECE {want:.3f}"


def test_intervals_that_are_too_narrow_lie_below_the_diagonal():
    targets = 2 * torch.randn(500, 1)
    for variance, below in ((1.0, True), (16.0, False)):
        ax = bc.plot.coverage(gaussian(torch.zeros(500), variance), targets)
        level, share = (torch.as_tensor(x) for x in ax.lines[-1].get_data())
        middle = (level > 0.3) & (level < 0.7)
        assert bool((share < level)[middle].all()) == below


def test_methods_are_compared_on_one_axes_with_one_diagonal():
    ax = Figure().subplots()
    p, targets = probabilities()
    for label in ("a", "b"):
        assert bc.plot.reliability(p, targets, label=label, ax=ax) is ax
    assert len(ax.lines) == 3


test_what_cannot_be_drawn_is_refused_by_name = refused(
    [
        (
            lambda: bc.plot.bands(torch.zeros(3, 2), gaussian(torch.zeros(3))),
            ValueError,
            "x must be inputs of one variable",
        ),
        (lambda: bc.plot.bands(torch.zeros(4), gaussian(torch.zeros(3))), ValueError, "4 inputs x and 3 predictions"),
        (
            lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), levels=(90,)),
            ValueError,
            "levels must be a list of numbers in",
        ),
        (lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), output=1), ValueError, "no output 1"),
        (
            lambda: bc.plot.bands(torch.zeros(3), gaussian(torch.zeros(3)), ax="here"),
            TypeError,
            "ax must be matplotlib axes",
        ),
        (lambda: bc.plot.reliability(torch.randn(4, 3), torch.zeros(4).long()), ValueError, "pass softmax values"),
        (
            lambda: bc.plot.reliability(torch.ones(4, 1), torch.zeros(3).long()),
            ValueError,
            r"\[N, C\] and targets \[N\]",
        ),
        (lambda: bc.plot.coverage(gaussian(torch.full((3,), torch.nan)), torch.zeros(3, 1)), ValueError, "hold NaN"),
        (lambda: bc.plot.reliability(torch.ones(4, 1), torch.ones(4).long()), ValueError, "class numbers from 0 to 0"),
    ]
)
