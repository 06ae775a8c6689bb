"""Local learning coefficient against closed forms, and what white noise makes of it at the same learning rate."""

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.testing import stationary_covariance

K = torch.tensor([0.0, 0.1, 1.0, 4.0, 9.0], dtype=torch.float64)
STRENGTH, T = 0.5, 0.3
WANTED = float((K / (K + STRENGTH)).sum() / 2)


def localized(sampler, strength=STRENGTH):
    return bc.chain(bc.links.add_localization(torch.zeros(len(K), dtype=torch.float64), strength), sampler)


def exact(sampler):
    """``E[L] / T`` of a quadratic from the chain's own stationary covariance."""
    covariance = stationary_covariance(localized(sampler), torch.diag(K))
    return float((K * covariance.diagonal()).sum() / 2 / T)


@pytest.mark.parametrize("lr", [0.02, 0.1, 0.2])
def test_a_quadratic_has_its_closed_form_at_every_lr(lr):
    """Matched noise to 1e-10; white SGLD at the same lr errs by the closed form of its bias."""
    nesterov = bc.sgd(min(lr, 0.1), 0.9, nesterov=True, temperature=T)
    for matched in (
        bc.sgld(lr, temperature=T),
        bc.sghmc(lr, temperature=T),
        nesterov,
    ):
        assert exact(matched) == pytest.approx(WANTED, abs=1e-10)
    stiff = K + STRENGTH
    white = float((K / (stiff * (1 - lr * stiff / 2))).sum() / 2)
    assert exact(bc.sgld(lr, temperature=T, order=1)) == pytest.approx(white, abs=1e-10)
    assert white / WANTED - 1 > {0.02: 0.03, 0.1: 0.15, 0.2: 1.0}[lr]


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4])
def test_a_power_has_one_over_p_a_dimension_at_every_temperature(p):
    """By quadrature of the target, to 1e-3: ``E|x|^p / T = 1/p``; then the estimator on many coordinates, within 5 errors."""
    for temperature in (1e-3, 0.1, 2.0):
        x = torch.linspace(-8, 8, 200_001, dtype=torch.float64) * temperature ** (1 / p)
        density = (-(x.abs() ** p) / temperature).exp()
        assert float((x.abs() ** p * density).sum() / density.sum() / temperature) == pytest.approx(1 / p, abs=1e-3)
    torch.manual_seed(0)
    found = bc.diagnostics.local_learning_coefficient(
        lambda w, batch: (w.abs() ** p).sum(), torch.zeros(4000, dtype=torch.float64), None,
        temperature=0.1, lr=0.01, strength=0.0, steps=1200, burn_in=400, chains=2,
    )  # fmt: skip
    assert found.value / 4000 == pytest.approx(1 / p, rel=5 * found.standard_error / found.value + 1e-3)
    assert found.standard_error < 0.005 * found.value


TARGET = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))


def reduced_rank(w, batch):
    return (w["b"] @ w["a"] - TARGET).square().sum() / 2


@pytest.mark.slow
def test_a_deep_linear_network_has_its_known_value():
    """Reduced-rank regression, 3 -> 2 -> 3, of a truth of rank 2: 4, not half of its 12 parameters (Aoyagi and Watanabe, 2005).

    The loss does not change along the orbits of GL(2), which have four dimensions: (12 - 4) / 2. White-noise SGLD at the
    larger learning rate is off by more than 20 %.
    """
    torch.manual_seed(0)
    eye = torch.eye(3, dtype=torch.float64)
    start = {"a": eye[:2].clone(), "b": eye[:, :2].clone()}

    def coefficient(lr, momentum, order=2):
        sampler = (
            bc.sgd(lr, momentum=momentum, temperature=1e-4) if order == 2 else bc.sgld(lr, temperature=1e-4, order=1)
        )
        return bc.diagnostics.local_learning_coefficient(
            reduced_rank, start, None, temperature=1e-4, lr=lr, strength=1e-3, steps=1600, burn_in=400, chains=16,
            sampler=sampler,
        )  # fmt: skip

    for found in (coefficient(0.1, 0.9), coefficient(0.3, 0.0)):
        assert found.value == pytest.approx(4.0, abs=5 * found.standard_error + 0.02), found
        assert found.standard_error < 0.05
    assert coefficient(0.3, 0.0, order=1).value > 1.2 * 4.0


