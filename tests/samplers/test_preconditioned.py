"""Learned preconditioners: where they are exact, and what they sample where they move with the position."""

import numpy as np
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import NormalProbe
from tests.samplers.transfer import QUARTIC


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
    law = np.linalg.solve(a, np.eye(len(x))[0])
    return float(law @ (x**2).numpy())


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
