"""What the classes sample: ``T / curvature`` by exact probing, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bayesopt_chain as bc
from bayesopt_chain.optim._rule import Linear, noise_of
from tests.optim.probe import Probed, walk

CURVATURE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
T = 0.7


def matches(make, expected_precision=CURVATURE, curvature=CURVATURE):
    covariance = Probed(make, curvature).covariance()
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


@pytest.mark.slow
@given(st.floats(0.01, 0.3), st.sampled_from([0.05, 0.5, 0.9, 0.97]), st.sampled_from([0.0, 0.5]))
def test_nesterov_is_exact(lr, momentum, decay):
    prior = decay * torch.eye(2, dtype=torch.float64)
    matches(lambda p: bc.optim.SGD(p, lr, momentum, 0, decay, nesterov=True, temperature=T), CURVATURE + prior)


def test_exact_up_to_lr_times_curvature_of_two_and_around_a_maximum():
    top = torch.linalg.eigvalsh(CURVATURE).max().item()
    matches(lambda p: bc.optim.SGLD(p, 1.99 / top, temperature=T))
    matches(lambda p: bc.optim.SGHMC(p, 1.99 / top, temperature=T))
    matches(lambda p: bc.optim.SGHMC(p, 0.1, temperature=T, maximize=True), curvature=-CURVATURE)


ADAPTIVE = {
    "Adam": dict(lr=0.05),
    "Adam amsgrad": dict(lr=0.05, amsgrad=True),
    "Adam coupled decay": dict(lr=0.05, weight_decay=0.3),
    "Adam b1=0": dict(lr=0.05, betas=(0.0, 0.9)),
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

    return lambda curvature: Probed(make, curvature, warmup=700 if cls is bc.optim.NAdam else 300)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", ADAPTIVE)
def test_a_frozen_preconditioner_samples_exactly(case):
    kwargs = ADAPTIVE[case]
    make = frozen(getattr(bc.optim, case.split()[0]), **kwargs)
    prior = kwargs.get("weight_decay", 0.0) * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(
        make(CURVATURE).covariance(), T * torch.linalg.inv(CURVATURE + prior), rtol=1e-10, atol=0.0
    )


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "cls, kwargs",
    [
        (bc.optim.AdamW, {}),
        (bc.optim.NAdam, {"decoupled_weight_decay": True, "momentum_decay": 3.0}),
    ],
)
def test_decoupled_decay_samples_the_prior_decay_times_D(cls, kwargs):
    lr, decay = 0.05, 0.4
    probed = frozen(cls, lr=lr, weight_decay=decay, **kwargs)(CURVATURE)
    optimizer, state, group = probed.optimizer, probed.state, probed.optimizer.param_groups[0]
    denominator = optimizer._denominator(group, 8, state.__getitem__)[0]
    # theta <- (1 - lr wd) theta - H g / D: at rest H(1) grad = -lr wd D theta, with H(1) = lr for Adam; NAdam's in the limit
    updates = int(state["step"])
    linear = optimizer._linear(group, optimizer._counts(state))
    gain = linear.direct + linear.step_size * linear.gain / (1.0 - linear.momentum)
    assert updates > 250
    prior = torch.diag(lr * decay * denominator / gain)
    torch.testing.assert_close(probed.covariance(), T * torch.linalg.inv(CURVATURE + prior), rtol=1e-10, atol=0.0)


def variances(make, scheduler_of, curvature: Any, steps: int, warmup: int = 3) -> torch.Tensor:
    """The covariance over ``T K^-1`` after each step of a schedule, exactly, from the stationary law of the first step."""
    K = torch.diag(torch.as_tensor(curvature, dtype=torch.float64).reshape(-1))
    probed = Probed(make, K, warmup=warmup)
    scheduler = scheduler_of(probed.optimizer)
    probed.step()  # some schedulers have set lr by now
    probed.settle()
    x, out = probed.stationary()[2], []
    for _ in range(steps):
        a, b = probed.maps()
        x = a @ x @ a.mT + b @ b.mT
        out.append(x.diagonal()[: len(K)] * K.diagonal() / T)
        scheduler.step()
    return torch.stack(out)


def of_the_limit(lr: float, momentum: float) -> list[float]:
    """Curvatures at these fractions of the stability limit of heavy ball."""
    return [fraction * 2.0 * (1.0 + momentum) / lr for fraction in (0.03, 0.1, 0.3, 0.6, 0.9)]


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 5, gamma=0.1),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 9], gamma=0.02),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.01, total_iters=15),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
    "polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 15, power=2.0),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_along_every_falling_scheduler_the_variance_is_exact_at_every_step(scheduler, momentum):
    ratio = variances(
        lambda p: bc.optim.SGD(p, 0.3, momentum, temperature=T, heat_guard=None),
        SCHEDULERS[scheduler],
        of_the_limit(0.3, momentum),
        18,
    )
    assert (ratio - 1.0).abs().max() < 1e-9


@pytest.mark.parametrize("kwargs", [dict(nesterov=True), dict(dampening=0.4), dict(weight_decay=0.5)], ids=str)
def test_nesterov_dampening_and_decay_are_exact_along_a_fall(kwargs):
    prior = kwargs.get("weight_decay", 0.0)
    curvature = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)
    ratio = variances(lambda p: bc.optim.SGD(p, 0.3, 0.9, temperature=T, **kwargs), SCHEDULERS["StepLR"], curvature, 18)
    assert (ratio * (curvature + prior) / curvature - 1.0).abs().max() < 1e-9


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "change", [{"momentum": 0.9}, {"momentum": 0.1, "lr": 0.1}, {"momentum": 0.9, "dampening": 0.4}], ids=str
)
def test_a_momentum_that_is_set_anew_is_exact_where_the_velocity_needs_more_noise(change):

    class Setter:
        def __init__(self, optimizer):
            self.group, self.steps = optimizer.param_groups[0], 0

        def step(self):
            self.steps += 1
            if self.steps == 3:
                self.group.update(change)
            if self.steps == 6:
                self.group.update(lr=0.02, momentum=0.7)

    for decay in (0.0, 0.5):
        k = torch.tensor(of_the_limit(0.3, 0.5), dtype=torch.float64) * 0.9
        ratio = variances(lambda p, wd=decay: bc.optim.SGD(p, 0.3, 0.5, 0.0, wd, temperature=T), Setter, k, 12)
        assert (ratio * (k + decay) / k - 1.0).abs().max() < 1e-9


@pytest.mark.parametrize("foreach", [None, True])
def test_a_momentum_may_begin_later(foreach):
    """The first velocity is the gradient with the noise of the rule for a change, of this draw and of the last one."""
    theta = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer, theta.grad = bc.optim.SGLD([theta], 0.1, temperature=T, foreach=foreach), torch.ones_like(theta)
    optimizer.step()
    first, last = noise_of(Linear(0.1), T, None), optimizer.state[theta]["noise"].clone()
    optimizer.param_groups[0]["momentum"], before = 0.5, theta.detach().clone()
    now = noise_of(Linear(0.1, 0.5, velocity="momentum_buffer"), T, first.before)
    optimizer.step()
    velocity = 1.0 + now.momentum[1] * optimizer.state[theta]["noise"] + now.momentum[0] * last
    torch.testing.assert_close(optimizer.state[theta]["momentum_buffer"], velocity, rtol=1e-12, atol=0)
    torch.testing.assert_close(theta.detach(), before - 0.1 * velocity, rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lr_0_in_the_middle_leaves_the_law_as_it_is(momentum):
    lrs = [0.3, 0.3, 0.0, 0.3, 0.1, 0.0, 0.0, 0.1, 0.05, 0.0, 0.0, 0.0, 0.01]
    ratio = variances(
        lambda p: bc.optim.SGD(p, 0.3, momentum, temperature=T),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: lrs[min(t, 12)] / 0.3),
        of_the_limit(0.3, momentum),
        14,
    )
    assert (ratio - 1.0).abs().max() < 1e-9


@pytest.mark.slow
def test_cosine_with_restarts_stays_within_the_rules_bounds():
    """The variance within -21 % .. +36 % everywhere, at most 7 % RMS, over cycles of 500 steps."""
    cycle = 500
    ratio = variances(
        lambda p: bc.optim.SGHMC(p, 0.3, 0.99, temperature=T),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, cycle),
        1.0,
        2 * cycle,
    )
    assert ratio.min() > 0.79 and ratio.max() < 1.36
    assert (ratio - 1.0).square().mean().sqrt() < 0.07


@pytest.mark.slow
def test_one_cycle_moves_lr_and_momentum_and_the_variance_follows():
    """OneCycleLR over 1000 steps, momentum 0.85 to 0.95 against lr: within 2 % while lr rises, exact once that is forgotten."""
    ratio = variances(
        lambda p: bc.optim.SGD(p, 0.3, 0.95, nesterov=True, temperature=T),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=1003, final_div_factor=10.0),
        1.0,
        900,
    )
    assert (ratio - 1.0).abs().max() < 0.02
    assert (ratio[450:] - 1.0).abs().max() < 1e-9


@pytest.mark.slow
def test_cyclic_momentum_of_adam_is_followed():
    """CyclicLR over Adam's b1 with a frozen P: within 2 % where lr rises, exact where it falls long enough."""

    def make(p):
        return bc.optim.Adam(p, 0.05, temperature=T, freeze_after=2)

    def scheduler(o):
        return torch.optim.lr_scheduler.CyclicLR(o, 0.02, 0.05, step_size_up=100, cycle_momentum=True)

    assert (variances(make, scheduler, 1.0, 700, warmup=400) - 1.0).abs().max() < 0.02


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decoupled_decay_beside_a_momentum_that_changes_is_off_by_no_more_than_is_said(decay):
    """Frozen AdamW, ``b1`` from 0.9 to 0.95: exact without decay, within ``5 lr wd`` with it, and exact before the change."""
    K = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64)

    def make(p):
        return bc.optim.AdamW(p, 0.05, betas=(0.9, 0.9), weight_decay=decay, temperature=T, freeze_after=2)

    probed = Probed(make, torch.diag(K), warmup=400)
    group = probed.optimizer.param_groups[0]
    precision = K + decay * probed.optimizer._denominator(group, 2, probed.state.__getitem__)[0]
    x, off = probed.stationary()[2], []
    for step in range(25):
        group["betas"] = (0.9, 0.9) if step < 3 else (0.95, 0.9)
        a, b = probed.maps()
        x = a @ x @ a.mT + b @ b.mT
        off.append((x.diagonal()[:3] * precision / T - 1).abs().max())
    assert max(off[:3]) < 1e-9
    assert 4 * 0.05 * decay <= max(off) < max(5 * 0.05 * decay, 1e-9)


