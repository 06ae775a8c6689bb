"""The thermometer on the optimizer classes: exact on quadratics, and on runs through ``as_step``."""

import pytest
import torch

import bayesopt_chain as bc
from tests.optim.probe import Probed

CURVATURE = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
T = 0.7
CLASSES = {
    "SGLD": lambda p, **how: bc.optim.SGLD(p, 0.3, **how),
    "SGHMC": lambda p, **how: bc.optim.SGHMC(p, 0.3, 0.9, **how),
    "little momentum": lambda p, **how: bc.optim.SGHMC(p, 0.3, 0.03, **how),
    "dampened": lambda p, **how: bc.optim.SGD(p, 0.3, 0.9, 0.4, **how),
    "Nesterov": lambda p, **how: bc.optim.SGD(p, 0.2, 0.9, nesterov=True, **how),
    "Adam": lambda p, **how: bc.optim.Adam(p, 0.05, freeze_after=8, **how),
    "NAdam": lambda p, **how: bc.optim.NAdam(p, 0.05, momentum_decay=3.0, freeze_after=8, **how),
    "RMSprop": lambda p, **how: bc.optim.RMSprop(p, 0.05, momentum=0.8, freeze_after=8, **how),
    "Adagrad": lambda p, **how: bc.optim.Adagrad(p, 0.05, freeze_after=8, **how),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("curvature", [0.05, 1.0, 2.5])
@pytest.mark.parametrize("kind", CLASSES)
def test_the_kinetic_temperature_is_exactly_the_one_asked_for(kind, curvature):
    torch.manual_seed(1)
    build = CLASSES[kind]
    probed = Probed(lambda p: build([("theta", p[0])], temperature=T), curvature * CURVATURE, warmup=700)
    a, b, x = probed.stationary()
    leaf = probed.optimizer.thermal_leaves()["theta"]
    move = a[:2] - torch.eye(len(a), dtype=torch.float64)[:2]
    square = (move @ x @ move.T + b[:2] @ b[:2].T).diagonal()
    torch.testing.assert_close(square / leaf.gain / leaf.temperature, torch.ones_like(square), rtol=1e-10, atol=0.0)


STIFF = torch.linspace(0.5, 2.0, 600)


class Bowl(torch.nn.Module):
    """Parameters at which the loss is ``mean(k w^2) / 2``-like, and a bias that nothing acts on but its decay."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(600))
        self.v = torch.nn.Parameter(torch.zeros(400))

    def forward(self, noise=0.0):
        return (STIFF * self.w**2).sum() / 2 + (self.v**2).sum() / 2 + noise * (self.w * torch.randn(600)).sum()


def sampled(optimizer, model, loss=lambda model, batch: model(), meter=None, steps=500):
    step = bc.optim.as_step(model, optimizer, loss)
    meter = meter or bc.diagnostics.Thermometer(optimizer)
    draws = bc.sample(step, step.params, step.state, None, steps=steps, burn_in=150, thinning=4, callbacks=[meter])
    return draws, meter


RUNS = {
    "SGHMC": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T),
    "decay": lambda p: bc.optim.SGD(p, 0.1, 0.9, weight_decay=0.5, temperature=T),
    "Adam, frozen": lambda p: bc.optim.Adam(p, 0.1, eps=1.0, temperature=T, freeze_after=100),
    "climbing": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T, maximize=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_thermometer_reads_one_on_a_run(kind):
    """Both temperatures within 5 standard errors of 1; two-sided false alarms below 1e-4."""
    torch.manual_seed(0)
    model, sign = Bowl(), -1.0 if kind == "climbing" else 1.0
    optimizer = RUNS[kind](model.named_parameters())
    draws, meter = sampled(optimizer, model, lambda model, batch: sign * model())
    report = bc.diagnostics.temperatures(
        draws,
        optimizer,
        lambda p, batch: sign * torch.func.functional_call(model, p, ()),
        [None],
        thermometer=meter,
    )
    assert set(report.kinetic) == set(report.configurational) == {"w", "v"}
    for part, sharp in ((report.kinetic, 0.03), (report.configurational, 0.06)):
        for e in part.values():
            assert abs(e.value - 1) < 5 * e.standard_error + 0.005 and e.standard_error < sharp


@pytest.mark.slow
def test_a_run_that_the_data_heat_warns():
    """``rho = 25 * 0.02 / (2 * 0.7)`` = 0.36 with lr 0.002 and momentum 0.9."""
    torch.manual_seed(0)
    model = Bowl()
    optimizer = bc.optim.SGHMC(model.named_parameters(), 0.002, temperature=T)
    with pytest.warns(UserWarning, match="the data heat the chain: the kinetic temperature of w"):
        _, meter = sampled(optimizer, model, lambda model, batch: model(5.0))
    assert meter.estimates["w"].value == pytest.approx(1.36, abs=0.06)
    assert abs(meter.estimates["v"].value - 1) < 0.06


@pytest.mark.slow
def test_a_moving_lr_is_followed():
    torch.manual_seed(0)
    model = Bowl()
    optimizer = bc.optim.SGHMC(model.named_parameters(), 0.1, 0.8, temperature=T)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500, eta_min=0.02)
    step = bc.optim.as_step(model, optimizer, lambda model, batch: model(), scheduler=scheduler)
    meter = bc.diagnostics.Thermometer(optimizer)
    bc.sample(step, step.params, step.state, None, steps=500, burn_in=100, thinning=4, callbacks=[meter])
    for e in meter.estimates.values():
        assert abs(e.value - 1) < 5 * e.standard_error + 0.01 and e.standard_error < 0.03


@pytest.mark.slow
def test_what_cannot_be_read_is_refused():
    model = Bowl()
    nameless = bc.optim.SGHMC(model.parameters(), 0.1, temperature=T)
    with pytest.raises(ValueError, match="named_parameters"):
        sampled(nameless, model)
    with pytest.raises(TypeError, match="and not an optimizer"):
        bc.diagnostics.Thermometer(torch.optim.SGD(model.parameters(), 0.1))
    decoupled = bc.optim.AdamW(model.named_parameters(), 0.01, eps=1.0, temperature=T)
    draws, _ = sampled(decoupled, model, steps=200)
    with pytest.raises(ValueError, match="decoupled weight decay"):
        bc.diagnostics.temperatures(draws, decoupled, lambda p, batch: sum((x**2).sum() for x in p.values()), [None])
    other = bc.optim.SGHMC([("elsewhere", model.w), ("nowhere", model.v)], 0.1, temperature=T)
    with pytest.raises(ValueError, match="are named elsewhere, nowhere"):
        sampled(other, model)
