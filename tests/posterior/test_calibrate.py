"""Corrections by held-out data: exact coverage by exchangeability, and the minimum of the held-out loss."""

import math

import pytest
import torch
from scipy.optimize import minimize_scalar

import bayesopt_chain as bc
from bayesopt_chain import likelihoods


def gaussian(n, variance):
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    return likelihoods.gaussian(variance).predictive(zeros, zeros[..., None])


@pytest.mark.slow
@pytest.mark.parametrize("variance", (0.1, 1.0, 9.0))
def test_conformal_intervals_hold_a_new_target_as_often_as_its_rank_says(variance):
    """19 held-out data and level 0.85: rank 17 of 20. In 4,000 repetitions four standard deviations are 0.023: a false alarm
    once in 16,000 runs of other seeds; the seed is fixed."""
    held, repetitions, inside = 19, 4000, 0
    new = gaussian(1, variance)
    every = 2 * torch.rand(repetitions, held + 1, 1, dtype=torch.float64)  # not at all what is predicted
    for targets in every:
        score = (2 * new.cdf(targets[-1:]) - 1).abs().item()
        inside += score <= bc.posterior.conformal_level(gaussian(held, variance), targets[:-1], 0.85)
    assert abs(inside / repetitions - 17 / 20) < 4 * math.sqrt(0.85 * 0.15 / repetitions)


def test_a_calibrated_prediction_keeps_its_level():
    levels = torch.special.ndtri(torch.arange(1, 1000) / 1000)[:, None]
    assert bc.posterior.conformal_level(gaussian(999, 1.0), levels, 0.9) == pytest.approx(0.9, abs=2e-3)


@pytest.mark.parametrize("scale", (0.3, 1.0, 4.0))
def test_temperature_scaling_finds_the_least_held_out_loss(scale):
    torch.manual_seed(1)
    logits = torch.randn(300, 4, dtype=torch.float64)
    targets = torch.distributions.Categorical(logits=logits).sample()
    given = scale * logits
    want = minimize_scalar(
        lambda log_c: torch.nn.functional.cross_entropy(given / math.exp(log_c), targets).item(), tol=1e-10
    ).x
    assert bc.posterior.temperature_scaling(given, targets) == pytest.approx(math.exp(want), rel=1e-5)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: bc.posterior.conformal_level(gaussian(8, 1.0), torch.zeros(8, 1), 0.9), "at least 9 are needed"),
        (
            lambda: bc.posterior.conformal_level(gaussian(8, 1.0), torch.zeros(8, 1), 90),
            r"level must be a number in \(0, 1\)",
        ),
        (lambda: bc.posterior.conformal_level(gaussian(9, 1.0), torch.full((9, 1), torch.nan)), "hold NaN"),
        (
            lambda: bc.posterior.conformal_level(
                likelihoods.gaussian(1.0).predictive(torch.zeros(9, 2), torch.zeros(9, 2, 2)), torch.zeros(9, 2)
            ),
            "each output by itself",
        ),
        (lambda: bc.posterior.temperature_scaling(torch.zeros(3, 2), torch.zeros(2).long()), r"logits \[n, C\]"),
        (lambda: bc.posterior.temperature_scaling(torch.zeros(3, 2), torch.full((3,), 2)), "lie in 0 to 1"),
        (
            lambda: bc.posterior.temperature_scaling(torch.full((1, 2), torch.inf), torch.zeros(1).long()),
            "NaN or infinity",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused_by_name(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_nine_data_are_enough_for_nine_in_ten():
    assert bc.posterior.conformal_level(gaussian(9, 1.0), torch.arange(9.0)[:, None], 0.9) <= 1.0
