"""The laws of minibatch heating against enumeration of every order, and against the whole state's Lyapunov equation."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchopt
from torch.func import functional_call

import bayesopt_chain as bc
from bayesopt_chain import diagnostics
from bayesopt_chain.diagnostics import GradientNoise, gradient_noise
from tests.diagnostics.oracle import DOUBLE, affine, by_recursion, enumerated, lyapunov, worst_ratio

T = 0.01
ORDERS = ("independent", "reshuffled", "palindrome", "fixed")


def noise_of(C, like=None):
    """A report of the covariance ``C`` of batches drawn with replacement."""
    values, vectors = torch.linalg.eigh(C)
    rows = (vectors * values.clamp(min=0.0).sqrt()).T
    like = torch.zeros(len(C), dtype=DOUBLE) if like is None else like
    return GradientNoise(
        bc.trees.unflatten(rows, like), None, like, values.flip(0), float(values.sum()), len(C), None, None
    )


def heating(tx, noise, *, curvature=None, **about):
    """The report, of a curvature that may be a matrix ``[P, P]``."""
    like, given = noise.mean, curvature
    if isinstance(given, torch.Tensor):
        curvature = lambda tree: bc.trees.unflatten(given @ bc.trees.flatten(tree, like).to(given), like)  # noqa: E731
    return diagnostics.heating(tx, noise, curvature=curvature, **about)


def signs_regression(n, seed=0):
    """Targets and features +-1: the gradient of one datum is ``theta - x y``, its noise the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 2, (n,), generator=generator).to(DOUBLE) * 2 - 1
    return x, torch.randn(n, generator=generator, dtype=DOUBLE)


def loss(theta, batch):
    x, y = batch
    return (x * theta - y).square().mean() / 2


CHAINS = {
    "sgld": lambda lr: bc.sgld(lr, temperature=T),
    "sgld of order 1": lambda lr: bc.sgld(lr, temperature=T, order=1),
    "sghmc": lambda lr: bc.sghmc(lr, temperature=T),
    "sghmc of order 1": lambda lr: bc.sghmc(lr, temperature=T, order=1),
    "dampened": lambda lr: bc.sgd(lr, 0.9, 0.3, temperature=T),
    "nesterov": lambda lr: bc.sgd(lr, 0.8, nesterov=True, temperature=T),
    "prior by weight decay": lambda lr: bc.sgd(lr, 0.9, weight_decay=0.2, temperature=T),
    "decoupled decay": lambda lr: bc.chain(
        bc.add_momentum(0.9), bc.links.add_decayed_weights(0.1), bc.sgld(lr, temperature=T)
    ),
    "two momenta": lambda lr: bc.chain(bc.add_momentum(0.5), bc.add_momentum(0.1), bc.sgd(lr, temperature=T)),
    "scheduled": lambda lr: bc.sgd(lambda count: lr, 0.9, temperature=T),
    "clipped far away": lambda lr: bc.chain(torchopt.clip_grad_norm(10.0), bc.sghmc(lr, temperature=T)),
    "Philox": lambda lr: bc.sghmc(lr, temperature=T),
}


@pytest.mark.sweep(7)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_law_is_that_of_all_orders_enumerated(chain, order):
    tx = CHAINS[chain](0.2)
    n = 4
    x, y = signs_regression(n)
    theta = torch.tensor(0.3, dtype=DOUBLE)
    data = [(x[i : i + 1], y[i : i + 1]) for i in range(n)]
    report = heating(
        tx, gradient_noise(loss, theta, data), order=order, steps_per_epoch=n, curvature=torch.ones(1, 1, dtype=DOUBLE)
    )
    M, gamma, F = affine(tx, torch.ones(1, 1, dtype=DOUBLE), theta)
    noises = -(x * y - (x * y).mean())[:, None]
    mean, end = enumerated(M, gamma, noises, order)
    full = lyapunov(M, F @ F.T)[0, 0]
    assert report.excess.item() == pytest.approx((mean[0, 0] / full).item(), rel=1e-9, abs=1e-10)
    assert report.at_end.item() == pytest.approx((end[0, 0] / full).item(), rel=1e-9, abs=1e-10)
    assert report.worst == pytest.approx(report.excess.item(), rel=1e-9)


