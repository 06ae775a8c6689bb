"""The arithmetic of the recipe against closed forms."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chi2, norm
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import chains as behind
from bayesopt_chain.ensemble import held
from bayesopt_chain.ensemble.call import _cost
from bayesopt_chain.ensemble.chains import Chains, chained
from bayesopt_chain.ensemble.data import Data, Scale, moments
from bayesopt_chain.ensemble.members import members_of, principal_axes
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.training import FAN_IN, SHARE, Problem, Training
from tests.ensemble.test_untidy import Killed, called, data, keeps, make
from tests.refusals import refused

GAUSSIAN = bc.likelihoods.gaussian()


def problem(members=4, n=40, make=lambda: nn.Linear(1, 1), x=None, y=None, batch_size=8):
    """A linear model of one input, in double precision; folds of ten data."""
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(0)).double() if x is None else x
    y = 2 * x + 0.3 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1)) if y is None else y
    data = Data(x, y, len(x))
    likelihood = bc.likelihoods.gaussian(moments(GAUSSIAN, y)[1])
    pair = torch.arange(10), torch.arange(10, 20)
    folds = [pair[m // 2 % 2] for m in range(members)]
    networks = members_of(lambda: make().double(), members, 0, "cpu")
    return Problem(data, likelihood, networks, members, batch_size, folds, 0, range(members))


def outputs(p, error):
    """What each member predicts on the fold that it left out: targets and an error."""
    return [p.data.take(fold)[1] + error(m) for m, fold in enumerate(p.folds)]


def test_a_held_out_score_is_the_mean_density_of_the_members_that_left_the_datum_out():
    p = problem()
    drawn = outputs(p, lambda m: 0.3 * m - 0.5)
    found = held.score(p.likelihood, p.folds_of(drawn))
    v = float(p.likelihood.noise_variance)
    for k, who in enumerate(([0, 1], [2, 3])):
        y = p.data.take(p.folds[who[0]])[1]
        density = torch.stack([torch.distributions.Normal(drawn[m], v**0.5).log_prob(y) for m in who])
        wanted = density.clamp_min(-50).exp().mean(0).log()[:, 0]
        torch.testing.assert_close(found[10 * k : 10 * k + 10], wanted)


def test_a_surprise_costs_at_most_fifty_nats_and_of_noise_that_never_suffices_the_largest_is_taken():
    p = problem(members=1)
    folds = p.folds_of(outputs(p, lambda m: 1e3))
    assert float(held.score(p.likelihood, folds).min()) == -50
    assert float(held.best_noise(p.likelihood, folds)[2]) == pytest.approx(10)


def test_the_noise_of_members_is_their_mean_squared_error_without_outliers():
    p = problem(members=2)
    error = torch.tensor([[1.0], [-1.0]]).repeat(5, 1).double()
    v = float(p.likelihood.noise_variance)
    folds = p.folds_of(outputs(p, lambda m: error))
    assert float(held.noise_of(p.likelihood, folds)) == pytest.approx(1 / v)
    wild = error.clone()
    wild[3] = 1e3  # counts as (4 x 1.4826)^2
    folds = p.folds_of(outputs(p, lambda m: wild))
    assert float(held.noise_of(p.likelihood, folds)) == pytest.approx((9 + (4 * 1.4826) ** 2) / 10 / v)


def test_each_output_has_its_noise_and_a_little_of_that_of_the_others():
    y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).double()
    p = problem(members=2, make=lambda: nn.Linear(1, 2), y=y)
    p.data.targets[:] = y
    size = p.likelihood.noise_variance.sqrt()
    error = torch.tensor([0.1, 1.0]) * size * torch.tensor([1.0, -1.0]).repeat(5)[:, None]
    found = held.noise_of(p.likelihood, p.folds_of(outputs(p, lambda m: error)))
    logs = torch.tensor([0.01, 1.0]).double().log()
    wanted = (20 * logs + 2 * logs.mean()) / 22  # twenty squared errors, two data of the mean
    torch.testing.assert_close(found, wanted.exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mixed", [range(8), range(4)])
def test_the_noise_of_all_members_follows_from_how_those_that_left_a_fold_out_disagree(mixed):
    """Four members err by ``e +- d`` on a fold. Of pairs ``r_i (r_i - r_k)`` is ``(e + d) 2 d``, ``-(e - d) 2 d`` or 0, each
    for a third of the pairs of a member, so that ``b = (4 / 3) d^2``; the noise falls by ``2 b (1 / m - 1 / 8)``."""
    p, noise = problem(members=8), torch.ones(1).double()
    e, d, v = 0.5, 0.3, float(p.likelihood.noise_variance)
    drawn = outputs(p, lambda m: e + d * [1.0, -1.0][m % 2])
    found, cut = held.noise_of_all(p.likelihood, noise, p.folds_of(drawn, mixed), p.folds_of(drawn))
    off = 2 * 4 / 3 * d**2 / v * (2 / len(mixed) - 1 / 8)
    assert float(found) == pytest.approx(max(1 - off, 0.25)) and cut == (off > 0.75)


def test_members_of_another_prior_tell_how_far_those_of_one_prior_disagree():
    """What the others err by themselves, far more here, is no part of it."""
    p, signs = problem(members=4), torch.tensor([1.0, -1.0]).repeat(5)[:, None].double()
    halves = torch.tensor([1.0] * 5 + [-1.0] * 5)[:, None].double()
    drawn = outputs(p, lambda m: 0.2 * signs if m % 2 == 0 else 7.0 * halves * signs)
    found = held.disagreement(p.likelihood, p.folds_of(drawn), [0, 2])
    assert float(found) == pytest.approx(0.04 / float(p.likelihood.noise_variance))


def test_all_members_err_by_what_their_mixture_promises():
    """Members err by a common normal and one of variance b of their own. On new data the squared error of their mean is their
    variance and the noise; false alarm 1e-4 (3.9 standard errors of the mean of 40,000 squares, and of b in the noise)."""
    generator, n, M, b = torch.Generator().manual_seed(3), 40_000, 8, 0.6

    def errors() -> torch.Tensor:
        own = torch.randn(M, n, 1, generator=generator).double()
        return torch.randn(n, 1, generator=generator).double() + b**0.5 * own

    y = torch.randn(n, 1, generator=generator).double()
    p = problem(members=M, x=y, y=y)
    halves = torch.arange(n).chunk(2)
    p.folds[:] = [halves[m // 2 % 2] for m in range(M)]
    drawn = [(y + e)[rows] for e, rows in zip(errors(), p.folds)]
    unit = float(p.likelihood.noise_variance)
    two = torch.tensor([1 / unit])  # of mixtures of two: a - b + 2 b / 2
    found, _ = held.noise_of_all(p.likelihood, two, p.folds_of(drawn, range(0, M, 2)), p.folds_of(drawn))
    new = errors()
    left = new.mean(0).square() - new.var(0, correction=0)
    assert abs(float(left.mean()) - unit * float(found)) < 3.9 * (float(left.std()) / n**0.5 + 0.004)


def test_the_constant_that_is_scored_is_the_mean_of_the_other_data_with_the_noise_of_the_fold():
    """Noises of the grid are 18 % apart, so that the mean score is within .002 of the best one."""
    p = problem(members=2)
    folds = p.folds_of(outputs(p, lambda m: 0.0))
    square = (p.data.targets[:10] - p.data.targets[10:].mean()).square()
    found = held.constant_scores(p.likelihood, p.data, folds)
    assert float(found.mean()) == pytest.approx(-float((2 * math.pi * square.mean()).log() + 1) / 2, abs=0.002)
    assert torch.equal(found.argsort(descending=True), square[:, 0].argsort())


def test_the_constant_of_classes_is_their_frequencies():
    y = torch.tensor([0] * 10 + [0] * 20 + [1] * 10)
    p = problem(members=2)
    p = replace(p, data=p.data._replace(targets=y), likelihood=bc.likelihoods.categorical())
    found = held.constant_scores(p.likelihood, p.data, p.folds_of([torch.zeros(10, 2), torch.zeros(10, 2)]))
    torch.testing.assert_close(found, torch.full_like(found, 2 / 3).log(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("n", "tolerance"), [(6, 0.005), (3000, 0.05)])
def test_logits_are_divided_by_the_mean_factor_that_the_folds_leave_possible(n, tolerance):
    """By quadrature; logits are three times as large as those that the classes were drawn with. The grid has steps of .098."""
    lik, generator = bc.likelihoods.categorical(), torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = logits.softmax(1).multinomial(1, generator=generator)[:, 0]
    _, found, *_ = held.best_factor(lik, [held.Fold(torch.arange(n), y, [0], 3 * logits[None])])
    logs = torch.linspace(math.log(0.1), math.log(10**1.5), 4001, dtype=torch.float64)
    scores = torch.stack([(3 * logits / c).log_softmax(1).gather(1, y[:, None]).sum() for c in logs.exp()])
    mean = float((scores - logs.square() / 2).softmax(0) @ logs)
    assert math.log(found) == pytest.approx(mean, abs=tolerance)
    whole = Problem(Data(logits, y, n), lik, problem().members, 1, n, [torch.arange(n)], 0, range(1))
    widened = held.score(lik, whole.folds_of([3 * logits / found]))
    torch.testing.assert_close(held.log_scores(whole.likelihood, whole.folds_of([3 * logits])), widened)
    assert n < 3000 or found == pytest.approx(3, rel=0.1)


def test_data_with_equal_inputs_are_left_out_together():
    x = torch.arange(30.0).repeat(3)[:, None]
    one, two = Data(x, x, 90).folds(0.2, 0)
    assert not set(x[one, 0].tolist()) & set(x[two, 0].tolist())
    for fold in (one, two):
        assert len(fold) >= 18 and all((x[fold, 0] == v).sum() == 3 for v in x[fold, 0])
    with pytest.raises(ValueError, match="the same inputs"):
        Data(torch.ones(90, 1), torch.randn(90, 1), 90).folds(0.2, 0)


def test_each_member_sees_every_datum_but_its_fold_once_an_epoch():
    p = problem(members=3, batch_size=10)
    batch = p.batches(True, 0, torch.ones(3, 1), torch.ones(3, 2))
    for m in range(3):
        for epoch in range(2):
            seen = torch.cat([batch(3 * epoch + i)[0][m, :, 0] for i in range(3)])
            rest = p.data.inputs[[i for i in range(40) if i not in p.folds[m].tolist()], 0]
            assert torch.equal(seen.sort().values, rest.sort().values)


def test_the_energy_is_that_of_ridge_regression_and_steps_follow_its_gradient():
    """The program repeats the step, and Adam's first step is the rate times the sign of the gradient."""
    p = problem(members=2, batch_size=30)
    training = Training(p, Stages(None, {"members": 2}, torch.device("cpu"), None), (1,), 5.0)
    batch = training.batch(0)
    state, loss = training.run(training.state, batch, training.rates(0.1))
    w, b = training.state.theta.T[:, :, None, None]
    x, y = p.data.take(torch.arange(10, 40))
    v = 0.02 * p.likelihood.noise_variance

    def energy(w, b):
        fit = ((y - w * x - b).square() / (2 * v) + (2 * torch.pi * v).log() / 2).mean((1, 2))
        return 0.02 * (fit + 5 * (w.square() + b.square())[:, 0, 0] / (2 * 30))

    torch.testing.assert_close(loss, energy(w, b))
    w, b = w.clone().requires_grad_(), b.clone().requires_grad_()
    slopes = torch.autograd.grad(energy(w, b).sum(), (w, b))
    moved = state.theta - training.state.theta
    torch.testing.assert_close(moved, -0.1 * torch.stack(slopes)[:, :, 0, 0].T.sign(), rtol=1e-5, atol=1e-6)


