"""The figures of the README and of the page on speed are those of the files that the benchmarks wrote."""

import json
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc
from benchmarks.curvature_fit import summary
from benchmarks.table import table, when

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()


def test_the_table_of_speed_is_the_measured_one():
    assert table() in SPEED, "run `python -m benchmarks.table` and put it into docs/speed.md"


def test_the_times_of_captures_are_the_measured_ones():
    rows = json.loads((ROOT / "benchmarks" / "results" / "captures.json").read_text())["rows"]
    first, second = (", ".join(f"{row[which]['wall_s']:.1f}" for row in rows) for which in ("first", "second"))
    assert f"{first} s in the first process and {second} s in the second" in " ".join(SPEED.split())


def test_the_figures_of_the_page_on_laplace_are_the_measured_ones():
    assert summary() in SPEED


def test_machine_and_date_are_those_of_the_measurement():
    assert when() in SPEED


def test_the_readme_is_a_screen_or_two_has_twelve_links_and_names_two_commands():
    assert len(README.splitlines()) < 90 and README.count("](") <= 12
    assert "make demo" in README and "make test" in README


def test_every_file_that_the_readme_links_to_is_there():
    links = [part.split(")")[0] for part in README.split("](")[1:]]
    assert links and all((ROOT / link).exists() for link in links), links


def test_the_excess_that_the_readme_states_is_that_of_white_noise():
    excess = {}
    for order in (2, 1):
        tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(1.0, order=order), bc.scale_by_neg_lr(1.9))
        excess[order] = bc.testing.stationary_covariance(tx, torch.ones(1, 1, dtype=torch.float64)).item() - 1
    assert abs(excess[2]) < 1e-10 and f"{excess[1]:.2f} (white noise" in README


@pytest.mark.slow
def test_the_code_of_the_readme_runs_as_pasted():
    """The chain of draws goes another way on another processor; 150 draws of one chain say the rest within .3."""
    code = "\n".join(block.split("```")[0] for block in README.split("```python")[1:])
    names = {}
    exec(code, names)
    one, posterior = names["one"][:, 0], names["posterior"][:, 0]
    assert one[1] > 0.9 and one[2] < 0.1  # one network is certain far from all data
    assert posterior[0] > 0.9 and 0.05 < posterior[1] < 0.85 and 0.15 < posterior[2] < 0.85
    gradients = names["gradients"]
    cold, theirs, warm = (
        tx.update(gradients, tx.init(gradients), inplace=False)[0]["w"]
        for tx in (names["sampler"](0.0), names["torchopt"].sgd(0.1, momentum=0.9), names["sampler"](1e-3))
    )
    assert torch.equal(cold, theirs) and not torch.equal(cold, warm)
