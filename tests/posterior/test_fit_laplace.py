"""``bc.fit_laplace`` against closed forms, Gaussian processes and its own pieces; its options, and what it refuses."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayesopt_chain as bc
from bayesopt_chain.modules import peeked
from tests.posterior.conftest import trained

pytestmark = pytest.mark.usefixtures("double_precision")


N = 60


def module(outputs=3):
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).eval()


def loader(x, y, size=25):
    return DataLoader(TensorDataset(x, y), size)


def classes():
    x = torch.randn(N, 2)
    return x, (x[:, 0] + 0.5 * torch.randn(N) > 0).long() + (x[:, 1] > 0.5).long()


@pytest.mark.sweep(9)
@pytest.mark.parametrize("structure", ["kronecker", "dense", "diagonal", "root"])
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
    by_outputs = fitted.outputs(new).draw(40_000, generator).softmax(-1).mean(0)
    params = fitted.posterior.sample((4_000,), generator=generator)
    called = torch.vmap(lambda p: torch.func.functional_call(model, p, new))
    assert (by_outputs - called(params).softmax(-1).mean(0)).abs().max() < 0.04
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
    drawn = fitted.outputs(x[:4]).draw(20_000, torch.Generator().manual_seed(0))
    got = fitted.likelihood.mean(drawn).mean(0)
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
    params = {"body": torch.randn(2, 5), "head": {"w": torch.randn(5, 3, requires_grad=True)}}
    forward = lambda p, batch: torch.tanh(batch[0] @ p["body"]) @ p["head"]["w"]  # noqa: E731
    fitted = bc.fit_laplace(forward, bc.likelihoods.categorical(), loader(x, y), params=params, subset="head")
    assert list(fitted.posterior.mean) == ["head.w"] and fitted.predict(x).shape == (N, 3)
    assert not fitted.log_evidence.requires_grad


def matrix(params, batch):
    return batch[0] @ params["head"]


def without_numbers(layer):
    for p in layer.parameters():
        p.data.fill_(torch.nan)


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
        ({"subset": "tail"}, "fit_laplace: subset='tail' matches none"),
        ({"layers": "all"}, r"fit_laplace: layers is no argument of it.*rank.*subset="),
        ({"module": matrix, "params": WEIGHT}, "of a forward function the last layer is not known"),
        ({"module": matrix, "subset": "head"}, "needs params="),
        (
            {"params": {**dict(module().named_parameters()), "2.bias": torch.zeros(5)}},
            r"2.bias of shape \(5,\), the module has",
        ),
        ({"prior_structure": "one"}, "fit_laplace: prior_structure must be 'scalar' or 'layerwise', or None, got"),
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
        ({"loader": [(BATCH[0] / 0, BATCH[1])]}, "are NaN or infinite"),
        ({"loader": [(BATCH[0], torch.full((4,), -100))]}, "every target is left out"),
        ({"loader": [(BATCH[0], ["a"] * 4)]}, "targets of the type list"),
        ({"loader": [BATCH, (BATCH[0][:0], BATCH[1][:0])]}, "the batch is empty"),
        ({"loader": [(BATCH[0][:0], BATCH[1][:0])]}, "the batch is empty"),
        ({"module": module().to("meta")}, r"leaf [02]\.weight of the module is on the device meta"),
        ({"module": module().double().apply(without_numbers)}, "a parameter is NaN"),
        ({"tune": "validation", "validation": []}, "at least one, each with targets"),
        ({"tune": "validation", "validation": [BATCH[0]]}, "at least one, each with targets"),
        ({"ask": {"method": "magic"}}, "method='magic'"),
        ({"ask": {"method": "probit"}, **GAUSSIAN}, "no meaning for a gaussian likelihood"),
        ({"ask": {"data": []}}, "data has no batches"),
        ({"ask": {"data": BATCH[0][:0]}}, "the batch is empty"),
        *(
            ({"loader": [(x, torch.ones(8, 1))], "subset": subset}, "fit_laplace: loader: the model cannot take it")
            for x in (torch.ones(8, 2, dtype=torch.int64), torch.ones(8, 3))
            for subset in ("last_layer", "all")
        ),
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


def test_a_prior_mean_moves_the_linear_gaussian_posterior_and_its_evidence():
    """The Gaussian process with that mean: posterior mean, evidence, and the maximum over prior and noise."""
    model, (x, _) = module(), classes()
    y, phi = torch.randn(N, 3), torch.cat([torch.ones(N, 1), torch.tanh(model[0](x)).detach()], 1)
    mean = {"2.weight": 0.3 * torch.randn(3, 6), "2.bias": torch.tensor([1.0, -1.0, 0.5])}
    options = {"structure": "dense", "prior_mean": mean, "tune": None, "prior_precision": 0.8}
    fitted = bc.fit_laplace(model, bc.likelihoods.gaussian(0.4), [(x, y)], **options)
    m0 = torch.cat([mean["2.bias"][None], mean["2.weight"].T])
    kernel = phi @ phi.T / 0.8 + 0.4 * torch.eye(N)
    exact = sum(torch.distributions.MultivariateNormal(phi @ m0[:, c], kernel).log_prob(y[:, c]) for c in range(3))
    torch.testing.assert_close(fitted.log_evidence, exact, rtol=1e-10, atol=1e-8)
    precision = phi.T @ phi / 0.4 + 0.8 * torch.eye(7)
    solution = torch.linalg.solve(precision, phi.T @ y / 0.4 + 0.8 * m0)
    torch.testing.assert_close(fitted.posterior.mean["2.weight"].T, solution[1:], rtol=1e-8, atol=1e-9)
    options = {"structure": "dense", "prior_mean": mean, "tune_noise": "evidence"}
    tuned = bc.fit_laplace(model, bc.likelihoods.gaussian(0.4), [(x, y)], **options)
    prior = next(iter(tuned.prior_precision.values()))
    for factor in (0.9, 1.1):
        assert tuned.log_evidence_at(prior * factor, tuned.likelihood_scale) < tuned.log_evidence
        assert tuned.log_evidence_at(prior, tuned.likelihood_scale * factor) < tuned.log_evidence


@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal"])
@pytest.mark.parametrize("likelihood", [bc.likelihoods.categorical(), bc.likelihoods.gaussian(0.4)])
def test_a_temperature_scales_the_covariance_and_leaves_mean_and_evidence(structure, likelihood):
    """The mean of a linear last layer with Gaussian noise is its mode, at every temperature. All data count, some of which
    have labels that are left out: so the mean of a loss has them too."""
    model, (x, y) = module(), classes()
    y = torch.where(torch.arange(N) < 12, -100, y) if likelihood.has_classes else nn.functional.one_hot(y).to(x)
    options = {"structure": structure, "tune": None, "prior_precision": 2.0}
    bayes = bc.fit_laplace(model, likelihood, [(x, y)], **options)
    cold = bc.fit_laplace(model, likelihood, [(x, y)], temperature=0.1 / N, **options)
    torch.testing.assert_close(cold.outputs(x).covariance, 0.1 * bayes.outputs(x).covariance)
    assert torch.equal(cold.outputs(x).mean, bayes.outputs(x).mean)
    assert torch.equal(cold.log_evidence, bayes.log_evidence)


def test_the_fishers_are_those_of_their_estimators():
    model, (x, y) = module(), classes()
    forward, params, _ = bc.make_functional(model)
    options = {"subset": "all", "structure": "dense", "tune": None, "prior_precision": 2.0}
    got = bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)], curvature="empirical_fisher", **options)
    wanted = bc.curvature.empirical_fisher(forward, bc.likelihoods.categorical(), "dense")(params, (x, y)).to_dense()
    torch.testing.assert_close(got.posterior.precision.to_dense(), wanted + 2 * torch.eye(len(wanted)))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    got = bc.fit_laplace(
        model,
        bc.likelihoods.categorical(),
        [(x, y)],
        curvature="fisher",
        samples=3,
        generator=generators[0],
        **options,
    )
    estimate = bc.curvature.fisher(forward, bc.likelihoods.categorical(), "dense", samples=3, generator=generators[1])
    torch.testing.assert_close(
        got.posterior.precision.to_dense(), estimate(params, (x, y)).to_dense() + 2 * torch.eye(len(wanted))
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.slow
def test_an_overfitted_network_is_named_in_a_warning():
    """40 rows learned by heart: the predictive's negative log-likelihood of training data is .7 above the network's. A network
    that was stopped early, and one whose prior validation has chosen, pass without a word."""

    def data(n):
        x = 1.5 * torch.randn(n, 2)
        return x, (2 * x @ torch.tensor([[1.0, 0.5, -1.0], [0.0, 1.0, -0.5]]) + 0.3 * torch.randn(n, 3)).argmax(1)

    (x, y), held = data(40), data(40)
    module = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 3))
    likelihood = bc.likelihoods.categorical()
    bc.fit_laplace(trained(module, likelihood, x, y, 20, 1e-2), likelihood, [(x, y)])
    trained(module, likelihood, x, y, 1500, 1e-2)
    with pytest.warns(UserWarning, match=r"on training data the predictive density .* the network itself 0\.00"):
        bc.fit_laplace(module, likelihood, [(x, y)], subset="all", tune_noise=False)
    bc.fit_laplace(module, likelihood, [(x, y)], subset="all", tune="validation", validation=[held])


DATA = 24


def one_output():
    x = torch.randn(DATA, 1)
    return nn.Sequential(nn.Linear(1, 9), nn.Tanh(), nn.Linear(9, 1)), x, torch.sin(x), bc.likelihoods.gaussian(0.01)


def three_outputs():
    x = torch.randn(DATA, 3)
    return nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 3)), x, torch.sin(x), bc.likelihoods.gaussian(0.01)


def of_classes():
    x = torch.randn(DATA, 4)
    return (
        nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)),
        x,
        x[:, :3].argmax(1),
        bc.likelihoods.categorical(),
    )


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal"])
@pytest.mark.parametrize("case, subset", [(one_output, "all"), (three_outputs, "last_layer"), (of_classes, "all")])
def test_data_in_three_pieces_give_the_posterior_of_all_and_leave_the_first_alone(case, subset, structure):
    """A linear last layer with Gaussian noise finds its mode too."""
    model, x, y, likelihood = case()
    options = {"subset": subset, "structure": structure, "tune": None, "prior_precision": 0.7}
    whole = bc.fit_laplace(model.eval(), likelihood, [(x, y)], **options)
    first = fitted = bc.fit_laplace(model, likelihood, [(x[:5], y[:5])], **options)
    before = first.posterior.precision.to_dense().clone()
    for some in (slice(5, 6), slice(6, DATA)):
        fitted = fitted.refit([(x[some], y[some])])
    torch.testing.assert_close(fitted.posterior.precision.to_dense(), whole.posterior.precision.to_dense())
    torch.testing.assert_close(fitted.posterior.mean, whole.posterior.mean)
    torch.testing.assert_close(fitted.log_evidence, whole.log_evidence)
    assert fitted.posterior.precision.count == DATA and torch.equal(first.posterior.precision.to_dense(), before)


# Inference mode, empty batches, NaN, half precision, booleans, parameters without values


def test_a_prediction_inside_inference_mode_is_that_outside_of_it():
    model, (x, y) = module(), classes()
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)])
    wanted = fitted.predict(x[:3])
    with torch.inference_mode():
        torch.testing.assert_close(fitted.predict(x[:3]), wanted)
        with pytest.raises(ValueError, match="call it outside of it"):
            bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)])


@pytest.mark.parametrize("structure", ["kronecker", "dense", "root", "diagonal", "low_rank"])
def test_a_datum_that_is_not_finite_is_refused_whatever_is_tuned(structure):
    x, y = classes()
    x[3] = torch.nan
    for given in ({"tune": None}, {"tune": "validation", "validation": [classes()]}):
        with pytest.raises(ValueError, match="NaN"):
            bc.fit_laplace(module(), bc.likelihoods.categorical(), [(x, y)], structure=structure, subset="all", **given)


def test_a_state_of_another_structure_or_likelihood_is_refused():
    (x, y), model = classes(), module()
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)])
    of_noise = bc.fit_laplace(model, bc.likelihoods.gaussian(), [(x, torch.randn(len(x), 3))], structure="kronecker")
    diagonal = bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)], structure="diagonal")
    counts, known, half, geometric, narrower = (
        bc.fit_laplace(model, likelihood, [(x, torch.ones(len(x), 3))], subset="all", structure="dense", tune=None)
        for likelihood in (
            dataclasses.make_dataclass(  # of a user, with words among its fields
                "Named", [("units", tuple, ("visits",))], bases=(type(bc.likelihoods.poisson()),), frozen=True, eq=False
            )(),
            *map(bc.likelihoods.gaussian, (1.0, 0.5)),
            *map(bc.likelihoods.negative_binomial, (1.0, 3.0)),
        )
    )
    for one, other in ((fitted, of_noise), (fitted, diagonal), (counts, known), (known, half), (geometric, narrower)):
        with pytest.raises(ValueError, match="of another structure or likelihood than Laplace posterior of"):
            one.load_state_dict(other.state_dict())


def test_predictions_of_nan_stay_nan():
    x, y = classes()
    fitted = bc.fit_laplace(module(), bc.likelihoods.categorical(), [(x, y)])
    for method in ("sobol", "probit"):
        found = fitted.predict(torch.stack([x[0], x[1] * torch.nan]), method=method)
        assert found[1].isnan().all(), method
        torch.testing.assert_close(found[:1], fitted.predict(x[:1], method=method))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_network_in_half_precision_predicts_what_it_does_in_float32(dtype, subset):
    """To the rounding of its own outputs: logits of up to 1 in 8 or 11 bits."""
    x, y = classes()
    half, x = module().to(dtype), x.to(dtype)
    fits = [
        bc.fit_laplace(model, bc.likelihoods.categorical(), [(inputs, y)], subset=subset, structure="diagonal")
        for model, inputs in ((half, x), (copy.deepcopy(half).float(), x.float()))
    ]
    for method in ("sobol", "probit"):
        found, wanted = (
            fitted.predict(inputs[:4], method=method).float() for fitted, inputs in zip(fits, (x, x.float()))
        )
        assert (found - wanted).abs().max() < 8 * torch.finfo(dtype).eps
    prediction = fits[0].predictive(x[:4])
    assert prediction.mean.dtype == torch.float32 and prediction.log_prob(y[:4]).isfinite().all()


def test_the_evidence_of_a_network_in_float16_is_summed_in_float32():
    """Losses of 20,000 nats, and a prior precision, beyond float16's largest number."""
    half, x, y = module(1).half(), torch.randn(8, 2), torch.full((8, 1), 200.0)
    fits = [
        bc.fit_laplace(
            model,
            bc.likelihoods.gaussian(),
            [(x.to(dtype), y.to(dtype))],
            subset="all",
            tune_noise=False,
            prior_precision=1e6,
        )
        for model, dtype in ((half, torch.float16), (copy.deepcopy(half).float(), torch.float32))
    ]
    for prior in (1e6, 1.0):
        found, wanted = (fitted.log_evidence_at(prior).item() for fitted in fits)
        assert found == pytest.approx(wanted, rel=1e-3)


