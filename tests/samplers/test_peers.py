"""Paths of another library's samplers, step by step with the same draws."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.random import stream as keyed_stream
from bayesopt_chain.testing import NormalProbe

pytestmark = pytest.mark.peers
posteriors = pytest.importorskip("posteriors")


def log_posterior(params, batch):
    return -(params**2 / 2 + params**4 / 4).sum(), torch.zeros(())


def gradient(theta):
    return theta + theta**3


def test_the_stale_gradient_form_is_posteriors_sghmc():
    eps, alpha, sigma, t = 0.1, 1.5, 1.3, 0.7
    theirs = posteriors.sgmcmc.sghmc.build(
        log_posterior, lr=eps, alpha=alpha, beta=0.6, sigma=sigma, temperature=t, momenta=0.0
    )
    tx = bc.samplers.sghmc_euler(**bc.samplers.sghmc_from_friction(eps, alpha, 0.6, sigma, t))
    theta = torch.tensor([0.5, -1.0], dtype=torch.float64)
    state, other = tx.init(theta), theirs.init(theta)
    xi = torch.randn(10, 2, dtype=torch.float64)
    for row in xi:
        with NormalProbe(row):
            updates, state = tx.update(gradient(theta), state, params=theta, inplace=False)
        theta = theta + updates
        with NormalProbe(-row):
            other, _ = theirs.update(other, None)
        torch.testing.assert_close(theta, other.params, rtol=1e-12, atol=1e-12)


def test_the_lattice_walk_is_posteriors_sglrw(monkeypatch):
    lr, t = 0.05, 0.7
    theirs = posteriors.sgmcmc.sglrw.build(log_posterior, lr=lr, temperature=t)
    tx, theta = bc.samplers.lattice_walk(lr, temperature=t), torch.tensor([0.5, -1.0, 3.0], dtype=torch.float64)
    state, other = tx.init(theta), theirs.init(theta)
    for _ in range(20):
        u = torch.rand(3, dtype=torch.float64)
        monkeypatch.setattr(keyed_stream, "draw_elements", lambda *args, u=u: [u])
        monkeypatch.setattr(torch, "rand_like", lambda p, u=u: u)
        updates, state = tx.update(gradient(theta), state, params=theta, inplace=False)
        theta = theta + updates
        other, _ = theirs.update(other, None)
        torch.testing.assert_close(theta, other.params, rtol=1e-12, atol=1e-12)
