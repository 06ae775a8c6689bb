"""Every experiment runs at its smoke scale, and the page of results is made of the records."""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.experiments import imdb, language, llama, mnist, pima, report
from benchmarks.experiments.__main__ import NAMES, experiment
from benchmarks.experiments.common import SCALES, averaged, keep, record
from benchmarks.experiments.double_well import Truth, modes

DATA = {
    "pima": "pima/pima-indians-diabetes.data.csv",
    "mnist": "mnist/mnist.npz",
    "imdb": "imdb/imdb_20k_100.npz",
    "lora": "books",
    "llama": "statements/statements.json",
}
PACKAGES = {
    "pima": ("pyro", "posteriors", "blackjax"),
    "mnist": ("torchmetrics", "sklearn"),
    "imdb": ("torchmetrics",),
    "lora": ("transformers", "tokenizers", "peft"),
    "llama": ("transformers", "tokenizers", "sklearn"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_smoke_scale_and_says_what_came_out(name, tmp_path, monkeypatch):
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path / "runs"))
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    folder = os.environ.get("BAYESOPT_CHAIN_DATA", "")
    if name in DATA and not (folder and (Path(folder) / DATA[name]).exists()):
        pytest.skip(f"set BAYESOPT_CHAIN_DATA to a folder with {DATA[name]}")
    result = record(experiment(name), "smoke")
    assert set(experiment(name).settings) == set(experiment(name).seeds) == set(SCALES)
    path = keep(result, tmp_path)
    assert json.loads(path.read_text())["tables"] == result["tables"]
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in result["tables"][0].values())
    assert len(experiment(name).says(averaged(result))) > 40
    assert experiment(name).title in report.section(name, tmp_path)


@pytest.mark.parametrize("name", sorted(DATA))
def test_without_the_data_it_says_which_variable_to_set(name, monkeypatch):
    monkeypatch.setenv("BAYESOPT_CHAIN_DATA", "")
    reads = {"pima": pima.read, "mnist": lambda: mnist.read(2), "imdb": lambda: imdb.read(100)}
    read = (reads | {"llama": llama.statements}).get(name, lambda: language.text_of("peter_pan"))
    with pytest.raises(FileNotFoundError, match="BAYESOPT_CHAIN_DATA"):
        read()


def test_the_page_is_what_the_records_say():
    assert report.PAGE.read_text() == report.page()


def test_distances_vanish_for_the_truth_and_not_for_one_mode():
    truth, n = Truth.make(), 40_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    x = truth.x[torch.searchsorted(truth.cdf, u)]
    exact = torch.stack([x, x[torch.randperm(n, generator=torch.Generator().manual_seed(0))]], 1)
    assert truth.wasserstein(exact) < 2e-3 and modes(exact) < 0.01
    one = exact.abs()
    assert truth.wasserstein(one) == pytest.approx(2 * (x.abs().mean() / 2).item(), rel=1e-2) and modes(one) == 0.75
