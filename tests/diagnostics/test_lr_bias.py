"""Chains at lr and at lr / 2: the bias that a learning rate causes, against closed forms."""

import pytest
import torch

import bayesopt_chain as bc

K = torch.linspace(0.5, 2.0, 4)[:, None].expand(4, 300)


def quadratic(w, batch):
    return (K * w**2).sum() / 2


def squares(w):
    return (w**2).mean(1)


def found(build, loss=quadratic, **how):
    torch.manual_seed(0)
    how = {"lr": 0.4, "statistic": squares, "steps": 400, "burn_in": 100, **how}
    return bc.diagnostics.lr_bias(build, loss, torch.zeros(4, 300), None, **how)


def white_variance(lr):
    return 1 / (K[:, 0] * (1 - lr * K[:, 0] / 2))


@pytest.mark.slow
def test_white_noise_has_the_difference_of_its_closed_form():
    """Within 4 standard errors in each of 4 elements: false alarms below 1e-3 under the t distribution of 14 degrees."""
    out = found(lambda lr: bc.sgld(lr, temperature=1.0, order=1))
    wanted = (white_variance(0.4) - white_variance(0.2)).double()
    assert ((out.difference - wanted).abs() < 5 * out.standard_error).all() and out.is_seen
    assert (out.standard_error < 0.2 * wanted)[1:].all()
    assert "moves the mean" in str(out)


@pytest.mark.slow
def test_matched_noise_has_none():
    for build in (lambda lr: bc.sgld(lr, temperature=1.0), lambda lr: bc.sghmc(lr, 0.5, temperature=1.0)):
        out = found(build)
        assert not out.is_seen and "no effect" in str(out)
        assert (out.standard_error < 0.02).all()


@pytest.mark.slow
def test_batch_noise_is_of_first_order():
    """Gradient noise of variance ``B`` adds ``lr B / (2 k (1 - lr k / 2))`` to the variance of SGLD."""
    B, k = 1.0, K[:, 0]

    def noisy(w, batch):
        return quadratic(w, None) + B**0.5 * (w * torch.randn(4, 300)).sum()

    out = found(lambda lr: bc.sgld(lr, temperature=1.0), noisy)
    added = [(lr * B / (2 * k * (1 - lr * k / 2))).double() for lr in (0.4, 0.2)]
    assert ((out.difference - (added[0] - added[1])).abs() < 5 * out.standard_error).all() and out.is_seen
    assert torch.equal(out.bias(1), 2 * out.difference) and torch.allclose(out.bias(2), out.difference * 4 / 3)


@pytest.mark.slow
def test_the_loss_is_the_default():
    out = found(lambda lr: bc.sgld(lr, temperature=1.0, order=1), statistic=None)
    assert out.difference.shape == () and out.is_seen and out.at_lr > out.at_half


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="lr must be a positive"):
        found(lambda lr: bc.sgld(lr, temperature=1.0), lr=0.0)
    with pytest.raises(ValueError, match="at least 4"):
        found(lambda lr: bc.sgld(lr, temperature=1.0), chains=3)
    with pytest.raises(ValueError, match="diverged"):
        found(lambda lr: bc.sgld(lr, temperature=1.0), lr=1e3)
