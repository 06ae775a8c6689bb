"""The Laplace transform: exact on linear models, independent of batches, honest about what it cannot do."""

import copy
import math
import pickle
from itertools import pairwise

import numpy as np
import optree
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import DotProduct

from bayesopt_chain import chain, curvature, likelihoods, make_step, sgd
from bayesopt_chain.posterior.laplace import LaplaceState, laplace, log_prior
from bayesopt_chain.posterior.tuning import tune_by_evidence, tune_by_validation
from bayesopt_chain.precision import Diagonal, flatten


@pytest.fixture(autouse=True)
def double_precision():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


N = 20
STRUCTURES = ["dense", "root", "low_rank"]
OPTIONS = {"low_rank": {"rank": 2 * N}}


def linear(params, batch):
    return batch[0] @ params["w"] + params["b"]


def regression(outputs=2):
    x, params = torch.randn(N, 3), {"w": torch.randn(3, outputs), "b": torch.randn(outputs)}
    return params, (x, torch.randn(N, outputs))


def features(x, outputs):
    """The Jacobian of `linear` in (b, w), `[N outputs, P]`."""
    eye = torch.eye(outputs)
    b = eye.expand(len(x), outputs, outputs)
    w = torch.einsum("ni,oc->noic", x, eye).reshape(len(x), outputs, -1)
    return torch.cat([b, w], -1).reshape(len(x) * outputs, -1)


def accumulate(tx, params, batch, estimate, cuts=(0, N)):
    state = tx.init(params)
    for a, b in pairwise(cuts):
        updates, state = tx.update(
            params, state, params=params, curvature=estimate(params, (batch[0][a:b], batch[1][a:b]))
        )
        assert updates is params or all(map(torch.equal, *map(optree.tree_leaves, (updates, params))))
    return state


def exact_posterior(batch, prior, variance):
    design, targets = features(batch[0], batch[1].shape[1]), batch[1].reshape(-1)
    precision = design.T @ design / variance + prior * torch.eye(design.shape[1])
    return torch.linalg.solve(precision, design.T @ targets / variance), precision


def as_tree(vector, outputs):
    return {"w": vector[outputs:].reshape(3, outputs), "b": vector[:outputs]}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_linear_regression_has_the_gaussian_process_evidence(structure):
    """log N(y; 0, Phi Phi^T / prior + variance I), to 1e-10."""
    _, batch = regression()
    prior, variance = 0.7, 0.3
    mean, precision = exact_posterior(batch, prior, variance)
    params, likelihood = as_tree(mean, 2), likelihoods.gaussian(variance)
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihood, structure, **OPTIONS.get(structure, {})))
    posterior = tx.posterior(state, params, prior_precision=prior)
    assert torch.allclose(posterior.precision.to_dense(), precision, rtol=1e-10, atol=1e-10)
    log_likelihood = -likelihood.nll(linear(params, batch), batch[1]).sum()
    evidence = tx.log_evidence(state, params, log_likelihood, prior_precision=prior)
    design = features(batch[0], 2)
    kernel = design @ design.T / prior + variance * torch.eye(2 * N)
    gp = torch.distributions.MultivariateNormal(torch.zeros(2 * N), kernel).log_prob(batch[1].reshape(-1))
    assert math.isclose(evidence.item(), gp.item(), rel_tol=1e-10)


