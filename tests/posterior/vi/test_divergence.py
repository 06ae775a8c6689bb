"""Losses over a small noise variance do not throw the mean away; optimizers that do more than follow gradients are refused."""

import math

import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc

FAMILIES = {
    "mean_field": bc.vi.mean_field,
    "low_rank": lambda *a, **k: bc.vi.low_rank(*a, rank=1, **k),
    "dense": bc.vi.dense,
}


def network():
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 64)[:, None]
    module = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    forward, params, _ = bc.make_functional(module)
    return forward, params, (x, torch.sin(3 * x) + 0.05 * torch.randn_like(x))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 10_000.0])
def test_ivon_at_the_settings_of_the_documentation_learns_whatever_the_noise(scale):
    """``scale`` is one over the noise variance.

    The mean of the last 20 losses is below .8 of that of the first 20, below half where the noise is smaller: one loss alone is
    that of one draw, and varies sevenfold. Without the trust radius the larger scale ends twice as high.
    """
    forward, params, batch = network()
    steps, begun, ends = 500, {}, {}
    for radius in (None, math.inf):
        tx = bc.vi.ivon(
            lambda count: 0.1 * (1 - count / steps),
            temperature=1 / 64,
            betas=(0.9, 1 - 5 / steps),
            weight_decay=1 / 64,
            init_hessian=0.1,
            generator=torch.Generator().manual_seed(3),
            trust_radius=radius,
        )
        step = bc.make_step(lambda p, batch: (forward(p, batch) - batch[1]).square().mean() * scale / 2, tx)
        mean, state, losses = params, tx.init(params), []
        for _ in range(steps):
            mean, state, info = step(mean, state, batch)
            losses.append(info.loss.item())
        begun[radius], ends[radius] = sum(losses[:20]), sum(losses[-20:])
    assert ends[None] < (0.8 if scale == 1 else 0.5) * begun[None], (begun, ends)
    if scale > 1:
        assert not ends[math.inf] < 2 * ends[None], ends


@pytest.mark.parametrize("make", [bc.vi.ivon, bc.vi.von], ids=["ivon", "von"])
def test_a_step_stays_within_the_trust_radius_and_is_newtons_inside(make):
    """A quadratic of curvature 1e6 begun with a Hessian of 1; the bound in deviations of the posterior after the step."""
    params = torch.ones(3, dtype=torch.float64)
    curvature = bc.curvature.ggn(lambda p, batch: batch[0] * p, bc.likelihoods.gaussian(1e-6), "diagonal")
    loss = lambda p, batch: (batch[0] * p).square().mean() / 2e-6  # noqa: E731
    batch = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
    sizes = {}
    for radius in (0.5, None, math.inf):
        tx = make(0.1, temperature=1 / 4, trust_radius=radius, generator=torch.Generator().manual_seed(0))
        step = bc.make_step(loss, tx, curvature=curvature if make is bc.vi.von else None)
        moved, state, _ = step(params, tx.init(params), batch)
        deviation = tx.posterior(state, moved).marginal_variance.sqrt()
        ratio = (moved - params).abs() / deviation
        sizes[radius] = ratio.max() if make is bc.vi.ivon else ratio.square().mean().sqrt()
    default = 1.0 if make is bc.vi.ivon else 10.0
    assert sizes[0.5] <= 0.5 * (1 + 1e-9) and sizes[None] <= default * (1 + 1e-9)
    assert sizes[0.5] < sizes[None] <= sizes[math.inf] > default


@pytest.mark.parametrize("name", FAMILIES)
def test_optimizers_that_decay_weights_and_samplers_are_refused(name):
    params = {"w": torch.ones(3, 2), "b": torch.zeros(2)}
    for optimizer, words in (
        (bc.adamw(1e-2), "the optimizer has weight decay"),
        (bc.sgd(1e-2, weight_decay=1e-3), "the optimizer has weight decay"),
        (torchopt.adam(1e-2, weight_decay=1e-3), "the optimizer has weight decay"),
        (bc.sgld(1e-2, temperature=1e-3), "the optimizer adds noise"),
        (bc.adam(1e-2, temperature=1e-3), "the optimizer adds noise"),
    ):
        with pytest.raises(ValueError, match=words):
            FAMILIES[name](optimizer, temperature=1e-2).init(params)
    for optimizer in (bc.adam(1e-2), torchopt.sgd(1e-2, momentum=0.9), torchopt.rmsprop(1e-2)):
        before = torch.random.get_rng_state()
        tx = FAMILIES[name](optimizer, temperature=1e-2, generator=torch.Generator().manual_seed(0))
        tx.init(params)
        assert torch.equal(before, torch.random.get_rng_state())
    FAMILIES[name](bc.adamw(1e-2), temperature=0.0).init(params)  # there it is that optimizer
