"""The class axis anywhere: images and sequences, masked, against brute force and against classes on the last axis."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.curvature import ggn
from bayesopt_chain.likelihoods import Outputs, categorical, gaussian
from bayesopt_chain.posterior import outputs_by_target, probit, softmax_mean
from tests.posterior.conftest import trained
from tests.refusals import refuse

pytestmark = pytest.mark.usefixtures("double_precision")


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1)).eval()


def images():
    x, y = torch.randn(3, 1, 8, 8), torch.randint(3, (3, 8, 8))
    y[0, :, 5:] = -100
    return x, y


def last(f):
    return f.movedim(1, -1)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["dense", "kronecker", "diagonal", "root"])
def test_pixels_have_the_mean_and_covariance_of_brute_force_in_both_layouts(structure, subset):
    """8 x 8 images with three classes and a mask. Dense is compared with Jacobians, others with their own precision."""
    (x, y), module = images(), convolutional()
    told = {"structure": structure, "subset": subset, "tune": None, "prior_precision": 0.5}
    first = bc.fit_laplace(module, categorical(axis=-3), [(x[:1], y[:1]), (x[1:], y[1:])], **told)
    behind = bc.fit_laplace(module, categorical(), [(x[:1], y[:1]), (x[1:], y[1:])], outputs=last, **told)
    torch.testing.assert_close(first.posterior.precision.to_dense(), behind.posterior.precision.to_dense())
    torch.testing.assert_close(first.log_evidence, behind.log_evidence)
    forward, params, _ = bc.make_functional(module)
    names = sorted(first.model.params)

    def f(leaves, at):
        return last(forward({**params, **dict(zip(names, leaves))}, (at, None)))

    kept = tuple(params[name].detach() for name in names)
    rows = torch.autograd.functional.jacobian(lambda *leaves: f(leaves, x), kept)
    j = torch.cat([row.reshape(3, 64, 3, -1) for row in rows], 3)
    p = f(kept, x).softmax(-1).reshape(3, 64, 3)
    if structure == "dense":
        hessian = (torch.diag_embed(p) - p[..., None] * p[..., None, :]) * (y != -100).reshape(3, 64, 1, 1)
        wanted = torch.einsum("ntcp,ntcd,ntdq->pq", j, hessian, j) + 0.5 * torch.eye(j.shape[3])
        torch.testing.assert_close(first.posterior.precision.to_dense(), wanted, rtol=1e-9, atol=1e-9)
    covariance = first.posterior.precision.to_dense().inverse()
    wanted = torch.einsum("ntcp,pq,ntdq->ntcd", j, covariance, j).reshape(3, 8, 8, 3, 3)
    for fitted, at_once in ((first, 7), (first, 64), (behind, 16)):
        mean, found = outputs_by_target(fitted, x, at_once=at_once)
        torch.testing.assert_close(mean, f(kept, x))
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(first.predict(x, method="probit"), behind.predict(x, method="probit"))
    torch.testing.assert_close(first.predict(x, method="probit"), bc.posterior.probit(mean, found))


@pytest.mark.parametrize("options", [{}, {"weight": [1.0, 2.0, 0.5]}])
@pytest.mark.parametrize("axis, event", [(-3, (3, 2, 4)), (-2, (3, 5)), (-2, (2, 3, 4))])
def test_a_likelihood_of_any_layout_is_that_of_classes_on_the_last_axis(axis, event, options):
    any_axis, plain = categorical(axis=axis, **options), categorical(**options)
    f = torch.randn(4, *event)
    moved = f.movedim(axis, -1)
    y = torch.randint(3, moved.shape[:-1])
    y[0, 0] = -100
    torch.testing.assert_close(any_axis.losses(f, y), plain.losses(moved, y))
    torch.testing.assert_close(any_axis.gradient(f, y).movedim(axis, -1), plain.gradient(moved, y))
    root, other = any_axis.root(f, y), plain.root(moved, y)
    weights = torch.randn(4, root.columns)
    torch.testing.assert_close(any_axis.factors(f, y).movedim(axis, -1), plain.factors(moved, y))
    torch.testing.assert_close(root.diagonal().movedim(axis, -1), other.diagonal())
    torch.testing.assert_close(root.combine(weights).movedim(axis, -1), other.combine(weights))
    drawn = torch.randn(5, 4, *event)
    of, its = any_axis.mixture(drawn), plain.mixture(drawn.movedim(axis, -1))
    for name in ("mean", "variance", "entropy", "epistemic"):
        torch.testing.assert_close(getattr(of, name), getattr(its, name))
    torch.testing.assert_close(of.log_prob(y), its.log_prob(y))
    assert of.sample(2).shape == (2, *y.shape)
    cov = torch.randn(4, f[0].numel(), 40)
    cov = cov @ cov.mT / 40
    order = torch.arange(f[0].numel()).reshape(event).movedim(axis, -1).flatten()
    one, two = any_axis.predictive(f, cov), plain.predictive(moved, cov[:, order][:, :, order])
    torch.testing.assert_close(one.mean, two.mean)
    torch.testing.assert_close(one.log_prob(y), two.log_prob(y))


def test_classes_behind_the_data_are_refused_with_the_axis_to_pass():
    x, y = images()
    refuse(
        (
            (
                lambda: bc.fit_laplace(convolutional(), categorical(), [(x, y)]),
                r"targets \(1, 8, 8\) for outputs \(1, 3, 8, 8\).*categorical\(axis=-3\)",
            ),
            (lambda: categorical(axis=1), "axis must be an axis counted from the end"),
            (lambda: categorical(axis=-3).grouping(torch.Size([4])), "at least two classes on axis -3"),
        )
    )


# Last layers of many classes: factors without columns, the diagonal factor of the outputs, predictions from variances


def problem(classes, steps=0, data=1000, features=64):
    """A network of ``features`` hidden units, trained for some steps, and inputs around a centre for each class."""
    torch.manual_seed(0)
    centres, y = torch.randn(classes, 20), torch.randint(classes, (data,))
    x = centres[y] + 0.7 * torch.randn(data, 20)
    network = nn.Sequential(nn.Linear(20, features), nn.Tanh(), nn.Linear(features, classes))
    return trained(network, categorical(), x, y, steps, 1e-2, weight_decay=1e-4), x, y


@pytest.mark.parametrize("diagonal_above", [None, 4])
@pytest.mark.parametrize("positions", [(), (3,)])
@pytest.mark.parametrize("likelihood", [categorical(), categorical(weight=[1.0, 2.0, 0.5, 1.5, 3.0]), gaussian(0.5)])
@pytest.mark.parametrize("whole", [False, True])
def test_factors_of_the_last_layer_are_the_sums_over_columns(likelihood, positions, diagonal_above, whole):
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).eval()
    x = torch.randn(7, *positions, 4)
    y = torch.randint(5, (7, *positions)) if likelihood.has_classes else torch.randn(7, *positions, 5)
    if likelihood.has_classes:
        y[0] = -100
    forward, params, _ = bc.make_functional(module)
    features = module[:2](x).detach()
    if not whole:
        forward, params, x = (
            bc.posterior.last_layer.head(("2.bias", "2.weight")),
            dict(list(params.items())[2:]),
            features,
        )
    found = ggn(forward, likelihood, "kronecker", diagonal_above=diagonal_above)(params, (x, y))
    columns = likelihood.factors(module[2](features), y).flatten(0, -2)
    wanted = columns.mT @ columns
    wanted = wanted.diagonal() if diagonal_above else wanted
    torch.testing.assert_close(found.left["2.weight"], wanted)
    torch.testing.assert_close(found.left["2.bias"], wanted)
    weights = likelihood.weights(y)
    weights = torch.ones(7, *positions) if weights is None else weights
    rows = features * (weights / max(1, len(positions) and positions[0]))[..., None].sqrt()
    torch.testing.assert_close(found.right["2.weight"], rows.flatten(0, -2).mT @ rows.flatten(0, -2))
    if whole and diagonal_above:  # 6 outputs of the first layer
        full = ggn(forward, likelihood, "kronecker")(params, (x, y))
        torch.testing.assert_close(found.left["0.weight"], full.left["0.weight"].diagonal())


@pytest.mark.slow
def test_1001_classes_are_predicted_from_variances():
    network, x, y = problem(1001, data=30, features=3)
    fitted = bc.fit_laplace(network, categorical(), [(x, y)], tune=None, prior_precision=0.5)
    assert "of more than 1000 outputs diagonal" in repr(fitted)
    whole = bc.fit_laplace(network, categorical(), [(x, y)], tune=None, prior_precision=0.5, diagonal_above=2000)
    assert "of more than 2000 outputs diagonal" in repr(whole)
    p, phi = network(x).softmax(-1), network[:2](x)
    of_outputs, of_inputs = (p * (1 - p)).sum(0), phi.mT @ phi / 30
    lam = of_outputs[:, None, None] * of_inputs + 0.5 * torch.eye(3)
    new = network[:2](x[:2])
    variance = torch.einsum("ni,cij,nj->nc", new, lam.inverse(), new) + 1 / (of_outputs + 0.5)
    mean, found = fitted.outputs(x[:2])
    torch.testing.assert_close(mean, network(x[:2]))
    torch.testing.assert_close(found, variance)
    torch.testing.assert_close(Outputs(mean, found).blocks, variance)
    matrix = torch.diag_embed(variance)
    for method, mean_of in (("sobol", softmax_mean), ("probit", probit)):
        torch.testing.assert_close(fitted.predict(x[:2], method=method), mean_of(mean, matrix), rtol=1e-5, atol=1e-9)
    predictive = fitted.predictive(x[:2])
    of_matrix = fitted.likelihood.predictive(mean, matrix)
    for name in ("probabilities", "variance", "entropy", "epistemic"):
        torch.testing.assert_close(getattr(predictive, name), getattr(of_matrix, name), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(predictive.log_prob(y[:2]), of_matrix.log_prob(y[:2]), rtol=1e-5, atol=1e-9)
    drawn = Outputs(mean, found).draw(
        4000, torch.Generator().manual_seed(0)
    )  # 5 sd of a sample variance, 2,002 of them
    assert bool(((drawn.var(0) / variance - 1).abs() < 5 * (2 / 4000) ** 0.5).all())
    assert predictive.sample(3).shape == (3, 2)
    torch.testing.assert_close(fitted.module()(x[:2])[1], predictive.variance)
    torch.testing.assert_close(outputs_by_target(fitted, x[:2])[1], variance)
    again = fitted.load_state_dict(fitted.state_dict()).refit([(x, y)])
    assert bool((again.outputs(x[:2]).covariance < found).all())


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 40])
def test_variances_of_a_diagonal_factor_are_those_of_the_matrix_within_five_percent(steps):
    """200 classes, prior and dispersion as tuned, at inputs that were seen and at others: that of every target, and on average
    that of an output and of its difference from the likeliest one, which is what a softmax sees."""
    network, x, y = problem(200, steps)
    exact = bc.fit_laplace(network, categorical(), [(x, y)])
    rough = bc.fit_laplace(network, categorical(), [(x, y)], diagonal_above=100, tune=None)
    at = torch.cat([x[:20], torch.randn(20, 20)])
    mean, wanted = exact.outputs(at)
    same = dict(prior_precision=exact.prior_precision, likelihood_scale=exact.likelihood_scale)
    found = rough.outputs(at, **same).covariance * exact.covariance_scale
    targets = [categorical().predictive(mean, s).variance for s in (found, wanted)]
    is_possible = targets[1] > 1e-3
    assert float((targets[0] / targets[1] - 1)[is_possible].abs().max()) < 0.05
    variance = [s.diagonal(dim1=-2, dim2=-1) for s in (found, wanted)]
    assert float((variance[0] / variance[1] - 1).abs().mean()) < 0.05
    top, data = mean.argmax(-1), torch.arange(40)
    between = [v + v[data, top, None] - 2 * s[data, top] for v, s in zip(variance, (found, wanted))]
    is_other = torch.arange(200) != top[:, None]
    assert float((between[0] / between[1] - 1)[is_other].abs().mean()) < 0.05
