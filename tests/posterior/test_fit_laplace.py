"""``bc.fit_laplace`` against the closed form, the pieces it is made from, and sampling."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import Predictive
from bayesopt_chain.trees import flatten

N = 60


pytestmark = pytest.mark.usefixtures("double_precision")


def module(outputs=3):
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def loader(x, y, size=25):
    return DataLoader(TensorDataset(x, y), size)


def classes():
    x = torch.randn(N, 2)
    return x, (x[:, 0] + 0.5 * torch.randn(N) > 0).long() + (x[:, 1] > 0.5).long()


def features_of(model, x):
    phi = torch.tanh(model[0](x)).detach()
    return torch.cat([torch.ones(len(x), 1), phi], 1)  # the bias first


def test_a_last_layer_with_gaussian_noise_is_bayesian_linear_regression_on_its_features():
    """Prior and noise are a stationary point of the Gaussian process's evidence; mean, covariance, evidence and predictive
    variance are its, to 1e-8; the trained head does not matter."""
    model, x = module(1), torch.randn(N, 2)
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(N, 1)
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(), loader(x, y), structure="dense", tune_noise="evidence")
    phi, new = features_of(model, x), torch.randn(9, 2)

    def gp(prior, scale):
        kernel = phi @ phi.T / prior + torch.eye(N) / scale
        return torch.distributions.MultivariateNormal(torch.zeros(N), kernel).log_prob(y[:, 0])

    prior = fitted.prior_precision["2.bias"].clone().requires_grad_()
    scale = fitted.likelihood_scale.clone().requires_grad_()
    slopes = torch.autograd.grad(gp(prior, scale), (prior, scale))
    assert abs(slopes[0] * prior) < 1e-5 and abs(slopes[1] * scale) < 1e-5
    prior, scale = prior.detach(), scale.detach()
    torch.testing.assert_close(fitted.log_evidence, gp(prior, scale), rtol=1e-9, atol=1e-8)
    precision = scale * phi.T @ phi + prior * torch.eye(7)
    mean = torch.linalg.solve(precision, scale * phi.T @ y)[:, 0]
    torch.testing.assert_close(flatten(fitted.posterior.mean, fitted.posterior.mean), mean, rtol=1e-8, atol=1e-8)
    got, at = fitted.predict(new), features_of(model, new)
    assert isinstance(got, Predictive)
    torch.testing.assert_close(got.mean[:, 0], at @ mean, rtol=1e-8, atol=1e-8)
    wanted = ((at @ torch.linalg.inv(precision)) * at).sum(1) + 1 / scale
    torch.testing.assert_close(got.variance[:, 0], wanted, rtol=1e-8, atol=1e-10)
    nn.init.zeros_(model[2].weight)
    again = bc.fit_laplace(model, bc.likelihoods.gaussian(), loader(x, y), structure="dense", tune_noise="evidence")
    torch.testing.assert_close(again.log_evidence, fitted.log_evidence, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(again.predict(new).mean, got.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("structure", ["kronecker", "dense", "diagonal", "root", "block"])
@pytest.mark.parametrize("subset", ["last_layer", "all", ["0.weight", "2"]])
def test_it_is_what_its_pieces_make(structure, subset):
    """The posterior and evidence of curvature, subset, Laplace and its ``log_evidence`` by hand, at the tuned prior."""
    model, (x, y) = module(), classes()
    likelihood = bc.likelihoods.categorical()
    fitted = bc.fit_laplace(model, likelihood, loader(x, y), structure=structure, subset=subset, tune_noise="evidence")
    forward, params, _ = bc.make_functional(model)
    if subset != "all":
        names = ["2"] if subset == "last_layer" else subset
        forward, params = bc.curvature.subset(forward, params, names)
    tx = bc.laplace()
    state = tx.init(params)
    for batch in loader(x, y):
        _, state = tx.update(params, state, curvature=bc.curvature.ggn(forward, likelihood, structure)(params, batch))
    posterior = tx.posterior(state, params, prior_precision=fitted.prior_precision)
    torch.testing.assert_close(fitted.posterior.precision.to_dense(), posterior.precision.to_dense())
    log_likelihood = -likelihood.nll(forward(params, (x, y)), y).sum()
    evidence = lambda prior: tx.log_evidence(state, params, log_likelihood, prior_precision=prior)  # noqa: E731
    torch.testing.assert_close(fitted.log_evidence, evidence(fitted.prior_precision))
    for factor in (0.8, 1.25):  # the evidence has its maximum there
        moved = {name: prior * factor for name, prior in fitted.prior_precision.items()}
        assert evidence(moved) < fitted.log_evidence
    mean, covariance = bc.posterior.linearized(forward, posterior, (x[:7], None))
    torch.testing.assert_close(fitted.predict(x[:7], method="probit"), bc.posterior.probit(mean, covariance))
    torch.testing.assert_close(fitted.predict(x[:7]), bc.posterior.softmax_mean(mean, covariance))


def test_the_methods_agree_on_what_they_approximate():
    """40,000 draws of the outputs and 4,000 of the parameters, which for a linear head have the same law (standard errors below
    0.0025 and 0.008: 15 entries within 0.04, false alarms below 1e-5); Sobol points within their 0.01 and four standard errors,
    probit within its documented 0.07 of them."""
    model, (x, y) = module(), classes()
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), loader(x, y), prior_precision=1.0)
    new, generator = torch.randn(5, 2), torch.Generator().manual_seed(1)
    by_outputs = fitted.predict(new, method="linearized_mc", samples=40_000, generator=generator)
    by_params = fitted.predict(new, method="mc", samples=4_000, generator=generator)
    assert (by_outputs - by_params).abs().max() < 0.04
    assert (by_outputs - fitted.predict(new)).abs().max() < 0.02
    assert (by_outputs - fitted.predict(new, method="probit")).abs().max() < 0.07
    mean, covariance = bc.posterior.linearized(
        fitted.model.forward, fitted.posterior, fitted.model.seen_by_head((new, None))
    )
    raw = fitted.predict(new, method="linearized")
    assert torch.equal(raw.outputs.mean, mean) and torch.equal(raw.outputs.covariance, covariance)
    torch.testing.assert_close(raw.mean, fitted.predict(new), rtol=0, atol=1e-10)  # of roots of a covariance


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_other_likelihoods_have_their_means(name):
    model, x = module(1), torch.randn(N, 2)
    y = (x[:, :1] > 0).double()
    fitted = bc.fit_laplace(model, getattr(bc.likelihoods, name)(), loader(x, y))
    got = fitted.predict(x[:4], method="linearized_mc", samples=20_000, generator=torch.Generator().manual_seed(0))
    raw = fitted.predict(x[:4], method="linearized")
    if name == "poisson":  # E exp(f) = exp(m + v / 2)
        torch.testing.assert_close(got, raw.mean, rtol=0.05, atol=0)
        m, v = raw.outputs.mean, raw.outputs.covariance[..., 0]
        torch.testing.assert_close(raw.mean, (m + v / 2).exp(), rtol=1e-9, atol=0)
    else:
        torch.testing.assert_close(got, fitted.predict(x[:4]), rtol=0, atol=0.03)


def test_batches_of_any_iterable_are_fitted_and_predicted_alike():
    model, (x, y) = module(), classes()
    fitted, *others = (
        bc.fit_laplace(model, bc.likelihoods.categorical(), data)
        for data in ([(x, y)], (x, y), {"input": x, "labels": y}, [{"input": x, "labels": y}])
    )
    want = fitted.predict(x)
    assert all(torch.equal(other.log_evidence, fitted.log_evidence) for other in others)
    for data in (loader(x, y, 7), [x[:30], x[30:]], [(x, y)], iter([x])):
        torch.testing.assert_close(fitted.predict(data), want)


def test_a_forward_function_is_fitted_by_names():
    (x, y) = classes()
    params = {"body": torch.randn(2, 5), "head": {"w": torch.randn(5, 3)}}
    forward = lambda p, batch: torch.tanh(batch[0] @ p["body"]) @ p["head"]["w"]  # noqa: E731
    fitted = bc.fit_laplace(forward, bc.likelihoods.categorical(), loader(x, y), params=params, subset="head")
    assert list(fitted.posterior.mean) == ["head.w"] and fitted.predict(x).shape == (N, 3)


def dropping():
    return nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 3))


def matrix(params, batch):
    return batch[0] @ params["head"]


BATCH = torch.zeros(4, 2, dtype=torch.float64), torch.arange(4) % 3
WEIGHT = {"head": torch.ones(2, 3, dtype=torch.float64)}
GAUSSIAN = {"likelihood": bc.likelihoods.gaussian(), "loader": [(torch.eye(3, 2).double(), torch.eye(3).double())]}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"structure": "full"}, "structure must be 'dense' or .*, or None, got 'full'"),
        ({"tune": "guess"}, "tune must be 'evidence' or 'validation', or None, got 'guess'"),
        ({"tune": "validation"}, "validation= .a loader. go together"),
        ({"validation": [BATCH]}, "validation= .a loader. go together"),
        ({"prior_precision": -1.0}, "prior_precision must be a positive"),
        ({"prior_precision": float("nan")}, "prior_precision must be a positive"),
        ({"structure": "low_rank"}, "LowRank has no basis"),
        ({"subset": "tail"}, "keep='tail' matches none"),
        ({"layers": "all"}, r"fit_laplace: layers is no argument of it.*rank.*subset="),
        ({"module": matrix, "params": WEIGHT}, "of a forward function the last layer is not known"),
        ({"module": matrix, "subset": "head"}, "needs params="),
        ({"prior_structure": "one"}, "fit_laplace: prior_structure='one': pass 'scalar', 'layerwise' or None"),
        ({"prior_structure": "layerwise", "structure": "dense"}, "'layerwise' with structure='dense'.*pass 'scalar'"),
        ({"prior_structure": "scalar", "tune": None}, "'scalar' is for tune='evidence'.*tune=None"),
        ({"curvature": "hessian"}, "curvature must be 'default' or 'ggn' or .*, got 'hessian'"),
        ({"temperature": 0.0}, "temperature must be a positive"),
        ({"prior_mean": {"w": torch.zeros(2)}}, "prior_mean"),
        ({"likelihood": nn.CrossEntropyLoss()}, r"likelihood must be one of bc\.likelihoods, called"),
        ({"likelihood": bc.likelihoods.categorical}, r"likelihood must be one of bc\.likelihoods, called"),
        ({"module": 3}, r"neither an nn\.Module nor a function"),
        ({"loader": []}, "the loader has no batches"),
        ({"loader": [BATCH[0]]}, r"batches must be .inputs, targets."),
        ({"loader": [(BATCH[0] / 0, BATCH[1])]}, "is NaN"),
        ({"module": dropping()}, r"1 \(Dropout\) is in training mode.*module.eval"),
        ({"ask": {"method": "magic"}}, "method='magic'"),
        ({"ask": {"method": "probit"}, **GAUSSIAN}, "no meaning for a gaussian likelihood"),
        ({"ask": {"method": "linearized_mc", "samples": 0}}, "samples must be a whole number"),
        ({"ask": {"data": []}}, "data has no batches"),
    ],
)
def test_bad_arguments_and_questions_are_refused_by_name(what, words):
    given = {"module": module(), "likelihood": bc.likelihoods.categorical(), "loader": [classes()]} | what
    with pytest.raises((ValueError, TypeError), match=words):
        question = {"data": BATCH[0]} | given.pop("ask", {})
        bc.fit_laplace(given.pop("module"), given.pop("likelihood"), given.pop("loader"), **given).predict(**question)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_the_evidence_elsewhere_is_that_of_a_fit_there_and_has_its_slopes(subset):
    """Against fits at other hyperparameters, and against central differences; stationary at the tuned ones."""
    model, x = module(1), torch.randn(N, 2)
    data = [(x, torch.sin(x[:, :1]) + 0.3 * torch.randn(N, 1))]
    options = {"structure": "dense", "subset": subset}
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(), data, **options)
    tuned = next(iter(fitted.prior_precision.values()))
    torch.testing.assert_close(fitted.log_evidence_at(tuned, fitted.likelihood_scale), fitted.log_evidence)
    for prior, variance in ((0.3, 0.5), (7.0, 2.0)):
        there = bc.fit_laplace(
            model, bc.likelihoods.gaussian(variance), data, tune=None, prior_precision=prior, **options
        )
        torch.testing.assert_close(fitted.log_evidence_at(prior, 1 / variance), there.log_evidence)
    h = torch.tensor([0.3, 2.0], requires_grad=True)
    (slope,) = torch.autograd.grad(fitted.log_evidence_at(*h), h)
    steps = 1e-5 * torch.eye(2)
    finite = [fitted.log_evidence_at(*(h + e)) - fitted.log_evidence_at(*(h - e)) for e in steps.detach()]
    torch.testing.assert_close(slope, torch.stack(finite).detach() / 2e-5, rtol=1e-6, atol=1e-6)
    best = torch.stack([tuned, fitted.likelihood_scale]).requires_grad_()
    (slope,) = torch.autograd.grad(fitted.log_evidence_at(*best), best)
    assert (slope * best).abs().max() < 1e-4


def test_a_prior_without_a_best_value_stays_finite():
    """Targets without an offset: the evidence of the bias's prior rises towards infinity; the fit stays good."""
    x = torch.randn(N, 2)
    y = torch.tanh(x[:, :1]) - torch.tanh(x[:, :1]).mean()
    fitted = bc.fit_laplace(module(1), bc.likelihoods.gaussian(), loader(x, y))
    assert all(1e-10 < prior < 1e10 for prior in fitted.prior_precision.values())
    assert torch.isfinite(fitted.log_evidence) and (fitted.predict(x).mean - y).square().mean() < 0.1 * y.var()


def test_progress_shows_a_bar(capsys):
    model, (x, y) = module(), classes()
    bc.fit_laplace(model, bc.likelihoods.categorical(), loader(x, y), progress=True)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.slow
def test_the_noise_is_found_by_root_and_last_layer_and_misjudged_by_kronecker_as_documented():
    """A network of 2,701 parameters, noise of variance 4e-4: its mean square at the fit is 2e-4 to 5e-4. A variance that is
    kept stays."""
    x = 4 * torch.rand(100, 1) - 2
    y = torch.sin(2 * x) + 0.02 * torch.randn(100, 1)
    model = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(1500):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    def variance(structure, subset, **options):
        fitted = bc.fit_laplace(
            model.eval(), bc.likelihoods.gaussian(4e-4), [(x, y)], structure=structure, subset=subset, **options
        )
        return 4e-4 / fitted.likelihood_scale.item()

    for found in (variance("root", "all"), variance("dense", "last_layer"), variance("kronecker", "last_layer")):
        assert 2e-4 < found < 8e-4
    assert 1e-3 < variance("kronecker", "all") < 1e-2
    assert variance("kronecker", "all", tune_noise=False) == 4e-4