def test_bernoulli_regression_agrees_with_the_gaussian_process_classifier():
    """scikit-learn's Laplace approximation with a dot-product kernel is ours in function space: evidence and latent
    mean.
    """
    x = torch.randn(40, 3)
    y = (x.sum(1) + 0.5 * torch.randn(40) > 0.3).double()
    classifier = GaussianProcessClassifier(DotProduct(1.0, "fixed"), optimizer=None, max_iter_predict=200)
    classifier.fit(x.numpy(), y.numpy())
    params, likelihood = {"w": torch.zeros(3), "b": torch.zeros(())}, likelihoods.bernoulli()
    forward = lambda p, batch: batch[0] @ p["w"] + p["b"]  # noqa: E731
    batch = (x, y)
    estimate = curvature.ggn(forward, likelihood, "dense")
    tx = laplace()
    for _ in range(30):  # Newton's method
        gradient = torch.func.grad(lambda p: likelihood.nll(forward(p, batch), y).sum() - log_prior(p, 1.0))(params)
        _, state = tx.update(gradient, tx.init(params), curvature=estimate(params, batch))
        move = tx.posterior(state, params, prior_precision=1.0).precision.solve(gradient)
        params = optree.tree_map(torch.sub, params, move)
    _, state = tx.update(gradient, tx.init(params), curvature=estimate(params, batch))
    evidence = tx.log_evidence(state, params, -likelihood.nll(forward(params, batch), y).sum(), prior_precision=1.0)
    assert math.isclose(evidence.item(), classifier.log_marginal_likelihood_value_, rel_tol=1e-6)
    inner = classifier.base_estimator_
    new = torch.randn(5, 3)
    k_star = inner.kernel_(inner.X_train_, new.numpy())
    assert np.allclose(k_star.T @ (inner.y_train_ - inner.pi_), forward(params, (new, None)).numpy(), atol=1e-6)
    posterior = tx.posterior(state, params, prior_precision=1.0)
    rows = {"w": new, "b": torch.ones(5)}
    variance = (flatten(rows, params) * flatten(posterior.precision.solve(rows), params)).sum(1)
    v = np.linalg.solve(inner.L_, inner.W_sr_[:, None] * k_star)
    assert np.allclose(inner.kernel_.diag(new.numpy()) - np.einsum("ij,ij->j", v, v), variance.numpy(), atol=1e-6)


def network(params, batch):
    return torch.tanh(batch[0] @ params["w"] + params["b"]) @ params["head"]


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_posterior_does_not_depend_on_batch_size_or_split(structure):
    params, batch = regression(4)
    params["head"] = torch.randn(4, 2)
    batch = (batch[0], batch[1][:, :2])
    options = {"rank": 2 * N} if structure == "low_rank" else {}
    estimate = curvature.ggn(network, likelihoods.gaussian(0.5), structure, **options)
    tx, precisions = laplace(), []
    for cuts in ((0, N), (0, 1, N), (0, 5, 10, 15, 20), tuple(range(N + 1))):
        state = accumulate(tx, params, batch, estimate, cuts)
        for temperature in (None, 0.3):
            posterior = tx.posterior(state, params, prior_precision=0.7, temperature=temperature)
            precisions.append(posterior.precision.to_dense())
    for bayes, tempered in zip(precisions[2::2], precisions[3::2]):
        assert (bayes - precisions[0]).abs().max() < 1e-10 * precisions[0].abs().max()
        assert (tempered - precisions[1]).abs().max() < 1e-10 * precisions[1].abs().max()


def test_a_temperature_is_per_datum_and_one_over_n_is_bayes():
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "dense"))
    bayes = tx.posterior(state, params, prior_precision=1.0).marginal_variance["w"]
    assert torch.allclose(
        tx.posterior(state, params, prior_precision=1.0, temperature=1 / N).marginal_variance["w"], bayes
    )
    assert torch.allclose(
        tx.posterior(state, params, prior_precision=1.0, temperature=1.0).marginal_variance["w"], N * bayes
    )


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_samples_have_the_covariance_of_the_posterior(structure):
    """As in test_gaussian: n draws, an entry's standard deviation is sqrt((C_ij^2 + C_ii C_jj) / n); the largest of 300
    standardised errors exceeds 6 with probability below 6e-7 a structure. Matrix and 0-d leaves, prior precision 0.7.
    """
    params = {"w": torch.randn(3, 2), "s": torch.tensor(0.4)}
    batch = (torch.randn(N, 3), torch.randn(N, 2))
    forward = lambda p, batch: p["s"] * (batch[0] @ p["w"])  # noqa: E731
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(forward, likelihoods.gaussian(5.0), structure))
    posterior = tx.posterior(state, params, prior_precision=0.7)
    n = 30_000
    draws = posterior.sample((n,), generator=torch.Generator().manual_seed(1))
    assert draws["w"].shape == (n, 3, 2) and draws["s"].shape == (n,)
    centred = flatten(draws, params) - flatten(params, params)
    units = optree.tree_map(lambda leaf: leaf, unit_rows(params))
    covariance = flatten(posterior.precision.solve(units), params)
    deviation = ((covariance.square() + torch.outer(covariance.diagonal(), covariance.diagonal())) / n).sqrt()
    assert ((centred.T @ centred / n - covariance) / deviation).abs().max() < 6
    assert torch.allclose(flatten(posterior.marginal_variance, params), covariance.diagonal(), rtol=1e-9)


