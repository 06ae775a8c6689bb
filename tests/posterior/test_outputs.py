"""Outputs with gradients: joint covariances against the Jacobian's, derivatives against central differences in float64."""

import pickle

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.trees import flatten

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


@pytest.mark.parametrize("method", [None, "probit", "mc", "linearized_mc"])
def test_predictions_have_derivatives_in_the_inputs(method):
    fit, x = fitted("kronecker", "all", bc.likelihoods.categorical(), 3), torch.randn(2, 3)

    def value(z):
        return fit.predict(z, method=method, samples=5, generator=torch.Generator().manual_seed(1))

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
