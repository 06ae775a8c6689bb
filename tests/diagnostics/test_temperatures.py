"""The temperature that the doctor reads: exactly the one asked for at every stable learning rate, and on runs."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics._response import gains
from bayesopt_chain.diagnostics.forces import forces_of, names_of
from bayesopt_chain.testing import stationary_covariance

LR, T, DOUBLE = 0.1, 0.7, torch.float64
P = {"a": torch.tensor([0.3, 2.0], dtype=DOUBLE), "b": torch.tensor([1.5], dtype=DOUBLE)}


def quadratic(w, batch):
    return (w["a"].square() * torch.tensor([0.5, 2.0])[:, None]).sum() / 2 + w["b"].square().sum() / 2


def run(tx, chains=None, steps=500, n=400):
    """Draws of 3 n parameters in two leaves."""
    params = {"a": torch.zeros(2, n), "b": torch.zeros(n)}
    step = bc.make_step(quadratic, tx)
    if chains:
        step, params = bc.parallel(step, chains), bc.stack([params] * chains)
    state = step.init(tx, params) if chains else tx.init(params)
    return bc.sample(step, params, state, None, steps=steps, burn_in=150, thinning=4)


RUNS = {
    "sgld": (lambda: bc.sgld(LR, temperature=T), {}),
    "nesterov": (lambda: bc.sgd(LR, momentum=0.9, nesterov=True, temperature=T), {}),
    "slow schedule": (
        lambda: bc.sghmc(lambda n: 0.05 + 0.1 * (1 + torch.cos(n.double() * torch.pi / 250)), 0.8, temperature=T),
        {},
    ),
    "parallel": (lambda: bc.sghmc(LR, temperature=T), {"chains": 2}),
    "skip_nonfinite": (lambda: bc.skip_nonfinite(bc.sghmc(LR, temperature=T)), {}),
    "adam, frozen": (lambda: bc.adam(LR, temperature=T, freeze_after=100, eps=1.0), {}),
    "decay": (lambda: bc.sgd(LR, momentum=0.9, weight_decay=0.5, temperature=T), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_has_the_temperature_that_it_was_given(kind):
    """Within 5 standard errors of 1, known to 5 %; two-sided false alarms below 1e-4."""
    build, how = RUNS[kind]
    tx = build()
    found = bc.diagnostics.doctor(run(tx, **how), tx, quadratic, [None]).numbers
    assert {name for name in found if name in ("temperature, a", "temperature, b")} == {
        "temperature, a",
        "temperature, b",
    }
    for leaf in "ab":
        error = found[f"  its standard error, {leaf}"]
        assert abs(found[f"temperature, {leaf}"] - 1) < 5 * error and error < 0.05


def test_the_virial_is_the_temperature_of_the_exact_covariance():
    """``<theta dU/dtheta>`` of correlated parameters, by the whole state's Lyapunov equation."""
    K = torch.tensor([[2.0, 0.7, 0.1], [0.7, 1.0, 0.3], [0.1, 0.3, 0.5]], dtype=DOUBLE)
    for tx in (bc.sghmc(LR, 0.9, temperature=T), bc.sgd(LR, 0.9, nesterov=True, temperature=T)):
        virial = (K @ stationary_covariance(tx, K)).diagonal()
        torch.testing.assert_close(virial, torch.full_like(virial, T), rtol=0, atol=1e-10)


def test_gains_are_what_a_unit_gradient_moves_at_once():
    tx = bc.chain(bc.scale_by_preconditioner(P), bc.sgd(LR, 0.9, nesterov=True, temperature=T))
    params = optree.tree_map(torch.zeros_like, P)
    for gain, p in zip(gains(tx, params, tx.init(params)), optree.tree_leaves(P)):
        torch.testing.assert_close(gain, LR * 1.9 * p, rtol=1e-9, atol=0)


class Mixing:
    """A precision that is not diagonal."""

    def solve(self, tree, /):
        return optree.tree_map(lambda x: x + x.mean(), tree)

    def sqrt_solve(self, tree, /):
        return optree.tree_map(lambda x: x + (2**0.5 - 1) * x.mean(), tree)


def test_what_cannot_be_read_is_refused():
    params = optree.tree_map(torch.zeros_like, P)
    tx = bc.chain(bc.scale_by_preconditioner(Mixing()), bc.sghmc(LR, temperature=T))
    with pytest.raises(ValueError, match="act on each other"):
        gains(tx, params, tx.init(params))
    decoupled = bc.chain(
        bc.add_momentum(0.9), bc.links.add_decayed_weights(0.5), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(LR)
    )
    with pytest.raises(ValueError, match="stands behind a momentum"):
        bc.diagnostics.doctor(run(decoupled, steps=200), decoupled, quadratic, [None])


def test_levels_follow_a_schedule():
    tx = bc.sghmc(0.1, temperature=lambda n: 2.0 + n)
    assert [forces_of(tx, torch.zeros(2), None, step).levels for step in (None, 3)] == [
        {"tensor": 2.0},
        {"tensor": 5.0},
    ]


def test_leaves_whose_names_would_be_one_are_called_by_their_paths():
    params = {"a": {"b": torch.zeros(5)}, "a/b": torch.zeros(5), "c": torch.zeros(5)}
    assert forces_of(bc.sgld(0.2, temperature=0.5), params).levels == {"['a']['b']": 0.5, "['a/b']": 0.5, "c": 0.5}
    assert names_of(("['layer']['weight']", "[0]", "")) == ("layer/weight", "0", "tensor")
