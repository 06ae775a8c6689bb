"""Gradients that are missing for a while: in one step or in many, of one parameter, of a whole group or of all groups.

torch leaves a parameter without a gradient as it is, and moves it again in the next step in which it has one. Above
temperature 0 it has to get its noise from that step on too, as if it had never been away.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import bayesopt_chain as bc
from tests.optim.probe import walk as steps

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
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
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
}
of_classes = pytest.mark.parametrize("case", CLASSES)
of_noisy_classes = pytest.mark.parametrize("case", NOISY)


def walk(make, scenario, groups=("xy", "z"), z_options=None):
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


def maker(case, temperature):
    """Return a function that makes one of the optimizers of a list of groups, always with the same key of its noise."""
    name, kwargs = NOISY[case]
    return lambda groups: getattr(bc.optim, name)(
        groups, lr=0.1, temperature=temperature, generator=torch.Generator().manual_seed(1), **kwargs
    )


@cache
def torchs_walk(case, scenario):
    """The parameters of torch's optimizer after a scenario; without loading, after which torch's NAdam has other bits."""
    name, kwargs = CLASSES[case]
    return walk(
        lambda groups: getattr(torch.optim, name)(groups, lr=0.1, **kwargs), SCENARIOS[scenario]._replace(loads_at=None)
    )[0]


@cache
def noisy_walk(case, scenario):
    """Return the parameters after the steps of a scenario with noise, and the optimizer."""
    return walk(maker(case, 0.3), SCENARIOS[scenario])


@pytest.mark.sweep(5)
@of_classes
def test_at_temperature_0_every_step_is_torchs_bit_for_bit(case):
    """A temperature that is a tensor takes the path of noisy steps, with a plan that is kept."""
    for title, scenario in SCENARIOS.items():
        for temperature in (0.0, torch.tensor(0.0)):
            mine, _ = walk(maker(case, temperature), scenario)
            for name, theirs in torchs_walk(case, title).items():
                assert torch.equal(mine[name], theirs), (title, name)


@of_classes
def test_a_group_at_temperature_0_beside_a_noisy_one_is_torchs_bit_for_bit(case):
    for title, scenario in SCENARIOS.items():
        mine, _ = walk(maker(case, 0.3), scenario, z_options={"temperature": 0.0})
        theirs = torchs_walk(case, title)
        assert torch.equal(mine["z"], theirs["z"]) and not torch.equal(mine["x"], theirs["x"]), title


@pytest.mark.sweep(5)
@of_noisy_classes
def test_a_group_that_was_away_steps_as_one_that_is_alone_and_never_was(case):
    """To rounding: the fused kernels, which move all groups or none, differ from torch's loop in the last place."""
    for title, scenario in SCENARIOS.items():
        mine, optimizer = noisy_walk(case, title)
        for names, group in zip(("xy", "z"), optimizer.param_groups):
            want, alone = walk(maker(case, 0.3), scenario, groups=(names,))
            assert group["noise_count"] == alone.param_groups[0]["noise_count"] > 0, title
            for name in names:
                assert torch.allclose(mine[name], want[name], rtol=1e-11, atol=1e-11), (title, name)


# by the step, whether each of two groups has no gradient
AWAY = {
    "the second is unfrozen": lambda step: (False, step < 20),
    "the second misses a step": lambda step: (False, step == 10),
    "both miss a step": lambda step: (step in (0, 40), step in (0, 40)),
}


def assert_is_normal(x, variance):
    """Check the mean and the variance of independent draws to six standard errors."""
    assert abs(float(x.mean())) < 6 * (variance / len(x)) ** 0.5
    assert abs(float(x.var()) / variance - 1.0) < 6 * (2 / len(x)) ** 0.5


def a_chain(groups):
    torch.manual_seed(0)
    return bc.optim.Optimizer(groups, lambda group: bc.sghmc(0.1, temperature=0.01))


SAMPLERS = {
    name: maker(name, 0.01)
    for name in ("SGHMC", "SGLD", "Nesterov", "SGHMC, draws made again", "Adam, frozen", "RMSprop, frozen")
} | {"a chain": a_chain}


def walk_of_two(make, away):
    """Two groups on ``theta^2 / 2``, each without a gradient in steps of its own."""
    params = [torch.nn.Parameter(torch.ones(10_000)) for _ in range(2)]
    optimizer = make([{"params": [p]} for p in params])
    for step in range(200):
        for p, is_away in zip(params, AWAY[away](step)):
            p.grad = None if is_away else p.detach().clone()
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("case", SAMPLERS)
@pytest.mark.parametrize("away", AWAY)
def test_a_group_that_was_away_samples_with_the_mean_and_variance_of_its_law(case, away):
    for x in walk_of_two(SAMPLERS[case], away):
        assert_is_normal(x, 0.01)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_chain_as_an_optimizer_moves_what_torch_moves(momentum):
    """To rounding, since a chain adds its update to the parameter in one operation more."""
    for title, scenario in SCENARIOS.items():
        if scenario.lr_decay == 1.0:  # a number that is built into a chain stays what it is
            mine, _ = walk(
                lambda groups: bc.optim.Optimizer(groups, lambda group: bc.sgd(0.1, momentum=momentum)), scenario
            )
            want, _ = walk(lambda groups: torch.optim.SGD(groups, 0.1, momentum=momentum), scenario)
            for name in SHAPES:
                assert torch.allclose(mine[name], want[name], rtol=1e-13, atol=1e-13), (title, name)


@pytest.mark.parametrize("name", ["SGHMC", "SGLD", "Adam"])
def test_a_parameter_that_is_appended_to_a_list_of_parameters_is_refused_before_anything_moves(name):
    params = [torch.ones(3, requires_grad=True) for _ in range(2)]
    optimizer = getattr(bc.optim, name)(params[:1], 0.1, temperature=0.3)
    before = steps(optimizer)
    optimizer.param_groups[0]["params"].append(params[1])
    with pytest.raises(ValueError, match="add_param_group"):
        steps(optimizer)
    assert torch.equal(params[0], before) and torch.equal(params[1], torch.ones(3))
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()]})
    assert not torch.equal(steps(optimizer)[:3], before) and optimizer.param_groups[1]["noise_count"] == 1
