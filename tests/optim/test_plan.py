"""The plan of a step is kept while nothing of it changes, and never a step longer."""

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.engine.optimizer_cpu import Job


def lower_lr(optimizer, params):
    optimizer.param_groups[0]["lr"] = 0.05


def another_momentum(optimizer, params):
    optimizer.param_groups[0]["momentum"] = 0.5


def another_temperature(optimizer, params):
    optimizer.param_groups[0]["temperature"] = 0.7


def no_temperature(optimizer, params):
    optimizer.param_groups[0]["temperature"] = 0.0


def a_gradient_less(optimizer, params):
    params[1].grad = None


def another_velocity(optimizer, params):
    state = optimizer.state[params[0]]
    state["momentum_buffer"] = state["momentum_buffer"] * 2


def a_draw_forgotten(optimizer, params):
    optimizer.state[params[0]].pop("noise")


def a_state_forgotten(optimizer, params):
    optimizer.state.pop(params[1])


def another_key(optimizer, params):
    optimizer.param_groups[0]["noise_key"] = 12345


def a_group_more(optimizer, params):
    params.append(torch.ones(4, requires_grad=True))
    params[-1].grad = torch.ones(4)
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.2})


def saved_and_loaded(optimizer, params):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def a_parameter_less(optimizer, params):
    del optimizer.param_groups[0]["params"][1]


CHANGES = [
    lower_lr,
    another_momentum,
    another_temperature,
    no_temperature,
    a_gradient_less,
    another_velocity,
    a_draw_forgotten,
    a_state_forgotten,
    another_key,
    a_group_more,
    saved_and_loaded,
    a_parameter_less,
]
MAKE = {
    "momentum": dict(momentum=0.9),
    "none": dict(momentum=0.0),
    "nesterov": dict(momentum=0.9, nesterov=True),
    "philox": dict(momentum=0.9),
    "torch's loop": dict(momentum=0.9, foreach=False),
}


def walk(change, keep, **kwargs):
    """Eight steps with a change in the middle; without ``keep`` every step is planned anew."""
    torch.manual_seed(0)
    params = [torch.ones(3, requires_grad=True), torch.ones(2, 5, requires_grad=True)]
    generator = torch.Generator().manual_seed(1)
    optimizer = bc.optim.SGD(params, 0.1, temperature=0.3, generator=generator, **kwargs)
    kept = 0
    for step in range(8):
        for p in params:
            p.grad = 0.1 * p.detach() + step
        if step == 4:
            change(optimizer, params)
        if not keep:
            optimizer._cache.work = None
        before = optimizer._cache.work
        optimizer.step()
        kept += before is not None and optimizer._cache.work is before
    states = [optimizer.state.get(p, {}) for p in params]
    return [*params, *(v for s in states for v in s.values() if torch.is_tensor(v))], kept


@pytest.mark.sweep(37)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_steps_are_those_that_are_planned_anew(name, change):
    if change is another_velocity and name == "none":
        pytest.skip("no velocity")
    mine, kept = walk(change, keep=True, **MAKE[name])
    want, none = walk(change, keep=False, **MAKE[name])
    assert kept >= 2 and none == 0
    assert len(mine) == len(want)
    for x, y in zip(mine, want):
        assert torch.equal(x, y)


def changing(name, keep, numbers, freeze_after=None):
    """Twelve steps of one of the classes, with other numbers in each; without ``keep`` every step is planned anew."""
    torch.manual_seed(0)
    params = [torch.ones(3, requires_grad=True), torch.ones(2, 5, requires_grad=True)]
    how = {"freeze_after": freeze_after} if freeze_after else {}
    optimizer = getattr(bc.optim, name)(params, 0.1, temperature=0.3, generator=torch.Generator().manual_seed(1), **how)
    plans = []
    for step in range(12):
        for p in params:
            p.grad = 0.1 * p.detach() + step
        optimizer.param_groups[0].update(numbers(step))
        if not keep:
            optimizer._cache.work = None
        optimizer.step()
        plans.append(optimizer._cache.work)
    return [*params, *(v for p in params for v in optimizer.state[p].values() if torch.is_tensor(v))], plans


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
    mine, plans = changing(name, True, numbers)
    want, anew = changing(name, False, numbers)
    assert plans[-1] is plans[4] and anew[-1] is not anew[4]
    for x, y in zip(mine, want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_a_preconditioner_that_freezes_makes_the_steps_that_are_planned_anew(name):
    mine, _ = changing(name, True, lambda step: {}, freeze_after=4)
    want, _ = changing(name, False, lambda step: {}, freeze_after=4)
    for x, y in zip(mine, want, strict=True):
        assert torch.equal(x, y)


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


def walk_of_one_pass(name, kwargs, dtype=torch.float64, sizes=((40,), (3, 5), (3000,)), scheduled=True):
    """Ten steps along an lr that falls and rises: parameters, state, and how many steps took the one pass."""
    params = [torch.linspace(-1, 1, math.prod(s), dtype=dtype).view(s).requires_grad_() for s in sizes]
    generator = torch.Generator().manual_seed(1)
    optimizer = getattr(bc.optim, name)(params, 0.01, temperature=0.3, generator=generator, **kwargs)
    with mock.patch.object(Job, "run", autospec=True, side_effect=Job.run) as kernel:
        for step in range(10):
            for p in params:
                p.grad = p.detach() + 0.1 * step
            if scheduled:
                optimizer.param_groups[0]["lr"] = 0.01 * (1.0 + 0.5 * (-1) ** step)
            optimizer.step()
    tensors = [x for p in params for x in optimizer.state[p].values() if torch.is_tensor(x)]
    return [p.detach() for p in params] + tensors, kernel.call_count


@pytest.mark.parametrize("keep_draws", [True, False])
@pytest.mark.parametrize("case", ONE_PASS)
def test_step_and_noise_in_one_pass_are_torchs_step_and_then_the_noise(case, keep_draws):
    """To a few units in the last place of each operation, at each of ten steps."""
    name, kwargs = ONE_PASS[case]
    kwargs = kwargs | {"keep_draws": keep_draws}
    mine, one_pass = walk_of_one_pass(name, kwargs)
    theirs, none = walk_of_one_pass(name, kwargs | {"foreach": False})
    assert (one_pass, none) == (10 if name == "SGLD" else 9, 0)  # torch makes its state in the first step
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["SGHMC", "Adam", "AdamW", "RMSprop"])
def test_one_pass_on_two_threads_gives_the_bits_of_one(name, monkeypatch):
    monkeypatch.setattr("bayesopt_chain.engine.optimizer_cpu._PARALLEL", 100)
    walks, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            walks.append(walk_of_one_pass(name, {}, torch.float32, ((40_000,), (7,), (17_000,))))
    finally:
        torch.set_num_threads(threads)
    assert walks[0][1] == walks[1][1] == 9
    for x, y in zip(walks[0][0], walks[1][0], strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "kwargs",
    [{"foreach": True}, {"amsgrad": True}, {"freeze_after": 3, "amsgrad": True}],
    ids=str,
)
def test_what_the_one_pass_does_not_know_takes_torchs_step(kwargs):
    assert walk_of_one_pass("Adam", kwargs)[1] == 0


