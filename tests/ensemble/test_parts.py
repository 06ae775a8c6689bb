"""The arithmetic of the stages against closed forms."""

import math

import pytest
import torch

import bayesopt_chain as bc
from bayesopt_chain.ensemble.curvature import top
from bayesopt_chain.ensemble.data import Data
from bayesopt_chain.ensemble.held import Held, log_scores
from bayesopt_chain.ensemble.ladder import guarded
from bayesopt_chain.ensemble.members import members_of
from bayesopt_chain.ensemble.plan import NOISE, training_likelihood
from bayesopt_chain.ensemble.prior import strengthen
from bayesopt_chain.ensemble.problem import Level, Problem
from bayesopt_chain.ensemble.progress import Progress
from bayesopt_chain.ensemble.scale import best, for_all_members, grid_for, squared_error
from bayesopt_chain.ensemble.stack import stack_weights
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.ensemble.stop import ONE, stop


def problem(members=4, n=40, likelihood=None, seed=0):
    """A linear model with one input; folds of ten data."""
    x = torch.randn(n, 1, generator=torch.Generator().manual_seed(seed))
    y = 2 * x + 0.3 * torch.randn(n, 1, generator=torch.Generator().manual_seed(seed + 1))
    likelihood = training_likelihood(bc.likelihoods.gaussian(), y) if likelihood is None else likelihood
    folds = [torch.arange(10) if i < members / 2 else torch.arange(10, 20) for i in range(members)]
    networks = members_of(lambda: torch.nn.Linear(1, 1), members, 0, "cpu")
    return Problem(Data(x, y, n), likelihood, networks, members, 8, 1.0, folds, 0, Progress(0, False))


def test_weights_of_levels_that_never_predict_the_same_targets_are_their_shares():
    """Each target has a density under one level alone: ``w_j = (n_j + 2 [j = 0]) / (n + 2)``."""
    belongs = torch.tensor([0] * 5 + [1] * 3 + [2] * 10)
    scores = torch.full((3, 18), -200.0)
    scores[belongs, torch.arange(18)] = -1.0
    wanted = torch.tensor([7.0, 3.0, 10.0], dtype=torch.float64) / 20
    torch.testing.assert_close(stack_weights(scores), wanted, rtol=0, atol=1e-9)


def test_a_target_of_weight_two_stacks_as_two_targets():
    scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    twice = torch.cat([scores, scores[:, :2]], 1)
    counts = torch.tensor([2.0, 2, 1, 1, 1, 1])
    torch.testing.assert_close(stack_weights(scores, counts), stack_weights(twice))


def test_every_iteration_of_the_stacking_raises_its_objective():
    scores = torch.randn(3, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w, before = torch.full((3,), 1 / 3, dtype=torch.float64), -math.inf
    from bayesopt_chain.ensemble import stack

    rounds, stack.ITERATIONS = stack.ITERATIONS, 1
    try:
        for _ in range(20):
            objective = float((scores + w.log()[:, None]).logsumexp(0).sum() + 2 * w[0].log())
            assert objective >= before - 1e-9
            before, w = objective, stack_weights(scores, start=w)
    finally:
        stack.ITERATIONS = rounds


def test_the_noise_that_scores_best_is_the_mean_squared_error_to_the_grid():
    p = problem(members=2)
    held = Held.of(p)
    outputs = [fold[1].double()[None] + 0.5 for fold, _ in held.folds]  # every error is a half
    v = float(p.likelihood.variance_of_noise)
    found = best(held, [outputs], ONE)
    spacing = float(grid_for(held)[1] / grid_for(held)[0])
    assert 0.25 / spacing <= found * v <= 0.25 * spacing


def test_the_noise_of_all_members_is_extrapolated_from_that_of_pairs():
    """``MSE_m = a + b / m`` by construction: members err by +-d around an error e."""
    p = problem(members=8)
    held = Held.of(p)
    v = float(p.likelihood.variance_of_noise)
    e, d = 0.5, 0.3
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None, None]
    outputs = [fold[1][None] + e + d * signs for fold, _ in held.folds]
    # MSE_4 = e^2, MSE_1 = e^2 + d^2, so b = (4 / 3) d^2
    wanted = 3.0 - 4 / 3 * d**2 * (1 / 4 - 1 / 8) / v
    assert for_all_members(held, outputs, 3.0) == pytest.approx(wanted, rel=1e-5)