def test_yes_or_no_targets_may_be_booleans():
    model, (x, y) = module(1), classes()
    yes = y == 1
    fits = [bc.fit_laplace(model, bc.likelihoods.bernoulli(), [(x, t[:, None])]) for t in (yes, yes.double())]
    assert fits[0].log_evidence == fits[1].log_evidence


@pytest.mark.parametrize(
    "make",
    [
        bc.laplace,
        lambda: bc.swag(rank=2),
        lambda: bc.chain(bc.sgd(0.1), bc.swag(rank=2)),
        lambda: bc.vi.mean_field(bc.sgd(0.1), temperature=0.1),
        lambda: bc.ekf.diagonal(lr=1.0, prior_precision=1.0),
    ],
)
def test_parameters_without_values_are_refused_where_a_posterior_begins(make):
    params = {"b": torch.zeros(()), "w": torch.zeros(3, device="meta")}
    with pytest.raises(ValueError, match=r"leaf \['w'\] of params is on the device meta"):
        make().init(params)


# The body of a linear last layer runs once for each batch, and the head alone has the fit of the whole on its features


def normalised():
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).eval()


def batches(n=N, size=15):
    x, y = torch.randn(n, 2), torch.randint(0, 3, (n,))
    return list(zip(x.split(size), y.split(size)))