def unit_rows(params):
    from bayesopt_chain.precision import unflatten

    return unflatten(torch.eye(flatten(params, params).numel()), params)


@pytest.mark.parametrize("carry", ["state", "posterior"])
@pytest.mark.parametrize("structure", ["dense", "low_rank"])
def test_online_laplace_on_linear_regression_is_the_posterior_of_all_data(structure, carry):
    _, batch = regression()
    prior, variance = 0.7, 0.3
    mean, precision = exact_posterior(batch, prior, variance)
    estimate = curvature.ggn(linear, likelihoods.gaussian(variance), structure, **OPTIONS.get(structure, {}))
    tx, params = laplace(), as_tree(torch.zeros(8), 2)
    state, posterior = tx.init(params), None
    for part in (slice(0, 7), slice(7, N)):
        data = (batch[0][part], batch[1][part])
        _, increment = tx.update(params, tx.init(params), curvature=estimate(params, data))
        _, state = tx.update(params, state, curvature=estimate(params, data))
        if posterior is None:
            new = tx.posterior(increment, params, prior_precision=prior)
        else:
            new = (
                tx.posterior(state, params, prior_precision=prior)
                if carry == "state"
                else tx.posterior(increment, params, prior=posterior)
            )
        # the mode of a quadratic: one Newton step from the last mean, where the prior's gradient is zero
        gradient = torch.func.grad(
            lambda p, data=data: likelihoods.gaussian(variance).nll(linear(p, data), data[1]).sum()
        )(params)
        if posterior is None:
            gradient = optree.tree_map(lambda g, p: g + prior * p, gradient, params)
        params = optree.tree_map(torch.sub, params, new.precision.solve(gradient))
        posterior = new._replace(mean=params)
    assert torch.allclose(flatten(posterior.mean, params), mean, atol=1e-10)
    assert torch.allclose(posterior.precision.to_dense(), precision, rtol=1e-10, atol=1e-10)


def test_kronecker_posteriors_are_carried_on_as_states():
    params, batch = regression()
    estimate = curvature.ggn(linear, likelihoods.gaussian(), "kronecker")
    tx = laplace()
    whole = accumulate(tx, params, batch, estimate)
    halves = accumulate(tx, params, batch, estimate, (0, 7, N))
    a, b = (tx.posterior(s, params, prior_precision=1.0).precision.to_dense() for s in (whole, halves))
    assert torch.allclose(a, b, rtol=1e-11)
    posterior = tx.posterior(whole, params, prior_precision=1.0)
    with pytest.raises(TypeError, match="one posterior has one structure"):
        tx.posterior(whole, params, prior=posterior)


