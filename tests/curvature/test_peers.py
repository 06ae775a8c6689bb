"""The same numbers as the libraries our users come from, where those are right, and not where they are wrong."""

import pytest
import torch
from torch.nn import functional as F

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