def spectra(n=60, count=9):
    """Smooth curves ``[n, count]``: along most of their principal axes they hardly vary."""
    at, draw = torch.linspace(0, 1, count, dtype=torch.float64), torch.Generator().manual_seed(3)
    return torch.randn(n, 3, generator=draw, dtype=torch.float64) @ torch.stack(
        [at**0, at, at**2]
    ) + 1e-4 * torch.randn(n, count, generator=draw, dtype=torch.float64)


def test_training_along_axes_is_training_on_inputs_that_are_turned():
    """Starts, energy and gradient are those of weights ``W U`` on inputs ``x U``, and the tree is that of the network."""
    x = spectra()
    layers = lambda: nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))  # noqa: E731
    p = problem(2, make=layers, x=x, y=x[:, :1].sin())
    axes = principal_axes(p.members, p.data, Scale([(torch.zeros(9), torch.ones(9))]))
    turned = {k: v @ axes[k] if k in axes else v for k, v in p.members.params.items()}
    on_turned = replace(p, data=p.data._replace(inputs=x @ axes["0.weight"]), members=p.members._replace(params=turned))
    p = replace(p, axes=axes)
    assert list(axes) == ["0.weight"] and torch.equal(p.theta, on_turned.theta)
    torch.testing.assert_close(p.tree(p.theta), p.members.params)

    def slope(q):
        batch = (*q.data.take(torch.arange(60)), torch.tensor(0.5), torch.full_like(q.theta[0], 0.1), torch.tensor(2.0))
        return torch.func.grad_and_value(lambda theta: q.energy(theta, batch, {}, still=True)[0])(q.theta[1])

    torch.testing.assert_close(slope(p), slope(on_turned))


