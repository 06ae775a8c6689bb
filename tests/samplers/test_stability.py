"""``step_growth``: the stability limits that are known in closed form, frozen preconditioners, what it warns of."""

import math
import warnings

import optree
import pytest
import torch

import bayesopt_chain as bc
from tests.walk import end_of, variances

CURVATURE = torch.tensor([100.0, 3.0], dtype=torch.float64)


def loss(params, batch):
    return (CURVATURE * params**2).sum() / 2


def burned_in(tx, updates: int, start: float = 0.05):
    """Parameters and state after some updates at the loss's gradient."""
    p = torch.full((2,), start, dtype=torch.float64)
    return end_of(tx, p, lambda p: CURVATURE * p, updates) if updates else (p, tx.init(p))


def test_growth_is_the_spectral_radius():
    tx = bc.sghmc(0.035, 0.5, temperature=0.0)
    p, state = burned_in(tx, 0)
    step = torch.tensor([[1 + 0.5 - 3.5, -0.5], [1.0, 0.0]], dtype=torch.float64)
    want = torch.linalg.eigvals(step).abs().max().item()
    with pytest.warns(RuntimeWarning):
        assert bc.samplers.step_growth(loss, tx, p, state, ()) == pytest.approx(want, rel=0.01)


FROZEN = {
    "psgld": lambda lr: bc.samplers.psgld(lr, 0.9, temperature=1e-4, freeze_after=20),
    "adam": lambda lr: bc.adam(lr, (0.5, 0.9), temperature=1e-4, freeze_after=20),
    "adaptive_sghmc": lambda lr: bc.samplers.adaptive_sghmc(lr, 0.5, temperature=1e-4, burn_in=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_a_preconditioner_frozen_where_it_is_unstable_is_found_before_the_chain_diverges(name):
    """Frozen at gradients near 0 the scale is large; the answer is compared with what 300 further updates do."""
    for lr in (1e-4, 0.3):
        tx = FROZEN[name](lr)
        p, state = burned_in(tx, 25)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            growth = bc.samplers.step_growth(loss, tx, p, state, ())
        far, _ = end_of(tx, p, lambda p: CURVATURE * p, 300, state)
        diverged = far.abs().max().item() > 1e3
        assert (growth > 1.03) == diverged == bool(caught), (lr, growth, diverged)
    assert diverged


def test_the_state_and_parameters_are_left_as_they_are():
    tx = bc.sghmc(0.01, 0.5, temperature=0.1)
    p, state = burned_in(tx, 3)
    before = [x.clone() for x in optree.tree_leaves((p, state))]
    bc.samplers.step_growth(loss, tx, p, state, ())
    assert all(torch.equal(a, b) for a, b in zip(before, optree.tree_leaves((p, state))))


def stiff_path(tx, updates: int, start: float = 1e-6):
    """500 parameters of curvature 1e4 from just beside the mode."""
    p = torch.full((500,), start, dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        state = tx.init(p)
    path = []
    for _ in range(updates):
        u, state = tx.update(1e4 * p, state, params=p, inplace=False)
        p = p + u
        path.append(p)
    return path


def test_radam_holds_its_noise_until_its_updates_are_rectified():
    """lr * curvature = 10: noise in the five unscaled updates was amplified to 65 standard deviations of the target."""
    temperature = 1e-2
    hot, cold = stiff_path(bc.radam(1e-3, temperature=temperature), 12), stiff_path(bc.radam(1e-3), 12)
    assert all(torch.equal(a, b) for a, b in zip(hot[:5], cold[:5]))
    assert all(not torch.equal(a, b) for a, b in zip(hot[6:], cold[6:]))
    target = math.sqrt(temperature / 1e4)
    assert max((a - b).square().mean().sqrt().item() for a, b in zip(hot[:5], cold[:5])) < target


@pytest.mark.parametrize(
    "settings",
    [{"betas": (0.9, 0.6)}, {"betas": (0.9, 0.5)}, {"freeze_after": 3}],
    ids=["rho = 4", "rho = 3", "frozen before"],
)
def test_radam_that_never_rectifies_samples_from_its_first_update(settings):
    """There its scale is 1 for ever, and after 200 updates nothing is left of the start at the mode."""
    found = variances(bc.radam(0.2, temperature=0.5, **settings), 2.0, 200)
    assert found[0] > 0
    assert found[-1].item() == pytest.approx(0.25, rel=1e-6)


def test_growth_finds_radam_unstable_before_its_first_update():
    tx = bc.radam(0.1)
    p, state = burned_in(tx, 0)
    with pytest.warns(RuntimeWarning, match="diverges"):
        assert bc.samplers.step_growth(loss, tx, p, state, ()) > 5
