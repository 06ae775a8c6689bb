"""What a step writes to: state of the parameter's own shape, memory of its own, and all of it or nothing at Ctrl-C."""

import copy
import os
import signal
from contextlib import nullcontext

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.engine import optimizer_cpu
from bayesopt_chain.optim import ivon
from tests.optim.stepping import walk

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
    walk(optimizer, n, torch.ones_like)


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
    "columns apart": (lambda x: (x[:, :3], x[:, 3:]), False),
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
