"""The heat guard warns where minibatches heat a chain, is silent where they do not, and changes nothing."""

import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import _heat_of_chain as of_chain
from bayesopt_chain.diagnostics import heat_guard
from bayesopt_chain.diagnostics.heat import Heat, Leaf, Sketch, read_heat, reshuffled_excess
from bayesopt_chain.optim import _heat as optimizers

N, WIDTH = 1000, 5
G = torch.Generator().manual_seed(0)
X = torch.randn(N, WIDTH, generator=G)
Y = X @ torch.randn(WIDTH, 1, generator=G) + torch.randn(N, 1, generator=G)
LIMIT = 1 / float(
    torch.linalg.eigvalsh(torch.cat([X, torch.ones(N, 1)], 1).T @ torch.cat([X, torch.ones(N, 1)], 1))[-1] / N
)


def epoch_by_enumeration(rho, K, mu):
    """Mean excess over an epoch of one direction, over all orders of K noises that sum to zero."""
    y = 2 * rho * (1 - mu) / K
    values = torch.linspace(-1, 1, K, dtype=torch.float64)
    values *= (
        (K - 1) * y * y / (values**2).mean()
    ).sqrt()  # the variance lr^2 C (1 - 1/K) of one draw, in units of T / k
    M = torch.tensor([[1 - y, -mu], [y, mu]], dtype=torch.float64)
    push = torch.tensor([-1.0, 1.0]).double()
    covariances = torch.zeros(K, 2, 2).double()
    orders = list(itertools.permutations(range(K)))
    for order in orders:
        r = torch.zeros(2).double()
        for t, i in enumerate(order):
            r = M @ r + push * values[i]
            covariances[t] += torch.outer(r, r) / len(orders)
    P = torch.linalg.matrix_power(M, K)
    S = torch.linalg.solve(torch.eye(4).double() - torch.kron(P, P), covariances[-1].reshape(4)).reshape(2, 2)
    total = 0.0
    for t in range(K):
        S = M @ S @ M.T
        total += float(S[0, 0] + covariances[t][0, 0]) / K
    return total


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("rho", [0.1, 1.0])
@pytest.mark.parametrize("K", [2, 3, 5])
def test_the_excess_of_reshuffled_epochs_is_that_of_all_orders_enumerated(K, rho, mu):
    y = 2 * rho * (1 - mu) / K
    if y < 2 * (1 + mu):
        assert reshuffled_excess(rho, K, mu) == pytest.approx(epoch_by_enumeration(rho, K, mu), rel=1e-9)


@pytest.mark.parametrize("K", [4, 10, 64, 300])
def test_a_memory_of_three_epochs_heats_by_13_percent_where_documents_set_the_limit(K):
    mu, y = 1 - 0.3 / K, 1 / K**2
    kappa = K * y / (1 - mu)
    assert kappa == pytest.approx(10 / 3)
    assert 0.12 < reshuffled_excess(kappa / 2, K, mu, y) < 0.13


def test_one_batch_an_epoch_and_no_noise_heat_nothing_and_an_unstable_chain_without_end():
    assert reshuffled_excess(3.0, 1, 0.9) == 0.0 and reshuffled_excess(0.0, 50, 0.9) == 0.0
    assert reshuffled_excess(10.0, 4, 0.0) == math.inf


def chain(curvatures, lr, mu, noise, steps, seed):
    """Gradients, times ``sqrt(lr_eff / 2 T)``, of the matched chain at T = 1 on a quadratic, with white gradient noise."""
    g = torch.Generator().manual_seed(seed)
    k = torch.tensor(curvatures).double()
    theta = torch.randn(len(k), generator=g).double() / k.sqrt()
    v, before = torch.zeros_like(k), torch.zeros_like(k)
    rows, places = [], []
    for _ in range(steps):
        places.append(theta)
        grad = k * theta + noise**0.5 * torch.randn(len(k), generator=g).double() * torch.eye(len(k))[0]
        rows.append(grad)
        fresh = torch.randn(len(k), generator=g).double()
        v = mu * v + grad + (2 * (1 - mu) / lr) ** 0.5 * (fresh + before) / 2
        before, theta = fresh, theta - lr * v
    scale = (lr / (1 - mu) / 2) ** 0.5
    return torch.stack(rows)[-97:] * scale, torch.stack(places)[-97:] / (2 * scale)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mu", [0.9, 0.99])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_a_full_batch_reads_no_heat_at_any_stable_rate(share, mu):
    """Fixed seeds, median of five windows; beyond half of the limit the own swing alone would read up to 44."""
    read = [read_heat(*chain([1.0, 0.3, 0.1], share * 2 * (1 + mu), mu, 0.0, 500, s), mu) for s in range(5)]
    assert sorted(max(0.0, heat.rho) for heat in read)[2] < 0.5, read


