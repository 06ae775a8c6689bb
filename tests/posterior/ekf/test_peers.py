"""The filters of posteriors 0.1.3, where they are what they claim to be."""

import pytest
import torch

import bayesopt_chain as bc


def forward(params, batch):
    return batch[0] * params


def log_likelihood(params, batch):
    return -bc.likelihoods.bernoulli().nll(forward(params, batch), batch[1]), torch.tensor([])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_with_one_parameter_and_single_data_theirs_is_ours():
    """Means and variances to 1e-6 over 20 drifting steps. With more parameters theirs divides the gradient by each one's own
    precision, ours solves for them together."""
    posteriors = pytest.importorskip("posteriors")
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(1, generator=g), torch.randint(0, 2, (1,), generator=g).float()) for _ in range(20)]
    theirs = posteriors.ekf.diag_fisher.build(log_likelihood, lr=1.0, transition_sd=0.2, per_sample=True)
    other = theirs.init(torch.zeros(1))
    tx, mean = bc.ekf.diagonal(transition_noise=0.04), torch.zeros(1)
    estimate = bc.ekf.observe(forward, bc.likelihoods.bernoulli(), linearisation="empirical")
    step, state = bc.make_step(None, tx, curvature=estimate), tx.init(mean)
    for batch in data:
        other, _ = theirs.update(other, batch)
        mean, state, info = step(mean, state, batch)
        torch.testing.assert_close(mean, other.params, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tx.posterior(state, mean).marginal_variance, other.sd_diag**2, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(info.loss.float(), -other.log_likelihood)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_a_datum_lowers_the_variance_here_and_raises_it_in_their_dense_filter():
    """They subtract the Fisher information (``predict_cov_inv - lr * fisher``), so that no numbers can be compared."""
    posteriors = pytest.importorskip("posteriors")
    batch = torch.ones(1), torch.ones(1)
    theirs = posteriors.ekf.dense_fisher.build(log_likelihood, lr=1.0, per_sample=True)
    after, _ = theirs.update(theirs.init(torch.zeros(1)), batch)
    tx = bc.ekf.dense()
    estimate = bc.ekf.observe(forward, bc.likelihoods.bernoulli(), linearisation="empirical")
    mean, state, _ = bc.make_step(None, tx, curvature=estimate)(torch.zeros(1), tx.init(torch.zeros(1)), batch)
    assert tx.posterior(state, mean).marginal_variance < 1.0
    if after.cov > 1.0:
        torch.testing.assert_close(1 / after.cov[0, 0], torch.tensor(0.75))  # 1 - 1/4; Bayes' rule has 1 + 1/4
