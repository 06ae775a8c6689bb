"""Stored control variates: unbiased to the last bit, exact in their span; every correction is watched."""

import itertools

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal

F64 = torch.float64


def regression(n, d, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=F64)
    y = x.sum(1) + torch.randn(n, generator=generator, dtype=F64)
    return x, y, torch.linalg.lstsq(x, y[:, None]).solution[:, 0]


def loss(w, batch):
    return (batch[0] @ w - batch[1]).square().mean() / 2


def wave(w, x):
    """Gradients of single data, -sin(w) x, turn around between w = -1 and w = 1."""
    return (w.cos() * x).mean()


def test_the_mean_over_all_batches_is_the_full_gradient_and_the_span_is_silent_at_the_reference():
    x, y, _ = regression(7, 3)
    data, reference = bc.epochs((x, y), 3, with_rows=True), torch.tensor([0.3, -1.0, 0.5], dtype=F64)
    table = bc.gradients.gradient_table(loss, data, reference, rank=2)
    estimator = bc.gradients.stored_control_variates(loss, table)
    batches = [((x[list(i)], y[list(i)]), torch.tensor(i)) for i in itertools.combinations(range(7), 3)]
    w = torch.tensor([1.0, 0.2, -0.4], dtype=F64)
    corrections = torch.stack([estimator.estimate(w, (), batch)[2] for batch in batches])
    assert corrections.mean(0).abs().max() < 1e-15 and corrections.abs().max() > 0.1
    grads = torch.stack([estimator.estimate(w, (), batch)[0] for batch in batches])
    torch.testing.assert_close(grads.mean(0), x.T @ (x @ w - y) / 7, rtol=1e-14, atol=1e-14)
    there = torch.stack([estimator.estimate(reference, (), batch)[0] for batch in batches])
    assert ((there - there.mean(0)) @ table.directions.T).abs().max() < 1e-14


def test_the_table_is_the_projection_of_the_gradients_of_single_data_in_a_tree():
    x, y, _ = regression(12, 3)
    params = {"w": torch.tensor([0.3, -1.0, 0.5], dtype=F64), "b": torch.tensor(0.1, dtype=F64)}

    def affine(params, batch):
        return torch.tanh(batch[0] @ params["w"] + params["b"] - batch[1]).square().mean()

    data = bc.epochs((x, y), 3, leave_out=torch.tensor([0, 5]))
    table = bc.gradients.gradient_table(affine, data, params, rank=2)
    kept = data.common_rows()
    each = [torch.func.grad(affine)(params, (x[i : i + 1], y[i : i + 1])) for i in kept]
    rows = torch.stack([torch.cat([g["b"][None], g["w"]]) for g in each])
    Q = torch.cat([table.directions["b"][:, None], table.directions["w"]], 1)
    torch.testing.assert_close(table.numbers[kept], (rows - rows.mean(0)) @ Q.T)
    torch.testing.assert_close(Q @ Q.T, torch.eye(2, dtype=F64))
    assert not table.numbers[[0, 5]].any()


def ratio(noise, x, lr, momentum, batch):
    """``tr(Cov(theta) H) N / d`` of ``bc.sghmc``, exactly, under independent batches of different data.

    ``x = (theta, lr v, xi)``, ``x' = (M + L (A_b - H) R^T) x + L n_b + F xi'`` with the batch's curvature ``A_b`` and its
    gradient ``n_b`` at the mode; ``noise`` holds those of single data. The mean of ``x`` is 0, so that second moments close.
    """
    n, d = x.shape
    H, eye, zero = x.T @ x / n, torch.eye(d, dtype=F64), torch.zeros(d, d, dtype=F64)
    a = lr * (2 / n * (1 - momentum) / lr) ** 0.5 / 2
    M = torch.cat(
        [
            torch.cat([eye - lr * H, -momentum * eye, -a * eye], 1),
            torch.cat([lr * H, momentum * eye, a * eye], 1),
            torch.zeros(d, 3 * d, dtype=F64),
        ]
    )
    L, F, R = torch.cat([-lr * eye, lr * eye, zero]), torch.cat([-a * eye, a * eye, eye]), torch.cat([eye, zero, zero])
    share = (n - batch) / (n - 1) / batch
    A = torch.einsum("ni,nj->nij", x, x) - H
    AA = torch.einsum("nij,nkl->ikjl", A, A).reshape(d * d, d * d) / n * share
    pair = torch.kron(M, M) + torch.kron(L, L) @ AA @ torch.kron(R, R).T
    added = F @ F.T + L @ (noise.T @ noise / n * share) @ L.T
    V = torch.linalg.solve(torch.eye(len(pair), dtype=F64) - pair, added.reshape(-1)).reshape(3 * d, 3 * d)
    return float((V[:d, :d] @ H).trace() * n / d)


