"""The temperature that held-out data choose: scores against exact ones, choices that are known, what is refused."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import _direction_laws as laws
from bayesopt_chain.diagnostics import _held_out as held_out
from bayesopt_chain.diagnostics._response import read
from tests.diagnostics.oracle import DOUBLE

N, D = 120, 20
QUICK = {"batch_sizes": (24,), "orders": ("reshuffled",), "momenta": (0.5, 0.9), "epochs": 400}


def loss(w, batch):
    return (batch[0] @ w - batch[1]).square().mean() / 2 + w.square().sum() / (2 * N)


def log_prob(w, batch):
    return -(batch[0] @ w - batch[1]).square() / 2 - 0.5 * math.log(2 * math.pi)


def regression(noise, seed=0):
    """Data whose targets have that standard deviation around a line, where the likelihood says 1; the mode without a fifth."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=g)
    y = x @ torch.randn(D, generator=g) + noise * torch.randn(N, generator=g)
    rows = torch.arange(4 * N // 5, N)
    kept = x[: rows[0]], y[: rows[0]]
    H = kept[0].T @ kept[0] / len(kept[1]) + torch.eye(D) / N
    return (x, y), torch.linalg.solve(H, kept[0].T @ kept[1] / len(kept[1])), rows


def suggested(noise, **changes):
    data, mode, rows = regression(noise)
    given = {"held_out": rows, "log_prob": log_prob, "params": mode, "data": data, "loss": loss, **QUICK, **changes}
    return bc.suggest_chain(partial(bc.sghmc, temperature=1 / N), **given), mode


def test_draws_pulled_towards_the_mode_are_those_of_the_colder_temperature():
    """Of a quadratic with exact draws: the score of c T is that of draws at c T from the same noise."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 3, generator=g, dtype=DOUBLE), torch.randn(30, generator=g, dtype=DOUBLE)
    mode, noise = torch.randn(3, generator=g, dtype=DOUBLE), torch.randn(6, 3, generator=g, dtype=DOUBLE)
    found = held_out.scores("s", log_prob, mode, list(mode + 0.5 * noise), (x, y), 30, (0.1, 1.0), 2.0)
    assert [row.factor for row in found] == [1.0, 0.1, 0.0] and found[-1].difference == 0.0
    for row in found:
        drawn = math.sqrt(2.0 * row.factor) * 0.5 * noise
        exact = torch.stack([log_prob(mode + z, (x, y)) for z in drawn]).logsumexp(0) - math.log(6)
        assert row.score == pytest.approx(float(exact.mean()), rel=1e-12)
        change = exact - log_prob(mode, (x, y))
        assert row.difference == pytest.approx(float(change.mean()), rel=1e-9, abs=1e-12)
        assert row.error == pytest.approx(float(change.std()) / 30**0.5, rel=1e-9, abs=1e-12)


def test_the_largest_temperature_that_predicts_as_well_as_the_mode_is_taken():
    row = held_out.HeldOutScore
    mode = row(0.0, -1.0, 0.0, 0.0)
    rows = [row(1.0, -1.2, -0.2, 0.1), row(0.3, -0.95, 0.05, 0.06), row(0.1, -0.9, 0.1, 0.01)]
    assert held_out.chosen([*rows, mode]).factor == 0.3
    assert held_out.chosen([rows[0], mode]).factor == 1.0  # nothing smaller was offered


def test_variances_widen_with_the_draws_that_an_epoch_makes():
    """``v(t)`` of the exact chain of one direction: from a point SGLD has ``1 - (1 - lr k)^(2 t)`` of its final variance."""
    lr, k = 0.001, 1.0
    response = read(bc.sgld(lr, temperature=1.0), torch.zeros(1, dtype=DOUBLE))
    y = torch.tensor([float(response.gains[0]) * k], dtype=DOUBLE)
    a_step = 1.0 / float(laws.forgetting(laws.directions(response.groups[0], y)))
    grown = [1.0 - (1.0 - lr * k) ** (2 * t) for t in (200, 700)]
    assert held_out.widening(a_step, 700, 200) == pytest.approx(grown[1] / grown[0], rel=2e-3)
    assert held_out.widening(a_step, None, 200) == pytest.approx(1.0 / grown[0], rel=2e-3)
    assert held_out.widening(a_step, 100, 200) == 1.0


def test_labels_cleaner_than_the_likelihood_says_make_it_colder():
    """Targets on a line and a likelihood of variance 1: draws at ``T = 1 / N`` predict worse than the mode, and it is said."""
    found, mode = suggested(0.0)
    assert found.temperature == pytest.approx(0.01 / N) and torch.equal(found.params, mode)
    assert found.scores[0].difference < -2 * found.scores[0].error
    assert "cold posterior" in str(found)
    # the chain has that temperature: its variances, relative to those at 1 / N
    response = read(found.tx, mode)
    assert max(group.temperature for group in response.groups) == pytest.approx(0.01 / N)


def test_targets_far_noisier_than_the_likelihood_says_keep_the_temperature():
    """20 weights from 96 data with a variance of 144 where the likelihood says 1: draws that are wider gain some nats."""
    found, mode = suggested(12.0)
    assert found.temperature == pytest.approx(1 / N) and not torch.equal(found.params, mode)
    assert found.scores[0].difference > 0 and "keeps its temperature" in str(found)


def test_all_data_are_sampled_and_a_tenth_of_the_run_pays_for_the_advice():
    data, mode, _ = regression(1.0)
    starts = [mode + 0.1, mode - 0.1]
    found, _ = suggested(1.0, starts=starts, spent=100.0)
    assert len(found.starts) == 2 and all(x is y for x, y in zip(found.starts, starts)) and found.params is starts[0]
    assert found.passes <= 0.1 * QUICK["epochs"]
    size = found.best.batch_size
    assert found.steps == int((400 - 100 - found.passes) * N / size / 2)
    batches = [data] if size == N else list(found.batches)
    assert sum(len(batch[1]) for batch in batches) == N  # held-out rows too
    full = next(row for row in found if row.order == "full")
    assert full.batch_size == N and "shared by 2 chains" in str(found)


def test_modules_are_starts_and_predict():
    data, mode, rows = regression(1.0)
    modules = [nn.Linear(D, 1, bias=False) for _ in range(2)]
    for module in modules:
        module.weight.data.copy_(mode)
    of_module = lambda m, b: (m(b[0])[:, 0] - b[1]).square().mean() / 2 + m.weight.square().sum() / (2 * N)  # noqa: E731
    predicts = lambda m, b: log_prob(m.weight[0], b)  # noqa: E731
    make = partial(bc.optim.SGHMC, temperature=1 / N)
    found = bc.suggest_chain(
        make, of_module, modules[0], data, starts=modules[1:], held_out=rows, log_prob=predicts, **QUICK
    )
    at_mode = log_prob(mode, tuple(t[rows] for t in data)).mean()
    assert found.scores[-1].score == pytest.approx(float(at_mode), rel=1e-5) and len(found.scores) == 6
    assert torch.equal(found.params["weight"][0], mode)


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"log_prob": None}, ValueError, "log_prob is missing"),
        ({"held_out": None}, ValueError, "held_out is missing"),
        ({"held_out": [3]}, ValueError, "held_out must be 2 to"),
        ({"held_out": [3, N]}, ValueError, "held_out must be 2 to"),
        ({"held_out": [-1, 3]}, ValueError, "held_out must be 2 to"),
        ({"held_out": [3, 3]}, ValueError, "each row once"),
        ({"held_out": [0.5, 1.0]}, TypeError, "row numbers"),
        ({"held_out": "rows"}, TypeError, "row numbers"),
        ({"log_prob": lambda w, b: loss(w, b)}, ValueError, "one log probability for each datum"),
        ({"log_prob": lambda w, b: torch.log(-b[1].square())}, ValueError, "finite"),
        ({"temperatures": (2.0,)}, ValueError, "temperatures"),
        ({"temperatures": ()}, ValueError, "temperatures"),
        ({"spent": 400.0}, ValueError, "spent"),
        ({"starts": [torch.ones(3)]}, ValueError, r"starts\[0\]"),
        ({"starts": ["there"]}, TypeError, r"starts\[0\]"),
        ({"epochs": 10.0}, ValueError, "epochs"),
    ],
)
def test_what_cannot_be_scored_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        suggested(1.0, **change)