def test_a_held_out_score_is_the_mean_density_of_the_members_that_left_the_datum_out():
    p = problem(members=4)
    held = Held.of(p)
    level = [torch.randn(2, 10, 1), torch.randn(2, 10, 1)]
    got = held.score([level], ONE, 1.5)
    v = 1.5 * float(p.likelihood.variance_of_noise)
    for k, (fold, who) in enumerate(held.folds):
        assert who == [2 * k, 2 * k + 1]
        density = torch.distributions.Normal(level[k].double(), v**0.5).log_prob(fold[1].double())
        wanted = density.clamp_min(-50).exp().mean(0).log()[:, 0]
        torch.testing.assert_close(got[10 * k : 10 * k + 10], wanted, rtol=1e-6, atol=1e-6)


def test_a_surprise_costs_at_most_fifty_nats():
    scores = log_scores(bc.likelihoods.gaussian(1e-6), torch.zeros(1, 2, 1), torch.tensor([[0.0], [9.0]]), 1.0)
    assert scores[0, 1, 0] == -50


def test_the_noise_to_train_with_has_the_units_of_each_output():
    y = torch.randn(500, 2) * torch.tensor([1.0, 100.0])
    lik = training_likelihood(bc.likelihoods.gaussian(), y)
    torch.testing.assert_close(lik.variance_of_noise, NOISE * y.var(0, correction=0))


def test_the_power_method_finds_the_curvature_of_a_linear_model():
    """``H = X^T X / (n v) + prior / n`` for inputs with a column of ones."""
    p = problem(members=2)
    params = p.members.params
    k, _, cost = top(p, params, {}, p.likelihood, None, held_out=False, products=40, seed=0)
    x = torch.cat([p.data.inputs, torch.ones(40, 1)], 1)
    H = x.T @ x / (40 * p.likelihood.variance_of_noise) + torch.eye(2) / 40
    torch.testing.assert_close(k, torch.linalg.eigvalsh(H)[-1].expand(2), rtol=1e-4, atol=0)
    assert cost == 80  # forty products, two gradients each


def test_differences_of_gradients_do_where_there_are_no_second_derivatives():
    from dataclasses import replace

    p = problem(members=2)
    exact, _, _ = top(p, p.members.params, {}, p.likelihood, None, held_out=True, products=10, seed=0)
    apart = replace(p, loop=True)
    near, _, _ = top(apart, p.members.params, {}, p.likelihood, None, held_out=True, products=10, seed=0)
    torch.testing.assert_close(near, exact, rtol=1e-2, atol=0)


def test_the_guard_halves_the_rates_of_the_members_that_lie_too_high():
    tried = []

    class Run:
        complete, steps = True, torch.tensor([10])

        def __init__(self, loss):
            self.loss = loss

        def __len__(self):
            return 1

    def run(rates, number):
        tried.append(rates.tolist())
        return Run(torch.where(rates > 0.3, 9.0, 0.0)[None])  # too high above a rate of 0.3

    found = guarded(run, torch.tensor([1.0, 0.2]), torch.ones(2), torch.tensor([1.0, 1.0]), 10)
    assert tried == [[1.0, pytest.approx(0.2)], [0.5, pytest.approx(0.2)], [0.25, pytest.approx(0.2)]]
    assert found.kept and found.steps == 30 and found.halved.tolist() == [0.25, 1.0]


def test_a_member_without_its_fold_sees_all_other_rows():
    p = problem(members=2)
    data, axis, n = p.batches(True, full=True)
    assert axis == 0 and n == 30
    torch.testing.assert_close(data[0][1], torch.cat([p.data.inputs[:10], p.data.inputs[20:]]))


@pytest.mark.parametrize("lik", [bc.likelihoods.gaussian("learned"), bc.likelihoods.student_t(4.0, 2.0)])
def test_widened_noise_has_the_variance_times_the_factor(lik):
    outputs = torch.randn(5, 2)
    wider, moved = lik.widened(outputs, 3.0)
    torch.testing.assert_close(wider.variance(moved), 3.0 * lik.variance(outputs))
    torch.testing.assert_close(wider.mean(moved), lik.mean(outputs))


def test_a_likelihood_of_counts_has_no_width():
    assert not bc.likelihoods.poisson().has_width
    with pytest.raises(ValueError, match="no width"):
        bc.likelihoods.poisson().widened(torch.zeros(2), 2.0)