def test_a_variance_18_times_too_large_comes_down_to_the_posteriors_at_one_gradient_a_step():
    """1,000 data, 5 parameters, batches of 32, learning rate 0.1, momentum 0.9; the gradients are the estimator's own."""
    x, y, mode = regression(1000, 5)
    data, found = bc.epochs((x, y), 32, with_rows=True), []
    for rank in (1, 2, 5):
        table = bc.gradients.gradient_table(loss, data, mode, rank=rank)
        estimator = bc.gradients.stored_control_variates(loss, table)
        single = lambda x, y, i, of=estimator: of.estimate(mode, (), ((x[None], y[None]), i[None]))  # noqa: E731
        noise, _, correction = torch.vmap(single)(x, y, torch.arange(1000))
        found.append(ratio(noise, x, 0.1, 0.9, 32))
    plain = ratio(noise + correction, x, 0.1, 0.9, 32)
    assert plain > 16 and plain > found[0] > found[1] > found[2] and found[2] < 1.15


def test_a_full_set_of_directions_makes_the_noise_of_control_variates():
    x, y, mode = regression(60, 3)
    data = bc.epochs((x, y), 10, with_rows=True)
    table = bc.gradients.gradient_table(loss, data, mode, rank=3)
    stored = bc.gradients.stored_control_variates(loss, table, data=data)
    dear = bc.gradients.control_variates(loss, [b for b, _ in data], mode)
    w, batch = mode + 0.3, data.batch(1, 2)
    memory = dear.init(w)
    torch.testing.assert_close(stored.estimate(w, stored.init(w), batch)[0], dear.estimate(w, memory, batch[0])[0])
    assert bc.gradients.noise_left(stored, w, data) == pytest.approx(
        bc.gradients.noise_left(dear, w, [data.batch(data.epoch, k)[0] for k in range(len(data))], memory=memory)
    )


def test_at_temperature_zero_it_is_the_optimizer_on_the_corrected_gradient():
    x, y, mode = regression(60, 3)
    data = bc.epochs((x, y), 10, with_rows=True)
    estimator = bc.gradients.stored_control_variates(
        loss, bc.gradients.gradient_table(loss, data, mode, rank=2), data=data
    )
    step, plain = bc.make_step(estimator, bc.sghmc(0.1, temperature=0.0)), torchopt.sgd(0.1, momentum=0.9)
    w = theta = mode + 1.0
    state, memory = step.init(w), plain.init(theta)
    for batch in itertools.chain(data, data):
        w, state, _ = step(w, state, batch)
        updates, memory = plain.update(estimator.estimate(theta, (), batch)[0], memory, inplace=False)
        theta = torchopt.apply_updates(theta, updates, inplace=False)
    assert_bitwise_equal(w, theta)


def test_chains_in_parallel_and_a_captured_step_are_the_step():
    x, y, mode = regression(60, 3)
    data = bc.epochs((x, y), 10, with_rows=True, chains=2)
    one = bc.epochs((x, y), 10, with_rows=True)
    estimator = bc.gradients.stored_control_variates(
        loss, bc.gradients.gradient_table(loss, one, mode, rank=2), data=one
    )
    tx = bc.sghmc(0.05, temperature=1 / 60)
    step = bc.make_step(estimator, tx)
    chains, params = bc.parallel(step, 2, batch_dim=0), torch.stack([mode, mode + 0.1])
    state = chains.init(tx, params)
    batch = data.batch(0, 0)
    moved, after, _ = chains(params, state, batch)
    alone, _, _ = step(params[1], bc.unstack(state)[1], ((batch[0][0][1], batch[0][1][1]), batch[1][1]))
    torch.testing.assert_close(moved[1], alone)
    for _ in range(40):
        moved, after, _ = chains(moved, after, batch)
    assert bc.gradients.check_noise(after).shape == (2,)
    state = step.init(mode)
    expected = step(mode, state, one.batch(0, 0))[0]
    captured = bc.capture(step, mode.clone(), state, one.batch(0, 0), backend="eager")
    torch.testing.assert_close(captured(mode.clone(), state, one.batch(0, 0))[0], expected)