CURVES, ROWS = spectra(), torch.randn(60, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


@pytest.mark.parametrize(
    "make, inputs, found",
    [
        (lambda: nn.Linear(9, 1), CURVES, ["weight"]),
        (lambda: nn.Linear(9, 1), ROWS, []),
        (lambda: nn.Linear(9, 1), CURVES[:8], []),
        (
            lambda: nn.Sequential(nn.Linear(9, 2), nn.Flatten(), nn.Linear(6, 1)),
            spectra(180).reshape(60, 3, 9),
            ["0.weight"],
        ),
        (lambda: nn.Sequential(nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 1, 9), nn.Flatten()), CURVES, []),
        (lambda: nn.Sequential(nn.BatchNorm1d(9), nn.Linear(9, 1)), CURVES, []),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 1)), CURVES, []),
        (lambda: nn.Bilinear(9, 9, 1), (CURVES, ROWS), []),
    ],
)
def test_axes_are_those_of_weights_on_collinear_inputs_as_they_are(make, inputs, found):
    data = Data(inputs, ROWS[: len(inputs) if isinstance(inputs, torch.Tensor) else 60, :1], 60)
    networks = members_of(lambda: make().double(), 2, 0, "cpu").within(Scale.of(data, GAUSSIAN, make()))
    assert list(principal_axes(networks, data, Scale.of(data, GAUSSIAN, make()))) == found