def features(model, data):
    return [(model[:-1](x).detach(), y) for x, y in data]


@pytest.mark.parametrize("structure", ["kronecker", "dense", "low_rank"])
def test_a_head_on_its_features_is_fitted_as_the_last_layer_of_the_whole(structure):
    model, train, held_out, new = normalised(), batches(), batches(20), batches(25)
    options = {"structure": structure, "tune": "validation"}
    if structure == "low_rank":
        options["rank"] = 5
    plain = bc.fit_laplace(model, bc.likelihoods.categorical(), train, validation=held_out, **options)
    train, held_out, seen = (features(model, data) for data in (train, held_out, new))
    fitted = bc.fit_laplace(model[-1], bc.likelihoods.categorical(), train, validation=held_out, **options)
    assert fitted.prior_precision == plain.prior_precision
    torch.testing.assert_close(fitted.log_evidence, plain.log_evidence)
    torch.testing.assert_close(fitted.predict(seen), plain.predict(new))
    again = fitted.refit(seen)
    torch.testing.assert_close(again.posterior.precision.to_dense(), plain.refit(new).posterior.precision.to_dense())


def test_validation_and_predictions_run_the_body_once_for_each_batch():
    """Nine candidates look at the same features."""
    model, train, held_out, calls = normalised(), batches(), batches(20, 10), []
    model[0].register_forward_hook(lambda _, inputs, out: calls.append(1) if len(out) > 2 else None)
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), train, tune="validation", validation=held_out)
    assert len(calls) == len(train) + len(held_out) and not model[3]._forward_hooks
    fitted.predict(train[0][0])
    assert len(calls) == len(train) + len(held_out) + 1


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_a_fit_stays_what_it_was_while_its_module_is_trained_on_and_refuses_it_in_training_mode(subset):
    model, (x, y) = normalised(), classes()
    fitted = bc.fit_laplace(model, bc.likelihoods.categorical(), [(x, y)], subset=subset)
    before = fitted.predict(x)
    model.train()(x + 3)  # moves the statistics
    for refused in (fitted.predict, fitted.refit, lambda data: bc.influence(fitted, data, data)):
        with pytest.raises(ValueError, match=r"BatchNorm1d\) is in training mode"):
            refused((x, y))
    model.eval()
    assert torch.equal(fitted.predict(x), before)
    if subset == "last_layer":
        torch.testing.assert_close(fitted.module()(x)[0], fitted.predictive(x).mean)


