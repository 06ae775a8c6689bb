r"""Samplers on targets with known moments, by long runs of many chains and Richardson extrapolation.

Chains are rows of one ``[chains, d]`` parameter, so that the standard errors are over independent chains. A bias of
known order ``k`` in the step is removed by running at the steps ``h`` and ``h / 2``: the estimate is
``(2^k m(h/2) - m(h)) / (2^k - 1)``, which also tests the order. A test compares every first and second moment, within 5
standard errors, so that each comparison gives a false alarm with probability 6e-7 and a whole run of this file (160
comparisons) with 1e-4. Seeds are fixed. The bias that remains is of the next order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

import bayesopt_chain as bc
from tests.registry.samplers import cheap
from tests.walk import walk


class Target(NamedTuple):
    """A loss's gradient on ``[chains, d]``, its moments at T = 1, and starting points from standard normals."""

    gradient: Callable
    moments: dict[str, float]  # name -> exact value; names as in ``features``
    start: Callable
    stiffness: float  # the largest curvature where the target has its mass


def features(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Coordinates and all their products."""
    d = x.shape[1]
    out = {f"x{i}": x[:, i].clone() for i in range(d)}
    out.update({f"x{i}x{j}": x[:, i] * x[:, j] for i in range(d) for j in range(i, d)})
    return out


def double_well() -> Target:
    """``U = (x^2 - 1)^2 + (y - x / 2)^2``: two quartic wells in two dimensions, moments by quadrature."""
    x = np.linspace(-5, 5, 40001)
    law = np.exp(-((x**2 - 1) ** 2))
    m2 = float((law * x**2).sum() / law.sum())

    def gradient(z):
        a, b = z.unbind(1)
        across = 2 * (b - a / 2)
        return torch.stack([4 * a * (a**2 - 1) - across / 2, across], dim=1)

    moments = {"x0": 0.0, "x1": 0.0, "x0x0": m2, "x0x1": m2 / 2, "x1x1": m2 / 4 + 0.5}
    return Target(gradient, moments, lambda z: 0.8 * z, 10.0)


def banana() -> Target:
    """``U = x^2 / 2 + (y + (x^2 - 1) / 4)^2``: mean 0, variances 1 and 5/8, no covariance, all exact."""

    def gradient(z):
        x, y = z.unbind(1)
        bend = 2 * (y + (x**2 - 1) / 4)
        return torch.stack([x + bend * x / 2, bend], dim=1)

    moments = {"x0": 0.0, "x1": 0.0, "x0x0": 1.0, "x0x1": 0.0, "x1x1": 0.5 + 2 / 16}
    return Target(gradient, moments, lambda z: 0.8 * z, 4.0)


def gaussian() -> Target:
    """Ten correlated dimensions with condition number 1,000; moments exact."""
    generator = torch.Generator().manual_seed(10)
    q, _ = torch.linalg.qr(torch.randn(10, 10, generator=generator, dtype=torch.float64))
    curvature = q @ torch.diag(torch.logspace(-3, 0, 10, dtype=torch.float64)) @ q.T
    covariance = torch.linalg.inv(curvature)
    root = torch.linalg.cholesky(covariance)
    moments = {f"x{i}": 0.0 for i in range(10)}
    moments.update({f"x{i}x{j}": covariance[i, j].item() for i in range(10) for j in range(i, 10)})
    return Target(lambda z: z @ curvature, moments, lambda z: z @ root.T, 1.0)


TARGETS = {"double well": double_well(), "banana": banana(), "gaussian": gaussian()}

# name: (build from a step, order of the bias in it, step for unit stiffness)
ELEMENTWISE = {
    "sgld": (lambda h: bc.sgld(h, temperature=1.0), 2, 0.4),
    "sghmc": (lambda h: bc.sghmc(h, 0.5, temperature=1.0), 2, 0.1),
    "baoab": (lambda h: bc.samplers.baoab(h, 1.0, temperature=1.0), 2, 0.6),
    "ubu": (lambda h: bc.samplers.ubu(h, 1.0, temperature=1.0), 2, 0.4),
    "badodab, per parameter": (lambda h: bc.samplers.badodab(h, 1.0, temperature=1.0, per_parameter=True), 2, 0.4),
    "lattice_walk": (lambda h: bc.samplers.lattice_walk(h, temperature=1.0), 1, 0.08),
    "Rademacher": (lambda h: cheap(h, 0.5, 1.0, "rademacher"), 1, 0.05),
}
IN_TIME = ("baoab", "ubu", "badodab, per parameter")  # their step is a time; the others' is a time squared


def long_run(build, target: Target, h: float, steps: int, chains: int, seed: int) -> dict[str, torch.Tensor]:
    """Each chain's average of every feature over the second half of the run."""
    generator = torch.Generator().manual_seed(seed)
    d = sum(1 for name in target.moments if name.count("x") == 1)
    x = target.start(torch.randn(chains, d, generator=generator, dtype=torch.float64))
    torch.manual_seed(seed)
    second_half = itertools.islice(walk(build(h), x, target.gradient, steps, inplace=True), steps // 2, None, 5)
    kept = [features(x) for x, _ in second_half]
    return {name: sum(each[name] for each in kept) / len(kept) for name in kept[0]}


def check(build, order: int, h: float, steps: int, target: Target, chains: int) -> None:
    coarse = long_run(build, target, h, steps, chains, 1)
    fine = long_run(build, target, h / 2, 2 * steps, chains, 2)
    w = 2.0**order
    for name, want in target.moments.items():
        estimate = (w * fine[name].mean() - coarse[name].mean()) / (w - 1)
        error = math.sqrt((w**2 * fine[name].var().item() + coarse[name].var().item()) / chains) / (w - 1)
        assert abs(estimate.item() - want) < 5 * error, (
            f"{name}: {estimate.item():.4f} +- {error:.4f}, exact {want:.4f}"
        )


QUICK = ("sghmc", "sgld")


@pytest.mark.parametrize(
    "name, target",
    [
        pytest.param(name, ("double well", "banana")[i % 2], marks=[] if name in QUICK else pytest.mark.slow)
        for i, name in enumerate(ELEMENTWISE)
    ],
)
def test_moments_of_a_two_dimensional_target(name, target):
    """One of the two for each kind of sampler: ``test_orders`` has the exact bias of every one on a third."""
    build, order, unit = ELEMENTWISE[name]
    target = TARGETS[target]
    h = unit / (target.stiffness**0.5 if name in IN_TIME else target.stiffness)
    check(build, order, h, 1200, target, chains=2500)


TEN = {
    "badodab": (lambda h: bc.samplers.badodab(h, 1.0, temperature=1.0), 2, 0.4),
    "lattice_walk": (lambda h: bc.samplers.lattice_walk(h, temperature=1.0), 1, 0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEN)
def test_a_ten_dimensional_gaussian_of_condition_1000_is_left_as_it_is(name):
    """From exact draws; a run lasts a part of the relaxation time of the slowest direction."""
    build, order, h = TEN[name]
    check(build, order, h, 1500, TARGETS["gaussian"], chains=500)
