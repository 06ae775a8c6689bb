"""Every way of making a step goes the way of ``update`` along a falling rate, which tests/core shows to be exact.

One update is a linear map of parameters, state and draws. In float64, from a start and with draws that are random, equal steps
mean equal maps, so that what ``variance_along`` says of ``update`` holds of all of them.
"""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import replays

CURVATURE = {
    "w": torch.tensor([0.2, 1.0, 7.0], dtype=torch.float64),
    "b": torch.tensor([[3.0, 0.5]], dtype=torch.float64),
}
STEPS = 12
CHAINS = {
    "SGD": lambda lr: bc.sgld(lr, temperature=0.7),
    "heavy ball": lambda lr: bc.sghmc(lr, 0.9, temperature=0.7),
    "Nesterov": lambda lr: bc.sgd(lr, 0.9, nesterov=True, temperature=0.7),
}


def chain(name, lr=0.1):
    """At a rate that falls by steps of 1 to 0.01, and smoothly in between, and stops for a step."""

    def schedule(count):
        count = torch.as_tensor(count)
        fall = torch.where(count < 3, 1.0, torch.where(count < 7, 0.1, 0.01))
        return lr * 0.9 ** count.double() * torch.where(count == 5, 0.0, fall)

    return CHAINS[name](schedule)


def loss(params, batch):
    return sum((CURVATURE[name] * x * x).sum() / 2 for name, x in params.items())


def start(seed):
    torch.manual_seed(seed)
    return {name: torch.randn_like(k) for name, k in CURVATURE.items()}


def by_update(tx, params, state):
    """The parameters after each step by ``update``."""
    path = []
    for _ in range(STEPS):
        gradient = {name: CURVATURE[name] * x for name, x in params.items()}
        updates, state = tx.update(gradient, state, params=params, inplace=False)
        params = {name: params[name] + u for name, u in updates.items()}
        path.append(params)
    return path


def by_step(step, params, state):
    """The same by a step."""
    path = []
    for _ in range(STEPS):
        params, state, _ = step(params, state, None)
        path.append({name: x.clone() for name, x in params.items()})
    return path


def assert_same(mine, want):
    for x, y in zip(mine, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_steps_of_make_step_are_those_of_update(name, inplace):
    tx, params = chain(name), start(0)
    state = tx.init(params)
    want = by_update(tx, params, state)
    assert_same(by_step(bc.make_step(loss, tx, inplace=inplace), params, state), want)


INDUCTOR = [pytest.mark.slow, pytest.mark.skipif(not replays.compiler_found(), reason="needs a C++ compiler")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "name, backend",
    [
        *((name, "eager") for name in CHAINS),
        pytest.param("Nesterov", "inductor", marks=INDUCTOR),
    ],  # both kinds of branch
)
def test_captured_steps_are_those_of_update(name, backend):
    tx, params = chain(name), start(0)
    state = tx.init(params)
    want = by_update(tx, params, state)
    fast = bc.capture(bc.make_step(loss, tx), params, state, None, backend=backend)
    assert_same(by_step(fast, params, state), want)


@pytest.mark.parametrize("name", CHAINS)
def test_parallel_chains_with_rates_of_their_own_are_those_of_update(name):
    rates = torch.tensor([0.02, 0.05, 0.1], dtype=torch.float64)
    chains = bc.parallel(lambda lr: bc.make_step(loss, chain(name, lr)), 3, each={"lr": rates})
    starts = [start(seed) for seed in range(3)]
    params = {key: torch.stack([p[key] for p in starts]) for key in CURVATURE}
    state = chains.init(lambda lr: chain(name, lr), params)
    mine = by_step(chains, params, state)
    for i, (lr, own) in enumerate(zip(rates, bc.unstack(state), strict=True)):
        want = by_update(chain(name, lr), starts[i], own)
        assert_same([{key: x[i] for key, x in p.items()} for p in mine], want)
