"""Temperature zero is TorchOpt, to the last bit: functions, classes, wrappers; every setting, tree and dtype."""

import copy
import inspect

import optree
import pytest
import torch
import torchopt
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.testing import NormalProbe, assert_bitwise_equal, assert_zero_temperature_limit
from tests import strategies as own
from tests.registry.links import COMPARED
from tests.walk import descend, walk


def ours(row):
    return getattr(bc, row.function)


def theirs(row):
    return getattr(torchopt, row.function)


def trajectory(tx, params, draws, inplace):
    """Parameters after every step along given gradients, with TorchOpt's own apply_updates."""
    params, grads = optree.tree_map(torch.clone, params), iter(optree.tree_map(torch.clone, draws))
    path = walk(tx, params, lambda params: next(grads), len(draws), inplace=inplace)
    return [optree.tree_map(torch.clone, now) for now, _ in path]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("row", COMPARED, ids=str)
@given(data=st.data())
def test_functions_equal_torchopts_bitwise(row, data):
    settings = data.draw(row.settings)
    dtype = data.draw(own.dtypes)
    params = data.draw(own.trees(dtype))
    draws = [data.draw(own.gradients(params)) for _ in range(data.draw(st.integers(1, 5)))]
    inplace = data.draw(st.booleans())
    want = trajectory(theirs(row)(**settings), params, draws, inplace)
    before = torch.random.get_rng_state()
    got = trajectory(ours(row)(**settings, temperature=0.0), params, draws, inplace)
    assert_bitwise_equal(got, want, f"{row.name}({settings})")
    assert torch.equal(before, torch.random.get_rng_state()), "a random number was drawn"


@pytest.mark.parametrize("row", [r for r in COMPARED if r.function != "adadelta"], ids=str)
@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(torch.tensor(0.0), id="tensor"),
        pytest.param(lambda count: 0.0 * count, id="schedule", marks=pytest.mark.slow),
    ],
)
@given(data=st.data())
def test_a_tensor_or_schedule_that_is_zero_gives_the_same_values(row, zero, data):
    settings = data.draw(row.settings)
    params = data.draw(own.trees(torch.float64, none=False))
    draws = [data.draw(own.gradients(params)) for _ in range(3)]
    inplace = data.draw(st.booleans())
    try:
        got = trajectory(ours(row)(**settings, temperature=zero), params, draws, inplace)
    except ValueError as err:
        refused = settings.get("nesterov") and settings.get("momentum", 0) > 0.99
        assert "no noise can be matched" in str(err) and refused, str(err)
        return
    want = trajectory(theirs(row)(**settings), params, draws, inplace)
    torch.testing.assert_close(optree.tree_leaves(got), optree.tree_leaves(want), rtol=0, atol=0, equal_nan=True)


def test_the_limit_check_finds_a_sampler_with_the_wrong_limit():
    with pytest.raises(AssertionError, match="bits differ"):
        assert_zero_temperature_limit(lambda t: bc.sgd(0.1, temperature=t), lambda: torchopt.sgd(0.1000001))
    with pytest.raises(AssertionError, match="not T"):  # noise proportional to T instead of its root
        assert_zero_temperature_limit(
            lambda t: bc.sgd(0.1, temperature=t * t if isinstance(t, float) else t), lambda: torchopt.sgd(0.1)
        )


def test_no_normal_is_drawn_at_a_static_zero():
    tx, params = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(0), bc.scale_by_neg_lr(0.1)), [torch.ones(3)]
    with NormalProbe() as probe:
        tx.update([torch.ones(3)], tx.init(params), params=params)
    assert probe.drawn == 0


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


BATCHES = [torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(4)]

CLASS_SETTINGS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.2},
    "Adam": {"weight_decay": 0.01},
    "AdamW": {},
    "AdaMax": {},
    "RAdam": {},
    "AdaGrad": {"lr_decay": 0.1},
    "RMSProp": {"momentum": 0.5, "centered": True},
    "AdaDelta": {},
}


