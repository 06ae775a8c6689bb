"""Chains behind the members: their law on a linear Gaussian model, verdict, budget, and what a call keeps of them."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2, norm
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import chains as behind
from bayesopt_chain.ensemble.call import _cost
from bayesopt_chain.ensemble.chains import Chains, chained
from bayesopt_chain.ensemble.report import Progress
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.training import held_out_outputs
from tests.ensemble.test_parts import problem
from tests.ensemble.test_untidy import Killed, called, data, keeps, make

V0 = 0.3
PRECISION = torch.tensor([2.0, 0.5]).double()


def closed(p, x, y):
    """Mean and precision of weight and bias of the linear model, for noise of V0 of the targets' variance."""
    phi, v = torch.cat([x, torch.ones_like(x)], 1), V0 * p.likelihood.variance_of_noise
    A = phi.T @ phi / v + PRECISION.diag()
    return torch.linalg.solve(A, phi.T @ y / v)[:, 0], A


def chains_of(p, held_out=False):
    return Chains(p, {}, torch.full((p.count, 1), V0, dtype=torch.float64), PRECISION, held_out)


@pytest.mark.slow
def test_draws_mix_to_the_closed_posterior_predictive():
    """256 independent chains; false alarm 1e-4 for the law of the draws, and 1e-4 for each of two predictive moments."""
    p, x_new = problem(members=256), torch.tensor([[1.5, 1.0]]).double()
    mean, A = closed(p, p.data.inputs, p.data.targets)
    theta = chains_of(p).run(p.theta, 400, 1)[-1]
    distance = torch.einsum("mi,ij,mj->", theta - mean, A, theta - mean)
    assert 5e-5 < chi2.cdf(float(distance), 2 * 256) < 1 - 5e-5
    noise = V0 * p.likelihood.variance_of_noise
    predicted = p.likelihood.scaled(1 / V0).mixture((theta @ x_new.T)[:, :, None])
    variance = float(x_new @ torch.linalg.solve(A, x_new.T))
    z = (float(predicted.mean) - float(x_new @ mean)) / (variance / 256) ** 0.5
    assert abs(z) < norm.isf(5e-5)
    assert 5e-5 < chi2.cdf(256 * float(predicted.variance - noise) / variance, 255) < 1 - 5e-5
    assert chains_of(p).curvature(p.theta) == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]) / 40, rel=0.02)


def test_chains_at_temperature_zero_leave_members_that_are_at_their_mode():
    p = problem()
    found = chains_of(p, True)
    found.temperature = 0.0
    mode = torch.stack([closed(p, *p.data.take(rows))[0] for rows in p.seen(True)])
    torch.testing.assert_close(found.run(mode, 60, 1)[-1], mode, rtol=0, atol=1e-10)


def test_chains_without_a_step_leave_all_members(monkeypatch):
    monkeypatch.setattr(behind, "STEP", 1e-100)
    p = problem()
    found = chains_of(p)
    found.temperature = 0.0
    assert torch.equal(found.run(p.theta, 60, 1), p.theta.expand(16, -1, -1))


def judged(monkeypatch, start, noise, seconds=1e6):
    """The verdict on chains of 300 steps, behind members with these weights."""
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 300})
    p = problem()
    theta, level = torch.as_tensor(start).double().expand(4, 2), torch.full((4, 1), noise).double()
    ends = {"theta": theta, "buffers": {}, "precision": PRECISION, "without": level, "with": level}
    stages = Stages(None, {"members": 4}, torch.device("cpu"), None)
    training = SimpleNamespace(problem=p, stages=stages, progress=Progress(False), followed=lambda: ends)
    training.done = SimpleNamespace(pilots=held_out_outputs(p, theta, {}), kept=range(4))
    return chained(training, seconds, 1.0)


def test_draws_are_kept_where_they_predict_better(monkeypatch):
    """Members that know nothing; the chains learn ``y = 2 x``, and agree."""
    found = judged(monkeypatch, [0.0, 0.0], 0.02)
    assert found["agree"] and found["passes"] == 600
    assert found["draws"].shape == (16, 4, 2) and found["draws"][..., 0].mean() == pytest.approx(2, abs=0.2)
    assert [f.shape for f in found["outputs"]] == [(16, 10, 1)] * 4