def test_epochs_that_leave_data_out_are_read_whole_and_in_order():
    """Of 7 data in batches of 3 an epoch gives 6."""
    model, (x, y), likelihood = module(), (z[:7] for z in classes()), bc.likelihoods.categorical()
    data = bc.epochs((x, y), 3)
    _, every, total = peeked(
        data
    )  # about how many decides how many labels are sampled, and none is taken from an epoch
    assert (total, len([*every]), data.offset) == (2, 3, 0)
    fitted = bc.fit_laplace(model, likelihood, [(x, y)])
    torch.testing.assert_close(bc.fit_laplace(model, likelihood, data).log_evidence, fitted.log_evidence)
    assert fitted.refit(data).seen.precision.count == 14
    torch.testing.assert_close(fitted.predict(data), fitted.predict(x))
    draws = bc.Draws.from_trees([model])
    torch.testing.assert_close(draws.predict(model, data), model(x).detach())
    assert draws.log_likelihood(model, data, likelihood).shape == (1, 7)
    assert bc.posterior.train_by_evidence(model, likelihood, data, epochs=1).fitted.seen.precision.count == 7


def test_a_loader_is_read_once():
    model, train, reads = normalised(), batches(), []

    class Loader:
        def __iter__(self):
            reads.append(1)
            return iter(train)

        def __len__(self):
            return len(train)

    bc.fit_laplace(model, bc.likelihoods.categorical(), Loader())
    assert reads == [1]
