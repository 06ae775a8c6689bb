"""A linear layer on given features, whose Jacobian is known, has the curvature and predictions of one that is watched."""

import pytest
import torch
from torch.nn.functional import linear

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.curvature._plan import Affine
from bayesopt_chain.posterior.gaussian import Gaussian

STRUCTURES = ("kronecker", "diagonal", "dense", "root", "block", "low_rank")


def watched(forward):
    """The same function, of which nothing is known."""
    return lambda params, batch: forward(params, batch)


def problem(bias, positions):
    params = {"10.weight": torch.randn(3, 4)} | ({"10.bias": torch.randn(3)} if bias else {})
    x = torch.randn(7, *positions, 4)
    return Affine("10.weight", "10.bias" if bias else None), params, (x, torch.randint(0, 3, (7, *positions)))


@pytest.mark.parametrize("positions", [(), (2,)], ids=["one position", "two"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_its_curvature_and_predictions_are_those_that_taps_find(structure, bias, positions):
    forward, params, batch = problem(bias, positions)
    pair = [curvature.ggn(f, likelihoods.categorical(), structure)(params, batch) for f in (forward, watched(forward))]
    torch.testing.assert_close(pair[0].to_dense(), pair[1].to_dense(), rtol=1e-12, atol=1e-12)
    posterior = Gaussian(params, pair[1].add_diagonal(0.7))
    (mean, covariance), (m, c) = (bc.posterior.linearized(f, posterior, batch) for f in (forward, watched(forward)))
    torch.testing.assert_close(mean, m, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(covariance, c, rtol=1e-12, atol=1e-12)


def test_it_is_run_and_not_watched(monkeypatch):
    """No tap, no pullback, no datum alone."""
    forward, params, batch = problem(True, ())
    from bayesopt_chain.curvature import _chunks, _plan

    def refuse(*args, **kwargs):
        raise AssertionError("watched")

    for module in (_plan, _chunks):
        monkeypatch.setattr(module, "Taps", refuse)
    monkeypatch.setattr(_chunks, "_pullback", refuse)
    curvature.ggn(forward, likelihoods.categorical(), "kronecker")(params, batch)
    with pytest.raises(AssertionError, match="watched"):
        curvature.ggn(watched(forward), likelihoods.categorical(), "kronecker")(params, batch)


def test_features_in_bfloat16_are_summed_in_float32():
    forward, params, (x, y) = problem(True, ())
    half = {name: p.to(torch.bfloat16) for name, p in params.items()}
    precision = curvature.ggn(forward, likelihoods.categorical(), "kronecker")(half, (x.to(torch.bfloat16), y))
    assert precision.left["10.weight"].dtype == torch.float32
    _, covariance = bc.posterior.linearized(
        forward, Gaussian(half, precision.add_diagonal(1.0)), (x.to(torch.bfloat16), y)
    )
    wanted = linear(x.to(torch.bfloat16), half["10.weight"], half["10.bias"])
    assert covariance.dtype == torch.float32 and covariance.shape == (*wanted.shape, 3)
