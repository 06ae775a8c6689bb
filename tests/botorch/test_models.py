"""Models of BoTorch: joint posteriors against explicit Jacobians, conditioning against the exact Gaussian, optimisation."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.trees import flatten

pytest.importorskip("botorch")

from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler

from bayesopt_chain.botorch import DrawsModel, LinearizedModel
from bayesopt_chain.likelihoods import gaussian
from tests.refusals import refused

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("double_precision"),
]


def fit(subset="all", outputs=1, structure="dense"):
    x = torch.rand(25, 2)
    y = torch.cat([torch.sin(3 * x.sum(1, keepdim=True)), torch.cos(2 * x[:, :1])], 1)[:, :outputs]
    module = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()
    options = {"structure": structure, "subset": subset, "tune": None, "prior_precision": 1.0}
    return bc.fit_laplace(module, bc.likelihoods.gaussian(0.05), [(x, y)], **options), x, y


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_the_posterior_of_q_points_is_joint_and_has_the_jacobians_covariance(subset, outputs, batch):
    fitted, *_ = fit(subset, outputs)
    model, x = LinearizedModel.of(fitted, num_outputs=outputs), torch.rand(*batch, 4, 2)
    posterior = model.posterior(x)
    assert posterior.mean.shape == (*batch, 4, outputs) and model.num_outputs == outputs
    covariance = posterior.distribution.covariance_matrix
    for index in [()] if not batch else [(0,) * len(batch), tuple(b - 1 for b in batch)]:
        wanted = fitted.outputs(x[index], joint=True)
        torch.testing.assert_close(posterior.mean[index], wanted.mean)
        torch.testing.assert_close(covariance[index], wanted.covariance, rtol=1e-8, atol=1e-10)
    noisy = model.posterior(x, observation_noise=True)
    torch.testing.assert_close(noisy.variance, posterior.variance + 0.05, rtol=1e-8, atol=1e-10)
    if outputs == 2:
        each = torch.tensor([0.05, 0.2])
        fitted = replace(fitted, model=replace(fitted.model, how=fitted.model.how._replace(likelihood=gaussian(each))))
        noisy = LinearizedModel.of(fitted, num_outputs=2).posterior(x, output_indices=[0, 1], observation_noise=True)
        torch.testing.assert_close(noisy.variance, posterior.variance + each, rtol=1e-8, atol=1e-10)
        with pytest.raises(ValueError, match=r"take mean\[..., k\] of the posterior, or pass posterior_transform"):
            model.posterior(x, output_indices=[1])


@pytest.mark.parametrize("structure", ["dense", "diagonal", "kronecker", "root"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_conditioning_is_that_of_the_gaussian_over_the_parameters(structure, outputs):
    """Rows of the Jacobian added to the dense precision, the residuals to the mean; in one step or two, and for fantasies."""
    fitted, *_ = fit("all", outputs, structure)
    model, new, at = LinearizedModel.of(fitted, num_outputs=outputs), torch.rand(5, 2), torch.rand(3, 2)
    y = torch.randn(5, outputs)
    params = fitted.posterior.mean
    rows = lambda x: flatten(  # noqa: E731
        torch.func.jacrev(lambda p: fitted.model.forward(p, (x, None)).reshape(-1))(params), params
    )
    precision = fitted.posterior.precision.to_dense() + rows(new).T @ rows(new) / 0.05
    gap = (y - fitted.model.forward(params, (new, None))).reshape(-1)
    shift = torch.linalg.solve(precision, rows(new).T @ gap / 0.05)
    covariance = rows(at) @ torch.linalg.inv(precision) @ rows(at).T
    mean = fitted.model.forward(params, (at, None)) + (rows(at) @ shift).reshape(3, outputs)
    once = model.condition_on_observations(new, y)
    twice = model.condition_on_observations(new[:2], y[:2]).condition_on_observations(new[2:], y[2:])
    for got in (once, twice):
        torch.testing.assert_close(got.posterior(at).mean, mean, rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(got.posterior(at).distribution.covariance_matrix, covariance, rtol=1e-6, atol=1e-8)
    fantasies = model.condition_on_observations(new, torch.stack([y, y + 1]))
    assert fantasies.batch_shape == (2,) and fantasies.posterior(at).mean.shape == (2, 3, outputs)
    torch.testing.assert_close(fantasies.posterior(at).mean[0], mean, rtol=1e-7, atol=1e-8)
    assert model.fantasize(new[:1], SobolQMCNormalSampler(torch.Size([4]), seed=0)).posterior(at).mean.shape[0] == 4


def without_noise():
    fitted, *_ = fit()
    return LinearizedModel(fitted.model.forward, fitted.posterior)


test_noise_that_nobody_knows_is_refused = refused(
    [
        (lambda x: without_noise().posterior(x, observation_noise=True), "no observation noise is known"),
        (lambda x: without_noise().condition_on_observations(x, x[:, :1]), "no observation noise is known"),
        (lambda x: LinearizedModel.of(fit("all", 2)[0]).posterior(x), "has 2 outputs: pass num_outputs=2"),
        (lambda x: DrawsModel(print, {"a": torch.zeros(2), "b": torch.zeros(3)}), r"lengths \[2, 3\]"),
        (
            lambda x: DrawsModel(lambda w, b: b[0] @ w, torch.ones(4, 2, 3)).posterior(x),
            "3 outputs: pass num_outputs=3",
        ),
        (
            lambda x: DrawsModel(print, torch.zeros(5, 2), weights=torch.ones(1)),
            r"weights has shape \(1,\) for 5 draws",
        ),
        (lambda x: DrawsModel(print, bc.Draws.from_trees([{"w": x}])), r"of bc.Draws draws.params"),
        (lambda x: DrawsModel.of(fit()[0]), "of bc.fit_laplace call LinearizedModel.of"),
        (lambda x: LinearizedModel.of(torch.nn.Linear(2, 1)), "what bc.fit_laplace returned"),
    ],
    error=(TypeError, ValueError),
    of=lambda call: call(torch.rand(2, 2)),
)


def test_transforms_of_botorch_are_applied():
    """Inputs into the unit cube, outcomes back to their units."""
    fitted, x, _ = fit()
    standardize = Standardize(1)
    raw = 100 + 20 * torch.randn(25, 1)
    standardize(raw)
    model, plain = LinearizedModel.of(fitted), LinearizedModel.of(fitted)
    model.input_transform = Normalize(2, bounds=torch.tensor([[0.0, 0.0], [10.0, 10.0]]))
    model.outcome_transform = standardize
    seen = model.condition_on_observations(10 * x[3:5], raw[3:5])
    unit = plain.condition_on_observations(x[3:5], (raw[3:5] - raw.mean()) / raw.std())
    for in_units, standard in ((model, plain), (seen, unit)):
        got, want = in_units.posterior(10 * x[:3]), standard.posterior(x[:3])
        torch.testing.assert_close(got.mean, raw.mean() + raw.std() * want.mean)
        torch.testing.assert_close(got.variance, raw.var() * want.variance)
    fantasies = [
        m.fantasize(at, SobolQMCNormalSampler(torch.Size([4]), seed=0)) for m, at in ((model, 10 * x), (plain, x))
    ]
    got, want = (m.posterior(at).mean for m, at in zip(fantasies, (10 * x[:3], x[:3])))
    torch.testing.assert_close(got, raw.mean() + raw.std() * want)
    seen.input_transform = Normalize(2)
    assert model.input_transform is not seen.input_transform  # which is that of the conditioned model alone


def members():
    fitted, x, y = fit()
    draws = fitted.posterior.sample((16,), generator=torch.Generator().manual_seed(0))
    return DrawsModel(fitted.model.forward, draws), fitted, draws, x, y


def test_draws_are_an_ensemble():
    model, fitted, draws, *_ = members()
    x = torch.rand(3, 4, 2)
    got = model.posterior(x)
    values = torch.stack(
        [fitted.model.forward({k: v[s] for k, v in draws.items()}, (x.reshape(-1, 2), None)) for s in range(16)]
    ).reshape(16, 3, 4, 1)
    torch.testing.assert_close(got.mean, values.mean(0))
    torch.testing.assert_close(got.variance, values.var(0))


@pytest.mark.parametrize("kind", ["laplace", "draws"])
def test_inputs_of_another_dtype_than_the_weights_are_predicted_in_their_own(kind):
    """BoTorch's inputs are in double precision, networks mostly in single."""
    drawn, fitted, *_ = members()
    model, x = drawn if kind == "draws" else LinearizedModel.of(fitted), torch.rand(4, 2).float()
    got, wanted = model.posterior(x), model.posterior(x.double())
    assert got.mean.dtype == got.variance.dtype == torch.float32
    torch.testing.assert_close(got.mean.double(), wanted.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.variance.double(), wanted.variance, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["laplace", "last layer", "draws", "variational"])