@pytest.mark.parametrize("order", ("reshuffled", "palindrome"))
@pytest.mark.parametrize(("n", "b"), [(4, 2), (6, 2), (6, 3), (5, 2)])
def test_permutations_of_the_data_cut_into_batches(order, n, b):
    """Without replacement: every permutation of the data, the rest that fills no batch left out (5 data in batches of 2)."""
    x, y = signs_regression(n, seed=n)
    g = -(x * y - (x * y).mean())
    tx, one = bc.sghmc(0.3, 0.5, temperature=T), torch.ones(1, 1, dtype=DOUBLE)
    M, gamma, F = affine(tx, one, torch.tensor(0.0, dtype=DOUBLE))
    K = n // b
    added, end = 0.0, []
    for permutation in itertools.permutations(range(n)):
        batches = [g[list(permutation[k * b : k * b + b])].mean() for k in range(K)]
        state = torch.zeros(len(M), dtype=DOUBLE)
        for m in [*batches, *reversed(batches)] if order == "palindrome" else batches:
            state = M @ state - gamma[:, 0] * m
        end.append(state)
    end = torch.stack(end)
    added = end.T @ end / len(end)
    X = lyapunov(torch.linalg.matrix_power(M, K if order == "reshuffled" else 2 * K), added)
    C = g.square().sum() / (n - 1) / b  # s^2 / b
    report = heating(tx, noise_of(C.reshape(1, 1)), order=order, steps_per_epoch=n / b, curvature=one)
    assert report.at_end.item() == pytest.approx((X[0, 0] / lyapunov(M, F @ F.T)[0, 0]).item(), rel=1e-10)


def law_2(kappa):
    return kappa / 2 * (1 - 2 * (kappa - 1 + math.exp(-kappa)) / kappa**2)


@pytest.mark.parametrize(
    ("order", "number", "kappa", "momentum", "K", "law", "error"),
    [
        *[("reshuffled", "excess", kappa, 0.0, 2000, law_2(kappa), 5e-3) for kappa in (0.3, 1.0, 5.0)],
        *[  # rho 2 (1 + mu) / (2 (1 + mu) - y), rho = (kappa / 2) (1 - 1 / K)
            (
                "independent",
                "excess",
                kappa,
                mu,
                20,
                0.475 * kappa * 2 * (1 + mu) / (2 * (1 + mu) - kappa * (1 - mu) / 20),
                1e-10,
            )
            for kappa, mu in ((0.1, 0.0), (3.0, 0.5), (30.0, 0.9))
        ],
        ("reshuffled", "at_end", 0.3, 0.0, 2000, 0.3**3 / 24, 0.03),
        *[("palindrome", "at_end", kappa, 0.0, 400, kappa**5 / 50, 0.1) for kappa in (0.25, 0.5)],
        # the square of a bias, over the variance
        *[
            ("fixed", "excess", kappa, 0.9, 100, law, 0.005 / law)
            for kappa, law in ((5.0, 1.48), (2.0, 0.22), (1.0, 0.05))
        ],
    ],
)
def test_laws_of_well_specified_models_by_relaxations_an_epoch(order, number, kappa, momentum, K, law, error):
    """``C = K T H``: published expressions at small learning rates."""
    H = torch.full((1, 1), kappa * (1 - momentum) / (K * 0.01), dtype=DOUBLE)
    report = heating(bc.sghmc(0.01, momentum, temperature=T), noise_of(K * T * H), order=order, steps_per_epoch=K)
    assert report.assumed and "assumed: C = K T H" in str(report) and report.kappa.item() == pytest.approx(kappa)
    assert report.rho.item() == pytest.approx(kappa / 2 * (1 - 1 / K))
    assert getattr(report, number).item() == pytest.approx(law, rel=error)


