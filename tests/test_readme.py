"""The figures of the README and of the pages on speed and on choosing are those of the files that the benchmarks wrote."""

import json
import math
from pathlib import Path

import pytest

from benchmarks import captures, scaling
from benchmarks.choosing import RESULTS, of_mnist
from benchmarks.curvature_fit import summary
from benchmarks.table import table, when

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
MEASURED = (ROOT / "docs" / "measured_choices.md").read_text()


def test_the_table_of_speed_is_the_measured_one():
    assert table() in SPEED, "run `python -m benchmarks.table` and put it into docs/speed.md"


def test_the_times_of_captures_are_the_measured_ones():
    assert captures.sentence() in " ".join(SPEED.split()), "run `python -m benchmarks.captures`"


def test_the_slope_of_a_curve_is_its_exponent_over_the_last_two_decades():
    points = [{"n": 10**k, "seconds": max(1e-4, 1e-9 * 10**k), "bytes": 0} for k in range(2, 9)]
    assert abs(scaling.slope(points) - 1) < 1e-9
    assert abs(scaling.slope(points[:3])) < 1e-9
    assert math.isnan(scaling.slope(points[:1]))


def test_the_figures_of_the_page_on_choosing_are_the_measured_ones():
    assert of_mnist() in MEASURED, (
        "run `python -m benchmarks.choosing` and put its last line into docs/measured_choices.md"
    )
    temperature, start = RESULTS.read_text().strip().split("\n\n")
    assert temperature in MEASURED and start in MEASURED


def test_the_figures_of_the_page_on_laplace_are_the_measured_ones():
    assert summary() in SPEED


def test_machine_and_date_are_those_of_the_measurement():
    assert when() in SPEED


def test_the_readme_is_a_screen_or_two_and_names_two_commands():
    assert len(README.splitlines()) < 90
    assert "make demo" in README and "make test" in README


def test_every_file_that_the_readme_links_to_is_there():
    links = [part.split(")")[0] for part in README.split("](")[1:]]
    assert links and all((ROOT / link).exists() for link in links), links


def test_what_it_says_of_the_demo_is_what_the_demo_found():
    pytest.importorskip("scipy")
    from bayesopt_chain.demo.contestants import ENSEMBLE, POSTERIOR
    from bayesopt_chain.demo.table import difference, verdict

    assert (
        "less than half of the errors of an ensemble of equal cost, and elsewhere they cannot be told apart" in README
    )
    cells = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["cells"]
    errors = {who: sum(row["error"] for row in cells["mislabelled digits"][who]) for who in (POSTERIOR, ENSEMBLE)}
    assert errors[POSTERIOR] < 0.5 * errors[ENSEMBLE]
    others = [task for task in cells if task != "mislabelled digits"]
    said = {
        score: [verdict(*difference(cells, t, POSTERIOR, ENSEMBLE, score)) for t in others]
        for score in ("nll", "error")
    }
    assert said == {score: ["undecided"] * len(others) for score in said}
