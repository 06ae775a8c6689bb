"""A linear last layer with Gaussian noise against dense computations in float64: evidence, mode, covariance, bounds."""

import math

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.curvature._plan import Affine
from bayesopt_chain.likelihoods import gaussian, weighted
from bayesopt_chain.posterior.regression import Regression, rows_of

F64 = {"dtype": torch.float64}
ROOM = torch.finfo(torch.float64).eps


def problem(seed):
    """A layer, its likelihood, a prior, data of some batches; what varies goes through all combinations."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, **F64)  # noqa: E731
    outputs, features, n = 1 + seed % 3, (2, 7, 20)[seed // 3 % 3], (5, 12, 40)[seed // 9 % 3]
    layer = Affine("w", "b" if seed // 27 % 2 else None)
    positions = (2,) if seed % 5 == 4 else ()
    kind = ("number", "each", "missing")[seed // 2 % 3]
    noise = 0.3 if kind == "number" else normal(outputs).exp()
    likelihood = weighted(gaussian(noise)) if kind == "missing" else gaussian(noise)
    offset = (0.0, 3.0, 100.0)[seed // 7 % 3]
    params = {"w": normal(outputs, features), **({"b": normal(outputs)} if layer.bias else {})}
    means = {name: 0.3 * normal(*p.shape) for name, p in params.items()}
    x = normal(n, *positions, features) + (seed // 4 % 2) * 2
    y = offset + 2 * layer(params, (x, None)) + normal(n, *positions, outputs)
    w = (
        (torch.rand(y.shape, generator=generator) < 0.7).to(y) * (1 + normal(*y.shape).abs())
        if kind == "missing"
        else None
    )
    prior = normal(3).exp()
    of_weights = prior[0] if seed % 4 else normal(outputs, features).exp()
    scale = prior[2] if seed % 2 else normal(outputs).exp()
    return layer, likelihood, means, x, y, w, of_weights, prior[1], scale


def test_the_precision_of_the_rows_is_the_gauss_newton_matrix():
    """Of 54 problems, to 1e-12 of the largest entry: with and without bias, weights, positions, noise of each output."""
    for seed in range(54):
        layer, likelihood, means, x, y, w, *_ = problem(seed)
        batch = x, y if w is None else (torch.where(w > 0, y, torch.nan), w)
        found = rows_of(likelihood, layer, means, *batch).precision(layer, means, len(x))
        wanted = bc.curvature.ggn(layer, likelihood, "dense")(means, batch)
        assert found.count == wanted.count and found.matrix.dtype == wanted.matrix.dtype
        torch.testing.assert_close(found.matrix, wanted.matrix, rtol=0, atol=1e-12 * float(wanted.matrix.abs().max()))


@pytest.mark.parametrize("part", range(4))
def test_evidence_and_mode_are_those_of_the_dense_gaussian_process(part):
    """log N(y; 0, v I + Phi Lambda^-1 Phi^T) of 200 problems to 1e-8 of a nat and of its size, however the data are batched."""
    for seed in range(50 * part, 50 * part + 50):
        layer, likelihood, means, x, y, w, of_weights, of_bias, scale = problem(seed)
        targets = y if w is None else (torch.where(w > 0, y, torch.nan), w)
        batches = [
            (x[i : i + 4], targets[i : i + 4] if w is None else tuple(t[i : i + 4] for t in targets))
            for i in range(0, len(x), 4)
        ]
        rows = [rows_of(likelihood, layer, means, *batch) for batch in batches]
        total = rows[0]
        for more in rows[1:]:
            total = total.add(more)
        got, weights, bias = Regression(total).solved(of_weights, of_bias, scale)
        design, flat = x.flatten(0, -2), (y - layer(means, (x, None))).flatten(0, -2)
        design = torch.cat([design, torch.ones(len(design), 1, **F64)], 1) if layer.bias else design
        noise = likelihood.noise_variance / scale * torch.ones(flat.shape[1], **F64)
        wanted = 0.0
        for o in range(flat.shape[1]):
            delta = of_weights.expand(flat.shape[1], x.shape[-1])[o]
            delta = torch.cat([delta, of_bias[None]]) if layer.bias else delta
            of_row = torch.ones(len(flat), **F64) if w is None else w.flatten(0, -2)[:, o]
            seen = of_row > 0
            phi, t, v = design[seen], flat[seen, o], noise[o] / of_row[seen]
            covariance = phi / delta @ phi.T + torch.diag(v)
            wanted += torch.distributions.MultivariateNormal(torch.zeros_like(t), covariance).log_prob(t)
            wanted += 0.5 * (
                v.log().sum() - (of_row[seen] * noise[o].log()).sum()
            )  # a target of weight w counts w times
            wanted += 0.5 * math.log(2 * math.pi) * (len(t) - of_row.sum())
            mode = torch.linalg.solve(phi.T / v @ phi + torch.diag(delta), phi.T @ (t / v))
            found = torch.cat([weights[o], bias[o, None]]) if layer.bias else weights[o]
            torch.testing.assert_close(found, mode, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


def fresh(seed, dtype):
    """A head as it was initialised on a body that was not trained, and targets of any offset and size."""
    torch.manual_seed(seed)
    n, hidden = (30, 100, 200)[seed % 3], (16, 50, 128)[seed // 3 % 3]
    offset, size = (0.0, 3.0, 100.0, 1e4)[seed // 9 % 4], (1.0, 1e3)[seed // 36 % 2]
    act = (nn.Tanh, nn.ReLU)[seed % 2]
    net = nn.Sequential(nn.Linear(2, hidden), act(), nn.Linear(hidden, hidden), act(), nn.Linear(hidden, 1)).to(dtype)
    x, new = torch.randn(n, 2), torch.randn(200, 2)
    y, of_new = (offset + size * (z[:, :1] + 0.1 * torch.randn(len(z), 1)) for z in (x, new))
    return net.eval(), x.to(dtype), y.to(dtype), new.to(dtype), of_new, size


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_fresh_heads_have_the_evidence_and_predictions_of_dense_float64_and_cover(part):
    """50 heads: the identity to 1e-8 (of its size), means and variances to 1e-6, never above the bound of the residual."""
    coverage = []
    for seed in range(part, 100, 20):
        dtype = (torch.float32, torch.float64)[seed // 20 % 2]
        net, x, y, new, of_new, size = fresh(seed, dtype)
        fitted = bc.fit_laplace(net, gaussian(), [(x, y)])
        v = 1 / fitted.likelihood_scale
        phi, at = (torch.cat([net[:-1](z).detach().double(), torch.ones(len(z), 1, **F64)], 1) for z in (x, new))
        delta = torch.cat(
            [fitted.prior_precision["4.weight"].expand(phi.shape[1] - 1), fitted.prior_precision["4.bias"][None]]
        )
        t = y.double()[:, 0]
        white = torch.linalg.qr(torch.cat([phi / v.sqrt(), torch.diag(delta.sqrt())]))
        along = white.Q.T @ torch.cat([t / v.sqrt(), torch.zeros_like(delta)])
        lost = (t.square().sum() / v - along.square().sum()).clamp_min(0)
        logdet = 2 * white.R.diagonal().abs().log().sum() - delta.log().sum()
        evidence = -0.5 * (len(t) * (2 * math.pi * v).log() + lost + logdet)
        assert abs(fitted.log_evidence - evidence) <= 1e-8 * abs(evidence) + 1e2 * ROOM * t.square().sum() / v
        assert fitted.log_evidence <= -0.5 * len(t) * (2 * math.pi * v).log() + 1e-9 * len(t)
        mode = torch.linalg.solve_triangular(white.R, along[:, None], upper=True)
        root = torch.linalg.solve_triangular(white.R.T, at.T, upper=False)
        predicted = fitted.predictive(new)
        assert predicted.mean.dtype == dtype
        eps = 1e-6 * (size + t.abs().max())
        torch.testing.assert_close(predicted.mean.double(), at @ mode, rtol=1e-6, atol=float(eps))
        torch.testing.assert_close(predicted.variance.double()[:, 0], root.square().sum(0) + v, rtol=1e-5, atol=0)
        low, high = predicted.interval(0.9)
        coverage.append(((low < of_new) & (of_new < high)).double().mean().item())
    assert min(coverage) > 0.5


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal", "low_rank"])
def test_every_structure_has_the_evidence_and_the_mode_of_the_model(structure):
    net, x, y, *_ = fresh(3, torch.float32)
    options = {"tune": None, "prior_precision": 0.7}
    dense = bc.fit_laplace(net, gaussian(0.1), [(x, y)], **options)
    fitted = bc.fit_laplace(net, gaussian(0.1), [(x, y)], structure=structure, **options)
    torch.testing.assert_close(fitted.log_evidence, dense.log_evidence, rtol=1e-12, atol=0)
    torch.testing.assert_close(fitted.predictive(x).mean, dense.predictive(x).mean)
    assert fitted.predictive(x).variance.isfinite().all()


@pytest.mark.parametrize("structure", ["dense", "root", "kronecker", "diagonal", "low_rank"])
def test_a_scale_for_each_output_is_a_likelihood_with_a_variance_for_each(structure):
    net, scale = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval(), torch.tensor([0.5, 1, 40])
    x, y = torch.randn(30, 2, **F64), torch.randn(30, 3, **F64)
    options = {"tune": None, "prior_precision": 0.7, "structure": structure}
    options |= {"rank": 21} if structure == "low_rank" else {}
    one, each = (bc.fit_laplace(net, gaussian(v), [(x, y)], **options) for v in (0.1, 0.1 / scale.double()))
    assert one.likelihood_scale.shape == (3,)
    torch.testing.assert_close(one.log_evidence_at(0.7, scale), each.log_evidence, rtol=1e-12, atol=0)
    got, wanted = one.outputs(x, likelihood_scale=scale), each.outputs(x)
    torch.testing.assert_close(got.mean, wanted.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.covariance, wanted.covariance, rtol=1e-8, atol=1e-12)


def test_an_output_without_targets_keeps_its_noise_and_its_prior_and_leaves_the_others_alone():
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    x, y = torch.randn(60, 2, **F64), torch.randn(60, 2, **F64)
    y[:, 1] = torch.nan
    fitted = bc.fit_laplace(net, weighted(gaussian()), [(x, (y, y.isfinite()))], tune_noise="evidence")
    default = bc.fit_laplace(net, weighted(gaussian()), [(x, (y, y.isfinite()))])
    for one in (fitted, default):
        assert one.likelihood_scale.isfinite().all() and one.predictive(x).variance.isfinite().all()
        assert 0.5 < float(1 / one.likelihood_scale[0]) < 2


@pytest.mark.parametrize("bias", [None, "b"])
def test_the_residual_and_its_degrees_of_freedom_are_those_of_dense_ridge_regression(bias):
    """gamma = tr H (H + delta)^-1 of each output, of centred features and one for the bias where there is one."""
    layer, noise, delta = Affine("w", bias), torch.tensor([0.3, 2.0], **F64), torch.tensor(4.0, **F64)
    x, y = 2 + torch.randn(30, 4, **F64), torch.randn(30, 2, **F64)
    means = {"w": torch.zeros(2, 4, **F64), **({"b": torch.zeros(2, **F64)} if bias else {})}
    flat, one = torch.tensor(1e-12, **F64), torch.ones((), **F64)
    squares, gamma = Regression(rows_of(gaussian(noise), layer, means, x, y)).residual(delta, flat, one)
    design, targets = (x - x.mean(0), y - y.mean(0)) if bias else (x, y)
    for o in range(2):
        h = design.T @ design / noise[o]
        moved = torch.linalg.solve(h + delta * torch.eye(4, **F64), design.T @ targets[:, o] / noise[o])
        left = (targets[:, o] - design @ moved).square().sum() / noise[o]
        wanted = torch.trace(torch.linalg.solve(h + delta * torch.eye(4, **F64), h)) + bool(bias)
        torch.testing.assert_close(torch.stack([squares[o], gamma[o]]), torch.stack([left, wanted]), rtol=1e-8, atol=0)


def test_noise_that_the_features_leave_nothing_for_has_a_lower_limit_that_is_said():
    x = torch.randn(40, 3)
    net, y = nn.Linear(3, 1).eval(), 5 + x @ torch.tensor([[1.0], [2.0], [3.0]])
    with pytest.warns(UserWarning, match="but for 1e-06 of their variance"):
        fitted = bc.fit_laplace(net, gaussian(), [(x, y)])
    share = 1 / fitted.likelihood_scale / y.double().var(correction=0)
    assert 1e-6 <= share < 2e-6 and (fitted.predictive(x).mean - y).abs().max() < 0.01


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.randn(1, 2), torch.randn(1, 1), "one target does not tell noise"),
        (torch.randn(9, 2), torch.zeros(9, 1), "every target of an output equals what the prior's mean says"),
    ],
    ids=["one datum", "zeros"],
)
def test_data_that_say_nothing_of_the_noise_are_refused_unless_it_is_given(x, y, words):
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    with pytest.raises(ValueError, match=words):
        bc.fit_laplace(net, gaussian(), [(x, y)])
    fitted = bc.fit_laplace(net, gaussian(0.1), [(x, y)], tune_noise=False)
    assert fitted.log_evidence.isfinite() and fitted.predictive(x).variance.isfinite().all()


@pytest.mark.parametrize("unit", [1.0, 1e-5, 1e5])
def test_inputs_that_are_all_the_same_leave_the_noise_to_the_targets_in_any_unit(unit):
    """Nothing but their mean is explained, so that their variance is the noise, to the share that one of 50 data costs."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).eval()
    x, y = torch.ones(50, 2), unit * (1 + torch.randn(50, 1))
    fitted = bc.fit_laplace(net, gaussian(), [(x, y)], tune_noise="evidence")
    assert 1 / float(fitted.likelihood_scale) == pytest.approx(float(y.var()), rel=0.03)