def test_the_mixture_of_a_gaussian_scores_as_the_average_density():
    outputs, log_weights = torch.randn(3, 4, 1), torch.tensor([0.2, 0.3, 0.5]).log()
    y = torch.randn(4, 1)
    mixed = bc.likelihoods.gaussian(0.7).mixture(outputs, log_weights)
    each = torch.distributions.Normal(outputs, 0.7**0.5).log_prob(y)
    torch.testing.assert_close(mixed.log_prob(y), (each + log_weights[:, None, None]).logsumexp(0))


def test_the_squared_error_of_missing_targets_is_that_of_the_others():
    lik = bc.likelihoods.weighted(bc.likelihoods.gaussian(0.25))
    y = torch.tensor([[1.0], [float("nan")], [3.0]])
    assert float(squared_error(lik, torch.zeros(3, 1), (y, y.isfinite()))) == pytest.approx((1 + 9) / 2 / 0.25)


def noisy(signal):
    """Forty data of twenty inputs; the target is the first input, or noise."""
    x = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] if signal else torch.randn(40, 1, generator=torch.Generator().manual_seed(1))
    likelihood = training_likelihood(bc.likelihoods.gaussian(), y)
    folds = [torch.arange(10)] * 2 + [torch.arange(10, 20)] * 2
    networks = members_of(lambda: torch.nn.Linear(20, 1), 4, 0, "cpu")
    return Problem(Data(x, y, 40), likelihood, networks, 4, 40, 1.0, folds, 0, Progress(0, False))


def ridge(p, precision, held_out=True):
    """The modes of all members in closed form: ``(X^T X / v + precision)^-1 X^T y / v``, with a bias."""
    v, weights, biases = float(p.likelihood.variance_of_noise), [], []
    for rows in p.rows(held_out) or [None] * p.count:
        x, y = p.data.take(rows)
        x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
        w = torch.linalg.solve(x.T @ x / v + precision * torch.eye(21), x.T @ y.double() / v)
        weights.append(w[:20].T.float())
        biases.append(w[20].float())
    return Level({"weight": torch.stack(weights)[None], "bias": torch.stack(biases)[None]}, {}, torch.zeros(1, 4))


@pytest.mark.slow
def test_a_prior_is_strengthened_where_targets_are_noise_and_left_where_they_are_not():
    for signal in (False, True):
        p = noisy(signal)
        held, start = Held.of(p), ridge(p, 1.0)
        found = strengthen(p, held, start, start, lr=0.05, steps=400, stages=Stages(None, {}, torch.device("cpu")))
        assert found["moved"] != signal and (found["precision"] == 1.0) == signal
        scores = [score for _, score in found["tried"]]
        if not signal:
            assert found["precision"] >= 25 and max(scores) > scores[0]
            # the cycle arrives at the mode of the precision that it ends with
            mode = ridge(p, found["precision"]).params["weight"][0]
            torch.testing.assert_close(found["params"]["weight"], mode, rtol=0, atol=0.01)


def test_a_prior_that_is_no_better_than_an_early_stop_is_left():
    p = noisy(False)
    held = Held.of(p)
    early = ridge(p, 1.0, held_out=False)  # knows the folds: no prior is as good
    found = strengthen(p, held, ridge(p, 1.0), early, lr=0.05, steps=200, stages=Stages(None, {}, torch.device("cpu")))
    assert len(found["tried"]) > 2 and not found["moved"]


@pytest.mark.parametrize("errors, wanted", [(2.7, 2), (3.3, 1), (-2.0, 2)])
def test_an_earlier_checkpoint_is_taken_if_it_is_better_by_three_standard_errors(errors, wanted):
    difference = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    difference = (difference - difference.mean()) / difference.std() / 50**0.5 + errors / 50  # of mean errors / 50
    last = torch.randn(50, generator=torch.Generator().manual_seed(1)).double()
    tables = [last - 1.0, last + difference, last]

    class Scored:
        problem = type("Problem", (), {"likelihood": bc.likelihoods.categorical()})
        outputs = staticmethod(lambda i: i)
        score = staticmethod(lambda outputs, weights, factor: tables[outputs[0]])
        cost = staticmethod(lambda n: 0.0)

    found = stop(Scored(), type("Checkpoints", (), {"at": staticmethod(lambda i: i)}), [10, 20, 30])
    assert found["checkpoint"] == wanted and found["early"] is (wanted == 1)
    if errors > 0:
        assert found["z"] == pytest.approx(errors, rel=1e-6)
