"""Every experiment runs at its smoke scale, and the page of results is made of the records."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.experiments import imdb, language, llama, mnist, pima, report
from benchmarks.experiments.__main__ import NAMES, experiment
from benchmarks.experiments.common import SCALES, averaged, keep, record
from benchmarks.experiments.double_well import Truth, modes
from benchmarks.posteriors_examples.__main__ import NAMES as EXAMPLES
from benchmarks.posteriors_examples.__main__ import example, lines

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
    assert json.loads(keep(result, tmp_path).read_text())["tables"] == result["tables"]
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


# The examples of posteriors in both libraries: at most as many lines here, and numbers that agree


SMALL = {"league": 150, "yacht": 100, "continual_lora": 4}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_at_most_as_many_lines(name):
    module = example(name)
    assert 5 <= lines(module.ours) <= lines(module.theirs)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", SMALL)
def test_an_example_without_noise_of_its_own_has_the_same_numbers(name):
    """At a small scale. Where both draw, ``python -m benchmarks.posteriors_examples`` compares them at the examples' own."""
    pytest.importorskip("posteriors")
    if name == "continual_lora":
        pytest.importorskip("peft")
    module = example(name)
    problem = module.data(SMALL[name])
    for label, (theirs, ours, apart) in module.compare(module.theirs(problem), module.ours(problem)).items():
        assert abs(theirs - ours) <= apart, (label, theirs, ours)


@pytest.mark.slow
def test_the_double_well_has_its_exact_second_moment():
    """4.3568 by quadrature. 8,000 correlated draws of two coordinates: the mean of x^2 has a deviation of about 0.08 over
    seeds; five of them (false alarms 6e-7, the seed is fixed)."""
    draws = example("double_well").ours(8_000)["draws"]
    assert abs(draws[1000:].square().mean() - 4.3568) < 0.4


# The network of the experiment on IMDB


def test_the_network_has_the_papers_number_of_weights():
    with torch.device("meta"):
        assert sum(p.numel() for p in imdb.Network().parameters()) == 2_700_098


def test_the_recurrence_is_that_of_torchs_lstm():
    net, lstm = imdb.Network(50, 6, 5, 4).double(), nn.LSTM(5, 4, batch_first=True).double()
    with torch.no_grad():
        lstm.weight_ih_l0.copy_(net.inward.weight)
        lstm.weight_hh_l0.copy_(net.recurrent.weight)
        lstm.bias_ih_l0.copy_(net.inward.bias)
        lstm.bias_hh_l0.zero_()
    ids = torch.randint(50, (3, 24))
    features = nn.functional.max_pool1d(net.convolution(net.embedding(ids).mT).relu(), 4).mT
    torch.testing.assert_close(net(ids), net.head(lstm(features)[0][:, -1]), rtol=1e-12, atol=1e-12)