@pytest.mark.parametrize("name", ["control_variates", "stored_control_variates"])
def test_a_correction_that_adds_noise_at_a_draw_is_refused_before_the_run(name):
    x = torch.linspace(-1, 1, 24, dtype=F64)
    data, reference = bc.epochs(x, 4, with_rows=name != "control_variates"), torch.tensor([-1.0], dtype=F64)
    if name == "control_variates":
        make = lambda at: bc.gradients.control_variates(wave, data, reference, at=at)  # noqa: E731
    else:
        table = bc.gradients.gradient_table(wave, data, reference, rank=1)
        make = lambda at: bc.gradients.stored_control_variates(wave, table, data=data, at=at)  # noqa: E731
    step = bc.make_step(make(()), bc.sgd(0.1))
    step.init(reference)  # here nothing is left of the noise
    with pytest.raises(ValueError, match=r"at the parameters the corrections leave 4 times the noise"):
        step.init(-reference)
    with pytest.raises(ValueError, match=r"at a place of at= the corrections leave 4 times"):
        bc.make_step(make([-reference]), bc.sgd(0.1)).init(reference)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_correction_that_adds_noise_is_refused_during_the_run_and_nothing_has_moved(inplace):
    """The snapshot of SVRG lies where the noise of the batches points the other way."""
    x = torch.linspace(-1, 1, 24, dtype=F64)
    data = bc.epochs(x, 4)
    step = bc.make_step(bc.gradients.svrg(wave, data), bc.sgd(1e-9), inplace=inplace)
    params = torch.tensor([1.0], dtype=F64)
    state = step.refresh(-params, step.init(params))
    seen = 0
    with pytest.raises(ValueError, match=r"<g, c> / <c, c> is -1, and below 0\.5 they do harm.*svrg may be refreshed"):
        for batch in itertools.chain(*[data] * 20):
            before = optree.tree_map(torch.clone, (params, state))
            params, state, _ = step(params, state, batch)
            seen += 1
    assert seen == 31
    assert_bitwise_equal((params, tuple(state)), (before[0], tuple(before[1])))
    state = step.refresh(params, state)
    assert state.watch.count_nonzero() == 0
    step(params, state, batch)


def test_a_correction_that_fits_is_never_refused():
    x, y, mode = regression(200, 3)
    data = bc.epochs((x, y), 10)
    step = bc.make_step(bc.gradients.control_variates(loss, data, mode), bc.sghmc(0.05, temperature=1 / 200))
    params, state = mode, step.init(mode)
    for batch in itertools.chain(*[data] * 20):
        params, state, _ = step(params, state, batch)
    assert state.watch[0] <= 512 and 0.8 < bc.gradients.check_noise(state) < 1.2


def test_what_cannot_be_tabulated_is_refused():
    x, y, mode = regression(60, 3)
    data = bc.epochs((x, y), 10, with_rows=True)
    table = bc.gradients.gradient_table(loss, data, mode, rank=2)
    step = bc.make_step(bc.gradients.stored_control_variates(loss, table), bc.sgd(0.1))
    with pytest.raises(TypeError, match=r"must be the pair \(batch, rows\).*with_rows=True"):
        step(mode, step.init(mode), (x, y))
    with pytest.raises(ValueError, match="stored_control_variates: table differs from params"):
        step.init(torch.zeros(4))
    with pytest.raises(TypeError, match=r"gradient_table: data must be bc\.epochs"):
        bc.gradients.gradient_table(loss, [(x, y)], mode)
    with pytest.raises(ValueError, match="rank must be at least 1"):
        bc.gradients.gradient_table(loss, data, mode, rank=0)
    with pytest.raises(ValueError, match="that are not independent"):
        bc.gradients.gradient_table(loss, data, mode, directions=torch.ones(2, 3, dtype=F64))
    folds = bc.data.folds(60, 3) if hasattr(bc, "data") else [torch.arange(2), torch.arange(3)]
    with pytest.raises(ValueError, match="leave_out takes other data from each chain"):
        bc.gradients.gradient_table(loss, bc.epochs((x, y), 10, chains=len(folds), leave_out=folds), mode)
    with pytest.raises(ValueError, match="which has no noise"):
        bc.gradients.gradient_table(loss, bc.epochs((x, y), 60), mode)
    with pytest.raises(TypeError, match="cannot be gone through"):
        bc.gradients.svrg(loss, lambda params: params)