@pytest.mark.slow
def test_curves_are_learnt_along_their_axes_that_are_not_along_their_columns(monkeypatch):
    """What the targets follow, a bend, has 1e-5 of the variance. Both calls take equal gradients."""
    at, draw = torch.linspace(0, 1, 40), torch.Generator().manual_seed(0)
    level, bend = torch.randn(400, 1, generator=draw), torch.randn(400, 1, generator=draw)
    x = level + 3e-3 * bend * (6.3 * at).sin() + 1e-5 * torch.randn(400, 40, generator=draw)
    y = bend.sin() + 0.1 * torch.randn(400, 1, generator=draw)
    scores = []
    for collinear in (1e4, math.inf):
        monkeypatch.setattr("bayesopt_chain.ensemble.members.COLLINEAR", collinear)
        fitted = bc.posterior_ensemble(
            lambda: nn.Sequential(nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 1)),
            (x[:300], y[:300]),
            GAUSSIAN,
            members=2,
            steps=600,
            progress=False,
        )
        scores.append(float(fitted.predict(x[300:]).log_prob(y[300:]).mean()))
    assert scores[0] > scores[1] + 0.3, scores


def test_noise_is_renewed_by_the_other_fold():
    p = problem(members=4)
    training = Training(p, Stages(None, {"members": 4}, torch.device("cpu"), None), (1,), None)
    training.look()
    training.cross(training.done.noise, [1, 3])
    drawn = p.folds_of([training_outputs(p, m) for m in range(4)], [1, 3])
    assert [training.done.priors[m] for m in (1, 3)] == [FAN_IN, FAN_IN]
    for m, other in ((1, 1), (3, 0)):
        torch.testing.assert_close(training.done.noise[m], SHARE * held.noise_of(p.likelihood, [drawn[other]]))
    assert float(training.done.noise[0]) == 0.02