def coupled(d, seed):
    """A curvature and a noise covariance with no eigenvector in common."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(d, d, generator=generator, dtype=DOUBLE) for _ in range(2))
    return a @ a.T / d + 0.1 * torch.eye(d, dtype=DOUBLE), 0.05 * b @ b.T / d


LIKE = {"body": torch.zeros(2, dtype=DOUBLE), "head": torch.zeros(3, dtype=DOUBLE)}
DIAGONAL = {"body": torch.tensor([0.5, 2.0], dtype=DOUBLE), "head": torch.tensor([1.0, 0.2, 3.0], dtype=DOUBLE)}
GROUPED = {
    "two learning rates and momenta": lambda: bc.partition(
        {"slow": bc.sghmc(0.05, 0.9, temperature=T), "fast": bc.sgd(0.2, 0.5, nesterov=True, temperature=T)},
        {"body": "slow", "head": "fast"},
    ),
    "a cold body": lambda: bc.partition(
        {"cold": bc.sgd(0.1, 0.9), "hot": bc.sghmc(0.1, temperature=T)}, {"body": "cold", "head": "hot"}
    ),
    "a frozen body": lambda: bc.partition(
        {"still": bc.links.scale(0.0), "hot": bc.sghmc(0.1, temperature=T)}, {"body": "still", "head": "hot"}
    ),
    "a diagonal preconditioner": lambda: bc.chain(bc.scale_by_preconditioner(DIAGONAL), bc.sghmc(0.1, temperature=T)),
    "a preconditioner behind the momentum": lambda: bc.chain(
        bc.add_momentum(0.8), bc.scale_by_preconditioner(DIAGONAL), bc.sgld(0.1, temperature=T)
    ),
    "decoupled decay behind a preconditioner": lambda: bc.chain(
        bc.scale_by_preconditioner(DIAGONAL),
        bc.add_momentum(0.8),
        bc.links.add_decayed_weights(0.3),
        bc.sgld(0.1, temperature=T),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", ("independent", "reshuffled"))
@pytest.mark.parametrize("chain", GROUPED)
def test_groups_and_preconditioners_are_solved_together(chain, order):
    tx, K, d = GROUPED[chain](), 4, 5
    H, S = coupled(d, 3)
    values, vectors = torch.linalg.eigh(S)
    directions = vectors[:, -(K - 1) :] * values[-(K - 1) :].sqrt()
    simplex = torch.linalg.svd(torch.eye(K, dtype=DOUBLE) - 1 / K).U[:, : K - 1]  # K rows that sum to zero
    noises = simplex @ directions.T
    C = noises.T @ noises / (K - 1)
    report = heating(tx, noise_of(C, LIKE), order=order, steps_per_epoch=K, curvature=H)
    M, gamma, F = affine(tx, H, LIKE)
    if chain == "a frozen body":  # the rest must not depend on it
        rest = list(range(2, len(M)))
        M, gamma, F = M[rest][:, rest], gamma[rest], F[rest]
        d = 3
    mean, end = (X[:d, :d] for X in enumerated(M, gamma, noises, order))
    full = lyapunov(M, F @ F.T)[:d, :d]
    assert report.worst == pytest.approx(worst_ratio(full, mean), rel=1e-8)
    rows = bc.trees.flatten(report.directions, LIKE)[:, -d:]
    for row, excess, at_end in zip(rows, report.excess, report.at_end):
        assert excess.item() == pytest.approx((row @ mean @ row / (row @ full @ row)).item(), rel=1e-8)
        assert at_end.item() == pytest.approx((row @ end @ row / (row @ full @ row)).item(), rel=1e-8)


def test_the_span_of_noise_and_curvature_is_enough():
    """Low rank in many parameters, two groups: the reduced equations give what the whole state's give."""
    generator = torch.Generator().manual_seed(0)
    d, r, K = 24, 3, 5
    U = torch.linalg.qr(torch.randn(d, r, generator=generator, dtype=DOUBLE)).Q
    H = U @ torch.diag(torch.tensor([3.0, 1.0, 0.4], dtype=DOUBLE)) @ U.T
    rows = torch.randn(2, d, generator=generator, dtype=DOUBLE) * 0.1
    like = {"a": torch.zeros(10, dtype=DOUBLE), "b": torch.zeros(2, 7, dtype=DOUBLE)}
    tx = bc.partition(
        {"slow": bc.sghmc(0.05, 0.9, temperature=T), "fast": bc.sgld(0.3, temperature=T)}, {"a": "slow", "b": "fast"}
    )
    report = heating(tx, noise_of(rows.T @ rows, like), order="reshuffled", steps_per_epoch=K, curvature=H)
    M, gamma, F = affine(tx, H, like)
    # the seen coordinates U^T theta alone are stationary: the others walk freely, and are seen by nobody
    seen = torch.block_diag(U.T, torch.eye(len(M) - d, dtype=DOUBLE))
    M_r = seen @ M @ torch.linalg.pinv(seen)
    gamma_r, F_r = seen @ gamma, seen @ F
    total = by_recursion(M_r, gamma_r, rows.T @ rows, K, "reshuffled")[:r, :r]
    full = lyapunov(M_r, F_r @ F_r.T)[:r, :r]
    assert report.worst == pytest.approx(worst_ratio(full, total), rel=1e-7)


