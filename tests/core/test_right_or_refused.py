"""Nothing is silently wrong: what cannot be right is refused at build, init or update, by name, with what to do instead."""

import copy
import math
from dataclasses import dataclass

import optree
import pytest
import torch
import torchopt
from torch._subclasses.fake_tensor import FakeTensorMode
from torchopt.base import GradientTransformation

import bayesopt_chain as bc
from bayesopt_chain import samplers
from bayesopt_chain import schedules as s
from bayesopt_chain.core.link import Link
from bayesopt_chain.core.state import State
from bayesopt_chain.precision import Dense
from bayesopt_chain.testing import assert_bitwise_equal, stationary_covariance
from tests.registry.samplers import TreePrecision
from tests.walk import end_of, walk

P = {"w": torch.ones(2, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)}
T = 0.3

OWN_NOISE = {
    "ubu": lambda: bc.samplers.ubu(0.1, 1.0, temperature=T),
    "lattice_walk": lambda: bc.samplers.lattice_walk(0.1, temperature=T),
    "sgnht": lambda: bc.samplers.sgnht(0.1, temperature=T),
    "badodab": lambda: bc.samplers.badodab(0.1, temperature=T),
    "sgfs": lambda: bc.samplers.sgfs(0.1, temperature=T, batch_size=1),
    "sghmc_euler": lambda: bc.samplers.sghmc_euler(0.1, temperature=T),
    "cyclical, lr inside": lambda: bc.samplers.cyclical(0.1, 4, 1, temperature=T, lr_inside=True),
}
CHANGES = {
    "gain": lambda: bc.links.scale(0.5),
    "schedule": lambda: bc.links.scale_by_schedule(lambda count: 0.5),
    "momentum": lambda: bc.add_momentum(0.5),
    "diagonal": lambda: bc.scale_by_preconditioner(2 * torch.ones(1)),
    "adam": lambda: bc.links.scale_by_adam(),
    "unknown": lambda: GradientTransformation(lambda p: (), lambda u, s, *, params=None, inplace=True: (u, s)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OWN_NOISE)
def test_a_sampler_with_noise_of_its_own_refuses_what_would_change_its_law(name, change):
    own, link, noise = OWN_NOISE[name](), CHANGES[change](), bc.inject_langevin_noise(T)
    for links in ((own, link), (link, own), (own, OWN_NOISE["ubu"]()), (own, noise)):
        with pytest.raises(ValueError, match=r"two samplers|noise of its own|nobody declared"):
            bc.chain(*links).init(P)


@pytest.mark.parametrize("name", OWN_NOISE)
def test_clipping_and_decay_may_stand_before_a_sampler_with_noise_of_its_own_and_nothing_behind(name):
    own, clip, decay = OWN_NOISE[name](), torchopt.clip_grad_norm(10.0), bc.links.add_decayed_weights(0.1)
    bc.chain(clip, decay, own, bc.swag(rank=0)).init(P)
    for behind in (clip, decay):
        with pytest.raises(ValueError, match="noise of its own"):
            bc.chain(own, behind).init(P)


def average(decay):
    """An exponential average by hand, which returns its state as its update."""

    def init(params):
        return optree.tree_map(torch.zeros_like, params)

    def update(updates, state, *, params=None, inplace=True):
        state = optree.tree_map(lambda m, g: decay * m + (1 - decay) * g, state, updates)
        return state, state

    return bc.with_response(GradientTransformation(init, update), bc.response.Linear((1 - decay,), (1.0, -decay)))


def test_a_declared_link_with_memory_follows_a_rising_learning_rate():
    """After a jump of lr by 30 the variance is what the library's own momentum has, to rounding, path by path."""
    lr = lambda count: torch.where(count % 20 < 10, 0.01, 0.3)  # noqa: E731
    links = average(0.9), bc.add_momentum(0.9, 0.9)
    paths = []
    for link in links:
        tx = bc.chain(link, bc.inject_langevin_noise(T), bc.scale_by_neg_lr(lr))
        torch.manual_seed(0)
        theta = torch.zeros(1000, dtype=torch.float64)
        state = tx.init(theta)
        if link is links[1]:  # an average dampens its first gradient too
            state = state.replace(0, state[0]._replace(count=tuple(c + 1 for c in state[0].count)))
        paths.append(torch.stack([x for x, _ in walk(tx, theta, lambda x: x, 60, state)]))
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-9, atol=1e-12)
    assert paths[0].square().mean(1).max() < 5 * T


