"""Noise that leaves room for the batches' own: exact by enumeration of every order, and refused where it cannot be."""

import copy
import pickle

import optree
import pytest
import torch
import torchopt

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import gradient_noise, heating
from bayesopt_chain.testing import assert_bitwise_equal
from tests.diagnostics.oracle import DOUBLE, affine, enumerated, lyapunov

T, D = 0.01, 3
CHAINS = {
    "sghmc": lambda room: bc.sghmc(0.2, momentum=0.8, temperature=T, room_for=room),
    "long memory": lambda room: bc.sghmc(0.02, momentum=0.97, temperature=T, room_for=room),
    "sgld": lambda room: bc.chain(bc.inject_langevin_noise(T, room_for=room), bc.scale_by_neg_lr(0.3)),
    "nesterov": lambda room: bc.chain(
        bc.add_momentum(0.7, nesterov=True), bc.inject_langevin_noise(T, room_for=room), bc.scale_by_neg_lr(0.1)
    ),
    "preconditioned": lambda room: bc.chain(
        bc.scale_by_preconditioner(torch.tensor([0.5, 2.0, 1.0], dtype=DOUBLE)),
        bc.sghmc(0.1, temperature=T, room_for=room),
    ),
    "Philox": lambda room: bc.sghmc(0.2, momentum=0.8, temperature=T, room_for=room),
}


