"""Temperatures of runs of the optimizer classes through ``as_step``."""

import pytest
import torch

import bayesopt_chain as bc

T = 0.7
STIFF = torch.linspace(0.5, 2.0, 600)


class Bowl(torch.nn.Module):
    """Parameters of curvatures ``k``, and some of curvature 1."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(600))
        self.v = torch.nn.Parameter(torch.zeros(400))

    def forward(self):
        return (STIFF * self.w**2).sum() / 2 + (self.v**2).sum() / 2


RUNS = {
    "SGHMC": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T),
    "decay": lambda p: bc.optim.SGD(p, 0.1, 0.9, weight_decay=0.5, temperature=T),
    "Adam, frozen": lambda p: bc.optim.Adam(p, 0.1, eps=1.0, temperature=T, freeze_after=100),
    "climbing": lambda p: bc.optim.SGHMC(p, 0.1, temperature=T, maximize=True),
}


def temperatures(optimizer, model, sign=1.0, steps=500):
    step = bc.optim.as_step(model, optimizer, lambda model, batch: sign * model())
    draws = bc.sample(step, step.params, step.state, None, steps=steps, burn_in=150, thinning=4)
    loss = lambda p, batch: sign * torch.func.functional_call(model, p, ())  # noqa: E731
    return bc.diagnostics.doctor(draws, optimizer, loss, [None]).numbers


@pytest.mark.slow
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_has_the_temperature_that_it_was_given(kind):
    """Within 5 standard errors of 1; two-sided false alarms below 1e-4."""
    model = Bowl()
    found = temperatures(RUNS[kind](model.named_parameters()), model, -1.0 if kind == "climbing" else 1.0)
    for leaf in "wv":
        error = found[f"  its standard error, {leaf}"]
        assert abs(found[f"temperature, {leaf}"] - 1) < 5 * error + 0.005 and error < 0.06


@pytest.mark.slow
def test_what_cannot_be_read_is_refused():
    model = Bowl()
    with pytest.raises(ValueError, match="named_parameters"):
        bc.optim.SGHMC(model.parameters(), 0.1, temperature=T).thermal_leaves()
    with pytest.raises(TypeError, match="gradient transformation, or an optimizer"):
        temperatures(torch.optim.SGD(model.parameters(), 0.1), model, steps=200)
    with pytest.raises(ValueError, match="decoupled weight decay"):
        temperatures(bc.optim.AdamW(model.named_parameters(), 0.01, eps=1.0, temperature=T), model, steps=200)
    other = bc.optim.SGHMC([("elsewhere", model.w), ("nowhere", model.v)], 0.1, temperature=T)
    with pytest.raises(ValueError, match="gives noise to elsewhere, nowhere"):
        temperatures(other, model, steps=200)
