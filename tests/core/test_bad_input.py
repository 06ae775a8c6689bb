"""Wrong usage at T > 0: one clear error at build or init time, naming the argument and what to do."""

import copy
import math
import warnings

import pytest
import torch
import torchopt
from torch._subclasses.fake_tensor import FakeTensorMode
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal

P = {"w": torch.ones(2)}


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, torch.tensor(-1.0), torch.tensor(math.nan), torch.ones(2)])
@pytest.mark.parametrize(
    "build",
    [
        lambda t: bc.inject_langevin_noise(t),
        lambda t: bc.sgd(0.1, temperature=t),
        lambda t: bc.adam(temperature=t),
        lambda t: bc.sgld(0.1, temperature=t),
        lambda t: bc.SGD([torch.ones(1)], lr=0.1, temperature=t),
    ],
)
def test_temperature_is_checked_when_the_chain_is_built(build, value):
    with pytest.raises(ValueError, match="temperature"):
        build(value)


def test_a_temperature_that_is_no_number_is_a_type_error():
    for value in ("hot", None, True):
        with pytest.raises(TypeError, match="temperature"):
            bc.inject_langevin_noise(value)


@pytest.mark.parametrize("lr", [-0.1, math.nan])
def test_a_negative_or_nan_learning_rate_is_refused_when_built(lr):
    with pytest.raises(ValueError, match="learning rate"):
        bc.sgd(lr, temperature=1.0)


def test_an_infinite_learning_rate_is_refused_at_init_if_hot():
    bc.sgd(math.inf).init(P)
    with pytest.raises(ValueError, match="lr"):
        bc.sgd(math.inf, temperature=1.0).init(P)


@pytest.mark.parametrize("momentum", [1.0, 1.5])
def test_momentum_of_one_or_more_is_refused_if_hot(momentum):
    bc.sgd(0.1, momentum).init(P)
    with pytest.raises(ValueError, match=r"momentum must lie in \[0, 1\)"):
        bc.sgd(0.1, momentum, temperature=1.0).init(P)
    with pytest.raises(ValueError, match="momentum"):
        bc.sgd(0.1, -0.5, temperature=1.0)


def test_no_temperature_no_default():
    for build in (bc.sgld, bc.sghmc):
        with pytest.raises(TypeError, match="temperature"):
            build(0.1)


@pytest.mark.parametrize(
    "params, error, words",
    [
        ({"w": torch.ones(2, dtype=torch.int64)}, TypeError, r"\['w'\].*int64"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, TypeError, r"\['w'\].*complex64"),
        ({"w": 1.0}, TypeError, r"\['w'\].*float"),
        ({}, ValueError, "no leaves"),
        ([None], ValueError, "no leaves"),
    ],
)
def test_parameters_that_cannot_be_sampled_are_named_at_init(params, error, words):
    with pytest.raises(error, match=words):
        bc.sghmc(0.1, temperature=1.0).init(params)
    if error is not TypeError or torch.is_tensor(params["w"]):
        bc.sgd(0.1).init(params)  # at T = 0 what TorchOpt accepts