def test_curvature_is_a_product():
    tx, K = bc.sghmc(0.02, temperature=T), 30
    H, C = coupled(4, 1)
    like = torch.zeros(4, dtype=DOUBLE)
    precision = bc.precision.Dense(50 * H, like, torch.tensor(50.0))  # summed over 50 data
    reports = [
        diagnostics.heating(tx, noise_of(C, like), order="reshuffled", steps_per_epoch=K, curvature=form)
        for form in (H.mv, lambda v: H @ v, lambda v: precision.times(v) / precision.count)
    ]
    for report in reports[1:]:
        assert torch.allclose(report.excess, reports[0].excess, rtol=1e-9) and "curvature given" in str(report)
    for wrong in (1.0, H):
        with pytest.raises(TypeError, match=r"curvature must be a product .*H\.mv"):
            diagnostics.heating(tx, noise_of(C, like), order="reshuffled", steps_per_epoch=K, curvature=wrong)


def test_a_models_own_draws_are_independent_in_every_order():
    """Dropout's share D is not summed to zero by an epoch: it heats by law 1, whatever the order."""
    tx, K, H = bc.sghmc(0.1, temperature=T), 10, torch.ones(1, 1, dtype=DOUBLE)
    white = heating(tx, noise_of(H * 0.01), order="independent", steps_per_epoch=math.inf, curvature=H).excess
    data = noise_of(H * 0.02)
    own = noise_of(H * 0.01).rows
    both = data._replace(rows=torch.cat([data.rows, own / 2**0.5]), draws=own)
    for order in ORDERS:
        alone = heating(tx, data, order=order, steps_per_epoch=K, curvature=H).excess
        assert torch.allclose(
            heating(tx, both, order=order, steps_per_epoch=K, curvature=H).excess, alone + white, rtol=1e-9
        )


@pytest.mark.parametrize(
    ("build", "settings", "words"),
    [
        (lambda: bc.sgd(0.1), {}, "draws no noise"),
        (lambda: bc.sghmc(5.0, temperature=T), {}, "diverges"),
        (lambda: bc.sghmc(0.1, temperature=T), {"order": "shuffled"}, "reshuffled"),
        (lambda: bc.sghmc(0.1, temperature=T), {"steps_per_epoch": None}, "steps_per_epoch"),
        (lambda: bc.sghmc(0.1, temperature=T), {"steps_per_epoch": math.inf}, "has epochs"),
        (lambda: bc.adam(0.1, temperature=T), {}, "state of a run"),
        (
            lambda: bc.chain(torchopt.clip_grad_norm(1e-3), bc.sghmc(0.1, temperature=T)),
            {},
            "clip_grad_norm changes the gradient of a batch",
        ),
        (lambda: bc.samplers.sgnht(0.1, temperature=T), {}, "thermostat"),
        (lambda: bc.sgd(0.1, temperature=T, maximize=True), {}, "climbs"),
        (
            lambda: bc.sghmc(0.1, temperature=T),
            {"curvature": torch.full((2, 2), math.nan).double()},
            "is NaN or infinite",
        ),
        (
            lambda: bc.sghmc(0.1, temperature=T),
            {"curvature": -torch.eye(2).double()},
            "no direction .* positive curvature",
        ),
        (
            lambda: bc.sghmc(0.1, temperature=T),
            {"state": bc.sgd(0.1).init(torch.zeros(2))},
            "state: it is of the links",
        ),
        (
            lambda: bc.chain(
                bc.links.add_decayed_weights(0.1),
                bc.scale_by_preconditioner(torch.tensor([1.0, 2.0])),
                bc.sghmc(0.1, temperature=T),
            ),
            {},
            "prior into the loss",
        ),
        (
            lambda: bc.partition(
                {"a": bc.sghmc(0.1, temperature=T), "b": bc.sghmc(0.1, temperature=2 * T)}, {"body": "a", "head": "b"}
            ),
            {"noise": noise_of(coupled(5, 0)[1], LIKE), "curvature": None},
            "hessian_product",
        ),
    ],
)
def test_what_has_no_answer_is_refused_by_name(build, settings, words):
    H, C = coupled(2, 0)
    given = {"noise": noise_of(C), "order": "reshuffled", "steps_per_epoch": 10, "curvature": H, **settings}
    with pytest.raises(ValueError, match=words):
        heating(build(), **given)


