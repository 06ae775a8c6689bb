"""Kronecker factors under weights: padding leaves nothing behind, a datum of weight 2 is two data, one of weight 0 none."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import curvature, likelihoods


class Causal(nn.Module):
    """One layer of causal attention between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, ids):
        h = self.table(ids)
        scores = self.query(h) @ h.mT
        future = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        return self.head(h + torch.tanh(scores.masked_fill(future, -torch.inf).softmax(-1) @ self.value(h)))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["ggn", "empirical_fisher"])
def test_padded_sequences_have_the_factors_of_each_sequence_alone(sharing, estimator):
    """Lengths 3, 5 and 7, the first two tokens of each a prompt whose labels are ignored, padded to 9."""
    forward, params, _ = bc.make_functional(Causal().eval())
    estimate = getattr(curvature, estimator)(forward, likelihoods.categorical(), "kronecker", sharing=sharing)
    ids, labels = torch.randint(0, 11, (3, 9)), torch.full((3, 9), -100)
    alone = None
    for n, length in enumerate((3, 5, 7)):
        labels[n, 2:length] = torch.randint(0, 11, (length - 2,))
        one = estimate(params, (ids[n : n + 1, :length], labels[n : n + 1, :length]))
        alone = one if alone is None else alone.add(one)
    padded = estimate(params, (ids, labels))
    assert padded.count == 3
    for side in ("left", "right"):
        torch.testing.assert_close(getattr(padded, side), getattr(alone, side), rtol=1e-10, atol=1e-12)
    # a prompt is seen by later tokens, and counts in the layers below
    seen = torch.bincount(ids[0, :3], minlength=11) / 3
    only = estimate(params, (ids[:1], labels[:1]))
    torch.testing.assert_close(only.left["table.weight"], seen if sharing == "expand" else seen**2)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)),
    ],
    ids=["linear", "grouped convolution"],
)
def test_a_datum_of_weight_two_is_two_data_and_an_ignored_one_none(module):
    forward, params, _ = bc.make_functional(module.double().eval())
    x, y, weights = torch.randn(4, 8), torch.tensor([0, 1, 2, 1]), torch.tensor([2.0, 1.0, 0.0, 1.0])
    weighted = curvature.ggn(forward, likelihoods.weighted(likelihoods.categorical()), "kronecker")
    plain = curvature.ggn(forward, likelihoods.categorical(), "kronecker")
    rows = [0, 0, 1, 3]
    wanted = plain(params, (x[rows], y[rows]))
    got = weighted(params, (x, (y, weights)))
    torch.testing.assert_close(got.to_dense(), wanted.to_dense(), rtol=1e-10, atol=1e-12)
    ignored = plain(params, (x, torch.where(weights > 0, y, -100)))
    torch.testing.assert_close(ignored.to_dense(), plain(params, (x[[0, 1, 3]], y[[0, 1, 3]])).to_dense())
    nothing = plain(params, (x, torch.full_like(y, -100)))
    torch.testing.assert_close(wanted.add(nothing).to_dense(), wanted.to_dense())
