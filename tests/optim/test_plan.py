"""The plan of a step is kept while nothing of it changes, and never a step longer."""

import copy
import math
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.engine import optimizer_cpu
from bayesopt_chain.engine.optimizer_cpu import Job
from bayesopt_chain.optim import ivon
from bayesopt_chain.optim._leaves import NUMBERS
from tests.optim.probe import walk as step_on


def walk(
    make, change=lambda step, optimizer, params: None, keep=True, steps=8, sizes=((3,), (2, 5)), dtype=torch.float32
):
    """Steps with a change of their own before each; without ``keep`` every step is planned anew.

    Returns:
        Parameters, tensors and numbers of the state, the plan of every step, and how often each called the kernel.
    """
    params = [torch.linspace(-1, 1, math.prod(s), dtype=dtype).view(s).requires_grad_() for s in sizes]
    optimizer, plans, calls = make(params), [], []
    for step in range(steps):
        for p in params:
            p.grad = 0.1 * p.detach() + step
        change(step, optimizer, params)
        optimizer._work = optimizer._work if keep else None
        with mock.patch.object(Job, "run", autospec=True, side_effect=Job.run) as kernel:
            optimizer.step()
        plans.append(optimizer._work)
        calls.append(kernel.call_count)
    states = [optimizer.state.get(p, {}) for p in params]
    tensors = [*params, *(x for state in states for x in state.values() if torch.is_tensor(x))]
    return [x.detach() for x in tensors], plans, calls


def maker(name, lr=0.1, **kwargs):
    """Always with the same key of the noise."""
    return lambda params: getattr(bc.optim, name)(
        params, lr, temperature=0.3, generator=torch.Generator().manual_seed(1), **kwargs
    )


def assert_as_planned_anew(*args, **kwargs):
    mine, want = walk(*args, **kwargs), walk(*args, keep=False, **kwargs)
    torch.testing.assert_close(mine[0], want[0], rtol=0, atol=0)
    return mine[1:], want[1:]


def a_group_more(optimizer, params):
    params.append(torch.ones(4, requires_grad=True))
    params[-1].grad = torch.ones(4)
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.2})


def other_numbers(optimizer, params):
    """Equal ones in tensors of their own, at a step from which on they change."""
    optimizer.state[params[1]].update({k: x.clone() for k, x in optimizer.state[params[1]].items() if k in NUMBERS})
    optimizer.param_groups[0].update(lr=0.05)


def another_velocity(optimizer, params):
    optimizer.state[params[0]]["momentum_buffer"] = optimizer.state[params[0]]["momentum_buffer"] * 2


CHANGES = {
    "lr": lambda optimizer, params: optimizer.param_groups[0].update(lr=0.05),
    "momentum": lambda optimizer, params: optimizer.param_groups[0].update(momentum=0.5),
    "temperature": lambda optimizer, params: optimizer.param_groups[0].update(temperature=0.7),
    "no temperature": lambda optimizer, params: optimizer.param_groups[0].update(temperature=0.0),
    "key": lambda optimizer, params: optimizer.param_groups[0].update(noise_key=12345),
    "a gradient less": lambda optimizer, params: setattr(params[1], "grad", None),
    "a velocity": another_velocity,
    "numbers": other_numbers,
    "a draw forgotten": lambda optimizer, params: optimizer.state[params[0]].pop("noise", None),
    "a state forgotten": lambda optimizer, params: optimizer.state.pop(params[1]),
    "a group more": a_group_more,
    "saved and loaded": lambda optimizer, params: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a parameter less": lambda optimizer, params: optimizer.param_groups[0]["params"].pop(1),
}
MAKE = {
    "momentum": dict(momentum=0.9),
    "none": dict(momentum=0.0),
    "nesterov": dict(momentum=0.9, nesterov=True),
    "torch's loop": dict(momentum=0.9, foreach=False),
    "draws made again": dict(momentum=0.9, keep_draws=False),
}


