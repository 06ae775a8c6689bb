"""State dicts: torch's format, no code in them, noise included, bit for bit in another process."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import World
from tests.optim.probe import through_a_file, walk

SAMPLING = {
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "SGHMC": dict(lr=0.1),
    "SGLD": dict(lr=0.1),
    "Adam": dict(amsgrad=True, freeze_after=4),
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": dict(momentum=0.9, centered=True),
    "Adagrad": {},
    "IVON": dict(lr=0.1),
}


def make(name, seed=0, named=True, steps=0, **kwargs):
    """A model and its optimizer behind some steps, without gradients, as torch.distributed makes a state that is not there."""
    torch.manual_seed(seed)
    model = nn.Linear(5, 3, dtype=torch.float64)
    params = model.named_parameters() if named else model.parameters()
    optimizer = getattr(bc.optim, name)(params, temperature=0.3, **{**SAMPLING.get(name, {}), **kwargs})
    walk(optimizer, steps)
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("named", [True, False])
def test_a_loaded_state_goes_on_bit_for_bit(name, named):
    model, optimizer = make(name, named=named, steps=5)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = walk(optimizer, 5)
    model, optimizer = make(name, seed=1, named=named)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert torch.equal(walk(optimizer, 5), expected)


SCRIPT = """
import torch, sys
from tests.optim.probe import walk
from tests.optim.test_state import make
saved, out = torch.load(sys.argv[1], weights_only=True), {}
for name in saved:
    model, optimizer = make(name, seed=7)
    model.load_state_dict(saved[name]["model"])
    optimizer.load_state_dict(saved[name]["optimizer"])
    out[name] = walk(optimizer, 5)
torch.save(out, sys.argv[2])
"""


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    runs, saved = {name: make(name, steps=5) for name in SAMPLING}, {}
    for name, (model, optimizer) in runs.items():
        saved[name] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    command = [sys.executable, "-c", SCRIPT, tmp_path / "saved.pt", tmp_path / "result.pt"]
    subprocess.run(command, check=True, timeout=300)
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    for name, run in runs.items():
        assert torch.equal(result[name], walk(run[1], 5)), name


def test_a_key_survives_loading_into_parameters_of_any_dtype():
    theta = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.3)
    walk(optimizer)
    key, before = optimizer.param_groups[0]["noise_key"], dict(optimizer.state[theta])
    optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert optimizer.param_groups[0]["noise_key"] == key > 2**32
    assert all(
        optimizer.state[theta][name] == before[name] for name in ("noise_half", "noise_surplus", "noise_temperature")
    )


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad"])
def test_a_state_dict_of_torch_is_taken_over_and_the_temperature_stays(name):
    kwargs = {"SGD": dict(lr=0.1, momentum=0.9), "RMSprop": dict(momentum=0.9)}.get(name, {})
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    trained = getattr(torch.optim, name)(model.parameters(), **kwargs)
    walk(trained, 5)
    cold, hot = (getattr(bc.optim, name)(model.parameters(), temperature=t, **kwargs) for t in (0.0, 0.3))
    key = hot.param_groups[0]["noise_key"]
    for optimizer in (cold, hot):
        optimizer.load_state_dict(trained.state_dict())
    for p in model.parameters():
        for entry, value in trained.state[p].items():
            assert torch.equal(hot.state[p][entry], value)
    assert hot.param_groups[0]["temperature"] == 0.3 and hot.param_groups[0]["noise_key"] == key is not None
    assert torch.equal(walk(copy.deepcopy(trained), 3), walk(copy.deepcopy(cold), 3))
    cold_end = walk(copy.deepcopy(trained))
    hot_end = walk(hot)
    assert hot_end.isfinite().all() and not torch.equal(hot_end, cold_end)


def test_a_saved_temperature_replaces_the_number_and_fills_the_tensor():
    _, saved = make("SGHMC")
    _, number = make("SGHMC")
    number.param_groups[0]["temperature"] = 0.1
    number.load_state_dict(saved.state_dict())
    assert number.param_groups[0]["temperature"] == 0.3
    dial = torch.tensor(0.1)
    theta = nn.Linear(5, 3)
    optimizer = bc.optim.SGHMC(theta.named_parameters(), 0.1, temperature=dial)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["temperature"] is dial and dial.item() == pytest.approx(0.3)


def test_two_parameters_of_one_name_are_refused():
    """They would draw the same noise."""
    a, b = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = bc.optim.SGLD([("w", a), ("w", b)], 0.1, temperature=0.3)
    with pytest.raises(ValueError, match="same name"):
        walk(optimizer)
    with pytest.raises(ValueError, match="same name"):
        bc.optim.IVON([("w", a), ("w", b)], 0.1, temperature=0.3).variances()
    assert not a.any() and not b.any()


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.parametrize(("steps", "later"), [(0, 2), (4, 0)])
@pytest.mark.parametrize("name", SAMPLING)
def test_state_dicts_of_torch_distributed_go_on_bit_for_bit(name, steps, later, flattened, full):
    """From a fresh optimizer or behind steps, into a fresh one or behind other steps."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flattened, full_state_dict=full)
    model, optimizer = make(name, steps=steps)
    saved = copy.deepcopy((model.state_dict(), dcp.get_optimizer_state_dict(model, optimizer, options=options)))
    expected = walk(optimizer, 3)
    model, optimizer = make(name, seed=1, steps=later)
    model.load_state_dict(saved[0])
    # torch 2.13 loads no state dict that is both, of its own optimizers either (KeyError: 'param_groups.0.params.0')
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flattened, full_state_dict=full and not flattened)
    dcp.set_optimizer_state_dict(model, optimizer, saved[1], options=options)
    assert torch.equal(walk(optimizer, 3), expected)


def test_a_given_generator_makes_the_key_also_of_a_temperature_that_is_raised_later():
    theta = torch.zeros(3, requires_grad=True)
    generator = torch.Generator().manual_seed(3)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.0, generator=generator)
    hot = bc.optim.SGHMC([theta], 0.1, temperature=0.3, generator=torch.Generator().manual_seed(3))
    later = copy.deepcopy(optimizer)
    later.param_groups[0]["temperature"] = 0.3
    walk(later)
    assert later.param_groups[0]["noise_key"] == hot.param_groups[0]["noise_key"] is not None


def test_on_several_ranks_a_raised_temperature_asks_for_fork_and_not_for_the_constructors_generator(monkeypatch):
    monkeypatch.setattr("bayesopt_chain.distributed.ranks.world", lambda: World(0, 2))
    theta = torch.zeros(3, requires_grad=True)
    theta.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"a chain of its own: give it generator=bc\.distributed\.generator"):
        bc.optim.SGHMC([theta], 0.1, temperature=0.3)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.0)
    optimizer.param_groups[0]["temperature"] = 0.3
    with pytest.raises(ValueError, match=r"raised later, so call its fork\(\) once with generator=bc\.distributed"):
        optimizer.step()
    assert not theta.any()
    optimizer.fork(bc.distributed.generator(0))
    optimizer.step()
    assert theta.all()
