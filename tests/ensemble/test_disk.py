"""A call that is killed at any stage goes on from there, with the same results bit for bit."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import stages as on_disk
from bayesopt_chain.ensemble.recipe import Training
from bayesopt_chain.ensemble.report import Progress

SMALL = {"members": 2, "steps": 60, "progress": False, "batch_size": 16}


class Killed(Exception):
    pass


def data():
    """Of nearly equal columns, whose principal axes are a stage too."""
    x = torch.randn(48, 2, generator=torch.Generator().manual_seed(0))
    x[:, 1] = x[:, 0] + 1e-3 * x[:, 1]
    return x, x[:, :1]


def make(dropout=0.1):
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 1))


def call(path=None, **changes):
    given = {"make_model": make, "data": data(), "likelihood": bc.likelihoods.gaussian(), "path": path}
    return bc.posterior_ensemble(**given | SMALL | changes)


@pytest.fixture(scope="module")
def wanted():
    """Scores of the call that nobody kills."""
    return call().predict(data()[0]).log_prob(data()[1])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["axes", "cost", "rate", "training"])
def test_a_call_killed_before_a_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted, stage):
    whole = on_disk.Stages.once

    def kill(self, name, made):
        if name == stage:
            raise Killed
        return whole(self, name, made)

    with monkeypatch.context() as killing:
        killing.setattr(on_disk.Stages, "once", kill)
        with pytest.raises(Killed):
            call(tmp_path)
    assert torch.equal(call(tmp_path).predict(data()[0]).log_prob(data()[1]), wanted)


@pytest.mark.parametrize("at", [30, *(pytest.param(at, marks=pytest.mark.slow) for at in (38, 61, 78, 93))])
def test_a_call_killed_within_a_stage_goes_on_bit_for_bit(tmp_path, monkeypatch, wanted, at):
    """18 steps try rates, 60 train, in which noise is renewed before steps 12, 24, 36 and 48, and 18 are with all data."""
    seen = []
    whole = Progress.__call__

    def dies(self, steps=1):
        seen.append(steps)
        if len(seen) == at:
            raise Killed
        whole(self, steps)

    monkeypatch.setattr(Progress, "__call__", dies)
    with pytest.raises(Killed):
        call(tmp_path)
    monkeypatch.undo()
    assert torch.equal(call(tmp_path).predict(data()[0]).log_prob(data()[1]), wanted)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": 1}, "seed"),
        ({"make_model": lambda: make(0.2)}, r"p=0\.1"),
        ({"likelihood": bc.likelihoods.student_t(8.0)}, r"likelihood.* is 4\.0, here 8\.0"),
    ],
)
def test_another_call_under_the_same_path_is_refused(tmp_path, change, words):
    own = {"likelihood": bc.likelihoods.student_t(4.0)}
    call(tmp_path, **own)
    with pytest.raises(ValueError, match=words):
        call(tmp_path, **own | change)


@pytest.mark.slow
def test_damage_is_named_and_a_stage_that_is_deleted_is_made_anew(tmp_path):
    """Without checksums most flips of a bit gave other weights in silence."""
    x = data()[0]
    before = call(tmp_path).predict(x).mean
    file = tmp_path / "training.safetensors"
    raw = file.read_bytes()
    flips = [raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :] for at in range(3, len(raw), len(raw) // 4)]
    for spoiled in (raw[:100], *flips):
        file.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"training\.safetensors.* damaged.*delete it"):
            call(tmp_path)
    file.unlink()
    assert torch.equal(call(tmp_path).predict(x).mean, before)
    (tmp_path / "call.safetensors").write_text("{")
    with pytest.raises(ValueError, match=r"call\.safetensors is truncated or damaged"):
        call(tmp_path)


def test_a_complete_call_returns_at_once(tmp_path, monkeypatch):
    first = call(tmp_path)
    monkeypatch.setattr(Training, "train", None)
    again = call(tmp_path)
    assert torch.equal(first.predict(data()[0]).mean, again.predict(data()[0]).mean)
