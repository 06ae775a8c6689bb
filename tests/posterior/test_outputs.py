"""Outputs with gradients: joint covariances against the Jacobian's, derivatives against central differences in float64."""

import pickle

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import gaussian, weighted
from bayesopt_chain.trees import flatten
from tests.nets import Net

pytestmark = pytest.mark.usefixtures("double_precision")


def fitted(structure, subset, likelihood=None, outputs=2, tune=None):
    x = torch.randn(40, 3)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    likelihood = likelihood or bc.likelihoods.gaussian(0.2)
    options = {"structure": structure, "subset": subset, "tune": tune, "prior_precision": 1.5}
    y = torch.sin(x[:, :outputs]) if likelihood.has_noise_scale else torch.randint(0, outputs, (40,))
    return bc.fit_laplace(module, likelihood, [(x, y)], **options)


WAYS = [
    ("dense", "all"),
    ("diagonal", "all"),
    ("kronecker", "all"),
    ("root", "all"),
    ("low_rank", "all"),
    ("kronecker", "last_layer"),
    ("dense", "last_layer"),
]


def differences(function, at, step=1e-5):
    """Central differences of a function of one tensor, ``[*function, *at]``."""
    out = []
    for k in range(at.numel()):
        move = torch.zeros(at.numel())
        move[k] = step
        move = move.reshape(at.shape)
        out.append((function(at + move) - function(at - move)) / (2 * step))
    return torch.stack(out, -1).reshape(*out[0].shape, *at.shape)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("structure, subset", WAYS)
