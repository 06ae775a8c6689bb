"""The posterior in weights is the Gaussian process of its tangent kernel; data may come in pieces.

With the Jacobian J, the prior N(0, 1 / delta), roots S S^T of the likelihood's Hessians in the outputs and K = J J^T / delta,

    cov f(x*) = K** - K*S (I + S^T K S)^-1 S^T K*^T
"""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc

N = 24


pytestmark = pytest.mark.usefixtures("double_precision")


def one_output():
    x = torch.randn(N, 1)
    return nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1)), x, torch.sin(x), bc.likelihoods.gaussian(0.01)


def three_outputs():
    x = torch.randn(N, 3)
    return nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 3)), x, torch.sin(x), bc.likelihoods.gaussian(0.01)


def classes():
    x = torch.randn(N, 4)
    return (
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)),
        x,
        x[:, :3].argmax(1),
        bc.likelihoods.categorical(),
    )


def jacobian(model, x):
    """``[N E, P]``, by autograd one output at a time."""
    rows = []
    for output in model(x).reshape(-1):
        slopes = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    return torch.stack(rows)


@pytest.mark.parametrize("structure", ["dense", "root"])
@pytest.mark.parametrize("case", [one_output, three_outputs, classes])
def test_the_linearised_predictions_are_a_gaussian_process(case, structure):
    """To 1e-8, with more parameters than data and with fewer."""
    model, x, y, likelihood = case()
    fitted = bc.fit_laplace(
        model.eval(), likelihood, [(x, y)], subset="all", structure=structure, tune=None, prior_precision=0.7
    )
    new = torch.randn(6, x.shape[1])
    outputs = model(x).detach()
    roots = likelihood.factors(outputs, y)  # [K, N, E]
    s = torch.block_diag(*roots.permute(1, 2, 0))
    j, j_new = jacobian(model, x), jacobian(model, new)
    k, k_cross, k_new = j @ j.T / 0.7, j_new @ j.T / 0.7, j_new @ j_new.T / 0.7
    inner = torch.linalg.solve(torch.eye(s.shape[1]) + s.T @ k @ s, s.T @ k_cross.T)
    wanted = k_new - k_cross @ s @ inner
    got = fitted.predict(new, method="linearized")
    e = outputs.shape[1]
    for n in range(6):
        block = slice(n * e, (n + 1) * e)
        torch.testing.assert_close(got.outputs.covariance[n], wanted[block, block], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(got.outputs.mean, model(new).detach())


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal", "block"])
@pytest.mark.parametrize("case, subset", [(one_output, "all"), (three_outputs, "last_layer"), (classes, "all")])
def test_data_in_three_pieces_give_the_posterior_of_all_and_leave_the_first_alone(case, subset, structure):
    """A linear last layer with Gaussian noise finds its mode too."""
    model, x, y, likelihood = case()
    options = {"subset": subset, "structure": structure, "tune": None, "prior_precision": 0.7}
    whole = bc.fit_laplace(model.eval(), likelihood, [(x, y)], **options)
    first = fitted = bc.fit_laplace(model, likelihood, [(x[:5], y[:5])], **options)
    before = first.posterior.precision.to_dense().clone()
    for some in (slice(5, 6), slice(6, N)):
        fitted = fitted.refit([(x[some], y[some])])
    torch.testing.assert_close(fitted.posterior.precision.to_dense(), whole.posterior.precision.to_dense())
    torch.testing.assert_close(fitted.posterior.mean, whole.posterior.mean)
    torch.testing.assert_close(fitted.log_evidence, whole.log_evidence)
    assert fitted.posterior.precision.count == N and torch.equal(first.posterior.precision.to_dense(), before)
