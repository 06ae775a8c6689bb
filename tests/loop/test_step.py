"""``make_step``: one pure function of parameters, state and batch."""

import copy
import pickle

import optree
import pytest
import torch
import torchopt
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal


def loss(params, batch):
    x, y = batch
    return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def setup():
    g = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 3, generator=g), torch.randn(8, generator=g)
    return {"w": torch.randn(3, generator=g), "b": torch.zeros(())}, batch


def side_by_side(function, tx, params, batch=None, steps=3, **tolerance):
    """Steps in place move as pure ones do; what they return."""
    other = params, tx.init(params)
    mine = copy.deepcopy(other)
    for _ in range(steps):
        *mine, _ = bc.make_step(function, tx, inplace=True)(*mine, batch)
        *other, _ = bc.make_step(function, tx)(*other, batch)
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(other), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_a_step_is_gradient_update_and_apply():
    params, batch = setup()
    tx = bc.sghmc(0.1, temperature=0.1)
    state = tx.init(params)
    new, _, info = bc.make_step(loss, tx)(params, state, batch)
    wanted = {k: p.clone().requires_grad_() for k, p in params.items()}
    value = loss(wanted, batch)
    grads = dict(zip(wanted, torch.autograd.grad(value, list(wanted.values()))))
    updates, _ = tx.update(grads, state, params=params, inplace=False)
    assert_bitwise_equal(new, torchopt.apply_updates(params, updates, inplace=False))
    assert info.loss == value.detach() and info.aux == ()


def test_it_is_pure_detached_and_repeatable():
    params, batch = setup()
    params["w"].requires_grad_()
    tx = bc.sghmc(0.1, temperature=0.1)
    step, state = bc.make_step(loss, tx), tx.init(params)
    before = copy.deepcopy((params, state))
    first = step(params, state, batch)
    assert_bitwise_equal((params, state), before)
    assert_bitwise_equal(step(params, state, batch), first)
    for leaf in (*first[0].values(), first[2].loss):
        assert not leaf.requires_grad and leaf.grad_fn is None


def test_in_place_writes_into_the_tensors_it_was_given():
    params, batch = setup()
    tx = bc.sghmc(0.1, temperature=0.1)
    state = tx.init(params)
    side_by_side(loss, tx, params, batch, rtol=1e-6, atol=1e-7)  # the fused pass rounds a product and sum once
    out, out_state, _ = bc.make_step(loss, tx, inplace=True)(params, state, batch)
    assert out["w"] is params["w"] and out_state[0].trace[0] is state[0].trace[0]


@pytest.mark.parametrize(
    "tx",
    [
        bc.sgd(0.1, 0.9, weight_decay=0.1),
        bc.sghmc(0.1, temperature=0.1),
        bc.rmsprop(0.1, temperature=0.1),
        bc.chain(bc.links.scale(2.0), bc.sgd(0.1)),
        torchopt.sgd(0.1, 0.9),
    ],
    ids=["sgd", "sghmc", "rmsprop", "scale", "torchopt"],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda p, b: (p[0] + p[1]).square().sum(),
        lambda p, b: p[0].sum() + (p[1] + p[0]).sum(),
        lambda p, b: (torch.cat([p[0][:1], p[1], p[0][1:]]).repeat(2)[:4] + p[1] - 1).square().sum(),
    ],
)
def test_in_place_gradients_that_share_memory_move_as_if_they_did_not(tx, function):
    """Autograd hands out one tensor for both terms of a sum, an expanded scalar for a plain sum, views of a whole."""
    side_by_side(function, tx, [torch.arange(1.0, 5.0), torch.arange(4.0) * 2], rtol=1e-5, atol=1e-6)


def test_parameters_the_loss_ignores_have_gradient_zero_and_diffuse():
    params = {"used": torch.ones(2), "idle": torch.ones(2)}
    tx = bc.sgd(0.1, weight_decay=1.0)
    new, _, _ = bc.make_step(lambda p, b: p["used"].sum(), tx)(params, tx.init(params), None)
    torch.testing.assert_close(new["idle"], torch.full((2,), 0.9))


