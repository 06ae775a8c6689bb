"""At temperature 0 the classes are torch's, to the last bit, and torch's users find what they expect at any temperature."""

import copy
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bayesopt_chain as bc
from tests.optim.probe import walk

CLASSES = [
    name
    for name in bc.optim.__all__
    if name not in ("as_step", "IVON", "Optimizer", "SGLD", "SGHMC", "LBFGS", "SparseAdam")
]
SAMPLING = ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"]

HYPER = {
    "SGD": dict(
        momentum=st.sampled_from([0.0, 0.5, 0.9]),
        weight_decay=st.sampled_from([0.0, 0.1]),
        nesterov=st.booleans(),
        dampening=st.sampled_from([0.0, 0.3]),
        maximize=st.booleans(),
    ),
    "Adam": dict(amsgrad=st.booleans(), weight_decay=st.sampled_from([0.0, 0.1]), maximize=st.booleans()),
    "AdamW": dict(amsgrad=st.booleans(), weight_decay=st.sampled_from([0.0, 0.1]), maximize=st.booleans()),
    "Adamax": dict(weight_decay=st.sampled_from([0.0, 0.1])),
    "NAdam": dict(decoupled_weight_decay=st.booleans(), weight_decay=st.sampled_from([0.0, 0.1])),
    "RAdam": dict(decoupled_weight_decay=st.booleans(), weight_decay=st.sampled_from([0.0, 0.1])),
    "RMSprop": dict(momentum=st.sampled_from([0.0, 0.9]), centered=st.booleans()),
    "Adagrad": dict(lr_decay=st.sampled_from([0.0, 0.1]), weight_decay=st.sampled_from([0.0, 0.1])),
    "Adadelta": dict(rho=st.sampled_from([0.9, 0.5])),
    "Adafactor": dict(),
    "ASGD": dict(),
    "Muon": dict(),
    "Rprop": dict(),
}
IMPLEMENTATIONS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SCHEDULERS = [
    None,
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
]


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))


def train(cls, groups_lr, accumulate, scheduler, steps=8, clip=None, **kwargs):
    """Parameters after a few steps of an ordinary loop: two groups, dropout, accumulation, a scheduler."""
    model = network()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices[:1]}, {"params": matrices[1:], "lr": groups_lr}]
    if cls.__name__ != "Muon":
        groups[1]["params"] += [p for p in model.parameters() if p.ndim == 1]
    optimizer = cls(groups, **kwargs)
    plan = scheduler(optimizer) if scheduler else None
    x, y = torch.randn(16, 4), torch.randn(16, 2)
    for _ in range(steps):
        for xs, ys in zip(x.chunk(accumulate), y.chunk(accumulate)):
            ((model(xs) - ys) ** 2).mean().div(accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if plan:
            plan.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CLASSES)
@settings(max_examples=12)
@given(data=st.data())
def test_at_temperature_0_every_class_is_torchs_bitwise(name, data):
    ours, theirs = getattr(bc.optim, name), getattr(torch.optim, name)
    kwargs = {key: data.draw(values, key) for key, values in HYPER[name].items()}
    if kwargs.get("nesterov") and (not kwargs["momentum"] or kwargs["dampening"]):
        kwargs["nesterov"] = False
    offered = inspect.signature(theirs).parameters
    kwargs.update(data.draw(st.sampled_from([i for i in IMPLEMENTATIONS if set(i) <= set(offered)] or [{}])))
    scheduler = data.draw(st.sampled_from(SCHEDULERS))
    if name not in ("SGD", "Adam", "AdamW") and scheduler is SCHEDULERS[2]:
        scheduler = None  # OneCycleLR wants a momentum or betas
    if name == "SGD" and not kwargs["momentum"] and scheduler is SCHEDULERS[2]:
        kwargs["momentum"] = 0.9
    shape = dict(
        groups_lr=data.draw(st.sampled_from([0.003, 0.03])),
        accumulate=data.draw(st.sampled_from([1, 4])),
        scheduler=scheduler,
        clip=data.draw(st.sampled_from([None, 0.5])),
    )
    expected, _ = train(theirs, lr=0.01, **shape, **kwargs)
    got, optimizer = train(ours, lr=0.01, **shape, temperature=0.0, **kwargs)
    assert torch.equal(got, expected)
    assert isinstance(optimizer, theirs) and optimizer.param_groups[0]["noise_key"] is None