def two_averages(first, second):
    """Two exponential averages in one link, by hand: a filter with two poles, beside a counter of its own."""

    def init(params):
        return {
            "x": optree.tree_map(torch.zeros_like, params),
            "y": optree.tree_map(torch.zeros_like, params),
            "n": torch.zeros(()),
        }

    def update(updates, state, *, params=None, inplace=True):
        x = optree.tree_map(lambda m, g: first * m + (1 - first) * g, state["x"], updates)
        y = optree.tree_map(lambda m, g: second * m + (1 - second) * g, state["y"], x)
        return y, {"x": x, "y": y, "n": state["n"] + 1}

    response = bc.response.Linear(((1 - first) * (1 - second),), (1.0, -first - second, first * second))
    return GradientTransformation(init, update), response


def test_a_declared_link_with_two_poles_samples_exactly_at_a_constant_rate_and_refuses_another():
    curvature = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
    links = bc.with_response(*two_averages(0.3, 0.2)), bc.inject_langevin_noise(T)
    got = stationary_covariance(bc.chain(*links, bc.scale_by_neg_lr(0.1)), curvature)
    torch.testing.assert_close(got, T * torch.linalg.inv(curvature), rtol=1e-10, atol=0)
    with pytest.raises(ValueError, match=r"neither SGD, momentum nor Nesterov.*constant lr"):
        bc.chain(*links, bc.scale_by_neg_lr(lambda count: 0.1 / (1 + count))).init(torch.zeros(2))


@pytest.mark.parametrize("first", [1 / 3, 0.2, 0.5])
def test_two_momenta_whose_spectrum_touches_zero_sample_exactly(first):
    second = (1 - first) / (1 + 3 * first)  # 1 - mu1 - mu2 - 3 mu1 mu2 = 0
    curvature = torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=torch.float64)
    tx = bc.chain(bc.add_momentum(first), bc.sgd(0.1, second, temperature=T))
    got = stationary_covariance(tx, curvature, tolerance=1e-8)
    torch.testing.assert_close(got, T * torch.linalg.inv(curvature), rtol=1e-8, atol=0)


def test_tied_leaves_are_refused_where_they_would_get_noise_twice():
    w = torch.ones(3)
    for build in (lambda: bc.sghmc(0.1, temperature=T), OWN_NOISE["sgnht"]):
        with pytest.raises(ValueError, match=r"\['a'\] and \['b'\] share memory"):
            build().init({"a": w, "b": w})
    bc.sgd(0.1).init({"a": w, "b": w})
    flat = torch.ones(6)
    bc.sghmc(0.1, temperature=T).init(list(flat.split(3)))  # neighbours in memory are two


def test_freezing_a_leaf_leaves_the_noise_of_the_others_alone():
    tx = bc.sgld(0.1, temperature=T)
    params = {"a": torch.zeros(5), "b": torch.zeros(7)}
    only = {"b": torch.zeros(7)}
    part, moved = bc.partition({"sampled": tx, "frozen": bc.sgd(0.0)}, {"a": "frozen", "b": "sampled"}), []
    for sampler, p in ((tx, params), (tx, only), (part, params)):
        torch.manual_seed(0)
        moved.append(sampler.update(p, sampler.init(p), params=p, inplace=False)[0])
    both, one, masked = moved
    assert torch.equal(both["b"], one["b"]) and torch.equal(both["b"], masked["b"])
    assert not torch.equal(both["a"], both["b"][:5]) and not masked["a"].any()


@pytest.mark.parametrize("front", [(), (torchopt.clip.clip_grad_norm(1.0),), (bc.add_momentum(0.5),)])
def test_a_leaf_that_no_link_turns_downhill_is_refused_beside_leaves_that_are_sampled(front):
    params, mask = {"a": torch.ones(2), "b": torch.ones(3), "c": None}, {"a": False, "b": True, "c": False}
    with pytest.raises(ValueError, match=r"1 leaves that it does not sample would climb the loss.*bc\.sgd\(0\.0\)"):
        bc.chain(*front, bc.masked(bc.sghmc(0.1, temperature=T), mask)).init(params)
    with pytest.raises(ValueError, match=r"1 leaves that it does not sample would climb the loss"):
        bc.masked(OWN_NOISE["sgnht"](), mask).init(params)
    bc.chain(*front, bc.masked(bc.sghmc(0.1, temperature=0.0), mask)).init(params)  # as TorchOpt does
    for rest, downhill in ((bc.sgd(0.1), True), (bc.links.scale(0.0), False)):
        others = bc.masked(rest, {"a": True, "b": False, "c": False})
        tx = bc.chain(*front, bc.masked(bc.sgld(1.0, temperature=T), mask), others)
        assert bool((tx.update({**params}, tx.init(params), params=params)[0]["a"] < 0).all()) is downhill


