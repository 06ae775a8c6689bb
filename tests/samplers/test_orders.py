"""The order of every sampler's bias in its step, on the quartic well, from a step and four times that."""

import pytest

from tests.registry import SAMPLERS
from tests.samplers.transfer import fitted_slope


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s.order], ids=str)
def test_its_bias_has_the_stated_order(sampler, every_draw_is_normal):
    order = sampler.order
    slope, biases = fitted_slope(order.probe, order.steps[::2], degree=order.degree)
    assert abs(slope - order.slope) < 0.1, f"fitted {slope:.3f}, stated {order.slope}; biases {biases}"
