"""What an untidy user hands to the diagnostics is taken as it was meant, or refused by name."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchopt
from torch.nn.functional import cross_entropy

import bayesopt_chain as bc
from bayesopt_chain.diagnostics import HeatGuard, doctor, gradient_noise, heating, hessian_product, ksd
from tests.refusals import refused

torch.manual_seed(0)
X = torch.randn(300, 3)
Y = X @ torch.tensor([1.0, -1.0, 0.5]) + 0.1 * torch.randn(300)
W = torch.linalg.lstsq(X, Y[:, None]).solution[:, 0]
BATCHES = [(X[i : i + 50], Y[i : i + 50]) for i in range(0, 300, 50)]
TX = bc.sghmc(0.05, 0.9, temperature=1 / 300)


def loss(w, batch):
    x, y = batch
    return (x @ w - y).square().mean() / 2


def summed(w, batch):
    return loss(w, batch) * len(batch[0])


def test_one_batch_alone_is_all_data_and_not_rows_or_columns_of_them():
    for whole, of in (((X, Y), loss), ({"x": X, "y": Y}, lambda w, b: loss(w, (b["x"], b["y"])))):
        found: Any = hessian_product(of, W, whole)(torch.ones(3))
        assert torch.allclose(found, X.T @ X @ torch.ones(3) / 300, rtol=1e-4)
    rows: Any = hessian_product(lambda w, x: (x @ w).square().mean() / 2, W, X)(torch.ones(3))
    assert torch.allclose(rows, X.T @ X @ torch.ones(3) / 300, rtol=1e-4)  # not those of the first 100 rows


def heat(noise=None, **changes):
    """The heating of batches, at the exact curvature and noise unless another is given."""
    noise = gradient_noise(loss, W, BATCHES) if noise is None else noise
    return heating(
        TX, noise, **{"order": "reshuffled", "steps_per_epoch": 6, "curvature": (X.T @ X / 300).mv, **changes}
    )


def observed(of=None, batches=(X, Y), function=loss, **options):
    return bc.observe(function, W, batches, of, **{"steps": 80, "burn_in": 20, "chains": 2, "at_once": 1, **options})


def narrowing():
    """An observable that has three entries, and one from the fifth draw on."""
    count = iter(range(10**6))
    return lambda w: w[: 3 - 2 * (next(count) > 3)]


@dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor


def of_rows(w, batch):
    return loss(w, (batch.x, batch.y))


DATA = Rows(X, Y)
TUPLES = [*BATCHES, (X[:1], Y[:1] + 10)]  # the last one is smaller
DRAWS = bc.Draws.from_trees([W + 0.01 * torch.randn(3) for _ in range(40)])
NOTHING: Any = 1
WRONG: list[Any] = [
    (
        lambda: gradient_noise(loss, W, (X, Y)),
        ValueError,
        "at least two an epoch, got 1; a tensor, a dictionary or a tuple of tensors is one",
    ),
    (  # of labels that are all left out the mean is NaN, and its gradient zero
        lambda: gradient_noise(
            lambda w, b: cross_entropy(torch.outer(b[0] @ w, torch.ones(2)), b[1]),
            W,
            [(X[:20], torch.full((20,), label)) for label in (0, -100)],
        ),
        ValueError,
        "loss or its gradient is not finite at params, on 1 of 2 batches, the first of them number 2",
    ),
    (
        lambda: heat(gradient_noise(lambda w, batch: (0 * w).sum(), W, BATCHES), curvature=None),
        ValueError,
        "batches of one gradient, the curvature cannot be assumed",
    ),
    (
        lambda: heat(again=gradient_noise(lambda p, b: loss(p["w"], b), {"w": W}, BATCHES)),
        ValueError,
        "heating: what again is of has the tree",
    ),
    (lambda: doctor(DRAWS, torchopt.sgd(0.1), loss, (X, Y)), TypeError, "a chain of bayesopt_chain is asked for"),
    (
        lambda: doctor(DRAWS, of=lambda w: torch.complex(w, w)),
        TypeError,
        "of must return a tensor.*complex64.*view_as_real",
    ),
    (
        lambda: ksd({"a": torch.randn(5, 2), "b": torch.randn(4, 2)}, lambda p: p),
        ValueError,
        r"as many in every leaf, got \[4, 5\]",
    ),
    *(
        (lambda b=b: observed(batches=b, function=summed), ValueError, "observe: the loss is a sum over the batch")
        for b in ((X, Y), bc.epochs((X, Y), 50))
    ),
    (
        lambda: observed(kept=["other"]),
        ValueError,
        "observe: 'other' is no name for an observable here; covariances and kept are of",
    ),
    (lambda: observed({"w": narrowing()}), ValueError, "'w' has 1 entries at a draw, and 3 at the start"),
    (
        lambda: observed({"w": lambda w: w}).bif("w", "w", n=0),
        ValueError,
        "n must be a whole number, at least 1, got 0",
    ),
    (
        lambda: bc.diagnostics.susceptibility(NOTHING, observed({"w": lambda w: w}), "loss", "w"),
        TypeError,
        r"part must be a run of bc\.observe",
    ),
    (
        lambda: observed({1: lambda w: w}),
        TypeError,
        "of must be a dictionary of functions of the parameters, by names",
    ),
]


test_what_cannot_be_told_is_refused_by_name = refused(WRONG)


def test_batches_of_a_class_of_ones_own_are_counted_and_looked_at_as_tuples_are():
    """As those of a dataclass, or of transformers' mappings."""
    noises = [gradient_noise(f, W, b) for f, b in ((loss, TUPLES), (of_rows, [Rows(*batch) for batch in TUPLES]))]
    assert [(noise.batches, noise.trace) for noise in noises] == 2 * [(6, noises[0].trace)]
    found = [
        bc.suggest_lr(lambda lr: bc.sghmc(lr, temperature=1 / 300), *how)
        for how in ((loss, W, (X, Y)), (of_rows, W, DATA))
    ]
    assert str(found[0]) == str(found[1])
    assert doctor(DRAWS, TX, lambda w, b: of_rows(w, b) * len(b.x), [Rows(*batch) for batch in BATCHES]).kinds >= {
        "scale"
    }
    with pytest.raises(ValueError, match="observe: the loss is a sum over the batch"):
        observed(batches=DATA, function=lambda w, b: of_rows(w, b) * len(b.x))


