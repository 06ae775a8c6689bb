"""Every experiment runs at its smoke scale, and the page of results is made of the records."""

import json

import pytest
import torch

from benchmarks.experiments import report
from benchmarks.experiments.__main__ import NAMES, experiment
from benchmarks.experiments.common import SCALES, averaged, keep, record
from benchmarks.experiments.double_well import Truth, modes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_smoke_scale_and_says_what_came_out(name, tmp_path):
    result = record(experiment(name), "smoke")
    assert set(experiment(name).settings) == set(experiment(name).seeds) == set(SCALES)
    path = keep(result, tmp_path)
    assert json.loads(path.read_text())["tables"] == result["tables"]
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in result["tables"][0].values())
    assert len(experiment(name).says(averaged(result))) > 40
    assert experiment(name).title in report.section(name, tmp_path)


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
