"""Learned preconditioners: where they are exact, what they sample where they move, what ``step_growth`` finds frozen, and the
derivatives through them.
"""

import math
import warnings

import numpy as np
import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import NormalProbe
from tests.samplers.transfer import QUARTIC
from tests.walk import end_of, variances, walk


def grid_moment(tx, **keywords) -> float:
    """Stationary second moment on the quartic of a chain with Gaussian steps and no memory, from its kernel on a fine grid.

    Its preconditioner has a kink at 0, where polynomials would converge slowly; steps are at least seven grid spacings wide,
    and the trapezoidal rule for a smooth Gaussian of that width is exact to rounding.
    """
    x = torch.linspace(-4.5, 4.5, 1201, dtype=torch.float64)
    kept = {k: fn(x) for k, fn in keywords.items()}

    state = tx.init(x)

    def step(value: float):
        with NormalProbe(torch.full((len(x),), value, dtype=torch.float64)):
            updates, _ = tx.update(QUARTIC.gradient(x), state, params=x, inplace=False, **kept)
        return x + updates

    mean = step(0.0)
    std = (step(1.0) - mean).abs()
    kernel = torch.exp(-(((x[None] - mean[:, None]) / std[:, None]) ** 2) / 2) / std[:, None]
    kernel = kernel / kernel.sum(1, keepdim=True)
    a = (kernel.T - torch.eye(len(x))).numpy()
    a[0] = 1.0
    return float(np.linalg.solve(a, np.eye(len(x))[0]) @ (x**2).numpy())


def test_without_the_drift_the_target_is_the_gibbs_law_over_the_preconditioner():
    x = np.linspace(-8, 8, 16001)
    law = np.exp(-(x**2 / 2 + x**4 / 4)) * (np.abs(x + x**3) + 1.0)
    want = (law * x**2).sum() / law.sum()
    small, smaller = (grid_moment(bc.samplers.psgld(lr, 0.0, 1.0, temperature=1.0, order=1)) for lr in (0.01, 0.005))
    assert 2 * smaller - small == pytest.approx(want, rel=2e-3)


SCALES = torch.tensor([1e-3, 1.0, 1e3], dtype=torch.float64)[:, None]


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
def test_the_adaptive_window_learns_the_mean_square_of_the_gradients(mean):
    """The scaling of a gradient of 1 is ``1 / sqrt(E g^2)`` at every size of the gradients, and stays there when frozen.

    400 parameters at each of three scales, gradients ``scale (mean + n)`` for 1,000 updates. Where the mean is 0 the window is
    at least a few hundred gradients, one parameter's V then has a relative deviation below 10 %, and the mean over 400
    below 0.5 %; where it is 3 the window is about ten gradients, of 0.6 relative deviation each: 20 % and 1 %. Asked:
    the mean over the parameters within 5 % of ``E g^2``, which is at least five deviations.
    """
    tx, p = bc.samplers.scale_by_adaptive_window(1000), torch.zeros(3, 400, dtype=torch.float64)
    state, generator = tx.init(p), torch.Generator().manual_seed(0)
    for _ in range(1000):
        g = SCALES * (mean + torch.randn(3, 400, generator=generator, dtype=torch.float64))
        updates, state = tx.update(g, state, params=p, inplace=False)
        assert torch.isfinite(updates).all()
    one, state = tx.update(torch.ones_like(p), state, params=p, inplace=False)
    learned = (one**-2).mean(1, keepdim=True)
    assert ((learned / (SCALES**2 * (1 + mean**2)) - 1).abs() < 0.05).all(), learned / SCALES**2
    again, _ = tx.update(torch.ones_like(p), state, params=p, inplace=False)
    assert torch.equal(one, again)


@pytest.mark.parametrize("gradient", [1.0, -2.5, 1e-30, 0.0])
def test_the_adaptive_window_takes_constant_gradients(gradient):
    tx, p = bc.samplers.scale_by_adaptive_window(100), torch.zeros(2)
    state = tx.init(p)
    for _ in range(50):
        updates, state = tx.update(torch.full((2,), gradient), state, params=p, inplace=False)
        assert torch.isfinite(updates).all()
        if abs(gradient) >= 1:
            torch.testing.assert_close(updates, torch.full((2,), gradient).sign())


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
        assert (growth > 1.03) == diverged == any(w.category is RuntimeWarning for w in caught), (lr, growth)
    assert diverged


def test_the_state_and_parameters_are_left_as_they_are():
    tx = bc.sghmc(0.01, 0.5, temperature=0.1)
    p, state = burned_in(tx, 3)
    before = [x.clone() for x in optree.tree_leaves((p, state))]
    bc.samplers.step_growth(loss, tx, p, state, ())
    assert all(torch.equal(a, b) for a, b in zip(before, optree.tree_leaves((p, state))))


def stiff_path(tx, updates):
    """500 parameters of curvature 1e4 from just beside the mode."""
    start = torch.full((500,), 1e-6, dtype=torch.float64)
    return [p for p, _ in walk(tx, start, lambda p: 1e4 * p, updates)]


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


# Derivatives through a preconditioner: finite where a unit's gradient is always 0, and exact


MAKES = {
    "adam": lambda: bc.adam(0.1, eps=1e-3),
    "adamw": lambda: bc.adamw(0.1, eps=1e-3),
    "radam": lambda: bc.radam(0.1, eps=1e-3),
    "rmsprop": lambda: bc.rmsprop(0.1, eps=1e-3),
    "centred": lambda: bc.rmsprop(0.1, eps=1e-3, centered=True),
    "adagrad": lambda: bc.adagrad(0.1, eps=1e-3),
    "window": lambda: bc.chain(bc.samplers.scale_by_adaptive_window(100, eps=1e-3), bc.scale_by_neg_lr(0.1)),
}


def descended(make, w: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """The sum of the parameters after three steps down ``w theta^2 / 2``."""
    return end_of(make(), start, lambda p: w * p, 3)[0].sum()


@pytest.mark.parametrize("name", MAKES)
def test_derivatives_are_finite_and_those_of_living_units_those_of_differences(name):
    make, start = MAKES[name], torch.tensor([1.0, 0.0], dtype=torch.float64)
    w = torch.tensor([0.7, 2.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(descended(make, w, start), w)
    step = torch.tensor([1e-6, 0.0], dtype=torch.float64)
    want = (descended(make, w + step, start) - descended(make, w - step, start)).detach() / 2e-6
    torch.testing.assert_close(slope, torch.stack([want, torch.zeros_like(want)]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.grad(lambda w: descended(make, w, start))(w.detach()), slope)
    many = torch.func.grad(lambda w: torch.vmap(lambda s: descended(make, w, s))(torch.stack([start, start])).sum())(
        w.detach()
    )
    torch.testing.assert_close(many, 2 * slope)