CHANGES = {
    "eval": lambda module, params, state: module.eval(),
    "another layer": lambda module, params, state: module.__setitem__(3, nn.Linear(4, 1)),
    "no layer": lambda module, params, state: module.__setitem__(1, nn.Identity()),
    "a hook": lambda module, params, state: module[0].register_forward_hook(lambda m, a, out: 2 * out),
    "a leaf": lambda module, params, state: params.update({"0.weight": params["0.weight"] + 1}),
    "its order": lambda module, params, state: params.update({"0.weight": params.pop("0.weight")}),
    "its memory": lambda module, params, state: setattr(params["0.weight"], "data", params["0.weight"] + 1),
    "its gradient": lambda module, params, state: params["0.weight"].requires_grad_(),
    "the state": lambda module, params, state: setattr(state[0].trace[1], "data", state[0].trace[1] + 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("tx", [bc.sghmc(0.1, temperature=0.1), bc.sgd(0.1, 0.9)], ids=["fused", "torch's kernel"])
def test_what_changes_between_two_steps_counts_from_the_next(tx, change):
    """Against pure steps through torch's own functional_call, which keep nothing between calls."""
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 1)), torch.randn(16, 3)
    forward, params, _ = bc.make_functional(module)
    mine = params, tx.init(params)
    other_module, *other = copy.deepcopy((module, *mine))
    fast = bc.make_step(lambda p, x: forward(p, x).square().mean(), tx, inplace=True)
    pure = bc.make_step(lambda p, x: torch.func.functional_call(other_module, p, (x,)).square().mean(), tx)
    for k in range(4):
        if k == 2:
            for arguments in ((module, *mine), (other_module, *other)):
                torch.manual_seed(1)
                change(*arguments)
        torch.manual_seed(k)  # without noise the state has no key for the dropout
        *mine, info = fast(*mine, x)
        torch.manual_seed(k)
        *other, want = pure(*other, x)
        torch.testing.assert_close(info.loss, want.loss)
    assert mine[0].keys() == other[0].keys()
    for name, p in mine[0].items():
        torch.testing.assert_close(p.detach(), other[0][name], rtol=1e-5, atol=1e-6)


def test_parameters_and_state_that_become_double_are_refused_before_anything_moves():
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.linspace(-1, 1, 5)}
    step, state = bc.make_step(lambda p, b: p["w"].square().sum(), tx, inplace=True), tx.init(params)
    params, state, _ = step(params, state, None)
    for t in optree.tree_leaves((params, state)):
        t.data = t.data.double() if t.is_floating_point() else t.data
    before = params["w"].clone()
    with pytest.raises(ValueError, match=r"float64.*but the state has .*float32.*convert one"):
        step(params, state, None)
    assert torch.equal(params["w"], before)


def test_a_loss_that_is_its_parameter_has_gradient_one_at_every_step():
    """Autograd hands out the tensor it started from."""
    tx, params = bc.chain(bc.links.scale(3.0), bc.sgd(0.5)), torch.tensor(1.0)
    step, state = bc.make_step(lambda p, b: p, tx, inplace=True), tx.init(params)
    for k in range(3):
        params, state, _ = step(params, state, None)
        assert params == 1 - 1.5 * (k + 1)


def test_a_complex_loss_is_refused():
    step = bc.make_step(lambda p, b: (p * (1 + 1j)).sum(), bc.sgd(0.1))
    with pytest.raises(ValueError, match=r"must return a real scalar tensor .*complex64"):
        step(torch.ones(2), bc.sgd(0.1).init(torch.ones(2)), None)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"autocast": torch.bfloat16}, {"inplace": True}])
def test_a_step_survives_pickling(options):
    params, batch = setup()
    tx = bc.skip_nonfinite(bc.sghmc(0.1, temperature=0.1))
    step = bc.make_step(loss, tx, **options)
    again, state = pickle.loads(pickle.dumps(step)), tx.init(params)
    mine, theirs = (f(copy.deepcopy(params), copy.deepcopy(state), batch)[:2] for f in (step, again))
    for a, b in zip(optree.tree_leaves(mine), optree.tree_leaves(theirs)):
        assert_bitwise_equal(a, b)