def test_stacking_copies_of_a_state_is_refused_and_fork_gives_each_a_key_of_its_own():
    tx, params = bc.sghmc(0.1, temperature=T), {"w": torch.zeros(4)}
    state = tx.init(params)
    optimizer = bc.SGD([torch.zeros(4, requires_grad=True)], lr=0.1, temperature=T)
    for copied, words in ((state, r"one key.*bc\.fork"), (optimizer.state_dict(), r"bc\.fork")):
        with pytest.raises(ValueError, match=words):
            bc.stack([copied, copy.deepcopy(copied)])
    states = bc.fork(state, 3)
    keys = [*(s[1].key.item() for s in states), *bc.fork(bc.stack(states), 1)[0][1].key.tolist()]
    assert len(set(keys)) == 6 and all(type(s) is State for s in states)
    stacked = bc.stack(states)
    updates, _ = torch.vmap(lambda s: tx.update({"w": torch.ones(4)}, s, params=params, inplace=False))(stacked)
    assert not torch.equal(updates["w"][0], updates["w"][1])
    for twin in states:
        assert_bitwise_equal(list(twin[0].trace), list(state[0].trace))
    groups = bc.fork(optimizer.state_dict(), 2)
    assert isinstance(groups[0], tuple) and groups[0][0][0].key != groups[1][0][0].key
    with pytest.raises(ValueError, match=r"whose method fork\(\) renews the key"):
        bc.fork(bc.optim.SGLD([torch.zeros(4, requires_grad=True)], lr=0.1, temperature=T).state_dict(), 2)


DIFFERENTIATED = {
    "sgld, order 1": lambda lr, t: bc.sgld(lr, temperature=t, order=1),
    "sgld": lambda lr, t: bc.sgld(lr, temperature=t),
    "sghmc": lambda lr, t: bc.sghmc(lr, temperature=t),
    "nesterov": lambda lr, t: bc.sgd(lr, 0.9, nesterov=True, temperature=t),
    "adam": lambda lr, t: bc.adam(lr, temperature=t),
    "rmsprop": lambda lr, t: bc.rmsprop(lr, momentum=0.5, temperature=t),
    "preconditioner": lambda lr, t: bc.chain(scaled_by(lr), bc.sgld(0.1, temperature=t)),
    "preconditioner, order 1": lambda lr, t: bc.chain(scaled_by(lr), bc.sgld(0.1, temperature=t, order=1)),
    "preconditioner and momentum": lambda lr, t: bc.chain(scaled_by(lr), bc.sghmc(0.1, temperature=t)),
}


def scaled_by(lr):
    return bc.scale_by_preconditioner([torch.stack([lr, 20 * lr])])


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_derivatives_by_lr_temperature_and_data_at_positive_temperature_are_right(name):
    """Autograd through three updates against central differences, by a preconditioner too; the noise of one key is part of the
    function."""
    params = [torch.tensor([0.3, -0.4], dtype=torch.float64)]
    key = bc.sgld(0.1, temperature=T).init(params)[0].key

    def value(lr, temperature, x):
        tx = DIFFERENTIATED[name](lr, temperature)
        state = tx.init(params)
        (i,) = [i for i, s in enumerate(state) if hasattr(s, "key")]
        state = state.replace(i, state[i]._replace(key=key.clone()))
        [theta], _ = end_of(tx, params, lambda p: [p[0] ** 3 + x], 3, state)
        return (theta * torch.tensor([1.0, 2.0], dtype=torch.float64)).sum()

    at = [torch.tensor(v, dtype=torch.float64) for v in (0.1, 0.3, [0.5, -0.2])]
    torch.autograd.gradcheck(value, [x.requires_grad_() for x in at], eps=1e-6, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("build", [lambda: bc.sghmc(0.1, temperature=T), OWN_NOISE["sgnht"]])
@pytest.mark.parametrize("randomness", ["error", "different"])
def test_one_key_for_all_lanes_of_vmap_is_refused(build, randomness):
    tx = build()
    state = tx.init([torch.zeros(2)])
    with pytest.raises(ValueError, match="one for all lanes of vmap"):
        torch.vmap(lambda x: tx.update([x], state, inplace=False)[0][0], randomness=randomness)(torch.randn(4, 2))


def test_meta_optimizers_extract_and_recover_replays_the_noise():
    net = torch.nn.Linear(3, 1)
    optimizer = bc.meta.MetaSGD(net, lr=0.1, temperature=T)
    x = torch.randn(8, 3)
    before = torchopt.extract_state_dict(optimizer), torchopt.extract_state_dict(net, by="copy")
    outs = []
    for _ in range(2):
        torchopt.recover_state_dict(optimizer, before[0])
        torchopt.recover_state_dict(net, before[1])
        for _ in range(2):
            optimizer.step(net(x).square().mean())
        outs.append(net(x).detach())
    assert torch.equal(*outs)


@pytest.mark.parametrize("vmapped", [False, True])
def test_a_loss_that_never_touches_params_is_refused(vmapped):
    module = torch.nn.Linear(2, 1)
    tx, params = bc.sghmc(0.1, temperature=T), {k: v.detach() for k, v in module.named_parameters()}
    step = bc.make_step(lambda p, batch: module(batch).square().mean(), tx)  # the module's own parameters
    state = tx.init(params)
    if vmapped:
        step, params = bc.parallel(step, 2), bc.stack([params, params])
        state = step.init(tx, params)
    with pytest.raises(ValueError, match="does not depend on params"):
        step(params, state, torch.ones(4, 2))


def test_the_empty_chain_is_torchopts_identity_and_chain_flat_exists():
    assert bc.chain() == torchopt.base.identity() and hash(bc.chain()) == hash(torchopt.base.identity())
    assert bc.chain(bc.links.scale(2.0)) != torchopt.base.identity()
    flat = bc.chain.flat(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))
    assert flat == bc.chain(bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))


