"""State dicts: torch's format, no code in them, noise included, bit for bit in another process."""

import copy
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import World
from tests.nets import Net
from tests.optim.probe import through_a_file, walk
from tests.runs import children
from tests.walk import descend

SAMPLING = {
    "SGD": dict(lr=0.1, momentum=0.9, nesterov=True),
    "SGHMC": dict(lr=0.1),
    "SGLD": dict(lr=0.1),
    "Adam": dict(amsgrad=True, freeze_after=4),
    "AdamW": {},
    "NAdam": {},
    "RMSprop": dict(momentum=0.9, centered=True),
    "Adagrad": {},
    "IVON": dict(lr=0.1),
    "Optimizer": dict(lr=torch.tensor(0.1), make_chain=lambda g: bc.sghmc(g["lr"], temperature=g["temperature"])),
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


def goes_on(folder):
    saved, out = torch.load(folder / "saved.pt", weights_only=True), {}
    for name in saved:
        model, optimizer = make(name, seed=7)
        model.load_state_dict(saved[name]["model"])
        optimizer.load_state_dict(saved[name]["optimizer"])
        out[name] = walk(optimizer, 5)
    torch.save(out, folder / "result.pt")


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    runs, saved = {name: make(name, steps=5) for name in SAMPLING}, {}
    for name, (model, optimizer) in runs.items():
        saved[name] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "saved.pt")
    children.until_it_ends(children.started(goes_on, tmp_path))
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


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_a_state_dict_of_torch_is_taken_over_and_the_temperature_stays(name):
    kwargs = {"SGD": dict(lr=0.1, momentum=0.9), "RMSprop": dict(momentum=0.9)}.get(name, {})
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
    number.param_groups[0]["temperature"] = -1.0  # which a step refuses
    number.load_state_dict(saved.state_dict())
    assert number.param_groups[0]["temperature"] == 0.3
    dial = torch.tensor(0.1)
    optimizer = bc.optim.SGHMC(nn.Linear(5, 3).named_parameters(), 0.1, temperature=dial)
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


# ``bc.optim.as_step``: a model and an optimizer as the step of this library's loops


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 1))


def loss(model, batch):
    x, y = batch
    return (model(x).squeeze(1) - y).square().mean()


BATCH = (torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(0, 1, 8))
MAKE = {
    "SGHMC": lambda model: bc.optim.SGHMC(model.named_parameters(), 0.05, temperature=1e-3),
    "Adam": lambda model: bc.optim.Adam(model.parameters(), 0.01, temperature=1e-3),
    "torch Adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "chain": lambda model: bc.optim.Optimizer(model.parameters(), lambda g: bc.sghmc(0.05, temperature=1e-3)),
}
SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=3), torch.optim.lr_scheduler.MultiStepLR(o, [2, 3])],
        milestones=[3],
    ),
    None: lambda o: None,
}


def built(name, schedule, seed=0):
    model = network(seed)
    optimizer = MAKE[name](model)
    return bc.optim.as_step(model, optimizer, loss, scheduler=SCHEDULERS[schedule](optimizer))


def run(step, params, state, n, batch=BATCH):
    """What the last of some steps returns."""
    out = params, state, None
    for _ in range(n):
        out = step(*out[:2], batch)
    return out


def flat(params):
    return torch.cat([params[name].flatten() for name in sorted(params)])


@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", MAKE)
def test_copied_params_and_state_go_on_bit_for_bit_in_another_model(name, schedule):
    if name == "chain" and schedule:
        schedule = None  # its lr is a number
    step = built(name, schedule)
    kept = copy.deepcopy(run(step, step.params, step.state, 4)[:2])
    params, _, info = run(step, step.params, step.state, 5)
    expected, last = flat(params).clone(), info.loss.clone()
    params, _, info = run(built(name, schedule, seed=1), *kept, 5)
    assert torch.equal(flat(params), expected) and torch.equal(info.loss, last)


def counting(net):
    """What replaces its buffer at every call."""
    net.calls = net.calls + 1
    return (net.weight * net.calls).square().mean()


def counted():
    model = Net(counting, weight=nn.Parameter(torch.ones(3)), calls=nn.Buffer(torch.zeros(())))
    optimizer = bc.optim.SGHMC(model.parameters(), 0.01, temperature=1e-3)
    return bc.optim.as_step(model, optimizer, lambda model, batch: model())


def test_a_buffer_that_the_model_replaces_goes_on_bit_for_bit():
    step = counted()
    kept = copy.deepcopy(run(step, step.params, step.state, 4)[:2])
    expected = run(step, step.params, step.state, 5)
    params, state, _ = run(counted(), *kept, 5)
    assert torch.equal(params["weight"], expected[0]["weight"])
    assert state["buffers"]["calls"] == expected[1]["buffers"]["calls"] == 9


def test_a_state_with_the_buffers_of_another_model_is_refused_by_name():
    step, other = counted(), built("SGHMC", None)
    with pytest.raises(ValueError, match="as_step: the buffers of state"):
        step(step.params, step.state | {"buffers": other.state["buffers"]}, None)


def test_parameters_that_move_to_another_dtype_are_those_that_a_step_returns():
    step = counted()
    params, state, _ = step(step.params, step.state, None)
    step.model.double()
    step.optimizer.state.clear()
    after, _, _ = step(params, state, None)
    assert after["weight"].dtype == torch.float64 and torch.equal(after["weight"], step.model.weight)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("schedule", SCHEDULERS)