@pytest.mark.sweep(4)
@pytest.mark.parametrize("mu", [0.0, 0.9, 0.99])
@pytest.mark.parametrize("rho", [1.0, 4.0, 16.0])
def test_batch_noise_is_read_within_a_factor_of_two(rho, mu):
    """Fixed seeds; the median of five windows."""
    lr = 0.02 * (1 - mu)
    rows = [chain([1.0, 0.3, 0.1], lr, mu, rho * 2 * (1 - mu) / lr, 400, s) for s in range(5)]
    read = sorted(read_heat(*r, mu).rho for r in rows)[2]
    assert rho / 2 < read < rho * 2


def noisiest(parts, n):
    """The ``n`` directions with the largest ``- <r_t r_{t+1}>`` over some stretches of consecutive rows."""
    lagged = sum(r[:-1].T @ r[1:] for r in parts)
    return torch.linalg.eigh(-(lagged + lagged.T))[1].flip(1)[:, :n]


def rho_fold_by_fold(gradients, positions, mu):
    """The heat of a window and ``y`` of each fold, written without batches: the definition in the module's docstring."""
    d, D = positions.diff(dim=0), gradients.diff(dim=0)
    noise = torch.zeros_like(d)
    noise[1:] = mu * d[:-1] - d[1:] - (1 - mu) * gradients[1:-1]
    last = torch.cat([torch.zeros_like(d[:1]), d[:-1]])
    quarter, rest, curvatures = len(D) // 4, [], []
    for fold in range(4):
        begin, end = fold * quarter, (fold + 1) * quarter
        stretches = [s for s in (slice(2, begin - 1), slice(end + 1, len(D))) if s.stop > s.start]
        parts = [D[s] for s in stretches]
        largest = torch.linalg.svd(torch.cat(parts), full_matrices=False)[2][:2].T
        basis, sizes, _ = torch.linalg.svd(torch.cat([noisiest(parts, 2), largest], 1), full_matrices=False)
        basis = basis[:, sizes > 0.1]
        rows = torch.cat([torch.arange(len(D))[s] for s in stretches])
        instruments = torch.cat([last[rows] @ basis, noise[rows] @ basis], 1)
        moves = d[rows] @ basis
        explained = instruments @ torch.linalg.pinv(instruments) @ moves
        freedom = len(rows) - instruments.shape[1]
        strength = explained.square().sum() / instruments.shape[1] / ((moves - explained).square().sum() / freedom)
        H = (torch.linalg.pinv(explained) @ D[rows] @ basis).T * min(max((float(strength) - 1) / 3, 0), 1)
        before, left = D[begin:end] @ basis, (D[begin:end] - d[begin:end] @ basis @ H.T @ basis.T) @ basis
        if left.square().sum() >= before.square().sum():  # what it leaves of rows that it has not seen is not less
            H = torch.zeros_like(H)
        q = noisiest([(D[s] - d[s] @ basis @ H.T @ basis.T) @ basis for s in stretches], 1)[:, 0]
        rest.append((D[begin:end] @ basis - d[begin:end] @ basis @ H.T) @ q)
        curvatures.append(float(q @ H @ q) * (1 - mu))
    variance, lagged = torch.cat([r * r / 2 for r in rest]).mean(), torch.cat([-r[1:] * r[:-1] for r in rest]).mean()
    return float(variance if lagged > 0.7 * variance else lagged), curvatures


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "lr, features, hot", [(0.1, 60, True), (0.02, 60, True), (0.02, 150, True), (0.002, 60, False)]
)
def test_noise_in_many_directions_is_no_curvature(lr, features, hot):
    """Regression on white features with 1,000 data and batches of 32: 16, 3.8 and 1.3 times the variance at these rates.

    The Hessian of a window of 96 steps in four of so many directions is made of noise, and was taken out of it.
    """
    source = torch.Generator().manual_seed(0)
    x = torch.randn(1000, features, generator=source)
    y = x.sum(1) + torch.randn(1000, generator=source)
    model, guard = nn.Linear(features, 1, bias=False), eager()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y[:, None]).solution.T)
    optimizer = bc.optim.SGHMC(model.parameters(), lr, temperature=1 / 1000, heat_guard=guard)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(500):
            rows = torch.randint(1000, (32,), generator=source)
            optimizer.zero_grad()
            ((model(x[rows])[:, 0] - y[rows]).square().mean() / 2).backward()
            optimizer.step()
    assert any("times the variance" in str(w.message) for w in caught) == hot