@pytest.mark.parametrize("name", CLASS_SETTINGS)
def test_classes_equal_torchopts_bitwise(name):
    def train(library):
        model = network()
        optimizer = getattr(library, name)(model.parameters(), **{"lr": 0.05, **CLASS_SETTINGS[name]})
        for batch in BATCHES:
            descend(optimizer, model(batch).square().mean())
        return list(model.parameters())

    assert_bitwise_equal(train(bc), train(torchopt), name)


@pytest.mark.parametrize("name", CLASS_SETTINGS)
def test_meta_classes_equal_torchopts_bitwise_and_so_do_their_meta_gradients(name):
    def meta(library):
        model = network()
        start = list(model.parameters())
        settings = {k: v for k, v in CLASS_SETTINGS[name].items() if k != "dampening"}
        optimizer = getattr(getattr(library, "meta", library), f"Meta{name}")(model, **{"lr": 0.05, **settings})
        for batch in BATCHES:
            optimizer.step(model(batch).square().mean())
        outer = model(BATCHES[0]).square().mean()
        return [outer.detach(), *torch.autograd.grad(outer, start)]

    got, want = meta(bc), meta(torchopt)
    assert_bitwise_equal(got[0], want[0], "outer loss")
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("row", COMPARED, ids=str)
def test_func_optimizer_equals_torchopts_bitwise(row):
    def train(tx):
        optimizer = torchopt.FuncOptimizer(tx)
        params = (torch.ones(3, dtype=torch.float64, requires_grad=True),)
        for k in range(4):
            loss = ((params[0] - k) ** 2).sum() + params[0].prod()
            params = optimizer.step(loss, params)
        return params

    assert_bitwise_equal(train(ours(row)(lr=0.1)), train(theirs(row)(lr=0.1)))


def test_links_work_inside_torchopts_chain_and_wrappers():
    tx = torchopt.chain(torchopt.clip_grad_norm(1.0), bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))
    want = torchopt.chain(torchopt.clip_grad_norm(1.0), torchopt.sgd(0.1, momentum=0.9))
    params = [torch.ones(3)]
    draws = [[torch.full((3,), float(k))] for k in range(1, 4)]
    assert_bitwise_equal(trajectory(tx, params, draws, False), trajectory(want, params, draws, False))
    inner = torchopt.transform.masked(bc.sgd(0.1), {"a": True, "b": False})
    updates, _ = inner.update(
        {"a": torch.ones(1), "b": torch.ones(1)}, inner.init({"a": torch.ones(1), "b": torch.ones(1)})
    )
    assert updates["a"].item() == pytest.approx(-0.1) and updates["b"].item() == 1.0


MASK = {"w": True, "b": False}


def test_torchopts_links_work_inside_our_chain():
    params = {"w": torch.ones(3), "b": torch.ones(2)}
    draws = [{"w": torch.full((3,), float(k)), "b": torch.tensor([float("nan"), 1.0])} for k in range(1, 4)]
    for build in (
        lambda sgd: (torchopt.nan_to_num(0.5), torchopt.clip_grad_norm(1.0), sgd(0.1, momentum=0.9)),
        lambda sgd: (torchopt.nan_to_num(0.5), torchopt.transform.masked(sgd(0.1), MASK)),
        lambda sgd: (torchopt.nan_to_num(0.5), torchopt.transform.masked(torchopt.clip_grad_norm(0.1), MASK), sgd(0.1)),
    ):  # fmt: skip
        want = torchopt.chain(*build(torchopt.sgd))
        for sgd in (bc.sgd, torchopt.sgd):
            ours = bc.chain(*build(sgd))
            assert_bitwise_equal(trajectory(ours, params, draws, False), trajectory(want, params, draws, False))


@pytest.mark.parametrize("inplace", [False, True])
def test_torchopts_optimizers_keep_their_bits_inside_our_chain(inplace):
    params = {"w": torch.randn(3), "b": torch.randn(2)}
    draws = [optree.tree_map(lambda p: torch.randn_like(p), params) for _ in range(3)]
    for row in COMPARED:
        got = trajectory(bc.chain(theirs(row)(lr=0.1)), params, draws, inplace)
        want = trajectory(theirs(row)(lr=0.1), params, draws, inplace)
        assert_bitwise_equal(got, want, row.name)