@pytest.mark.sweep(37)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_steps_are_those_that_are_planned_anew(name, change):
    if change == "a velocity" and name == "none":
        pytest.skip("no velocity")
    at_four = lambda step, *of: step == 4 and CHANGES[change](*of)  # noqa: E731
    (plans, _), (anew, _) = assert_as_planned_anew(maker("SGD", **MAKE[name]), at_four)
    assert sum(a is b for a, b in pairwise(plans)) >= 2 and not any(a is b for a, b in pairwise(anew))


@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "Adam", "NAdam", "RMSprop"])
@pytest.mark.parametrize(
    "numbers",
    [
        lambda step: {"lr": 0.1 * 0.8**step},
        lambda step: {"lr": 0.05 + 0.04 * (-1) ** step},
        lambda step: {"temperature": 0.3 + 0.1 * (step % 3), "weight_decay": 0.01 * (step % 2)},
    ],
    ids=["falls", "rises and falls", "temperature and decay"],
)
def test_numbers_that_change_in_every_step_keep_the_plan_and_its_steps(name, numbers):
    change = lambda step, optimizer, params: optimizer.param_groups[0].update(numbers(step))  # noqa: E731
    (plans, _), (anew, _) = assert_as_planned_anew(maker(name), change, steps=12)
    assert plans[-1] is plans[4] and anew[-1] is not anew[4]


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_a_preconditioner_that_freezes_makes_the_steps_that_are_planned_anew(name):
    assert_as_planned_anew(maker(name, freeze_after=4), steps=12)


ONE_PASS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGLD": ("SGLD", {"weight_decay": 0.1}),
    "SGHMC": ("SGHMC", {"maximize": True, "weight_decay": 0.1}),
    "SGHMC, dampened": ("SGHMC", {"dampening": 0.4}),
    "Nesterov": ("SGHMC", {"nesterov": True, "weight_decay": 0.1}),
    "Adam": ("Adam", {}),
    "Adam with coupled decay": ("Adam", {"weight_decay": 0.1}),
    "Adam without momentum": ("Adam", {"betas": (0.0, 0.9)}),
    "Adam, frozen": ("Adam", {"freeze_after": 4}),
    "AdamW, maximising": ("AdamW", {"maximize": True, "weight_decay": 0.3}),
    "pSGLD": ("RMSprop", {"eps": 1e-5}),
    "RMSprop with momentum": ("RMSprop", {"momentum": 0.8, "weight_decay": 0.1}),
    "RMSprop, frozen": ("RMSprop", {"momentum": 0.8, "freeze_after": 4}),
}


def walk_of_one_pass(name, kwargs, dtype=torch.float64, sizes=((40,), (3, 5), (3000,))):
    """Ten steps along an lr that falls and rises: parameters, state, and how many steps took the one pass."""

    def change(step, optimizer, params):
        optimizer.param_groups[0]["lr"] = 0.01 * (1.0 + 0.5 * (-1) ** step)
        for p in params:
            p.grad = p.detach() + 0.1 * step

    tensors, _, calls = walk(maker(name, 0.01, **kwargs), change, steps=10, sizes=sizes, dtype=dtype)
    return tensors, sum(calls)


@pytest.mark.parametrize("keep_draws", [True, False])
@pytest.mark.parametrize("case", ONE_PASS)
def test_step_and_noise_in_one_pass_are_torchs_step_and_then_the_noise(case, keep_draws):
    """To a few units in the last place of each operation, at each of ten steps; what is remembered of a step in every bit."""
    name, kwargs = ONE_PASS[case]
    kwargs = kwargs | {"keep_draws": keep_draws}
    mine, one_pass = walk_of_one_pass(name, kwargs)
    theirs, none = walk_of_one_pass(name, kwargs | {"foreach": False})
    assert (one_pass, none) == (10 if name == "SGLD" else 9, 0)  # torch makes its state in the first step
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12 if x.ndim else 0.0, atol=1e-13 if x.ndim else 0.0)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["SGHMC", "Adam", "AdamW", "RMSprop"])
def test_one_pass_on_two_threads_gives_the_bits_of_one(name, monkeypatch, any_threads):
    monkeypatch.setattr("bayesopt_chain.engine.optimizer_cpu._PARALLEL", 100)
    walks = []
    for n in (1, 2):
        torch.set_num_threads(n)
        walks.append(walk_of_one_pass(name, {}, torch.float32, ((40_000,), (7,), (17_000,))))
    assert walks[0][1] == walks[1][1] == 9
    assert all(map(torch.equal, walks[0][0], walks[1][0]))


