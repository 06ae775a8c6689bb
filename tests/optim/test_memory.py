"""What a step writes to: state of the parameter's own shape, memory of its own, and all of it or nothing at Ctrl-C."""

import copy
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.engine import optimizer_cpu
from bayesopt_chain.optim import ivon
from tests.optim.probe import walk

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


# ``keep_draws=False``: the last draw is made again, and nothing else changes


ROOT = Path(__file__).parents[2]
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


def test_the_page_has_the_ratios_of_the_record():
    rows = json.loads((ROOT / "benchmarks" / "results" / "redrawn.json").read_text())["rows"].values()
    ratios = [row["ratio"] for row in rows]
    page = " ".join((ROOT / "docs" / "howto" / "sharded.md").read_text().split())  # whatever its lines
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as long (measured once" in page


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
