"""``make_step(observe=)``: what it sees belongs to the parameters that the step started from, in every kind of step."""

import pytest
import torch

import bayesopt_chain as bc


def loss(params, batch):
    return (params["w"] ** 3).sum() * batch


def virial(params, grads, batch):
    return {"virial": (params["w"] * grads["w"]).sum(), "batch": batch * 1.0}


@pytest.mark.parametrize("kind", ["plain", "in place", "parallel", "captured", "buffers"])
def test_the_observed_is_of_the_parameters_and_the_gradient_before_the_step(kind):
    tx = bc.sghmc(0.01, temperature=0.1)
    buffers = {"seen": torch.zeros(())} if kind == "buffers" else None
    of = (lambda p, batch, b: (loss(p, batch), b)) if buffers else loss
    step = bc.make_step(of, tx, observe=virial, inplace=kind == "in place", buffers=buffers)
    params = {"w": torch.linspace(0.5, 1.0, 3, dtype=torch.float64)}
    batch = torch.tensor(2.0, dtype=torch.float64)
    if kind == "parallel":
        step, params = bc.parallel(step, 2), bc.stack([params, {"w": 2 * params["w"]}])
        state = step.init(tx, params)
    else:
        state = step.init(params)
    if kind == "captured":
        step = bc.capture(step, params, state, batch, backend="eager")
    for _ in range(3):
        want = 3 * batch * (params["w"] ** 3).sum(-1)
        params, state, info = step(params, state, batch)
        assert torch.allclose(info.observed["virial"], want, rtol=1e-14) and not info.observed["virial"].requires_grad
        assert bool((info.observed["batch"] == batch).all())


def test_a_step_without_it_reports_nothing_and_what_is_no_function_is_refused():
    params = {"w": torch.ones(2)}
    step = bc.make_step(loss, bc.sgd(0.1))
    assert step(params, step.init(params), 1.0)[2].observed == ()
    with pytest.raises(TypeError, match="observe must be a function"):
        bc.make_step(loss, bc.sgd(0.1), observe=3)
