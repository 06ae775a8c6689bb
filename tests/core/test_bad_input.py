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
NAN, INF = math.nan, math.inf


def unknown_link():
    def update(updates, state, *, params=None, inplace=True):
        return updates, state

    return GradientTransformation(lambda params: (), update)


def repelled(temperature):
    """Written behind ``-lr`` the decay drives the parameters away from zero, by more than the chain dissipates."""
    return bc.chain(
        bc.add_momentum(0.99, dampening=0.99),
        bc.inject_langevin_noise(temperature),
        bc.scale_by_neg_lr(0.03),
        bc.links.add_decayed_weights(0.1),
    )


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


@pytest.mark.parametrize(
    "words, error, build",
    [
        *(("temperature", TypeError, lambda t=t: bc.inject_langevin_noise(t)) for t in ("hot", None, True)),
        *(("temperature", TypeError, lambda sampler=sampler: sampler(0.1)) for sampler in (bc.sgld, bc.sghmc)),
        *(("learning rate", ValueError, lambda lr=lr: bc.sgd(lr, temperature=1.0)) for lr in (-0.1, NAN)),
        *(("learning rate", TypeError, lambda lr=lr: bc.sgd(lr)) for lr in ("0.1", None)),
        ("momentum", ValueError, lambda: bc.sgd(0.1, -0.5, temperature=1.0)),
        ("lr= and momentum= go together", ValueError, lambda: bc.inject_langevin_noise(1.0, momentum=0.9)),
        ("lr= and momentum= go together", ValueError, lambda: bc.inject_langevin_noise(1.0, lr=0.1)),
        ("order", ValueError, lambda: bc.inject_langevin_noise(1.0, order=3)),
        *(("preconditioner", ValueError, lambda bad=bad: bc.scale_by_preconditioner(bad)) for bad in (0.0, -1.0, INF)),
        ("link 1", TypeError, lambda: bc.chain(bc.sgd(0.1), None)),
        ("tx", TypeError, lambda: bc.make_step(lambda p, b: p["w"].sum(), "sgd")),
        ("exceeds 1", ValueError, lambda: bc.samplers.sghmc_from_friction(lr=1.0, alpha=2.0)),
        *(
            ("lr", ValueError, lambda bad=bad: bc.samplers.sghmc_from_friction(lr=bad, alpha=1.0))
            for bad in (0.0, -1.0, NAN)
        ),
        *(
            ("Linear, Nonlinear, Decay", TypeError, lambda r=r: bc.with_response(torchopt.transform.scale(1.0), r))
            for r in (
                bc.response.Preconditioner(),
                bc.response.Rate(),
                bc.response.Noise(),
                bc.response.SelfContainedSampler(),
                "linear",
            )
        ),
        *(
            ("finite coefficients", ValueError, lambda r=r: bc.with_response(torchopt.transform.scale(1.0), r))
            for r in (bc.response.Linear(()), bc.response.Linear((1.0,), (0.0,)), bc.response.Decay(NAN))
        ),
    ],
)
def test_it_is_refused_when_built(build, error, words):
    with pytest.raises(error, match=words):
        build()


@pytest.mark.parametrize(
    "words, build",
    [
        ("lr", lambda: bc.sgd(INF, temperature=1.0)),
        *(
            ("lr", lambda lr=lr: bc.sgd(lr, temperature=1.0))
            for lr in (torch.tensor(INF), torch.ones(1), lambda count: torch.ones(2))
        ),
        *(("temperature", lambda t=t: bc.sgd(0.1, temperature=lambda count: t)) for t in (NAN, -1.0, INF)),
        *(("lr", lambda lr=lr: bc.sgd(lambda count: lr, temperature=1.0)) for lr in (NAN, -1.0, INF)),
        *((r"momentum must lie in \[0, 1\)", lambda mu=mu: bc.sgd(0.1, mu, temperature=1.0)) for mu in (1.0, 1.5)),
        ("weight decay", lambda: bc.sgd(0.1, weight_decay=INF, temperature=1.0)),
        *(
            ("preconditioner", lambda bad=bad: bc.scale_by_preconditioner({"w": torch.tensor([1.0, bad])}))
            for bad in (0.0, -1.0, INF)
        ),
        (r"temperature.*-1", lambda: bc.inject_langevin_noise(lambda count: -1.0, lr=0.1, momentum=0.0)),
        ("lr=", lambda: torchopt.chain(bc.inject_langevin_noise(1.0), bc.scale_by_neg_lr(0.1))),
        (
            "leave them out",
            lambda: bc.chain(bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0), bc.scale_by_neg_lr(0.1)),
        ),
        (
            "taken to be positive",
            lambda: bc.chain(bc.inject_langevin_noise(1.0), bc.links.scale_by_schedule(lambda count: -0.1)),
        ),
        (
            "not negative",
            lambda: bc.chain(
                bc.inject_langevin_noise(1.0), bc.links.scale_by_schedule(lambda count: -0.1), bc.scale_by_neg_lr(1.0)
            ),
        ),
        ("2 noise links", lambda: bc.chain(bc.inject_langevin_noise(1.0), bc.sgd(0.1, temperature=1.0))),
        (
            r"unknown_link.*bc\.with_response",
            lambda: bc.chain(unknown_link(), bc.sgd(0.1, temperature=1.0)),
        ),
        ("nobody declared", lambda: bc.chain(torchopt.adam(0.1), bc.inject_langevin_noise(1.0))),
        (
            "adaptive",
            lambda: bc.chain(bc.links.scale_by_rms(), bc.links.scale_by_adam(), bc.sgd(0.1, temperature=1.0)),
        ),
        (
            "adaptive",
            lambda: bc.chain(bc.links.scale_by_adam(), torchopt.clip_grad_norm(1.0), bc.sgd(0.1, temperature=1.0)),
        ),
        ("1 - mu1 - mu2 - 3 mu1 mu2 < 0", lambda: bc.chain(bc.add_momentum(0.9), bc.sgd(0.1, 0.9, temperature=1.0))),
        (
            "changing learning rate",
            lambda: bc.chain(bc.add_momentum(0.1), bc.sgd(lambda count: 0.1, 0.1, temperature=1.0)),
        ),
        ("fed by its own updates", lambda: bc.adadelta(temperature=1.0)),
        ("scale_by_neg_lr", lambda: bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(1.0))),
        *(("negative at w = 0", lambda t=t: repelled(t)) for t in (0.4, torch.tensor(0.4), lambda count: 0.4)),
        ("mask", lambda: bc.masked(bc.sgd(0.1), {"v": True})),
        (r"labels \['oops'\]", lambda: bc.partition({"a": bc.sgd(0.1)}, {"w": "oops"})),
        (r"labels \['None'\]", lambda: bc.partition({"a": bc.sgd(0.1)}, {"w": None})),
        (
            "this order works: clip_grad_norm, add_momentum, inject_langevin_noise, scale_by_neg_lr",
            lambda: bc.chain(bc.add_momentum(0.9), torchopt.clip_grad_norm(1.0), bc.sgd(0.1, temperature=1.0)),
        ),
        (
            "this order works: clip_grad_norm, inject_langevin_noise, scale_by_neg_lr",
            lambda: bc.chain(bc.inject_langevin_noise(1.0), torchopt.clip_grad_norm(1.0), bc.sgd(0.1)),
        ),
        (
            "this order works: scale_by_adam, inject_langevin_noise, scale_by_neg_lr",
            lambda: bc.chain(bc.inject_langevin_noise(1.0), bc.adam(0.1)),
        ),
        (
            "this order works: scale_by_rms, add_momentum, inject_langevin_noise, scale_by_neg_lr",
            lambda: bc.chain(bc.add_momentum(0.5), bc.links.scale_by_rms(), bc.sgd(0.1, temperature=1.0)),
        ),
    ],
)
def test_it_is_refused_at_init(build, words):
    with pytest.raises(ValueError, match=words):
        build().init(P)


