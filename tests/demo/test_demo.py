"""The demo: its uncertainty split by hand, its errors, and the whole command at reduced size."""

import json
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("torchmetrics")
pytest.importorskip("tqdm")

from bayesopt_chain.demo import digits

METHODS = ["SGD", "SGHMC", "Deep ensemble", "Parallel SGHMC"]


def test_draws_that_agree_have_only_aleatoric_uncertainty():
    one = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    aleatoric, epistemic = digits.split_uncertainty(one.expand(4, 2, 2))
    assert aleatoric[0].item() == pytest.approx(math.log(2))
    torch.testing.assert_close(epistemic, torch.zeros_like(epistemic), rtol=0, atol=1e-15)


def test_sure_draws_that_disagree_have_only_epistemic_uncertainty():
    aleatoric, epistemic = digits.split_uncertainty(torch.eye(3, dtype=torch.float64)[:, None])
    assert aleatoric.item() == 0
    assert epistemic.item() == pytest.approx(math.log(3))


def test_the_two_parts_add_up_to_the_entropy_of_the_mean():
    p = torch.rand(5, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    total = torch.special.entr(p.mean(0)).sum(-1)
    torch.testing.assert_close(sum(digits.split_uncertainty(p)), total)


def test_a_single_draw_has_no_epistemic_uncertainty_to_the_last_bit():
    p = torch.rand(1, 50, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert digits.split_uncertainty(p)[1].count_nonzero() == 0


def test_no_unseen_digit_is_trained_on_and_train_and_test_are_disjoint():
    (train, labels), (test, test_labels) = digits.load(seed=3)
    assert labels.max() < digits.SEEN <= test_labels.max()
    assert len(train) + len(test) == 1797


@pytest.mark.parametrize("option", ["--steps", "--chains", "--draws"])
def test_an_option_below_one_is_refused_by_name(option, capsys):
    with pytest.raises(SystemExit):
        digits.main([option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_a_missing_package_names_the_extra_to_install():
    code = (
        "import sys, runpy; sys.modules['sklearn'] = None; runpy.run_module('bayesopt_chain.demo', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'pip install "bayesopt_chain[demo]"' in result.stderr


@pytest.mark.slow
def test_the_command_prints_the_table_and_writes_figure_and_json(tmp_path):
    figure, table = tmp_path / "demo.png", tmp_path / "demo.json"
    size = ["--steps", "250", "--chains", "3", "--draws", "10"]
    command = [sys.executable, "-m", "bayesopt_chain.demo", *size, "--figure", figure, "--json", table]
    result = subprocess.run(command, capture_output=True, text=True, check=True)

    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 20_000
    rows = json.loads(table.read_text())["methods"]
    assert list(rows) == METHODS
    assert [row["draws"] for row in rows.values()] == [1, 10, 3, 30]
    for name, row in rows.items():
        assert f"\n{name:16}{row['draws']:7d}" in result.stdout
        assert all(math.isfinite(value) for value in row.values())
        assert 0.8 < row["accuracy"] <= 1  # chance is 1 / 8
        assert 0 < row["nll"] < 1
        assert 0 <= row["ece"] < 0.3
        assert 0.6 < row["auroc_total"] <= 1
    assert rows["SGD"]["auroc_epistemic"] == 0.5
    assert rows["Parallel SGHMC"]["auroc_epistemic"] > 0.8
