"""What all transforms that carry a Gaussian share: one loop, states that are values, a Gaussian that says what is broken."""

import copy
import math

import optree
import pytest
import torch
from torch.distributions import MultivariateNormal

import bayesopt_chain as bc
from bayesopt_chain.posterior.gaussian import Gaussian
from bayesopt_chain.precision import (
    Dense,
    Diagonal,
    Kronecker,
    LowRank,
    Root,
    flatten,
    low_rank_covariance,
    shape_only,
)
from bayesopt_chain.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("double_precision")

ONE = torch.tensor(1.0)
LIKELIHOOD = bc.likelihoods.gaussian(0.5)


def start():
    """A matrix and a vector."""
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(2, generator=generator)}


def ones(params):
    return optree.tree_map(torch.ones_like, params)


def rows(params):
    return optree.tree_map(lambda p: torch.stack([torch.ones_like(p), p]), params)


def psd(n):
    root = torch.randn(n, n)
    return root @ root.T + 0.1 * torch.eye(n)


def sides(params):
    return {name: psd(p.shape[0]) for name, p in params.items()}, {"a": psd(3), "b": psd(1)}


PRECISIONS = {
    "dense": lambda p: Dense(psd(8), shape_only(p), ONE),
    "diagonal": lambda p: Diagonal(optree.tree_map(lambda x: x.square() + 0.2, p), ONE),
    "root": lambda p: Root(rows(p), ONE),
    "low_rank": lambda p: LowRank(optree.tree_map(lambda x: x.square() + 0.2, p), rows(p), ONE),
    "kronecker": lambda p: Kronecker(*sides(p), {"a": 0 * ONE, "b": 0 * ONE}, shape_only(p), ONE),
}
METHODS = {  # how a transform is made, its posterior's arguments, and the curvature that it is fed
    **{f"laplace, {name}": (bc.laplace, {"prior_precision": 1.0}, name) for name in PRECISIONS},
    "ekf.dense": (lambda: bc.ekf.dense(transition_noise=0.1), {}, "root"),
    "ekf.diagonal": (lambda: bc.ekf.diagonal(forgetting=0.9), {}, "root"),
    "ekf.low_rank": (lambda: bc.ekf.low_rank(rank=2), {}, "root"),
    "swag": (lambda: bc.swag(rank=3), {}, None),
    "swag, every other": (lambda: bc.swag(rank=2, every=2), {}, None),
    "vi.mean_field": (lambda: bc.vi.mean_field(bc.adam(0.1), temperature=0.1), {}, None),
    "vi.dense": (lambda: bc.vi.dense(bc.adam(0.1), temperature=0.1), {}, None),
    "vi.low_rank": (lambda: bc.vi.low_rank(bc.adam(0.1), temperature=0.1, rank=2), {}, None),
    "vi.ivon": (lambda: bc.vi.ivon(0.1, temperature=0.1), {}, None),
    "vi.von": (lambda: bc.vi.von(0.1, temperature=0.1), {}, "diagonal"),
}
ACCUMULATING = [name for name in METHODS if "vi." not in name]


def parts(name, road="in a chain"):
    """The transform, what it runs in, a step, and the function that gives its posterior."""
    make, options, increment = METHODS[name]
    link = make()
    tx = link if road == "alone" else bc.chain(bc.sgd(0.1, 0.9), link) if name.startswith("swag") else bc.chain(link)
    estimate = None if increment is None else lambda p, b: PRECISIONS[increment](p).scale(b)
    loss = lambda p, b: b * sum(x.square().sum() for x in p.values())  # noqa: E731
    step = bc.make_step(loss, tx, curvature=estimate, inplace=road == "a step in place")
    return tx, step, lambda state, params: link.posterior(state, params, **options)


