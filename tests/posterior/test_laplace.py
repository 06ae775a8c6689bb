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
from bayesopt_chain.precision import Dense, Diagonal, flatten

pytestmark = pytest.mark.usefixtures("double_precision")


N = 20
STRUCTURES = ["dense", "root", "low_rank"]
OPTIONS = {"low_rank": {"rank": 2 * N}}


def linear(params, batch):
    return batch[0] @ params["w"] + params["b"]


def regression(outputs=2):
    x, params = torch.randn(N, 3), {"w": torch.randn(3, outputs), "b": torch.randn(outputs)}
    return params, (x, torch.randn(N, outputs))


def features(x, outputs):
    """The Jacobian of `linear` in (b, w), `[N outputs, P]`; of no data too."""
    eye = torch.eye(outputs)
    b = eye.expand(len(x), outputs, outputs)
    w = torch.einsum("ni,oc->noic", x, eye).flatten(2)
    return torch.cat([b, w], -1).flatten(0, 1)


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
    for options, factor in (({}, 1), ({"temperature": 1 / N}, 1), ({"temperature": 1.0}, N)):
        posterior = tx.posterior(state, params, prior_precision=1.0, **options)
        wanted = (features(batch[0], 2).T @ features(batch[0], 2) + torch.eye(8)) / factor
        assert torch.allclose(posterior.precision.to_dense(), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_linear_regression_has_the_evidence_of_the_gaussian_process(structure, first):
    """log N(y; Phi m0, Phi S0 Phi^T + variance I), to 1e-10: of a prior precision, or of the posterior of the first data."""
    _, batch = regression()
    prior, variance = 0.7, 0.3
    before, data = ((batch[0][part], batch[1][part]) for part in (slice(first), slice(first, N)))
    (m0, p0), (mean, precision) = (exact_posterior(some, prior, variance) for some in (before, batch))
    likelihood, tx, start, params = likelihoods.gaussian(variance), laplace(), as_tree(m0, 2), as_tree(mean, 2)
    estimate = curvature.ggn(linear, likelihood, structure, **OPTIONS.get(structure, {}))
    given = {"prior_precision": prior}
    if first:
        given = {"prior": tx.posterior(accumulate(tx, start, before, estimate, (0, first)), start, **given)}
    state = accumulate(tx, params, data, estimate, (0, N - first))
    found = tx.posterior(state, params, **given).precision.to_dense()
    assert torch.allclose(found, precision, rtol=1e-10, atol=1e-10)
    evidence = tx.log_evidence(state, params, -likelihood.nll(linear(params, data), data[1]).sum(), **given)
    design = features(data[0], 2)
    kernel = design @ torch.linalg.inv(p0) @ design.T + variance * torch.eye(len(design))
    exact = torch.distributions.MultivariateNormal(design @ m0, kernel).log_prob(data[1].reshape(-1))
    assert math.isclose(evidence.item(), exact.item(), rel_tol=1e-10)


@pytest.mark.parametrize("carry", ["state", "posterior"])
@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_online_laplace_on_linear_regression_is_the_posterior_of_all_data(structure, carry):
    """Pickled between the tasks. Structures without correlations between leaves have the blocks of the joint closed form (for a
    linear Gaussian model K-FAC has them exactly), the others its mean too."""
    _, batch = regression()
    prior, variance = 0.7, 0.3
    likelihood = likelihoods.gaussian(variance)
    mean, precision = exact_posterior(batch, prior, variance)
    if structure not in STRUCTURES:
        precision[:2, 2:], precision[2:, :2] = 0, 0
    if structure == "diagonal":
        precision = torch.diag(precision.diagonal())
    estimate = curvature.ggn(linear, likelihood, structure, **OPTIONS.get(structure, {}))
    tx, params = laplace(), as_tree(torch.zeros(8), 2)
    state, given = tx.init(params), {"prior_precision": prior}
    for part in (slice(0, 5), slice(5, 7), slice(7, N)):
        data = (batch[0][part], batch[1][part])
        last = state if carry == "state" else tx.init(params)
        _, state = tx.update(params, last, curvature=estimate(params, data))
        posterior = pickle.loads(pickle.dumps(tx.posterior(state, params, **given)))
        # the mode of a quadratic: one Newton step from the last mean, where the prior's gradient is zero
        gradient = torch.func.grad(lambda p, data=data: likelihood.nll(linear(p, data), data[1]).sum())(params)
        params = optree.tree_map(torch.sub, params, posterior.precision.solve(gradient))
        posterior = posterior._replace(mean=params)
        given = given if carry == "state" else {"prior": posterior}
    assert torch.allclose(posterior.precision.to_dense(), precision, rtol=1e-11, atol=1e-10)
    if structure in STRUCTURES:
        assert torch.allclose(flatten(posterior.mean, params), mean, atol=1e-10)
    half = tx.posterior(state, params, prior=posterior, temperature=1 / (2 * N), likelihood_scale=0.5)
    assert torch.isfinite(half.log_prob(params))


@pytest.mark.slow
def test_the_low_rank_posterior_depends_on_the_split_as_much_as_its_docstring_says():
    """Mean marginal variance of a 93-parameter classifier with 200 data, batches of 10 to 100 against one of all."""
    changes = {10: [], 20: []}
    forward = lambda p, batch: torch.tanh(batch[0] @ p["w"] + p["b"]) @ p["h"]  # noqa: E731
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(200, 5)
        params = {"w": torch.randn(5, 10) / 5**0.5, "b": torch.randn(10), "h": torch.randn(10, 3) / 10**0.5}
        labels = torch.randint(0, 3, (200,))
        for rank in changes:
            estimate, tx, whole = (
                curvature.ggn(forward, likelihoods.categorical(), "low_rank", rank=rank),
                laplace(),
                0.0,
            )
            for size in (200, 100, 50, 20, 10):
                state = accumulate(tx, params, (x, labels), estimate, tuple(range(0, 201, size)))
                posterior = tx.posterior(state, params, prior_precision=1.0)
                variance = flatten(posterior.marginal_variance, params).mean().item()
                whole = whole or variance
                changes[rank].append(variance / whole - 1)
    moved = {rank: [x for x in xs if x != 0] for rank, xs in changes.items()}
    assert min(moved[10]) == pytest.approx(-0.071, abs=5e-4) and max(moved[10]) == pytest.approx(-0.007, abs=5e-4)
    assert min(moved[20]) == pytest.approx(-0.020, abs=5e-4) and max(moved[20]) == pytest.approx(-0.004, abs=5e-4)


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


def test_without_curvature_there_is_no_posterior():
    """Neither before the first update, nor after a loop that never passed curvature."""
    params, batch = regression()
    tx = laplace()
    trained = make_step(lambda p, batch: linear(p, batch).square().mean(), chain(tx, sgd(0.1)))
    _, after, _ = trained(params, chain(tx, sgd(0.1)).init(params), batch)
    other = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), "dense"))
    known = tx.posterior(other, params, prior_precision=1.0)
    for state in (tx.init(params), after):
        for question in (
            lambda s: tx.posterior(s, params, prior_precision=4.0),
            lambda s: tx.posterior(s, params, prior=known),
            lambda s: tx.log_evidence(s, params, 0.0, prior_precision=4.0),
        ):
            with pytest.raises(ValueError, match="no curvature has been accumulated"):
                question(state)


