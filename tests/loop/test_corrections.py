"""Control variates and SVRG: what they leave of the heat of the batches; every correction is watched."""

import pytest
import torch

import bayesopt_chain as bc

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


def test_a_variance_18_times_too_large_comes_down_to_the_posteriors():
    """1,000 data, 5 parameters, batches of 32, learning rate 0.1, momentum 0.9; the gradients are the estimator's own."""
    x, y, mode = regression(1000, 5)
    estimator = bc.gradients.control_variates(loss, [(x[:500], y[:500]), (x[500:], y[500:])], mode)
    memory = estimator.init(mode)
    single = lambda x, y: estimator.estimate(mode, memory, (x[None], y[None]))  # noqa: E731
    noise, _, correction = torch.vmap(single)(x, y)
    assert ratio(noise + correction, x, 0.1, 0.9, 32) > 16 and ratio(noise, x, 0.1, 0.9, 32) < 1.15


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


@pytest.mark.parametrize("mode, error", [(None, ValueError), ({}, ValueError), ([1.0], TypeError), ("x", TypeError)])
def test_a_mode_that_is_no_tree_of_tensors_is_refused_by_its_name(mode, error):
    with pytest.raises(error, match="control_variates: mode must be"):
        bc.gradients.control_variates(loss, [torch.ones(2)], mode)


def test_data_that_cannot_be_iterated_over_is_refused():
    with pytest.raises(TypeError, match="cannot be gone through"):
        bc.gradients.svrg(loss, lambda params: params)
