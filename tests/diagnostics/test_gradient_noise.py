"""The audit of gradient noise against covariances that are known."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import gradient_noise, hessian_product
from bayesopt_chain.diagnostics.gradient_noise import lanczos, twice_over_once
from bayesopt_chain.trees import flatten

DOUBLE = torch.float64


G = torch.Generator().manual_seed(0)
x = torch.randn(120, 4, generator=G, dtype=DOUBLE)
y = x @ torch.ones(4, dtype=DOUBLE) + torch.randn(120, generator=G, dtype=DOUBLE)


def loss(params, batch):
    x, y = batch
    return (x @ params["w"] + params["b"] - y).square().mean() / 2


def params(d=4):
    return {"b": torch.tensor(0.3, dtype=DOUBLE), "w": torch.ones(d, dtype=DOUBLE)}


def per_datum_gradients(x, y, p):
    r = x @ p["w"] + p["b"] - y
    return torch.cat([r[:, None], r[:, None] * x], dim=1)


def test_gradients_of_single_data_give_the_covariance_of_one_datum():
    noise = gradient_noise(loss, params(), bc.epochs((x, y), 1), rank=5, max_batches=120)
    rows = flatten(noise.rows, params())
    exact = torch.cov(per_datum_gradients(x, y, params()).T)
    assert torch.allclose(rows.T @ rows, exact, rtol=1e-10)
    assert torch.allclose(noise.eigenvalues, torch.linalg.eigvalsh(exact).flip(0), rtol=1e-10)
    assert noise.trace == pytest.approx(exact.trace().item()) and noise.batches == 120 and noise.draws is None
    assert torch.allclose(noise.mean["b"], per_datum_gradients(x, y, params())[:, 0].mean())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["reshuffled", "independent"])
def test_batches_with_and_without_common_data_estimate_the_same_covariance(order):
    """The mean over many epochs is s^2 / b in both. Four standard errors of the mean: false alarms 6e-5 each."""
    each = per_datum_gradients(x, y, params())
    exact = torch.cov(each.T).trace() / 30
    made = bc.epochs((x, y), 30, order=order)
    traces = []
    for epoch in range(400):
        made.set_epoch(epoch)
        g = torch.stack([each[made.rows(epoch, k)].mean(0) for k in range(4)])
        share = 1 - 30 / 120 if order == "independent" else 1.0
        traces.append(((g - g.mean(0)).square().sum() / 3 / share).item())
        if epoch < 3:  # this is what the audit computes
            audit = gradient_noise(loss, params(), made, max_batches=4)
            assert audit.trace == pytest.approx(traces[-1], rel=1e-9)
    traces = torch.tensor(traces, dtype=DOUBLE)
    assert abs(traces.mean() / exact - 1) < 4 * traces.std() / exact / 400**0.5 < 0.11


def test_a_preconditioner_weighs_the_gram_matrix():
    P = {"b": torch.tensor(4.0, dtype=DOUBLE), "w": torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=DOUBLE)}
    tx = bc.chain(bc.scale_by_preconditioner(P), bc.sghmc(0.1, 0.8, temperature=0.01))
    noise = gradient_noise(loss, params(), bc.epochs((x, y), 1), tx=tx, rank=5, max_batches=120)
    root = (bc.trees.flatten(P, params()) * 0.1 / (1 - 0.8)).sqrt()
    exact = root[:, None] * torch.cov(per_datum_gradients(x, y, params()).T) * root
    assert torch.allclose(noise.eigenvalues, torch.linalg.eigvalsh(exact).flip(0), rtol=1e-9)


@pytest.mark.slow
def test_a_learned_preconditioner_is_taken_from_the_state():
    tx, p = bc.adam(0.1, temperature=0.01, freeze_after=400), params()
    p, state = bc.sample(bc.make_step(loss, tx), p, tx.init(p), bc.epochs((x, y), 10), steps=480).last
    noise = gradient_noise(loss, p, bc.epochs((x, y), 1), tx=tx, state=state, rank=5, max_batches=120)
    report = bc.diagnostics.heating(tx, noise, state=state, order="reshuffled", steps_per_epoch=12)
    assert report.worst > 0
    root = (0.1 / ((torch.cat([t.reshape(-1) for t in state[0].nu]) / (1 - 0.999**400)).sqrt() + 1e-8)).sqrt()
    exact = root[:, None] * torch.cov(per_datum_gradients(x, y, p).T) * root
    assert torch.allclose(noise.eigenvalues, torch.linalg.eigvalsh(exact).flip(0), rtol=1e-3)


def test_sums_that_differ_in_their_last_places_are_no_draws():
    """As those of atomic additions on a device, where the gradient of a batch changes with each call, here by 1e-10 of it."""

    def loss(w, batch):
        return (batch @ w).square().mean() * (1 + 1e-10 * torch.rand((), dtype=torch.float64))

    batches = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert bc.diagnostics.gradient_noise(loss, torch.ones(3, dtype=torch.float64), [*batches]).draws is None


def test_dropout_is_gradient_noise_and_kept_apart_from_that_of_the_data():
    """``loss = (w - batch)^2 / 2 + 0.3 w z`` with a draw z: D = 0.09, C = 2 for batches of one. 4 standard errors,
    false alarms 6e-5 each."""

    def drawing(w, batch):
        return (w - batch).square().mean() / 2 + 0.3 * w * torch.randn((), dtype=DOUBLE)

    m = 300
    x = torch.randn(m, dtype=DOUBLE) * 2**0.5
    before = torch.random.get_rng_state()
    noise = gradient_noise(drawing, torch.tensor(0.0, dtype=DOUBLE), bc.epochs(x, 1), max_batches=m)
    assert torch.equal(before, torch.random.get_rng_state())
    D = noise.draws.square().sum().item()
    C = noise.rows.square().sum().item() - D / 2
    assert abs(D - 0.09) < 4 * 0.09 * (2 / m) ** 0.5
    # rows are x + draw of variance D / 2: C errs by the cross term and by the scatter of both estimates of D / 2
    assert abs(C - x.var().item()) < 4 * (4 * x.var().item() * 0.045 / m + 2 * 2 * 0.045**2 / m) ** 0.5
    assert noise.eigenvalues[0].item() == pytest.approx(C + D, rel=1e-9)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("order", ["reshuffled", "palindrome", "independent"])
def test_short_epochs_are_pooled_and_stay_where_they_are(order):
    """120 epochs of 4 batches, 360 degrees of freedom: a trace errs by at most sqrt(2 / 360), 4 times over."""
    exact = torch.cov(per_datum_gradients(x, y, params()).T).trace().item() / 30
    made = bc.epochs((x, y), 30, order=order)
    noise = gradient_noise(loss, params(), made, max_batches=480)
    assert noise.batches == 480 and abs(noise.trace / exact - 1) < 4 * (2 / 360) ** 0.5
    next(iter(made))
    assert gradient_noise(loss, params(), made).batches > 2 and (made.epoch, made.offset) == (0, 1)  # which stays


def test_auxiliary_outputs_unused_parameters_and_any_iterable_are_taken():
    p = {**params(), "unused": torch.zeros(2, dtype=DOUBLE)}
    noise = gradient_noise(lambda q, batch: (loss(q, batch), q), p, iter([(x[:60], y[:60]), (x[60:], y[60:])]))
    assert not noise.rows["unused"].any() and noise.batches == 2 and noise.steps_per_epoch is None
    report = bc.diagnostics.heating(bc.sghmc(0.01, temperature=0.01), noise, order="reshuffled", steps_per_epoch=2)
    assert report.worst > 0


def test_hessian_products_are_those_of_the_mean_loss():
    product = hessian_product(loss, params(), bc.epochs((x, y), 40))
    X = torch.cat([torch.ones(len(x), 1, dtype=DOUBLE), x], dim=1)
    v = torch.arange(5.0, dtype=DOUBLE)
    image = product({"b": v[0], "w": v[1:]})
    assert torch.allclose(bc.trees.flatten(image, params()), X.T @ X @ v / len(x))


MULTIPLE = torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 0.0, 0.0, -5.0], dtype=DOUBLE)


@pytest.mark.parametrize("exact", [MULTIPLE, *(torch.logspace(0, -k, 60, dtype=DOUBLE) for k in (0, 1, 4))])
def test_lanczos_finds_the_largest_eigenvalues_and_their_vectors(exact):
    generator, n = torch.Generator().manual_seed(1), len(exact)
    U = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=DOUBLE)).Q
    A = (U * exact) @ U.T
    values, vectors = lanczos(lambda v: A @ v, torch.zeros(n, dtype=DOUBLE), 6)
    assert torch.allclose(values, exact[:6], rtol=2e-3)
    assert torch.allclose(vectors @ vectors.T, torch.eye(6, dtype=DOUBLE), atol=1e-9)
    assert (A @ vectors.T - vectors.T * values).norm() < 5e-3


@pytest.mark.parametrize(
    ("batches", "settings", "words"),
    [([], {}, "at least two"), ([torch.ones(1)], {}, "at least two"), ([torch.ones(1)] * 2, {"rank": 0}, "rank")],
)
def test_what_cannot_be_audited_is_refused(batches, settings, words):
    with pytest.raises(ValueError, match=words):
        gradient_noise(lambda w, batch: (w * batch).sum(), torch.tensor(1.0), batches, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_in_half_precision_is_no_sum_and_rounding_is_no_draw(dtype):
    """Of 40 batches each, whose losses of halves and doubles differ in their last places."""
    g = torch.Generator().manual_seed(0)
    for x in torch.randn(40, 16, generator=g).to(dtype):
        ratio, error = twice_over_once(lambda w, b: (b * w - 1).square().mean().float(), torch.tensor(0.3).to(dtype), x)
        assert abs(ratio - 1) <= max(1e-3, error) and (error == 0) == (dtype == torch.float32)