def test_joint_outputs_are_the_jacobians_and_have_exact_derivatives(structure, subset):
    """Covariance to 1e-10 of ``J Lambda^-1 J^T``; derivatives in the inputs, the prior and the noise to 1e-8 of differences."""
    fit, x = fitted(structure, subset), torch.randn(3, 3)
    got = fit.outputs(x, joint=True)
    forward = lambda p, x: fit.model.forward(p, fit.model.seen_by_head((x, None)))  # noqa: E731
    rows = torch.func.jacrev(lambda p: forward(p, x).reshape(-1))(fit.posterior.mean)
    j = flatten(rows, fit.posterior.mean)
    wanted = j @ torch.linalg.inv(fit.posterior.precision.to_dense()) @ j.T
    torch.testing.assert_close(got.covariance, wanted, rtol=1e-9, atol=1e-11)
    blocks = torch.stack([wanted[2 * n : 2 * n + 2, 2 * n : 2 * n + 2] for n in range(3)])
    torch.testing.assert_close(fit.outputs(x).covariance, blocks, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(fit.predictive(x).outputs.covariance, blocks, rtol=1e-9, atol=1e-11)
    for joint in (True, False):
        for part in (0, 1):
            value = lambda z: fit.outputs(z, joint=joint)[part]  # noqa: B023, E731
            slopes = torch.autograd.functional.jacobian(value, x)
            torch.testing.assert_close(slopes, differences(value, x), rtol=1e-8, atol=1e-8)
            torch.testing.assert_close(torch.func.jacrev(value)(x), slopes, rtol=1e-10, atol=1e-12)
    prior, scale = torch.tensor(1.5), torch.tensor(1.2)
    for value, at in (
        (lambda h: fit.outputs(x, joint=True, prior_precision=h, likelihood_scale=scale).covariance, prior),
        (lambda h: fit.outputs(x, joint=True, prior_precision=prior, likelihood_scale=h).covariance, scale),
        (lambda h: fit.outputs(x, prior_precision=h).mean, prior),
    ):
        slopes = torch.autograd.functional.jacobian(value, at)
        torch.testing.assert_close(slopes, differences(value, at), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", [None, "probit"])
def test_predictions_have_derivatives_in_the_inputs(method):
    fit, x = fitted("kronecker", "all", bc.likelihoods.categorical(), 3), torch.randn(2, 3)

    def value(z):
        return fit.predict(z, method=method)

    slopes = torch.autograd.functional.jacobian(value, x)
    assert slopes.any()
    # draws through eigenvectors turn with them; their derivative is exact all the same
    torch.testing.assert_close(slopes, differences(value, x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.func.jacrev(value, chunk_size=None)(x), slopes, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("question", ["mean", "variance", "aleatoric"])
def test_moments_of_new_targets_have_derivatives_too(question):
    fit, x = fitted("dense", "all"), torch.randn(2, 3)
    value = lambda z: getattr(fit.predictive(z), question) + 0 * z[:, :1]  # noqa: E731
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(value, x), differences(value, x), rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("structure, subset", [("kronecker", "all"), ("dense", "last_layer")])
def test_functional_samples_are_draws_of_one_function_across_inputs(structure, subset):
    """40,000 draws have the joint covariance (standard errors below 0.008 of the largest variance; 21 entries within six);
    a generator of one seed gives the same functions at other inputs, and their slopes."""
    fit, x = fitted(structure, subset), torch.randn(3, 3)
    drawn = fit.functional_samples(x, samples=40_000, generator=torch.Generator().manual_seed(2)).flatten(1)
    exact = fit.outputs(x, joint=True)
    scale = exact.covariance.diagonal().max()
    assert ((drawn - exact.mean.flatten()).mean(0).abs() < 6 * (scale / 40_000).sqrt()).all()
    assert ((drawn.T.cov() - exact.covariance).abs() < 6 * 0.008 * scale).all()
    some = fit.functional_samples(x[1:2], samples=4, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(
        fit.functional_samples(x, samples=4, generator=torch.Generator().manual_seed(3))[:, 1:2], some
    )
    value = lambda z: fit.functional_samples(z, samples=2, generator=torch.Generator().manual_seed(3))  # noqa: E731
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(value, x), differences(value, x), rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("structure, subset", WAYS)
def test_a_fit_is_saved_loaded_and_pickled(structure, subset, tmp_path):
    """A fit restored from a file predicts, has the evidence, and takes up new data as the first one does."""
    first, x = fitted(structure, subset), torch.randn(4, 3)
    twin = pickle.loads(pickle.dumps(first))
    bc.save(tmp_path / "fit.safetensors", first.state_dict())
    tune = None if structure == "low_rank" else "evidence"
    other = fitted(structure, subset, tune=tune)  # another module, other data, tuned, which the first is not
    restored = other.load_state_dict(bc.load(tmp_path / "fit.safetensors", like=other.state_dict()))
    data = [(torch.randn(5, 3), torch.randn(5, 2))]
    assert torch.equal(twin.predictive(x).variance, first.predictive(x).variance)
    torch.testing.assert_close(twin.refit(data).log_evidence, first.refit(data).log_evidence)
    if subset == "all":
        torch.testing.assert_close(restored.predictive(x).variance, first.predictive(x).variance)
        torch.testing.assert_close(restored.refit(data).log_evidence, first.refit(data).log_evidence)
    torch.testing.assert_close(restored.log_evidence, first.log_evidence)
    assert not torch.equal(restored.log_evidence, other.log_evidence)


@pytest.mark.parametrize(
    ("ask", "batches", "words"),
    [
        (lambda fit, data: fit.outputs(data, joint=True), 2, "data has 2 batches: pass one"),
        (lambda fit, data: fit.outputs(data), 0, "data has no batches: pass at least one"),
        (lambda fit, data: fit.functional_samples(data), 2, "data has 2 batches"),
    ],
)
def test_joint_outputs_of_several_batches_are_refused(ask, batches, words):
    with pytest.raises(ValueError, match=words):
        ask(fitted("dense", "all"), [torch.randn(2, 3)] * batches)


@pytest.mark.parametrize("forward", [lambda w: w, lambda w, batch: 3.0, lambda w, batch: batch[0] @ torch.ones(7)])
def test_functional_samples_names_a_forward_that_does_not_fit(forward):
    posterior = fitted("diagonal", "last_layer").posterior
    with pytest.raises((TypeError, ValueError), match="functional_samples: forward"):
        bc.posterior.functional_samples(forward, posterior, (torch.ones(4, 3), None), samples=2)


# Outputs that are derivatives inside ``forward``: potentials with forces, residuals of differential equations


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
    tuned = bc.fit_laplace(module, gaussian(VARIANCE), loader, subset="all", structure="dense")
    assert tuned.log_evidence > fitted.log_evidence
    torch.testing.assert_close(bc.posterior.outputs_by_target(fitted, data)[0][..., 0], fitted.outputs(data).mean)


@torch.enable_grad()
def enabled(net, positions, mask):
    """Derivatives also where gradients are off, of data of its own."""
    return net.inner(positions.clone(), mask)


def test_what_is_not_right_is_refused_by_name():
    _, inputs, _ = structures()
    loader = [(inputs, torch.randn(5, 13))]
    for module, told, words in (
        (Potential(), {"structure": "kronecker"}, r"derivatives of the last layer's \(head.*structure='dense'"),
        (
            Net(enabled, inner=Potential(False)),
            {"subset": "all", "structure": "dense"},
            "gradients off or without create_graph",
        ),
        (Net(enabled, inner=Potential()), {"subset": "all"}, "cannot describe .* use structure='dense'"),
        (Potential(by="func"), {}, "differentiates by torch.func"),
    ):
        with pytest.raises(ValueError, match=words):
            bc.fit_laplace(module.eval(), gaussian(), loader, tune=None, **told)


def residual(burgers=False):
    """Of the heat equation, ``u_t - u_xx``, or with ``u u_x`` of Burgers' equation."""

    def of(net, x):
        x.requires_grad_()
        u = net.u(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), x, create_graph=True)
        drift = u * first[:, 1:] if burgers else 0.0
        return torch.cat([u, first[:, :1] + drift - second[:, 1:]], 1)

    return Net(of, u=nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))).eval()


def test_the_residual_of_a_linear_equation_is_right_and_of_another_refused():
    x, y = torch.randn(8, 2), torch.randn(8, 2)
    module = residual()
    fitted = bc.fit_laplace(module, gaussian(0.1), [(x, y)], tune=None)
    hidden = torch.tanh(module.u[0](x)).detach()
    w, slope = module.u[0].weight.detach(), 1 - hidden.square()
    second = slope * w[:, 0] + 2 * hidden * slope * w[:, 1].square()
    ones = torch.ones(8, 1)
    j = torch.stack([torch.cat([ones, hidden], 1), torch.cat([0 * ones, second], 1)], 1)  # bias and weight
    precision = torch.eye(6) + torch.einsum("nep,neq->pq", j, j) / 0.1
    wanted = j @ torch.linalg.solve(precision, j.mT)
    torch.testing.assert_close(fitted.outputs(x).covariance, wanted, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match=r"derivatives and not linear in u\.2\.weight"):
        bc.fit_laplace(residual(burgers=True), gaussian(), [(x, y)])