def test_a_state_is_written_flat_by_name_and_read_back_in_place():
    tx = bc.sghmc(0.1, temperature=T)
    _, state = tx.update(optree.tree_map(torch.clone, P), tx.init(P), params=P, inplace=False)
    flat = bc.state_dict(state)
    assert "0.Momentum.trace['w']" in flat and "1.LangevinNoise.key" in flat
    assert all(type(t) is torch.Tensor for t in flat.values())
    fresh = tx.init(P)
    kept = [t.data_ptr() for t in optree.tree_leaves(fresh)]
    bc.load_state_dict(fresh, {k: t.clone() for k, t in flat.items()})
    assert kept == [t.data_ptr() for t in optree.tree_leaves(fresh)]
    assert_bitwise_equal(fresh, state)
    before = copy.deepcopy(fresh)
    for wrong, words in (
        ({k: t for k, t in flat.items() if "'w'" not in k}, r"0\.Momentum\.trace\['w'\].*missing"),
        ({**flat, "1.LangevinNoise.key": torch.zeros(2)}, r"1\.LangevinNoise\.key"),
    ):
        with pytest.raises(ValueError, match=words):
            bc.load_state_dict(fresh, wrong)
    assert_bitwise_equal(fresh, before)


def test_a_dense_preconditioner_takes_schedules_and_stands_before_the_momentum():
    curvature = torch.tensor([[2.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.7]], dtype=torch.float64)
    for lr, t in ((0.3, T), (lambda c: 0.3, T), (torch.tensor(0.3), torch.tensor(T, dtype=torch.float64))):
        tx = bc.samplers.langevin_with_precision(TreePrecision(), lr, 0.8, temperature=t)
        got = stationary_covariance(tx, curvature, P)
        torch.testing.assert_close(got, T * torch.linalg.inv(curvature), rtol=1e-9, atol=1e-11)
    late = bc.chain(bc.add_momentum(0.5), bc.scale_by_preconditioner(TreePrecision()), bc.sgd(0.1, temperature=T))
    with pytest.raises(ValueError, match="before the momentum"):
        late.init(P)


@dataclass(frozen=True)
class Silent(Link):
    """A metric that learns, and never asks for the noise that enters inside it."""

    @property
    def response(self):
        return bc.response.Preconditioner(learns=True)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_metric_that_learns_and_does_not_ask_for_the_noise_is_refused(inplace):
    tx = bc.chain(bc.Chain((Silent(),)), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(0.1))
    with pytest.raises(ValueError, match=r"Silent.*context\.with_noise"):
        tx.update(optree.tree_map(torch.ones_like, P), tx.init(P), params=P, inplace=inplace)


W = {"w": torch.ones(2)}
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


