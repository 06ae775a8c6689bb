"""Many chains at once are the chains one by one."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc


def loss(params, batch):
    return ((batch @ params["w"] + params["b"]) ** 2).mean() + torch.sin(params["w"]).sum()


def stacked(n):
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(n, 3, generator=g, dtype=torch.float64),
        "b": torch.randn(n, generator=g, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    "tx",
    [
        bc.sgd(0.1, 0.9),
        bc.sghmc(0.1, temperature=0.1),
        bc.sghmc(lambda c: 0.1 / (1 + c), temperature=0.1),
        bc.adam(0.1, temperature=0.1),
    ],
)
@pytest.mark.parametrize("per_chain", [False, True])
def test_chains_move_as_each_does_alone(tx, per_chain):
    n, params = 4, stacked(4)
    data = torch.randn(n, 5, 3, dtype=torch.float64)
    step = bc.make_step(loss, tx)
    chains = bc.parallel(step, n, batch_dim=0 if per_chain else None)
    state = chains.init(tx, params)
    singles = [({k: p[i] for k, p in params.items()}, one(state, i)) for i in range(n)]
    for _ in range(4):
        params, state, info = chains(params, state, data if per_chain else data[0])
        for i in range(n):
            singles[i] = step(*singles[i][:2], data[i] if per_chain else data[0])
    for i in range(n):
        torch.testing.assert_close(params["w"][i], singles[i][0]["w"], rtol=1e-10, atol=1e-12)
    assert info.loss.shape == (n,)


def one(state, i):
    import optree

    return optree.tree_map(lambda t: t[i], state)


def test_every_chain_has_noise_of_its_own():
    tx = bc.sghmc(0.1, temperature=1.0)
    chains = bc.parallel(bc.make_step(lambda p, b: (p**2).sum(), tx), 3)
    params = torch.zeros(3, 4)
    params, _, _ = chains(params, chains.init(tx, params), ())
    assert len({tuple(row.tolist()) for row in params}) == 3


def test_an_ensemble_of_networks_trains():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
    params = bc.stack([dict(m.named_parameters()) for m in models])

    def module_loss(params, batch):
        return torch.func.functional_call(models[0], params, (batch,)).square().mean()

    tx = bc.sgd(0.1, 0.9)
    chains = bc.parallel(bc.make_step(module_loss, tx), 3)
    state, x = chains.init(tx, params), torch.randn(16, 2)
    _, _, first = chains(params, state, x)
    for _ in range(30):
        params, state, info = chains(params, state, x)
    assert (info.loss < first.loss).all()


def test_wrong_stacks_are_refused():
    tx = bc.sgd(0.1)
    step = bc.make_step(lambda p, b: p.sum(), tx)
    with pytest.raises(ValueError, match="n must be"):
        bc.parallel(step, 0)
    with pytest.raises(ValueError, match="stacked for 3 chains"):
        bc.parallel(step, 3)(torch.zeros(2, 4), (), ())
