"""``Heating.cool``: draws mapped to the covariance of full gradients, exact by enumeration of every order."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import gradient_noise, heating
from tests.diagnostics.oracle import DOUBLE, affine, enumerated, lyapunov

T, D = 0.01, 3
CHAINS = {
    "sghmc": bc.sghmc(0.2, momentum=0.8, temperature=T),
    "sgld": bc.sgld(0.3, temperature=T),
    "nesterov": bc.chain(bc.add_momentum(0.7, nesterov=True), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(0.1)),
    "preconditioned": bc.chain(
        bc.scale_by_preconditioner(torch.tensor([0.5, 2.0, 1.0], dtype=DOUBLE)), bc.sghmc(0.1, temperature=T)
    ),
}


def problem(strength=0.3, like=None):
    """``H``, gradients ``n_i`` of four batches whose covariance does not commute with it, and the measured noise."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(D, D, dtype=DOUBLE, generator=generator)
    H = A @ A.T + 0.3 * torch.eye(D, dtype=DOUBLE)
    H = H / torch.linalg.eigvalsh(H)[-1]
    n = torch.randn(4, D, dtype=DOUBLE, generator=generator)
    n = (n - n.mean(0)) * T**0.5 * strength
    assert (H @ (n.T @ n) - (n.T @ n) @ H).abs().max() > 1e-5
    like = [torch.zeros(D, dtype=DOUBLE)] if like is None else like

    def loss(theta, batch):
        theta = torch.cat([x.reshape(-1) for x in theta])
        return theta @ H @ theta / 2 + (batch @ theta).mean()

    return H, n, gradient_noise(loss, like, [x[None] for x in n])


def report_of(tx, order, strength=0.3, **more):
    H, _, noise = problem(strength)
    return heating(tx, noise, order=order, steps_per_epoch=4, **{"curvature": H, "again": noise, **more})


@pytest.mark.parametrize("order", ["independent", "reshuffled", "palindrome"])
@pytest.mark.parametrize("name", CHAINS)
def test_cooled_draws_have_the_covariance_of_full_gradients(name, order):
    """The draws are the roots of the covariance under the batches, so that theirs is exactly that."""
    H, n, _ = problem()
    M, gamma, F = affine(CHAINS[name], H, torch.zeros(D, dtype=DOUBLE))
    hot = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, order)[0])[:D, :D]
    assert (hot @ H / T - torch.eye(D, dtype=DOUBLE)).abs().max() > 1e-4
    draws = torch.cat([torch.linalg.cholesky(hot).T, -torch.linalg.cholesky(hot).T]) + 5.0
    report = report_of(CHAINS[name], order)
    (cooled,) = report.cool([draws])
    torch.testing.assert_close(cooled.mean(0), torch.full((D,), 5.0, dtype=DOUBLE))
    torch.testing.assert_close((cooled - 5.0).T @ (cooled - 5.0) / 2, T * torch.linalg.inv(H), rtol=1e-9, atol=0)
    assert report.overlap == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"again": None}, r"not known; measure the noise at a second draw: .*again="),
        ({"curvature": None}, r"curvature was assumed; pass curvature=bc\.diagnostics\.hessian_product"),
        ({"order": "fixed"}, "fixed order shift the mean"),
        ({"order": "independent", "strength": 12.0}, r"the variance is \d+(\.\d)? times too large"),
    ],
)
def test_draws_that_no_map_corrects_are_refused(more, message):
    report = report_of(CHAINS["sghmc"], **{"order": "reshuffled", **more})
    with pytest.raises(ValueError, match=message):
        report.cool([torch.zeros(4, D)])


def test_groups_and_draws_of_other_shapes_are_refused():
    two = bc.partition({"a": bc.sghmc(0.1, temperature=T), "b": bc.sghmc(0.1, 0.5, temperature=T)}, ["a", "b"])
    H, _, noise = problem(like=[torch.zeros(2, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)])
    with pytest.raises(ValueError, match="of 2 groups of parameters"):
        heating(two, noise, order="reshuffled", steps_per_epoch=4, curvature=H, again=noise).cool(
            [torch.zeros(4, 2), torch.zeros(4)]
        )
    with pytest.raises(ValueError, match=r"cool: draws must be leaves \[n, \*leaf\.shape\]"):
        report_of(CHAINS["sghmc"], "reshuffled").cool([torch.zeros(4, 2, D)])


def test_noise_whose_directions_drift_is_refused():
    e = torch.eye(D, dtype=DOUBLE)
    loss = lambda theta, batch: theta[0] @ theta[0] / 2 + (batch @ theta[0]).mean()  # noqa: E731
    at = [torch.zeros(D, dtype=DOUBLE)]
    first, second = (gradient_noise(loss, at, [x[None], -x[None]], rank=1) for x in e[:2] * 0.01)
    curvature = e * torch.tensor([1.0, 0, 0])
    report = heating(CHAINS["sghmc"], first, order="reshuffled", steps_per_epoch=4, curvature=curvature, again=second)
    assert report.overlap < 1e-9
    with pytest.raises(ValueError, match=r"cool: at the second draw 0% of the batches' noise lie in the directions"):
        report.cool([torch.zeros(4, D)])


def test_an_epoch_without_some_data_is_shorter():
    data = bc.epochs(problem()[1], 1, leave_out=torch.tensor([1]))
    assert data.steps_per_epoch == 3.0
    loss = lambda w, batch: (batch @ w).mean()  # noqa: E731
    assert gradient_noise(loss, torch.zeros(D, dtype=DOUBLE), data).steps_per_epoch == 3.0
