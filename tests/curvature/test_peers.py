"""The same numbers as the libraries our users come from, where those are right, and not where they are wrong."""

import pytest
import torch
from torch.nn import functional as F

from bayesopt_chain import curvature, likelihoods
from bayesopt_chain.posterior.laplace import laplace
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


def split(batch, size):
    return [(batch[0][i : i + size], batch[1][i : i + size]) for i in range(0, 6, size)]


def test_the_diagonal_is_that_of_posteriors_with_a_summed_likelihood():
    forward, params, batch = case()
    mine = curvature.ggn(forward, likelihoods.categorical(), "diagonal")(params, batch)
    theirs = posteriors_diagonal(forward, params, [batch], "sum")
    assert torch.allclose(flatten(mine.diag(), params), theirs, rtol=1e-10)


def test_only_ours_is_independent_of_the_batch_size_with_the_recommended_mean_likelihood():
    forward, params, batch = case()
    theirs = [posteriors_diagonal(forward, params, split(batch, size), "mean") for size in (6, 2)]
    assert torch.allclose(theirs[1], 3 * theirs[0], rtol=1e-9)
    estimate, tx = curvature.ggn(forward, likelihoods.categorical(), "diagonal"), laplace()
    mine = []
    for size in (6, 2):
        state = tx.init(params)
        for part in split(batch, size):
            _, state = tx.update(params, state, curvature=estimate(params, part))
        mine.append(flatten(tx.posterior(state, params, prior_precision=0.0001).precision.diag(), params))
    assert torch.allclose(mine[0], mine[1], rtol=1e-10)