@pytest.mark.parametrize(
    "grads, words",
    [
        ({"v": torch.ones(2)}, "structure"),
        ([torch.ones(2)], "structure"),
        ({"w": torch.ones(3)}, r"leaf 0 has shape \(3,\)"),
        ({"w": torch.ones(2, dtype=torch.float64)}, "float64"),
        ({"w": torch.ones(2, device="meta")}, "meta"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_that_do_not_fit_are_refused_and_nothing_is_touched(grads, words, inplace):
    tx = bc.sghmc(0.1, temperature=1.0)
    state = tx.init(P)
    before = [t.clone() for s in state for t in (s.trace if hasattr(s, "trace") else ())]
    with pytest.raises(ValueError, match=words):
        tx.update(grads, state, params=P, inplace=inplace)
    assert_bitwise_equal(list(state[0].trace), before)
    assert state[1].step == 0


def test_a_state_of_other_parameters_is_refused():
    tx = bc.sghmc(0.1, temperature=1.0)
    state = tx.init({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="the state has"):
        tx.update({"w": torch.ones(2)}, state, params=P)
    with pytest.raises(ValueError, match="state: must be what init"):
        tx.update({"w": torch.ones(2)}, state[:1], params=P)
    two = {"w": torch.ones(3), "v": torch.ones(3)}
    with pytest.raises(ValueError, match=r"the leaves \(\['v'\], \['w'\]\), the state is for \(\['w'\]\)"):
        tx.update(two, state, params=two)
    with pytest.raises(ValueError, match=r"the leaves \(\['w'\]\), the state is for \(\['v'\], \['w'\]\)"):
        tx.update({"w": torch.ones(3)}, tx.init(two), params={"w": torch.ones(3)})


@pytest.mark.parametrize("inplace", [False, True])
def test_a_group_that_does_not_fit_leaves_the_other_groups_untouched(inplace):
    tx = bc.partition({"h": bc.sghmc(0.1, temperature=1.0), "k": bc.sghmc(0.2, temperature=1.0)}, {"a": "h", "b": "k"})
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    grads, state = {"a": torch.ones(2), "b": torch.ones(4)}, tx.init(params)
    before = copy.deepcopy((params, grads, state))
    with pytest.raises(ValueError, match="leaf 1"):
        tx.update(grads, state, params=params, inplace=inplace)
    with pytest.raises(ValueError, match="leaf 1"):
        tx.update(grads, state, inplace=inplace)
    assert_bitwise_equal((params, grads, state), before)


def test_noise_in_plain_torchopt_chain_needs_lr():
    with pytest.raises(ValueError, match="lr="):
        torchopt.chain(bc.inject_langevin_noise(1.0), bc.scale_by_neg_lr(0.1)).init(P)
    tx = torchopt.chain(bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0), bc.scale_by_neg_lr(0.1))
    updates, _ = tx.update({"w": torch.ones(2)}, tx.init(P), params=P)
    assert torch.isfinite(updates["w"]).all()
    with pytest.raises(ValueError, match=r"temperature.*-1"):
        bc.inject_langevin_noise(lambda count: -1.0, lr=0.1, momentum=0.0).init(P)
    with pytest.warns(UserWarning, match="round away"):
        bc.inject_langevin_noise(1e-9, lr=1e-4, momentum=0.0).init(torch.full((3,), 100.0, dtype=torch.bfloat16))


def test_stated_noise_is_refused_where_the_noise_can_see_its_neighbours():
    with pytest.raises(ValueError, match="leave them out"):
        bc.chain(bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0), bc.scale_by_neg_lr(0.1)).init(P)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_rate_or_temperature_out_of_range_is_refused_at_init_and_later_and_nothing_is_changed(value, inplace):
    for tx in (bc.sgd(0.1, temperature=lambda count: value), bc.sgd(lambda count: value, temperature=1.0)):
        with pytest.raises(ValueError, match=r"temperature|lr"):
            tx.init(P)
    dial = torch.tensor(0.1)
    late = lambda count: torch.where(count < 1, 0.1, value)  # noqa: E731
    own = bc.samplers.sgnht(0.1, temperature=late)
    for tx in (
        bc.sgd(0.1, 0.9, temperature=late),
        bc.sgd(late, 0.9, temperature=1.0),
        bc.sgd(dial, temperature=1.0),
        own,
    ):
        dial.fill_(0.1)
        state = tx.init(P)
        _, state = tx.update({"w": torch.ones(2)}, state, params=P, inplace=False)
        dial.fill_(value)
        g, before = {"w": torch.ones(2)}, copy.deepcopy(state)
        with pytest.raises(ValueError, match=r"(temperature|lr): its value at this step"):
            tx.update(g, state, params=P, inplace=inplace)
        assert_bitwise_equal((g, state), ({"w": torch.ones(2)}, before))


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_rate_that_turns_wrong_where_nobody_may_look_turns_to_nan(value):
    tx = bc.sgd(lambda count: torch.where(count < 1, 0.1, value), 0.9, temperature=1.0)
    state = bc.stack([tx.init(P), tx.init(P)])
    for _ in range(3):
        updates, state = torch.vmap(lambda s: tx.update({"w": torch.ones(2)}, s, params=P, inplace=False))(state)
    assert not torch.isfinite(updates["w"]).any()


@pytest.mark.parametrize("lr", [torch.tensor(math.inf), torch.ones(1), lambda count: torch.ones(2)])
def test_tensor_rates_are_finite_scalars_if_hot(lr):
    with pytest.raises(ValueError, match="lr"):
        bc.sgd(lr, temperature=1.0).init(P)


def test_rates_of_the_wrong_type():
    for bad in ("0.1", None):
        with pytest.raises(TypeError, match="learning rate"):
            bc.sgd(bad)


def test_an_infinite_weight_decay_is_refused_if_hot():
    with pytest.raises(ValueError, match="weight decay"):
        bc.sgd(0.1, weight_decay=math.inf, temperature=1.0).init(P)


def test_a_schedule_that_descends_by_its_sign_is_told_what_to_do():
    tx = bc.chain(bc.inject_langevin_noise(1.0), bc.links.scale_by_schedule(lambda count: -0.1))
    with pytest.raises(ValueError, match="taken to be positive"):
        tx.init(P)
    tx = bc.chain(
        bc.inject_langevin_noise(1.0), bc.links.scale_by_schedule(lambda count: -0.1), bc.scale_by_neg_lr(1.0)
    )
    with pytest.raises(ValueError, match="not negative"):
        tx.init(P)


@pytest.mark.parametrize(
    "response",
    [
        bc.response.Preconditioner(),
        bc.response.Rate(),
        bc.response.Noise(),
        bc.response.SelfContainedSampler(),
        "linear",
    ],
)
def test_responses_that_need_more_than_a_declaration_cannot_be_declared(response):
    with pytest.raises(TypeError, match="Linear, Nonlinear, Decay"):
        bc.with_response(torchopt.transform.scale(1.0), response)
    for empty in (bc.response.Linear(()), bc.response.Linear((1.0,), (0.0,)), bc.response.Decay(math.nan)):
        with pytest.raises(ValueError, match="finite coefficients"):
            bc.with_response(torchopt.transform.scale(1.0), empty)


def test_a_cold_group_may_hold_what_cannot_be_sampled():
    params = {"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    bc.partition({"hot": bc.sgd(0.1, temperature=1.0), "cold": bc.sgd(0.1)}, {"a": "hot", "n": "cold"}).init(params)


def test_stated_momentum_needs_stated_lr():
    with pytest.raises(ValueError, match="lr="):
        bc.inject_langevin_noise(1.0, momentum=0.9)
    with pytest.raises(ValueError, match="order"):
        bc.inject_langevin_noise(1.0, order=3)


def test_two_noise_links_are_refused():
    with pytest.raises(ValueError, match="2 noise links"):
        bc.chain(bc.inject_langevin_noise(1.0), bc.sgd(0.1, temperature=1.0)).init(P)


def test_an_unknown_link_is_refused_by_name_with_the_way_to_declare_it():
    def my_link():
        def init_fn(params):
            return ()

        def update_fn(updates, state, *, params=None, inplace=True):
            return updates, state

        return GradientTransformation(init_fn, update_fn)

    tx = bc.chain(my_link(), bc.sgd(0.1, temperature=1.0))
    with pytest.raises(ValueError, match=r"my_link.*bc\.with_response"):
        tx.init(P)
    bc.chain(my_link(), bc.sgd(0.1)).init(P)
    bc.chain(bc.with_response(my_link(), bc.response.Linear()), bc.sgd(0.1, temperature=1.0)).init(P)
    with pytest.raises(ValueError, match="nobody declared"):
        bc.chain(torchopt.adam(0.1), bc.inject_langevin_noise(1.0)).init(P)


@pytest.mark.parametrize(
    "build, order",
    [
        (
            lambda: bc.chain(bc.add_momentum(0.9), torchopt.clip_grad_norm(1.0), bc.sgd(0.1, temperature=1.0)),
            "clip_grad_norm, add_momentum, inject_langevin_noise, scale_by_neg_lr",
        ),
        (
            lambda: bc.chain(bc.inject_langevin_noise(1.0), torchopt.clip_grad_norm(1.0), bc.sgd(0.1)),
            "clip_grad_norm, inject_langevin_noise, scale_by_neg_lr",
        ),
        (
            lambda: bc.chain(bc.inject_langevin_noise(1.0), bc.adam(0.1)),
            "scale_by_adam, inject_langevin_noise, scale_by_neg_lr",
        ),
        (
            lambda: bc.chain(bc.add_momentum(0.5), bc.links.scale_by_rms(), bc.sgd(0.1, temperature=1.0)),
            "scale_by_rms, add_momentum, inject_langevin_noise, scale_by_neg_lr",
        ),
    ],
)
def test_orders_that_cannot_be_matched_are_refused_with_one_that_works(build, order):
    with pytest.raises(ValueError, match=f"this order works: {order}"):
        build().init(P)


def test_adaptive_links_do_not_stack():
    for links in (
        (bc.links.scale_by_rms(), bc.links.scale_by_adam()),
        (bc.links.scale_by_adam(), torchopt.clip_grad_norm(1.0)),
    ):
        with pytest.raises(ValueError, match="adaptive"):
            bc.chain(*links, bc.sgd(0.1, temperature=1.0)).init(P)


def test_two_strong_momenta_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="1 - mu1 - mu2 - 3 mu1 mu2 < 0"):
        bc.chain(bc.add_momentum(0.9), bc.sgd(0.1, 0.9, temperature=1.0)).init(P)


def test_two_momenta_under_a_schedule_are_refused():
    with pytest.raises(ValueError, match="changing learning rate"):
        bc.chain(bc.add_momentum(0.1), bc.sgd(lambda c: 0.1, 0.1, temperature=1.0)).init(P)


def test_adadelta_is_refused_when_hot():
    with pytest.raises(ValueError, match="fed by its own updates"):
        bc.adadelta(temperature=1.0).init(P)


def test_a_chain_that_climbs_is_refused():
    with pytest.raises(ValueError, match="scale_by_neg_lr"):
        bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(1.0)).init(P)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_keyword_that_nobody_takes_is_a_type_error(temperature):
    tx = bc.sgd(0.1, temperature=temperature)
    with pytest.raises(TypeError, match="curvature="):
        tx.update({"w": torch.ones(2)}, tx.init(P), params=P, curvature=1)


def test_weight_decay_needs_parameters():
    tx = bc.sgd(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="params=params"):
        tx.update({"w": torch.ones(2)}, tx.init(P))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf])
