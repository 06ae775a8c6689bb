"""What the classes sample: ``T / curvature`` by exact probing, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.matching.law import scheduled_momentum_noise
from bayesopt_chain.optim._rule import Linear, noise_of
from tests.optim.probe import Probed

CURVATURE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
T = 0.7


def matches(make, expected_precision=CURVATURE):
    covariance = Probed(make, CURVATURE).covariance()
    torch.testing.assert_close(covariance, T * torch.linalg.inv(expected_precision), rtol=1e-10, atol=0.0)


@given(
    st.floats(0.01, 0.6),
    st.sampled_from([0.0, 0.03, 0.3, 0.9, 0.98]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_sgd_samples_T_over_curvature_whatever_lr_momentum_dampening_and_decay(lr, momentum, dampening, decay, foreach):
    prior = decay * torch.eye(2, dtype=torch.float64)
    matches(
        lambda p: bc.optim.SGD(p, lr, momentum, dampening if momentum else 0.0, decay, temperature=T, foreach=foreach),
        CURVATURE + prior,
    )


@given(st.floats(0.01, 0.3), st.sampled_from([0.05, 0.5, 0.9, 0.97]), st.sampled_from([0.0, 0.5]))
def test_nesterov_is_exact(lr, momentum, decay):
    prior = decay * torch.eye(2, dtype=torch.float64)
    matches(lambda p: bc.optim.SGD(p, lr, momentum, 0, decay, nesterov=True, temperature=T), CURVATURE + prior)


def test_exact_up_to_lr_times_curvature_of_two():
    top = torch.linalg.eigvalsh(CURVATURE).max().item()
    matches(lambda p: bc.optim.SGLD(p, 1.99 / top, temperature=T))
    matches(lambda p: bc.optim.SGHMC(p, 1.99 / top, temperature=T))


def test_maximize_samples_around_a_maximum():
    covariance = Probed(lambda p: bc.optim.SGHMC(p, 0.1, temperature=T, maximize=True), -CURVATURE).covariance()
    torch.testing.assert_close(covariance, T * torch.linalg.inv(CURVATURE), rtol=1e-10, atol=0.0)


ADAPTIVE = {
    "Adam": dict(lr=0.05),
    "Adam amsgrad": dict(lr=0.05, amsgrad=True),
    "Adam coupled decay": dict(lr=0.05, weight_decay=0.3),
    "Adam b1=0": dict(lr=0.05, betas=(0.0, 0.9)),
    "Adamax": dict(lr=0.05),
    "RAdam": dict(lr=0.05, betas=(0.9, 0.9)),
    "RAdam before it rectifies": dict(lr=0.05),
    "NAdam": dict(lr=0.05, momentum_decay=3.0),  # its momentum has arrived after a few hundred steps
    "RMSprop": dict(lr=0.05),
    "RMSprop momentum": dict(lr=0.05, momentum=0.8),
    "RMSprop centered": dict(lr=0.05, momentum=0.8, centered=True),
    "Adagrad": dict(lr=0.05),
}


def frozen(cls, freeze_after=8, **kwargs):
    """Frozen, and long enough after it that the bias corrections of the first moment have run out."""

    def make(p):
        torch.manual_seed(1)
        return cls(p, temperature=T, freeze_after=freeze_after, **kwargs)

    return lambda curvature: Probed(make, curvature, warmup=700)


@pytest.mark.parametrize("case", ADAPTIVE)
def test_a_frozen_preconditioner_samples_exactly(case):
    kwargs = ADAPTIVE[case]
    make = frozen(getattr(bc.optim, case.split()[0]), 2 if "before" in case else 8, **kwargs)
    prior = kwargs.get("weight_decay", 0.0) * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(
        make(CURVATURE).covariance(), T * torch.linalg.inv(CURVATURE + prior), rtol=1e-10, atol=0.0
    )


@pytest.mark.parametrize(
    "cls, kwargs",
    [
        (bc.optim.AdamW, {}),
        (bc.optim.RAdam, {"decoupled_weight_decay": True, "betas": (0.9, 0.9)}),
        (bc.optim.NAdam, {"decoupled_weight_decay": True, "momentum_decay": 3.0}),
    ],
)
def test_decoupled_decay_samples_the_prior_decay_times_D(cls, kwargs):
    lr, decay = 0.05, 0.4
    probed = frozen(cls, lr=lr, weight_decay=decay, **kwargs)(CURVATURE)
    optimizer, theta = probed.optimizer, probed.theta
    state, group = optimizer.state[theta], optimizer.param_groups[0]
    denominator = optimizer._denominator(group, 8, state.__getitem__)
    # theta <- (1 - lr wd) theta - H g / D: at rest H(1) grad = -lr wd D theta, with H(1) = lr for Adam; NAdam's in the limit
    updates = int(state["step"])
    linear = optimizer._linear(group, optimizer._clock(state))
    gain = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
    assert updates > 500
    prior = torch.diag(lr * decay * denominator / gain)
    torch.testing.assert_close(probed.covariance(), T * torch.linalg.inv(CURVATURE + prior), rtol=1e-10, atol=0.0)


@given(st.floats(0.01, 0.99), *[st.floats(1e-4, 1.0)] * 2, *[st.floats(0.0, 2.0)] * 2)
def test_with_momentum_at_rest_the_rule_is_the_librarys(momentum, lr, lr_before, temperature, temperature_before):
    if not temperature or not temperature_before:
        return
    theirs: Any = scheduled_momentum_noise(
        momentum,
        *(1.0 / torch.tensor([lr, lr_before], dtype=torch.float64)),
        *torch.tensor([temperature, temperature_before], dtype=torch.float64),
        order=2,
        where=torch.where,
    )
    before = noise_of(Linear(lr_before, momentum, velocity="v"), temperature_before, None).before
    ours = noise_of(Linear(lr, momentum, velocity="v"), temperature, before)
    scale = max(1.0, abs(ours.current))
    assert ours.current == pytest.approx(float(theirs.current), rel=1e-12)
    assert ours.velocity_scale == pytest.approx(float(theirs.velocity_scale), rel=1e-12)
    # the difference of two terms, the first a root of a difference: rounding of 1e-16 becomes 1e-8 where it vanishes
    assert ours.previous == pytest.approx(float(theirs.previous), rel=1e-7, abs=1e-7 * scale)


def variances(make, scheduler_of, curvature: float, steps: int) -> torch.Tensor:
    """The variance over T / curvature after each step of a schedule, exactly: ``X <- A X A^T + B B^T``."""
    probed = Probed(make, torch.tensor([[curvature]], dtype=torch.float64), warmup=3)
    scheduler = scheduler_of(probed.optimizer)
    n = sum(s.numel() for s in probed.slots)
    x, out = torch.zeros(n, n, dtype=torch.float64), []
    for _ in range(steps):
        a, b = probed.maps()
        x = a @ x @ a.mT + b @ b.mT
        out.append(x[0, 0].item() * curvature / T)
        scheduler.step()
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
def test_cosine_with_restarts_stays_within_the_rules_bounds(momentum):
    """The variance within -21 % .. +37 % everywhere, under 7 % RMS, over cycles of 500 steps, once the start is forgotten."""
    cycle = 500
    ratio = variances(
        lambda p: bc.optim.SGHMC(p, 0.3, momentum, temperature=T),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, cycle),
        1.0,
        3 * cycle,
    )[cycle:]
    assert ratio.min() > 0.79 and ratio.max() < 1.37
    assert (ratio - 1.0).square().mean().sqrt() < 0.07


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_one_cycle_moves_lr_and_momentum_and_the_variance_follows(nesterov):
    """OneCycleLR over 1000 steps, momentum 0.85 to 0.95 against lr: the variance within 3 % from step 150 on."""
    ratio = variances(
        lambda p: bc.optim.SGD(p, 0.3, 0.95, nesterov=nesterov, temperature=T),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=1003, final_div_factor=10.0),
        1.0,
        900,
    )[150:]
    assert (ratio - 1.0).abs().max() < 0.03


@pytest.mark.slow
def test_cyclic_momentum_of_adam_is_followed():
    """CyclicLR over Adam's b1 with a frozen P: within 5 % once the start is forgotten."""

    def make(p):
        return bc.optim.Adam(p, 0.05, temperature=T, freeze_after=2)

    def scheduler(o):
        return torch.optim.lr_scheduler.CyclicLR(o, 0.02, 0.05, step_size_up=100, cycle_momentum=True)

    ratio = variances(make, scheduler, 1.0, 700)[300:]
    assert (ratio - 1.0).abs().max() < 0.05


def test_a_step_of_lr_0_moves_nothing_and_the_chain_recovers():
    theta = torch.full((4,), 0.5, requires_grad=True)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=T)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(20):
        before = theta.detach().clone()
        theta.grad = theta.detach().clone()
        optimizer.step()
        moved = not torch.equal(before, theta.detach())
        assert moved == (optimizer.param_groups[0]["lr"] > 0.0)
        assert theta.isfinite().all() and optimizer.state[theta]["momentum_buffer"].isfinite().all()
        scheduler.step()


def test_a_temperature_that_rises_from_zero_and_falls_again_is_followed():
    """Stationary at T after T = 0; then nothing but torch's step at T = 0."""
    probed = Probed(lambda p: bc.optim.SGHMC(p, 0.1, temperature=0.2), CURVATURE)
    probed.optimizer.param_groups[0]["temperature"] = T
    probed.step()
    torch.testing.assert_close(probed.covariance(), T * torch.linalg.inv(CURVATURE), rtol=1e-10, atol=0.0)
    probed.optimizer.param_groups[0]["temperature"] = 0.0
    assert probed.step() == 0
    assert sorted(probed.optimizer.state[probed.theta]) == ["momentum_buffer"]