def test_chains_with_all_data_have_what_is_left_of_the_seconds(monkeypatch):
    clock = iter([0.0, 10.0])  # 300 steps took 10 s of 18
    monkeypatch.setattr(behind, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert judged(monkeypatch, [0.0, 0.0], 0.02, seconds=18.0)["passes"] == 300 + 240


@pytest.mark.parametrize(
    ("start", "noise", "why"), [([2.0, 0.0], 100.0, "standard errors"), ([math.nan, 0.0], 1.0, "diverged")]
)
def test_draws_are_not_kept_where_they_predict_worse_or_diverge(monkeypatch, start, noise, why):
    """Members at the truth, and chains that hardly see the data."""
    found = judged(monkeypatch, start, noise)
    assert "draws" not in found and why in found["said"] and found["passes"] == 300


def test_draws_of_more_outputs_than_are_held_are_not_made(monkeypatch):
    monkeypatch.setattr(behind, "MOST", 639)
    assert judged(monkeypatch, [0.0, 0.0], 0.02)["said"].startswith(
        "16 draws of the outputs on the folds are 640 numbers"
    )


@pytest.mark.parametrize(
    ("seconds", "each", "planned"),
    [
        (104.0, 0.05, {"steps": 448}),  # 4 s are gone; half of a thousand steps, less 4 curvatures of 13 gradients
        (50.0, 0.05, "50 s hold fewer than 200 steps, which take about 53 s"),
        (104.0, 0.005, "a pass over the data costs 20 steps of training, and at most 10 pay"),
    ],
)
def test_steps_are_those_that_fit_the_seconds(monkeypatch, seconds, each, planned):
    p = problem()
    found = chains_of(p)
    monkeypatch.setattr(behind, "timed", lambda step, count: 0.1)
    monkeypatch.setattr(behind, "time", SimpleNamespace(perf_counter=lambda: 12.0))
    wanted = planned if isinstance(planned, dict) else {"said": planned}
    assert behind._planned(found, p.theta, seconds, each, 8.0) == wanted


@pytest.mark.parametrize(
    ("budget", "chains", "steps", "seconds"),
    [
        ({"steps": 10_000, "minutes": None}, "auto", 4000, 78),
        ({"steps": None, "minutes": 2.0}, "auto", 4000, 63.2),
        ({"steps": 1000, "minutes": None}, "auto", 1000, 0),
        ({"steps": None, "minutes": 2.0}, 94.0, 1630, 94),
        ({"steps": 1000, "minutes": None}, 7.0, 1000, 7),
    ],
)
def test_chains_have_what_the_budget_leaves(monkeypatch, budget, chains, steps, seconds):
    """A step takes .01 s, 1.3 of them each step; 300 data are worth 4,000 steps of 32. Of minutes .04 are spared."""
    monkeypatch.setattr("bayesopt_chain.ensemble.call.time", SimpleNamespace(perf_counter=lambda: 5.0))
    p = SimpleNamespace(mine=range(4), count=4, batch_size=32, data=SimpleNamespace(size=300))
    found = _cost(SimpleNamespace(seconds=lambda: 0.01, problem=p), **budget, lr=0.01, began=5.0, chains=chains)
    assert found["steps"] == steps and found["chains"] == pytest.approx(seconds, abs=0.02)
    assert found["seconds"] == pytest.approx(1.3 * 0.01 * steps + seconds, abs=0.02)
    assert ("for chains" in found["said"]) == (seconds > 0)


@pytest.mark.slow
def test_draws_stand_beside_the_networks_and_are_saved_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 120})
    slow = {"lr": 0.003, "chains": 500.0}
    plain, e = called(lr=0.003), called(tmp_path / "call", **slow)
    assert (
        e.report.kind.endswith("2 chains, 16 draws of each")
        or e.report.kind == "ensemble of 2 networks, 16 draws of each"
    )
    assert all(torch.equal(x[-1], plain.params[k][0]) for k, x in e.params.items())
    assert all(torch.equal(x[-1], plain.buffers[k][0]) for k, x in e.buffers.items())
    assert e.draws().params[next(iter(e.params))].shape[:2] == (17, 2)
    assert {"chains", "training"} <= e.report.passes.keys() and "T N = v0 / v" in str(e.report)
    assert e.report.held_out["ensemble"] > e.report.held_out["networks alone"]
    scores = e.predict(data()[0]).log_prob(data()[1])
    e.save(tmp_path / "e.safetensors")
    opened = bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", make, bc.likelihoods.gaussian())
    assert torch.equal(opened.predict(data()[0]).log_prob(data()[1]), scores) and str(opened.report) == str(e.report)
    assert torch.equal(called(tmp_path / "call", **slow).predict(data()[0]).log_prob(data()[1]), scores)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(behind, "r_hat", kill)
        with pytest.raises(Killed):
            called(tmp_path / "killed", **slow)
    assert torch.equal(called(tmp_path / "killed", **slow).predict(data()[0]).log_prob(data()[1]), scores)


def test_ensembles_with_draws_are_copied_where_networks_keep_what_they_compute(monkeypatch):
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 110})
    x, y = data()[0].repeat(1, 2)[:, :3], data()[1]
    given = {"members": 2, "steps": 20, "lr": 0.003, "chains": 500.0, "progress": False}
    e = bc.posterior_ensemble(keeps, (x, y), bc.likelihoods.gaussian(), **given)
    assert "draws" in e.report.kind and torch.equal(copy.deepcopy(e).predict(x).mean, e.predict(x).mean)


@pytest.mark.slow
def test_classes_have_chains_too_and_seconds_that_hold_none_buy_an_ensemble():
    x, _ = data()
    cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
    likelihood = bc.likelihoods.categorical()
    alone, e = (
        bc.posterior_ensemble(nn.Linear(2, 3), (x, (x[:, 0] > 0).long()), likelihood, chains=c, **cheap)
        for c in (None, 1e-3)
    )
    assert "an ensemble was the better buy" in str(e.report) and e.report.kind == "ensemble of 2 networks"
    assert torch.equal(e.predict(x).probabilities, alone.predict(x).probabilities)


@pytest.mark.slow
def test_chains_that_fail_keep_the_networks(monkeypatch):
    monkeypatch.setattr(Chains, "run", lambda *_: torch.linalg.cholesky(-torch.eye(2)))
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 120})
    with pytest.raises(bc.ensemble.EnsembleError, match="in chains: ") as caught:
        called(chains=500.0, lr=0.003)
    assert len(caught.value.ensemble.modules()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"chains": c}, "chains") for c in (-1.0, 0, math.nan, math.inf, True, [1])),
        ({"chains": "often"}, "chains"),
        ({"chains": 60, "minutes": 1.0}, "all of minutes=1"),
        ({"chains": "auto", "mesh": SimpleNamespace(get_coordinate=list)}, "pass chains=None, or mesh=None"),
    ],
)
def test_seconds_of_chains_that_there_are_not_are_refused_by_name(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        bc.posterior_ensemble(make, data(), bc.likelihoods.gaussian(), **arguments)