@pytest.mark.parametrize("rule", ["qLogEI", "qLogNEI"])
def test_acquisition_functions_optimise_through_every_model(kind, rule):
    """``optimize_acqf`` with q = 2 ends where the acquisition is higher than at 64 random candidates."""
    drawn, fitted, _, x, y = members()
    if kind == "draws":
        model = drawn
    elif kind == "variational":
        tx = bc.vi.mean_field(bc.adam(1e-2), temperature=1 / 25, weight_decay=1 / 25)
        params = fitted.posterior.mean
        model = LinearizedModel(fitted.model.forward, tx.posterior(tx.init(params), params), noise=0.05)
    else:
        model = LinearizedModel.of(fit("last_layer")[0] if kind == "last layer" else fitted)
    sampler = None if kind == "draws" else SobolQMCNormalSampler(torch.Size([32]), seed=0)
    if rule == "qLogEI":
        acquisition = qLogExpectedImprovement(model, best_f=y.max(), sampler=sampler)
    else:
        acquisition = qLogNoisyExpectedImprovement(
            model, x[:8], sampler=sampler, cache_root=False, prune_baseline=False
        )
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    torch.manual_seed(1)
    points, value = optimize_acqf(acquisition, bounds, q=2, num_restarts=2, raw_samples=16, options={"maxiter": 15})
    assert points.shape == (2, 2) and ((points >= 0) & (points <= 1)).all()
    assert value >= acquisition(torch.rand(64, 2, 2)).max() - 1e-6
