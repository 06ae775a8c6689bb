"""Narrow parameters with master weights: the float32 chain whose gradients are taken at the rounded parameters, bit for bit."""

import pickle

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from tests.refusals import refused

CHAINS = {
    "sgd": lambda: bc.sgd(1e-3, 0.9, weight_decay=0.1),
    "sghmc": lambda: bc.sghmc(1e-3, 0.9, temperature=1e-4),
    "schedule": lambda: bc.sghmc(lambda count: 1e-3 / (1 + count), 0.9, temperature=1e-4),
    "adamw": lambda: bc.adamw(1e-3, temperature=1e-4),
    "psgld": lambda: bc.samplers.psgld(1e-3, temperature=1e-4),
    "torchopt's adam": lambda: torchopt.adam(1e-3),
}


def start(dtype=torch.bfloat16):
    leaf = torch.randn(40, generator=torch.Generator().manual_seed(0))
    leaf = leaf + leaf.sign() / 2  # no step takes one of them across zero
    return {"w": leaf.to(dtype), "wide": leaf[:7].clone(), "b": torch.tensor(0.3, dtype=dtype)}


def loss(params, batch):
    return sum(((p.float() - batch) ** 2).sum() for p in params.values())


def rounded(params, dtype):
    return {name: p if name == "wide" else p.to(dtype) for name, p in params.items()}


@pytest.mark.sweep(12)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", CHAINS)
def test_master_weights_are_those_of_the_float32_chain(name, inplace, dtype):
    tx = CHAINS[name]()
    masters = {name: p.float() for name, p in start(dtype).items()}
    torch.manual_seed(1)
    want_state = tx.init(masters)
    wrapped, params = bc.with_master_weights(tx), start(dtype)
    torch.manual_seed(1)
    state = wrapped.init(params)
    step = bc.make_step(loss, wrapped, inplace=inplace)
    for k in range(20):
        batch = torch.tensor(0.1 * k)
        at = {name: p.detach().requires_grad_() for name, p in rounded(masters, dtype).items()}
        grads = dict(zip(at, torch.autograd.grad(loss(at, batch), list(at.values()))))
        grads = {name: g.float() for name, g in grads.items()}
        updates, want_state = tx.update(grads, want_state, params=masters, inplace=False)
        masters = {name: p + updates[name] for name, p in masters.items()}
        params, state, _ = step(params, state, batch)
        assert {name: p.dtype for name, p in params.items()} == {"w": dtype, "wide": torch.float32, "b": dtype}
        assert_bitwise_equal(params, rounded(masters, dtype))
        assert_bitwise_equal(wrapped.masters(state, params), masters)
    assert_bitwise_equal(state.inner, want_state)


def test_across_zero_they_are_exact_to_the_rounding_of_float32():
    """Steps larger than the parameters, whose sign they change: the update of a narrow leaf is rounded itself."""
    tx, params = bc.sgd(0.5), torch.randn(5000).to(torch.bfloat16)
    wrapped = bc.with_master_weights(tx)
    state, masters = wrapped.init(params), params.float()
    for _ in range(20):
        g = torch.randn(5000).to(torch.bfloat16)
        updates, state = wrapped.update(g, state, params=params, inplace=False)
        size = params.float().abs()
        params, masters = params + updates, masters - 0.5 * g.float()
        assert (wrapped.masters(state, params) - masters).abs().max() < 1e-6
        # three roundings: of the master weight, of the update from one side of zero to the other, and of their sum
        assert ((params.float() - masters).abs() <= 2**-8 * (size + 3 * masters.abs())).all()


def test_a_parameter_changed_from_outside_is_where_the_chain_goes_on_and_without_one_there_is_no_update():
    tx, params = bc.with_master_weights(bc.sgd(1e-3)), torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="params=params"):
        tx.update(torch.ones_like(params), tx.init(params))
    _, state = tx.update(torch.ones_like(params), tx.init(params), params=params)
    assert (tx.masters(state, torch.full_like(params, 8.0)) - 8.0).abs().max() <= 2e-3


def test_it_goes_through_captures_stacks_pickles_and_skipped_steps():
    tx = bc.with_master_weights(bc.sghmc(1e-3, 0.9, temperature=1e-4))
    step, params, batch = bc.make_step(loss, tx), start(), torch.tensor(0.5)
    state = step.init(params)
    fast = bc.capture(step, params, state, batch, backend="eager")
    assert_bitwise_equal(fast(params, state, batch)[:2], step(params, state, batch)[:2])

    chains = bc.parallel(step, 3)
    many = bc.stack([params] * 3)
    states = chains.init(tx, many)
    moved, states, _ = chains(many, states, batch)
    assert moved["w"].dtype == torch.bfloat16 and [r.shape for r in states.residue] == [(3,), (3, 40)]
    assert len({tuple(row.tolist()) for row in tx.masters(states, moved)["w"]}) == 3

    assert pickle.loads(pickle.dumps(tx)) == tx and hash(tx) == hash(bc.with_master_weights(tx.transformation))
    assert tx != bc.skip_nonfinite(tx.transformation) and repr(tx).startswith("with_master_weights(")

    skipping = bc.make_step(loss, bc.skip_nonfinite(tx))
    guarded = skipping.init(params)
    still, guarded, _ = skipping(params, guarded, torch.tensor(torch.nan))
    assert_bitwise_equal(still, params)
    assert guarded.skipped == 1


def test_a_state_of_a_chain_without_them_starts_it():
    params = start()
    plain = bc.sgd(1e-3, 0.9)
    _, old = plain.update(optree.tree_map(torch.ones_like, params), plain.init(params), params=params)
    wide = optree.tree_map(torch.Tensor.float, params)
    _, inner = plain.update(optree.tree_map(torch.ones_like, wide), plain.init(wide), params=wide)
    tx = bc.with_master_weights(plain)
    assert_bitwise_equal(tx.init(params, like=tx.init(params)._replace(inner=inner)).inner, inner)
    with pytest.raises(ValueError, match="no link of this chain remembers"):
        tx.init(params, like=old)


test_what_it_cannot_wrap_is_refused = refused(
    [
        (lambda: "sgd", TypeError, "tx is 'sgd'"),
        (lambda: bc.with_master_weights(bc.sgd(0.1)), ValueError, "wrap the chain first"),
        (lambda: bc.vi.mean_field(bc.sgd(0.1), temperature=0.1), ValueError, "autocast=torch.bfloat16"),
        (lambda: bc.ekf.diagonal(0.1), ValueError, "keep float32 parameters"),
    ],
    of=lambda make: bc.with_master_weights(make()),
)
