"""Schedules: values, and purity under vmap, pickling and integer or tensor counts."""

import math
import pickle

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import schedules as s

EVERY = {
    "constant": s.constant(0.3),
    "cosine": s.cosine(1.0, 20, final=0.1),
    "cosine_restarts": s.cosine_restarts(1.0, 7, final=0.1, decay=0.5),
    "polynomial": s.polynomial(1.0, 20, power=2.0),
    "robbins_monro": s.robbins_monro(0.5, b=10.0, gamma=0.6),
    "piecewise": s.piecewise((5, 15), (1.0, 0.5, 0.1)),
    "join": s.join((s.polynomial(0.0, 5, final=1.0), s.cosine(1.0, 10), s.constant(0.2)), (5, 15)),
}


def written_out(name: str, t: int) -> float:
    if name == "constant":
        return 0.3
    if name == "cosine":
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(t / 20, 1))) / 2
    if name == "cosine_restarts":
        return 0.1 + 0.9 * 0.5 ** (t // 7) * (1 + math.cos(math.pi * (t % 7) / 7)) / 2
    if name == "polynomial":
        return (1 - min(t / 20, 1)) ** 2
    if name == "robbins_monro":
        return 0.5 * (10 + t) ** -0.6
    if name == "piecewise":
        return 1.0 if t < 5 else 0.5 if t < 15 else 0.1
    if t < 5:
        return t / 5
    return (1 + math.cos(math.pi * (t - 5) / 10)) / 2 if t < 15 else 0.2


@pytest.mark.parametrize("name", EVERY)
def test_values_are_the_formulas(name):
    for t in range(30):
        value = EVERY[name](torch.tensor(t))
        assert value.dtype == torch.float64 and value.ndim == 0
        assert value.item() == pytest.approx(written_out(name, t), abs=1e-12)
        assert EVERY[name](t).item() == value.item()


@pytest.mark.parametrize("name", EVERY)
def test_vmapped_counts_give_the_looped_values(name):
    counts = torch.arange(30)
    looped = torch.stack([EVERY[name](t) for t in counts])
    torch.testing.assert_close(torch.vmap(EVERY[name])(counts), looped, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_schedules_pickle_compare_and_hash(name):
    twin = pickle.loads(pickle.dumps(EVERY[name]))
    assert twin == EVERY[name] and hash(twin) == hash(EVERY[name])
    assert bc.sgd(twin) == bc.sgd(EVERY[name])


def test_a_schedule_drives_an_optimizer_as_its_values_do():
    tx, p = bc.sgd(s.cosine(1.0, 4)), torch.tensor([2.0])
    state = tx.init(p)
    for t in range(5):
        updates, state = tx.update(torch.ones(1), state, params=p, inplace=False)
        assert updates.item() == pytest.approx(-(1 + math.cos(math.pi * min(t / 4, 1))) / 2, abs=1e-7)
