"""Optimizers whose noise leaves room for that of the batches: exact by enumeration of every order, and refused elsewhere."""

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import heating
from bayesopt_chain.testing import NormalProbe, assert_bitwise_equal
from tests.diagnostics.oracle import DOUBLE, enumerated, lyapunov
from tests.diagnostics.test_room import D, T, problem

EYE = torch.eye(D, dtype=DOUBLE)
RULES = {
    "SGHMC": (lambda p, **k: bc.optim.SGHMC(p, 0.2, 0.8, **k), bc.sghmc(0.2, 0.8, temperature=T), 0.0),
    "SGLD": (lambda p, **k: bc.optim.SGLD(p, 0.3, **k), bc.sgld(0.3, temperature=T), 0.0),
    "SGD with dampening and decay": (
        lambda p, **k: bc.optim.SGD(p, 0.2, 0.8, 0.3, 0.1, **k),
        bc.sgd(0.2, 0.8, 0.3, 0.1, temperature=T),
        0.1,
    ),
    "SGD with a momentum of 0.03": (
        lambda p, **k: bc.optim.SGD(p, 0.2, 0.03, **k),
        bc.sgd(0.2, 0.03, temperature=T),
        0.0,
    ),
}


def report_of(chain=RULES["SGHMC"][1], order="reshuffled", like=None, strength=0.3, dtype=DOUBLE):
    H, _, _, noise = problem(strength=strength, like=like)
    return heating(chain, noise, order=order, steps_per_epoch=4, curvature=H.to(dtype), again=noise)


def sghmc(params, room_for=None, temperature=T, **more):
    return RULES["SGHMC"][0](params, temperature=temperature, room_for=room_for, **more)


def leaves(*sizes, dtype=DOUBLE):
    return [torch.zeros(n, dtype=dtype, requires_grad=True) for n in sizes]


def affine(make, H, params, order=None):
    """``M, Gamma, F`` of an optimizer on a quadratic loss; ``order`` are the rows of ``H`` that each parameter has."""
    optimizer = make(params)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    rows = order or list(torch.arange(D).split([p.numel() for p in params]))

    def step(noise, normals=None):
        theta = torch.zeros(D, dtype=DOUBLE)
        for p, at in zip(params, rows):
            theta[at] = p.detach()
        for p, at in zip(params, rows):
            p.grad = (H @ theta + noise)[at]
        with NormalProbe(normals) as probe:
            optimizer.step()
        return probe.drawn

    still = torch.zeros(D, dtype=DOUBLE)
    for _ in range(3):
        drawn = step(still)
    slots = [p.data for p in params]
    slots += [x for p in params for x in optimizer.state[p].values() if torch.is_tensor(x)]
    sizes = [x.numel() for x in slots]
    for p in params:
        optimizer.state[p].update({name: 0.0 for name in optimizer.state[p] if name.endswith("surplus")})

    def image(x, noise=still, normals=None):
        for slot, piece in zip(slots, x.split(sizes)):
            slot.copy_(piece)
        step(noise, normals)
        return torch.cat(slots)

    zero = torch.zeros(sum(sizes), dtype=DOUBLE)
    M = torch.stack([image(e) for e in torch.eye(len(zero), dtype=DOUBLE)], 1)
    gamma = torch.stack([-image(zero, e) for e in EYE], 1)
    F = torch.stack([image(zero, normals=e) for e in torch.eye(drawn, dtype=DOUBLE)], 1)
    return M, gamma, F


@pytest.mark.sweep(4)
@pytest.mark.parametrize("order", ["independent", "reshuffled", "palindrome"])
@pytest.mark.parametrize("rule", RULES)
def test_with_room_an_optimizer_has_the_covariance_of_full_gradients_under_every_order(rule, order):
    make, chain, decay = RULES[rule]
    H, n, _, _ = problem()
    wrong = {}
    for room in (report_of(chain, order), None):
        M, gamma, F = affine(lambda p, room=room: make(p, temperature=T, room_for=room), H, leaves(D))
        got = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, order)[0])[:D, :D]
        wrong[room is None] = float((got @ (H + decay * EYE) / T - EYE).abs().max())
    assert wrong[False] < 1e-10 and wrong[True] > 1e-3


def test_leaves_are_told_by_their_names_whatever_their_order():
    """optree puts the keys of a dictionary in the order of the alphabet, a module its parameters in that of their making."""
    H, n, _, _ = problem()
    names = ["c", "a", "b"]
    report = report_of(like={name: torch.zeros(1, dtype=DOUBLE) for name in names})
    named = list(zip(names, leaves(1, 1, 1)))
    rows = [torch.tensor([sorted(names).index(name)]) for name in names]
    M, gamma, F = affine(lambda p: sghmc(p, report), H, named, rows)
    at = torch.cat([(rows[i] == j).nonzero()[:, 0] + i for j in range(D) for i in range(D)])
    got = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, "reshuffled")[0])[at][:, at]
    assert (got @ H / T - EYE).abs().max() < 1e-10
    with pytest.raises(ValueError, match=r"of the leaves \['a'\], \['b'\], \['c'\], the parameters are a list without"):
        sghmc([p for _, p in named], report)


