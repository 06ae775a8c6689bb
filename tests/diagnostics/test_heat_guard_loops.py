"""The heat guard in loops of users: schedules, absent gradients, groups, sums, long memories, clips, and its time."""

import copy
import math
import pickle
import threading
import time
import warnings

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import heat_guard
from bayesopt_chain.diagnostics.heat import Heat, Leaf

N = 1000
SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(N, 5, generator=SOURCE)
Y = X.sum(1, keepdim=True) + torch.randn(N, 1, generator=SOURCE)
HOT = Heat(2.2, 0.3, 0.2, 0.0, 2.2, "independent", 0.0)


def eager(K=None, **options):
    return bc.diagnostics.HeatGuard(K, share=math.inf, **options)


def loop(
    steps, lr, batch=32, guard=None, schedule=None, model=None, groups=None, change=None, factor=1.0, momentum=0.9
):
    """What a loop was told, and its guard; ``change(t, model, optimizer)`` acts before the step."""
    torch.manual_seed(1)
    model = nn.Linear(5, 1) if model is None else model
    guard = eager() if guard is None else guard
    params = model.parameters() if groups is None else groups(model)
    optimizer = bc.optim.SGHMC(params, lr, momentum, temperature=1 / N, heat_guard=guard)
    schedule = None if schedule is None else schedule(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(steps):
            rows = torch.randint(N, (batch,)) if batch < N else slice(None)
            optimizer.zero_grad()
            (factor * (model(X[rows]) - Y[rows]).square().mean() / 2).backward()
            if change is not None:
                change(t, model, optimizer)
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return [str(w.message) for w in caught if "bayesopt_chain" in str(w.message) or "SGHMC" in str(w.message)], guard


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


# rates that change


SCHEDULES = {
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 20),
    "slow restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 310),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.02, 0.1, step_size_up=100),
    "warmup from 0": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, t / 200)),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_hot_loop_is_warned_of_under_rates_that_change_at_every_step(name):
    said, guard = loop(700, 0.1, schedule=SCHEDULES[name])
    assert len(said) == 1 and "times the variance asked for" in said[0] and guard.readings
    assert "Multiply every learning rate by" in said[0] or name == "warmup from 0"


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("batch", [32, N])
def test_a_cold_loop_is_silent_under_rates_that_change_at_every_step(name, batch):
    lr = 1e-4 if batch < N else 0.1
    schedules = {**SCHEDULES, "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, lr / 5, lr, step_size_up=100)}
    said, guard = loop(700, lr, batch, schedule=schedules[name])
    assert not said and guard.readings


@pytest.mark.parametrize("period", [7, 20, 60])
def test_the_heat_of_a_schedule_is_that_of_its_mean_rate_weighted_by_the_rate(period):
    """Noise of a known variance, 10 long windows; ``<r^2> / <r>`` is 3/4 of the peak for a cosine."""
    found = []
    for wave in (False, True):
        guard, noise = eager(above=math.inf, window=840), torch.Generator().manual_seed(0)
        for t in range(900):
            rate = 0.5 * (1 + math.cos(2 * math.pi * t / period)) + 1e-3 if wave else 1.0
            leaf = Leaf(torch.randn(10, generator=noise), torch.zeros(10), rate**0.5, 1.0, 0.9, number=0, rate=rate)
            guard.look(lambda leaf=leaf: [leaf], rate)
        found.append(guard.readings[0].rho)
    assert found[1] / found[0] == pytest.approx(0.75, rel=0.02)


def test_a_temperature_that_falls_in_a_window_is_read_at_what_the_sampler_injects():
    guard, noise = eager(above=math.inf, window=400), torch.Generator().manual_seed(0)
    for t in range(500):
        cold = 1.0 if t < 232 else 0.5
        leaf = Leaf(torch.randn(10, generator=noise), torch.zeros(10), (1 / cold) ** 0.5, cold, 0.9, number=0)
        guard.look(lambda leaf=leaf: [leaf], 0.1)
    assert guard.readings[0].rho == pytest.approx(1 / 0.75, rel=0.2)


def test_it_looks_again_soon_where_the_rate_rises():
    guard, noise = eager(), torch.Generator().manual_seed(0)
    for t in range(700):
        lr = 1e-3 if t < 200 else 1e-1
        leaf = Leaf(torch.randn(10, generator=noise), torch.zeros(10), lr**0.5, 1.0, 0.9, number=0, rate=lr)
        guard.look(lambda leaf=leaf: [leaf], lr)
    assert len(guard.readings) >= 2


@pytest.mark.slow
def test_a_chain_with_a_schedule_is_read_at_its_rates():
    params = {"w": torch.zeros(5, 1)}
    found = []
    for lr in (0.1, lambda step: 0.05 * (1 + torch.cos(torch.as_tensor(step) * math.pi / 10))):
        guard = eager(above=math.inf)
        tx = bc.sghmc(lr, 0.9, temperature=1 / N)
        step = bc.make_step(lambda p, b: (b[0] @ p["w"] - b[1]).square().mean() / 2, tx, heat_guard=guard)
        bc.sample(step, params, tx.init(params), bc.epochs((X, Y), 32, order="independent", seed=0), steps=300)
        found.append(guard.readings[-1].rho)
    assert 0.2 < found[1] / found[0] < 1.5


# steps and parameters that are missing


@pytest.mark.sweep(1)
@pytest.mark.parametrize("when", ["once", "every 40", "temperature"])
def test_steps_without_gradients_or_temperature_do_not_blind_it(when):
    def change(t, model, optimizer):
        if (when == "once" and t == 60) or (when == "every 40" and t % 40 == 39):
            for p in model.parameters():
                p.grad = None
        if when == "temperature":
            optimizer.param_groups[0]["temperature"] = 1 / N if t % 200 > 50 else 0.0

    said, guard = loop(1000, 0.05, change=change)
    assert guard.readings and len(said) == 1


def test_a_parameter_that_is_rarely_missing_is_read_and_one_that_often_is_left_out_of_a_window():
    def change(t, model, optimizer):
        if t % 30 == 0:
            model[0].bias.grad = None
        if t % 2:
            model[2].bias.grad = None

    _, guard = loop(160, 0.001, model=network(), change=change)
    assert len(guard.readings) == 1
    _, guard = loop(100, 0.001, model=network(), change=change)
    assert guard._sketch is not None and len(guard._seen) == 3


@pytest.mark.slow
def test_what_no_window_can_look_at_is_said_once():
    def change(t, model, optimizer):
        optimizer.param_groups[0]["temperature"] = 1 / N if t % 3 else 0.0

    said, guard = loop(1500, 0.05, change=change)
    assert not guard.readings and len(said) == 1 and "was not looked at" in said[0]


# what is said


def test_the_advice_of_groups_with_several_rates_is_a_factor():
    def said_at(slow):
        def groups(m):
            return [{"params": m[0].parameters(), "lr": slow}, {"params": m[2].parameters(), "lr": 0.1}]

        return loop(400, 0.1, model=network(), groups=groups)[0][0]

    assert "Use lr" in said_at(0.0)  # a group at rate 0 is no chain
    said = said_at(1e-5)
    assert "Multiply every learning rate by" in said and "lr 0 " not in said
    assert "Use lr" in loop(400, 0.1)[0][0]


def judged(guard, momentum=0.9, **changes):
    guard._momentum, heat = momentum, HOT._replace(**changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard._judge(heat)
        guard._judge(heat)
    return [str(w.message) for w in caught]


def test_a_sum_over_the_batch_is_named_before_a_rate_is():
    said, _ = loop(400, 0.001, factor=32.0)
    assert "check first that the loss is a mean over the batch" in said[0].split("lr")[0]
    assert "check first" not in judged(eager())[0]
    # where the epochs and the curvature are known, a well-specified model has rho = K lr_eff k / 2
    mean = {"rho": 30.0, "excess": 20.0, "curvature": 0.2}
    assert "check first" not in judged(eager(31), **mean)[0]
    assert "check first" in judged(eager(31), **{**mean, "curvature": 0.02})[0]


def test_a_long_memory_without_known_epochs_is_asked_for_them_and_gets_no_rate():
    """The setting of the documents: a memory of three epochs, in which reshuffled batches heat by 13 %."""
    K = N // 32
    said = judged(eager(), momentum=1 - 0.3 / K, rho=5 / 3, excess=5 / 3)
    assert len(said) == 1 and "pass steps_per_epoch=" in said[0] and "Use" not in said[0] and "lr" not in said[0]
    assert "Use" in judged(eager(order="independent"), momentum=1 - 0.3 / K)[0]
    assert bc.diagnostics.heat.reshuffled_excess(5 / 3, K, 1 - 0.3 / K, 1 / K**2) < 0.2


def test_minibatches_are_named_only_where_they_are_known():
    assert "minibatches" not in judged(eager())[0] and "noise of the gradients heats" in judged(eager())[0]
    assert "minibatches heat this chain" in judged(eager(31))[0]


def test_a_run_on_epochs_tells_its_guard_of_them():
    tx, params = bc.sghmc(1e-4, temperature=1 / N), {"w": torch.zeros(5, 1)}
    step = bc.make_step(lambda p, b: (b[0] @ p["w"] - b[1]).square().mean() / 2, tx)
    for order, K in (("reshuffled", 31), ("independent", None), ("palindrome", None)):
        guard = eager()
        data = bc.epochs((X, Y), 32, order=order, seed=0)
        bc.sample(step, params, tx.init(params), data, steps=2, callbacks=[guard])
        assert guard.steps_per_epoch == K
    guard = eager(7)
    bc.sample(step, params, tx.init(params), bc.epochs((X, Y), 32, seed=0), steps=2, callbacks=[guard])
    assert guard.steps_per_epoch == 7


# full batches that oscillate


@pytest.mark.slow
def test_full_batches_of_a_network_near_its_stability_limit_are_silent():
    for seed in range(2):
        torch.manual_seed(seed)
        layers = [nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
        said, guard = loop(400, 0.1, N, model=nn.Sequential(*layers))
        assert guard.readings and not said


def test_white_noise_does_not_ring_and_an_oscillation_does():
    noise = torch.Generator().manual_seed(0)
    still = torch.zeros(97, 5).double()
    white = torch.randn(97, 5, generator=noise).double()
    angle = torch.arange(97).double()[:, None] * 2.0
    swing = torch.cat([angle.cos(), angle.sin()], 1) + 0.01 * white[:, :2]
    read = bc.diagnostics.heat.read_heat
    assert read(white, still, 0.9).ringing < 0.6 < 1.2 < read(swing, still[:, :2], 0.9).ringing
    assert not judged(eager(), ringing=1.2) and judged(eager(), ringing=0.5)


# clips


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_a_clip_is_named_where_gradients_are_small(size):
    def change(t, model, optimizer):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 * size)

    said, _ = loop(200, 0.001, factor=size, change=change)
    assert len(said) == 1 and "same norm" in said[0]


@pytest.mark.parametrize("part", ["group", "each"])
def test_a_clip_of_a_part_is_named(part):
    def change(t, model, optimizer):
        for p in [list(model[0].parameters())] if part == "group" else [[p] for p in model.parameters()]:
            nn.utils.clip_grad_norm_(p, 0.01)

    def groups(m):
        return [{"params": m[0].parameters()}, {"params": m[2].parameters()}]

    said, _ = loop(200, 0.001, model=network(), groups=groups if part == "group" else None, change=change)
    assert len(said) == 1 and ("of parameter group 0" if part == "group" else "of one parameter") in said[0]


@pytest.mark.parametrize("rarely", [False, True])
def test_a_clip_of_some_parameters_of_a_group_is_named(rarely):
    """The body of a network in one group with its head; also where the clip rests at every tenth step."""

    def change(t, model, optimizer):
        body = [*model[0].parameters(), model[2].weight]
        nn.utils.clip_grad_norm_(body, 10.0 if rarely and t % 10 == 0 else 0.01)

    said, _ = loop(200, 0.001, model=network(), change=change)
    assert len(said) == 1 and "of a part of the parameters (3 of 4)" in said[0]


def test_clips_of_layers_one_by_one_in_a_deep_network_are_named():
    """36 tensors, of which the four of two layers are clipped, each layer by itself."""
    layers = [nn.Linear(5, 5), *[m for _ in range(16) for m in (nn.Tanh(), nn.Linear(5, 5))], nn.Linear(5, 1)]

    def change(t, model, optimizer):
        for layer in (model[-2], model[-1]):
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)

    said, _ = loop(200, 0.001, model=nn.Sequential(*layers), change=change)
    assert len(said) == 1 and "of a part of the parameters" in said[0] and "(2 of 36)" in said[0]


def test_norms_without_a_clip_have_no_part_with_one_norm():
    """50 windows of white and of slowly growing gradients; without gradients no part is found either."""
    source = torch.Generator().manual_seed(0)
    for trial in range(50):
        growth = torch.linspace(1, 2, 97).double()[:, None] if trial % 2 else 1.0
        norms = growth * (torch.randn(97, 4 + 4 * (trial % 9), generator=source).double().abs() + 1)
        assert not heat_guard._clipped_run(norms.square())
    assert not heat_guard._clipped_run(torch.zeros(97, 5).double())


@pytest.mark.parametrize("size", [1e-6, 1e-5, 3e-5, 1e-4, 1e-3])
def test_small_gradients_of_many_dimensions_are_no_clip(size):
    """Of 1,101 white numbers, whose norm varies by 2 %."""
    source, guard = torch.Generator().manual_seed(0), eager()
    params = [torch.zeros(50, 20), torch.zeros(50), torch.zeros(50, 1), torch.zeros(1)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*same norm")
        for _ in range(300):
            white = [size / 33 * torch.randn(p.shape, generator=source) for p in params]
            guard.look(lambda white=white: [Leaf(g, p, 1.0, 1.0, 0.9) for g, p in zip(white, params)], lr=0.1)
    assert guard.readings and guard.readings[0].same_norm < 0.5


def test_a_gradient_that_does_not_change_is_no_clip():
    guard = eager()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            guard.look(lambda: [Leaf(torch.ones(10), torch.zeros(10), 1.0, 1.0, 0.9)], 0.1)
    assert guard.readings and guard.readings[0].same_norm == 0


# what it is not shown


@pytest.mark.parametrize("beside", [False, True])
def test_sparse_gradients_are_said_to_be_left_out(beside):
    table, dense = nn.Embedding(20, 1, sparse=True), nn.Parameter(torch.zeros(1))
    params = [table.weight, dense] if beside else [table.weight]
    optimizer = bc.optim.SGLD(params, 0.1, temperature=0.01, heat_guard=eager())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(200):
            optimizer.zero_grad()
            (table(torch.tensor([t % 20])).sum() + dense.square().sum()).backward()
            optimizer.step()
    said = [str(w.message) for w in caught if "sparse" in str(w.message)]
    assert len(said) == 1 and "Embedding(sparse=True)" in said[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_an_optimizer_keeps_its_guard(copied):
    model = nn.Linear(2, 1)
    optimizer = bc.optim.SGHMC(model.parameters(), 0.1, temperature=0.01, steps_per_epoch=30)
    assert copied(optimizer).heat_guard.steps_per_epoch == 30
    assert copied(bc.optim.SGHMC(model.parameters(), 0.1, temperature=0.01, heat_guard=None)).heat_guard is None


@pytest.mark.slow
def test_a_loop_that_goes_on_in_another_thread_is_watched():
    """Each thread has a clock that begins at 0: the guard goes on from the time that it has counted."""
    guard = eager()
    guard.share = 0.5
    source, param = torch.Generator().manual_seed(0), torch.zeros(10)

    def steps():
        for _ in range(400):
            torch.randn(300, 300) @ torch.randn(300, 300)  # the loop's own work
            guard.look(lambda: [Leaf(torch.randn(10, generator=source), param, 2.0, 1.0, 0.9)], lr=0.1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            thread = threading.Thread(target=steps)
            thread.start()
            thread.join()
            assert guard._elapsed > 0 and guard._taken < 0.8 * guard._elapsed
    assert len(guard.readings) >= 2 and len(caught) == 1


# its time


class Clock:
    """A clock of which each look takes a microsecond; tests add what else takes time to ``now``."""

    now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


def test_guards_of_a_thread_have_one_share(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heat_guard.time, "thread_time", clock)
    guards = [bc.diagnostics.HeatGuard() for _ in range(10)]

    def leaves():
        clock.now += 2e-4
        return [Leaf(torch.ones(10), torch.ones(10), 1.0, 1.0, 0.9, number=0)]

    for _ in range(8000):
        clock.now += 2e-3
        for guard in guards:
            guard.look(leaves, 0.1)
    assert 0 < sum(guard._spent for guard in guards) <= 4 / 3 * 0.0125 * clock.now
    assert sum(len(guard.readings) for guard in guards) > 1


def test_a_window_that_is_dearer_than_foreseen_is_given_up(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(heat_guard.time, "thread_time", clock)
    guard = bc.diagnostics.HeatGuard()

    def leaves():
        clock.now += 5e-3  # 40 times what was guessed
        return [Leaf(torch.ones(10), torch.ones(10), 1.0, 1.0, 0.9, number=0)]

    for _ in range(3000):
        clock.now += 1e-3
        guard.look(leaves, 0.1)
        assert guard._spent <= 4 / 3 * 0.0125 * clock.now + 2 * 5e-3
    assert not guard.readings and guard._cost > 0.1


@pytest.mark.parametrize(("leaves", "make"), [(100, bc.optim.SGHMC), (40, bc.optim.Adam)])
def test_the_time_it_takes_of_a_real_loop_stays_within_its_share(leaves, make):
    params = [nn.Parameter(torch.randn(64)) for _ in range(leaves)]
    optimizer = make(params, 1e-4, temperature=1e-3)
    began = time.thread_time()
    for _ in range(150):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    spent = optimizer.heat_guard._spent
    assert spent <= 0.03 * (time.thread_time() - began) + 5e-3


def test_a_guard_that_sleeps_looks_neither_at_gradients_nor_often_at_the_clock(monkeypatch):
    clock, calls = Clock(), []
    monkeypatch.setattr(heat_guard.time, "thread_time", lambda: calls.append(1) or clock())
    tx, w = bc.sghmc(0.1, temperature=0.01), torch.zeros(3)
    guard, state = bc.diagnostics.HeatGuard(), tx.init(w)
    guard.watch(tx, w, state, torch.ones(3))
    for _ in range(1000):
        was_asleep = guard._steps + 1 < guard._awake
        guard.watch(tx, w, state, object() if was_asleep else torch.ones(3))
    assert guard._steps == 1001 and len(calls) < 64


def test_a_guard_that_sleeps_refuses_what_nobody_may_look_at():
    tx, w = bc.sghmc(0.1, temperature=0.01), torch.zeros(3)
    guard, state = bc.diagnostics.HeatGuard(), tx.init(w)
    guard.watch(tx, w, state, torch.ones(3))
    assert guard._awake > 2
    with pytest.raises(ValueError, match="captured, runs under vmap"):
        torch.func.vmap(lambda g: guard.watch(tx, w, state, g))(torch.ones(2, 3))
    assert guard._steps == 1
