"""The class axis anywhere: images and sequences, masked, against brute force and against classes on the last axis."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.likelihoods import categorical
from bayesopt_chain.posterior import outputs_by_target

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


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "weight": [1.0, 2.0, 0.5]}])
@pytest.mark.parametrize("axis, event", [(-3, (3, 2, 4)), (-2, (3, 5)), (-2, (2, 3, 4))])
def test_a_likelihood_of_any_layout_is_that_of_classes_on_the_last_axis(axis, event, options):
    any_axis, plain = categorical(axis=axis, **options), categorical(**options)
    f = torch.randn(4, *event)
    moved = f.movedim(axis, -1)
    y = torch.randint(3, moved.shape[:-1])
    y[0, 0] = -100
    torch.testing.assert_close(any_axis.losses(f, y), plain.losses(moved, y))
    for name in ("gradient", "empirical_factors"):
        torch.testing.assert_close(getattr(any_axis, name)(f, y).movedim(axis, -1), getattr(plain, name)(moved, y))
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
    with pytest.raises(ValueError, match=r"targets \(1, 8, 8\) for outputs \(1, 3, 8, 8\).*categorical\(axis=-3\)"):
        bc.fit_laplace(convolutional(), categorical(), [(x, y)])
    with pytest.raises(ValueError, match="axis must be an axis counted from the end"):
        categorical(axis=1)
    with pytest.raises(ValueError, match="at least two classes on axis -3"):
        categorical(axis=-3).grouping(torch.Size([4]))
