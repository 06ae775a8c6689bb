"""Outputs that are derivatives inside ``forward``: potentials with forces, residuals of differential equations."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import gaussian, weighted

pytestmark = pytest.mark.usefixtures("double_precision")


class Potential(nn.Module):
    """Two rounds of messages between atoms; the energy is a sum over atoms, the forces are its derivative."""

    def __init__(self, graph=True, by="autograd"):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(1, 6), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(7, 6), nn.Tanh())
        self.head = nn.Linear(6, 1)
        self.graph, self.by = graph, by

    def energy(self, positions, mask):
        apart = (positions[..., :, None, :] - positions[..., None, :, :]).square().sum(-1, keepdim=True)
        pairs = (mask[..., :, None] * mask[..., None, :] * (1 - torch.eye(mask.shape[-1])))[..., None]
        closeness = torch.exp(-apart) * pairs
        h = (self.first(closeness) * pairs).sum(-2)
        messages = torch.cat([h[..., None, :].expand(*apart.shape[:-1], 6), closeness], -1)
        h = (self.second(messages) * pairs).sum(-2)
        return (self.head(h)[..., 0] * mask).sum(-1)

    def forward(self, positions, mask):
        if self.by == "func":
            slope, e = torch.vmap(torch.func.grad_and_value(self.energy))(positions, mask)
        else:
            positions.requires_grad_()
            e = self.energy(positions, mask)
            (slope,) = torch.autograd.grad(e.sum(), positions, create_graph=self.graph)
        return torch.cat([e[:, None], -slope.flatten(1)], 1)


SIZES = [3, 4, 2, 4, 3]
VARIANCE = torch.tensor([0.01, *[0.1] * 12])  # of an energy, and of the components of four forces


def structures():
    """Padded to four atoms, with the weights of outputs that are there, and the atoms of each alone."""
    alone = [torch.randn(n, 3) for n in SIZES]
    mask = torch.stack([(torch.arange(4) < n).double() for n in SIZES])
    positions = torch.stack([torch.cat([x, torch.zeros(4 - len(x), 3)]) for x in alone])
    weights = torch.cat([torch.ones(5, 1), mask.repeat_interleave(3, 1)], 1)
    return alone, (positions, mask), weights


def jacobian(module, names, x):
    """Of one structure's energy and forces, by plain backward passes: ``[1 + 3 A, P]``."""
    chosen = [p for name, p in module.named_parameters() if name in names]
    with torch.enable_grad():
        outputs = module(x[None].clone(), torch.ones(1, len(x)))[0]
        rows = [torch.autograd.grad(f, chosen, retain_graph=True, materialize_grads=True) for f in outputs]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("graph", [True, False])
