"""Batch-size extrapolation: exact polynomials, the heat of independent batches, and a variance that is said."""

import math

import pytest
import torch

import bayesopt_chain as bc
from tests.loop.test_stored_control_variates import ratio, regression

extrapolate = bc.diagnostics.extrapolate_batch_size


def test_two_sizes_are_exact_for_what_is_linear_in_the_noise_and_three_for_squares():
    N = 1000
    w = lambda b: (N - b) / (b * (N - 1))  # noqa: E731
    constant = lambda x: torch.full((3, 2), x, dtype=torch.float64)  # noqa: E731
    linear = {b: constant(2.0 + 3.0 * w(b)) for b in (10, 20)}
    assert extrapolate(linear, N).mean.item() == pytest.approx(2.0, abs=1e-12)
    square = {b: constant(2.0 + 3.0 * w(b) - 40.0 * w(b) ** 2) for b in (10, 20, 40)}
    assert extrapolate(square, N).mean.item() == pytest.approx(2.0, abs=1e-12)
    full = {N: constant(7.0), 10: constant(9.0)}
    assert extrapolate(full, N).mean.item() == pytest.approx(7.0) and extrapolate(full, N).variance_factor == 1.0


def test_the_variance_of_a_regression_is_that_of_full_batches():
    """Stationary variances of the chain, solved exactly at each batch size: 11 % and 25 % too large become 1 %."""
    x, y, mode = regression(1000, 3)
    noise = x * (x @ mode - y)[:, None]
    heated = {b: ratio(noise, x, 0.002, 0.9, b) for b in (64, 32, 16)}
    assert heated[16] > heated[32] > heated[64] > 1.03
    values = {b: torch.full((2, 2), v, dtype=torch.float64) for b, v in heated.items()}
    two = extrapolate({b: values[b] for b in (32, 64)}, 1000)
    three = extrapolate(values, 1000)
    assert abs(two.mean.item() - 1) < 0.1 * (heated[64] - 1)
    assert abs(three.mean.item() - 1) < abs(two.mean.item() - 1) < 0.005
    assert two.variance_factor == pytest.approx(5.0, rel=0.1)


def test_the_standard_error_is_that_of_chains():
    generator = torch.Generator().manual_seed(0)
    values = {b: torch.randn(50, 400, 2, dtype=torch.float64, generator=generator) for b in (10, 20)}
    found = extrapolate(values, 1000)
    expected = math.sqrt(found.variance_factor / (50 * 400))
    assert found.standard_error.shape == (2,)
    assert found.standard_error.tolist() == pytest.approx([expected] * 2, rel=0.15)
    assert extrapolate({b: f[:, :1] for b, f in values.items()}, 1000).standard_error.isnan().all()


def test_what_cannot_be_extrapolated_is_refused():
    ones = torch.ones(3, 2)
    for values, message in (
        ({10: ones}, "at least two batch sizes"),
        ({10: ones, 2000: ones}, "between 1 and the 1000 data, got 2000"),
        ({10: ones, 20: torch.ones(3)}, r"tensors \[draws, chains, \.\.\.\], got \[3\]"),
        ({10: ones, 20: 1.0}, "got float"),
    ):
        with pytest.raises(ValueError, match=message):
            extrapolate(values, 1000)
