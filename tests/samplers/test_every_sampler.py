"""One registry of samplers against one list of laws."""

import pytest
import torch

from bayesopt_chain.testing import _laws, assert_zero_temperature_limit
from bayesopt_chain.testing._zero_temperature import example_params
from tests.samplers.registry import LAW, SAMPLERS
from tests.samplers.transfer import fitted_slope


def stacked_params(dtype=torch.float64):
    """The example tree with two chains on axis 0 of every leaf."""
    tree = example_params(torch.float64)
    out = {
        "bias": tree["bias"][:2],
        "scale": torch.stack([tree["scale"], 0.5 - tree["scale"]]),
        "weight": tree["weight"],
    }
    return {k: v.clone().to(dtype) for k, v in out.items()}


@pytest.mark.parametrize("law", LAW.values(), ids=LAW.keys())
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_it_obeys_the_law(sampler, law, monkeypatch):
    if law.__name__ in sampler.skip:
        pytest.skip(sampler.why)
    if sampler.stacked:
        monkeypatch.setattr(_laws, "example_params", stacked_params)
    law(lambda: sampler.build(0.3))


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.limit], ids=str)
def test_at_temperature_zero_it_is_its_optimizer(sampler):
    assert_zero_temperature_limit(sampler.cold or sampler.build, sampler.limit)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.order], ids=str)
def test_its_bias_has_the_stated_order(sampler, every_draw_is_normal):
    order = sampler.order
    slope, biases = fitted_slope(order.probe, order.steps, degree=order.degree, noise=order.noise)
    assert abs(slope - order.slope) < 0.1, f"fitted {slope:.3f}, stated {order.slope}; biases {biases}"
