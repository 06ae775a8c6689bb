"""Control variates and SVRG: unbiased, quieter, exact where theory says so."""

import itertools

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal
from tests.loop.alone import each_alone

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


def exact_covariance(lr: float, controlled: bool) -> torch.Tensor:
    """Stationary covariance of SGLD (order 1) with a batch drawn at random at every step, by solving for its moments.

    ``theta' - m = (I - lr A_b)(theta - m) - lr r_b + noise`` with ``A_b`` the batch's curvature and ``r_b`` its gradient at the
    posterior mean ``m``, which control variates remove.
    """
    loss, batches, mean, _ = problem()
    curvature = [torch.func.hessian(loss)(mean, b) for b in batches]
    residual = [torch.func.grad(loss)(mean, b) * (0.0 if controlled else 1.0) for b in batches]
    eye, k = torch.eye(D).double(), len(batches)
    second = sum(torch.kron(eye - lr * a, eye - lr * a) for a in curvature) / k
    # the residual and the curvature of one batch are correlated, but the mean of theta - m is not zero to second order:
    # solve for the mean first
    shift = sum((eye - lr * a) for a in curvature) / k
    mu = torch.linalg.solve(eye - shift, -lr * sum(residual) / k)
    cross = sum(torch.outer((eye - lr * a) @ mu, -lr * r) for a, r in zip(curvature, residual)) / k
    noise = 2 * lr / N * eye + sum(lr**2 * torch.outer(r, r) for r in residual) / k
    total = torch.linalg.solve(torch.eye(D * D).double() - second, (noise + cross + cross.T).reshape(-1)).reshape(D, D)
    return total - torch.outer(mu, mu)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "control_variates", "svrg"])
def test_linear_regression_with_minibatches_has_its_exact_covariance(name):
    """3,000 chains: every mean within 5 standard errors, every entry of the covariance too.

    9 comparisons for each estimator, each with probability 6e-7 of a false alarm. For SVRG, refreshed at every 25th
    step of each chain, the expected covariance lies between those of the other two.
    """
    loss, batches, mean, _ = problem()
    lr, chains = 0.05, 3000
    tx = bc.sgld(lr, temperature=1 / N, order=1)
    generator = torch.Generator().manual_seed(1)
    theta = mean + 0.1 * torch.randn(chains, D, generator=generator, dtype=torch.float64)
    state = tx.init(theta)
    x, y = torch.stack([b[0] for b in batches]), torch.stack([b[1] for b in batches])
    estimator = estimators().get(name)
    held = None
    for t in range(100):
        which = torch.randint(len(batches), (chains,), generator=generator)
        if estimator is None:
            grads = torch.vmap(lambda p, *b: torch.func.grad(loss)(p, b))(theta, x[which], y[which])
        else:
            if t == 0 or (name == "svrg" and t % 25 == 0):
                held = torch.vmap(estimator.init)(theta)
            grads = torch.vmap(lambda p, s, *b: estimator.estimate(p, s, b)[0])(theta, held, x[which], y[which])
        updates, state = tx.update(grads, state, params=theta, inplace=True)
        theta += updates
    got = torch.cov(theta.T)
    want = exact_covariance(lr, controlled=name == "control_variates")
    plain = exact_covariance(lr, controlled=False)
    error = (got.diag() / chains) ** 0.5
    assert ((theta.mean(0) - mean).abs() < 5 * error).all()
    if name == "svrg":
        assert got.trace() < 0.95 * plain.trace()
        return
    spread = ((want**2 + torch.outer(want.diag(), want.diag())) / chains) ** 0.5
    assert ((got - want).abs() < 5 * spread).all(), (got, want)


def test_control_variates_bring_the_covariance_to_the_posterior():
    _, _, _, precision = problem()
    posterior = torch.linalg.inv(precision) / N
    plain, controlled = exact_covariance(0.05, False), exact_covariance(0.05, True)
    assert plain.trace() / posterior.trace() > 1.7
    assert ((controlled.diag() / posterior.diag()) - 1).abs().max() < 0.2


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


def test_a_missing_mode_is_refused():
    loss, batches, _, _ = problem()
    for mode in (None, {}):
        with pytest.raises(
            ValueError, match=r"control_variates: mode must be parameters near a minimum.*temperature=0 first"
        ):
            bc.gradients.control_variates(loss, batches, mode)
    with pytest.raises(ValueError, match="mode differs from params in structure or shapes"):
        bc.gradients.control_variates(loss, batches, torch.zeros(2)).init(torch.zeros(D))


def test_an_exhausted_iterator_of_batches_is_refused():
    loss, batches, mean, _ = problem()
    full = bc.gradients.mean_gradient(loss, iter(batches))
    full(mean)
    with pytest.raises(ValueError, match="not an iterator"):
        full(mean)


def test_chains_in_parallel_have_a_reference_each():
    _, batches, _, _ = problem()
    tx = bc.sghmc(0.05, temperature=1 / N)
    step = bc.make_step(estimators()["svrg"], tx)
    chains, params = bc.parallel(step, 2), torch.stack([torch.zeros(D), torch.ones(D)]).double()
    state = chains.init(tx, params)
    _, after, _ = each_alone(chains, [step] * 2, params, state, batches[:1], rtol=1e-12)
    assert_bitwise_equal(after.estimator.reference, params)


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


def test_what_only_a_loss_can_do_is_refused_of_an_estimator():
    estimator, tx, theta = estimators()["svrg"], bc.sgd(0.1), torch.zeros(D)
    particles = bc.samplers.svgd(0.1, temperature=0.1)
    for ask, words in (
        (
            lambda: bc.make_step(estimator, tx, microbatches=2),
            "are of a loss, and an estimator was given, which evaluates",
        ),
        (
            lambda: bc.make_step(estimator, particles),
            "gradients of particles, and an estimator makes one of the batch: pass",
        ),
        (
            lambda: bc.make_step(problem()[0], tx).refresh(theta, tx.init(theta)),
            r"refresh: this step follows the gradient of a loss.*bc\.gradients\.svrg",
        ),
        (
            lambda: bc.make_step(estimator, tx)(theta, tx.init(theta), None),
            r"made with an estimator of bc\.gradients, so its state is what step\.init",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            ask()
    with pytest.raises(TypeError, match=r"loss is 3; pass loss\(params, batch\), an estimator of bc\.gradients"):
        bc.make_step(3, tx)