def test_the_regression_of_the_page_on_minibatches_has_18_5_times_the_variance():
    """Second moments of parameters, velocity and last draw, solved exactly; the Hessian of a batch is a random matrix."""
    n, d, b, lr, mu = 1000, 5, 32, 0.1, 0.9
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = x.sum(1) + torch.randn(n, generator=g, dtype=torch.float64)
    residuals = x @ torch.linalg.lstsq(x, y[:, None]).solution[:, 0] - y
    hessian, eye, zero = x.T @ x / n, torch.eye(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)
    noise = math.sqrt(2 / n * (1 - mu) / lr) * lr / 2 * eye
    drift = lr * hessian
    move = torch.cat([torch.cat([eye - drift, -mu * eye, -noise], 1), torch.cat([drift, mu * eye, noise], 1)])
    move = torch.cat([move, torch.zeros(d, 3 * d, dtype=torch.float64)])
    by_gradient, by_draw = torch.cat([-lr * eye, lr * eye, zero]), torch.cat([-noise, noise, eye])
    of_params, apart = torch.cat([eye, zero, zero]), torch.einsum("ni,nj->nij", x, x) - hessian
    for left, times in ((x * residuals[:, None], 18.5), (torch.zeros_like(x), 1.1)):  # plain; control variates
        share = (n - b) / (n - 1) / b / n
        fourth = torch.einsum("nij,nkl->ikjl", apart, apart).reshape(d * d, d * d) * share
        pairs = torch.kron(move, move)
        pairs += torch.kron(by_gradient, by_gradient) @ fourth @ torch.kron(of_params, of_params).T
        sources = by_draw @ by_draw.T + by_gradient @ (left.T @ left * share) @ by_gradient.T
        solved = torch.linalg.solve(torch.eye(len(pairs), dtype=torch.float64) - pairs, sources.reshape(-1))
        variance = solved.reshape(3 * d, 3 * d)[:d, :d] @ hessian * n
        assert abs(float(variance.trace() / d) - times) < 0.05


# cooling: draws mapped to the covariance of full gradients, exact by enumeration of every order

D = 3
COOLED = {
    "sghmc": bc.sghmc(0.2, momentum=0.8, temperature=T),
    "sgld": bc.sgld(0.3, temperature=T),
    "nesterov": bc.chain(bc.add_momentum(0.7, nesterov=True), bc.inject_langevin_noise(T), bc.scale_by_neg_lr(0.1)),
    "preconditioned": bc.chain(
        bc.scale_by_preconditioner(torch.tensor([0.5, 2.0, 1.0], dtype=DOUBLE)), bc.sghmc(0.1, temperature=T)
    ),
}


GROUPS = bc.partition({"a": bc.sghmc(0.1, temperature=T), "b": bc.sghmc(0.1, 0.5, temperature=T)}, ["a", "b"])


def uneven(strength=0.3, like=None):
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


def report_of(tx, order, strength=0.3, like=None, **more):
    H, _, noise = uneven(strength, like)
    return heating(tx, noise, order=order, steps_per_epoch=4, **{"curvature": H, "again": noise, **more})


