"""The evidence through one decomposition against the evidence of the posterior itself, and against Gaussian processes."""

import optree
import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.posterior.evidence import _evidence, spectra, tuned
from bayesopt_chain.posterior.model import How, Model, Pass
from bayesopt_chain.precision import Diagonal, LowRank

N = 30
STRUCTURES = ["dense", "root", "diagonal", "kronecker", "block"]


pytestmark = pytest.mark.usefixtures("double_precision")


def network(params, batch):
    return torch.tanh(batch[0] @ params["w"] + params["b"]) @ params["h"]


def start():
    return {"w": torch.randn(3, 4), "b": torch.randn(4), "h": torch.randn(4, 2)}


def accumulated(params, batch, structure, likelihood):
    tx = bc.laplace()
    _, state = tx.update(
        params, tx.init(params), curvature=bc.curvature.ggn(network, likelihood, structure)(params, batch)
    )
    return tx, state


def seen(params, total, likelihood, batch, forward=network):
    """A model at parameters, and what a pass over the data found there."""
    outputs = forward(params, batch)
    squares = likelihood.whitened(outputs, batch[1]).square().sum() if likelihood.has_noise_scale else torch.zeros(())
    entries = torch.tensor(float(outputs.numel()))
    log_likelihood = -likelihood.nll(outputs, batch[1]).sum()
    return Model(forward, params, How(likelihood, "all", None, {})), Pass(total, None, log_likelihood, squares, entries)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_spectra_give_the_evidence_of_the_posterior(structure):
    """At random priors (one a leaf, where the structure can) and scales, to 1e-9."""
    params, batch, likelihood = start(), (torch.randn(N, 3), torch.randn(N, 2)), bc.likelihoods.gaussian(0.7)
    tx, state = accumulated(params, batch, structure, likelihood)
    groups = spectra(state[0].precision)
    evidence = _evidence(groups, *seen(params, state[0].precision, likelihood, batch), None)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        prior = torch.exp(2 * torch.randn(len(groups), generator=generator))
        scale = torch.exp(torch.randn((), generator=generator))
        leaves = {leaf: prior[n] for n, group in enumerate(groups) for leaf in group.leaves}
        tree = optree.tree_unflatten(optree.tree_structure(params), [leaves[i] for i in range(3)])
        scaled = bc.likelihoods.gaussian(0.7 / scale.item())
        log_likelihood = -scaled.nll(network(params, batch), batch[1]).sum()
        wanted = tx.log_evidence(state, params, log_likelihood, prior_precision=tree, likelihood_scale=scale)
        torch.testing.assert_close(evidence({"prior": prior, "scale": scale}), wanted, rtol=1e-9, atol=1e-9)


def expanded(structure, likelihood, targets):
    """A random place of the network, and what a pass over the data finds there."""
    x = torch.randn(N, 3)
    params, batch = start(), (x, targets(x))
    total = bc.curvature.ggn(network, likelihood, structure)(params, batch)
    return params, batch, seen(params, total, likelihood, batch)


@pytest.mark.sweep(5)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_scalar_prior_is_the_best_of_a_grid_and_its_fixed_point(structure):
    """delta = sum_g gamma_g / sum_g |t_g|^2 from the groups' eigenvalues, to 1e-7; of a grid from a hundredth to a
    hundred times as much it has the most evidence."""
    params, _, found = expanded(structure, bc.likelihoods.categorical(), lambda x: (x.sum(1) > 0).long())
    best = tuned(*found, prior_structure="scalar")
    leaves = optree.tree_leaves(best.prior_precision)
    assert len({leaf.item() for leaf in leaves}) == 1
    delta, groups = leaves[0], spectra(found[1].decomposed)
    evidence = _evidence(groups, *found, None)
    grid = delta * torch.logspace(-2, 2, 401, dtype=torch.float64)
    values = torch.stack([evidence({"prior": d}) for d in grid])
    assert values.max() <= best.log_evidence + 1e-9 and values.argmax() == 200

    determined = sum((group.values / (group.values + delta)).sum() for group in groups)
    squares = sum(x.square().sum() for x in optree.tree_leaves(params))
    torch.testing.assert_close(delta, determined / squares, rtol=1e-7, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_scalar_prior_and_the_noise_are_the_stationary_point_of_the_posteriors_own_evidence(structure):
    """By autograd through ``laplace.log_evidence``, whose derivatives by log delta and log s vanish there, to 1e-6; a layerwise
    prior has at least as much evidence."""
    likelihood = bc.likelihoods.gaussian(0.7)
    params, batch, found = expanded(structure, likelihood, lambda x: 2 * x[:, :2])
    best = tuned(*found, prior_structure="scalar")
    tx, state = accumulated(params, batch, structure, likelihood)
    logs = [torch.log(x).detach().requires_grad_() for x in (best.prior_precision["w"], best.likelihood_scale)]
    prior, scale = (x.exp() for x in logs)
    outputs = network(params, batch)
    joint = torch.distributions.Normal(outputs, (0.7 / scale).sqrt()).log_prob(batch[1]).sum()
    value = tx.log_evidence(state, params, joint, prior_precision=prior, likelihood_scale=scale)
    assert max(slope.abs() for slope in torch.autograd.grad(value, logs)) < 1e-6
    torch.testing.assert_close(value.detach(), best.log_evidence, rtol=1e-9, atol=1e-9)
    freer = tuned(*found)
    assert freer.log_evidence >= best.log_evidence - 1e-9
    assert structure not in ("dense", "root") or torch.equal(freer.log_evidence, best.log_evidence)


def test_degenerate_eigenvalues_give_finite_gradients():
    """Repeated and zero eigenvalues (dead inputs): the gradient by the noise's scale is that of the formula."""
    params, forward = {"w": torch.ones(4, 3)}, lambda p, batch: batch[0] @ p["w"]
    x = torch.cat([torch.eye(2), torch.zeros(2, 2)], 1).repeat(5, 1)
    y = forward(params, (x, None)) + (4 / 30) ** 0.5  # a residual sum of squares of 4
    total = bc.curvature.ggn(forward, bc.likelihoods.gaussian(), "kronecker")(params, (x[:10], y[:10]))
    found = seen(params, total, bc.likelihoods.gaussian(), (x[:10], y[:10]), forward)
    evidence = _evidence(spectra(total), *found, None)
    scale = torch.tensor(2.0, requires_grad=True)
    (slope,) = torch.autograd.grad(evidence({"prior": torch.ones(1), "scale": scale}), scale)
    # eigenvalues: 5 (six times: two inputs, three outputs) and 0 (six times)
    torch.testing.assert_close(slope, torch.tensor(-2.0 + 15 / 2.0 - 0.5 * 6 * 5 / (2.0 * 5 + 1)))


@pytest.mark.parametrize(
    ("total", "words"),
    [
        (LowRank(torch.ones(3), torch.ones(1, 3), torch.tensor(1.0)), r"LowRank has no basis.*tune='validation'"),
        (Diagonal(torch.tensor([1.0, torch.nan, 1.0]), torch.tensor(1.0)), "log_evidence is NaN"),
    ],
    ids=["no common basis", "NaN"],
)
def test_what_has_no_evidence_is_refused_with_what_to_do(total, words):
    found = seen(
        torch.ones(3), total, bc.likelihoods.gaussian(), (torch.ones(2, 3), torch.ones(2)), lambda p, b: b[0] @ p
    )
    with pytest.raises(ValueError, match=words):
        tuned(*found)