WHEN_BUILT = [
    *(
        ("temperature", ValueError, lambda build=build, value=value: build(value))
        for value in (-1.0, NAN, INF, torch.tensor(-1.0), torch.tensor(NAN), torch.ones(2))
        for build in (
            lambda t: bc.inject_langevin_noise(t),
            lambda t: bc.sgd(0.1, temperature=t),
            lambda t: bc.adam(temperature=t),
            lambda t: bc.sgld(0.1, temperature=t),
            lambda t: bc.SGD([torch.ones(1)], lr=0.1, temperature=t),
        )
    ),
    *(("temperature", TypeError, lambda t=t: bc.inject_langevin_noise(t)) for t in ("hot", None, True)),
    *(("temperature", TypeError, lambda sampler=sampler: sampler(0.1)) for sampler in (bc.sgld, bc.sghmc)),
    *(("lr must be", ValueError, lambda lr=lr: bc.sgd(lr, temperature=1.0)) for lr in (-0.1, NAN)),
    *(("lr must be", TypeError, lambda lr=lr: bc.sgd(lr)) for lr in ("0.1", None)),
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
]
AT_INIT = [
    ("lr", lambda: bc.sgd(INF, temperature=1.0)),
    *(
        ("lr", lambda lr=lr: bc.sgd(lr, temperature=1.0))
        for lr in (torch.tensor(INF), torch.ones(1), lambda count: torch.ones(2))
    ),
    *(("temperature", lambda t=t: bc.sgd(0.1, temperature=lambda count: t)) for t in (NAN, -1.0, INF)),
    *(("lr", lambda lr=lr: bc.sgd(lambda count: lr, temperature=1.0)) for lr in (NAN, -1.0, INF)),
    *((r"momentum must be a number in \[0, 1\)", lambda mu=mu: bc.sgd(0.1, mu, temperature=1.0)) for mu in (1.0, 1.5)),
    ("weight_decay must", lambda: bc.sgd(0.1, weight_decay=INF, temperature=1.0)),
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
    (
        "scale_by_preconditioner.* mixes its leaves, so the same links must act on all of them",
        lambda: bc.chain(
            bc.scale_by_preconditioner(TreePrecision()),
            bc.masked(bc.add_momentum(0.5), {"w": True, "v": False}),
            bc.sgd(0.1, temperature=1.0),
        ).init(BOTH),
    ),
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
]


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
    build().init(W)


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
    dense = bc.samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=T)
    for tx in (bc.sghmc(0.1, temperature=T), dense, *(build() for build in OWN_NOISE.values())):
        with pytest.raises(error, match=words):
            tx.init(params)
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
    state = tx.init(W)
    before = [t.clone() for s in state for t in (s.trace if hasattr(s, "trace") else ())]
    with pytest.raises(ValueError, match=words):
        tx.update(grads, state, params=W, inplace=inplace)
    assert_bitwise_equal(list(state[0].trace), before)
    assert state[1].step == 0


THREE = {"w": torch.ones(3)}
BOTH = {"w": torch.ones(3), "v": torch.ones(3)}
HEATED = bc.sghmc(0.1, temperature=T)
TURNED = bc.chain(bc.inject_langevin_noise(T), bc.add_momentum(0.9), bc.scale_by_neg_lr(0.1))


@pytest.mark.parametrize(
    "params, state, words",
    [
        (W, lambda: HEATED.init(THREE), "the state has"),
        (W, lambda: HEATED.init(THREE)[:1], "state: must be what init"),
        (BOTH, lambda: HEATED.init(THREE), r"the leaves \(\['v'\], \['w'\]\), the state is for \(\['w'\]\)"),
        (THREE, lambda: HEATED.init(BOTH), r"the leaves \(\['w'\]\), the state is for \(\['v'\], \['w'\]\)"),
        (P, lambda: TURNED.init(P), r"LangevinNoise, Momentum, Scale\), this chain has \(Momentum"),
        (P, lambda: bc.adam(0.1, temperature=T).init(P), "this chain has"),
    ],
)
def test_a_state_of_other_parameters_or_of_another_chain_is_refused_with_both_sides_named(params, state, words):
    with pytest.raises(ValueError, match=words):
        HEATED.update(params, state(), params=params)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_group_that_does_not_fit_leaves_the_other_groups_untouched(inplace):
    tx = bc.partition({"h": bc.sghmc(0.1, temperature=1.0), "k": bc.sghmc(0.2, temperature=1.0)}, {"a": "h", "b": "k"})
    params = {"a": torch.ones(2), "b": torch.ones(3)}
    grads, state = {"a": torch.ones(2), "b": torch.ones(4)}, tx.init(params)
    before = copy.deepcopy((params, grads, state))
    for given in ({"params": params}, {}):
        with pytest.raises(ValueError, match="leaf 1"):
            tx.update(grads, state, inplace=inplace, **given)
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
        state = tx.init(W)
        _, state = tx.update({"w": torch.ones(2)}, state, params=W, inplace=False)
        dial.fill_(value)
        g, before = {"w": torch.ones(2)}, copy.deepcopy(state)
        with pytest.raises(ValueError, match=r"(temperature|lr): its value at this step"):
            tx.update(g, state, params=W, inplace=inplace)
        assert_bitwise_equal((g, state), ({"w": torch.ones(2)}, before))


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_rate_that_turns_wrong_where_nobody_may_look_turns_to_nan(value):
    tx = bc.sgd(lambda count: torch.where(count < 1, 0.1, value), 0.9, temperature=1.0)
    state = bc.stack([tx.init(W), tx.init(W)])
    for _ in range(3):
        updates, state = torch.vmap(lambda s: tx.update({"w": torch.ones(2)}, s, params=W, inplace=False))(state)
    assert not torch.isfinite(updates["w"]).any()