@pytest.mark.parametrize("order", ["independent", "reshuffled", "palindrome"])
@pytest.mark.parametrize("name", COOLED)
def test_cooled_draws_have_the_covariance_of_full_gradients(name, order):
    """The draws are the roots of the covariance under the batches, so that theirs is exactly that."""
    H, n, _ = uneven()
    M, gamma, F = affine(COOLED[name], H, torch.zeros(D, dtype=DOUBLE))
    hot = (lyapunov(M, F @ F.T) + enumerated(M, gamma, n, order)[0])[:D, :D]
    assert (hot @ H / T - torch.eye(D, dtype=DOUBLE)).abs().max() > 1e-4
    draws = torch.cat([torch.linalg.cholesky(hot).T, -torch.linalg.cholesky(hot).T]) + 5.0
    report = report_of(COOLED[name], order)
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
        (
            {"tx": GROUPS, "like": [torch.zeros(2, dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)]},
            "of 2 groups of parameters",
        ),
        ({"draws": torch.zeros(4, 2, D)}, r"cool: draws must be leaves \[n, \*leaf\.shape\]"),
    ],
)
def test_draws_that_no_map_corrects_are_refused(more, message):
    about = {"tx": COOLED["sghmc"], "order": "reshuffled", "draws": torch.zeros(4, D), **more}
    draws = about.pop("draws")
    with pytest.raises(ValueError, match=message):
        report_of(**about).cool([draws])


def test_noise_whose_directions_drift_is_refused():
    e = torch.eye(D, dtype=DOUBLE)
    loss = lambda theta, batch: theta[0] @ theta[0] / 2 + (batch @ theta[0]).mean()  # noqa: E731
    at = [torch.zeros(D, dtype=DOUBLE)]
    first, second = (gradient_noise(loss, at, [x[None], -x[None]], rank=1) for x in e[:2] * 0.01)
    curvature = e * torch.tensor([1.0, 0, 0])
    report = heating(COOLED["sghmc"], first, order="reshuffled", steps_per_epoch=4, curvature=curvature, again=second)
    assert report.overlap < 1e-9
    with pytest.raises(ValueError, match=r"cool: at the second draw 0% of the batches' noise lie in the directions"):
        report.cool([torch.zeros(4, D)])


def test_an_epoch_without_some_data_is_shorter():
    data = bc.epochs(uneven()[1], 1, leave_out=torch.tensor([1]))
    assert data.steps_per_epoch == 3.0
    loss = lambda w, batch: (batch @ w).mean()  # noqa: E731
    assert gradient_noise(loss, torch.zeros(D, dtype=DOUBLE), data).steps_per_epoch == 3.0


# Every example whose loop has minibatches samples within 1.5 times the variance asked for, or says in its lines what it is


ROOT = Path(__file__).parents[2]
WITHIN = 0.5
SAMPLER = re.compile(
    r"\b(?:bc|optim|self)\.(?:optim\.)?(?:sghmc|sgld|sgd|adam|adamw|rmsprop|SGHMC|SGLD|SGD|Adam|AdamW|RMSprop)\([^\n]*temperature"
)
BATCHES = re.compile(
    r"epochs\(\(|epochs\([a-z_]+,|DataLoader\(|DataLoader\b.*batch_size|rows = torch\.randint|per_device_train_batch_size"
)
SAYS = re.compile(
    r"#[^\n]*\b(hot|heated|heat|heats)\b"  # a comment
    r"|diagnostics\.heating\(|minibatches heat"  # the heat is what is shown
    r"|suggest_(?:lr|chain)\(|make_step\(estimator"  # chosen by the law; batches' noise removed
)
COMPUTED = {
    "docs/trainers.md: A plain loop",
    "docs/howto/lightning.md: Lightning",
    "docs/howto/hugging_face.md: transformers.Trainer",
    "docs/howto/hugging_face.md: accelerate",
    "docs/howto/data_parallel.md: One chain on data-parallel gradients",
}