def test_it_is_the_chain_with_room_step_by_step():
    """With the draws of both handed in: the chain carries in its velocity what the optimizer keeps as its last draw."""
    H = problem()[0]
    report, generator = report_of(like=[torch.zeros(2, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)]), torch.Generator()
    xi = torch.randn(7, D, dtype=DOUBLE, generator=generator.manual_seed(0))
    xi[0] = 0.0  # the first draws of both have scales of their own
    paths = []
    for make in (
        lambda p: sghmc(p, report),
        lambda p: bc.optim.Optimizer(p, lambda group: bc.sghmc(0.2, 0.8, temperature=T, room_for=report)),
    ):
        params, path = leaves(2, 1), []
        optimizer = make(params)
        for draw in xi:
            theta = torch.cat([p.detach() for p in params])
            for p, g in zip(params, (H @ theta).split([2, 1])):
                p.grad = g
            with NormalProbe(draw):
                optimizer.step()
            path.append(torch.cat([p.detach() for p in params]).clone())
        paths.append(torch.stack(path))
    assert paths[0].abs().min(1).values[1:].min() > 0
    torch.testing.assert_close(paths[0], paths[1], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_leaves_of_any_size_leave_room_with_both_streams():
    """A leaf of more elements than are usually treated together is treated whole."""
    n = 2**18 + 3
    rows = torch.randn(8, n, generator=torch.Generator().manual_seed(0)) * 1e-3
    loss = lambda w, batch: (w.square().sum() + 2 * (batch @ w).mean()) / 2  # noqa: E731
    noise = bc.diagnostics.gradient_noise(loss, torch.zeros(n), [x[None] for x in rows])
    curvature = lambda v: v  # noqa: E731
    chain = bc.sghmc(0.2, 0.8, temperature=T)
    known = {"order": "independent", "steps_per_epoch": 8, "curvature": curvature, "again": noise, "tolerance": 1e3}
    report = heating(chain, noise, **known)
    draws = []
    for room in (report, None):
        (w,) = leaves(n, dtype=torch.float32)
        torch.manual_seed(1)
        optimizer = sghmc([w], room, heat_guard=None)
        for _ in range(2):
            w.grad = torch.zeros(n)
            optimizer.step()
        draws.append(optimizer.state[w]["noise"])
    torch.testing.assert_close(draws[0], report.room.leave([draws[1]])[0])
    assert not torch.equal(*draws)


def test_at_temperature_zero_it_is_torchs_sgd_to_the_last_bit():
    report, runs = report_of(), []
    for make in (lambda p: sghmc(p, report, temperature=0.0), lambda p: torch.optim.SGD(p, 0.2, 0.8)):
        (w,) = leaves(D)
        optimizer = make([w])
        for k in range(5):
            w.grad = (w.detach() + k).sin()
            optimizer.step()
        runs.append(w.detach())
    assert_bitwise_equal(*runs)


def stepped(optimizer, steps=3):
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = (p.detach() + 1.0).sin()
        optimizer.step()
    return [p.detach().clone() for p in optimizer.param_groups[0]["params"]]


def test_a_state_dict_goes_on_to_the_last_bit_and_knows_its_room():
    report = report_of()
    (w,) = leaves(D)
    optimizer = sghmc([w], report)
    stepped(optimizer)
    for load in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        twin = load(optimizer)
        assert twin.room == optimizer.room
    saved, at = copy.deepcopy(optimizer.state_dict()), w.detach().clone()
    (expected,) = stepped(optimizer)
    (again,) = stepped(twin)
    assert_bitwise_equal(again, expected)
    other = sghmc([at.requires_grad_()], copy.deepcopy(report))
    other.load_state_dict(saved)
    (got,) = stepped(other)
    assert_bitwise_equal(got, expected)
    for room, words in ((None, "by a report"), (report_of(strength=0.2), "by another report")):
        plain = sghmc(leaves(D), room)
        before = copy.deepcopy(plain.state_dict())
        with pytest.raises(
            ValueError, match=rf"the run that was saved left room for its batches {words}; make the opt"
        ):
            plain.load_state_dict(saved)
        assert plain.state_dict() == before
    trained = torch.optim.SGD(leaves(D), 0.2, 0.8)
    stepped(trained)
    fresh = sghmc(leaves(D), report)
    fresh.load_state_dict(trained.state_dict())
    assert fresh.param_groups[0]["noise_room"] == report.room.fingerprint
    stepped(fresh)


def test_as_a_step_it_samples_and_refuses_batches_of_another_order_or_size():
    _, n, _, _ = problem()
    model = torch.nn.Linear(D, 1, bias=False, dtype=DOUBLE)
    report = report_of(like={"weight": torch.zeros(1, D, dtype=DOUBLE)})
    optimizer = sghmc(model.named_parameters(), report, generator=torch.Generator().manual_seed(0))
    step = bc.optim.as_step(model, optimizer, lambda model, batch: model(batch).mean() + model.weight.square().sum())
    data, set_of = bc.epochs(n, 1, seed=0), TensorDataset(n)
    for batches in (
        bc.epochs(n, 1, order="independent"),
        bc.epochs(n, 2),
        bc.epochs(n, 1, leave_out=torch.tensor([0])),
        DataLoader(set_of, 1),
        DataLoader(set_of, 2, shuffle=True),
        DataLoader(set_of, 1, sampler=torch.utils.data.RandomSampler(set_of, replacement=True)),
    ):
        with pytest.raises(
            ValueError, match=r"report of room_for= is of reshuffled batches, 4 an epoch, and these are"
        ):
            bc.sample(step, step.params, step.state, batches, steps=2)
    with pytest.raises(
        ValueError, match=r"last batch of an epoch has 1 data and the others 3, .* give the loader drop_last"
    ):
        bc.sample(step, step.params, step.state, DataLoader(set_of, 3, shuffle=True), steps=2)
    draws = bc.sample(step, step.params, step.state, data, steps=4)
    assert len(draws) == 4 and draws.params["weight"].isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 0.1}, r"was made for the chain .*scale_by_neg_lr\(0\.2\).*, and this one is .*scale_by_neg_lr\(0\.1\)"),
        ({"momentum": 0.9}, "was made for the chain"),
        ({"temperature": 2 * T}, "was made for the chain"),
        ({"weight_decay": 0.1}, "was made for the chain"),
        ({"dampening": 0.1}, "was made for the chain"),
        ({"maximize": True}, "was made for the chain"),
        ({"lr": torch.tensor(0.2)}, "that is a tensor may change"),
        ({"temperature": torch.tensor(T)}, "that is a tensor may change"),
        ({"nesterov": True}, "Nesterov's step has two noises here"),
        ({"keep_draws": False}, "keep_draws=False makes draws again piece by piece"),
        ({"heat_guard": bc.diagnostics.HeatGuard()}, "heat_guard would take the noise"),
        ({"steps_per_epoch": 5}, "steps_per_epoch=5, and the report of room_for= is of 4 an epoch"),
    ],
)
def test_an_optimizer_of_other_numbers_than_the_reports_is_refused_where_it_is_made(options, words):
    usual = {"lr": 0.2, "momentum": 0.8, "temperature": T, "room_for": report_of()}
    bc.optim.SGD(leaves(D), **{**usual, "steps_per_epoch": 4})
    with pytest.raises(ValueError, match=words):
        bc.optim.SGD(leaves(D), **{**usual, **options})


