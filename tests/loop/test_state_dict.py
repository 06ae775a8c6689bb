"""States by name: whole, or what two chains have in common."""

import pytest
import torch

import bayesopt_chain as bc

PARAMS = {"w": torch.randn(3), "b": torch.randn(2)}


def state_of(tx, steps=2):
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        updates, state = tx.update(PARAMS, state, params=params, inplace=False)
        params = {k: p + updates[k] for k, p in params.items()}
    return state


def test_a_sampler_takes_what_it_shares_with_an_optimizer_and_says_what_is_left():
    saved = bc.state_dict(state_of(bc.chain(bc.links.delay(), bc.sgd(0.1, 0.9))))
    state = bc.sghmc(0.1, 0.9, temperature=0.01).init(PARAMS)
    key = state[1].key.clone()
    with pytest.raises(ValueError, match=r"is missing.*strict=False"):
        bc.load_state_dict(state, saved)
    assert not state[0].trace[0].any()
    missing, unknown = bc.load_state_dict(state, saved, strict=False)
    assert missing == [f"1.LangevinNoise.{x}" for x in ("key", "memory['b']", "memory['w']", "step")]
    assert unknown == ["0.Delay.held['b']", "0.Delay.held['w']"] and state[1].key == key
    assert torch.equal(state[0].trace[1], saved["1.Momentum.trace['w']"])


def test_names_that_are_not_unique_are_left_out():
    two = bc.chain(bc.add_momentum(0.9), bc.add_momentum(0.5), bc.scale_by_neg_lr(0.1))
    state = bc.sgd(0.1, 0.9).init(PARAMS)
    missing, unknown = bc.load_state_dict(state, bc.state_dict(state_of(two)), strict=False)
    assert len(missing) == 2 and len(unknown) == 4 and not state[0].trace[0].any()


def test_another_shape_is_refused_either_way_and_nothing_is_written():
    state = bc.sgd(0.1, 0.9).init(PARAMS)
    saved = {name: torch.ones(7) if "w" in name else torch.ones(2) for name in bc.state_dict(state)}
    for strict in (True, False):
        with pytest.raises(ValueError, match=r"trace\['w'\] is \(7,\)"):
            bc.load_state_dict(state, saved, strict=strict)
    assert not state[0].trace[0].any()