AT_ONE = {"prior_precision": 1.0}
SMALLER = {"w": torch.zeros(3, 1), "b": torch.zeros(1)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda tx, s, p: tx.update(p, s, curvature=Diagonal(p, torch.tensor(1.0))), "cannot add Diagonal to Dense"),
        (
            lambda tx, s, p: tx.update(p, s, curvature=torch.ones(3)),
            r"curvature is a Tensor.*bayesopt_chain\.curvature",
        ),
        (lambda tx, s, p: tx.update(p, s, hessian=torch.ones(3)), "hessian"),
        (
            lambda tx, s, p: tx.update(p, s, curvature=Dense(torch.eye(4), SMALLER, torch.tensor(1.0))),
            r"the increment at b has shape \(1,\), the parameter \(2,\)",
        ),
        (lambda tx, s, p: tx.posterior(s, SMALLER, **AT_ONE), "params at b"),
        (lambda tx, s, p: tx.posterior(s, p), "pass one of"),
        (lambda tx, s, p: tx.posterior(s, p, **AT_ONE, prior=tx.posterior(s, p, **AT_ONE)), "pass one of"),
        (lambda tx, s, p: tx.posterior(few(tx, p), p, prior_precision=0.0), r"singular.*(at w|at b).*prior_precision"),
        (
            lambda tx, s, p: tx.posterior(few(tx, p, "kronecker"), p, prior=kronecker(tx, p)._replace(undecomposed=())),
            r"prior has the structure Eigenbasis.*undecomposed",
        ),
        (lambda tx, s, p: tx.posterior(s, p, prior=kronecker(tx, p)), "cannot add Kronecker to Dense"),
        (lambda tx, s, p: indefinite(tx), r"indefinite at w.*curvature\.ggn"),
        (lambda tx, s, p: tx.posterior((), p, **AT_ONE), r"0 states of laplace\(\)"),
        *(
            (lambda tx, s, p, x=x: tx.posterior(s, p, prior_precision=x), "prior_precision at b must be finite and not")
            for x in (-1.0, math.nan, math.inf, {"w": torch.tensor(1.0), "b": torch.tensor(-1.0)})
        ),
        *(
            (lambda tx, s, p, x=x: tx.posterior(s, p, **AT_ONE, likelihood_scale=x), "likelihood_scale must be a")
            for x in (0.0, -1.0, math.nan, torch.tensor(math.nan))
        ),
        *(
            (lambda tx, s, p, x=x: tx.posterior(s, p, **AT_ONE, temperature=x), "temperature must be a positive")
            for x in (0.0, -1.0, math.nan)
        ),
    ],
)
def test_bad_input_is_one_clear_error(call, words):
    params, batch = regression()
    state = accumulate(laplace(), params, batch, curvature.ggn(linear, likelihoods.gaussian(), "dense"))
    with pytest.raises((ValueError, TypeError), match=words):
        call(laplace(), state, params)


def few(tx, params, structure="dense"):
    data = torch.zeros(2, 3), torch.randn(2, 2)  # which say nothing of w
    return accumulate(tx, params, data, curvature.ggn(linear, likelihoods.gaussian(), structure))


def kronecker(tx, params):
    return tx.posterior(few(tx, params, "kronecker"), params, **AT_ONE)


def indefinite(tx):
    """The posterior of `w^2` far below its targets, whose Hessian is negative."""
    estimate = curvature.hessian(lambda p, batch: (batch[0] @ p["w"][:, None]).square(), likelihoods.gaussian())
    params = {"w": torch.tensor([0.1])}
    return tx.posterior(accumulate(tx, params, (torch.ones(3, 1), torch.full((3, 1), 5.0)), estimate), params, **AT_ONE)
