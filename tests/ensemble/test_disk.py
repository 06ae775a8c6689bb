"""A call that is killed at any stage goes on from there, with the same results bit for bit."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import stages as on_disk

SMALL = {"members": 2, "steps": 20, "lr": 0.01, "progress": False, "batch_size": 16, "temperatures": (1.0,)}


class Killed(Exception):
    pass


def data():
    x = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1]


def make():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


def call(path=None, **changes):
    return bc.posterior_ensemble(make, data(), bc.likelihoods.gaussian(), path=path, **{**SMALL, **changes})


@pytest.fixture(scope="module")
def wanted():
    """Scores of the call that nobody kills."""
    return call().predict(data()[0]).log_prob(data()[1])


@pytest.mark.slow
def test_a_call_killed_before_or_behind_every_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted):
    whole = on_disk.Stages.once
    names = []

    def counted(self, name, made):
        names.append(name)
        return whole(self, name, made)

    monkeypatch.setattr(on_disk.Stages, "once", counted)
    call(tmp_path / "counted")
    assert names == ["rate", "pilot", "stop", "prior", "modes", "ladder of pilots", "ladder of modes"]
    for stage in list(names):
        path = tmp_path / stage.replace(" ", "-")

        def kill(self, name, made, stage=stage):
            if name == stage:
                raise Killed
            return whole(self, name, made)

        monkeypatch.setattr(on_disk.Stages, "once", kill)
        with pytest.raises(Killed):
            call(path)
        monkeypatch.setattr(on_disk.Stages, "once", whole)
        assert torch.equal(call(path).predict(data()[0]).log_prob(data()[1]), wanted), stage


@pytest.mark.parametrize("at", [10, *(pytest.param(at, marks=pytest.mark.slow) for at in (22, 26, 50))])
def test_a_call_killed_within_a_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted, at):
    """Steps 10 (pilots), 22 (the prior), 26 (the next prior, or the modes) and 50 (a level)."""
    from bayesopt_chain.ensemble import progress

    seen = []

    def dies(self, it):
        seen.append(it.step)
        if len(seen) == at:
            raise Killed

    monkeypatch.setattr(progress.Progress, "__call__", dies)
    with pytest.raises(Killed):
        call(tmp_path)
    monkeypatch.undo()
    assert torch.equal(call(tmp_path).predict(data()[0]).log_prob(data()[1]), wanted)


def test_another_call_under_the_same_path_is_refused(tmp_path):
    call(tmp_path, method="ensemble")
    with pytest.raises(ValueError, match="seed"):
        call(tmp_path, method="ensemble", seed=1)


def test_another_network_likelihood_or_frozen_weight_under_the_same_path_is_refused(tmp_path):
    x, y = data()
    cold = {**SMALL, "method": "ensemble", "path": tmp_path}
    bc.posterior_ensemble(make, (x, y), bc.likelihoods.student_t(4.0), **cold)

    def other():
        return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))

    with pytest.raises(ValueError, match=r"p=0\.1"):
        bc.posterior_ensemble(other, (x, y), bc.likelihoods.student_t(4.0), **cold)
    with pytest.raises(ValueError, match=r"likelihood.* is 4\.0, here 8\.0"):
        bc.posterior_ensemble(make, (x, y), bc.likelihoods.student_t(8.0), **cold)


def test_damaged_files_are_named(tmp_path):
    call(tmp_path, method="ensemble")
    file = tmp_path / "modes.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"modes\.safetensors is truncated or damaged.*delete it"):
        call(tmp_path, method="ensemble")
    file.unlink()
    call(tmp_path, method="ensemble")  # made anew
    (tmp_path / "call.safetensors").write_text("{")
    with pytest.raises(ValueError, match=r"call\.safetensors is truncated or damaged"):
        call(tmp_path, method="ensemble")


def test_a_bit_that_flips_in_a_stage_is_noticed(tmp_path):
    """Without checksums most flips of a bit gave other weights in silence."""
    x = data()[0]
    before = call(tmp_path, method="ensemble").predict(x).mean
    file = tmp_path / "modes.safetensors"
    raw = file.read_bytes()
    for at in range(3, len(raw), len(raw) // 12):
        file.write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
        with pytest.raises(ValueError, match=r"modes\.safetensors.* damaged.*delete it"):
            call(tmp_path, method="ensemble")
    file.write_bytes(raw)
    assert torch.equal(call(tmp_path, method="ensemble").predict(x).mean, before)


@pytest.mark.slow
def test_a_complete_call_returns_at_once(tmp_path, monkeypatch):
    first = call(tmp_path)
    from bayesopt_chain.ensemble.problem import Problem

    monkeypatch.setattr(Problem, "run", None)
    again = call(tmp_path)
    assert torch.equal(first.predict(data()[0]).mean, again.predict(data()[0]).mean)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["swag", "ivon", "laplace"])
def test_other_methods_go_on_from_their_stages(tmp_path, method):
    first = call(tmp_path, method=method)
    for file in [f for f in sorted(tmp_path.glob("*.safetensors")) if f.stem != "call"][-1:]:
        file.unlink()  # as if the last stage had not been done
    assert torch.equal(call(tmp_path, method=method).predict(data()[0]).mean, first.predict(data()[0]).mean)


@pytest.mark.slow
def test_captured_runs_are_those_of_the_steps_as_they_are_and_go_on_bit_for_bit(tmp_path, monkeypatch):
    """The pilots alone have as many steps here: minibatches, a row of them a member, BatchNorm and dropout."""
    from bayesopt_chain.ensemble import problem, progress

    monkeypatch.setattr(problem, "CAPTURED", 24)
    made = []

    def watched(*arguments):
        made.append(capture(*arguments))
        return made[-1]

    capture = problem.capture
    monkeypatch.setattr(problem, "capture", watched)
    cold, x = {"method": "ensemble", "steps": 24}, data()[0]
    plain, captured = call(**cold), call(capture=True, **cold)
    assert len(made) == 1
    torch.testing.assert_close(plain.predict(x).mean, captured.predict(x).mean, rtol=1e-3, atol=1e-4)

    def dies(self, it):
        if it.step == 10:
            raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(progress.Progress, "__call__", dies)
        with pytest.raises(Killed):
            call(tmp_path, capture=True, **cold)
    assert torch.equal(call(tmp_path, capture=True, **cold).predict(data()[0]).mean, captured.predict(data()[0]).mean)
