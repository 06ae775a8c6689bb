"""A preconditioner that is given: what its derivative is."""

import pytest
import torch

import bayesopt_chain as bc
from tests.walk import end_of


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
