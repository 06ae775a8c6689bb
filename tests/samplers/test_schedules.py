"""Schedules: values, purity under vmap, pickling and counts; cyclical sampling along one: phases, noise against the paper's."""

import math
import pickle
from functools import partial

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain import schedules as s
from bayesopt_chain.testing import assert_bitwise_equal
from bayesopt_chain.testing._zero_temperature import example_params, run, smooth_gradient
from tests.walk import variances


def half_cosine(fraction: float) -> float:
    return (1 + math.cos(math.pi * fraction)) / 2


WRITTEN_OUT = {
    "constant": (s.constant(0.3), lambda t: 0.3),
    "cosine": (s.cosine(1.0, 20, final=0.1), lambda t: 0.1 + 0.9 * half_cosine(min(t / 20, 1))),
    "cosine_restarts": (
        s.cosine_restarts(1.0, 7, final=0.1, decay=0.5),
        lambda t: 0.1 + 0.9 * 0.5 ** (t // 7) * half_cosine(t % 7 / 7),
    ),
    "polynomial": (s.polynomial(1.0, 20, power=2.0), lambda t: (1 - min(t / 20, 1)) ** 2),
    "robbins_monro": (s.robbins_monro(0.5, b=10.0, gamma=0.6), lambda t: 0.5 * (10 + t) ** -0.6),
    "piecewise": (s.piecewise((5, 15), (1.0, 0.5, 0.1)), lambda t: (1.0, 0.5, 0.1)[(t >= 5) + (t >= 15)]),
    "join": (
        s.join((s.polynomial(0.0, 5, final=1.0), s.cosine(1.0, 10), s.constant(0.2)), (5, 15)),
        lambda t: (t / 5, half_cosine((t - 5) / 10), 0.2)[(t >= 5) + (t >= 15)],
    ),
}
EVERY = {name: schedule for name, (schedule, _) in WRITTEN_OUT.items()}


@pytest.mark.parametrize("name", EVERY)
def test_values_are_the_formulas(name):
    for t in range(30):
        value = EVERY[name](torch.tensor(t))
        assert value.dtype == torch.float64 and value.ndim == 0
        assert value.item() == pytest.approx(WRITTEN_OUT[name][1](t), abs=1e-12)
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


@pytest.mark.parametrize("temperature", [1.0, torch.tensor(1.0)])
@pytest.mark.parametrize("build", [bc.samplers.cyclical, partial(bc.samplers.cyclical, lr_inside=True)])
def test_exploration_is_the_optimizer(build, temperature):
    """Until the first sampling phase no noise moves anything, and its first update does."""
    params = example_params()
    hot, cold = (
        [run(build(0.1, 20, 10, 0.9, temperature=t), params, smooth_gradient, steps)[0] for steps in (10, 11)]
        for t in (temperature, 0.0)
    )
    assert_bitwise_equal(hot[0], cold[0])
    assert all(not torch.equal(hot[1][k], cold[1][k]) for k in params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peak", "lowest", "highest", "rms"),
    [(0.3, -0.209, 0.234, 0.020), (1.0, -0.099, 0.807, 0.053), (3.0, -0.343, 5.981, 0.463)],
)
def test_the_variance_at_a_restart_is_off_by_what_the_docs_say(peak, lowest, highest, rms):
    """Momentum 0.9, cycles of 500 updates, ``peak`` the largest lr times the curvature; the second cycle."""
    tx = bc.sgd(bc.schedules.cosine_restarts(peak, 500), momentum=0.9, temperature=1.0)
    error = variances(tx, 1.0, 1000)[500:] - 1
    assert error.min().item() == pytest.approx(lowest, abs=0.001)
    assert error.max().item() == pytest.approx(highest, abs=0.001)
    assert error.square().mean().sqrt().item() == pytest.approx(rms, abs=0.001)


@pytest.mark.slow
def test_the_late_sampling_phase_is_at_temperature_and_with_lr_inside_too_warm():
    inside, ours = (
        variances(bc.samplers.cyclical(0.1, 200, 100, 0.97, temperature=1.0, lr_inside=inside), 1.0, 400) - 1
        for inside in (True, False)
    )
    assert ours[-50:].abs().max() < 0.12
    assert inside[-10:].min() > 1.0
