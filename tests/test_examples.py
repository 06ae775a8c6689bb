"""The script of docs/howto/digits.md: short, without helpers, and it runs."""

import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "digits.py"
METHODS = ["one network", "last-layer Laplace", "deep ensemble", "parallel SGHMC", "MultiSWAG", "IVON"]


def test_the_documented_table_has_a_row_for_each_method():
    rows = (ROOT / "docs" / "howto" / "digits_table.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == METHODS
    assert all(re.fullmatch(r"\| [\w -]+ \|( 0\.\d{3} \|){3}", row) for row in rows[2:])


@pytest.mark.slow
def test_it_runs_and_prints_a_row_for_each_method():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), "4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    rows = done.stdout.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == METHODS
    accuracy = {row.split("|")[1].strip(): float(row.split("|")[2]) for row in rows}
    assert min(accuracy[k] for k in METHODS if k != "IVON") > 0.8  # of ten classes, after four epochs


@pytest.mark.slow
def test_the_picture_of_the_readme_is_wider_where_there_are_no_data(tmp_path):
    """The example's own functions, with fewer steps than the picture."""
    example = runpy.run_path(str(ROOT / "examples" / "with_and_without.py"))
    x, label = example["data"]()
    new = torch.tensor([[0.0, 1.0], [-2.0, -2.0], [4.0, 3.0], [2.0, 0.0]])
    sampled = example["probabilities"](x, label, new, 1 / 100, steps=3000)
    trained = example["probabilities"](x, label, new, 0, steps=2000)
    sure = [p.max(-1).values for p in (sampled, trained)]
    assert sampled[0, 0] > 0.9 and trained[0, 0] > 0.9  # at the data both are right
    assert (sure[0][1:3] < sure[1][1:3]).all()  # far from them the posterior is the less certain one
    example["picture"](x, label, new, {"sampled": sampled, "trained": trained}).savefig(tmp_path / "picture.png")


# The demo: exact noise beside the solved excess, its scores by hand, and the whole command at reduced size


pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

OF_DEMO = ROOT / "examples" / "demo.py"
DEMO = runpy.run_path(str(OF_DEMO))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.7])
def test_white_noise_has_the_solved_excess_and_matched_noise_none(share):
    """60,000 chains' looks, half of them independent: five errors of 1.2 % or less, a false alarm in 10^6."""
    for matched, excess in ((True, 0.0), (False, share / (1 - share))):
        found = DEMO["excess"](share * DEMO["LIMIT"], matched, chains=4000, steps=200, looks=15)
        assert abs(found - excess) < 0.05 * (1 + excess)


def test_at_temperature_0_no_bit_differs_from_sgd():
    assert DEMO["differing"]() == 0


def test_scores_are_those_worked_out_by_hand():
    low, high = torch.tensor([0.1, 0.5]), torch.tensor([0.5, 0.6, 0.0])
    assert DEMO["auroc"](low, high) == pytest.approx((3 + 0.5) / 6)
    assert DEMO["averaged"]([{"a": 1.0}, {"a": 3.0}]) == {"a": 2.0}
    assert DEMO["averaged"]([[1.0, 0.0], [3.0, 1.0]]) == [2.0, 0.5]
    assert float(DEMO["entropy"](torch.tensor([0.5, 0.5, 0.0]))) == pytest.approx(math.log(2))


def test_too_few_steps_are_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        DEMO["main"](["--steps", "10"])
    assert "--steps must be at least 40, got 10" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_the_tables_and_writes_picture_and_numbers(tmp_path):
    picture, found = tmp_path / "demo.png", tmp_path / "demo.json"
    run = [
        sys.executable,
        str(OF_DEMO),
        "--steps",
        "40",
        "--seeds",
        "1",
        "--figure",
        str(picture),
        "--json",
        str(found),
    ]
    printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    kept = json.loads(found.read_text())
    assert "0 of 2,080 numbers differ" in printed and all(f"\n{name}" in printed for name in DEMO["COLORS"])
    assert all(len(rows) == 8 for rows in (*kept["exact"].values(), *kept["labels"].values()))
    assert all(math.isfinite(v) for rows in kept["digits"].values() for row in rows for v in row.values())
