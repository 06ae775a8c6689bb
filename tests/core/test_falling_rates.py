"""Chains whose learning rate falls sample ``T / curvature`` at every step: exactly, by the maps of their own updates."""

from typing import Any

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import variance_along

S, T = bc.schedules, 0.7
FALLS = {
    "StepLR": S.piecewise([5, 10], [0.1, 0.01, 0.0001]),
    "MultiStepLR": S.piecewise([3, 4, 12], [0.1, 0.06, 0.002, 0.001]),
    "cosine": S.cosine(0.1, 15),
    "linear": S.polynomial(0.1, 20, final=1e-3),
    "exponential": lambda count: 0.1 * 0.8 ** torch.as_tensor(count).double(),
    "polynomial": S.polynomial(0.1, 16, final=1e-6, power=3.0),
    "zero in the middle and last": S.piecewise([3, 4, 6, 8, 9, 12], [0.1, 0.0, 0.1, 0.0, 0.05, 0.01, 0.0]),
}
STEPS = 16


def error(tx: Any, curvatures, prior: float = 0.0, steps: int = STEPS, **kwargs: Any) -> float:
    """The largest ``|Var theta (K + prior) / T - 1|`` over the steps and curvatures."""
    k = torch.as_tensor(curvatures, dtype=torch.float64)
    covariance = variance_along(tx, k.diag(), steps, **kwargs)
    off = covariance * (k + prior) / T - torch.eye(len(k), dtype=torch.float64)
    return off.abs().max().item()


def of_the_limit(mu: float) -> list[float]:
    return [fraction * 2 * (1 + mu) / 0.1 for fraction in (0.03, 0.1, 0.3, 0.6, 0.9)]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mu", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("schedule", FALLS)
def test_momentum_is_exact_along_every_fall(schedule, mu):
    assert error(bc.sgd(FALLS[schedule], mu, temperature=T), of_the_limit(mu)) < 1e-9


def links(mu: float, lr: Any, **momentum: Any) -> tuple[Any, ...]:
    return bc.add_momentum(mu, **momentum), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(lr)


CHAINS = {
    "Nesterov": (lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=T), 0.0),
    "Nesterov, little momentum": (lambda lr: bc.sgd(lr, 0.1, nesterov=True, temperature=T), 0.0),
    "dampening": (lambda lr: bc.sgd(lr, 0.9, dampening=0.4, temperature=T), 0.0),
    "average": (lambda lr: bc.chain(bc.links.scale(0.1), *links(0.9, lr)), 0.0),
    "coupled decay": (lambda lr: bc.sgd(lr, 0.9, weight_decay=0.5, temperature=T), 0.5),
    "decoupled decay": (
        lambda lr: bc.chain(*links(0.9, lr)[:2], bc.links.add_decayed_weights(0.5), links(0.9, lr)[2]),
        0.05,
    ),
    "decoupled decay behind Nesterov": (
        lambda lr: bc.chain(*links(0.9, lr, nesterov=True)[:2], bc.links.add_decayed_weights(0.5), links(0.9, lr)[2]),
        0.05,
    ),
    "rate and gain in front and behind": (lambda lr: bc.chain(bc.links.scale_by_schedule(lr), *links(0.9, 0.5)), 0.0),
    "two rates": (lambda lr: bc.chain(bc.links.scale_by_schedule(lr), *links(0.9, S.cosine(1.0, 30))), 0.0),
    "preconditioner": (
        lambda lr: bc.chain(bc.scale_by_preconditioner(torch.tensor([0.5, 2.0]).double()), *links(0.9, lr)),
        0.0,
    ),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("schedule", ["StepLR", "cosine"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_all_kinds_are_exact_along_a_fall(name, schedule):
    build, prior = CHAINS[name]
    assert error(build(FALLS[schedule]), [0.2, 8.0], prior) < 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_a_rate_in_front_of_the_momentum_is_exact_too_and_leaves_the_velocity_alone_on_the_way(mu):
    def build(schedule):
        return bc.chain(bc.scale_by_neg_lr(schedule), bc.add_momentum(mu), bc.inject_langevin_noise(T))

    for name in ("StepLR", "linear"):
        assert error(build(FALLS[name]), of_the_limit(mu)[::2]) < 1e-9
    # a fall that is slow enough: with T -> 0 the chain is the optimizer, whose velocity nobody scales
    tx, cold = (bc.chain(bc.scale_by_neg_lr(FALLS["linear"]), bc.add_momentum(mu), *noise) for noise in
                ([bc.inject_langevin_noise(1e-30)], []))  # fmt: skip
    p = torch.ones(1, dtype=torch.float64)
    states = [tx.init(p), cold.init(p)]
    for _ in range(12):
        (a, states[0]), (b, states[1]) = (x.update(p, s, params=p, inplace=False) for x, s in zip((tx, cold), states))
        assert (a - b).abs().max() < 1e-12


@pytest.mark.slow
def test_correlated_parameters_and_groups_with_rates_of_their_own_are_exact():
    curvature = torch.tensor([[2.0, 0.6, 0.1], [0.6, 1.0, 0.0], [0.1, 0.0, 3.0]], dtype=torch.float64)
    tx = bc.partition(
        {
            "a": bc.sgd(FALLS["StepLR"], 0.9, temperature=T),
            "b": bc.sgd(FALLS["cosine"], nesterov=True, momentum=0.5, temperature=T),
        },
        {"x": "a", "y": "b"},
    )
    params = {"x": torch.zeros(2, dtype=torch.float64), "y": torch.zeros(1, dtype=torch.float64)}
    path = variance_along(tx, curvature, STEPS, params)
    want = T * torch.linalg.inv(curvature)
    assert (path - want).abs().max() < 1e-9


def test_a_state_of_an_older_version_is_refused_by_name():
    p = torch.zeros(2)
    tx = bc.sgd(FALLS["cosine"], 0.9, temperature=T)
    state = tx.init(p)
    (i,) = [i for i, entry in enumerate(state) if hasattr(entry, "conditions")]
    old = state.replace(i, state[i]._replace(conditions=(torch.zeros(1, 3, dtype=torch.float64),)))
    with pytest.raises(ValueError, match="conditions hold 3 numbers"):
        tx.update(p, old, params=p)