def test_lbfgs_and_sparse_adam_are_torchs_at_temperature_0():
    def quadratic(cls):
        theta = torch.tensor([1.0, -2.0], requires_grad=True)
        optimizer = cls([theta], lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = (theta**2).sum()
            loss.backward()
            return loss

        first = optimizer.step(closure)
        return theta.detach(), first

    for ours, theirs in zip(quadratic(bc.optim.LBFGS), quadratic(torch.optim.LBFGS)):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    tables = [torch.ones(5, 2, requires_grad=True) for _ in range(2)]
    for table, cls in zip(tables, (bc.optim.SparseAdam, torch.optim.SparseAdam)):
        walk(cls([table], lr=0.1), 3, of_one_row)
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    "name", [n for n in bc.optim.__all__ if n not in ("as_step", "IVON", "Optimizer", "SGLD", "SGHMC")]
)
def test_signatures_are_torchs_and_then_ours(name):
    ours = inspect.signature(getattr(bc.optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[k].default == theirs[k].default for k in theirs)
    extra = [ours[k] for k in list(ours)[len(theirs) :]]
    assert [p.name for p in extra][:3] == ["temperature", "generator", "keep_draws"]
    assert all(p.kind is p.KEYWORD_ONLY for p in extra)


@pytest.mark.parametrize(
    "name", ["Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Muon", "RAdam", "Rprop", "SparseAdam"]
)
def test_optimizers_without_matched_noise_refuse_a_temperature_by_name(name):
    cls, theta = getattr(bc.optim, name), torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=f"bc.optim.{name}: no temperature above 0: .*use bc.optim"):
        cls([theta], temperature=0.1)
    optimizer = cls([theta])
    optimizer.param_groups[0]["temperature"] = 0.1
    theta.grad = torch.ones(2, 2)
    with pytest.raises(ValueError, match="no temperature above 0"):
        optimizer.step(lambda: theta.sum())
    assert torch.equal(theta.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_at_a_temperature_the_three_implementations_agree_to_rounding(name, implementation):
    cls = getattr(bc.optim, name)
    if not set(implementation) <= set(inspect.signature(cls).parameters):
        pytest.skip("torch has no such implementation")

    def run(**how):
        torch.manual_seed(0)
        theta = torch.linspace(-1, 1, 33, dtype=torch.float64).requires_grad_()
        return walk(cls([theta], lr=0.01, temperature=0.1, **how), 5, lambda p: p + 0.1)

    torch.testing.assert_close(run(**implementation), run(foreach=False), rtol=1e-12, atol=1e-12)


def test_hooks_run_once_for_each_step_even_after_torchs_own_class_was_used():
    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)  # torch patches its class on first use
    theta, calls = torch.ones(2, requires_grad=True), []
    for temperature in (0.0, 0.1):
        optimizer = bc.optim.SGD([theta], lr=0.1, temperature=temperature)
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        walk(optimizer)
    assert calls == ["pre", "post"] * 2


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned():
    theta, calls = torch.ones(2, requires_grad=True), []
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and loss.item() == 2.0


def test_groups_have_temperatures_of_their_own_and_may_come_later_and_what_has_no_gradient_gets_no_noise():
    cold, hot, late, unused = (torch.zeros(3, requires_grad=True) for _ in range(4))
    optimizer = bc.optim.SGD([{"params": [cold]}, {"params": [hot, unused], "temperature": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [late], "temperature": 0.2, "lr": 0.01})
    for p in (cold, hot, late):
        p.grad = torch.zeros(3)
    optimizer.step()
    assert not cold.any() and hot.any() and late.any() and not unused.any() and unused not in optimizer.state
    assert [g["noise_count"] for g in optimizer.param_groups] == [0, 1, 1]
    assert len({g["noise_key"] for g in optimizer.param_groups}) == 1


def test_a_tensor_temperature_is_read_at_every_step():
    theta, dial = torch.zeros(3, requires_grad=True), torch.tensor(0.0)
    optimizer = bc.optim.SGLD([theta], 0.1, temperature=dial)
    assert not walk(optimizer).any()
    dial.fill_(0.5)
    assert walk(optimizer).all()


class Wrapped(torch.Tensor):
    """A tensor that keeps its numbers elsewhere, as quantised ones do."""


def dense(p):
    return torch.ones_like(p)


def of_one_row(table):
    return torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (5, 2))


