"""Property tests for your own links and samplers: what this library's tests are made of.

``assert_laws`` runs every law a link must obey; ``assert_zero_temperature_limit`` checks that a sampler is its optimizer at
T = 0 and moves away from it as the square root of T; ``stationary_covariance`` solves exactly for what a linear sampler
samples, and ``variance_along`` for what it samples at every step of a schedule; ``sbc`` asks simulated data whether a posterior
is right.
"""

from bayesopt_chain.testing._laws import (
    LAWS,
    assert_bitwise_equal,
    assert_composes,
    assert_laws,
    assert_zero_temperature_limit,
)
from bayesopt_chain.testing._linear_system import NormalProbe, Unstable, stationary_covariance, variance_along
from bayesopt_chain.testing._simulated import Calibration, sbc

__all__ = [
    "LAWS",
    "Calibration",
    "NormalProbe",
    "Unstable",
    "assert_bitwise_equal",
    "assert_composes",
    "assert_laws",
    "assert_zero_temperature_limit",
    "sbc",
    "stationary_covariance",
    "variance_along",
]
