"""Every precision of the library as a preconditioner: exact, in whatever structure."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import stationary_covariance

precision = pytest.importorskip("bayesopt_chain.precision")

PARAMS = {"b": torch.zeros(1, dtype=torch.float64), "w": torch.zeros(2, 2, dtype=torch.float64)}


def build(structure: str):
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    one = torch.tensor(1.0)
    diagonal = {
        "b": 0.5 + torch.rand(1, generator=generator, dtype=torch.float64),
        "w": 0.5 + torch.rand(2, 2, generator=generator, dtype=torch.float64),
    }
    if structure == "dense":
        return precision.Dense(torch.eye(5).double() + root @ root.T, precision.shape_only(PARAMS), one)
    if structure == "diagonal":
        return precision.Diagonal(diagonal, one)
    rows = {"b": root[:2, :1], "w": root[:2, 1:].reshape(2, 2, 2)}
    return precision.LowRank(diagonal, rows, one)


@pytest.mark.parametrize("structure", ["dense", "diagonal", "low rank"])
def test_a_precision_of_the_library_preconditions_exactly(structure):
    q, _ = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    curvature = q @ torch.diag(torch.logspace(-2, 0, 5, dtype=torch.float64)) @ q.T
    tx = bc.samplers.langevin_with_precision(build(structure).factorised(), 0.3, 0.8, temperature=0.7)
    got = stationary_covariance(tx, curvature, PARAMS)
    torch.testing.assert_close(got, 0.7 * torch.linalg.inv(curvature), rtol=1e-8, atol=1e-9)
