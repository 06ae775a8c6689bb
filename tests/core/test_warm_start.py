"""Turning the temperature up on a trained state works, or the error says how."""

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc

T = 0.01
PARAMS = {"w": torch.randn(3, dtype=torch.float64), "b": torch.randn((), dtype=torch.float64)}


def trained(tx, steps=3):
    step, params, state = (
        bc.make_step(lambda p, b: sum(x.pow(2).sum() for x in p.values()), tx),
        PARAMS,
        tx.init(PARAMS),
    )
    for _ in range(steps):
        params, state, _ = step(params, state, None)
    return params, state


HOTTER = {
    "sgd to sghmc": (bc.sgd(0.1, 0.9), bc.sghmc(0.1, 0.9, temperature=T)),
    "torchopt's sgd": (torchopt.sgd(0.1, 0.9), bc.sghmc(0.1, 0.9, temperature=T)),
    "sghmc, another temperature": (bc.sghmc(0.1, temperature=0.1), bc.sghmc(0.1, temperature=T)),
    "sghmc to a schedule": (bc.sghmc(0.1, temperature=T), bc.sghmc(0.1, temperature=lambda count: T / (1 + count))),
    "a schedule to a constant": (bc.sghmc(lambda c: 0.1, temperature=T), bc.sghmc(0.1, temperature=T)),
    "adam": (bc.adam(0.1), bc.adam(0.1, temperature=T)),
    "adamw": (bc.adamw(0.1), bc.adamw(0.1, temperature=T)),
    "ivon": (bc.vi.ivon(0.1, temperature=0.1), bc.vi.ivon(0.1, temperature=T)),
    "mean field": (bc.vi.mean_field(bc.adam(0.1), temperature=0.1), bc.vi.mean_field(bc.adam(0.1), temperature=T)),
    "sgnht": (bc.samplers.sgnht(0.1, temperature=0.1), bc.samplers.sgnht(0.1, temperature=T)),
}


@pytest.mark.parametrize(
    "name", [name for name in HOTTER if name not in ("torchopt's sgd", "a schedule to a constant")]
)
def test_a_state_of_another_temperature_is_taken_over_key_excepted(name):
    cold, hot = HOTTER[name]
    params, state = trained(cold)
    warm, fresh = hot.init(params, like=state), hot.init(params)
    entries = [entry for entry in warm if "Noise" not in type(entry).__name__]
    donors = [entry for entry in state if "Noise" not in type(entry).__name__]
    taken = 0
    for donor in donors:
        for mine in entries:
            if type(mine).__name__ == type(donor).__name__ and optree.tree_leaves(mine):
                for field in type(mine)._fields:
                    a, b = (optree.tree_leaves(getattr(x, field)) for x in (mine, donor))
                    if field == "key":
                        assert a[0] != b[0]
                    else:
                        taken += len(a)
                        assert all(torch.equal(x, y) and x is not y for x, y in zip(a, b, strict=True))
    assert taken and optree.tree_structure(warm) == optree.tree_structure(fresh)
    step = bc.make_step(lambda p, b: sum(x.pow(2).sum() for x in p.values()), hot)
    moved, warm, _ = step(params, warm, None)
    assert all(torch.isfinite(x).all() for x in optree.tree_leaves(moved))


@pytest.mark.parametrize("name", ["sgd to sghmc", "torchopt's sgd", "adam", "sghmc to a schedule"])
def test_a_state_that_is_handed_over_as_it_is_works_or_the_error_says_how(name):
    cold, hot = HOTTER[name]
    params, state = trained(cold)
    with pytest.raises(ValueError, match=r"init\(params, like=state\)"):
        hot.update(params, state, params=params, inplace=False)


@pytest.mark.parametrize(
    "donor, hot, field",
    [
        (torchopt.sgd(0.1, momentum=0.9), bc.sghmc(0.1, 0.9, temperature=T), "trace"),
        (torchopt.adam(0.1), bc.adam(0.1, temperature=T), "nu"),
    ],
)
def test_a_state_of_torchopts_is_taken_over_too(donor, hot, field):
    _, state = trained(donor)
    (entry,) = [entry for entry in state if hasattr(entry, field)]
    warm, old = getattr(hot.init(PARAMS, like=state)[0], field), optree.tree_leaves(getattr(entry, field))
    assert all(torch.equal(x, y) and x is not y for x, y in zip(warm, old, strict=True))
    assert field != "nu" or all(count == 3 for count in hot.init(PARAMS, like=state)[0].count)


def test_a_temperature_in_a_tensor_is_turned_up_in_place():
    temperature = torch.tensor(0.0, dtype=torch.float64)
    tx = bc.sghmc(0.1, temperature=temperature)
    params, state = trained(tx)
    temperature.fill_(T)
    assert not torch.equal(
        tx.update(params, state, params=params, inplace=False)[0]["w"],
        bc.sgd(0.1, 0.9).update(params, bc.sgd(0.1, 0.9).init(params, like=state), params=params, inplace=False)[0][
            "w"
        ],
    )


def test_what_no_link_remembers_is_named_and_can_be_left_out():
    params, state = trained(bc.chain(bc.sgd(0.1, 0.9), bc.swag(rank=0)))
    hot = bc.sghmc(0.1, 0.9, temperature=T)
    with pytest.raises(ValueError, match=r"SwagState, which no link of this chain remembers.*like=\[the others\]"):
        hot.init(params, like=state)
    assert torch.equal(hot.init(params, like=list(state)[:1])[0].trace[0], state[0].trace[0])
    scheduled, constant = HOTTER["a schedule to a constant"]
    params, state = trained(scheduled)
    with pytest.raises(ValueError, match="ScaleByScheduleState, which no link of this chain remembers"):
        constant.init(params, like=state)