def test_a_cold_group_may_hold_what_cannot_be_sampled():
    params = {"a": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    bc.partition({"hot": bc.sgd(0.1, temperature=1.0), "cold": bc.sgd(0.1)}, {"a": "hot", "n": "cold"}).init(params)


@pytest.mark.filterwarnings("error")
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
    bc.sghmc(0.1, temperature=1.0).init(ones)
    bc.sghmc(1e-3, temperature=1e-6).init({"w": torch.ones(4)})


@pytest.mark.filterwarnings("error")
def test_parameters_without_an_address_are_not_asked_for_one():
    with FakeTensorMode():
        for tx in (bc.sghmc(0.1, temperature=1.0), bc.inject_langevin_noise(1.0, lr=0.1, momentum=0.0)):
            tx.init({"w": torch.ones(2), "b": torch.ones(1, dtype=torch.bfloat16)})


# Wrong usage: one error each, naming the argument, what came, and what to do


OF_ONE, OF_TWO = torch.zeros(1), torch.zeros(2)
PAIR = {"a": torch.zeros(2), "b": torch.zeros(1)}


def updated(tx, params=OF_TWO, grads=None, **keywords):
    """One update, at a gradient of ones unless another is given."""
    grads = torch.ones_like(params) if grads is None else grads
    return tx.update(grads, tx.init(params), params=params, **keywords)


def behind(link, tx, params=OF_TWO):
    """The chain of both, for these parameters."""
    return bc.chain(link, tx).init(params)


def fisher(**more):
    return samplers.sgfs(0.1, **{"temperature": 1.0, "batch_size": 1, **more})


def replicas(temperatures=(1.0, 2.0), **more):
    return samplers.replica_exchange(0.1, temperatures=temperatures, **more)


def particles(**more):
    return samplers.svgd(0.1, temperature=1.0, **more)


def contour(low=0.0, high=1.0, **more):
    return samplers.scale_by_contour(1.0, low, high, **more)


def microcanonical(length=1.0, **more):
    return samplers.mclmc(0.1, length, temperature=1.0, **more)


def cycles(*args, **more):
    return samplers.cyclical(0.1, *args, temperature=1.0, **more)


DECAYING = bc.sgd(0.1, weight_decay=0.1)
PRECISION = lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0)  # noqa: E731
PRECISE = bc.scale_by_preconditioner(Dense(torch.eye(2), {"a": OF_TWO}, torch.tensor(1.0)))
NO_LIMIT = r"temperature must be a positive.*no limit as T -> 0; use bc\.sghmc"
SHORTER = r"burn_in must be shorter than the cycle \(100 updates\), got"
FLATTENED = r"scale_by_contour: .* stands in front of it"
LOSSES = r"update needs loss=.*\[2\], got"

