"""Control variates and SVRG: unbiased, quieter, exact where theory says so; what they leave of the heat is watched."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from tests.loop.beside import each_alone
from tests.refusals import refuse

N, B, D = 60, 10, 3


def problem():
    """Bayesian linear regression: data in six batches, loss with its prior, posterior mean and precision (per datum)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -0.5, 0.3]).double() + 0.5 * torch.randn(N, generator=generator, dtype=torch.float64)

    def loss(theta, batch):
        inputs, targets = batch
        return ((inputs @ theta - targets) ** 2).mean() / (2 * 0.25) + (theta**2).sum() / (2 * N)

    precision = x.T @ x / N / 0.25 + torch.eye(D).double() / N
    mean = torch.linalg.solve(precision, x.T @ y / N / 0.25)
    return loss, list(zip(x.split(B), y.split(B))), mean, precision


def estimators():
    loss, batches, mean, _ = problem()
    return {
        "control_variates": bc.gradients.control_variates(loss, batches, mean),
        "svrg": bc.gradients.svrg(loss, batches),
    }


@pytest.mark.parametrize("name", ["control_variates", "svrg"])
def test_the_estimate_is_unbiased_and_its_noise_vanishes_at_the_reference_as_its_square(name):
    loss, batches, mean, _ = problem()
    estimator, away = estimators()[name], torch.ones(D).double()
    state = estimator.init(mean)

    def estimates(theta):
        return torch.stack([estimator.estimate(theta, state, batch)[0] for batch in batches])

    def spread(gradients):
        return gradients.var(0).sum().item()

    theta = torch.tensor([0.3, 0.1, -1.0]).double()
    torch.testing.assert_close(estimates(theta).mean(0), bc.gradients.mean_gradient(loss, batches)(theta))
    near = spread(estimates(mean + 0.1 * away))
    assert spread(estimates(mean)) < 1e-25
    assert spread(estimates(mean + 0.2 * away)) / near == pytest.approx(4.0, rel=1e-9)
    assert near < spread(torch.stack([torch.func.grad(loss)(mean + 0.1 * away, b) for b in batches])) / 5


def test_svrg_starts_with_full_gradient_descent_and_refreshes_its_reference_only_when_told():
    loss, batches, _, _ = problem()
    step = bc.make_step(estimators()["svrg"], bc.sgd(0.1))
    theta = torch.zeros(D).double()
    moved, state, info = step(theta, step.init(theta), batches[3])
    torch.testing.assert_close(moved, theta - 0.1 * bc.gradients.mean_gradient(loss, batches)(theta))
    torch.testing.assert_close(info.loss, loss(theta, batches[3]))
    assert_bitwise_equal(state.estimator.reference, theta)
    assert_bitwise_equal(step.refresh(moved, state).estimator.reference, moved)


def test_in_place_equals_pure_and_keeps_the_state_tensors():
    _, batches, _, _ = problem()
    ends = []
    for inplace in (False, True):
        step = bc.make_step(estimators()["svrg"], bc.sghmc(0.05, temperature=1 / N), inplace=inplace)
        theta = torch.zeros(D).double()
        torch.manual_seed(0)
        state = step.init(theta)
        places = [t.data_ptr() for t in (state.estimator.reference, state.estimator.full_gradient)]
        for batch in itertools.islice(itertools.cycle(batches), 8):
            theta, state, _ = step(theta, state, batch)
            state = step.refresh(theta, state)
        assert not inplace or places == [
            t.data_ptr() for t in (state.estimator.reference, state.estimator.full_gradient)
        ]
        ends.append(theta.clone())
    assert_bitwise_equal(*ends)


def test_a_loader_that_leaves_out_data_is_no_pass_over_all_of_them():
    loss, _, mean, _ = problem()
    for n, allowed in ((6, True), (7, False)):
        loader = torch.utils.data.DataLoader(torch.ones(n, 3), batch_size=3, shuffle=True, drop_last=True)  # pyright: ignore[reportArgumentType]
        with nullcontext() if allowed else pytest.raises(ValueError, match="drop_last=False"):
            bc.gradients.control_variates(loss, loader, mean)


def test_chains_in_parallel_have_a_reference_each():
    _, batches, _, _ = problem()
    tx = bc.sghmc(0.05, temperature=1 / N)
    step = bc.make_step(estimators()["svrg"], tx)
    chains, params = bc.parallel(step, 2), torch.stack([torch.zeros(D), torch.ones(D)]).double()
    state = chains.init(tx, params)
    _, after, _ = each_alone(chains, [step] * 2, params, state, batches[:1], rtol=1e-12)
    assert_bitwise_equal(after.estimator.reference, params)
    refuse([(lambda: step.refresh(params, state), r"by torch\.vmap\(step\.refresh\)\(params, state\)")])
    moved, alone = torch.vmap(step.refresh)(params, state), step.refresh(params[1], bc.unstack(state)[1])
    torch.testing.assert_close(moved.estimator.full_gradient[1], alone.estimator.full_gradient)