def test_a_sum_over_all_data_may_be_observed_at_a_temperature_of_its_own():
    """Both are one target, so that they have the same learning coefficient."""
    options: dict[str, Any] = {"steps": 400, "burn_in": 100, "chains": 2}
    one = bc.observe(summed, W, (X, Y), temperature=1.0, strength=0.0, **options)
    other = bc.observe(loss, W, (X, Y), temperature=1 / 300, strength=0.0, **options)
    assert abs(float(one.llc().value - other.llc().value)) < 1.0


def test_a_smaller_last_batch_is_left_out():
    """The gradient of one datum has fifty times the covariance of the others."""
    noise, wanted = gradient_noise(loss, W, TUPLES), gradient_noise(loss, W, BATCHES)
    assert (noise.batches, noise.trace) == (6, wanted.trace)
    found: Any = hessian_product(loss, W, TUPLES)(torch.ones(3))
    assert torch.equal(found, hessian_product(loss, W, BATCHES)(torch.ones(3)))  # pyright: ignore
    unlike = [(X[: n + 2], Y[: n + 2]) for n in (5, 3, 9, 4)]  # whose sizes say nothing
    assert gradient_noise(loss, W, unlike).batches == 4


def test_a_guard_that_meets_nan_in_every_window_says_that_it_has_seen_nothing():
    guard, state = HeatGuard(), TX.init(W)
    with pytest.warns(UserWarning, match="was not looked at.*in each a gradient was NaN or infinite"):
        for i in range(600):
            guard.watch(TX, W, state, torch.full((3,), torch.nan) if i % 4 == 0 else torch.randn(3))
    assert guard.readings == []