VALUES = [
    *((lambda build=build: build().init(W), words) for words, build in AT_INIT),
    *(
        (lambda tx=tx: tx.init(W, like=bc.adam(0.1).init(W)), "like=")
        for tx in (bc.sghmc(0.1, temperature=1.0), bc.adamax(0.1))
    ),
    (lambda: DECAYING.update(W, DECAYING.init(W)), "params=params"),
    *(
        (lambda loss=loss: bc.make_step(loss, DECAYING)(W, DECAYING.init(W), None), words)
        for loss, words in (
            (lambda p, b: p["w"], r"shape \(2,\)"),
            (lambda p, b: 1.0, "float"),
            (lambda p, b: (p["w"].sum(), 1, 2), "tuple of 3"),
            (lambda p, b: torch.tensor(1.0), "depend"),
            (lambda p, b: (p["w"] * (1 + 1j)).sum(), r"must return a real scalar tensor .*complex64"),
        )
    ),
    (lambda: samplers.baoab(-0.1, 1.0, temperature=1.0), "step_size must be a positive, finite number, got -0.1"),
    (lambda: samplers.obabo(0.1, 0.0, temperature=1.0), "friction must be a positive, finite number, got 0.0"),
    (lambda: samplers.ubu(0.1, NAN, temperature=1.0), "ubu: friction must be "),
    (
        lambda: samplers.ubu(0.1, 1.0, temperature=-1.0),
        "temperature must be a non-negative, finite number or .*, got -1.0",
    ),
    (lambda: samplers.sghmc_euler(0.1, 1.0, temperature=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
    (lambda: samplers.sghmc_euler(0.0, temperature=1.0), r"lr must be a positive"),
    (lambda: samplers.sghmc_from_friction(0.1, 1.0, beta=100.0), "beta"),
    (lambda: samplers.sgnht(0.1, 1.0, temperature=1.0), "sgnht: momentum must be"),
    (lambda: samplers.sgnht(0.1, 0.0, temperature=1.0), r"sgnht: momentum must lie in \(0, 1\), got 0.0.*use bc\.sgld"),
    (lambda: samplers.sgnht(0.1, temperature=1.0, thermostat_mass=0.0), "thermostat_mass must be a positive"),
    *((lambda zero=zero: samplers.sgnht(0.1, temperature=zero), NO_LIMIT) for zero in (0, 0.0, torch.zeros(()))),
    *((lambda zero=zero: samplers.badodab(0.1, temperature=zero), NO_LIMIT) for zero in (0, 0.0, torch.zeros(()))),
    (lambda: samplers.badodab(0.1, -1.0, temperature=1.0), "badodab: friction must be "),
    (lambda: samplers.adaptive_sghmc(0.1, temperature=1.0, burn_in=0), "got 0; nothing is learned without a burn-in"),
    (lambda: fisher(temperature=0.0), r"sgfs: temperature must be a positive.*use bc\.sgd"),
    (lambda: fisher(batch_size=0), "batch_size must be "),
    (lambda: fisher(decay=1.0), r"decay must be a number in \[0, 1\)"),
    (lambda: updated(fisher()), "needs gradient_variance=, the variance of single-datum gradients"),
    (
        lambda: samplers.langevin_with_precision(TreePrecision(), 0.1, temperature=1.0, order=3),
        r"order must be a whole number in \[1, 2\], got 3",
    ),
    (
        lambda: updated(PRECISION(), PAIR, {"a": torch.ones(2), "b": None}),
        "every parameter needs a gradient, since it couples them",
    ),
    (
        lambda: bc.partition({"a": PRECISE, "b": bc.sgd(0.1)}, {"a": "a", "b": "b"}).init(PAIR),
        r"its precision is of other parameters .*with \(\) in the place of every leaf that is left out",
    ),
    (lambda: samplers.cyclical(NAN, 10, 5, temperature=1.0), "cyclical: lr"),
    (lambda: cycles(10, 5, 1.5).init(OF_TWO), "momentum must be"),
    *((lambda inside=inside: cycles(100, 100, lr_inside=inside), f"{SHORTER} 100") for inside in (False, True)),
    (lambda: cycles(100, 120), f"{SHORTER} 120"),
    (lambda: cycles(100, -1), "burn_in must be a whole number"),
    (lambda: cycles(0, 0), "cycle must be a whole number"),
    (lambda: samplers.lattice_walk(-1.0, temperature=1.0), "lattice_walk: lr"),
    (
        lambda: samplers.lattice_walk(0.1, temperature=0.0),
        r"lattice_walk: temperature must be a positive.*use bc\.sgd to optimise",
    ),
    (lambda: replicas((1.0,)), "temperatures must hold at least two chains, got 1"),
    (lambda: replicas((1.0, 1.0)), "temperatures must increase"),
    (lambda: replicas((0.0, 1.0)), r"temperatures must be a list of positive"),
    (lambda: replicas(loss_variance=-1.0), "loss_variance"),
    (lambda: replicas(correction_factor=0.5), "correction_factor"),
    (lambda: replicas().init(torch.zeros(3)), r"stacked for 2 chains.*\(3,\)"),
    (lambda: updated(replicas(), torch.zeros(2, 3)), f"{LOSSES} nothing"),
    (lambda: updated(replicas(), torch.zeros(2, 3), loss=torch.zeros(())), rf"{LOSSES} shape \(\)"),
    # swaps are accepted by the loss alone, and of all parameters
    *(
        (lambda front=front: behind(front, replicas(), torch.zeros(2, 3)), r"replica_exchange: .* into the loss")
        for front in (bc.links.add_decayed_weights(0.1), bc.links.add_gaussian_prior(1.0, n=10))
    ),
    *(
        (
            lambda tx=tx: bc.partition({"x": tx(), "y": tx()}, {"a": "x", "b": "y"}).init(PAIR),
            "a mask or a group leaves",
        )
        for tx in (replicas, contour)
    ),
    (
        lambda: replicas().update({"w": None}, replicas().init({"w": OF_TWO}), params={"w": OF_TWO}, loss=OF_TWO),
        "every parameter needs a gradient",
    ),
    (lambda: particles().init([torch.zeros(2, 1), torch.zeros(3)]), "same number in every leaf"),
    (lambda: particles(bandwidth=0.0), "bandwidth"),
    (
        lambda: behind(samplers.scale_by_stein_kernel(1.0), bc.sgld(0.1, temperature=1.0), torch.zeros(3, 2)),
        "its particles share gradients",
    ),
    # a gain of 1/2 in front of it samples twice the temperature: the repulsion is not scaled
    *(
        (
            lambda front=front: behind(front, particles(), torch.zeros(5, 2)),
            r"scale_by_stein_kernel: .* another temperature",
        )
        for front in (bc.links.scale(0.5), bc.links.scale_by_rms(), bc.add_momentum(0.5))
    ),
    (lambda: contour(2.0, 1.0), "low must lie below high"),
    (lambda: contour(bins=1), "bins"),
    (
        lambda: updated(samplers.contour_sgld(0.1, 0.0, 1.0, temperature=1.0)),
        r"contour: update needs loss=.*bc\.make_step passes it",
    ),
    (lambda: samplers.contour_weight(bc.sgd(0.1), (), torch.zeros(())), "no link of .* is scale_by_contour"),
    (lambda: behind(bc.links.add_decayed_weights(0.1), contour()), FLATTENED),
    (lambda: behind(bc.links.add_gaussian_prior(1.0, n=10), contour()), FLATTENED),
    (lambda: microcanonical().init(OF_ONE), "mclmc: needs at least 2 parameters"),
    *((lambda bad=bad: microcanonical(bad), "length") for bad in (0.0, -1.0, NAN)),
    (lambda: behind(bc.add_momentum(0.9), microcanonical(), torch.zeros(3)), "noise of its own"),
    (
        lambda: samplers.step_growth(
            lambda p, batch: p.sum(), bc.sgd(0.1), OF_TWO, bc.sgd(0.1).init(OF_TWO), (), steps=1
        ),
        "step_growth: steps must be a whole number, at least 2, got 1",
    ),
    (lambda: s.cosine(1.0, 0), "cosine: steps"),
    (lambda: s.cosine(NAN, 5), "cosine: init"),
    (lambda: s.cosine_restarts(1.0, 5, decay=0.0), "decay"),
    (lambda: s.polynomial(1.0, 5, power=-1.0), "power"),
    (lambda: s.robbins_monro(1.0, gamma=0.5), r"gamma must be a number in \(0.5, 1\]"),
    (lambda: s.robbins_monro(0.0), "a must be a positive"),
    (lambda: s.piecewise((5,), (1.0,)), "one count fewer"),
    (lambda: s.piecewise((5, 5), (1.0, 0.5, 0.1)), "increasing"),
    (lambda: s.join((s.constant(1.0), s.constant(0.5)), (0,)), "positive and increasing"),
]
TYPES = [
    (
        lambda: samplers.langevin_with_precision(torch.eye(2), 0.1, temperature=1.0),
        "precision has no sqrt_solve.*got Tensor; pass a precision",
    ),
    (lambda: microcanonical(precision=3.0), "mclmc: precision has no solve"),
    (lambda: bc.make_step(None, torch.nn.ReLU()), "make_step: tx must be a gradient transformation, got ReLU"),
    (
        lambda: stationary_covariance(samplers.lattice_walk(0.1, temperature=1.0), torch.eye(1, dtype=torch.float64)),
        "draws philox_uniforms, which is not a normal",
    ),
]


@pytest.mark.parametrize(
    ("words", "error", "ask"),
    [
        *WHEN_BUILT,
        *((words, ValueError, ask) for ask, words in VALUES),
        *((words, TypeError, ask) for ask, words in TYPES),
    ],
)
def test_a_wrong_argument_is_named(ask, words, error):
    with pytest.raises(error, match=words):
        ask()


def test_what_stands_rightly_in_front_or_behind_is_taken():
    bc.chain(contour(), bc.links.add_decayed_weights(0.1), bc.sgld(0.1, temperature=1.0)).init(OF_TWO)
    behind(bc.links.add_gaussian_prior(1.0, n=10), samplers.psgld(0.1, temperature=1.0))
    behind(bc.links.scale(0.5), samplers.svgd(0.1, temperature=0.0), torch.zeros(5, 2))
    behind(torchopt.clip_grad_norm(1.0), particles(), torch.zeros(5, 2))