def test_prior_precision_and_noise_tuned_by_evidence_maximise_the_gaussian_process_evidence():
    _, batch = regression()
    batch = (batch[0], linear({"w": torch.randn(3, 2), "b": torch.randn(2)}, batch) + 0.5 * torch.randn(N, 2))
    estimate, tx = curvature.ggn(linear, likelihoods.gaussian(), "dense"), laplace()
    state = accumulate(tx, as_tree(torch.zeros(8), 2), batch, estimate)
    design = features(batch[0], 2)

    def evidence(h):
        mean, _ = exact_posterior(batch, h["prior"], h["variance"])  # the mode moves with the hyperparameters
        params = as_tree(mean, 2)
        nll = likelihoods.gaussian(h["variance"]).nll(linear(params, batch), batch[1]).sum()
        return tx.log_evidence(state, params, -nll, prior_precision=h["prior"], likelihood_scale=1 / h["variance"])

    def gp(h):
        kernel = design @ design.T / h["prior"] + h["variance"] * torch.eye(2 * N)
        return torch.distributions.MultivariateNormal(torch.zeros(2 * N), kernel).log_prob(batch[1].reshape(-1))

    start = {"prior": torch.tensor(1.0), "variance": torch.tensor(1.0)}
    best = tune_by_evidence(evidence, start)
    leaves = {name: value.clone().requires_grad_() for name, value in best.items()}
    assert torch.allclose(evidence(leaves), gp(leaves), rtol=1e-10)
    gradients = torch.autograd.grad(gp(leaves), list(leaves.values()))
    assert max(abs(g * v).item() for g, v in zip(gradients, best.values())) < 1e-6
    assert 0.1 < best["variance"] < 0.5


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_evidence_is_differentiable_in_the_prior_and_the_scale(structure):
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), structure))

    def evidence(prior, scale):
        return tx.log_evidence(state, params, -1.0, prior_precision=prior, likelihood_scale=scale)

    values = (torch.tensor(0.8, requires_grad=True), torch.tensor(1.7, requires_grad=True))
    assert torch.autograd.gradcheck(evidence, values)


def test_one_prior_precision_a_layer_can_be_tuned_for_kronecker():
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "kronecker"))
    best = tune_by_evidence(
        lambda h: tx.log_evidence(state, params, 0.0, prior_precision=h),
        {"w": torch.tensor(1.0), "b": torch.tensor(1.0)},
    )
    leaves = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), best)
    tx.log_evidence(state, params, 0.0, prior_precision=leaves).backward()
    assert max((leaf.grad * leaf).abs().item() for leaf in leaves.values()) < 1e-6


def test_validation_picks_the_smallest_loss_and_survives_refusals():
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "root"))

    def loss(prior):
        return (flatten(tx.posterior(state, params, prior_precision=prior).marginal_variance, params).sum() - 0.5).abs()

    best, losses = tune_by_validation(loss, [0.0, 0.1, 1.0, 10.0])
    assert losses[0] == math.inf and losses.index(min(losses)) == [0.0, 0.1, 1.0, 10.0].index(best)
    with pytest.raises(ValueError, match="none of 1 candidates"):
        tune_by_validation(loss, [0.0])
    with pytest.raises(ValueError, match="not positive"):
        tune_by_evidence(lambda h: h, torch.tensor(0.0))
    with pytest.raises(ValueError, match="not finite"):
        tune_by_evidence(lambda h: h / 0, torch.tensor(1.0))


@pytest.mark.parametrize("inplace", [False, True])
def test_it_passes_updates_through_a_chain_and_a_step(inplace):
    params, batch = regression()
    estimate = curvature.ggn(linear, likelihoods.gaussian(), "dense")
    tx, plain = chain(laplace(), sgd(0.1)), sgd(0.1)

    def loss(params, batch):
        return likelihoods.gaussian().nll(linear(params, batch), batch[1]).mean()

    with_laplace, without = make_step(loss, tx, curvature=estimate, inplace=inplace), make_step(loss, plain)
    a, b = optree.tree_map(torch.clone, params), params
    state, other = tx.init(a), plain.init(b)
    total = 0
    for _ in range(3):
        total = total + estimate(a, batch).to_dense()
        a, state, _ = with_laplace(a, state, batch)
        b, other, _ = without(b, other, batch)
    assert all(map(torch.equal, *map(optree.tree_leaves, (a, b))))
    posterior = laplace().posterior(state, a, prior_precision=0.5)
    assert torch.allclose(posterior.precision.to_dense(), total + 0.5 * torch.eye(8))


