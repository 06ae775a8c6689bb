"""Derivatives through a chain: finite where a unit's gradient is always 0, and exact, by a preconditioner too."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import bayesopt_chain as bc
from bayesopt_chain.links.rms import scale_by_adaptive_window
from tests.walk import end_of

MAKES = {
    "adam": lambda: bc.adam(0.1, eps=1e-3),
    "adamw": lambda: bc.adamw(0.1, eps=1e-3),
    "radam": lambda: bc.radam(0.1, eps=1e-3),
    "rmsprop": lambda: bc.rmsprop(0.1, eps=1e-3),
    "centred": lambda: bc.rmsprop(0.1, eps=1e-3, centered=True),
    "adagrad": lambda: bc.adagrad(0.1, eps=1e-3),
    "window": lambda: bc.chain(scale_by_adaptive_window(100, eps=1e-3), bc.scale_by_neg_lr(0.1)),
}


def descended(make, w: Tensor, start: Tensor) -> Tensor:
    """The sum of the parameters after three steps down ``w theta^2 / 2``."""
    return end_of(make(), start, lambda p: w * p, 3)[0].sum()


@pytest.mark.parametrize("name", MAKES)
def test_derivatives_are_finite_and_those_of_living_units_those_of_differences(name):
    make, start = MAKES[name], torch.tensor([1.0, 0.0], dtype=torch.float64)
    w = torch.tensor([0.7, 2.0], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(descended(make, w, start), w)
    step = torch.tensor([1e-6, 0.0], dtype=torch.float64)
    want = (descended(make, w + step, start) - descended(make, w - step, start)).detach() / 2e-6
    torch.testing.assert_close(slope, torch.stack([want, torch.zeros_like(want)]), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(grad(lambda w: descended(make, w, start))(w.detach()), slope)
    many = grad(lambda w: vmap(lambda s: descended(make, w, s))(torch.stack([start, start])).sum())(w.detach())
    torch.testing.assert_close(many, 2 * slope)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_derivative_by_a_preconditioner_is_that_of_differences_noise_included(momentum, order):
    generator_of = lambda: torch.Generator().manual_seed(0)  # noqa: E731

    def value(preconditioner):
        tx = bc.chain(
            bc.scale_by_preconditioner(preconditioner),
            bc.add_momentum(momentum),
            bc.inject_langevin_noise(0.5, order=order, generator=generator_of()),
            bc.scale_by_neg_lr(0.1),
        )
        params = [torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
        params, _ = end_of(tx, params, lambda params: [2.0 * p for p in params], 3)
        return sum((p**2).sum() for p in params)

    p = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)]
    q = [x.clone().requires_grad_() for x in p]
    slopes = torch.autograd.grad(value(q), q)
    step = torch.tensor([0.0, 1e-6], dtype=torch.float64)
    difference = (value([p[0] + step, p[1]]) - value([p[0] - step, p[1]])) / 2e-6
    assert slopes[0][1].item() == pytest.approx(difference.item(), rel=1e-6)