def problem(batches=4, strength=0.3, like=None):
    """Gradients ``H theta + n_i`` of some batches: ``H``, the ``n_i``, whose covariance does not commute with it, the audit."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(D, D, dtype=DOUBLE, generator=generator)
    H = A @ A.T + 0.3 * torch.eye(D, dtype=DOUBLE)
    H = H / torch.linalg.eigvalsh(H)[-1]
    n = torch.randn(batches, D, dtype=DOUBLE, generator=generator)
    n = (n - n.mean(0)) * T**0.5 * strength
    assert (H @ (n.T @ n) - (n.T @ n) @ H).abs().max() > 1e-5
    like = torch.zeros(D, dtype=DOUBLE) if like is None else like

    def loss(theta, batch):
        theta = torch.cat([x.reshape(-1) for x in optree.tree_leaves(theta)])
        return theta @ H @ theta / 2 + (batch @ theta).mean()

    return H, n, loss, gradient_noise(loss, like, [x[None] for x in n])


def report_of(tx, order, batches=4, strength=0.3, **more):
    H, _, _, noise = problem(batches, strength)
    return heating(tx, noise, order=order, steps_per_epoch=batches, curvature=H, **{"again": noise, **more})


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", ["independent", "reshuffled", "palindrome"])
@pytest.mark.parametrize(("name", "batches"), [*((name, 4) for name in CHAINS), ("sghmc", 5)])
def test_with_room_the_covariance_is_that_of_full_gradients_under_every_order(name, order, batches):
    H, n, _, _ = problem(batches)
    plain = CHAINS[name](None)
    report = report_of(plain, order, batches)
    M, gamma, F = affine(CHAINS[name](report), H, torch.zeros(D, dtype=DOUBLE))
    got = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, order)[0])[:D, :D]
    assert (got @ H / T - torch.eye(D, dtype=DOUBLE)).abs().max() < 1e-10
    M, gamma, F = affine(plain, H, torch.zeros(D, dtype=DOUBLE))
    hot = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, order)[0])[:D, :D]
    assert (hot @ H / T - torch.eye(D, dtype=DOUBLE)).abs().max() > 1e-4
    assert report.left < 1e-10 and report.overlap == pytest.approx(1.0)


def test_cooled_draws_have_the_covariance_of_full_gradients():
    """The draws are the roots of the covariance that batches heat, so that theirs is exactly that."""
    H, n, _, _ = problem()
    tx = CHAINS["preconditioned"](None)
    M, gamma, F = affine(tx, H, torch.zeros(D, dtype=DOUBLE))
    hot = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, "reshuffled")[0])[:D, :D]
    draws = torch.cat([torch.linalg.cholesky(hot).T, -torch.linalg.cholesky(hot).T]) + 5.0
    cooled = report_of(tx, "reshuffled").cool(draws)
    torch.testing.assert_close(cooled.mean(0), torch.full((D,), 5.0, dtype=DOUBLE))
    got = (cooled - 5.0).T @ (cooled - 5.0) / 2
    torch.testing.assert_close(got, T * torch.linalg.inv(H), rtol=1e-9, atol=0)


def test_in_update_make_step_parallel_capture_and_an_optimizer_it_is_one_chain():
    H, _, loss, noise = problem(like=[torch.zeros(2, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)])
    make = lambda room=None: bc.sghmc(0.2, temperature=T, room_for=room)  # noqa: E731
    report = heating(make(), noise, order="reshuffled", steps_per_epoch=4, curvature=H, again=noise)
    tx, batch = make(report), torch.ones(1, D, dtype=DOUBLE)
    assert make(copy.deepcopy(report)) == tx == pickle.loads(pickle.dumps(tx)) != make()
    assert "room_for=reshuffled batches" in repr(tx)
    start = [torch.ones(2, dtype=DOUBLE), torch.ones((), dtype=DOUBLE)]
    state = tx.init(start)
    params, now = start, state
    for _ in range(3):
        grads = torch.func.grad(loss)(params, batch)
        updates, now = tx.update(grads, now, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    for inplace in (False, True):
        step, got, after = bc.make_step(loss, tx, inplace=inplace), *optree.tree_map(torch.clone, (start, state))
        for _ in range(3):
            got, after, _ = step(got, after, batch)
        torch.testing.assert_close(got, params)
    captured = bc.capture(bc.make_step(loss, tx), start, state, batch, backend="eager")
    got, after = start, state
    for _ in range(3):
        got, after, _ = captured(got, after, batch)
    torch.testing.assert_close(got, params)
    chains = bc.parallel(bc.make_step(loss, tx), 2)
    stacked = optree.tree_map(lambda x: torch.stack([x, x]), start)
    many, after, _ = chains(stacked, chains.init(tx, stacked), batch)
    alone, _, _ = bc.make_step(loss, tx)(start, bc.unstack(chains.init(tx, stacked))[0], batch)
    assert many[0].shape == (2, 2) and not torch.equal(many[0][0], many[0][1]) and alone[1].ndim == 0
    leaves = [torch.nn.Parameter(x.clone()) for x in start]
    torch.manual_seed(0)
    optimizer = bc.optim.Optimizer(leaves, lambda group: make(report))
    torch.manual_seed(0)
    expected, now = start, make(report).init(start)
    for _ in range(3):
        optimizer.zero_grad()
        loss(leaves, batch).backward()
        optimizer.step()
        updates, now = tx.update(torch.func.grad(loss)(expected, batch), now, params=expected, inplace=False)
        expected = torchopt.apply_updates(expected, updates, inplace=False)
    torch.testing.assert_close([x.detach() for x in leaves], expected)


def test_at_temperature_zero_it_is_the_optimizer_to_the_last_bit():
    report = report_of(CHAINS["sghmc"](None), "reshuffled")
    tx, plain = bc.sghmc(0.2, 0.8, temperature=0.0, room_for=report), torchopt.sgd(0.2, momentum=0.8)
    a = b = torch.ones(D, dtype=DOUBLE)
    s, t = tx.init(a), plain.init(b)
    for _ in range(5):
        u, s = tx.update(a.sin(), s, params=a, inplace=False)
        v, t = plain.update(b.sin(), t, inplace=False)
        a, b = a + u, b + v
    assert_bitwise_equal(a, b)


def refused(report, make=CHAINS["sghmc"], params=None):
    tx = make(report)
    return tx.init(torch.zeros(D, dtype=DOUBLE) if params is None else params)


def test_a_report_that_gives_no_room_is_refused_and_says_why():
    sghmc, H = CHAINS["sghmc"](None), problem()[0]
    noise = problem()[3]
    with pytest.raises(TypeError, match=r"room_for must be a report of bc\.diagnostics\.heating, got float"):
        refused(0.3)
    with pytest.raises(ValueError, match=r"not looked at; take the noise at another draw too: .*again="):
        refused(report_of(sghmc, "reshuffled", again=None))
    with pytest.raises(ValueError, match=r"curvature was assumed; pass curvature=bc\.diagnostics\.hessian_product"):
        refused(heating(sghmc, noise, order="reshuffled", steps_per_epoch=4, again=noise))
    with pytest.raises(ValueError, match="fixed order shift the mean"):
        refused(report_of(sghmc, "fixed"))
    with pytest.raises(
        ValueError, match=r"more noise than there is room for: the variance would still be \+\d+\.\d% off"
    ):
        refused(report_of(sghmc, "independent", strength=3.0))
    assert report_of(sghmc, "independent", strength=3.0, tolerance=1e3).left > 0.05
    two = bc.partition({"a": bc.sghmc(0.1, temperature=T), "b": bc.sghmc(0.1, 0.5, temperature=T)}, ["a", "b"])
    _, _, _, split = problem(like=[torch.zeros(2, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)])
    with pytest.raises(ValueError, match="of 2 groups of parameters"):
        refused(heating(two, split, order="reshuffled", steps_per_epoch=4, curvature=H, again=split))


def test_noise_whose_directions_drift_is_refused():
    _, _, loss, _ = problem()
    e = torch.eye(D, dtype=DOUBLE)
    first, second = (
        gradient_noise(loss, torch.zeros(D, dtype=DOUBLE), [x[None], -x[None]], rank=1) for x in e[:2] * 0.01
    )
    report = heating(
        CHAINS["sghmc"](None),
        first,
        order="reshuffled",
        steps_per_epoch=4,
        curvature=e * torch.tensor([1.0, 0, 0]),
        again=second,
    )
    assert report.overlap < 1e-9
    with pytest.raises(
        ValueError, match=r"at the second draw 0% of the batches' noise lie in the directions of the first"
    ):
        refused(report)
    with pytest.raises(ValueError, match=r"cool: at the second draw 0%"):
        report.cool(torch.zeros(4, D))


def test_another_chain_than_that_of_the_report_is_refused():
    report = report_of(CHAINS["sghmc"](None), "reshuffled")
    for make in (
        lambda room: bc.sghmc(0.1, momentum=0.8, temperature=T, room_for=room),
        lambda room: bc.sghmc(0.2, momentum=0.9, temperature=T, room_for=room),
        lambda room: bc.sghmc(0.2, momentum=0.8, temperature=2 * T, room_for=room),
        lambda room: bc.sghmc(0.2, momentum=0.8, temperature=T, order=1, room_for=room),
        CHAINS["preconditioned"],
    ):
        with pytest.raises(ValueError, match=r"report of room_for= was made for the chain .* must be the same"):
            refused(report, make)
    for lr, temperature in ((lambda count: 0.2, T), (torch.tensor(0.2), T), (0.2, lambda count: T)):
        with pytest.raises(ValueError, match="a schedule or a tensor changes how much room there is"):
            refused(report, lambda room, a=lr, b=temperature: bc.sghmc(a, 0.8, temperature=b, room_for=room))
    with pytest.raises(ValueError, match="the report is of leaves of the shapes"):
        refused(report, params=torch.zeros(4, dtype=DOUBLE))
    with pytest.raises(ValueError, match=r"room_for goes with bc\.chain"):
        bc.inject_langevin_noise(T, lr=0.1, momentum=0.0, room_for=report)
    tx = CHAINS["sghmc"](report)
    with pytest.raises(ValueError, match="every leaf needs a gradient"):
        tx.update(None, tx.init(torch.zeros(D, dtype=DOUBLE)), params=torch.zeros(D, dtype=DOUBLE))


def test_batches_of_another_order_or_size_are_refused_by_sample():
    _, n, loss, _ = problem()
    step = bc.make_step(loss, CHAINS["sghmc"](report_of(CHAINS["sghmc"](None), "reshuffled")))
    start = torch.zeros(D, dtype=DOUBLE)
    for steps, data in ((step, bc.epochs(n, 1, order="independent")), (bc.parallel(step, 2), bc.epochs(n, 2))):
        with pytest.raises(
            ValueError, match=r"report of room_for= is of reshuffled batches, 4 an epoch, and these are"
        ):
            bc.sample(steps, start, step.init(start), data, steps=2)
    assert len(bc.sample(step, start, step.init(start), bc.epochs(n, 1), steps=2)) == 2


def test_draws_that_are_much_too_hot_are_not_cooled():
    report = report_of(CHAINS["sghmc"](None), "independent", strength=12.0)
    with pytest.raises(ValueError, match=r"cool: the variance is \d+(\.\d)? times too large"):
        report.cool(torch.zeros(4, D))
    with pytest.raises(ValueError, match=r"cool: draws must be leaves \[n, \*leaf\.shape\]"):
        report_of(CHAINS["sghmc"](None), "reshuffled").cool(torch.zeros(4, 2, D))


def test_parameters_of_another_structure_or_dtype_are_refused():
    """The leaves of a dictionary come in the order of the alphabet, so that equal shapes do not mean equal leaves."""
    names = ("c", "a", "b")
    _, _, _, noise = problem(like={name: torch.zeros(1, dtype=DOUBLE) for name in names})
    report = heating(
        CHAINS["sghmc"](None), noise, order="reshuffled", steps_per_epoch=4, curvature=problem()[0], again=noise
    )
    refused(report, params={name: torch.zeros(1, dtype=DOUBLE) for name in sorted(names)})
    with pytest.raises(
        ValueError, match=r"is of the leaves \['a'\], \['b'\], \['c'\], the parameters are \[0\], \[1\], \[2\]"
    ):
        refused(report, params=[torch.zeros(1, dtype=DOUBLE) for _ in names])
    with pytest.raises(ValueError, match="the report is of leaves in float64, the parameters are in float32"):
        refused(report_of(CHAINS["sghmc"](None), "reshuffled"), params=torch.zeros(D))


def test_what_would_make_another_noise_or_take_it_for_heat_is_refused():
    _, n, loss, _ = problem()
    report = report_of(CHAINS["sghmc"](None), "reshuffled")
    tx, start = CHAINS["sghmc"](report), torch.zeros(D, dtype=DOUBLE)
    rows = bc.epochs(n, 1, with_rows=True)
    table = bc.gradients.gradient_table(loss, rows, start, rank=2)
    with pytest.raises(ValueError, match="this estimator makes another noise, so that the chain would be too cold"):
        bc.make_step(bc.gradients.stored_control_variates(loss, table, data=rows), tx)
    with pytest.raises(
        ValueError, match="leaves room for reshuffled batches in 3 directions, whose noise the guard would"
    ):
        bc.make_step(loss, tx, heat_guard=bc.diagnostics.HeatGuard(4))
    with pytest.raises(ValueError, match="pass the same chain without room_for="):
        report_of(tx, "reshuffled")
    for scale, words in (
        (bc.links.running_rms(0.9), "learns its preconditioner, and how much room there is was measured at one"),
        (torch.tensor([0.5, 2.0, 1.5], dtype=DOUBLE), "was made for the chain"),
    ):
        with pytest.raises(ValueError, match=words):
            refused(
                report_of(CHAINS["preconditioned"](None), "reshuffled"),
                lambda room, scale=scale: bc.chain(
                    bc.scale_by_preconditioner(scale), bc.sghmc(0.1, temperature=T, room_for=room)
                ),
            )


def test_an_epoch_without_some_data_is_shorter():
    _, n, loss, _ = problem()
    data = bc.epochs(n, 1, leave_out=torch.tensor([1]))
    assert data.steps_per_epoch == gradient_noise(loss, torch.zeros(D, dtype=DOUBLE), data).steps_per_epoch == 3.0


def test_batches_of_another_order_are_refused_behind_a_capture_too():
    _, n, loss, _ = problem()
    step = bc.make_step(loss, CHAINS["Philox"](report_of(CHAINS["Philox"](None), "reshuffled")))
    start, data = torch.zeros(D, dtype=DOUBLE), bc.epochs(n, 1)
    captured = bc.capture(step, start, step.init(start), data.batch(0, 0), backend="eager")
    with pytest.raises(
        ValueError, match=r"is of reshuffled batches, 4 an epoch, and these are independent, 4 an epoch"
    ):
        bc.sample(captured, start, step.init(start), bc.epochs(n, 1, order="independent"), steps=2)
    assert len(bc.sample(captured, start, step.init(start), data, steps=2)) == 2
