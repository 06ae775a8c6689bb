"""An engine gives the bits of its links one by one: ``update`` and ``make_step``, pure and in place, under any schedule."""

import copy
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import optree
import pytest
import torch
import torchopt
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import bayesopt_chain as bc
from bayesopt_chain.engine import engine as engine_module
from bayesopt_chain.engine import sweep_cpu
from bayesopt_chain.engine.sweep_cpu import sweep_kernel
from bayesopt_chain.links.langevin_noise import _one_leaf
from bayesopt_chain.matching.filters import Scheduled
from bayesopt_chain.random import compiled

pytestmark = pytest.mark.skipif(sweep_kernel() is None, reason="needs a C++ compiler")
SHAPES = [(), (0,), (3,), (2, 3), (16,), (33,), (5, 64), (700,)]
RATES = {
    "number": 0.05,
    "tensor": torch.tensor(0.05),
    "wide tensor": torch.tensor(0.05, dtype=torch.float64),
    "cosine": bc.schedules.cosine(0.05, 6),
    "power": bc.schedules.polynomial(0.05, 6, 1.5),
    "with a stop": bc.schedules.piecewise((1, 2), (0.05, 0.0, 0.02)),
    "rising function": lambda count: 0.01 * (1.0 + count),
}
TEMPERATURES = {
    "number": 0.3,
    "tensor": torch.tensor(0.3),
    "tensor of 0": torch.tensor(0.0),
    "piecewise": bc.schedules.piecewise((1, 3), (0.3, 0.0, 0.5)),
}
DECAY, MOMENTUM = bc.links.add_decayed_weights(0.1), bc.add_momentum(0.9)
CHAINS = {
    "sgd": lambda lr, t: bc.sgd(lr),
    "momentum": lambda lr, t: bc.sgd(lr, 0.9, maximize=True),
    "decayed, nesterov": lambda lr, t: bc.sgd(lr, 0.9, weight_decay=0.1, nesterov=True, maximize=True),
    "sgld": lambda lr, t: bc.chain(DECAY, bc.inject_langevin_noise(t), bc.scale_by_neg_lr(lr)),
    "sghmc": lambda lr, t: bc.chain(DECAY, MOMENTUM, bc.inject_langevin_noise(t), bc.scale_by_neg_lr(lr)),
    "white sgld": lambda lr, t: bc.samplers.sgld(lr, temperature=t, order=1),
    "sghmc, maximized": lambda lr, t: bc.sgd(lr, 0.9, maximize=True, temperature=t),
    "localised": lambda lr, t: bc.chain(bc.links.add_localization(0.5, 0.2), bc.sghmc(lr, temperature=t)),
    "white": lambda lr, t: bc.chain(MOMENTUM, bc.inject_langevin_noise(t, order=1), bc.scale_by_neg_lr(lr)),
    "little momentum": lambda lr, t: bc.sghmc(lr, 0.03, temperature=t),
    "nesterov": lambda lr, t: bc.sgd(lr, 0.9, nesterov=True, weight_decay=0.1, temperature=t),
    "adam": lambda lr, t: bc.adam(lr, eps_root=1e-3, weight_decay=0.1, maximize=True, temperature=t),
    "adam at 0": lambda lr, t: bc.adam(lr),
    "adam without a moment": lambda lr, t: bc.adam(lr, (0.0, 0.9), temperature=t, freeze_after=2),
    "white adam": lambda lr, t: bc.samplers.adam_sghmc(lr, temperature=t, order=1),
    "rmsprop": lambda lr, t: bc.rmsprop(lr, weight_decay=0.1, temperature=t),
    "frozen rmsprop": lambda lr, t: bc.rmsprop(lr, momentum=0.9, temperature=t, freeze_after=2),
    "rmsprop, nesterov": lambda lr, t: bc.rmsprop(lr, momentum=0.9, nesterov=True),
    "clipped": lambda lr, t: bc.chain(torchopt.clip.clip_grad_norm(0.7), bc.sghmc(lr, temperature=t)),
    "groups": lambda lr, t: bc.partition(
        {"a": bc.sghmc(lr, temperature=t), "b": bc.sgd(lr, temperature=t)},
        lambda tree: ["ab"[k % 2] for k in range(len(tree))],
    ),
}