@pytest.mark.parametrize(
    "build",
    [
        lambda: bc.sgd(INF),
        lambda: bc.sgd(0.1, 1.0),
        lambda: bc.sgd(0.1, 1.5),
        lambda: bc.chain(unknown_link(), bc.sgd(0.1)),
        lambda: bc.chain(bc.with_response(unknown_link(), bc.response.Linear()), bc.sgd(0.1, temperature=1.0)),
    ],
)
def test_without_noise_or_when_declared_it_is_accepted(build):
    build().init(P)


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


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_rate_or_temperature_out_of_range_is_refused_later_too_and_nothing_is_changed(value, inplace):
    dial = torch.tensor(0.1)
    late = lambda count: torch.where(count < 1, 0.1, value)  # noqa: E731
    for tx in (
        bc.sgd(0.1, 0.9, temperature=late),
        bc.sgd(late, 0.9, temperature=1.0),
        bc.sgd(dial, temperature=1.0),
        bc.samplers.sgnht(0.1, temperature=late),
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


def test_a_cold_group_may_hold_what_cannot_be_sampled():
    params = {"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    bc.partition({"hot": bc.sgd(0.1, temperature=1.0), "cold": bc.sgd(0.1)}, {"a": "hot", "n": "cold"}).init(params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_keyword_that_nobody_takes_is_a_type_error(temperature):
    tx = bc.sgd(0.1, temperature=temperature)
    with pytest.raises(TypeError, match="curvature="):
        tx.update({"w": torch.ones(2)}, tx.init(P), params=P, curvature=1)


def test_weight_decay_needs_parameters():
    tx = bc.sgd(0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="params=params"):
        tx.update({"w": torch.ones(2)}, tx.init(P))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_noise_that_would_round_away_is_warned_of(dtype):
    ones = {"w": torch.ones(4, dtype=dtype)}
    for build, params in (
        (lambda: bc.sghmc(1e-3, temperature=1e-6), ones),
        (lambda: bc.chain(bc.scale_by_preconditioner({"w": 1e-6}), bc.sgld(0.1, temperature=1.0)), ones),
        (lambda: bc.inject_langevin_noise(1e-9, lr=1e-4, momentum=0.0), {"w": torch.full((3,), 100.0, dtype=dtype)}),
    ):
        with pytest.warns(UserWarning, match=r"round away.*with_master_weights"):
            build().init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bc.sghmc(0.1, temperature=1.0).init(ones)
        bc.sghmc(1e-3, temperature=1e-6).init({"w": torch.ones(4)})


@pytest.mark.parametrize("tx", [bc.sghmc(0.1, temperature=1.0), bc.adamax(0.1)], ids=["sghmc", "adamax"])
def test_like_must_fit(tx):
    with pytest.raises(ValueError, match="like="):
        tx.init(P, like=bc.adam(0.1).init(P))


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


@pytest.mark.filterwarnings("error")
def test_parameters_without_an_address_are_not_asked_for_one():
    with FakeTensorMode():
        for tx in (bc.sghmc(0.1, temperature=1.0), bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0)):
            tx.init({"w": torch.ones(2), "b": torch.ones(1, dtype=torch.bfloat16)})
