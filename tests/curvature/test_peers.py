"""Curvature of the libraries our users come from: the same numbers where those are right; operators of curvlinops."""

import optree
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.precision import flatten
from tests.curvature.conftest import convolutional, of_module

pytestmark = pytest.mark.peers


def posteriors_diagonal(forward, params, batches, reduction):
    posteriors = pytest.importorskip("posteriors")
    transform = posteriors.laplace.diag_ggn.build(
        lambda p, b: (forward(p, b), torch.tensor([])), lambda z, b: -F.cross_entropy(z, b[1], reduction=reduction)
    )
    state = transform.init(params)
    for batch in batches:
        state, _ = transform.update(state, batch)
    return flatten({name: state.prec_diag[name] for name in params}, params)


def case():
    forward, params = of_module(convolutional())
    return forward, params, (torch.randn(6, 2, 6, 6), torch.randint(0, 3, (6,)))


def test_the_diagonal_is_that_of_posteriors_with_a_summed_likelihood():
    forward, params, batch = case()
    mine = curvature.ggn(forward, likelihoods.categorical(), "diagonal")(params, batch)
    theirs = posteriors_diagonal(forward, params, [batch], "sum")
    assert torch.allclose(flatten(mine.diag(), params), theirs, rtol=1e-10)


curvlinops = pytest.importorskip("curvlinops")


def network(likelihood, outputs, targets):
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    forward, params, _ = bc.make_functional(module)
    x = torch.randn(len(targets), 3)
    return forward, likelihood, params, [(x[:4], targets[:4]), (x[4:], targets[4:])]


CASES = {
    "classes, one ignored": (likelihoods.categorical(), 3, torch.tensor([0, 1, -100, 2, 2, 1, 0])),
    "learned noise": (likelihoods.gaussian("learned"), 2, torch.linspace(-1, 1, 7)[:, None]),
    "counts": (likelihoods.poisson(), 1, torch.arange(7.0)[:, None]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_its_products_are_those_of_the_dense_matrix(name, kind):
    forward, likelihood, params, batches = network(*CASES[name])
    operator = curvature.linear_operator(forward, likelihood, params, batches, kind)
    estimate = getattr(curvature, kind)(forward, likelihood, "dense")
    wanted = sum(estimate(params, batch).to_dense() for batch in batches)
    torch.testing.assert_close(operator @ torch.eye(len(wanted)), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.adjoint() @ wanted[0], wanted @ wanted[0], rtol=1e-10, atol=1e-12)
    leaves = operator @ [torch.ones_like(leaf) for leaf in optree.tree_leaves(params)]
    flat = torch.cat([leaf.flatten() for leaf in leaves])
    torch.testing.assert_close(flat, wanted.sum(1), rtol=1e-9, atol=1e-10)


def test_hutchpp_finds_the_trace():
    """Exact where a third of the products reaches the rank, here 6."""
    forward, likelihood, params, batches = network(*CASES["classes, one ignored"])
    operator = curvature.linear_operator(forward, likelihood, params, batches[:1])
    trace = (operator @ torch.eye(operator.shape[0])).trace()
    torch.testing.assert_close(curvlinops.hutchpp_trace(operator, num_matvecs=24), trace, rtol=1e-8, atol=0)


def test_what_cannot_be_an_operator_is_refused():
    forward, likelihood, params, batches = network(*CASES["counts"])
    for asked, words in (((batches, "fisher"), "kind must be 'ggn' or"), ((iter(batches),), "only once")):
        with pytest.raises(ValueError, match=words):
            curvature.linear_operator(forward, likelihood, params, *asked)