def test_preconditioners_are_positive(bad):
    with pytest.raises(ValueError, match="preconditioner"):
        bc.scale_by_preconditioner(bad)
    with pytest.raises(ValueError, match="preconditioner"):
        bc.scale_by_preconditioner({"w": torch.tensor([1.0, bad])}).init(P)


def test_masks_and_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="mask"):
        bc.masked(bc.sgd(0.1), {"v": True}).init(P)
    with pytest.raises(ValueError, match=r"labels \['oops'\]"):
        bc.partition({"a": bc.sgd(0.1)}, {"w": "oops"}).init(P)
    with pytest.raises(ValueError, match=r"labels \['None'\]"):
        bc.partition({"a": bc.sgd(0.1)}, {"w": None}).init(P)


def test_a_link_that_is_none_is_a_type_error():
    with pytest.raises(TypeError, match="link 1"):
        bc.chain(bc.sgd(0.1), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_that_would_round_away_is_warned_of(dtype):
    with pytest.warns(UserWarning, match="with_master_weights"):
        bc.sghmc(1e-3, temperature=1e-6).init({"w": torch.ones(4, dtype=dtype)})
    with pytest.warns(UserWarning, match="with_master_weights"):
        small = bc.chain(bc.scale_by_preconditioner([1e-6]), bc.sgld(0.1, temperature=1.0))
        small.init([torch.ones(4, dtype=dtype)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bc.sghmc(0.1, temperature=1.0).init({"w": torch.ones(4, dtype=dtype)})
        bc.sghmc(1e-3, temperature=1e-6).init({"w": torch.ones(4)})


def test_like_must_fit():
    state = bc.adam(0.1).init(P)
    with pytest.raises(ValueError, match="like="):
        bc.sghmc(0.1, temperature=1.0).init(P, like=state)


def test_losses_that_are_not_scalars():
    tx = bc.sgd(0.1)
    for loss, words in (
        (lambda p, b: p["w"], r"shape \(2,\)"),
        (lambda p, b: 1.0, "float"),
        (lambda p, b: (p["w"].sum(), 1, 2), "tuple of 3"),
        (lambda p, b: torch.tensor(1.0), "depend"),
    ):
        with pytest.raises(ValueError, match=words):
            bc.make_step(loss, tx)(P, tx.init(P), None)
    with pytest.raises(TypeError, match="tx"):
        bc.make_step(lambda p, b: p["w"].sum(), "sgd")


def test_friction_too_strong():
    with pytest.raises(ValueError, match="exceeds 1"):
        bc.samplers.sghmc_from_friction(lr=1.0, alpha=2.0)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="lr"):
            bc.samplers.sghmc_from_friction(lr=bad, alpha=1.0)


@pytest.mark.parametrize(
    "temperature", [0.4, torch.tensor(0.4), lambda count: 0.4], ids=["number", "tensor", "schedule"]
)
def test_a_decay_that_repels_more_than_the_chain_dissipates_is_refused(temperature):
    """Written behind ``-lr`` it drives the parameters away from zero."""
    tx = bc.chain(
        bc.add_momentum(0.99, dampening=0.99),
        bc.inject_langevin_noise(temperature),
        bc.scale_by_neg_lr(0.03),
        bc.links.add_decayed_weights(0.1),
    )
    with pytest.raises(ValueError, match="negative at w = 0"):
        tx.init([torch.ones(3)])


@pytest.mark.filterwarnings("error")
def test_parameters_without_an_address_are_not_asked_for_one():
    with FakeTensorMode():
        for tx in (bc.sghmc(0.1, temperature=1.0), bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0)):
            tx.init({"w": torch.ones(2), "b": torch.ones(1, dtype=torch.bfloat16)})