def test_copies_of_a_class_train_on():
    model = network()
    optimizer = bc.SGD(model.parameters(), lr=0.1, momentum=0.9, temperature=1e-3)

    def step(model, optimizer, batch):
        descend(optimizer, model(batch).square().mean())

    step(model, optimizer, BATCHES[0])
    twin, states = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, BATCHES[1])
    other = bc.SGD(twin.parameters(), lr=0.1, momentum=0.9, temperature=1e-3)
    other.load_state_dict(states)
    step(twin, other, BATCHES[1])
    assert_bitwise_equal(list(twin.parameters()), list(model.parameters()), "resumed from state_dict")


# Every function and class of TorchOpt is here, with its signature, and then a temperature


FUNCTIONS = list(torchopt.alias.__all__)
CLASSES = [
    name
    for name in torchopt.__all__
    if inspect.isclass(getattr(torchopt, name))
    and issubclass(getattr(torchopt, name), (torchopt.Optimizer, torchopt.MetaOptimizer))
    and getattr(torchopt, name) not in (torchopt.Optimizer, torchopt.MetaOptimizer)
]


def test_the_lists_are_complete():
    assert len(FUNCTIONS) == 8 and len(CLASSES) == 24


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_signatures_are_torchopts_and_then_a_temperature(name):
    theirs = inspect.signature(getattr(torchopt, name)).parameters.values()
    ours = list(inspect.signature(getattr(bc, name, None) or getattr(bc.meta, name)).parameters.values())
    same = [[(p.name, p.kind, p.default) for p in parameters] for parameters in (ours[: len(theirs)], theirs)]
    assert same[0] == same[1]
    temperature, *rest = ours[len(theirs) :]
    assert temperature.name == "temperature" and temperature.kind is inspect.Parameter.KEYWORD_ONLY
    if name in FUNCTIONS:
        assert temperature.default == 0.0 and [p.name for p in rest] in ([], ["freeze_after"])


@pytest.mark.parametrize(
    "alias, name", [("Adagrad", "AdaGrad"), ("Adamax", "AdaMax"), ("RMSprop", "RMSProp"), ("Adadelta", "AdaDelta")]
)
def test_aliases_are_the_same_class(alias, name):
    for prefix in ("", "Meta"):
        assert getattr(bc.meta, prefix + alias) is (getattr(bc.meta if prefix else bc, prefix + name))
        assert getattr(torchopt, prefix + alias) is getattr(torchopt, prefix + name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_torchopt_refuses_we_refuse(name):
    for bad in ({"lr": -1.0}, {"lr": 0.1, "weight_decay": -1.0}, {"lr": 0.1, "eps": -1.0}):
        if "eps" in bad and name == "sgd":
            continue
        for library in (torchopt, bc):
            with pytest.raises(ValueError):
                getattr(library, name)(**bad)


# Where TorchOpt 0.7.3 is wrong and we are right; each test shows both


def both(ours, theirs):
    return pytest.mark.parametrize("library, wanted", [(bc, ours), (torchopt, theirs)], ids=["ours", "theirs"])


@both((-1.0, -1.0), (-1.0, -0.5))
def test_a_second_parameter_group_is_dampened_like_the_first(library, wanted):
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = library.SGD([a], lr=1.0, momentum=0.5, dampening=0.5)
    optimizer.add_param_group([b])
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    assert (a.item(), b.item()) == wanted


@pytest.mark.parametrize("mask", [MASK, lambda tree: MASK], ids=["tree", "function"])
@both((-0.05, 0.0), (-0.05, -0.05))
def test_adamws_mask_is_honoured(library, wanted, mask):
    params = {"w": torch.ones(1), "b": torch.ones(1)}
    tx = library.adamw(0.1, weight_decay=0.5, mask=mask)
    updates, _ = tx.update(optree.tree_map(torch.zeros_like, params), tx.init(params), params=params, inplace=False)
    assert (updates["w"].item(), updates["b"].item()) == pytest.approx(wanted)


@both(-0.5, -1.0)
def test_a_tensor_lr_is_read_at_every_update(library, wanted):
    lr = torch.tensor(1.0)
    tx = library.sgd(lr)
    state = tx.init([torch.zeros(1)])
    lr.fill_(0.5)
    assert tx.update([torch.ones(1)], state, inplace=False)[0][0].item() == wanted