def test_other_parameters_than_those_of_the_report_are_refused():
    report = report_of()
    for params, words in (
        (leaves(4), r"leaves of the shapes \[\(3,\)\], the parameters have \[\(4,\)\]"),
        (leaves(D, dtype=torch.float32), "is of leaves in float64, the parameters are in float32"),
        (leaves(2, 1), "is of the leaves , the parameters are a list without names"),
        ([{"params": leaves(D)}, {"params": leaves(D)}], "is of one group of parameters, and here are 2"),
        ([p.to(t) for p, t in zip(leaves(2, 1), (DOUBLE, torch.float32))], "must have one dtype"),
    ):
        params = [p.detach().requires_grad_() if torch.is_tensor(p) else p for p in params]
        with pytest.raises(ValueError, match=words):
            sghmc(params, report)
    with pytest.raises(TypeError, match=r"bc\.optim\.Adam: its preconditioner learns.*SGHMC and SGLD take it"):
        bc.optim.Adam(leaves(D), temperature=T, room_for=report)
    with pytest.raises(
        TypeError, match=r"bc\.optim\.SGHMC: room_for must be a report of bc\.diagnostics\.heating, got int"
    ):
        sghmc(leaves(D), 3)
    with pytest.raises(ValueError, match="room_for= is of the parameters that are there; make another report"):
        sghmc(leaves(D), report).add_param_group({"params": leaves(1)})
    with pytest.raises(
        ValueError, match=r"directions are of whole parameters, and these are sharded: leave room_for out"
    ):
        sghmc(bc.distributed.part([("w", leaves(D)[0])], {"w": ("w", 3)}), report)


def test_what_changes_while_it_runs_is_refused_before_anything_moves():
    report = report_of(like=[torch.zeros(2, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)])

    def lower(optimizer):
        optimizer.param_groups[0]["lr"] = 0.1

    def lose(optimizer):
        optimizer.param_groups[0]["params"][0].grad = None

    def forget(optimizer):
        optimizer.state[optimizer.param_groups[0]["params"][0]].clear()

    for change, words in (
        (lower, "was made for the chain"),
        (lose, "every parameter needs a gradient, .*; 1 have none"),
        (forget, r"others have not; optimizer\.state\.clear\(\) starts all of them anew"),
    ):
        optimizer = sghmc(leaves(2, 1), report)
        before = stepped(optimizer)
        change(optimizer)
        with pytest.raises(ValueError, match=words):
            optimizer.step()
        assert_bitwise_equal([p.detach() for p in optimizer.param_groups[0]["params"]], before)
    optimizer.state.clear()
    stepped(optimizer)
    optimizer.param_groups[0].update(temperature=0.0, lr=0.1)
    stepped(optimizer)