def walk(tx, params, gradients, form):
    """Parameters and states of a few steps."""
    torch.manual_seed(0)
    params, gradients, state, out = copy.deepcopy(params), copy.deepcopy(gradients), tx.init(params), []
    inplace = form.endswith("in place")
    step = bc.make_step(lambda p, g: sum((x * y).sum() for x, y in zip(p, g) if y is not None), tx, inplace=inplace)
    for g in gradients:
        if form.startswith("update"):
            u, state = tx.update(g, state, params=params, inplace=inplace)
            params = torchopt.apply_updates(params, u, inplace=inplace)
        else:
            params, state, _ = step(params, state, g)
        out.append(copy.deepcopy((params, state)))
    return out


@contextmanager
def link_by_link():
    """Without a kernel the links act by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "sweep_kernel", lambda: None)
        yield


@given(
    name=st.sampled_from(sorted(CHAINS)),
    lr=st.sampled_from(sorted(RATES)),
    temperature=st.sampled_from(sorted(TEMPERATURES)),
    form=st.sampled_from(["update", "update in place", "step", "step in place"]),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=2, max_size=5),
    dtypes=st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64), (torch.bfloat16,)]),
    missing=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3),
    seed=st.integers(0, 2**31),
)
def test_an_engine_has_the_bits_of_its_links(name, lr, temperature, form, shapes, dtypes, missing, seed):
    torch.manual_seed(seed)
    tx = CHAINS[name](RATES[lr], TEMPERATURES[temperature])
    params = [torch.randn(shape).to(dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    gradients = [[torch.randn(p.shape).to(p.dtype) for p in params] for _ in range(4)]
    for step, leaf in missing if name != "clipped" and form.startswith("update") else ():
        if leaf < len(params):
            gradients[step][leaf] = None
    mine = walk(tx, params, gradients, form)
    with link_by_link():
        want = walk(tx, params, gradients, "update")
    for x, y in zip(optree.tree_leaves(mine), optree.tree_leaves(want), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


@given(
    order=st.sampled_from([1, 2]),
    mu=st.sampled_from([0.0, 0.03, 0.9]),
    decay=st.sampled_from([0.0, 0.2]),
    gain=st.floats(0.1, 3.0),
    rates=st.lists(st.one_of(st.just(0.0), st.just(0.1), st.floats(1e-4, 1.0)), min_size=3, max_size=8),
    temperatures=st.lists(st.one_of(st.just(0.0), st.just(0.3), st.floats(1e-4, 1.0)), min_size=8, max_size=8),
    behind=st.booleans(),
    deferred=st.sampled_from([0.0, 0.7]),
)
def test_the_numbers_of_a_schedule_are_those_of_the_law_in_every_bit(
    order, mu, decay, gain, rates, temperatures, behind, deferred
):
    process = Scheduled(((gain, mu),), 0.7, order, decay if mu else 0.0)
    deferred = deferred if mu and order == 2 else 0.0
    rule = (ctypes.c_double * 10)(-1.0, mu, 0.0, gain, mu, 0.7, process.decay, order, behind, deferred)
    last, law = torch.zeros(1, 5, dtype=torch.float64), compiled.load(sweep_cpu._SOURCE).numbers
    for rate, temperature in zip(rates, temperatures):
        (k,), scale, want = _one_leaf(process, temperature, 1.0, rate if behind else 1.0, *last[0].tolist())
        move, after = (ctypes.c_double * 9)(), (ctypes.c_double * 5)()
        law(rule, ctypes.c_double(rate), ctypes.c_double(temperature), ctypes.c_void_p(last.data_ptr()), move, after)
        white = (0.7 * k.current, 0.0, 1.0, deferred * k.share, 1.0 if scale is None else scale, 0.0)
        matched = (k.current, k.previous, 0.7, 0.0, 1.0 if scale is None else scale, 1.0 if mu or k.moves else 2.0)
        assert [*move] == [-rate, mu, 0.0, *(white if order == 1 or deferred else matched)]
        assert [*after] == [*want]
        last = torch.tensor([[*after]], dtype=torch.float64)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", ["momentum", "sghmc", "adam"])
def test_a_step_finds_the_rate_of_its_counters_whatever_state_the_last_one_had_in_any_thread(name, inplace, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    tx, grads = CHAINS[name](bc.schedules.cosine(0.05, 3000), 0.3), [torch.ones(3), torch.ones(2)]

    def interleaved(in_turn):
        torch.manual_seed(0)
        params = [[torch.zeros(3), torch.zeros(2)] for _ in range(5)]
        states = [*map(tx.init, params)]
        for state, counts in zip(states, [(0, 0), (1022, 1022), (5, 1023), (1023, 5), (2**40, 2**40)]):
            for count, n in zip(state[-1].count, counts):
                count.fill_(n)

        def turn(k):
            for _ in range(10):
                u, states[k] = tx.update([*map(torch.clone, grads)], states[k], params=params[k], inplace=inplace)
                params[k] = torchopt.apply_updates(params[k], u, inplace=inplace)

        for _ in range(8):
            assert [*in_turn(turn, range(5))] == [None] * 5
        return optree.tree_leaves((params, states))

    with link_by_link():
        want = interleaved(map)
    with ThreadPoolExecutor(5) as pool:
        for in_turn in (map, pool.map):
            assert all(map(torch.equal, interleaved(in_turn), want))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_large_leaves_and_threads_change_no_bit(threads, momentum, any_threads):
    torch.set_num_threads(threads)
    params = [torch.randn(n) for n in (2**14 + 5, 64, 3 * 2**14)]
    gradients, tx = [[torch.randn_like(p) for p in params] for _ in range(2)], bc.sgd(0.05, momentum, temperature=0.1)
    mine = walk(tx, params, gradients, "step in place")
    with link_by_link():
        want = walk(tx, params, gradients, "update")
    assert all(map(torch.equal, optree.tree_leaves(mine), optree.tree_leaves(want)))


@pytest.mark.parametrize("lr", ["number", "cosine"])
@pytest.mark.parametrize("name", ["sgd", "white sgld", "localised", "nesterov", "sghmc, maximized", "rmsprop"])
def test_what_the_kernel_of_a_device_does_not_know_is_moved_all_the_same(name, lr, monkeypatch):
    monkeypatch.setattr(engine_module, "_has_device_kernel", lambda x: True)
    tx, params, gradients = CHAINS[name](RATES[lr], 0.3), [torch.ones(3)], [[torch.ones(3)]] * 2
    mine, want = (walk(tx, params, gradients, form) for form in ("step in place", "update"))
    assert all(map(torch.equal, optree.tree_leaves(mine), optree.tree_leaves(want)))


@pytest.mark.parametrize(
    "tx, runs, whole",
    [
        (bc.sgd(0.1), [(0,)], True),
        (CHAINS["momentum"](0.1, 0.0), [(0, 1, 2)], True),
        (CHAINS["sghmc"](RATES["cosine"], TEMPERATURES["tensor"]), [(0, 1, 3)], True),
        (CHAINS["sgld"](RATES["tensor"], 0.1), [(0, 1, 2)], True),
        (CHAINS["localised"](0.1, 0.1), [(0, 1, 3)], True),
        (CHAINS["clipped"](0.1, 0.1), [(1, 3)], False),
        (CHAINS["nesterov"](0.1, 0.1), [(1, 3)], False),
        (bc.chain(bc.inject_langevin_noise(0.1), DECAY, bc.scale_by_neg_lr(0.1)), [(1, 2)], False),
        (bc.chain(MOMENTUM, bc.inject_langevin_noise(0.1), DECAY, bc.scale_by_neg_lr(0.1)), [(2, 3)], False),
        (bc.chain(bc.inject_langevin_noise(0.1), bc.scale_by_neg_lr(0.1), MOMENTUM), [], False),
        (bc.sgd(0.1, 0.9, 0.5), [], False),
        (bc.chain(MOMENTUM, bc.scale_by_preconditioner(2.0), bc.scale_by_neg_lr(0.1)), [(0, 1)], False),
        (bc.adam(0.1), [(0, 1)], True),
        (CHAINS["adam"](RATES["cosine"], TEMPERATURES["tensor"]), [(0, 1, 3)], True),
        (CHAINS["frozen rmsprop"](0.1, 0.1), [(0, 1, 3)], True),
        (bc.adamw(0.1, temperature=0.1), [(1, 3)], False),
        (bc.adam(0.1, moment_requires_grad=True), [], False),
        (bc.chain(MOMENTUM, bc.adam(0.1)), [(1, 2)], False),
        (bc.radam(0.1, temperature=0.1), [], False),
        (bc.rmsprop(0.1, centered=True, temperature=0.1), [], False),
    ],
    ids=lambda x: str(x)[:50],
)
def test_which_links_an_engine_stands_for(tx, runs, whole):
    plan = tx.plan(tx.init([torch.zeros(3)]))
    found = [x for x in plan.turns if not isinstance(x, int)]
    assert [x.run for x in found] == runs and (plan.engine is not None) == whole


class Watch(TorchDispatchMode):
    """Lets every operation pass."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_the_kernel_cannot_take_is_left_to_tensor_operations(monkeypatch):
    calls, kernel = [], sweep_kernel()
    counting = kernel._replace(sweep={k: lambda *job, f=f: calls.append(1) or f(*job) for k, f in kernel.sweep.items()})
    monkeypatch.setattr(engine_module, "sweep_kernel", lambda: counting)
    tx, params, g = bc.sghmc(0.1, temperature=0.3), [torch.zeros(4, 3), torch.zeros(2)], torch.arange(12.0).view(3, 4).T

    def update(g):
        torch.manual_seed(0)
        return tx.update([g, torch.ones(2)], tx.init(params), inplace=False)[0][0]

    want, dense = update(g.contiguous()), g.contiguous()
    assert len(calls) == 1
    others = [
        update(x) for x in (g, g.contiguous().requires_grad_(), dense.as_subclass(type("Mine", (torch.Tensor,), {})))
    ]
    with Watch():
        others.append(update(dense))
    torch.manual_seed(0)
    stacked = bc.stack(bc.fork(tx.init(params), 2))
    torch.vmap(lambda g, state: tx.update([g, torch.ones(2)], state, inplace=False)[0][0])(
        torch.stack([dense] * 2), stacked
    )
    assert len(calls) == 1 and others[1].requires_grad and all(torch.equal(x, want) for x in others)


