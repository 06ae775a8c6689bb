"""``keep_draws=False``: the last draw is made again, and nothing else changes."""

import copy
import json
from pathlib import Path

import pytest
import torch

import bayesopt_chain as bc

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


def made(rule, params, keep):
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
        optimizer = made(rule, params, keep)
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
    other = made(optimizer.rule, params, optimizer.param_groups[0]["noise_kept"])
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
    optimizer = made("SGHMC", params := leaves(), keep)
    steps(optimizer, params, 2)
    optimizer.param_groups[0]["noise_kept"], before = not keep, [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=rf"keep_draws .* was {keep} at the last draw and is {not keep} now"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    optimizer.param_groups[0]["temperature"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["temperature"] = 0.1
    optimizer.step()