@pytest.mark.parametrize("name", ACCUMULATING)
@pytest.mark.parametrize("road", ["alone", "in a chain", "a step in place"])
def test_every_state_of_a_run_still_holds_at_its_end_what_it_held_when_it_was_made(name, road):
    """By TorchOpt's default ``update``, and by ``make_step(inplace=True)``, which overwrites the parameters; the posterior of
    the first is what it was too, and another than that of the last."""
    (tx, step, posterior), params, increment = parts(name, road), start(), METHODS[name][2]
    extra = {} if increment is None else {"curvature": PRECISIONS[increment](params)}
    given, state, kept = copy.deepcopy(extra), tx.init(params), []
    for i in range(6):
        if road == "a step in place":
            params, state, _ = step(params, state, ONE)
        else:
            updates, state = tx.update(ones(params), state, params=params, **extra)
            params = optree.tree_map(lambda p, u: p + 0.1 * u, params, updates)
        kept.append((state[-1], copy.deepcopy(state[-1])))
        if i == 2:
            at = optree.tree_map(torch.clone, params)
            early, before = state, posterior(state, at).marginal_variance
    for entry, was in kept:
        assert_bitwise_equal(entry, was, name)
    assert_bitwise_equal(extra, given, "what it was fed")
    assert_bitwise_equal(posterior(early, at).marginal_variance, before, name)
    after = posterior(state, params).marginal_variance
    assert any(not torch.equal(a, b) for a, b in zip(optree.tree_leaves(before), optree.tree_leaves(after)))


@pytest.mark.parametrize("name", [name for name in METHODS if "swag" not in name])
def test_a_posterior_that_was_fed_nan_says_so_by_the_parameters_name(name):
    """Unless the step refused it, as an eigendecomposition does."""
    (tx, step, posterior), params = parts(name), start()
    params, state, _ = step(params, tx.init(params), ONE)
    assert torch.isfinite(posterior(state, params).marginal_variance["a"]).all()
    try:
        params, state, _ = step(params, state, math.nan * ONE)
    except torch.linalg.LinAlgError:
        assert name in ("laplace, low_rank", "ekf.low_rank")
        return
    for at in (params, start()) if name.startswith("ekf") else (params,):
        with pytest.raises(ValueError, match="is NaN at a"):
            posterior(state, at)


BAD = {"NaN": math.nan, "infinite": math.inf}


