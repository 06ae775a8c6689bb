"""The probe reads a user's own draws, whatever function makes them."""

import pytest
import torch

from bayesopt_chain.testing import NormalProbe


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.empty(3).normal_(2.0, 0.5),
        lambda: torch.empty(3).normal_(mean=2.0, std=0.5),
        lambda: torch.normal(2.0, 0.5, (3,)),
        lambda: torch.normal(torch.full((3,), 2.0), 0.5),
        lambda: torch.normal(2.0, torch.full((3,), 0.5)),
        lambda: torch.normal(torch.full((3,), 2.0), torch.full((3,), 0.5)),
        lambda: 2.0 + 0.5 * torch.randn(3),
    ],
)
def test_mean_and_deviation_of_a_draw_are_the_callers(draw):
    with NormalProbe(torch.tensor([1.0, -1.0, 2.0])) as probe:
        x = draw()
    assert probe.drawn == 3
    torch.testing.assert_close(x, torch.tensor([2.5, 1.5, 3.0]))


def test_too_few_numbers_and_a_matrix_of_them_are_refused():
    with NormalProbe(torch.ones(2)), pytest.raises(ValueError, match="values holds 2 numbers, and 3 are drawn"):
        torch.randn(3)
    with pytest.raises(TypeError, match=r"values must be numbers, a tensor \[n\]"):
        NormalProbe(torch.ones(2, 2))


@pytest.mark.parametrize(
    "draw", [torch.Tensor.uniform_, torch.Tensor.exponential_, torch.poisson, torch.bernoulli, torch.dropout]
)
def test_draws_that_are_not_normal_are_refused(draw):
    """Any operation that torch knows to draw, not those of a list: an exponential draw at its own value is no zero."""
    more = (0.5, True) if draw is torch.dropout else ()
    with NormalProbe(), pytest.raises(TypeError, match="not a normal; only Gaussian noise"):
        draw(torch.full((3,), 0.5), *more)