@pytest.mark.parametrize(
    "kwargs",
    [{"foreach": True}, {"amsgrad": True}, {"freeze_after": 3, "amsgrad": True}],
    ids=str,
)
def test_what_the_one_pass_does_not_know_takes_torchs_step(kwargs):
    assert walk_of_one_pass("Adam", kwargs)[1] == 0


def another_square(optimizer, params):
    optimizer.state[params[0]]["exp_avg_sq"] = optimizer.state[params[0]]["exp_avg_sq"] * 4.0


SEEN = {
    "a gradient of other strides": (
        lambda optimizer, params: setattr(params[0], "grad", torch.arange(12.0).view(4, 3).T),
        [1, 2, 2],
    ),
    "a temperature of 0 elsewhere": (
        lambda optimizer, params: optimizer.param_groups[1].update(temperature=0.0),
        [1] * 3,
    ),
    "a replaced square": (another_square, [2] * 3),
}


@pytest.mark.parametrize("what", SEEN)
def test_the_one_pass_sees_what_changes_between_steps(what):
    change, rest = SEEN[what]
    make = lambda params: maker("Adam", 0.01)([{"params": [p]} for p in params])  # noqa: E731
    at_three = lambda step, *of: step == 3 and change(*of)  # noqa: E731
    mine, want = assert_as_planned_anew(make, at_three, steps=6, sizes=((3, 4), (5,)))
    assert mine[1] == want[1] == [0, 2, 2, *rest]


def test_autograd_knows_that_the_one_pass_has_changed_the_parameters():
    theta = torch.ones(4, requires_grad=True)
    optimizer = bc.optim.Adam([theta], 0.01, temperature=0.3)
    for _ in range(2):
        loss = theta.square().sum()
        theta.grad = torch.ones(4)
        optimizer.step()
    assert all([x.job is not None for x in optimizer._work or [None]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("tensor", ["gradient of other strides", "bfloat16"])
def test_what_the_one_pass_cannot_take_is_left_to_torchs_step(tensor):
    """Bit for bit as where torch's loop was asked for."""
    dtype = torch.bfloat16 if tensor == "bfloat16" else torch.float32

    def change(step, optimizer, params):
        g = torch.arange(12.0).to(dtype)
        params[0].grad = g.view(3, 4) if tensor == "bfloat16" else g.view(4, 3).T

    (mine, _, _), (theirs, _, _) = (
        walk(maker("SGHMC", **how), change, steps=4, sizes=((3, 4),), dtype=dtype) for how in ({}, {"foreach": False})
    )
    assert torch.equal(mine[0], theirs[0])


@pytest.mark.parametrize("foreach", [None, True])
def test_leaves_of_which_one_alone_has_a_velocity_are_moved_together(foreach):
    """As after torch's training with a frozen layer: to rounding the steps of leaves that were never together."""

    def walk(names):
        params = {name: torch.ones(3, dtype=torch.float64, requires_grad=True) for name in names}
        optimizer = maker("SGHMC", foreach=foreach)(params.items())
        if "a" in params:
            optimizer.state[params["a"]]["momentum_buffer"] = torch.full((3,), 2.0, dtype=torch.float64)
        step_on(optimizer, 3, torch.clone)
        return {name: p.detach() for name, p in params.items()}

    together, alone = walk("ab"), walk("a") | walk("b")
    for name in "ab":
        torch.testing.assert_close(together[name], alone[name], rtol=1e-13, atol=1e-13)


# What a step writes to: state of the parameter's own shape, memory of its own, and all of it or nothing at Ctrl-C


T = {"lr": 0.01, "temperature": 1e-6}
MAKERS = {
    "SGD": lambda p: bc.optim.SGD(p, momentum=0.9, **T),
    "Nesterov": lambda p: bc.optim.SGD(p, momentum=0.9, nesterov=True, **T),
    "SGHMC": lambda p: bc.optim.SGHMC(p, **T),
    "SGLD": lambda p: bc.optim.SGLD(p, **T),
    "Adam": lambda p: bc.optim.Adam(p, **T),
    "RMSprop": lambda p: bc.optim.RMSprop(p, momentum=0.9, **T),
    "IVON": lambda p: bc.optim.IVON(p, **T),
}


def step(p, optimizer, n=1):
    """Steps at gradients of ones."""
    step_on(optimizer, n, torch.ones_like)


def made(name, n):
    p = torch.nn.Parameter(torch.zeros(n))
    return p, MAKERS[name]([p])


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_another_width_is_refused_when_it_is_loaded(name, n):
    p, optimizer = made(name, 8)
    step(p, optimizer, 2)
    _, other = made(name, n)
    with pytest.raises(ValueError, match=rf"has the shape \(8,\) and its parameter \({n},\)"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not other.state or all(x.shape in ((n,), ()) for e in other.state.values() for x in e.values())


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "IVON"])
def test_a_state_of_another_width_that_was_put_there_is_refused_before_anything_moves(name):
    p, optimizer = made(name, 8)
    step(p, optimizer, 2)
    for key, x in optimizer.state[p].items():
        if torch.is_tensor(x) and x.ndim:
            optimizer.state[p][key] = x[:4].clone()
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"has the shape \(4,\) and its parameter \(8,\)"):
        step(p, optimizer)
    assert torch.equal(p.detach(), before)


