"""The Laplace transform: exact on linear models, whatever the batches, tuned by its evidence; what it cannot do is refused."""

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
from bayesopt_chain.posterior.evidence import of_spectra, spectra, tune_by_evidence, tuned
from bayesopt_chain.posterior.fit import at
from bayesopt_chain.posterior.gaussian import laplace, log_prior
from bayesopt_chain.posterior.model import How, Model, Pass
from bayesopt_chain.precision import Dense, Diagonal, LowRank, flatten

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


def start():
    return {"w": torch.randn(3, 4), "b": torch.randn(4), "head": torch.randn(4, 2)}


def network(params, batch):
    return torch.tanh(batch[0] @ params["w"] + params["b"]) @ params["head"]


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
        tx, state = pickle.loads(pickle.dumps((tx, state)))
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
            (
                lambda tx, s, p, x=x: tx.posterior(s, p, prior_precision=x),
                "prior_precision is negative or not finite at b",
            )
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


@pytest.mark.parametrize("structure", curvature.STRUCTURES)
def test_the_evidence_is_differentiable_in_the_prior_and_the_scale(structure):
    params, batch = regression()
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(linear, likelihoods.gaussian(), structure))

    def evidence(prior, scale):
        return tx.log_evidence(state, params, -1.0, prior_precision=prior, likelihood_scale=scale)

    values = (torch.tensor(0.8, requires_grad=True), torch.tensor(1.7, requires_grad=True))
    assert torch.autograd.gradcheck(evidence, values)


def test_evidence_with_a_forbidden_region_is_maximised_at_its_edge_or_inside():
    """a log h - b h, refused below a floor: the maximum a / b where that is allowed, else the floor, to 1e-6."""
    refused = []
    for floor, wanted in ((0.1, 2.0), (1.9, 2.0), (5.0, 5.0)):

        def evidence(h, floor=floor):
            if h < floor:
                refused.append(h)
                raise ValueError("not positive definite")
            return 2 * h.log() - h

        for start in (6.0, 100.0, 1e5):
            assert tune_by_evidence(evidence, torch.tensor(start)).item() == pytest.approx(wanted, rel=1e-6)
    assert len(refused) > 10


def test_many_hyperparameters_of_mixed_shapes_reach_their_optimum():
    """sum of a_i log h_i - b_i h_i has its maximum at a / b, whatever the condition (1e4 here), dtype and shape."""
    a = {"w": torch.logspace(-2, 2, 12).reshape(3, 4), "s": torch.tensor(3.0)}
    b = {"w": torch.logspace(1, -1, 12).reshape(3, 4), "s": torch.tensor(0.5)}

    def evidence(h):
        return sum((a[k] * h[k].log() - b[k] * h[k]).sum() for k in a)

    best = tune_by_evidence(evidence, optree.tree_map(torch.ones_like, a), steps=400)
    for k in a:
        torch.testing.assert_close(best[k], a[k] / b[k], rtol=1e-6, atol=0)
    single = tune_by_evidence(evidence, optree.tree_map(lambda x: torch.ones_like(x).float(), a))
    assert single["w"].dtype == torch.float32
    torch.testing.assert_close(single["s"], torch.tensor(6.0).float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("of", "start", "words"),
    [
        (lambda h: h, 0.0, "all positive"),
        (lambda h: h / 0, 1.0, "not finite"),
        (lambda h: -h, math.nan, r"start must be .*positive and finite.*nan"),
        (lambda h: h * math.nan, 1.0, "log_evidence is nan at start"),
        (lambda h: (h - 1).abs().sqrt() * 0 - 1, 1.0, "gradient of log_evidence is nan"),
    ],
)
def test_what_cannot_be_tuned_says_why(of, start, words):
    with pytest.raises(ValueError, match=words):
        tune_by_evidence(of, torch.tensor(start))


def test_a_gradient_that_is_nan_on_the_way_shortens_the_step():
    """log h - h, whose gradient is NaN above 1.05: a step that overshoots there comes back, and the maximum at 1 is found."""
    visited = []

    def evidence(h):
        visited.append(h.item())
        return h.log() - h + ((h - h).sqrt() if h > 1.05 else 0.0)  # value 0, slope NaN

    best = tune_by_evidence(evidence, torch.tensor(0.01))
    assert best.item() == pytest.approx(1.0, abs=1e-6) and max(visited) > 1.05


