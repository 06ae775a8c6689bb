"""The smoother against the marginals of the joint Gaussian of all steps."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.precision import flatten, unflatten


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


P, STEPS, VARIANCE, PRIOR = 3, 6, 0.4, 0.8
start = {"a": torch.tensor([0.5, -1.0], dtype=torch.float64), "b": torch.tensor([[2.0]], dtype=torch.float64)}
MOVE = torch.tensor([[0.9, 0.2, 0.0], [-0.3, 0.8, 0.1], [0.0, 0.1, 1.1]], dtype=torch.float64)
EYE = torch.eye(P, dtype=torch.float64)
SINGULAR = torch.tensor([[0.2, 0.1, 0.0], [0.1, 0.05, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)


def forward(params, batch):
    return batch[0] @ flatten(params, start)


def batches():
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(2, P, generator=g), torch.randn(2, generator=g)) for _ in range(STEPS)]


def filtered(tx, data=None, keywords=None):
    step = bc.make_step(None, tx, curvature=bc.ekf.observe(forward, VARIANCE), keywords=keywords)
    history = [(start, tx.init(start))]
    for batch in data or batches():
        history.append(step(*history[-1], batch)[:2])
    return history


def joint(move, noises):
    """Marginal means and covariances of theta_0 ... theta_STEPS given all targets, from one Gaussian over all of them."""
    sources = [torch.eye(P) / PRIOR, *noises]
    maps = [torch.cat([torch.eye(P), torch.zeros(P, P * STEPS)], 1)]
    for t in range(STEPS):
        entering = torch.zeros(P, P * (STEPS + 1))
        entering[:, P * (t + 1) : P * (t + 2)] = torch.eye(P)
        maps.append(move @ maps[-1] + entering)
    prior_mean = torch.cat([flatten(start, start), torch.zeros(P * STEPS)])
    source = torch.block_diag(*sources)
    every = torch.cat(maps)
    mean, covariance = every @ prior_mean, every @ source @ every.T
    h = torch.block_diag(torch.zeros(0, P), *[x for x, _ in batches()])
    y = torch.cat([y for _, y in batches()])
    gain = covariance @ h.T @ torch.linalg.inv(h @ covariance @ h.T + VARIANCE * torch.eye(len(y)))
    mean, covariance = mean + gain @ (y - h @ mean), covariance - gain @ h @ covariance
    return [(mean[i * P : (i + 1) * P], covariance[i * P : (i + 1) * P, i * P : (i + 1) * P]) for i in range(STEPS + 1)]


def agree(gaussians, wanted, tolerance=1e-10):
    assert len(gaussians) == len(wanted)
    for gaussian, (mean, covariance) in zip(gaussians, wanted):
        assert (flatten(gaussian.mean, start) - mean).abs().max() < tolerance
        assert (torch.linalg.inv(gaussian.precision.to_dense()) - covariance).abs().max() < tolerance


CASES = {
    "standing still": (lambda: bc.ekf.dense(prior_precision=PRIOR), EYE, [0 * EYE] * STEPS),
    "a random walk": (
        lambda: bc.ekf.dense(prior_precision=PRIOR, transition_noise=0.3),
        EYE,
        [0.3 * EYE] * STEPS,
    ),
    "a factor": (
        lambda: bc.ekf.dense(prior_precision=PRIOR, transition=0.7, transition_noise=0.3),
        0.7 * EYE,
        [0.3 * EYE] * STEPS,
    ),
    "a matrix and singular noise": (
        lambda: bc.ekf.dense(prior_precision=PRIOR, transition=MOVE, transition_noise=SINGULAR),
        MOVE,
        [SINGULAR] * STEPS,
    ),
    "a schedule": (
        lambda: bc.ekf.dense(prior_precision=PRIOR, transition=MOVE, transition_noise=lambda count: 0.1 * (count + 1)),
        MOVE,
        [0.1 * (t + 1) * EYE for t in range(STEPS)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_smoother_gives_the_joint_gaussians_marginals(name):
    """Means and covariances of every step, the first included, to 1e-10."""
    make, move, noises = CASES[name]
    tx = make()
    agree(tx.smooth(filtered(tx)), joint(move, noises))


def test_noise_that_update_was_given_is_given_to_the_smoother_too():
    noises = [0.1, 0.0, 0.5, 0.2, 0.0, 0.3]
    data = [(*batch, torch.tensor(q)) for batch, q in zip(batches(), noises)]
    tx = bc.ekf.dense(prior_precision=PRIOR)
    history = filtered(tx, data, {"transition_noise": lambda params, batch: batch[2]})
    agree(tx.smooth(history, transition_noise=noises), joint(torch.eye(P), [q * torch.eye(P) for q in noises]))


def test_forgetting_is_smoothed_as_the_noise_that_it_is():
    """Before each move the covariance P grows to P / forgetting: noise of covariance (1 / forgetting - 1) P."""
    tx = bc.ekf.dense(prior_precision=PRIOR, transition=MOVE, forgetting=0.8)
    history = filtered(tx)
    covariances = [torch.linalg.inv(tx.posterior(state, params).precision.to_dense()) for params, state in history]
    noises = [MOVE @ (0.25 * p) @ MOVE.T for p in covariances[:-1]]
    agree(tx.smooth(history), joint(MOVE, noises))


def test_the_diagonal_smoother_agrees_with_the_dense_one_where_data_do_not_mix_parameters():
    data = [(torch.eye(P)[[t % P]], torch.tensor([float(t)])) for t in range(8)]
    noise = {"a": torch.tensor([0.1, 0.0]), "b": torch.tensor([[0.4]])}
    options = {"prior_precision": PRIOR, "transition": 0.9, "transition_noise": noise, "forgetting": 0.95}
    a, b = (tx.smooth(filtered(tx, data)) for tx in (bc.ekf.diagonal(**options), bc.ekf.dense(**options)))
    for x, y in zip(a, b):
        for p, q in ((x.mean, y.mean), (x.marginal_variance, y.marginal_variance)):
            torch.testing.assert_close(flatten(p, start), flatten(q, start), rtol=0, atol=1e-12)


def test_the_last_smoothed_gaussian_is_the_filtered_one():
    tx = bc.ekf.dense(transition_noise=0.1)
    history = filtered(tx)
    last, posterior = tx.smooth(history)[-1], tx.posterior(history[-1][1], history[-1][0])
    draw = unflatten(torch.ones(P), start)
    torch.testing.assert_close(last.log_prob(draw), posterior.log_prob(draw), rtol=1e-10, atol=0)


def test_what_cannot_be_smoothed_is_refused():
    tx = bc.ekf.dense(transition=lambda params: params)
    with pytest.raises(ValueError, match="this one is a function: pass its matrix"):
        tx.smooth(filtered(tx))
    tx = bc.ekf.low_rank(rank=2)
    with pytest.raises(ValueError, match=r"smooth is for bc\.ekf\.dense and bc\.ekf\.diagonal"):
        tx.smooth(filtered(tx))
    tx = bc.ekf.dense()
    history = filtered(tx)
    with pytest.raises(ValueError, match="after every update, and in transition_noise the noise of each"):
        tx.smooth([*history[:2], *history[3:]])
    with pytest.raises(ValueError, match="and 2 noises"):
        tx.smooth(history, transition_noise=[0.1, 0.1])
