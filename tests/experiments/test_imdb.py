"""The experiment on IMDB: its network, what it decides, and that an interrupted run goes on to the same table."""

import math

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from benchmarks.experiments import imdb
from benchmarks.experiments.common import averaged

SETTINGS = imdb.EXPERIMENT.settings["smoke"]


@pytest.fixture
def reviews(monkeypatch, tmp_path):
    """Random reviews in place of the data, and a folder for the runs."""
    pytest.importorskip("torchmetrics")
    g = torch.Generator().manual_seed(0)

    def drawn(n):
        ids = torch.randint(SETTINGS["words"], (n, 40), generator=g)
        return ids, (ids[:, -1] > SETTINGS["words"] // 2).long()

    halves = drawn(SETTINGS["data"]), drawn(SETTINGS["test"])
    monkeypatch.setattr(imdb, "read", lambda words: halves)
    monkeypatch.setenv("BAYESOPT_CHAIN_RUNS", str(tmp_path))


def claim(low, high, error):
    return {"difference": {"mean": (low + high) / 2, "low": low, "high": high}, "error": {"mean": error}}


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


@pytest.mark.parametrize(
    ("low", "high", "error", "expected"),
    [
        (-0.3, -0.2, 0.09, "confirmed"),
        (-0.3, -0.2, 0.11, "undecided"),
        (-0.3, 0.1, 0.01, "undecided"),
        (0.2, 0.3, 0.09, "contradicted"),
    ],
)
def test_a_claim_is_decided_where_every_seed_is_two_errors_from_zero(low, high, error, expected):
    assert imdb.verdict(claim(low, high, error)) == expected


def test_while_the_chains_have_not_arrived_no_claim_rests_on_them():
    far, near = claim(-0.3, -0.2, 0.01), claim(-0.001, -0.001, 0.01)
    table = {
        "parallel beats serial SGHMC": far,
        "VI (T = 1) beats MAP": far,
        imdb.STILL: near,
        "MAP": {"nll": {"mean": 1.0}},
    }
    assert set(imdb.verdicts(table).values()) == {"confirmed", "undecided"}
    assert imdb.verdicts(table)["parallel beats serial SGHMC"] == "confirmed"
    table[imdb.STILL] = far
    assert imdb.verdicts(table) == {
        "parallel beats serial SGHMC": "undecided",
        "VI (T = 1) beats MAP": "confirmed",
        imdb.STILL: "confirmed",
    }


@pytest.mark.slow
def test_it_runs_to_a_table_and_a_finished_cell_is_not_made_again(reviews, monkeypatch):
    whole = imdb.run(SETTINGS, 0)
    assert all(math.isfinite(value) for row in whole.values() for value in row.values())
    assert len(imdb.says(averaged({"tables": [whole]}))) > 1000

    def never(*_, **__):
        raise AssertionError("a finished cell is made again")

    monkeypatch.setattr(bc, "sample", never)
    assert imdb.run(SETTINGS, 0) == whole
