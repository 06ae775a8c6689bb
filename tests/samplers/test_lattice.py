"""The lattice walk: moments of a step, its law by detailed balance, its order, steep losses."""

import numpy as np
import torch

import bayesopt_chain as bc
from bayesopt_chain.random import stream as keyed_stream
from tests.samplers.transfer import QUARTIC, target_moment
from tests.walk import end_of

LR, T = 0.03, 0.8


def up_probability(tx, x: torch.Tensor, monkeypatch) -> torch.Tensor:
    """The share of 2,000 equally spaced uniforms for which the code steps up by one site: its probability, to 1/4000."""
    n = 2000
    u = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).repeat(len(x), 1)
    monkeypatch.setattr(keyed_stream, "draw_elements", lambda *args: [u.reshape(-1)])
    theta = x[:, None].expand(-1, n).clone()
    updates, _ = tx.update(QUARTIC.gradient(theta), tx.init(theta), params=theta, inplace=False)
    assert torch.allclose(updates.abs(), torch.tensor((2 * T * LR) ** 0.5, dtype=torch.float64), rtol=1e-12)
    return (updates > 0).double().mean(1)


def test_the_coin_is_tilted_by_the_gradient(monkeypatch):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    p = up_probability(bc.samplers.lattice_walk(LR, temperature=T), x, monkeypatch)
    want = (0.5 * (1 - (LR / (2 * T)) ** 0.5 * QUARTIC.gradient(x))).clamp(0, 1)
    assert (p - want).abs().max() < 1 / 3000


def lattice_moment(lr: float, temperature: float = 1.0) -> float:
    """``E x^2`` under the walk's law on the lattice through 0, by detailed balance.

    The law lives on even and odd sites in turn; over both it is the stationary law.
    """
    delta = (2 * temperature * lr) ** 0.5
    n = int(np.ceil(4.0 / delta))
    x = delta * np.arange(-n, n + 1)
    up = np.clip(0.5 * (1 - (lr / (2 * temperature)) ** 0.5 * (x + x**3)), 0, 1)
    with np.errstate(divide="ignore"):
        steps = np.log(up[:-1]) - np.log(1 - up[1:])
    middle = n
    log = np.zeros(2 * n + 1)
    log[middle + 1 :] = np.cumsum(steps[middle:])
    log[:middle] = -np.cumsum(steps[:middle][::-1])[::-1]
    law = np.exp(log - log.max())
    return float((law * x**2).sum() / law.sum())


def test_the_bias_is_of_first_order():
    """Fitted on the law that detailed balance gives."""
    want, steps = target_moment(QUARTIC, 1.0), np.array([0.001, 0.002, 0.004])
    biases = np.array([lattice_moment(lr) - want for lr in steps])
    slope = np.polyfit(np.log(steps), np.log(np.abs(biases)), 1)[0]
    assert abs(slope - 1) < 0.1, (slope, biases)


def test_a_steep_loss_cannot_throw_the_walk_away():
    x = torch.full((3,), 50.0)
    walk, sgld = bc.samplers.lattice_walk(0.02, temperature=1.0), bc.sgld(0.02, temperature=1.0)
    held, lost = (end_of(tx, x, lambda x: x**3, 400)[0] for tx in (walk, sgld))
    assert (held.abs() < 5).all() and not torch.isfinite(lost).all()
