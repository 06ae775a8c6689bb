"""Composition: chains associate, print, compare, copy, warm-start, and take what others wrote; states by name."""

import copy
import pickle

import optree
import pytest
import torch
import torchopt
from torchopt.base import ChainedGradientTransformation, GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.core.op import IN_PLACE, owned
from bayesopt_chain.testing import assert_bitwise_equal, stationary_covariance
from bayesopt_chain.testing._laws import example_params, run, smooth_gradient
from tests.walk import end_of

T = 0.3


def links():
    return bc.add_momentum(0.9), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(0.1)


def test_chains_associate_in_law_state_and_update():
    a, b, c = links()
    flat, left, right = bc.chain(a, b, c), bc.chain(bc.chain(a, b), c), bc.chain(a, bc.chain(b, c))
    assert flat == left == right and hash(flat) == hash(left)
    params = example_params()
    want = run(flat, params, smooth_gradient, 5)
    for other in (left, right, a.chain(b).chain(c)):
        assert_bitwise_equal(run(other, params, smooth_gradient, 5)[0], want[0])
    torch.manual_seed(0)
    one = flat.init(params)
    torch.manual_seed(0)
    assert_bitwise_equal(left.init(params), one)


def test_a_chain_is_a_pair_that_torchopt_can_unpack_and_does_not_flatten():
    tx = bc.chain(*links())
    init, update = tx
    assert isinstance(tx, GradientTransformation) and not isinstance(tx, ChainedGradientTransformation)
    params = [torch.ones(2)]
    updates, _ = update([torch.ones(2)], init(params), params=params)
    assert torch.isfinite(updates[0]).all()
    torchopt.chain(torchopt.clip_grad_norm(1.0), tx).init(params)
    replaced = tx._replace(init=lambda params: "mine")
    assert replaced.init(params) == "mine" and replaced.update is tx.update


def test_chains_pickle_copy_and_compare():
    tx = bc.sgd(0.1, 0.9, temperature=T, weight_decay=0.1)
    for twin in (pickle.loads(pickle.dumps(tx)), copy.deepcopy(tx), copy.copy(tx)):
        assert twin == tx and hash(twin) == hash(tx) and repr(twin) == repr(tx)
    assert tx not in (bc.sgd(0.2, 0.9, temperature=T, weight_decay=0.1), torchopt.sgd(0.1)) and bc.chain() == bc.chain()


def test_masks_labels_and_preconditioners_tell_chains_apart():
    a, b = {"a": True, "b": False}, {"a": False, "b": True}
    assert (
        bc.masked(bc.links.scale(2.0), a)
        == bc.masked(bc.links.scale(2.0), dict(a))
        != bc.masked(bc.links.scale(2.0), b)
    )
    one, five = ([k * torch.ones(1)] for k in (1.0, 5.0))
    assert bc.scale_by_preconditioner(one) == bc.scale_by_preconditioner([torch.ones(1)])
    assert bc.scale_by_preconditioner(one) != bc.scale_by_preconditioner(five)
    groups = {"x": bc.sgd(0.1), "y": bc.sgd(0.2)}
    assert bc.partition(groups, {"a": "x", "b": "y"}) != bc.partition(groups, {"a": "y", "b": "x"})


def test_repr_says_where_the_noise_acts_and_what_it_was_matched_to():
    text = repr(bc.chain(bc.scale_by_preconditioner(2.0), *links()))
    assert "acts before add_momentum, matched to F = 0.2 / (1 - 0.9/z)" in text
    assert "acts inside scale_by_adam" in repr(bc.adam(temperature=T))
    assert "unmatched" in repr(bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(T)))
    assert str(bc.inject_langevin_noise(T, order=1).links[0]) == "inject_langevin_noise(0.3, order=1)"
    assert repr(bc.chain()) == repr(bc.add_momentum(0.0)) == "chain(\n)"


def test_a_remembered_draw_is_named_by_its_leaf_where_groups_of_leaves_alternate():
    tx = bc.chain(
        bc.masked(bc.add_momentum(0.9), [True, False, True]),
        bc.inject_langevin_noise(bc.schedules.constant(T)),
        bc.scale_by_neg_lr(0.1),
    )
    params = [torch.zeros(n) for n in (2, 3, 4)]
    named = bc.state_dict(tx.init(params))
    assert [named[f"1.LangevinNoise.memory[{j}]"].shape[1:] for j in range(3)] == [p.shape for p in params]