def test_energies_and_forces_of_graphs_of_several_sizes_have_their_covariance(graph):
    """Through the last layer in one call, also where ``forward`` keeps no graph; against Jacobians of each graph alone."""
    alone, inputs, weights = structures()
    module = Potential(graph).eval()
    targets = torch.randn(5, 13), weights
    loader = [(tuple(x[rows] for x in inputs), tuple(y[rows] for y in targets)) for rows in (slice(0, 2), slice(2, 5))]
    fitted = bc.fit_laplace(module, weighted(gaussian(VARIANCE)), loader, tune=None, prior_precision=0.7)
    of = Potential().eval()
    of.load_state_dict(module.state_dict())
    rows = [jacobian(of, ("head.weight", "head.bias"), x) for x in alone]
    precision = 0.7 * torch.eye(7) + sum(j.T @ (j / VARIANCE[: len(j), None]) for j in rows)
    outputs = fitted.outputs((inputs, None))
    for n, j in enumerate(rows):
        wanted, own = j @ torch.linalg.solve(precision, j.T), len(j)
        torch.testing.assert_close(outputs.covariance[n, :own, :own], wanted, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            outputs.mean[n, :own], of(alone[n][None].clone(), torch.ones(1, own // 3))[0].detach()
        )
        assert outputs.covariance[n, own:].abs().max() < 1e-8 if own < 13 else True
    joint = fitted.outputs((inputs, None), joint=True).covariance.reshape(5, 13, 5, 13)
    across = rows[0] @ torch.linalg.solve(precision, rows[1].T)
    torch.testing.assert_close(joint[0, :10, 1], across, rtol=1e-8, atol=1e-8)
    assert fitted.functional_samples((inputs, None), samples=3).shape == (3, 5, 13)
    assert fitted.seen.precision.count == 5 and fitted.seen.entries == weights.sum()  # structures; components
    assert fitted.model.params.keys() == {"head.weight", "head.bias"} and not inputs[0].requires_grad
    tuned = bc.fit_laplace(module, weighted(gaussian(VARIANCE)), loader)
    assert tuned.log_evidence > fitted.log_evidence and "dense" in repr(tuned)
    influence = bc.influence(fitted, loader, (inputs, None), of=lambda f, _: f[:, 0])
    assert influence.shape == (5, 5) and influence.isfinite().all()


@pytest.mark.parametrize("by", ["autograd", "func"])
def test_all_layers_are_right_densely_whatever_takes_the_derivative(by):
    _, (positions, mask), _ = structures()
    mask = torch.ones_like(mask)
    module = Potential(by=by).eval()
    names = [name for name, _ in module.named_parameters()]
    loader = [((positions, mask), torch.randn(5, 13))]
    fitted = bc.fit_laplace(module, gaussian(VARIANCE), loader, subset="all", structure="dense", tune=None)
    rows = torch.stack([jacobian(module, names, x) for x in positions])
    precision = torch.eye(rows.shape[2]) + torch.einsum("nep,e,neq->pq", rows, 1 / VARIANCE, rows)
    wanted = torch.einsum("nep,pq,mfq->nemf", rows, precision.inverse(), rows)
    data = ((positions.detach().clone(), mask), None)
    own = wanted.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    torch.testing.assert_close(fitted.outputs(data).covariance, own, rtol=1e-8, atol=1e-8)
    joint = fitted.outputs(data, joint=True).covariance
    torch.testing.assert_close(joint, wanted.reshape(65, 65), rtol=1e-8, atol=1e-8)
    moves = fitted.posterior.sample((2,), generator=torch.Generator().manual_seed(0))
    off = torch.cat([(moves[name] - fitted.posterior.mean[name]).flatten(1) for name in names], 1)
    drawn = fitted.functional_samples(data, samples=2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, fitted.outputs(data).mean + torch.einsum("nep,sp->sne", rows, off))


class Enabled(nn.Module):
    """Takes derivatives also where gradients are off, of data of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, positions, mask):
        with torch.enable_grad():
            return self.inner(positions.clone(), mask)


def test_what_is_not_right_is_refused_by_name():
    _, inputs, _ = structures()
    loader = [(inputs, torch.randn(5, 13))]
    for module, told, words in (
        (Potential(), {"structure": "kronecker"}, r"derivatives of the last layer's \(head.*structure='dense'"),
        (Enabled(Potential(False)), {"subset": "all", "structure": "dense"}, "gradients off or without create_graph"),
        (Enabled(Potential()), {"subset": "all"}, "cannot describe .* use structure='dense'"),
        (Potential(by="func"), {}, "differentiates by torch.func"),
    ):
        with pytest.raises(ValueError, match=words):
            bc.fit_laplace(module.eval(), gaussian(), loader, tune=None, **told)


class Residual(nn.Module):
    """Of the heat equation, ``u_t - u_xx``, or with ``u u_x`` of Burgers' equation."""

    def __init__(self, burgers=False):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
        self.burgers = burgers

    def forward(self, x):
        x.requires_grad_()
        u = self.u(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)
        drift = u * first[:, 1:] if self.burgers else 0.0
        return torch.cat([u, first[:, :1] + drift - second[:, 1:]], 1)


def test_the_residual_of_a_linear_equation_is_right_and_of_another_refused():
    x, y = torch.randn(8, 2), torch.randn(8, 2)
    module = Residual().eval()
    fitted = bc.fit_laplace(module, gaussian(0.1), [(x, y)], tune=None)
    hidden = torch.tanh(module.u[0](x)).detach()
    w, slope = module.u[0].weight.detach(), 1 - hidden.square()
    residual = slope * w[:, 0] + 2 * hidden * slope * w[:, 1].square()
    ones = torch.ones(8, 1)
    j = torch.stack([torch.cat([ones, hidden], 1), torch.cat([0 * ones, residual], 1)], 1)  # bias and weight
    precision = torch.eye(6) + torch.einsum("nep,neq->pq", j, j) / 0.1
    wanted = j @ torch.linalg.solve(precision, j.mT)
    torch.testing.assert_close(fitted.outputs(x).covariance, wanted, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match=r"derivatives and not linear in u\.2\.weight"):
        bc.fit_laplace(Residual(burgers=True).eval(), gaussian(), [(x, y)])