def test_minibatches_and_their_full_loss_are_used():
    torch.manual_seed(0)
    data = [torch.randn(10) for _ in range(4)]
    data[3] = data[3][:4]  # a last batch of what remains
    found = bc.diagnostics.local_learning_coefficient(
        lambda w, batch: ((w - batch[:, None]) ** 2).mean(), torch.zeros(3), data,
        temperature=1.0, lr=0.05, strength=0.1, steps=60, burn_in=10, chains=2,
    )  # fmt: skip
    assert found.reference == pytest.approx(float(torch.cat(data).square().mean()), rel=1e-5)
    assert found.losses.shape == (50, 2) and found.by_chain.shape == (2,) and "learning coefficient" in str(found)


@pytest.mark.parametrize("order", ["independent", "reshuffled"])
def test_the_reference_is_over_all_rows_once_in_every_order(order):
    """Of batches drawn one by one a pass leaves out about a third of the rows, and the error is divided by T."""
    torch.manual_seed(0)
    x = torch.randn(50)
    batches = bc.epochs(x, 8, order=order, seed=3, with_rows=True)
    found = bc.diagnostics.local_learning_coefficient(
        lambda w, batch: ((w - batch[0][:, None]) ** 2).mean(), torch.zeros(3), batches,
        temperature=1.0, lr=0.05, strength=0.1, steps=60, burn_in=10, chains=2,
    )  # fmt: skip
    assert found.reference == pytest.approx(float(x.square().mean()), rel=1e-5)


def quartic(lr, momentum, sampler=None, chains=4):
    torch.manual_seed(0)
    return bc.diagnostics.local_learning_coefficient(
        lambda w, batch: (w**4).sum() / 4, torch.zeros(40, dtype=torch.float64), None,
        temperature=1.0, lr=lr, momentum=momentum, strength=0.0, steps=500, burn_in=100, chains=chains, sampler=sampler,
    )  # fmt: skip


def test_a_rate_that_is_unstable_where_the_chains_go_is_refused():
    """At the minimum of a quartic there is no curvature at all; where the chains go 3 x^2 exceeds 2 / lr."""
    with pytest.raises(
        ValueError, match=r"a step multiplies a displacement along the stiffest direction by [1-9]\.[0-9]+, at 1\.25"
    ):
        quartic(0.16, 0.0)
    for momentum, sampler in ((0.0, None), (0.9, bc.sgd(0.016, 0.9, nesterov=True, temperature=1.0))):
        found = quartic(0.016, momentum, sampler)
        assert found.value == pytest.approx(10.0, abs=5 * found.standard_error)  # 40 / 4


def test_an_estimate_with_a_large_error_is_refused():
    """From the minimum the loss grows in proportion to the step: of 6 steps 0, ..., 5 the error of the mean is .31 of it."""
    with pytest.raises(ValueError, match=r"standard error is too large to say anything: local learning.*by_chain: "):
        bc.diagnostics.local_learning_coefficient(
            lambda w, batch: (w**2).sum() / 2, torch.zeros(400), None,
            temperature=1.0, lr=0.01, momentum=0.0, strength=0.01, steps=6, burn_in=0, chains=1,
        )  # fmt: skip


def test_bad_input_is_refused():
    def loss(w, batch):
        return (w**2).sum()

    with pytest.raises(ValueError, match="temperature must be a positive"):
        bc.diagnostics.local_learning_coefficient(loss, torch.zeros(2), None, temperature=0.0, lr=0.1, strength=1.0)
    with pytest.raises(ValueError, match="the chain diverged"):
        bc.diagnostics.local_learning_coefficient(
            loss, torch.zeros(2), None, temperature=1.0, lr=1e9, strength=1.0, steps=60, burn_in=10
        )