def training_outputs(p, m):
    params = {k: x[m] for k, x in p.members.params.items()}
    return p.members.still(params, (p.data.take(p.folds[m])[0], None))


def test_networks_see_unit_moments_and_predict_in_the_targets_units():
    x = torch.tensor([[1e4, 0.0], [3e4, 1.0]]).repeat(10, 1)
    y = torch.tensor([[7.0], [9.0]]).repeat(10, 1)
    scale = Scale.of(Data(x, y, 20), GAUSSIAN, nn.Identity())
    seen = scale.into((x, y))
    torch.testing.assert_close(seen.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(2))
    torch.testing.assert_close(scale.out(torch.tensor([[-1.0], [1.0]])), torch.tensor([[7.0], [9.0]]))
    learned = Scale.of(Data(x, y, 20), bc.likelihoods.gaussian("learned"), nn.Identity())
    torch.testing.assert_close(learned.out(torch.tensor([[1.0, 0.3]])), torch.tensor([[9.0, 0.3]]))
    masks = torch.tensor([0.0, 1.0]).repeat(10)[:, None, None].expand(20, 2, 2)
    assert Scale.of(Data((masks, torch.ones(20, 3).long()), y, 20), GAUSSIAN, nn.Identity()).inputs == [None, None]


def test_columns_far_from_zero_are_seen_with_unit_deviation_and_noise_of_rounding_as_nothing():
    """Times in nanoseconds that are a minute apart, and a constant of which one number is rounded to the next."""
    x = 1.6e18 + 6e10 * torch.arange(20.0, dtype=torch.float64)[:, None]
    seen = Scale.of(Data(x, x, 20), GAUSSIAN, nn.Identity()).into((x, None))
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(1, dtype=torch.float64))
    x = torch.full((20, 1), 1e9)
    x[3] += 64
    assert float(Scale.of(Data(x, x, 20), GAUSSIAN, nn.Identity()).into((x, None)).abs().max()) < 1e-6


@pytest.mark.parametrize("lik", [bc.likelihoods.gaussian("learned"), bc.likelihoods.student_t(4.0, 2.0)])
def test_widened_noise_has_the_variance_times_the_factor(lik):
    drawn = torch.randn(5, 2)
    wider, moved = lik.widened(drawn, 3.0)
    torch.testing.assert_close(wider.variance(moved), 3.0 * lik.variance(drawn))
    torch.testing.assert_close(wider.mean(moved), lik.mean(drawn))


def test_a_likelihood_of_counts_has_no_width():
    assert not bc.likelihoods.poisson().has_width
    with pytest.raises(ValueError, match="no width"):
        bc.likelihoods.poisson().widened(torch.zeros(2), 2.0)