WITH_BASIS = ["dense", "root", "diagonal", "kronecker"]


def seen(params, total, likelihood, batch, forward=network):
    """A model at parameters, and what a pass over the data found there."""
    outputs = forward(params, batch)
    squares = likelihood.whitened(outputs, batch[1]).square().sum() if likelihood.has_noise_scale else torch.zeros(())
    entries = torch.tensor(float(outputs.numel()))
    log_likelihood = -likelihood.nll(outputs, batch[1]).sum()
    return Model(forward, params, How(likelihood, "all", None, {})), Pass(total, None, log_likelihood, squares, entries)


@pytest.mark.parametrize("structure", WITH_BASIS)
def test_the_spectra_give_the_evidence_of_the_posterior(structure):
    """At random priors (one a leaf, where the structure can) and scales, to 1e-9."""
    params, batch, likelihood = start(), (torch.randn(N, 3), torch.randn(N, 2)), likelihoods.gaussian(0.7)
    tx = laplace()
    state = accumulate(tx, params, batch, curvature.ggn(network, likelihood, structure))
    found = seen(params, state[0].precision, likelihood, batch)
    groups, evidence = spectra(found[1].decomposed), of_spectra(*found, True, 1.0).evidence
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        prior = torch.exp(2 * torch.randn(len(groups), generator=generator))
        scale = torch.exp(torch.randn((), generator=generator))
        leaves = {leaf: prior[n] for n, group in enumerate(groups) for leaf in group.leaves}
        tree = optree.tree_unflatten(optree.tree_structure(params), [leaves[i] for i in range(3)])
        scaled = likelihoods.gaussian(0.7 / scale.item())
        log_likelihood = -scaled.nll(network(params, batch), batch[1]).sum()
        wanted = tx.log_evidence(state, params, log_likelihood, prior_precision=tree, likelihood_scale=scale)
        torch.testing.assert_close(evidence(prior, scale), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("structure", WITH_BASIS)
def test_a_scalar_prior_and_the_noise_are_the_stationary_point_of_the_posteriors_own_evidence(structure):
    """By autograd through ``laplace.log_evidence``, whose derivatives by log delta and log s vanish there, to 1e-6; a layerwise
    prior has at least as much evidence."""
    likelihood = likelihoods.gaussian(0.7)
    x, params, tx = torch.randn(N, 3), start(), laplace()
    batch = x, 2 * x[:, :2]
    state = accumulate(tx, params, batch, curvature.ggn(network, likelihood, structure))
    found = seen(params, state[0].precision, likelihood, batch)
    best = tuned(*found, prior_structure="scalar")
    logs = [torch.log(x).detach().requires_grad_() for x in (best[0]["w"], best[1])]
    prior, scale = (x.exp() for x in logs)
    outputs = network(params, batch)
    joint = torch.distributions.Normal(outputs, (0.7 / scale).sqrt()).log_prob(batch[1]).sum()
    value = tx.log_evidence(state, params, joint, prior_precision=prior, likelihood_scale=scale)
    assert max(slope.abs() for slope in torch.autograd.grad(value, logs)) < 1e-6
    freer = at(*found, *tuned(*found)).log_evidence
    torch.testing.assert_close(value.detach(), at(*found, *best).log_evidence, rtol=1e-9, atol=1e-9)
    assert freer >= value - 1e-9 and (structure not in ("dense", "root") or freer <= value + 1e-9)


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (LowRank(torch.ones(3), torch.ones(1, 3), torch.tensor(1.0)), r"LowRank has no basis.*tune='validation'"),
        (Diagonal(torch.tensor([1.0, torch.nan, 1.0]), torch.tensor(1.0)), "log_evidence is nan"),
    ],
    ids=["no common basis", "NaN"],
)
def test_what_has_no_evidence_is_refused_with_what_to_do(total, words):
    found = seen(torch.ones(3), total, likelihoods.gaussian(), (torch.ones(2, 3), torch.ones(2)), lambda p, b: b[0] @ p)
    with pytest.raises(ValueError, match=words):
        tuned(*found)