@pytest.mark.parametrize("what", ["gradient of other strides", "a temperature of 0 elsewhere", "a replaced square"])
def test_the_one_pass_sees_what_changes_between_steps(what):
    """As a walk that plans every step anew."""

    def walk(keep):
        params = [torch.ones(3, 4, requires_grad=True), torch.ones(5, requires_grad=True)]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        optimizer = bc.optim.Adam(groups, 0.01, temperature=0.3, generator=torch.Generator().manual_seed(1))
        calls = []
        for step in range(6):
            for p in params:
                p.grad = torch.full_like(p, 0.1 * step) + p.detach()
            if step == 3 and what == "gradient of other strides":
                params[0].grad = torch.arange(12.0).view(4, 3).T
            if step == 3 and what == "a temperature of 0 elsewhere":
                optimizer.param_groups[1]["temperature"] = 0.0
            if step == 3 and what == "a replaced square":
                state = optimizer.state[params[0]]
                state["exp_avg_sq"] = state["exp_avg_sq"] * 4.0
            if not keep:
                optimizer._cache.work = None
            with mock.patch.object(Job, "run", autospec=True, side_effect=Job.run) as kernel:
                optimizer.step()
            calls.append(kernel.call_count)
        return [p.detach() for p in params], calls

    (mine, how), (want, again) = walk(True), walk(False)
    rest = {
        "gradient of other strides": [1, 2, 2],
        "a temperature of 0 elsewhere": [1] * 3,
        "a replaced square": [2] * 3,
    }
    assert how == again == [0, 2, 2, *rest[what]]
    for x, y in zip(mine, want, strict=True):
        assert torch.equal(x, y)


def test_autograd_knows_that_the_one_pass_has_changed_the_parameters():
    theta = torch.ones(4, requires_grad=True)
    optimizer = bc.optim.Adam([theta], 0.01, temperature=0.3)
    for _ in range(2):
        loss = theta.square().sum()
        theta.grad = torch.ones(4)
        optimizer.step()
    assert all([x.job is not None for x in optimizer._cache.work or [None]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("tensor", ["gradient of other strides", "bfloat16"])
def test_what_the_one_pass_cannot_take_is_left_to_torchs_step(tensor, monkeypatch):
    """Bit for bit as where torch's loop was asked for."""
    walks = []
    for how in ({}, {"foreach": False}):
        theta = torch.ones(3, 4, dtype=torch.bfloat16 if tensor == "bfloat16" else torch.float32, requires_grad=True)
        optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.3, generator=torch.Generator().manual_seed(1), **how)
        for _ in range(4):
            g = torch.arange(12.0).to(theta.dtype)
            theta.grad = g.view(3, 4) if tensor == "bfloat16" else g.view(4, 3).T
            optimizer.step()
        walks.append(theta.detach())
    assert torch.equal(*walks)


@pytest.mark.parametrize("foreach", [None, True])
def test_leaves_of_which_one_alone_has_a_velocity_are_moved_together(foreach):
    """As after torch's training with a frozen layer: to rounding the steps of leaves that were never together."""

    def walk(names):
        params = {name: torch.ones(3, dtype=torch.float64, requires_grad=True) for name in names}
        optimizer = bc.optim.SGHMC(
            params.items(), 0.1, temperature=0.3, generator=torch.Generator().manual_seed(1), foreach=foreach
        )
        if "a" in params:
            optimizer.state[params["a"]]["momentum_buffer"] = torch.full((3,), 2.0, dtype=torch.float64)
        for _ in range(3):
            for p in params.values():
                p.grad = p.detach().clone()
            optimizer.step()
        return {name: p.detach() for name, p in params.items()}

    together, alone = walk("ab"), walk("a") | walk("b")
    for name in "ab":
        torch.testing.assert_close(together[name], alone[name], rtol=1e-13, atol=1e-13)