REFUSED = {  # how it is made, what changes before its step, what is said; and the parameter and its gradient
    "a negative temperature": (dict(temperature=-1.0), {}, "temperature must be non-negative and finite"),
    "no temperature": (dict(temperature=float("nan")), {}, "temperature must be a real number"),
    "an infinite one": (dict(temperature=float("inf")), {}, "temperature must be a real number"),
    "one that becomes infinite": ({}, dict(temperature=torch.tensor(float("inf"))), "temperature must be non-negative"),
    "one that becomes negative": (dict(momentum=0.9), dict(temperature=-1.0), "temperature must be non-negative"),
    "one that is lost": (dict(momentum=0.9), dict(temperature=float("nan")), "temperature must be non-negative"),
    "a momentum of 1": (dict(momentum=1.0), {}, "momentum must lie"),
    "a momentum that falls to 0": (
        dict(momentum=0.9),
        dict(momentum=0.0),
        "a momentum that falls to 0 .* keep it above 0",
    ),
    "Nesterov's": (dict(momentum=0.9, nesterov=True), dict(momentum=0.0), "Nesterov's momentum"),
    "all is dampened": (dict(momentum=0.9, dampening=1.0), {}, "dampening must be below 1"),
    "an average beyond 1": (dict(cls="RMSprop", alpha=1.5), {}, "alpha must be a number from 0 to 1"),
    "an average that becomes 1": (dict(cls="Adam"), dict(betas=(1.0, 0.9)), r"betas\[0\] must lie in \[0, 1\)"),
    "squares that are averaged for ever": (dict(cls="AdamW"), dict(betas=(0.9, 1.0)), r"betas\[1\] must lie"),
    "no lr": (dict(lr=float("nan")), {}, "lr must be a real number"),
    "derivatives": (dict(differentiable=True), {}, r"differentiable=True at temperature > 0.*bc\.make_step"),
    "of Adam": (dict(cls="Adam", differentiable=True), {}, "differentiable"),
    "a graph": (dict(cls="Adam", capturable=True), {}, "capturable"),
    "complex": ({}, {}, "complex", torch.ones(2, dtype=torch.complex64), dense),
    # torch 2.13 on a CPU leaves full vectors of them where they are, so that noise alone would move them
    "fused, of 16 bits": (dict(fused=True), {}, "leave fused out", torch.ones(64, dtype=torch.float16), dense),
    "sparse": (dict(momentum=0.9), {}, "sparse", torch.ones(5, 2), of_one_row),
    "wrapped": ({}, {}, "a parameter of type Wrapped at temperature > 0", torch.ones(2).as_subclass(Wrapped), dense),
}