def test_data_are_grouped_whatever_the_strides_of_their_inputs():
    """An axis of length 1 of numpy's has any stride."""
    x = torch.tensor([0.0, 1.0, -0.0, 2.0]).as_strided((4, 1), (1, 0))
    assert Data(x, x, 4).groups().tolist() == [0, 1, 0, 2]
    assert Data(x[:1], x[:1], 1).groups().tolist() == [0]


# Chains behind the members: their law on a linear Gaussian model, verdict, budget, and what a call keeps of them

V0 = 0.3
PRECISION = torch.tensor([2.0, 0.5]).double()


def closed(p, x, y):
    """Mean and precision of weight and bias of the linear model, for noise of V0 of the targets' variance."""
    phi, v = torch.cat([x, torch.ones_like(x)], 1), V0 * p.likelihood.noise_variance
    A = phi.T @ phi / v + PRECISION.diag()
    return torch.linalg.solve(A, phi.T @ y / v)[:, 0], A


def chains_of(p, held_out=False):
    v0 = torch.full((p.count, 1), V0, dtype=torch.float64)
    return Chains(p, {"buffers": {}, "precision": PRECISION, "without": v0, "with": v0}, held_out)


@pytest.mark.slow
def test_draws_mix_to_the_closed_posterior_predictive():
    """256 independent chains; false alarm 1e-4 for the law of the draws, and 1e-4 for each of two predictive moments."""
    p, x_new = problem(members=256), torch.tensor([[1.5, 1.0]]).double()
    mean, A = closed(p, p.data.inputs, p.data.targets)
    theta = chains_of(p).run(p.theta, 400, 1)[-1]
    distance = torch.einsum("mi,ij,mj->", theta - mean, A, theta - mean)
    assert 5e-5 < chi2.cdf(float(distance), 2 * 256) < 1 - 5e-5
    noise = V0 * p.likelihood.noise_variance
    predicted = p.likelihood.scaled(1 / V0).mixture((theta @ x_new.T)[:, :, None])
    variance = float(x_new @ torch.linalg.solve(A, x_new.T))
    z = (float(predicted.mean) - float(x_new @ mean)) / (variance / 256) ** 0.5
    assert abs(z) < norm.isf(5e-5)
    assert 5e-5 < chi2.cdf(256 * float(predicted.variance - noise) / variance, 255) < 1 - 5e-5
    assert chains_of(p).curvature(p.theta) == pytest.approx(float(torch.linalg.eigvalsh(A)[-1]) / 40, rel=0.02)


def test_chains_at_temperature_zero_leave_members_that_are_at_their_mode():
    p = problem()
    found = chains_of(p, True)
    found.temperature = 0.0
    left = [torch.tensor([i for i in range(40) if i not in fold]) for fold in p.folds]
    mode = torch.stack([closed(p, *p.data.take(rows))[0] for rows in left])
    torch.testing.assert_close(found.run(mode, 60, 1)[-1], mode, rtol=0, atol=1e-10)


def judged(monkeypatch, start, noise, seconds=1e6):
    """The verdict on chains of 300 steps, behind members with these weights."""
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 300})
    p = problem()
    theta, level = torch.as_tensor(start).double().expand(4, 2), torch.full((4, 1), noise).double()
    ends = {"theta": theta, "buffers": {}, "precision": PRECISION, "without": level, "with": level}
    stages = Stages(None, {"members": 4}, torch.device("cpu"), None)
    training = SimpleNamespace(problem=p, stages=stages, followed=lambda: ends)
    training.done = SimpleNamespace(pilots=p.held_out(theta, {}), kept=range(4))
    return chained(training, seconds, 1.0)