def blocks():
    """``(name, code)`` of every block of code in README, documents, notebooks and examples."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md"))]
    for page in pages:
        title = page.stem.capitalize()
        for line, code in re.findall(r"^#+ ([^\n]+)$|^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            title = line or title
            if code:
                yield f"{page.relative_to(ROOT)}: {title}", code
    for path in (ROOT / "examples").glob("*.py"):
        yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for i, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] == "code":
                yield f"{path.relative_to(ROOT)}: cell {i}", "".join(cell["source"])


def docstrings():
    """The examples of the package's docstrings."""
    for path in sorted((ROOT / "bayesopt_chain").rglob("*.py")):
        for i, text in enumerate(re.findall(r'"""(.*?)"""', path.read_text(), re.S)):
            if ">>> " in text:
                yield f"{path.relative_to(ROOT)}: docstring {i}", text


def excess(loss, params, data, batch, tx):
    """Of the worst direction, under reshuffled epochs; noise from as many epochs as make about a hundred batches."""
    batches = bc.epochs(data, batch, seed=0)
    noise = bc.diagnostics.gradient_noise(loss, params, batches)
    curvature = bc.diagnostics.hessian_product(loss, params, [data])
    return float(bc.diagnostics.heating(tx, noise, curvature=curvature).worst)


def test_every_example_with_minibatches_is_computed_or_says_what_it_is():
    found = [(name, code) for name, code in [*blocks(), *docstrings()] if SAMPLER.search(code) and BATCHES.search(code)]
    assert len(found) >= 8  # the search finds something
    assert {name for name, _ in found} >= COMPUTED
    assert [name for name, code in found if name not in COMPUTED and not SAYS.search(code)] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", ["A plain loop", "Lightning", "transformers.Trainer", "accelerate"])
def test_the_loops_of_trainers_are_cool(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for package in {"Lightning": ["lightning"], "transformers.Trainer": ["transformers"]}.get(
        title, [title.lower()][: title == "accelerate"]
    ):
        pytest.importorskip(package)
    code = next(code for name, code in blocks() if name in COMPUTED and name.endswith(f": {title}"))
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "docs", "exec"), space)
    model, T = space["model"], space["T"]
    optimizer = space["trainer"].optimizers[0] if title == "Lightning" else space.get("optimizer")
    group = getattr(optimizer, "optimizer", optimizer).param_groups[0]
    tx = bc.sghmc(group.get("initial_lr", group["lr"]), group["momentum"], temperature=T)
    names = {name: p.detach().cpu() for name, p in model.named_parameters()}
    if title == "transformers.Trainer":
        words = torch.stack([row["input_ids"] for row in space["data"]])
        data, batch = (words,), space["arguments"].per_device_train_batch_size
        model.config._attn_implementation = "eager"

        def loss(params, batch):
            return functional_call(model.eval(), params, (), {"input_ids": batch[0], "labels": batch[0]}).loss

    else:
        data, accumulated = (space["x"], space["y"]), 2 if title == "accelerate" else 1
        loader = space["loader"]
        batch = accumulated * (getattr(loader, "batch_size", None) or loader.batch_sampler.batch_size)
        net = getattr(model, "net", None)
        if net is not None:
            names = {name.removeprefix("net."): p for name, p in names.items()}

        def loss(params, batch):
            return 0.5 * (functional_call(net or model, params, (batch[0],)) - batch[1]).square().mean()

    assert excess(loss, names, data, batch, tx) < WITHIN


def test_the_chain_whose_data_lie_on_all_ranks_is_cool():
    code = next(code for name, code in blocks() if name in COMPUTED and "data_parallel" in name)
    lr = float(re.search(r"bc\.sghmc\(([\d.]+), temperature=1 / len\(x\)\)", code)[1])
    batch = int(re.search(r"bc\.epochs\(\(x, y\), (\d+), seed=0, mesh=mesh\)", code)[1])
    N, width = map(int, re.search(r"torch\.randn\((\d+), (\d+), generator", code).groups())
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, width, generator=generator), torch.randn(N, generator=generator)

    def loss(w, batch):
        return ((batch[0] @ w - batch[1]) ** 2).mean() / 2

    mode = torch.linalg.lstsq(x, y).solution
    assert excess(loss, mode, (x, y), batch, bc.sghmc(lr, temperature=1 / N)) < WITHIN
    assert excess(loss, mode, (x, y), batch, bc.sghmc(3 * lr, temperature=1 / N)) > WITHIN  # the law can fail