@pytest.mark.parametrize("taking", ["SGHMC", "SGD"])
def test_a_state_of_another_class_is_named(taking):
    p, optimizer = made("Adam", 8)
    step(p, optimizer)
    _, other = made(taking, 8)
    with pytest.raises(ValueError, match=r"a group of the state dict has no '(momentum|dampening)'.*another class"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", MAKERS)
def test_a_parameter_that_was_resized_is_refused_before_anything_moves(name):
    p, optimizer = made(name, 8)
    step(p, optimizer, 3)  # a plan is there, which has to notice
    p.data = torch.zeros(64)
    with pytest.raises((ValueError, RuntimeError), match=r"\(8,\)|\(64,\)|size of tensor"):
        step(p, optimizer)
    assert not p.detach().any()


@pytest.mark.parametrize("name", MAKERS)
def test_chains_that_load_one_live_state_share_nothing(name):
    p, optimizer = made(name, 8)
    step(p, optimizer, 2)
    state = optimizer.state_dict()
    chains = [made(name, 8) for _ in range(2)]
    for _, chain in chains:
        chain.load_state_dict(state)
    others = [x for q, o in ((p, optimizer), chains[1]) for x in o.state[q].values() if torch.is_tensor(x)]
    before = [x.clone() for x in others]
    step(*chains[0])
    assert all(map(torch.equal, others, before))


VIEWS = {  # two parameters over one storage, and whether they have an element in common
    "equal": (lambda x: (x, x.view(4, 6)), True),
    "overlapping": (lambda x: (x[:3], x[2:]), True),
    "transposed": (lambda x: (x, x.T), True),
    "columns that cross": (lambda x: (x[:, :4], x[:, 3:]), True),
    "rows apart": (lambda x: (x[:2], x[2:]), False),
    "columns between each other": (lambda x: (x[:, :3], x[:, 3:]), True),
}


@pytest.mark.parametrize("how", VIEWS)
def test_parameters_that_share_elements_are_refused_at_a_temperature_and_others_of_one_storage_sampled(how):
    views, is_shared = VIEWS[how]
    for temperature in (0.0, 0.5):
        params = [torch.nn.Parameter(x) for x in views(torch.zeros(4, 6))]
        optimizer = bc.optim.SGLD(params, lr=0.1, temperature=temperature)
        for p in params:
            p.grad = torch.ones_like(p)
        refused = temperature > 0 and is_shared  # at temperature 0 it is torch's own affair
        with pytest.raises(ValueError, match="parameters 0 and 1 share memory") if refused else nullcontext():
            optimizer.step()
        assert all([p.detach().any() != refused for p in params])


@pytest.mark.parametrize("name", ["SGHMC", "IVON"])
def test_ctrl_c_in_the_middle_of_a_step_comes_behind_it(name, monkeypatch):
    p, optimizer = made(name, 8)
    step(p, optimizer)
    owner, middle = (optimizer_cpu.Job, "run") if name == "SGHMC" else (ivon.IVON, "_move")
    inner, count = getattr(owner, middle), optimizer.param_groups[0]["noise_count"]

    def interrupted(self, *args):
        os.kill(os.getpid(), signal.SIGINT)
        return inner(self, *args)

    monkeypatch.setattr(owner, middle, interrupted)
    at = p.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        step(p, optimizer)
    assert optimizer.param_groups[0]["noise_count"] == count + 1 and not torch.equal(p.detach(), at)


# ``keep_draws=False``: the last draw is made again, and nothing else changes


RULES = {
    "SGLD": lambda p, **k: bc.optim.SGLD(p, 0.05, **k),
    "SGHMC": lambda p, **k: bc.optim.SGHMC(p, 0.05, **k),
    "Nesterov": lambda p, **k: bc.optim.SGHMC(p, 0.05, nesterov=True, **k),
    "Adam": lambda p, **k: bc.optim.Adam(p, 0.01, **k),
    "RMSprop": lambda p, **k: bc.optim.RMSprop(p, 0.01, momentum=0.9, **k),
    "AdamW, frozen": lambda p, **k: bc.optim.AdamW(p, 0.01, freeze_after=4, **k),
}


def leaves(large=False, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = [(7,), (3, 5), ()] + ([(2**18 + 300,)] if large else [])
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]


def built(rule, params, keep):
    optimizer = RULES[rule](params, temperature=0.1, generator=torch.Generator().manual_seed(3), keep_draws=keep)
    optimizer.rule = rule
    return optimizer


def steps(optimizer, params, n, missing=(), first=0):
    """Steps on ``sum p^2 / 2``; in those of ``missing`` the second leaf has no gradient."""
    for step in range(first, first + n):
        for i, p in enumerate(params):
            p.grad = None if i == 1 and step in missing else p.detach().clone()
        optimizer.step()


def pair(rule, n=8, large=False, between=None, **kwargs):
    out = []
    for keep in (True, False):
        params = leaves(large)
        optimizer = built(rule, params, keep)
        steps(optimizer, params, n, **kwargs)
        if between is not None:
            optimizer = between(optimizer, params)
            steps(optimizer, params, n, first=n, **kwargs)
        out.append((optimizer, [p.detach().clone() for p in params]))
    return out


def forked(optimizer, params):
    optimizer.fork(torch.Generator().manual_seed(9))
    return optimizer


def faster(optimizer, params):
    optimizer.param_groups[0]["lr"] *= 4.0
    return optimizer


def stopped(optimizer, params):
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    steps(optimizer, params, 2)
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


def reloaded(optimizer, params):
    other = built(optimizer.rule, params, optimizer.param_groups[0]["noise_kept"])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


WALKS = {  # and the classes that go another way in each
    "as they are": ({}, [*RULES]),
    "blocks of a large leaf": (dict(n=3, large=True), ["SGHMC", "Nesterov", "Adam"]),
    "a leaf is missing": (dict(missing=(0, 3, 4)), ["SGLD", "SGHMC", "Nesterov", "Adam"]),
    "a fork, behind which the last draw is that of the old key": (dict(between=forked), ["SGHMC", "Nesterov", "Adam"]),
    "lr rises": (dict(between=faster), ["SGHMC", "Nesterov"]),
    "lr is 0 for a while": (dict(between=stopped), ["SGHMC", "Nesterov"]),
    "saved and loaded": (dict(between=reloaded), ["SGHMC", "Adam"]),
}


@pytest.mark.parametrize("how, rule", [(how, rule) for how, (_, rules) in WALKS.items() for rule in rules])
def test_a_draw_that_is_made_again_is_the_one_that_was_kept(how, rule):
    kept, redrawn = pair(rule, **WALKS[how][0])
    assert all(map(torch.equal, kept[1], redrawn[1]))
    assert not any(name in state for state in redrawn[0].state.values() for name in ("noise", "noise_direct"))


def test_sghmc_keeps_as_many_numbers_as_sgd_with_momentum():
    mine, redrawn = (
        sum(x.numel() for s in o.state.values() for name, x in s.items() if name[:6] != "noise_")
        for o, _ in pair("SGHMC")
    )
    assert (mine, redrawn) == (2 * 23, 23)


def test_parts_of_leaves_are_redrawn_by_their_elements():
    whole = torch.zeros(10, requires_grad=True)
    tail = torch.zeros(6, requires_grad=True)
    for params in ([("w", whole)], bc.distributed.part([("tail", tail)], {"tail": ("w", 4)})):
        generator = torch.Generator().manual_seed(0)
        optimizer = bc.optim.SGHMC(params, 0.1, temperature=1.0, generator=generator, keep_draws=False)
        steps(optimizer, [p for _, p in params], 5)
    torch.testing.assert_close(whole[4:], tail)  # vector kernels round their remainders otherwise


@pytest.mark.parametrize("keep", [True, False])
def test_a_draw_that_a_change_would_lose_is_refused_and_nothing_has_moved(keep):
    optimizer = built("SGHMC", params := leaves(), keep)
    steps(optimizer, params, 2)
    optimizer.param_groups[0]["noise_kept"], before = not keep, [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=rf"keep_draws .* was {keep} at the last draw and is {not keep} now"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    optimizer.param_groups[0]["temperature"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["temperature"] = 0.1
    optimizer.step()


# Gradients that are missing for a while: in one step or in many, of one parameter, of a whole group or of all groups


STEPS = 10
SHAPES = {"x": (3,), "y": (2, 5), "z": (4,)}  # x and y are one group, z is the other


class Scenario(NamedTuple):
    """When which parameter has a gradient, and what else happens.

    Attributes:
        has: ``has(step, name)`` tells whether a parameter requires a gradient.
        set_to_none: whether gradients are ``None`` between two steps; else they are 0 once they have been there.
        adds_at: the step before which the group of z is added.
        loads_at: a step before which the optimizer loads its own state dict.
        lr_decay: the factor of lr from one step to the next.
        in_closure: whether gradients are taken in a closure.
    """

    has: Callable[[int, str], bool]
    set_to_none: bool = True
    adds_at: int | None = None
    loads_at: int | None = None
    lr_decay: float = 1.0
    in_closure: bool = False


def z_from_the_sixth(step, name):
    return name != "z" or step >= 5


def z_but_once(step, name):
    return name != "z" or step != 5


def in_turns(step, name):
    return (name == "z") == (step % 2 == 1)


def all_but_once(step, name):
    return step != 5


SCENARIOS = {
    "a group is unfrozen": Scenario(z_from_the_sixth),
    "a group misses one step": Scenario(z_but_once),
    "a group misses one step, gradients are set to zero": Scenario(z_but_once, set_to_none=False),
    "the first group is unfrozen": Scenario(lambda step, name: name == "z" or step >= 5),
    "two groups take turns while lr falls": Scenario(in_turns, lr_decay=0.8),
    "nothing has a gradient in the first step": Scenario(lambda step, name: step != 0),
    "nothing has a gradient in one step": Scenario(all_but_once),
    "a leaf is unfrozen": Scenario(lambda step, name: name != "y" or step >= 5),
    "a leaf and a group miss steps of their own": Scenario(
        lambda step, name: {"x": True, "y": step % 5 != 3, "z": step % 5 > 1}[name]
    ),
    "a group is added and unfrozen later": Scenario(lambda step, name: name != "z" or step >= 6, adds_at=3),
    "a state is loaded while a group is frozen": Scenario(z_from_the_sixth, loads_at=3),
    "a group is unfrozen while lr falls, closure": Scenario(z_from_the_sixth, lr_decay=0.8, in_closure=True),
}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "momentum, dampening": ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    "Nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", {}),
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "NAdam": ("NAdam", {}),
    "RMSprop": ("RMSprop", {"momentum": 0.8, "maximize": True}),
    "Adagrad": ("Adagrad", {}),
}
# those that are no class of torch, or whose noise takes another way through the step
NOISY = CLASSES | {
    "SGLD": ("SGLD", {}),
    "SGHMC": ("SGHMC", {}),
    "SGHMC, draws made again": ("SGHMC", {"keep_draws": False}),
    "Adam, frozen": ("Adam", {"freeze_after": 4}),
    "AdamW, draws made again": ("AdamW", {"keep_draws": False}),
    "RMSprop, frozen": ("RMSprop", {"momentum": 0.8, "freeze_after": 4}),
    "a chain": ("Optimizer", {}),
}
of_classes = pytest.mark.parametrize("case", CLASSES)
of_noisy_classes = pytest.mark.parametrize("case", NOISY)


def walked(make, scenario, groups=("xy", "z"), z_options=None):
    """Run an optimizer on a loss of which every parameter has a term of its own.

    Args:
        make: makes the optimizer of a list of groups.
        scenario: the scenario.
        groups: the names of the parameters of each group. A group that is alone makes the steps in which it has a gradient.
        z_options: options of the group of z.

    Returns:
        The parameters by name, and the optimizer.
    """
    shapes = {name: SHAPES[name] for names in groups for name in names}
    params = {name: torch.ones(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}
    given: list[dict[str, Any]] = [{"params": [(name, params[name]) for name in names]} for names in groups]
    given[-1] |= z_options or {}
    is_alone, adds_at = len(groups) == 1, scenario.adds_at or 0
    optimizer = make(given if is_alone or not adds_at else given[:1])
    for step in range(STEPS):
        if step == adds_at and len(optimizer.param_groups) < len(groups):
            optimizer.add_param_group(given[1])
        if step == scenario.loads_at:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * scenario.lr_decay**step
        for name, p in params.items():
            p.requires_grad_(scenario.has(step, name) and not (name == "z" and step < adds_at))

        def closure(step=step):
            optimizer.zero_grad(scenario.set_to_none)
            for p in params.values():
                if p.requires_grad:
                    p.grad = p.detach() + 0.1 * step

        if not scenario.in_closure:
            closure()
        if is_alone and not any(
            p.requires_grad or (p.grad is not None and not scenario.set_to_none) for p in params.values()
        ):
            continue
        optimizer.step(closure if scenario.in_closure else None)
    return {name: p.detach() for name, p in params.items()}, optimizer


def a_chain(group, temperature):
    return bc.sghmc(0.1, temperature=temperature, generator=torch.Generator().manual_seed(group["seed"]))


def made_with(case, temperature):
    """Return a function that makes one of the optimizers of a list of groups, always with the same key of its noise."""
    name, kwargs = NOISY[case]
    if name == "Optimizer":
        return lambda groups: bc.optim.Optimizer(groups, lambda group: a_chain(group, temperature), seed=1)
    return lambda groups: getattr(bc.optim, name)(
        groups, lr=0.1, temperature=temperature, generator=torch.Generator().manual_seed(1), **kwargs
    )


@cache
def torchs_walk(case, scenario):
    """The parameters of torch's optimizer after a scenario; without loading, after which torch's NAdam has other bits."""
    name, kwargs = CLASSES[case]
    return walked(
        lambda groups: getattr(torch.optim, name)(groups, lr=0.1, **kwargs), SCENARIOS[scenario]._replace(loads_at=None)
    )[0]


@pytest.mark.sweep(5)
@of_classes
def test_at_temperature_0_every_step_is_torchs_bit_for_bit(case):
    """A temperature that is a tensor takes the path of noisy steps, with a plan that is kept."""
    for title, scenario in SCENARIOS.items():
        for temperature in (0.0, torch.tensor(0.0)):
            mine, _ = walked(made_with(case, temperature), scenario)
            for name, theirs in torchs_walk(case, title).items():
                assert torch.equal(mine[name], theirs), (title, name)


@of_classes
def test_a_group_at_temperature_0_beside_a_noisy_one_is_torchs_bit_for_bit(case):
    for title, scenario in SCENARIOS.items():
        mine, _ = walked(made_with(case, 0.3), scenario, z_options={"temperature": 0.0})
        theirs = torchs_walk(case, title)
        assert torch.equal(mine["z"], theirs["z"]) and not torch.equal(mine["x"], theirs["x"]), title


@pytest.mark.sweep(5)
@of_noisy_classes
def test_a_group_that_was_away_steps_as_one_that_is_alone_and_never_was(case):
    """To rounding: the fused kernels, which move all groups or none, differ from torch's loop in the last place."""
    for title, scenario in SCENARIOS.items():
        if case == "a chain" and scenario.lr_decay != 1.0:  # a number that is built into a chain stays what it is
            continue
        own = {"seed": 2}  # of a chain, whose groups have a key each
        mine, optimizer = walked(made_with(case, 0.3), scenario, z_options=own)
        for names, group in zip(("xy", "z"), optimizer.param_groups):
            want, alone = walked(
                made_with(case, 0.3), scenario, groups=(names,), z_options=own if names == "z" else None
            )
            assert group.get("noise_count") == alone.param_groups[0].get("noise_count") != 0, title
            for name in names:
                assert torch.allclose(mine[name], want[name], rtol=1e-11, atol=1e-11), (title, name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_chain_as_an_optimizer_moves_what_torch_moves(momentum):
    """To rounding, since a chain adds its update to the parameter in one operation more."""
    for title, scenario in SCENARIOS.items():
        if scenario.lr_decay == 1.0:  # a number that is built into a chain stays what it is
            mine, _ = walked(
                lambda groups: bc.optim.Optimizer(groups, lambda group: bc.sgd(0.1, momentum=momentum)), scenario
            )
            want, _ = walked(lambda groups: torch.optim.SGD(groups, 0.1, momentum=momentum), scenario)
            for name in SHAPES:
                assert torch.allclose(mine[name], want[name], rtol=1e-13, atol=1e-13), (title, name)


@pytest.mark.parametrize("name", ["SGHMC", "SGLD", "Adam"])
def test_a_parameter_that_is_appended_to_a_list_of_parameters_is_refused_before_anything_moves(name):
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = getattr(bc.optim, name)(params[:1], 0.1, temperature=0.3)
    before = step_on(optimizer)
    optimizer.param_groups[0]["params"].append(params[1])
    with pytest.raises(ValueError, match="add_param_group"):
        step_on(optimizer)
    assert torch.equal(params[0], before) and torch.equal(params[1], torch.ones(3))
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    assert not torch.equal(step_on(optimizer)[:3], before) and optimizer.param_groups[1]["noise_count"] == 1


def test_a_step_that_is_refused_forgets_no_draw_and_reads_the_temperature_of_a_group_without_gradients():
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = bc.optim.SGHMC([{"params": [a]}, {"params": [b]}], 0.1, temperature=0.3)
    step_on(optimizer, 2)
    cold, hot = optimizer.param_groups
    cold["temperature"], hot["lr"] = 0.0, [1]
    with pytest.raises(TypeError, match="lr must be"):
        optimizer.step()
    assert "noise" in optimizer.state[a]
    hot["lr"], a.grad = 0.1, None
    cold["temperature"] = 0.3
    optimizer.step()
    cold["temperature"] = math.nan
    with pytest.raises(ValueError, match="temperature must be non-negative and finite"):
        optimizer.step()