def test_inplace_keeps_the_state_tensors_and_leaves_the_increment_alone():
    params, batch = regression()
    increment = curvature.ggn(linear, likelihoods.gaussian(), "dense")(params, batch)
    before = increment.matrix.clone()
    tx = laplace()
    _, state = tx.update(params, tx.init(params), curvature=increment)
    matrix = state[0].precision.matrix
    _, state = tx.update(params, state, curvature=increment)
    assert state[0].precision.matrix is matrix
    assert torch.equal(increment.matrix, before) and torch.allclose(matrix, 2 * before)


def test_state_and_transform_copy_pickle_and_continue():
    params, batch = regression()
    estimate = curvature.ggn(linear, likelihoods.gaussian(), "kronecker")
    tx = laplace()
    state = accumulate(tx, params, batch, estimate)
    twin, other = pickle.loads(pickle.dumps(tx)), pickle.loads(pickle.dumps(copy.deepcopy(state)))
    assert twin == tx and repr(tx) == "laplace()" and isinstance(other[0], LaplaceState)
    a, b = (
        t.posterior(
            t.update(params, s, curvature=estimate(params, batch), inplace=False)[1], params, prior_precision=1.0
        )
        for t, s in ((tx, state), (twin, other))
    )
    assert torch.equal(a.precision.to_dense(), b.precision.to_dense())


def test_without_data_the_posterior_is_the_prior():
    params, _ = regression()
    tx = laplace()
    posterior = tx.posterior(tx.init(params), params, prior_precision=4.0)
    assert torch.equal(posterior.marginal_variance["w"], torch.full((3, 2), 0.25))


def test_bad_input_is_one_clear_error():
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "dense"))
    other = Diagonal(params, torch.tensor(1.0))
    with pytest.raises(TypeError, match="cannot add Diagonal to Dense"):
        tx.update(params, state, curvature=other)
    with pytest.raises(TypeError, match=r"curvature is a Tensor.*bayesopt_chain\.curvature"):
        tx.update(params, state, curvature=torch.ones(3))
    with pytest.raises(TypeError, match="hessian"):
        tx.update(params, state, hessian=other)
    smaller = ({"w": params["w"][:, :1], "b": params["b"][:1]}, (batch[0], batch[1][:, :1]))
    with pytest.raises(ValueError, match=r"the increment at b has shape \(1,\), the parameter \(2,\)"):
        tx.update(params, state, curvature=curvature.ggn(linear, likelihoods.gaussian(), "dense")(*smaller))
    with pytest.raises(ValueError, match="params at b"):
        tx.posterior(state, smaller[0], prior_precision=1.0)
    for priors in ({}, {"prior_precision": 1.0, "prior": tx.posterior(state, params, prior_precision=1.0)}):
        with pytest.raises(ValueError, match="pass one of"):
            tx.posterior(state, params, **priors)
    few = accumulate(tx, params, (batch[0][:2], batch[1][:2]), curvature.ggn(linear, likelihoods.gaussian(), "dense"))
    with pytest.raises(ValueError, match=r"singular.*(at w|at b).*prior_precision"):
        tx.posterior(few, params, prior_precision=0.0)
    with pytest.raises(ValueError, match="0 Laplace states"):
        tx.posterior((), params, prior_precision=1.0)
    with pytest.raises(ValueError, match="accumulated"):
        tx.posterior(tx.init(params), params, prior=tx.posterior(state, params, prior_precision=1.0))


def test_an_indefinite_hessian_is_refused_by_the_parameters_name():
    params = {"w": torch.tensor([0.1])}
    forward = lambda p, batch: (batch[0] @ p["w"][:, None]).square()  # noqa: E731
    batch = (torch.ones(3, 1), torch.full((3, 1), 5.0))
    tx = laplace()
    state = tx.init(params)
    _, state = tx.update(params, state, curvature=curvature.hessian(forward, likelihoods.gaussian())(params, batch))
    with pytest.raises(ValueError, match=r"indefinite at w.*curvature\.ggn"):
        tx.posterior(state, params, prior_precision=1.0)