@pytest.mark.parametrize("name", MAKE)
def test_a_run_on_disk_goes_on_in_another_process_with_a_fresh_optimizer(name, schedule, tmp_path):
    if name == "chain" and schedule:
        schedule = None
    want = bc.sample(step := built(name, schedule), step.params, step.state, BATCH, steps=9)
    for steps in (4, 7):
        torch.manual_seed(0)
        step = built(name, schedule)
        bc.sample(step, step.params, step.state, BATCH, steps=steps, path=tmp_path / "run")
    got = bc.sample(step, step.params, step.state, BATCH, steps=9, path=tmp_path / "run")  # the same step goes on too
    assert got.complete and torch.equal(flat(got[-1]), flat(want[-1])) and torch.equal(got.loss, want.loss)


def test_the_state_holds_tensors_only_and_the_global_generator_is_left_alone():
    step, before = built("SGHMC", "cosine"), torch.get_rng_state()
    tree: Any = step(step.params, step.state, BATCH)[1]
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.is_tensor(x) for x in optree.tree_leaves(tree))


def test_it_is_an_ordinary_loop_where_the_model_draws_nothing():
    def quadratic(model, batch):
        return model(batch).square().mean(), {"size": batch.shape[0]}

    models = [nn.Linear(3, 1) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in models]
    step, x = bc.optim.as_step(models[0], optimizers[0], quadratic), torch.ones(2, 3)
    params, _, info = run(step, step.params, step.state, 3, x)
    for _ in range(3):
        descend(optimizers[1], models[1](x).square().mean())
    assert all(torch.equal(p, q.detach()) for p, q in zip(params.values(), models[1].parameters()))
    assert info.aux == {"size": 2}


def test_foreign_params_and_losses_of_something_else_are_refused_with_both_sides_named():
    step = built("SGHMC", None)
    with pytest.raises(ValueError, match=r"params has the tree"):
        step({"w": torch.ones(1)}, step.state, BATCH)
    with pytest.raises(ValueError, match=r"params at 0.bias has shape \(9,\), the parameter \(4,\)"):
        step({**step.params, "0.bias": torch.ones(9)}, step.state, BATCH)
    step.loss = lambda model, batch: torch.ones(())
    with pytest.raises(ValueError, match="depends on the model's parameters"):
        step(step.params, step.state, None)


@pytest.mark.parametrize(
    ("optimizer_of", "scheduler_of", "words"),
    [
        (lambda p: bc.optim.IVON(p, 0.1, temperature=1.0), None, "IVON takes gradients at draws"),
        (torch.optim.LBFGS, None, "LBFGS evaluates the loss several times"),
        (torch.optim.SGD, torch.optim.lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau asks for a metric"),
    ],
)
def test_what_asks_for_more_than_a_gradient_is_refused_before_anything_moves(optimizer_of, scheduler_of, words):
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model.parameters())
    with pytest.raises(ValueError, match=words):
        bc.optim.as_step(model, optimizer, loss, scheduler=scheduler_of and scheduler_of(optimizer))


# Temperatures of runs of the optimizer classes through ``as_step``


T = 0.7
STIFF = torch.linspace(0.5, 2.0, 600)


def bowl():
    """Parameters of curvatures ``k``, and some of curvature 1."""
    parts = {"w": nn.Parameter(torch.zeros(600)), "v": nn.Parameter(torch.zeros(400))}
    return Net(lambda net: (STIFF * net.w**2).sum() / 2 + (net.v**2).sum() / 2, **parts)


RUNS = {
    "SGHMC": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T),
    "decay": lambda p: bc.optim.SGD(p, 0.1, 0.9, weight_decay=0.5, temperature=T),
    "Adam, frozen": lambda p: bc.optim.Adam(p, 0.1, eps=1.0, temperature=T, freeze_after=100),
    "climbing": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T, maximize=True),
}


def temperatures(optimizer, model, sign=1.0, steps=500):
    step = bc.optim.as_step(model, optimizer, lambda model, batch: sign * model())
    draws = bc.sample(step, step.params, step.state, None, steps=steps, burn_in=150, thinning=4)
    loss = lambda p, batch: sign * torch.func.functional_call(model, p, ())  # noqa: E731
    return bc.diagnostics.doctor(draws, optimizer, loss, [None]).numbers


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_has_the_temperature_that_it_was_given(kind):
    """Within 5 standard errors of 1; two-sided false alarms below 1e-4."""
    model = bowl()
    found = temperatures(RUNS[kind](model.named_parameters()), model, -1.0 if kind == "climbing" else 1.0)
    for leaf in "wv":
        error = found[f"  its standard error, {leaf}"]
        assert abs(found[f"temperature, {leaf}"] - 1) < 5 * error + 0.005 and error < 0.06


@pytest.mark.slow
def test_what_cannot_be_read_is_refused():
    model = bowl()
    other = bc.optim.SGHMC([("elsewhere", model.w), ("nowhere", model.v)], 0.1, temperature=T)
    for optimizer, error, words in (
        (torch.optim.SGD(model.parameters(), 0.1), TypeError, "gradient transformation, or an optimizer"),
        (
            bc.optim.AdamW(model.named_parameters(), 0.01, eps=1.0, temperature=T),
            ValueError,
            "decoupled weight decay",
        ),
        (other, ValueError, "gives noise to elsewhere, nowhere"),
    ):
        with pytest.raises(error, match=words):
            temperatures(optimizer, model, steps=200)
    with pytest.raises(ValueError, match="named_parameters"):
        bc.optim.SGHMC(model.parameters(), 0.1, temperature=T).thermal_leaves()
    other.param_groups[0]["temperature"] = lambda step: T
    with pytest.raises(TypeError, match="SGHMC: temperature must be a real number"):
        other.thermal_leaves()
