"""A posterior that was fed NaN says so, by the parameter's name; none answers with NaN, or with the wrong complaint."""

import math

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import Diagonal

BAD = {"NaN": math.nan, "infinite": math.inf}


def start():
    return {"a": torch.ones(2, 2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}


def forward(params, batch):
    return torch.tanh(batch[0] @ params["a"]) @ params["b"]


def batch(bad=0.0):
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3, 1] += bad
    return x, torch.zeros(6, dtype=torch.float64)


@pytest.mark.parametrize("structure", bc.curvature.STRUCTURES)
def test_laplace_of_a_nan_batch_says_nan(structure):
    estimate = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), structure)
    tx, params = bc.laplace(), start()
    state = tx.init(params)
    for bad in (0.0, math.nan):
        try:
            increment = estimate(params, batch(bad))
        except (ValueError, torch.linalg.LinAlgError):  # the estimator refuses it before
            assert structure in ("low_rank", "kronecker")
            return
        _, state = tx.update(params, state, curvature=increment)
    with pytest.raises(ValueError, match="laplace: the accumulated curvature is NaN at a"):
        tx.posterior(state, params, prior_precision=1.0)


@pytest.mark.parametrize("kind", BAD)
def test_laplace_at_parameters_that_are_not_finite_says_so(kind):
    estimate = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "dense")
    tx, params = bc.laplace(), start()
    _, state = tx.update(params, tx.init(params), curvature=estimate(params, batch()))
    params["b"][1] = BAD[kind]
    with pytest.raises(ValueError, match=f"the posterior's mean is {kind} at b"):
        tx.posterior(state, params, prior_precision=1.0)


@pytest.mark.parametrize("name", ["dense", "diagonal", "low_rank"])
def test_a_filter_that_saw_nan_says_nan(name):
    tx = getattr(bc.ekf, name)(**({"rank": 2} if name == "low_rank" else {}))
    estimate, params = bc.ekf.observe(forward), start()
    loss = lambda p, data: (forward(p, data) - data[1]).square().mean()  # noqa: E731
    step, state = bc.make_step(loss, tx, curvature=estimate), tx.init(params)
    params, state, _ = step(params, state, batch())
    assert torch.isfinite(tx.posterior(state, params).marginal_variance["a"]).all()
    try:
        params, state, _ = step(params, state, batch(math.nan))
    except torch.linalg.LinAlgError:  # an eigendecomposition of NaN
        assert name == "low_rank"
        return
    with pytest.raises(ValueError, match="the posterior's mean is NaN at a"):
        tx.posterior(state, params)
    with pytest.raises(ValueError, match="the posterior's precision is NaN at a"):
        tx.posterior(state, start())


VARIATIONAL = {
    "mean_field": lambda **k: bc.vi.mean_field(bc.adam(0.1), **k),
    "dense": lambda **k: bc.vi.dense(bc.adam(0.1), **k),
    "low_rank": lambda **k: bc.vi.low_rank(bc.adam(0.1), rank=2, **k),
    "ivon": lambda **k: bc.vi.ivon(0.1, **k),
    "von": lambda **k: bc.vi.von(0.1, **k),
}


@pytest.mark.parametrize("name", VARIATIONAL)
def test_a_variational_posterior_that_saw_nan_says_nan(name):
    tx, params = VARIATIONAL[name](temperature=0.1), start()
    ones = lambda p, b: Diagonal(optree.tree_map(lambda x: b * torch.ones_like(x), p), torch.tensor(1.0))  # noqa: E731
    step = bc.make_step(lambda p, b: (p["a"] * b).sum() + p["b"].sum(), tx, curvature=ones if name == "von" else None)
    params, state, _ = step(params, tx.init(params), torch.full((), math.nan, dtype=torch.float64))
    with pytest.raises(ValueError, match="is NaN at a"):
        tx.posterior(state, params)


@pytest.mark.parametrize("kind", BAD)
def test_a_gaussian_that_is_not_finite_says_so_when_it_is_decomposed(kind):
    good, bad = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, BAD[kind]])}
    with pytest.raises(ValueError, match=f"the posterior's mean is {kind} at w"):
        Gaussian(bad, Diagonal(good, torch.tensor(1.0))).factorised()
    with pytest.raises(ValueError, match=f"the posterior's precision is {kind} at w"):
        Gaussian(good, Diagonal(bad, torch.tensor(1.0))).factorised()