@pytest.mark.parametrize("value", [None, "much", torch.ones(2), 10**400], ids=["None", "a word", "two", "too large"])
@pytest.mark.parametrize("name", ["temperature", "lr", "momentum"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_number_that_becomes_something_else_is_refused_by_name_before_anything_moves(name, value, steps):
    theta = torch.ones(2, requires_grad=True)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=0.1)
    walk(optimizer, steps)
    theta.grad, before = torch.ones(2), theta.detach().clone()
    optimizer.param_groups[0][name] = value
    with pytest.raises((TypeError, ValueError), match=f"bc.optim.SGHMC: {name} must be a real number"):
        optimizer.step()
    assert torch.equal(theta, before)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_matched_noise_is_refused_by_name_before_anything_moves(case):
    made, change, words, start, gradient = *REFUSED[case][:3], *(REFUSED[case][3:] or (torch.ones(2), dense))
    theta = start.clone().requires_grad_()
    theta.grad = gradient(theta)
    with pytest.raises(ValueError, match=words):
        options = {"lr": 0.1, "temperature": 0.1, **made}
        optimizer = getattr(bc.optim, options.pop("cls", "SGD"))([theta], **options)
        if change:
            optimizer.step()
            optimizer.param_groups[0].update(change)
            start = theta.detach().clone()
        optimizer.step()
    assert torch.equal(theta, start)


@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_without_momentum_move_all_rows_and_repeated_parameters_are_refused():
    table = torch.ones(5, 2, requires_grad=True)
    table.grad = of_one_row(table)
    bc.optim.SGLD([table], 0.1, temperature=0.1).step()
    assert not torch.equal(table[0], table[2])
    for params, words in (([table, table], "share memory"), ([("w", table)] * 2, "have the same name")):
        optimizer = bc.optim.SGLD(params, 0.1, temperature=0.1)
        table.grad, before = torch.ones(5, 2), table.detach().clone()
        with pytest.raises(ValueError, match=words):
            optimizer.step()
        assert torch.equal(table, before)


def test_low_precision_parameters_warn_where_noise_rounds_away():
    theta = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.warns(UserWarning, match="keep float32 parameters"):
        walk(bc.optim.SGHMC([theta], 1e-3, temperature=1e-6))


def scaled_step(model, optimizer, scaler, overflow=False):
    """A step of mixed precision, and the parameters behind it."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(5, 4)).float().square().mean()
    scaler.scale(loss).backward()
    for p in model.parameters():
        p.grad = torch.full_like(p, float("inf")) if overflow else p.grad
    scaler.step(optimizer)
    scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_autocast_and_a_gradient_scaler_leave_float32_parameters_and_skip_overflows_with_their_noise():
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = bc.optim.SGHMC(model.parameters(), 0.1, temperature=0.1, fused=True)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    first, second = (scaled_step(model, optimizer, scaler, overflow) for overflow in (False, True))
    assert (first != start).all() and torch.equal(first, second) and first.dtype == torch.float32
    assert optimizer.param_groups[0]["noise_count"] == 1


def test_a_gradient_scaler_gives_torchs_bits_with_the_fused_kernel_at_temperature_0():
    def run(cls):
        model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = cls(model.parameters(), 0.1, fused=True)
        return torch.stack([scaled_step(model, optimizer, scaler) for _ in range(3)])

    assert torch.equal(run(bc.optim.SGD), run(torch.optim.SGD))


@pytest.mark.parametrize("name", SAMPLING)
def test_a_large_leaf_gets_the_same_noise_block_by_block(name, monkeypatch):
    def run():
        torch.manual_seed(0)
        theta = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
        optimizer = getattr(bc.optim, name)([theta], lr=0.01, temperature=0.1)
        return walk(optimizer, 3, lambda p: p + 1.0)

    whole = run()
    monkeypatch.setattr("bayesopt_chain.optim._leaves.BLOCK", 64)
    assert torch.equal(run(), whole)


def test_noise_is_numbered_by_name_so_that_leaving_one_parameter_out_leaves_the_others_noise_alone():
    def noise(skip=(), freeze=()):
        model = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "abc"})
        for p in model.parameters():
            nn.init.zeros_(p)
        named = [(n, p) for n, p in model.named_parameters() if n not in skip]
        optimizer = bc.optim.SGLD(named, 0.1, temperature=0.1, generator=torch.Generator().manual_seed(1))
        for n, p in named:
            p.grad = None if n in freeze else torch.zeros_like(p)
        optimizer.step()
        return {n: p.detach() for n, p in named}

    full = noise()
    for other in (noise(skip=("a.weight",)), noise(freeze=("a.weight",))):
        assert torch.equal(full["b.weight"], other["b.weight"]) and torch.equal(full["c.weight"], other["c.weight"])
    assert not torch.equal(full["a.weight"], full["b.weight"])


def make_sghmc(group):
    return bc.sghmc(0.1, temperature=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: bc.optim.SGHMC(params, 0.1, temperature=0.1),
        lambda params: bc.optim.IVON(params, 0.1, temperature=0.1),
        lambda params: bc.optim.Optimizer(params, make_sghmc),
    ],
)
def test_deepcopy_goes_on_with_the_same_noise_and_fork_does_not(make):
    optimizer = make(network().parameters())
    walk(optimizer)
    o1, o2 = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
    o2.fork()
    ours, first, second = map(walk, (optimizer, o1, o2))
    assert torch.equal(ours, first) and not torch.equal(ours, second)