def test_an_estimated_step_is_checked_monitored_and_skipped_like_any_other():
    _, batches, _, _ = problem()
    tx = bc.skip_nonfinite(bc.sgd(0.1))
    step = bc.make_step(estimators()["svrg"], tx, check_finite=True, monitor=True)
    theta = torch.zeros(D).double()
    state = step.init(theta)
    _, after, info = step(theta, state, batches[0])
    assert bool(info.finite) and info.gradient_norm > 0 and after.inner.skipped == 0
    bad = (batches[0][0], batches[0][1] * torch.inf)
    with pytest.raises(FloatingPointError, match="the gradient has nan"):
        step(theta, state, bad)
    same, after, _ = bc.make_step(estimators()["svrg"], tx)(theta, state, bad)
    assert after.inner.skipped == 1
    assert_bitwise_equal(same, theta)


def test_what_an_estimator_cannot_do_or_be_made_of_is_refused():
    estimator, tx, theta = estimators()["svrg"], bc.sgd(0.1), torch.zeros(D)
    particles = bc.samplers.svgd(0.1, temperature=0.1)
    loss, batches, mean, _ = problem()
    # of two batches the first tensor, weights of classes, has one length whatever the batch
    of_classes = [{"class weights": torch.ones(3), "x": torch.ones(n, 2)} for n in (5, 2)]
    once = bc.gradients.mean_gradient(loss, iter(batches))
    once(mean)
    number: Any = 3
    refuse(
        (
            (lambda: once(mean), "not an iterator"),
            (
                lambda: bc.gradients.mean_gradient(lambda p, batch: (p * batch["x"]).mean(), of_classes)(torch.ones(2)),
                "one entry a datum",
            ),
            (lambda: bc.make_step(number, tx), r"loss must be loss\(params, batch\), an estimator of bc\.gradients"),
            (
                lambda: bc.make_step(estimator, tx, microbatches=2),
                "are of a loss, and an estimator was given, which evaluates",
            ),
            (
                lambda: bc.make_step(estimator, particles),
                "gradients of particles, and an estimator makes one of the batch: pass",
            ),
            (
                lambda: bc.make_step(loss, tx).refresh(theta, tx.init(theta)),
                r"refresh: this step follows the gradient of a loss.*bc\.gradients\.svrg",
            ),
            (
                lambda: bc.make_step(estimator, tx)(theta, tx.init(theta), None),
                r"made with an estimator of bc\.gradients, so its state is what step\.init",
            ),
            (lambda: bc.gradients.svrg(loss, bc.epochs(torch.ones(4), 2, with_rows=True)), "without with_rows="),
            (lambda: bc.gradients.control_variates(loss, [theta], theta, at=theta), "at must be a list"),
        ),
        error=(TypeError, ValueError),
    )


F64 = torch.float64


def squared(w, batch):
    return (batch[0] @ w - batch[1]).square().mean() / 2


def wave(w, x):
    """Gradients of single data, -sin(w) x, turn around between w = -1 and w = 1."""
    return (w.cos() * x).mean()


def test_a_correction_that_adds_noise_at_a_draw_is_refused_before_the_run():
    x = torch.linspace(-1, 1, 24, dtype=F64)
    data, reference = bc.epochs(x, 4), torch.tensor([-1.0], dtype=F64)
    make = lambda at: bc.gradients.control_variates(wave, data, reference, at=at)  # noqa: E731
    step = bc.make_step(make(()), bc.sgd(0.1))
    step.init(reference)  # here nothing is left of the noise
    with pytest.raises(ValueError, match=r"at the parameters the corrections leave 4 times the noise"):
        step.init(-reference)
    with pytest.raises(ValueError, match=r"at a place of at= the corrections leave 4 times"):
        bc.make_step(make([-reference]), bc.sgd(0.1)).init(reference)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_a_snapshot_leaves_of_the_noise_is_measured_where_the_chain_is(inplace):
    """From -1 to 1 the noise of the batches turns around: four times its variance is left, and none behind a refresh."""
    data = bc.epochs(torch.linspace(-1, 1, 24, dtype=F64), 4)
    estimator, params = bc.gradients.svrg(wave, data), torch.tensor([1.0], dtype=F64)
    step = bc.make_step(estimator, bc.sgd(1e-9), inplace=inplace)
    state = step.refresh(-params, step.init(params))
    params, state, _ = step(params, state, data.batch(0, 0))
    left = lambda: bc.gradients.noise_left(estimator, params, data, memory=state.estimator)  # noqa: E731
    assert left() == pytest.approx(4.0)
    state = step.refresh(params, state)
    assert left() < 1e-12


@pytest.mark.parametrize(
    "mode",
    [None, {}, [1.0], "x", torch.tensor([1.0, torch.nan])],
)
def test_a_mode_that_is_no_tree_of_finite_tensors_is_refused_by_its_name(mode):
    with pytest.raises(
        (TypeError, ValueError),
        match=r"control_variates: mode must be finite parameters near a minimum.*temperature=0 first",
    ):
        bc.gradients.control_variates(squared, [torch.ones(2)], mode)
