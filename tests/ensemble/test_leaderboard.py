"""The league's arithmetic: the goal as code, calibration errors, and the plain ensemble against exact gradients."""

import json
import math

import pytest
import torch
from torch import nn

from benchmarks.leaderboard import contestants
from benchmarks.leaderboard.__main__ import PROTOCOL, cell
from benchmarks.leaderboard.plain import plain
from benchmarks.leaderboard.table import by_task, goal, markdown, paired
from benchmarks.leaderboard.tasks import Task
from tests.walk import descend


def task(n=40):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return Task("made", "regression", x, x[:, :1], x, x[:, :1], 0, "made", "0")


def record(differences, coverage=0.9, seeds=(0, 1, 2)):
    """A record in which the call differs from the plain ensemble by these numbers, the same on every seed but the last."""
    made = {}
    for name, d in differences.items():
        for s in seeds:
            scores = {"nll": 1.0, "coverage": coverage, **({} if name in ("pima", "authors") else {"crps": 1.0})}
            ours = {k: v if k == "coverage" else v + d * (1.1 if s == seeds[-1] else 1) for k, v in scores.items()}
            made[f"{name}-{s}"] = {"posterior_ensemble": ours, "plain_ensemble": scores}
    return {"protocol": PROTOCOL, "cells": made}


SEVEN = ["meats", "concrete", "ames", "car_prices", "sunspots", "wing", "angles"]


@pytest.mark.parametrize(
    ("change", "coverage", "lost"),
    [
        ({}, 0.9, set()),
        ({"meats": 0.5}, 0.9, {"signed ranks of NLL", "signed ranks of CRPS", "no task worse"}),
        ({"pima": 0.01}, 0.9, {"classes never worse"}),
        ({}, 0.93, {"coverage of 90 % intervals"}),
    ],
)
def test_the_goal_is_met_part_by_part(change, coverage, lost):
    differences = {**{name: -0.1 - 0.01 * i for i, name in enumerate(SEVEN)}, "pima": -0.01, "authors": -0.02}
    found = goal(record({**differences, **change}, coverage))
    assert {part for part, (met, _) in found.items() if not met} == lost
    # seven of seven better have the smallest one-sided p, 1 / 2^7
    assert change or "p = 0.008" in found["signed ranks of CRPS"][1]


def test_differences_are_paired_by_split_and_on_the_page():
    made = record({"wing": 1.0, "pima": -0.5})
    d, e = paired(by_task(made), "nll")["wing"]
    assert d == pytest.approx(3.1 / 3) and e == pytest.approx(0.1 / 3)
    made["cells"]["pima-0"]["one_network"] = {"failed": "ValueError: no"}
    assert "pima-0: one_network failed, ValueError: no" in markdown(made)
    assert "| wing* | +1.033 +- 0.033 | +1.033 +- 0.033 | 0.90 | 0.90 |" in markdown(made)


def test_a_prediction_that_is_exact_scores_its_entropy():
    found = contestants.scored(task(), lambda x: contestants.normal(x[:, 0], torch.full((len(x),), 0.01)))
    assert found["nll"] == pytest.approx(math.log(0.1 * math.sqrt(2 * math.pi)), abs=1e-5)
    assert found["coverage"] == 1.0 and found["rmse"] == 0.0
    assert found["crps"] == pytest.approx(0.1 * (math.sqrt(2 / math.pi) - 1 / math.sqrt(math.pi)), abs=1e-5)


@pytest.mark.parametrize("classes", [0, 3])
def test_members_of_the_plain_ensemble_are_networks_trained_one_by_one(classes, monkeypatch):
    """By torch.optim.Adam on the energy, in float64, full batches of what is not left out: equal to rounding."""
    monkeypatch.setattr("benchmarks.leaderboard.plain.MORE", 0.0)
    t, steps, lr = task(), 20, 0.05
    x = t.x.double()
    y = (x[:, 0] > 0).long() if classes else x[:, :1]
    torch.manual_seed(0)
    networks = [nn.Linear(2, classes or 1).double() for _ in range(2)]
    alone = [nn.Linear(2, classes or 1).double() for _ in range(2)]
    for a, b in zip(alone, networks):
        a.load_state_dict(b.state_dict())
    folds, v, precision = [torch.arange(6), torch.arange(6, 12)], 0.1, 3.0
    found = plain(networks, x, y, folds, steps, 100, lr, 0, precision, v)
    for m, module in enumerate(alone):
        adam = torch.optim.Adam(module.parameters(), lr, eps=1e-8)
        for i in range(steps):
            adam.param_groups[0]["lr"] = lr * ((1 + math.cos(math.pi * i / steps)) / 2 + 1e-3)
            rows = torch.ones(len(x), dtype=torch.bool)
            rows[folds[m]] = False
            f = module(x[rows])
            prior = precision * sum(p.square().sum() for p in module.parameters()) / (2 * int(rows.sum()))
            nll = nn.functional.cross_entropy(f, y[rows]) if classes else (f - y[rows]).square().mean() / (2 * v)
            descend(adam, ((nll + prior) * (1 if classes else v)))
        torch.testing.assert_close(found.outputs(x)[m], module(x).detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_a_cell_is_resumed_and_keeps_what_failed(monkeypatch):
    monkeypatch.setattr("benchmarks.leaderboard.tasks.split", lambda name, seed: task())

    def gradient_boosting(task, seed):
        return 1 / 0

    monkeypatch.setattr(contestants, "gradient_boosting", gradient_boosting)
    kept = json.loads(json.dumps(cell("made", 0, 30, cell("made", 0, 30, {}, False), True)))
    passes = {who: kept[who]["passes"] for who in kept if "passes" in kept[who]}
    assert passes["plain_ensemble"] == pytest.approx(passes["posterior_ensemble"], rel=0.05)  # whole steps
    assert passes["same_prior"] == passes["plain_ensemble"]
    assert passes["twice_ensemble"] == 2 * passes["plain_ensemble"] == 2 * passes["one_network"]
    assert kept["gaussian_process"]["nll"] < 0 and kept["gradient_boosting"]["failed"].startswith("ZeroDivisionError")
