"""Faults that runs on disk had, each with the right answer."""

import contextlib
import os
import shutil
import warnings

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

FACTOR = torch.ones(5)


def scaled(w):
    return (w**2).sum()


def scaled_otherwise(w):
    return (w**2).sum() * 5.0


def quadratic(p, batch):
    return (p["w"] ** 2).sum()


def with_a_tensor(p, batch):
    return ((p["w"] ** 2) * FACTOR).sum()


def with_a_function(p, batch):
    return scaled(p["w"])


def run(path, loss=quadratic, data=None, steps=20):
    torch.manual_seed(0)
    tx, p = bc.sghmc(0.05, temperature=1e-2), {"w": torch.zeros(5)}
    return bc.sample(bc.make_step(loss, tx), p, tx.init(p), data, steps=steps, path=path)


def collector(path):
    model = nn.Linear(5, 1, bias=False)
    optimizer = bc.optim.SGHMC(model.parameters(), lr=0.01, temperature=1e-3)
    keep = bc.collect(model, optimizer, every=1, path=path)

    def steps(n):
        for _ in range(n):
            optimizer.zero_grad()
            model.weight.square().sum().backward()
            optimizer.step()

    return keep, steps


@pytest.mark.parametrize(
    "loss, name, value", [(with_a_tensor, "FACTOR", 5 * torch.ones(5)), (with_a_function, "scaled", scaled_otherwise)]
)
def test_what_a_loss_reads_from_its_module_is_compared(loss, name, value, tmp_path, monkeypatch):
    run(tmp_path, loss)
    monkeypatch.setitem(globals(), name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, UserWarning), match=name):
            run(tmp_path, loss, steps=40)


@pytest.mark.parametrize("epochs", [False, True])
def test_one_label_that_was_mended_makes_other_data(epochs, tmp_path):
    """Wherever it stands: all data in memory are compared, not some rows of them."""
    x, y = torch.randn(1000, 5), torch.randn(1000)
    mended = y.clone()
    mended[1] += 3.0

    def data(y):
        return bc.epochs((x, y), 100, seed=0) if epochs else (x, y)

    def loss(p, batch):
        return (batch[0] @ p["w"] - batch[1]).square().mean() / 2

    run(tmp_path, loss, data(y))
    with pytest.raises(ValueError, match="data"):
        run(tmp_path, loss, data(mended), steps=40)


def test_draws_are_neither_doubled_nor_lost_by_a_write_that_fails(tmp_path, monkeypatch):
    real, wrong = os.fsync, []
    for at in range(1, 8):
        keep, steps = collector(tmp_path / str(at))
        steps(10)
        count = [0]

        def failing(fd, count=count, at=at):
            count[0] += 1
            if count[0] == at:
                raise OSError(5, "I/O error")
            return real(fd)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", failing)
            with contextlib.suppress(OSError):
                keep.flush()
        steps(10)
        try:
            keep.flush()
        except RuntimeError as error:
            wrong.append((at, str(error)))
        whole = list(range(1, 21))
        if keep.draws.steps.tolist() != whole or bc.Draws.open(tmp_path / str(at)).steps.tolist() != whole:
            wrong.append((at, len(keep.draws)))
    assert not wrong


def test_a_folder_that_was_removed_is_named(tmp_path):
    keep, steps = collector(tmp_path / "draws")
    steps(10)
    keep.flush()
    shutil.rmtree(tmp_path / "draws")
    steps(10)
    with pytest.raises((OSError, RuntimeError, ValueError), match="draws"):
        keep.flush()


def test_a_folder_with_brackets_in_its_name_is_read(tmp_path):
    made = run(tmp_path / "run[1]")
    assert len(bc.Draws.open(tmp_path / "run[1]")) == len(made)