def test_draws_are_kept_where_they_predict_better(monkeypatch):
    """Members that know nothing; the chains learn ``y = 2 x``, and agree."""
    found = judged(monkeypatch, [0.0, 0.0], 0.02)
    assert found["agree"] and found["passes"] == 600
    assert found["draws"].shape == (16, 4, 2) and found["draws"][..., 0].mean() == pytest.approx(2, abs=0.2)
    assert [f.shape for f in found["outputs"]] == [(16, 10, 1)] * 4


def test_chains_with_all_data_have_what_is_left_of_the_seconds(monkeypatch):
    clock = iter([0.0, 10.0])  # 300 steps took 10 s of 18
    monkeypatch.setattr(behind, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert judged(monkeypatch, [0.0, 0.0], 0.02, seconds=18.0)["passes"] == 300 + 240


@pytest.mark.parametrize(
    ("start", "noise", "why"), [([2.0, 0.0], 100.0, "standard errors"), ([math.nan, 0.0], 1.0, "diverged")]
)
def test_draws_are_not_kept_where_they_predict_worse_or_diverge(monkeypatch, start, noise, why):
    """Members at the truth, and chains that hardly see the data."""
    found = judged(monkeypatch, start, noise)
    assert "draws" not in found and why in found["said"] and found["passes"] == 300


def test_draws_of_more_outputs_than_are_held_are_not_made(monkeypatch):
    monkeypatch.setattr(behind, "MOST", 639)
    assert judged(monkeypatch, [0.0, 0.0], 0.02)["said"].startswith(
        "16 draws of the outputs on the folds are 640 numbers"
    )


@pytest.mark.parametrize(
    ("seconds", "each", "planned"),
    [
        (104.0, 0.05, {"steps": 448}),  # 4 s are gone; half of a thousand steps, less 4 curvatures of 13 gradients
        (50.0, 0.05, "50 s hold fewer than 200 steps, which take about 53 s"),
        (104.0, 0.005, "a pass over the data costs 20 steps of training, and at most 10 pay"),
    ],
)
def test_steps_are_those_that_fit_the_seconds(monkeypatch, seconds, each, planned):
    p = problem()
    found = chains_of(p)
    monkeypatch.setattr(behind, "timed", lambda step, count: 0.1)
    monkeypatch.setattr(behind, "time", SimpleNamespace(perf_counter=lambda: 12.0))
    wanted = planned if isinstance(planned, dict) else {"said": planned}
    assert behind._planned(found, p.theta, seconds, each, 8.0) == wanted


@pytest.mark.parametrize(
    ("budget", "chains", "steps", "seconds"),
    [
        ({"steps": 10_000, "minutes": None}, "auto", 4000, 78),
        ({"steps": None, "minutes": 2.0}, "auto", 4000, 63.2),
        ({"steps": 1000, "minutes": None}, "auto", 1000, 0),
        ({"steps": None, "minutes": 2.0}, 94.0, 1630, 94),
        ({"steps": 1000, "minutes": None}, 7.0, 1000, 7),
    ],
)
def test_chains_have_what_the_budget_leaves(monkeypatch, budget, chains, steps, seconds):
    """A step takes .01 s, 1.3 of them each step; 300 data are worth 4,000 steps of 32. Of minutes .04 are spared."""
    monkeypatch.setattr("bayesopt_chain.ensemble.call.time", SimpleNamespace(perf_counter=lambda: 5.0))
    p = SimpleNamespace(mine=range(4), count=4, batch_size=32, data=SimpleNamespace(size=300))
    training = SimpleNamespace(seconds=lambda: (0.01, 0.0), problem=p)
    found = _cost(training, **budget, lr=0.01, began=5.0, chains=chains)
    assert found["steps"] == steps and found["chains"] == pytest.approx(seconds, abs=0.02)
    assert found["seconds"] == pytest.approx(1.3 * 0.01 * steps + seconds, abs=0.02)
    assert ("for chains" in found["said"]) == (seconds > 0)


@pytest.mark.slow
def test_draws_stand_beside_the_networks_and_are_saved_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 120})
    slow = {"lr": 0.003, "chains": 500.0}
    plain, e = called(lr=0.003), called(tmp_path / "call", **slow)
    assert (
        e.report.kind.endswith("2 chains, 16 draws of each")
        or e.report.kind == "ensemble of 2 networks, 16 draws of each"
    )
    assert all(torch.equal(x[-1], plain.params[k][0]) for k, x in e.params.items())
    assert all(torch.equal(x[-1], plain.buffers[k][0]) for k, x in e.buffers.items())
    assert e.draws().params[next(iter(e.params))].shape[:2] == (17, 2)
    assert {"chains", "training"} <= e.report.passes.keys() and "T N = v0 / v" in str(e.report)
    assert e.report.held_out["ensemble"] > e.report.held_out["networks alone"]
    scores = e.predict(data()[0]).log_prob(data()[1])
    e.save(tmp_path / "e.safetensors")
    opened = bc.ensemble.Ensemble.open(tmp_path / "e.safetensors", make, bc.likelihoods.gaussian())
    assert torch.equal(opened.predict(data()[0]).log_prob(data()[1]), scores) and str(opened.report) == str(e.report)
    assert torch.equal(called(tmp_path / "call", **slow).predict(data()[0]).log_prob(data()[1]), scores)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as killing:
        killing.setattr(behind, "r_hat", kill)
        with pytest.raises(Killed):
            called(tmp_path / "killed", **slow)
    assert torch.equal(called(tmp_path / "killed", **slow).predict(data()[0]).log_prob(data()[1]), scores)