@pytest.mark.parametrize("kind", BAD)
def test_a_gaussian_that_is_not_finite_says_so_when_it_is_decomposed(kind):
    good, bad = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, BAD[kind]])}
    state = bc.laplace().update(good, bc.laplace().init(good), params=good, curvature=Diagonal(good, ONE))[1]
    for call, words in (
        (lambda: Gaussian(bad, Diagonal(good, ONE)).factorised(), f"the posterior's mean is {kind} at w"),
        (lambda: Gaussian(good, Diagonal(bad, ONE)).factorised(), f"the posterior's precision is {kind} at w"),
        (lambda: bc.laplace().posterior(state, bad, prior_precision=1.0), f"the posterior's mean is {kind} at w"),
        (lambda: Gaussian(good, Diagonal({"w": torch.tensor([1.0, 0.0])}, ONE)).sample((3,)), r"singular.*at w.*prior"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


N, EPOCHS, NOISE, PRIOR = 64, 60, 0.5, 2.0
VON = {"temperature": 1 / (N * EPOCHS), "betas": (0.9, 0.99), "weight_decay": PRIOR / (N * EPOCHS)}
ONE_LOOP = {
    "laplace": lambda: (bc.chain(bc.sgd(0.02), laplace := bc.laplace()), laplace, {"prior_precision": PRIOR}),
    "swag": lambda: (bc.chain(bc.sgd(0.02), swag := bc.swag(rank=0, start=200)), swag, {}),
    "vi": lambda: (vi := bc.vi.von(0.05, **VON), vi, {}),
    "ekf": lambda: (ekf := bc.ekf.dense(prior_precision=PRIOR), ekf, {}),
}


def forward(params, batch):
    return (batch[0] @ params["w"])[:, None]


def loss(params, batch):
    return LIKELIHOOD.nll(forward(params, batch), batch[1]).mean()


@pytest.mark.parametrize("name", ONE_LOOP)
def test_one_loop_runs_every_method_by_one_changed_line(name):
    """Of a linear model, whose posterior given all data EPOCHS times is known: filters and Laplace's precision exactly, the
    variances of variational inference, which averages over batches, to 10 %, the mean of SWAG's path to a few hundredths."""
    x = torch.randn(N, 3)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + NOISE**0.5 * torch.randn(N)
    batches = [(x[i : i + 8], y[i : i + 8, None]) for i in range(0, N, 8)]
    curvature = bc.curvature.ggn(forward, LIKELIHOOD, "dense")

    tx, posterior, options = ONE_LOOP[name]()
    params = {"w": torch.zeros(3)}
    state, step = tx.init(params), bc.make_step(loss, tx, curvature=curvature)
    for batch in batches * EPOCHS:
        params, state, _ = step(params, state, batch)
    found = posterior.posterior(state, params, **options)

    precision = EPOCHS * x.mT @ x / NOISE + PRIOR * torch.eye(3)
    mode, variance = torch.linalg.solve(precision, EPOCHS * x.mT @ y / NOISE), found.marginal_variance["w"]
    if name in ("laplace", "ekf"):
        torch.testing.assert_close(found.precision.to_dense(), precision, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=1e-9, atol=0)
    if name == "vi":
        torch.testing.assert_close(variance, precision.inverse().diagonal(), rtol=0.1, atol=0)
    torch.testing.assert_close(found.mean["w"], mode, rtol=0, atol=1e-9 if name == "ekf" else 0.05)
    assert isinstance(found, bc.Gaussian) and bool((variance > 0).all())


def of_low_rank(params):
    """A covariance, as that of SWAG and of the low-rank family."""
    return low_rank_covariance(optree.tree_map(lambda x: x.square() + 0.2, params), rows(params), ONE)


@pytest.mark.parametrize("make", [*(PRECISIONS[n] for n in PRECISIONS if n != "root"), of_low_rank])
def test_a_gaussian_has_the_density_of_the_multivariate_normal_and_draws_from_it(make):
    """With n draws, n C^ is Wishart: each entry of C^ - C has standard deviation sqrt((C_ij^2 + C_ii C_jj) / n). The largest of
    36 + 8 standardised errors exceeds 5.5 with probability below 44 * 3.8e-8 = 1.7e-6."""
    mean, precision, n = start(), make(start()), 40_000
    gaussian = Gaussian(mean, precision)
    reference = MultivariateNormal(flatten(mean, mean), precision_matrix=precision.to_dense())
    points = optree.tree_map(lambda leaf: torch.randn(5, *leaf.shape), mean)
    torch.testing.assert_close(gaussian.log_prob(points), reference.log_prob(flatten(points, mean)), rtol=1e-9, atol=0)
    assert gaussian.log_prob(mean).shape == ()
    # if the joint is c at the mode of c exp(-quadratic), the evidence is c (2 pi)^(P/2) |Lambda|^(-1/2)
    assert abs(gaussian.log_evidence(gaussian.log_prob(mean))) < 1e-10
    torch.testing.assert_close(flatten(gaussian.marginal_variance, mean), reference.variance, rtol=1e-9, atol=0)
    assert torch.equal(gaussian.factorised().log_prob(points), gaussian.log_prob(points))
    draws = gaussian.sample((n,), generator=torch.Generator().manual_seed(1))
    assert draws["a"].shape == (n, 2, 3) and draws["b"].shape == (n, 2)
    centred, c = flatten(draws, mean) - flatten(mean, mean), reference.covariance_matrix
    deviation = ((c.square() + torch.outer(c.diagonal(), c.diagonal())) / n).sqrt()
    assert ((centred.T @ centred / n - c) / deviation).abs().max() < 5.5
    assert (centred.mean(0) / (c.diagonal() / n).sqrt()).abs().max() < 5.5


def test_samples_repeat_with_the_generator_and_keep_dtype():
    gaussian = Gaussian({"w": torch.zeros(3, dtype=torch.float32)}, Diagonal({"w": torch.ones(3)}, ONE))
    first, second = (gaussian.sample((), generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first["w"], second["w"]) and first["w"].shape == (3,) and first["w"].dtype == torch.float32
