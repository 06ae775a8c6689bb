"""Modules as functions: which parameters come out, what they compute, and what goes back."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayesopt_chain as bc
from tests.nets import Net
from tests.walk import descend


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def test_the_function_is_the_module_which_it_leaves_alone_and_buffers_move_as_in_it():
    module, x = network(), torch.randn(6, 2)
    for mode in (True, False):
        module.train(mode)
        forward, params, buffers = bc.make_functional(module)
        before, alone = copy.deepcopy(module.state_dict()), copy.deepcopy(module)
        for _ in range(3):
            want, (out, buffers) = alone(x), forward.with_buffers(params, x, buffers)
            assert torch.equal(out, want) and torch.equal(forward(params, (x, None)), want)
        assert all(torch.equal(buffers[k], b) for k, b in alone.named_buffers())
        assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
        assert buffers["1.num_batches_tracked"] == (3 if mode else 0)


def test_frozen_parameters_stay_in_the_module():
    module = network()
    module[0].requires_grad_(False)
    forward, params, _ = bc.make_functional(module)
    assert sorted(params) == ["1.bias", "1.weight", "3.bias", "3.weight"]
    x = torch.randn(6, 2)
    assert torch.equal(forward(params, x), copy.deepcopy(module)(x))
    with pytest.raises(ValueError, match="nothing to sample"):
        bc.make_functional(module.requires_grad_(False))


def test_a_tied_weight_comes_once_and_acts_twice():
    embed, head, tokens = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), torch.tensor([1, 2])
    head.weight = embed.weight
    module = Net(lambda net, tokens: net.head(net.embed(tokens)), embed=embed, head=head)
    forward, params, _ = bc.make_functional(module)
    assert list(params) == ["embed.weight"]
    w = torch.randn(5, 3)
    assert torch.equal(forward({"embed.weight": w}, tokens), w[tokens] @ w.T)
    bc.write_back(module, {"embed.weight": w})
    assert module.head.weight is module.embed.weight and torch.equal(module(tokens), w[tokens] @ w.T)


@pytest.mark.parametrize("inside", [nn.Linear(2, 2), nn.BatchNorm1d(2)])
def test_a_submodule_of_two_names_keeps_its_own_tensors(inside):
    module, own = Net(lambda net, x: net.b(net.a(x)), a=inside, b=inside), [*inside.parameters(), *inside.buffers()]
    forward, params, buffers = bc.make_functional(module)
    out, _ = forward.with_buffers({name: 2 * p for name, p in params.items()}, torch.eye(2), buffers)
    assert all(a is b for a, b in zip([*inside.parameters(), *inside.buffers()], own, strict=True))
    assert not torch.equal(out, module(torch.eye(2)))


def test_batches_may_be_mappings_or_anything_with_a_function():
    module = Net(lambda net, x, scale=1.0: scale * net.linear(x), linear=nn.Linear(2, 1))
    x = torch.ones(3, 2)
    forward, params, _ = bc.make_functional(module)
    assert torch.equal(forward(params, {"x": x, "scale": 2.0, "labels": None}), 2 * module(x))
    other = bc.make_functional(module, inputs=lambda batch: (batch["features"], 3.0)).forward
    assert torch.equal(other(params, {"features": x}), 3 * module(x))
    pair, several = (torch.randn(3, 2), torch.randn(3, 4)), nn.Bilinear(2, 4, 1)
    forward, params, _ = bc.make_functional(several)
    assert torch.equal(forward(params, [[*pair], None]), several(*pair))  # a DataLoader makes lists of tuples
    forward, params, _ = bc.make_functional(module)
    with pytest.raises(TypeError, match="not list"):  # for which a module with one argument is called as it is
        forward(params, [[x], None])


def test_what_does_not_fit_is_named_and_nothing_is_written():
    module = network()
    forward, params, _ = bc.make_functional(module)
    before = copy.deepcopy(module.state_dict())
    x = torch.randn(6, 2)
    for call, error, words in (
        (
            lambda: forward({k: v for k, v in params.items() if k != "3.bias"}, x),
            ValueError,
            r"params lacks \['3.bias'\]",
        ),
        (
            lambda: bc.write_back(module, {**{k: v + 1 for k, v in params.items()}, "9.weight": torch.ones(1)}),
            ValueError,
            r"'9\.weight', which the module lacks",
        ),
        (
            lambda: bc.write_back(module, {"0.weight": params["0.weight"] + 1, "0.bias": torch.ones(2, 4)}),
            ValueError,
            r"'0.bias'\] has shape \(2, 4\)",
        ),
        (lambda: bc.write_back(module, {**params, "0.bias": 3}), TypeError, "params must be a dictionary of tensors"),
        (lambda: bc.make_functional(lambda x: x), TypeError, r"make_functional: module must be a torch\.nn\.Module"),
        (lambda: forward(params, x.numpy()), TypeError, "must be Tensor, not numpy.ndarray"),
    ):
        with pytest.raises(error, match=words):
            call()
        assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


@pytest.mark.parametrize(
    "call",
    [
        bc.make_functional,
        lambda m: bc.collect(m, None, every=1),
        lambda m: bc.fit_laplace(m, bc.likelihoods.gaussian(), [(torch.ones(2, 3), torch.ones(2, 1))]),
        lambda m: bc.optim.as_step(m, torch.optim.SGD(m.parameters(), lr=0.1), lambda m, b: m(b).sum()),
    ],
)
def test_lazy_layers_are_asked_for_their_weights(call):
    with pytest.raises(
        ValueError, match=r"must be a torch\.nn\.Module \(with lazy layers: once it was called on a batch"
    ):
        call(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))


def test_a_buffer_that_the_module_replaces_comes_back_and_stays_out_of_the_module():
    def counting(net, x):
        net.calls = net.calls + 1
        return net.linear(x) * net.calls

    module, x = Net(counting, linear=nn.Linear(2, 1), calls=nn.Buffer(torch.zeros(()))), torch.ones(3, 2)
    forward, params, buffers = bc.make_functional(module)
    for k in range(1, 4):
        out, buffers = forward.with_buffers(params, x, buffers)
        assert buffers["calls"] == k and torch.equal(out, k * module.linear(x))
    assert module.calls == 0 and torch.equal(forward(params, x), module.linear(x))


def test_the_module_has_its_own_tensors_back_when_it_fails():
    module = network()
    before = dict(module.named_parameters())
    forward, params, _ = bc.make_functional(module)
    with pytest.raises(RuntimeError):
        forward({name: p + 1 for name, p in params.items()}, torch.ones(6, 3))
    assert all(p is before[name] for name, p in module.named_parameters())


def test_threads_that_share_a_module_compute_with_parameters_of_their_own():
    module, w, x = nn.Linear(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    forward = bc.make_functional(module).forward
    module.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda k: float(forward({"weight": w, "bias": torch.full((1,), k)}, x)), [0.0, 1.0, 2.0, 3.0])
        assert [*found] == [0.0, 1.0, 2.0, 3.0]


def test_tensors_by_other_names_are_attributes_or_nothing_as_for_torch():
    module = Net(lambda net, x: net.linear(x) * net.scale, linear=nn.Linear(2, 1), scale=torch.tensor(1.0))
    x = torch.ones(3, 2)
    forward, params, _ = bc.make_functional(module)
    out = forward({**params, "scale": torch.tensor(2.0), "noise": torch.tensor(0.1)}, x)
    assert torch.equal(out, 2 * module(x)) and module.scale == 1 and not hasattr(module, "noise")
    with pytest.raises(TypeError, match=r"not an instance of torch\.Tensor"):
        forward({**params, "linear.bias": 0.0}, x)


@pytest.mark.slow
def test_draws_of_a_compiled_module_are_those_of_the_module_inside(tmp_path):
    """Names, predictions, resumed runs and the temperatures that the doctor finds are the same with and without."""
    saved, x = [], torch.ones(2, 3)
    for wrap in (partial(torch.compile, backend="eager"), lambda module: module):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 1))
        wrapped = wrap(module)
        optimizer = bc.optim.SGHMC(wrapped.named_parameters(), lr=0.1, temperature=0.1)
        keep = bc.collect(wrapped, optimizer, every=1, path=tmp_path)
        if saved:
            optimizer.load_state_dict(saved[0])
            keep.load_state_dict(saved[1])
        for _ in range(20):
            descend(optimizer, wrapped(x).square().sum())
        saved = [optimizer.state_dict(), keep.state_dict()]
        forward, params, _ = bc.make_functional(wrapped)
        assert params.keys() == keep.draws.params.keys() == bc.optim.as_step(wrapped, optimizer, len).params.keys()
        assert torch.equal(forward(keep.draws[-1], x), keep.draws[-1:].predict(module, [x]))
        bc.write_back(wrapped, keep.draws[0])
        assert torch.equal(module[0].weight, keep.draws[0]["0.weight"])
        report = bc.diagnostics.doctor(
            keep.draws,
            tx=optimizer,
            loss=lambda params, batch, forward=forward: forward(params, batch).square().sum(),
            batches=[x],
        )
        assert {f"temperature, {name}" for name in params} <= report.numbers.keys()
    keep.flush()
    assert len(bc.Draws.open(tmp_path)) == 40


def test_whatever_names_the_parameters_of_a_compiled_module_names_those_inside():
    plain = network()
    compiled = torch.compile(plain, backend="eager")
    assert bc.links.fan_in(compiled) == bc.links.fan_in(plain)
    draws = bc.Draws.from_trees([compiled, plain])
    assert draws.params.keys() == bc.make_functional(plain).params.keys()
    assert torch.equal(
        *[bc.refresh_batch_norm(m, draws, [torch.ones(5, 2)]).buffers["1.running_mean"] for m in (compiled, plain)]
    )


@pytest.mark.parametrize(
    "reentrant, why", [(False, "gradient_checkpointing_disable"), (True, "incompatible with .grad")]
)
def test_activation_checkpointing_is_refused_where_something_would_be_computed_again(reentrant, why):
    """It would compute with the parameters of the module, which are those of no chain."""
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
    net = Net(lambda net, x: checkpoint(net.layers[1], net.layers[0](x), use_reentrant=reentrant), layers=layers)
    forward, params, _ = bc.make_functional(net)
    step = bc.make_step(lambda p, x: forward(p, x).square().mean(), bc.sgd(0.1))
    with pytest.raises(RuntimeError, match=why):
        step(params, step.init(params), torch.ones(5, 4))
    with torch.no_grad():
        assert forward(params, torch.ones(5, 4)).shape == (5, 1)
