"""``bc.optim.as_step``: a model and an optimizer as the step of this library's loops."""

import copy
from typing import Any

import optree
import pytest
import torch
from torch import nn

import bayesopt_chain as bc


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


def test_the_state_holds_tensors_only():
    step = built("SGHMC", "cosine")
    tree: Any = step(step.params, step.state, BATCH)[1]
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
        optimizers[1].zero_grad()
        models[1](x).square().mean().backward()
        optimizers[1].step()
    assert all(torch.equal(p, q.detach()) for p, q in zip(params.values(), models[1].parameters()))
    assert info.aux == {"size": 2}


def test_the_global_generator_is_left_alone():
    step = built("SGHMC", None)
    before = torch.get_rng_state()
    step(step.params, step.state, BATCH)
    assert torch.equal(before, torch.get_rng_state())


def test_foreign_params_and_losses_of_something_else_are_refused_with_both_sides_named():
    step = built("SGHMC", None)
    with pytest.raises(ValueError, match=r"params are \['w'\], the model's parameters are"):
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


class Bowl(torch.nn.Module):
    """Parameters of curvatures ``k``, and some of curvature 1."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(600))
        self.v = torch.nn.Parameter(torch.zeros(400))

    def forward(self):
        return (STIFF * self.w**2).sum() / 2 + (self.v**2).sum() / 2


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
    model = Bowl()
    found = temperatures(RUNS[kind](model.named_parameters()), model, -1.0 if kind == "climbing" else 1.0)
    for leaf in "wv":
        error = found[f"  its standard error, {leaf}"]
        assert abs(found[f"temperature, {leaf}"] - 1) < 5 * error + 0.005 and error < 0.06


@pytest.mark.slow
def test_what_cannot_be_read_is_refused():
    model = Bowl()
    with pytest.raises(ValueError, match="named_parameters"):
        bc.optim.SGHMC(model.parameters(), 0.1, temperature=T).thermal_leaves()
    with pytest.raises(TypeError, match="gradient transformation, or an optimizer"):
        temperatures(torch.optim.SGD(model.parameters(), 0.1), model, steps=200)
    with pytest.raises(ValueError, match="decoupled weight decay"):
        temperatures(bc.optim.AdamW(model.named_parameters(), 0.01, eps=1.0, temperature=T), model, steps=200)
    other = bc.optim.SGHMC([("elsewhere", model.w), ("nowhere", model.v)], 0.1, temperature=T)
    with pytest.raises(ValueError, match="gives noise to elsewhere, nowhere"):
        temperatures(other, model, steps=200)
