"""Fresh statistics for every draw, against torch's own recomputation and against the definition."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import bayesopt_chain as bc


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3)]
    return nn.Sequential(*layers).double()


def draws_of(module, n, chains=None):
    _, params, _ = bc.make_functional(module)
    shape = () if chains is None else (chains,)
    g = torch.Generator().manual_seed(1)
    trees = [
        {k: p + torch.randn(*shape, *p.shape, generator=g, dtype=p.dtype) for k, p in params.items()} for _ in range(n)
    ]
    return bc.Draws.from_trees(trees, chains=chains)


def data(sizes):
    return [torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in sizes]


def test_the_statistics_of_every_draw_are_those_torch_recomputes_and_other_buffers_stay():
    module, loader = network(), data([8, 8, 8])
    module.register_buffer("shift", torch.tensor(3.0))
    kept, draws = copy.deepcopy(module.state_dict()), draws_of(module, 3)
    fresh = bc.refresh_batch_norm(module, draws, [{"features": x, "labels": None} for x in loader], inputs="features")
    for i in range(3):
        other = copy.deepcopy(module)
        bc.write_back(other, draws[i])
        for layer in other:
            layer.train(isinstance(layer, nn.BatchNorm1d))
        other[2].p = 0.0  # torch's turns dropout on
        update_bn(loader, other)
        for name, b in other.named_buffers():
            torch.testing.assert_close(fresh.buffers[name][i], b, rtol=1e-12, atol=1e-14)
        assert bc.refresh_batch_norm(module, draws[i], loader).keys() == fresh.buffers.keys()
    assert all(torch.equal(kept[k], v) for k, v in module.state_dict().items())


def test_batches_weigh_by_their_size_and_prediction_uses_each_draws_own():
    module, loader = network().eval(), data([4, 12])
    forward, _, _ = bc.make_functional(module)
    draws = draws_of(module, 4)
    fresh = bc.refresh_batch_norm(module, draws, [loader[0][:0], *loader])
    x = torch.cat(loader) @ draws.params["0.weight"].mT + draws.params["0.bias"][:, None]
    torch.testing.assert_close(fresh.buffers["1.running_mean"], x.mean(1), rtol=1e-12, atol=1e-14)
    variance = (4 * x[:, :4].var(1) + 12 * x[:, 4:].var(1)) / 16
    torch.testing.assert_close(fresh.buffers["1.running_var"], variance, rtol=1e-12, atol=1e-14)
    got = fresh.predict(forward, [loader[0]], reduce="stack", chunk=3)
    for i in range(4):
        bc.write_back(module, fresh[i], {name: b[i] for name, b in fresh.buffers.items()})
        torch.testing.assert_close(got[i], module(loader[0]), rtol=1e-12, atol=1e-14)


def test_stacked_chains_have_statistics_each():
    module, loader = network(), data([6, 6])
    draws = draws_of(module, 3, chains=2)
    fresh = bc.refresh_batch_norm(module, draws, loader)
    assert fresh.chains == 2 and fresh.buffers["1.running_mean"].shape == (3, 2, 4)
    one = bc.refresh_batch_norm(module, {k: p[2, 1] for k, p in draws.params.items()}, loader)
    for name, b in one.items():
        torch.testing.assert_close(fresh.buffers[name][2, 1], b, rtol=1e-12, atol=1e-14)
    forward = bc.make_functional(module.eval()).forward
    assert fresh.predict(forward, loader).shape == (12, 3)
    assert len(fresh[1:].thin(2)) == 1 and fresh[1:].buffers["1.running_mean"].shape[0] == 2
    assert torch.equal(fresh.steps, draws.steps)


def test_what_cannot_be_refreshed_or_predicted_is_refused_by_name():
    module, loader = network(), data([8])
    draws = draws_of(module, 2)
    fresh, linear = bc.refresh_batch_norm(module, draws, loader), {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    for says, act, *args in (
        ("keeps running statistics", bc.refresh_batch_norm, nn.Linear(2, 1), linear, loader),
        ("the loader has no batches", bc.refresh_batch_norm, module, draws, []),
        (r"train mode.*module\.eval\(\)", fresh.predict, bc.make_functional(module).forward, loader),
        ("hold buffers of their own", fresh.predict, lambda params, batch: batch, loader),
    ):
        with pytest.raises(ValueError, match=says):
            act(*args)
    assert fresh.predict(lambda params, batch, buffers: batch + buffers["1.running_mean"][:2], loader).shape == (8, 2)


@pytest.mark.parametrize(
    "batch, words",
    [
        (
            torch.ones(1, 2, dtype=torch.float64),
            r"loader, a batch of 1 \(drop_last=True .*more than 1 value per channel",
        ),
        (torch.ones(3, 2, dtype=torch.int64), "loader.* the model cannot take it"),
        (torch.ones(3, 5, dtype=torch.float64), "loader.* the model cannot take it .*shapes"),
    ],
)
def test_batches_that_the_model_cannot_take_are_refused_by_name(batch, words):
    module = network()
    with pytest.raises(ValueError, match="refresh_batch_norm: " + words):
        bc.refresh_batch_norm(module, draws_of(module, 2), [batch])