def test_keys_are_drawn_in_the_order_of_the_links():
    params = {"a": torch.zeros(2), "b": torch.zeros(2)}
    for first, second in (("sghmc", "ubu"), ("ubu", "sghmc")):
        make = {"sghmc": lambda: bc.sghmc(0.1, temperature=T), "ubu": lambda: bc.samplers.ubu(0.1, 1.0, temperature=T)}
        torch.manual_seed(0)
        want = [torch.randint(2**63 - 1, ()) for _ in range(2)]
        torch.manual_seed(0)
        state = bc.partition({"a": make[first](), "b": make[second]()}, {"a": "a", "b": "b"}).init(params)
        assert [entry.key for entry in state if hasattr(entry, "key")] == want


OWN = {
    "ubu": lambda: bc.samplers.ubu(0.1, 1.0, temperature=T),
    "lattice_walk": lambda: bc.samplers.lattice_walk(0.1, temperature=T),
    "sgnht": lambda: bc.samplers.sgnht(0.1, temperature=T),
    "badodab": lambda: bc.samplers.badodab(0.1, temperature=T),
    "sghmc": lambda: bc.sghmc(0.1, temperature=T),
    "adam": lambda: bc.adam(0.1, temperature=T),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_group_without_leaves_changes_nothing(name, inplace):
    params, alone = {"w": torch.ones(2)}, bc.sgd(0.1)
    tx = bc.partition({"here": alone, "nowhere": OWN[name]()}, {"w": "here"})
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update({"w": torch.ones(2)}, state, params=params, inplace=inplace)
    assert_bitwise_equal(updates, {"w": torch.full((2,), -0.1)})


def test_keywords_go_to_the_links_that_take_them():
    seen, params = [], [torch.ones(2)]

    def named(updates, state, *, params=None, inplace=True, curvature=None):
        seen.append(curvature)
        return updates, state

    def every(updates, state, *, params=None, inplace=True, **extra):
        seen.append(extra)
        return updates, state

    one, all_of_them = (GradientTransformation(lambda params: (), update) for update in (named, every))
    tx = bc.chain(bc.with_response(one, bc.response.Linear()), bc.sghmc(0.1, temperature=T))
    tx.update(params, tx.init(params), params=params, curvature=7)
    with pytest.raises(TypeError, match="its links take: curvature"):
        tx.update(params, tx.init(params), params=params, draw=1)
    tx = bc.chain(all_of_them, bc.sgd(0.1))
    tx.update(params, tx.init(params), curvature=8)
    assert seen == [7, {"curvature": 8}]
    assert bc.with_response(tx, bc.response.Nonlinear()).extra_kwargs == tx.extra_kwargs


def test_zero_dimensional_leaves_keep_their_dtype_when_hot():
    for dtype in (torch.bfloat16, torch.float32):
        params = {"s": torch.ones((), dtype=dtype), "v": torch.ones(2, dtype=dtype)}
        for tx in (bc.adam(0.1, temperature=1.0), bc.sghmc(torch.tensor(0.1, dtype=torch.float64), temperature=1.0)):
            p, _ = end_of(tx, params, lambda p: p, 3)
            assert p["s"].dtype == dtype == p["v"].dtype


@pytest.mark.parametrize("temperature", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_zero_dimensional_bfloat16_leaves_move_alike_in_place(temperature):
    tx = bc.adam(0.1, temperature=temperature)
    params = [torch.tensor(0.7, dtype=torch.bfloat16) for _ in range(20)]
    state = tx.init(params)
    for _ in range(3):
        mine, kept = copy.deepcopy((params, state))
        want, state = tx.update(copy.deepcopy(params), state, params=params, inplace=False)
        got, kept = tx.update(mine, kept, params=params, inplace=True)
        assert_bitwise_equal((got, kept[0].mu, kept[0].nu), (want, state[0].mu, state[0].nu))


def test_torchopts_optimizers_can_be_heated_by_adding_the_noise():
    curvature = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    tx = bc.chain(torchopt.sgd(0.1, momentum=0.9, weight_decay=0.5), bc.inject_langevin_noise(T))
    want = T * torch.linalg.inv(curvature + 0.5 * torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(stationary_covariance(tx, curvature), want, rtol=1e-10, atol=1e-12)


def test_clipping_goes_first_and_noise_is_not_clipped():
    tx = bc.chain(torchopt.clip_grad_norm(1e-3), bc.sgd(0.1, 0.9, temperature=100.0))
    params = [torch.zeros(1000)]
    updates, _ = tx.update([torch.ones(1000)], tx.init(params), params=params, inplace=False)
    assert updates[0].std() > 0.1  # sqrt(T lr (1 - mu) / 2) = 0.71


def test_clipping_within_a_group_sees_only_that_group():
    params = {"a": torch.zeros(1), "b": torch.zeros(1)}
    tx = bc.partition(
        {"x": bc.chain(torchopt.clip_grad_norm(1.0), bc.sgd(1.0)), "y": bc.sgd(1.0)}, {"a": "x", "b": "y"}
    )
    grads = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    updates, _ = tx.update(grads, tx.init(params), params=params, inplace=False)
    assert updates["a"].item() == pytest.approx(-1.0, rel=1e-5) and updates["b"].item() == -4.0


def test_momentum_in_place_is_differentiated_and_refuses_other_shapes_as_out_of_place():
    """Momentum and learning rate in one pass, which is for plain tensors of one shape."""
    lr = torch.tensor(0.1, requires_grad=True)
    tx = bc.sgd(lr, 0.9)
    state = tx.init([torch.ones(3)])
    updates, state = tx.update([torch.ones(3)], state, inplace=True)
    (slope,) = torch.autograd.grad(updates[0].sum(), lr)
    assert slope == -3.0
    tx = bc.sgd(0.1, 0.9)
    g = torch.ones(3, requires_grad=True)
    _, state = tx.update([2 * g], tx.init([g]), inplace=False)
    updates, _ = tx.update([torch.ones(3)], state, inplace=True)
    torch.testing.assert_close(updates[0], torch.full((3,), -0.28))
    for likes, grads in (([(10,)], [(1,)]), ([(2, 3)], [(3,)]), ([(4,)], [()]), ([(3,)], [(3,), (3,)])):
        with pytest.raises((RuntimeError, ValueError)):
            tx.update([*map(torch.ones, grads)], tx.init([*map(torch.ones, likes)]), inplace=True)


def test_gradients_are_copied_where_they_share_memory_and_nowhere_else():
    a, b = torch.ones(3), torch.ones(3)
    assert [x is y for x, y in zip(owned([a, b, None, a]), [a, b, None, a])] == [True, True, True, False]
    expanded = torch.ones(()).expand(3)
    assert owned([expanded])[0] is not expanded
    kept = []

    def inside(x, y):
        kept.extend(new is old for new, old in zip(owned([x, y]), [x, y]))
        return x

    torch.vmap(inside)(torch.ones(2, 3), torch.ones(2, 3))
    assert kept == [True, True]


def test_a_sum_of_squares_takes_one_operation_on_each_leaf():
    (total,) = IN_PLACE.average([torch.zeros(3)], 1.0, [torch.full((3,), 2.0)], square=True)
    assert total._version == 1 and total.tolist() == [4.0, 4.0, 4.0]


COLD = 0.01
TRAINED = {"w": torch.randn(3, dtype=torch.float64), "b": torch.randn((), dtype=torch.float64)}


def trained(tx, steps=3):
    step, params, state = (
        bc.make_step(lambda p, b: sum(x.pow(2).sum() for x in p.values()), tx),
        TRAINED,
        tx.init(TRAINED),
    )
    for _ in range(steps):
        params, state, _ = step(params, state, None)
    return params, state


HOTTER = {
    "sgd to sghmc": (bc.sgd(0.1, 0.9), bc.sghmc(0.1, 0.9, temperature=COLD)),
    "torchopt's sgd": (torchopt.sgd(0.1, 0.9), bc.sghmc(0.1, 0.9, temperature=COLD)),
    "sghmc, another temperature": (bc.sghmc(0.1, temperature=0.1), bc.sghmc(0.1, temperature=COLD)),
    "sghmc to a schedule": (
        bc.sghmc(0.1, temperature=COLD),
        bc.sghmc(0.1, temperature=lambda count: COLD / (1 + count)),
    ),
    "a schedule to a constant": (bc.sghmc(lambda c: 0.1, temperature=COLD), bc.sghmc(0.1, temperature=COLD)),
    "adam": (bc.adam(0.1), bc.adam(0.1, temperature=COLD)),
    "adamw": (bc.adamw(0.1), bc.adamw(0.1, temperature=COLD)),
    "ivon": (bc.vi.ivon(0.1, temperature=0.1), bc.vi.ivon(0.1, temperature=COLD)),
    "mean field": (bc.vi.mean_field(bc.adam(0.1), temperature=0.1), bc.vi.mean_field(bc.adam(0.1), temperature=COLD)),
    "sgnht": (bc.samplers.sgnht(0.1, temperature=0.1), bc.samplers.sgnht(0.1, temperature=COLD)),
}


@pytest.mark.parametrize(
    "name", [name for name in HOTTER if name not in ("torchopt's sgd", "a schedule to a constant")]
)
def test_a_state_of_another_temperature_is_taken_over_key_excepted(name):
    cold, hot = HOTTER[name]
    params, state = trained(cold)
    warm, fresh = hot.init(params, like=state), hot.init(params)
    donors = {type(entry).__name__: entry for entry in state if "Noise" not in type(entry).__name__}
    taken = 0
    for mine in [entry for entry in warm if type(entry).__name__ in donors and optree.tree_leaves(entry)]:
        for field in type(mine)._fields:
            a, b = (optree.tree_leaves(getattr(x, field)) for x in (mine, donors[type(mine).__name__]))
            taken += field != "key" and len(a)
            same = [torch.equal(x, y) and x is not y for x, y in zip(a, b, strict=True)]
            assert not any(same) if field == "key" else all(same)
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
        (torchopt.sgd(0.1, momentum=0.9), bc.sghmc(0.1, 0.9, temperature=COLD), "trace"),
        (torchopt.adam(0.1), bc.adam(0.1, temperature=COLD), "nu"),
    ],
)
def test_a_state_of_torchopts_is_taken_over_too(donor, hot, field):
    _, state = trained(donor)
    (entry,) = [entry for entry in state if hasattr(entry, field)]
    warm, old = getattr(hot.init(TRAINED, like=state)[0], field), optree.tree_leaves(getattr(entry, field))
    assert all(torch.equal(x, y) and x is not y for x, y in zip(warm, old, strict=True))
    assert field != "nu" or all(count == 3 for count in hot.init(TRAINED, like=state)[0].count)


def test_a_temperature_in_a_tensor_is_turned_up_in_place():
    temperature = torch.tensor(0.0, dtype=torch.float64)
    tx = bc.sghmc(0.1, temperature=temperature)
    params, state = trained(tx)
    temperature.fill_(COLD)
    assert not torch.equal(
        tx.update(params, state, params=params, inplace=False)[0]["w"],
        bc.sgd(0.1, 0.9).update(params, bc.sgd(0.1, 0.9).init(params, like=state), params=params, inplace=False)[0][
            "w"
        ],
    )


def test_what_no_link_remembers_is_named_and_can_be_left_out():
    params, state = trained(bc.chain(bc.sgd(0.1, 0.9), bc.swag(rank=0)))
    hot = bc.sghmc(0.1, 0.9, temperature=COLD)
    with pytest.raises(ValueError, match=r"SwagState, which no link of this chain remembers.*like=\[the others\]"):
        hot.init(params, like=state)
    assert torch.equal(hot.init(params, like=list(state)[:1])[0].trace[0], state[0].trace[0])
    scheduled, constant = HOTTER["a schedule to a constant"]
    params, state = trained(scheduled)
    with pytest.raises(ValueError, match="ScaleByScheduleState, which no link of this chain remembers"):
        constant.init(params, like=state)


def test_tensors_of_another_chain_or_shape_are_refused_and_nothing_is_written():
    state = bc.sgd(0.1, 0.9).init(TRAINED)
    delayed = bc.state_dict(trained(bc.chain(bc.links.delay(), bc.sgd(0.1, 0.9)))[1])
    with pytest.raises(ValueError, match=r"like=state.*\['w'\] is missing.*\['w'\] is not expected"):
        bc.load_state_dict(state, delayed)
    saved = {name: torch.ones(7) if "w" in name else torch.ones(()) for name in bc.state_dict(state)}
    with pytest.raises(ValueError, match=r"trace\['w'\] is torch.float32 \(7,\)"):
        bc.load_state_dict(state, saved)
    assert not state[0].trace[0].any()
    # a class that cannot hold stars is shown too
    optree.register_pytree_node(slice, lambda x: ((x.stop,), None), lambda _, x: slice(x[0] + 0), namespace="outline")
    assert "slice" in bc.trees.outline(optree.tree_structure((slice(3), None), namespace="outline", none_is_leaf=True))
