"""The script of docs/howto/digits.md: short, without helpers, and it runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    import runpy

    import torch

    example = runpy.run_path(str(ROOT / "examples" / "with_and_without.py"))
    x, label = example["data"]()
    new = torch.tensor([[0.0, 1.0], [-2.0, -2.0], [4.0, 3.0], [2.0, 0.0]])
    sampled = example["probabilities"](x, label, new, 1 / 100, steps=3000)
    trained = example["probabilities"](x, label, new, 0, steps=2000)
    sure = [p.max(-1).values for p in (sampled, trained)]
    assert sampled[0, 0] > 0.9 and trained[0, 0] > 0.9  # at the data both are right
    assert (sure[0][1:3] < sure[1][1:3]).all()  # far from them the posterior is the less certain one
    example["picture"](x, label, new, {"sampled": sampled, "trained": trained}).savefig(tmp_path / "picture.png")