@pytest.mark.parametrize(
    "lacks", [{}, {"roots": dict.fromkeys((torch.float32, torch.float64))}, {"rounds_alike": False}]
)
def test_a_kernel_that_rounds_unlike_torch_leaves_adam_to_its_links(lacks, monkeypatch):
    calls, kernel = [], sweep_kernel()
    counting = {k: lambda *job, f=f: calls.append(1) or f(*job) for k, f in kernel.sweep.items()}
    monkeypatch.setattr(engine_module, "sweep_kernel", lambda: kernel._replace(sweep=counting, **lacks))
    tx, theirs, g = bc.adam(0.1), torchopt.adam(0.1), [torch.linspace(-3.0, 3.0, 1001)]
    state, their_state = tx.init(g), theirs.init(g)
    for _ in range(3):
        u, state = tx.update(g, state, inplace=False)
        want, their_state = theirs.update(g, their_state, inplace=False)
        assert torch.equal(u[0], want[0])
    assert len(calls) == (0 if lacks else 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_an_absent_parameter_is_passed_over_in_one_pass(inplace):
    params, g = (
        {"a": torch.randn(5), "b": None, "c": torch.randn(32)},
        {"a": torch.ones(5), "b": None, "c": torch.ones(32)},
    )
    tx = bc.sghmc(RATES["cosine"], temperature=0.1)
    state = tx.init(params)
    u, want = tx.update(g, state, params=params, inplace=False)
    want = torchopt.apply_updates(params, u, inplace=False), want
    mine = engine_module.moved(tx.plan(state), copy.deepcopy(params), g, copy.deepcopy(state), inplace)
    assert mine is not None and mine[0]["b"] is None
    assert all(map(torch.equal, optree.tree_leaves(mine), optree.tree_leaves(want)))


def test_autograd_is_told_of_what_the_kernel_writes():
    """A gradient that a graph has saved, overwritten in place, is an error in backward and not a wrong derivative."""
    g, w = [torch.ones(3), torch.ones(2)], torch.ones(3, requires_grad=True)
    saved, tx = (w * g[0]).sum(), bc.sghmc(0.1, temperature=0.3)
    tx.update(g, tx.init(g), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("lr", ["number", "cosine"])
def test_tensors_that_change_between_two_steps_in_place_are_looked_at_again(lr):
    """A replaced ``.data``, memory that moved, gradients of another dtype or missing, a state that was reset or cut short."""
    tx, params = bc.sghmc(RATES[lr], temperature=0.1), [torch.randn(5), torch.randn(3)]
    state, other = tx.init(params), copy.deepcopy(params)
    twin = copy.deepcopy(state)

    def step(g):
        nonlocal other, twin
        moved = engine_module.moved(tx.plan(state), params, g, state, True)
        u, twin = tx.update(copy.deepcopy(g), twin, params=other, inplace=False)
        other = torchopt.apply_updates(other, u, inplace=False)
        assert moved and all(map(torch.equal, optree.tree_leaves((params, state)), optree.tree_leaves((other, twin))))

    g = [torch.ones(5), torch.ones(3)]
    step(g)
    for x in (params[0], state[0].trace[1]):
        x.data = x.data.clone()
    step(g)
    params[1].share_memory_()  # the same storage, at another address
    step(g)
    step([None, torch.ones(3)])
    step(g)
    short = params[1].data
    params[1].data = short[:2]
    assert engine_module.moved(tx.plan(state), params, g, state, True) is None
    params[1].data = short
    before = copy.deepcopy((params, state))
    for wrong in (torch.ones(3).double(), torch.ones(2), torch.ones(3).to_sparse(), "x"):
        assert engine_module.moved(tx.plan(state), params, [g[0], wrong], state, True) is None
    assert all(map(torch.equal, optree.tree_leaves((params, state)), optree.tree_leaves(before)))
    assert (
        engine_module.moved(
            *(tx.plan(state), params, [g[0], None]),
            type(state)((state[0]._replace(trace=state[0].trace[:1]), *state[1:]), state.layout),
            inplace=True,
        )
        is None
    )
    state[0].trace[0].zero_(), twin[0].trace[0].zero_()
    step(g)


@pytest.mark.parametrize("what", ["lr", "temperature"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_number_of_one_group_is_refused_before_another_moves(what, inplace):
    value, params = torch.tensor(0.1), [torch.randn(3), torch.randn(2)]
    bad = bc.sgd(value, temperature=0.1) if what == "lr" else bc.sgd(0.1, temperature=value)
    tx = bc.partition({"a": bc.sghmc(0.1, temperature=0.3), "b": bad}, ["a", "b"])
    state = tx.init(params)
    value.fill_(-1.0)
    before = copy.deepcopy((params, state))
    with pytest.raises(ValueError, match=f"{what}: .*nothing was changed"):
        tx.update([torch.ones(3), torch.ones(2)], state, params=params, inplace=inplace)
    assert all(map(torch.equal, optree.tree_leaves((params, state)), optree.tree_leaves(before)))