def test_a_state_that_lacks_a_number_of_the_last_step_is_refused_by_name():
    theta = torch.zeros(2, requires_grad=True)
    optimizer = bc.optim.SGHMC([theta], 0.1, temperature=T)
    before = walk(optimizer)
    del optimizer.state[theta]["noise_surplus"]
    with pytest.raises(ValueError, match="noise_surplus"):
        walk(optimizer)
    assert torch.equal(theta, before)


def test_a_temperature_that_rises_from_zero_and_falls_again_is_followed():
    """Stationary at T after T = 0; then nothing but torch's step at T = 0."""
    probed = Probed(lambda p: bc.optim.SGHMC(p, 0.1, temperature=0.2), CURVATURE)
    probed.optimizer.param_groups[0]["temperature"] = T
    probed.step()
    torch.testing.assert_close(probed.covariance(), T * torch.linalg.inv(CURVATURE), rtol=1e-10, atol=0.0)
    probed.optimizer.param_groups[0]["temperature"] = 0.0
    assert probed.step() == 0
    assert sorted(probed.state) == ["momentum_buffer"]


@pytest.mark.parametrize(("first", "then", "worst"), [(0.9, 0.95, 0.0), (0.5, 0.9, 0.13), (0.1, 0.9, 0.46)])
def test_what_a_rise_of_nesterovs_momentum_costs_is_what_the_docstring_says(first, then, worst):
    """100,000 chains at ``lr k = 1``: 2 % are 4.5 standard deviations of a variance, a false alarm in 1,000 at most."""
    p = torch.nn.Parameter(torch.randn(100_000))
    made = bc.optim.SGD([p], lr=1.0, momentum=first, nesterov=True, temperature=1.0, heat_guard=None)
    errors = []
    for t in range(130):
        made.param_groups[0]["momentum"] = first if t < 90 else then
        errors.append(walk(made, gradient=torch.clone).var().item() - 1)
    assert max(errors[80:90], key=abs) == pytest.approx(0.0, abs=0.02)
    assert max(errors[90:]) == pytest.approx(worst, abs=0.02) and min(errors[90:]) > -0.02


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("SGLD", dict(lr=0.5)),
        ("SGHMC", dict(lr=0.2)),
        ("SGD", dict(lr=0.2, momentum=0.8, nesterov=True)),
        ("RMSprop", dict(lr=0.002, momentum=0.5, freeze_after=1)),  # D = 0.01: an effective lr of 0.2
    ],
)
def test_real_draws_give_the_variance_T_over_curvature(name, kwargs):
    """4,000 chains on a unit quadratic, after 200 steps, within five standard errors: a false alarm of 6e-7 a case."""
    theta = torch.full((4000,), 0.1, requires_grad=True)
    optimizer = getattr(bc.optim, name)([theta], temperature=T, **kwargs)
    assert abs(walk(optimizer, 200, torch.clone).square().mean() / T - 1.0) < 5 * (2 / 4000) ** 0.5
