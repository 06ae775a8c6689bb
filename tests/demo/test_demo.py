"""The demo: its uncertainty split by hand, its errors, and the whole command at reduced size."""

import importlib.util
import json
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

from bayesopt_chain.demo import digits

if importlib.util.find_spec("torchmetrics") is None:  # only the whole command imports it
    pytest.skip("torchmetrics is not installed", allow_module_level=True)

METHODS = ["SGD", "SGHMC", "Deep ensemble", "Parallel SGHMC"]


def test_no_unseen_digit_is_trained_on_and_train_and_test_are_disjoint():
    (train, labels), (test, test_labels) = digits.load(seed=3)
    assert labels.max() < digits.SEEN <= test_labels.max()
    assert len(train) == 400 and len(train) + len(test) == 1797


def test_a_share_of_the_training_labels_is_random_and_no_test_label_is():
    clean, noisy = digits.load(seed=3, wrong=0.0), digits.load(seed=3, wrong=0.3)
    assert torch.equal(clean.test[1], noisy.test[1]) and torch.equal(clean.train[0], noisy.train[0])
    changed = (clean.train[1] != noisy.train[1]).double().mean().item()
    expected = 0.3 * 7 / 8  # one in eight is replaced by itself
    assert (
        abs(changed - expected) < 4 * (expected * (1 - expected) / 400) ** 0.5
    )  # false alarms 6e-5; the seed is fixed


@pytest.mark.parametrize("option", ["--seeds", "--steps", "--chains", "--draws", "--data"])
def test_an_option_below_one_is_refused_by_name(option, capsys):
    with pytest.raises(SystemExit):
        digits.main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_package_names_the_extra_to_install():
    code = (
        "import sys, runpy; sys.modules['sklearn'] = None; runpy.run_module('bayesopt_chain.demo', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "bayesopt_chain[demo]"' in result.stderr


def test_more_draws_than_the_second_half_of_a_chain_are_refused(capsys):
    with pytest.raises(SystemExit):
        digits.main(["--steps", "10", "--draws", "6"])
    assert "--draws 6 exceeds half of --steps 10" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_figure_and_json(tmp_path):
    figure, table = tmp_path / "demo.png", tmp_path / "demo.json"
    size = ["--steps", "600", "--chains", "4", "--draws", "10", "--seeds", "2", "--seed", "20"]
    command = [sys.executable, "-m", "bayesopt_chain.demo", *size, "--figure", figure, "--json", table]
    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 20_000
    tables = json.loads(table.read_text())["tables"]
    assert len(tables) == 2
    for rows in tables:
        assert list(rows) == METHODS
        for name, row in rows.items():
            assert f"\n{name:16}" in result.stdout
            assert all(math.isfinite(value) for value in row.values())
            assert 0.5 < row["accuracy"] <= 1  # chance is 1 / 8
            assert 0 < row["nll"] < 1.5
            assert 0 <= row["ece"] < 0.5
        assert rows["SGD"]["auroc_epistemic"] == 0.5
        assert rows["Parallel SGHMC"]["auroc_epistemic"] > 0.7
        assert rows["Parallel SGHMC"]["nll"] < rows["SGD"]["nll"]
    assert "Parallel SGHMC: lower NLL than the single network in 2 of 2 seeds" in result.stdout
