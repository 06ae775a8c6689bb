"""The league's arithmetic: paired intervals, calibration errors, lines, and a record that goes on."""

import json
import math

import pytest
import torch

from benchmarks.leaderboard import cells, contestants
from benchmarks.leaderboard.scores import calibration_error, scored
from benchmarks.leaderboard.table import everyone, interval, markdown, paired, table
from benchmarks.leaderboard.tasks import Task


def task():
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    return Task("made", "regression", x, x[:, :1], x, x[:, :1], 0, "made", "0")


def test_intervals_are_students_corrected_for_the_tasks():
    from scipy.stats import t

    mean, half = interval([1.0, 2.0, 3.0], 0.95, 8)
    assert mean == 2.0 and half == pytest.approx(t.ppf(1 - 0.05 / 16, 2) / math.sqrt(3))
    assert interval([1.0], 0.95, 8)[1] == math.inf


def test_differences_are_paired_by_split():
    record = {
        "protocol": {"level": 0.95, "held out": []},
        "cells": {
            f"made-{s}": {"posterior_ensemble": {"nll": s + 1.0}, "deep_ensemble": {"nll": float(s)}} for s in (0, 5, 9)
        },
    }
    mean, half, reference = paired(record, "posterior_ensemble", "deep_ensemble", "nll")["made"]
    assert (mean, half, reference) == (1.0, 0.0, pytest.approx(14 / 3))
    assert "+1.0000 +- 0.0000 +" in table(record)


def test_the_calibration_error_is_the_gap_of_confidence_and_accuracy():
    p = torch.tensor([[0.8, 0.2]] * 10)
    assert calibration_error(p, torch.tensor([0] * 5 + [1] * 5)) == pytest.approx(0.3)
    assert calibration_error(p, torch.tensor([0] * 8 + [1] * 2)) == pytest.approx(0, abs=1e-6)


def test_a_prediction_that_is_exact_scores_its_entropy():
    t = task()
    found = scored(t, lambda x: contestants.normal(x[:, 0], torch.full((len(x),), 0.01)))
    assert found["nll"] == pytest.approx(math.log(0.1 * math.sqrt(2 * math.pi)), abs=1e-5)
    assert found["coverage"] == 1.0 and found["rmse"] == 0.0
    assert found["crps"] == pytest.approx(0.1 * (math.sqrt(2 / math.pi) - 1 / math.sqrt(math.pi)), abs=1e-5)


def test_a_cell_keeps_what_is_done_and_what_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.leaderboard.tasks.split", lambda name, seed: task())
    monkeypatch.setattr(contestants, "gradient_boosting", lambda task, seed: 1 / 0)
    done = {"posterior_ensemble": {"nll": 0.0}}
    file = tmp_path / "made-0.json"
    cells.cell("made", 0, done, str(file), ["posterior_ensemble", "gaussian_process", "gradient_boosting"])
    kept = json.loads(file.read_text())
    assert kept["posterior_ensemble"] == {"nll": 0.0} and kept["gaussian_process"]["nll"] < 0
    assert kept["gradient_boosting"]["failed"].startswith("ZeroDivisionError")


def test_lines_are_those_of_the_body():
    def three(task):
        """Nothing."""
        import math

        x = math.pi
        # a remark
        y = x

        return y

    assert contestants.lines(three) == 3


def test_the_page_says_better_equal_worse_and_whether_the_goal_is_met():
    def cells(name, difference):
        return {
            f"{name}-{s}": {"posterior_ensemble": {"nll": s + difference}, "deep_ensemble": {"nll": float(s)}}
            for s in range(3)
        }

    protocol = {"level": 0.95, "held out": ["b"]}
    better = markdown({"protocol": protocol, "cells": {**cells("a", -0.5), **cells("b", 0.01)}})
    assert "| a | developed on | NLL | 3 | 0.500 | 1.000 | -0.500 +- 0.000 | better |" in better
    assert "| b | held out | NLL | 3 | 1.010 | 1.000 | +0.010 +- 0.000 | equal |" in better
    goal = "All tasks (intervals corrected for 2): within the margins on 2 of 2 and surely better on 1, so that the goal of"
    assert goal in better and "is met" in better
    assert (
        "The held-out tasks by themselves (intervals corrected for 1): within the margins on 1 of 1 and surely"
        in better
    )
    worse = markdown({"protocol": protocol, "cells": {**cells("a", -0.5), **cells("b", 0.5)}})
    assert "| worse |" in worse and "is not met" in worse
    assert markdown({"protocol": protocol, "cells": {}}).startswith("No task")


def test_everyone_has_a_line_with_its_means_and_failures_are_told():
    cells = {
        "a-0": {"one": {"nll": 1.0, "coverage": 0.8, "seconds": 1.0}, "other": {"failed": "ValueError: no"}},
        "a-1": {"one": {"nll": 3.0, "coverage": 1.0, "seconds": 2.0}},
        "b-0": {"one": {"nll": 0.5, "ece": 0.1, "seconds": 3.5}, "other": {"nll": 0.25, "ece": 0.3, "seconds": 1.0}},
    }
    record = {"protocol": {"level": 0.95, "held out": []}, "about": {"lines": {"one": 4}}, "cells": cells}
    page = everyone(record)
    assert "| | a | b | coverage | ECE | OOD | seconds | lines |" in page
    assert "| one | 2.000 | 0.500 | 0.90 | 0.100 |  | 2.5 | 4 |" in page
    assert "| other |  | 0.250 |  | 0.300 |  | 1.0 |  |" in page
    assert "a-0 other failed: ValueError: no" in table(record)