@pytest.mark.parametrize("n", [500, 10_000])
def test_noise_in_many_more_directions_than_buckets_is_read_by_one_of_them(n):
    """White noise of variance 0.05 in every element: n / 256 times that in every bucket, 2 for 10,000 elements."""
    source, guard = torch.Generator().manual_seed(0), eager()
    param = torch.zeros(n)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            guard.look(lambda: [Leaf(0.05**0.5 * torch.randn(n, generator=source), param, 1.0, 1.0, 0.9)], lr=0.1)
    assert guard.readings and all(abs(heat.rho) < 0.6 for heat in guard.readings)


@pytest.mark.parametrize("live, n", [(48, 1000), (1, 20_000), (300, 1000), (5000, 5000)])
def test_heat_is_seen_among_elements_without_gradient_and_in_many_directions(live, n):
    """White noise of variance 4 in some elements, which is four times what the sampler injects; none in the others."""
    source, guard = torch.Generator().manual_seed(0), eager()
    param = torch.zeros(n)

    def leaf():
        gradient = torch.zeros(n)
        gradient[:live] = 2.0 * torch.randn(live, generator=source)
        return [Leaf(gradient, param, 1.0, 1.0, 0.9)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(400):
            guard.look(leaf, lr=0.1)
    assert len(caught) == 1 and all(heat.rho > 2.5 for heat in guard.readings)


@pytest.mark.parametrize("mu", [0.0, 0.9])
@pytest.mark.parametrize("width", [1, 3, 20, 130])
def test_all_folds_in_one_batch_are_the_folds_one_by_one(width, mu):
    source = torch.Generator().manual_seed(width)

    def draw():
        return torch.randn(width, generator=source, dtype=torch.float64)

    x, v, gradients, positions = 0.1 * draw(), torch.zeros(width).double(), [], []
    curvatures = torch.logspace(0, -1.5, width, dtype=torch.float64)
    for _ in range(97):
        gradients.append(8 * curvatures * x + curvatures.sqrt() * draw())
        positions.append(x)
        v = mu * v + 0.05 * (1 - mu) * (gradients[-1] + draw())
        x = x - v
    gradients, positions = torch.stack(gradients), torch.stack(positions)
    rho, by_fold = rho_fold_by_fold(gradients, positions, mu)
    heat = read_heat(gradients, positions, mu)
    assert heat.rho == pytest.approx(rho, rel=1e-8)
    assert heat.curvature == pytest.approx(min(max(min(by_fold), 0.0), 1.9 * (1 + mu)), rel=1e-7, abs=1e-10)


@pytest.mark.parametrize("width", [4, 3000])
def test_the_sketch_of_a_window_is_that_of_its_scaled_gradients(width):
    """Few elements are stored, and scaled when the window closes; many are added up in every step."""
    source = torch.Generator().manual_seed(0)
    rows = []
    for step in range(3):
        g, x = (torch.randn(width, generator=source) for _ in range(2))
        scales = [0.5 + step, torch.rand(3, generator=source) + 0.5]
        tail = torch.randn(3, generator=source)
        rows.append([Leaf(g, x, scales[0], 2.0, 0.9), Leaf(tail, -tail, scales[1], 0.5, 0.9)])
    sketch = Sketch(rows[0])
    assert sketch.is_deferred == (width == 4)
    got = sketch.finished([sketch(leaves) for leaves in rows])
    for step, leaves in enumerate(rows):
        signed = [
            torch.cat([s.double() * part(leaf) for s, leaf in zip(sketch.signs, leaves)])
            for part in (
                lambda leaf: leaf.scale * leaf.gradient.double(),
                lambda leaf: leaf.param.double() / (2 * leaf.temperature * leaf.scale),
            )
        ]
        if width != 4:  # each leaf begins at the first bucket of its pack; both share one here
            assert len(sketch.packs) == 1
        for found, elements in zip(got, signed):
            wanted = torch.zeros(256).double().index_add_(0, torch.arange(len(elements)) % 256, elements)
            torch.testing.assert_close(found[step], wanted, rtol=1e-5, atol=1e-5)
        norms = torch.stack([leaf.gradient.double().norm() for leaf in leaves])
        torch.testing.assert_close(got[2][step], norms, rtol=1e-6, atol=0)


def test_where_the_epoch_is_told_the_excess_is_that_of_the_curvature_in_the_window():
    """Half the noise of a well-specified model, whose curvature would give 1.0; fixed seeds, the mean of nine windows."""
    rho, K, mu, lr = 2.65, 13, 0.9, 0.08
    rows = [chain([1.0, 0.3, 0.1], lr, mu, rho * 2 * (1 - mu) / lr, 400, s) for s in range(9)]
    read = sum(read_heat(*r, mu, steps_per_epoch=K).excess for r in rows) / 9
    assert reshuffled_excess(rho, K, mu, lr) == pytest.approx(1.67, abs=0.01)
    assert 1.67 / 1.4 < read < 1.67 * 1.4


def loop(steps, batch, lr, *, heat_guard="warn", seed=0, clip=None, make=bc.optim.SGHMC, **kwargs):
    """A user's loop on linear regression; its weights, and what was warned about."""
    torch.manual_seed(seed)
    model = nn.Linear(WIDTH, 1)
    with torch.no_grad():  # at the mode
        solution = torch.linalg.lstsq(torch.cat([X, torch.ones(N, 1)], 1), Y).solution
        model.weight.copy_(solution[:-1].T)
        model.bias.copy_(solution[-1])
    optimizer = make(model.parameters(), lr, temperature=1 / N, heat_guard=heat_guard, **kwargs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = torch.randperm(N)
        for t in range(steps):
            if batch < N and t % (N // batch) == 0:
                rows = torch.randperm(N)
            chosen = rows[(t * batch) % N :][:batch] if batch < N else slice(None)
            optimizer.zero_grad()
            loss = (model(X[chosen]) - Y[chosen]).square().mean() / 2
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model.weight.detach(), [str(w.message) for w in caught if "SGHMC" in str(w.message)], optimizer


def eager(K=None):
    return bc.diagnostics.HeatGuard(K, share=math.inf, who="SGHMC")


def test_the_change_of_one_line_in_a_minibatch_loop_is_warned_about_once_with_numbers_and_advice():
    _, said, _ = loop(400, 32, 0.1, heat_guard=eager())
    assert len(said) == 1
    assert "times the variance asked for" in said[0] and "Use lr" in said[0] and "larger batches" in said[0]
    # it was not told of epochs, and knows how long the momentum remembers
    assert "the worst case" in said[0] and "here of 10 steps" in said[0] and "suggest_lr" in said[0]


HOT, COLD = Heat(2.2, 0.3, 0.2, 0.0, 2.2, "independent", 0.0), Heat(0.1, 0.1, 0.1, 0.0, 0.1, "independent", 0.0)
NEITHER = COLD._replace(rho=0.6, excess=0.6, standard_error=0.9)
SWING = HOT._replace(rho=30.0, own=40.0, excess=50.0)  # what is left is less than the chain's own move


@pytest.mark.parametrize(
    ("windows", "is_warned"),
    [
        ([HOT], False),
        ([HOT, HOT], True),
        ([HOT, NEITHER], True),
        ([HOT, COLD, HOT], False),
        ([NEITHER, NEITHER, NEITHER], False),
        ([HOT, SWING], False),
        ([SWING, SWING, SWING], False),
    ],
)
def test_two_windows_have_to_say_it_together_and_the_second_must_not_contradict(windows, is_warned):
    guard = eager()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for heat in windows:
            guard._judge(heat)
    assert guard.has_warned == is_warned


@pytest.mark.slow
def test_full_batches_and_cool_ones_are_silent():
    for batch, lr, K in ((N, 0.1, None), (N, 0.6 * 3.8 * LIMIT, None), (100, 0.002, 10)):
        assert not loop(700, batch, lr, heat_guard=eager(K))[1]


@pytest.mark.slow
def test_what_reshuffling_takes_away_is_taken_into_account_where_the_steps_of_an_epoch_are_known():
    """The same loop, told and untold: at lr 0.003 independent batches of 32 would double the variance."""
    _, _, untold = loop(700, 32, 0.003, heat_guard=eager())
    _, warned, told = loop(700, 32, 0.003, heat_guard=eager(N // 32))
    assert untold.heat_guard.readings[-1].excess > 2 * told.heat_guard.readings[-1].excess
    assert not warned and told.heat_guard.readings[-1].order == "reshuffled"


def test_a_clip_that_acts_at_every_step_is_named():
    _, said, _ = loop(300, 32, 0.01, heat_guard=eager(), clip=1e-3)
    assert len(said) == 1 and "same norm" in said[0]


def test_a_sum_in_place_of_a_mean_is_named():
    guard, noise = eager(), torch.Generator().manual_seed(0)
    with pytest.warns(UserWarning, match="check first that the loss is a mean over the batch.*noise of the gradients"):
        for _ in range(250):
            guard.look(lambda: [Leaf(torch.randn(10, generator=noise), torch.zeros(10), 1e3, 1.0, 0.9)], 0.1)


def test_it_changes_no_bit_of_the_draws():
    """On a gradient without matrix products, whose last bit may depend on where a tensor lies in memory."""

    def run(guard):
        w = torch.ones(50, requires_grad=True)
        generator, noise = (torch.Generator().manual_seed(k) for k in (0, 1))
        optimizer = bc.optim.SGHMC([w], 0.05, temperature=1.0, heat_guard=guard, generator=generator)
        for _ in range(300):
            w.grad = w.detach() + torch.randn(50, generator=noise)
            optimizer.step()
        return w.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watched = eager()
        assert torch.equal(run(watched), run(None)) and watched.readings


def test_it_takes_its_share_of_the_time_and_no_more(monkeypatch):
    """On a clock that counts calls: 50 units a step outside, and 1 for each look at the clock."""
    now = 0.0

    def clock():
        nonlocal now
        now += 1e-5
        return now

    monkeypatch.setattr(heat_guard.time, "thread_time", clock)
    guard, looked = bc.diagnostics.HeatGuard(share=0.0125), 0

    def leaves():
        nonlocal looked, now
        looked += 1
        now += 2e-4  # what a look costs
        return [Leaf(torch.ones(10), torch.ones(10), 1.0, 1.0, 0.9)]

    for _ in range(40_000):
        now += 5e-4
        guard.look(leaves, 0.1)
    assert looked > 97 and guard._spent <= 0.0125 * now


def test_windows_of_rates_that_differ_much_are_not_read_together():
    guard = eager()
    noise = torch.Generator().manual_seed(0)
    for lr, steps in ((0.1, 128), (0.03, 97)):  # a window each
        for _ in range(steps):
            scale, gradient = 2.0 * math.sqrt(lr / 0.1), torch.randn(10, generator=noise)
            leaf = Leaf(gradient, torch.zeros(10), scale, 1.0, 0.9, number=0, rate=lr)
            guard.look(lambda leaf=leaf: [leaf], lr)
    first, second = guard.readings
    assert not guard.has_warned and first.rho > 1.5 * second.rho > 0.7


def test_the_gradients_of_adaptive_rules_are_seen_through_their_preconditioner():
    model = nn.Linear(WIDTH, 1)
    optimizer = bc.optim.Adam(model.parameters(), 0.01, temperature=1 / N, heat_guard=eager())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(300):
            rows = torch.randint(N, (20,), generator=G)
            optimizer.zero_grad()
            (model(X[rows]) - Y[rows]).square().mean().backward()
            optimizer.step()
    assert optimizer.heat_guard.readings and optimizer.heat_guard.readings[-1].rho > 1


def mean_loss(p, batch):
    x, y = batch
    return (x @ p["weight"].T + p["bias"] - y).square().mean() / 2


def at_the_mode():
    solution = torch.linalg.lstsq(torch.cat([X, torch.ones(N, 1)], 1), Y).solution
    return {"weight": solution[:-1].T.clone(), "bias": solution[-1].clone()}


@pytest.mark.parametrize(
    ("tx", "make"),
    [
        (bc.sghmc(0.1, 0.9, temperature=1 / N), lambda p: bc.optim.SGHMC(p, 0.1, 0.9, temperature=1 / N)),
        (bc.sgld(0.1, temperature=1 / N), lambda p: bc.optim.SGLD(p, 0.1, temperature=1 / N)),
        (
            bc.sgd(0.1, momentum=0.9, nesterov=True, temperature=1 / N),
            lambda p: bc.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, temperature=1 / N),
        ),
    ],
    ids=["sghmc", "sgld", "nesterov"],
)
def test_a_chain_and_its_optimizer_are_read_alike(tx, make):
    model = nn.Linear(WIDTH, 1)
    (model(X) - Y).square().mean().backward()
    theirs = {len(leaf.param): leaf for leaf in optimizers.leaves_of(make(model.parameters()))}
    params = dict(model.named_parameters())
    for p, rule in zip(params.values(), of_chain.rules_of(tx, params, tx.init(params))):
        leaf = theirs[len(p)]
        assert rule == pytest.approx((leaf.scale, leaf.temperature, leaf.momentum, leaf.first), rel=1e-6)


def test_a_step_and_a_run_are_watched_as_an_optimizer_is():
    tx, data = bc.sghmc(0.1, 0.9, temperature=1 / N), bc.epochs((X, Y), 32, seed=0)
    guard, params = eager(), at_the_mode()
    step = bc.make_step(mean_loss, tx, heat_guard=guard)
    with pytest.warns(UserWarning, match="times the variance asked for.*times this one"):
        bc.sample(step, params, tx.init(params), data, steps=400)
    as_callback = eager()
    with pytest.warns(UserWarning, match="times the variance asked for"):
        draws = bc.sample(
            bc.make_step(mean_loss, tx), params, tx.init(params), data, steps=400, callbacks=[as_callback]
        )
    assert as_callback.has_warned and len(draws) == 400 and set(as_callback.postfix()) == {"heat"}


@pytest.mark.slow
def test_a_cold_chain_is_silent_and_draws_what_an_unwatched_one_draws():
    tx, params = bc.chain(bc.scale_by_preconditioner(0.5), bc.sghmc(0.2, 0.9, temperature=1 / N)), at_the_mode()
    state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = []
        for guard in (eager(), None):
            step = bc.make_step(mean_loss, tx, heat_guard=guard)
            found.append(bc.sample(step, params, state, (X, Y), steps=600).params["weight"])
            assert guard is None or (guard.readings and guard.readings[-1].rho < 0.01)
    assert torch.equal(*found)


def test_what_cannot_be_looked_at_is_refused_by_name():
    tx, params, guard = bc.sghmc(0.1, temperature=1 / N), at_the_mode(), eager()
    step = bc.make_step(mean_loss, tx, heat_guard=guard)
    with pytest.raises(ValueError, match="parallel: a heat guard looks at one chain"):
        bc.parallel(step, 2)
    with pytest.raises(ValueError, match="shows none"):
        chains = bc.parallel(bc.make_step(mean_loss, tx), 2)
        bc.sample(
            chains, bc.stack([params] * 2), chains.init(tx, bc.stack([params] * 2)), (X, Y), steps=2, callbacks=[guard]
        )
    with pytest.raises(ValueError, match="has a heat guard of its own"):
        bc.sample(step, params, tx.init(params), (X, Y), steps=2, callbacks=[eager()])
    with pytest.raises(ValueError, match="no matched noise"):
        bc.make_step(mean_loss, bc.samplers.sgnht(0.1, temperature=1.0), heat_guard=guard)
    with pytest.raises(ValueError, match="heat_guard must be"):
        bc.make_step(mean_loss, tx, heat_guard="warn")
    with pytest.raises(ValueError, match="captured, runs under vmap"):
        bc.capture(step, params, tx.init(params), (X, Y), backend="eager")


def heads(guard, batch=32, steps=700, poison=None):
    """Two heads that take turns, a root parameter, two groups of different rates; closures; a clip that acts rarely."""
    torch.manual_seed(0)
    body, first, second = nn.Linear(WIDTH, 4), nn.Linear(4, 1), nn.Linear(4, 1)
    shift = nn.Parameter(torch.zeros(()))
    groups = [
        {"params": body.parameters(), "lr": 0.002},
        {"params": [*first.parameters(), *second.parameters(), shift]},
    ]
    optimizer = bc.optim.SGHMC(groups, 0.001, 0.9, temperature=1 / N, heat_guard=guard)
    for t in range(steps):
        rows = torch.randint(N, (batch,))

        def closure(t=t, rows=rows):
            optimizer.zero_grad()
            loss = ((second if t % 2 else first)(body(X[rows]).tanh()) + shift - Y[rows]).square().mean() / 2
            loss.backward()
            if poison == t:
                shift.grad.fill_(math.nan)
            nn.utils.clip_grad_norm_(body.parameters(), 100.0)
            return loss

        optimizer.step(closure)
        if poison == t:
            with torch.no_grad():
                shift.zero_()
                optimizer.state[shift]["momentum_buffer"].zero_()
    return guard


@pytest.mark.slow
def test_heads_that_take_turns_are_left_out_and_the_rest_is_read():
    guard = heads(eager())
    assert guard.readings and all(math.isfinite(heat.rho) for heat in guard.readings)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_spoils_its_window_alone():
    guard = heads(eager(), steps=900, poison=60)
    assert guard.readings and all(math.isfinite(heat.rho) for heat in guard.readings)


def test_a_copy_and_one_from_a_file_begin_anew_and_go_on():
    _, _, optimizer = loop(90, 32, 0.1, heat_guard=eager())
    for copied in (copy.deepcopy(optimizer.heat_guard), pickle.loads(pickle.dumps(optimizer.heat_guard))):
        assert copied._sketch is None and copied.share == math.inf and copied.who == "SGHMC"
    assert optimizer.heat_guard._sketch is not None  # nothing of the window that is open was lost by copying
    twin = copy.deepcopy(optimizer)
    assert twin.heat_guard is not optimizer.heat_guard


def test_bad_arguments_are_named():
    p = [torch.zeros(1, requires_grad=True)]
    with pytest.raises(ValueError, match="heat_guard must be 'warn', None"):
        bc.optim.SGLD(p, 0.1, temperature=1.0, heat_guard="yes")
    with pytest.raises(ValueError, match="steps_per_epoch"):
        bc.optim.SGLD(p, 0.1, temperature=1.0, steps_per_epoch=0)
    with pytest.raises(ValueError, match="steps_per_epoch= is for"):
        bc.optim.SGLD(p, 0.1, temperature=1.0, heat_guard=None, steps_per_epoch=3)
    with pytest.raises(ValueError, match="window must be a whole number, at least 32"):
        bc.diagnostics.HeatGuard(window=3)


@pytest.mark.parametrize("excess, warns", [(0.66, False), (0.74, True)])
def test_two_windows_warn_from_seven_tenths_of_excess_on(excess, warns):
    guard = heat_guard.HeatGuard()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            guard._judge(Heat(excess, 0.01, 0.0, 0.0, excess, "independent", 0.0))
    assert bool(caught) is warns