def test_ensembles_with_draws_are_copied_where_networks_keep_what_they_compute(monkeypatch):
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 110})
    x, y = data()[0].repeat(1, 2)[:, :3], data()[1]
    given = {"members": 2, "steps": 20, "lr": 0.003, "chains": 500.0, "progress": False}
    e = bc.posterior_ensemble(keeps, (x, y), bc.likelihoods.gaussian(), **given)
    assert "draws" in e.report.kind and torch.equal(copy.deepcopy(e).predict(x).mean, e.predict(x).mean)


@pytest.mark.slow
def test_classes_have_chains_too_and_seconds_that_hold_none_buy_an_ensemble():
    x, _ = data()
    cheap = {"members": 2, "steps": 100, "lr": 0.05, "progress": False}
    likelihood = bc.likelihoods.categorical()
    alone, e = (
        bc.posterior_ensemble(nn.Linear(2, 3), (x, (x[:, 0] > 0).long()), likelihood, chains=c, **cheap)
        for c in (None, 1e-3)
    )
    assert "an ensemble was the better buy" in str(e.report) and e.report.kind == "ensemble of 2 networks"
    assert torch.equal(e.predict(x).probabilities, alone.predict(x).probabilities)


@pytest.mark.slow
def test_chains_that_fail_keep_the_networks(monkeypatch):
    monkeypatch.setattr(Chains, "run", lambda *_: torch.linalg.cholesky(-torch.eye(2)))
    monkeypatch.setattr(behind, "_planned", lambda *_: {"steps": 120})
    with pytest.raises(bc.ensemble.EnsembleError, match="in chains: ") as caught:
        called(chains=500.0, lr=0.003)
    assert len(caught.value.ensemble.modules()) == 2


test_seconds_of_chains_that_there_are_not_are_refused_by_name = refused(
    [
        *(({"chains": c}, "chains") for c in (-1.0, 0, math.nan, math.inf, True, [1])),
        ({"chains": "often"}, "chains"),
        ({"chains": 60, "minutes": 1.0}, "all of minutes=1"),
        ({"chains": "auto", "mesh": SimpleNamespace(get_coordinate=list)}, "pass chains=None, or mesh=None"),
    ],
    error=(TypeError, ValueError),
    of=lambda arguments: bc.posterior_ensemble(make, data(), bc.likelihoods.gaussian(), **arguments),
)
