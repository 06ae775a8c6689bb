"""Batches of any kind, anywhere a batch is taken."""

from dataclasses import dataclass, field

import optree
import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain import batches
from tests.loop.beside import same

D = torch.float64


@dataclass(frozen=True)
class Points:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "points"


@dataclass
class Nested:
    points: Points
    weights: dict = field(default_factory=dict)


def encoding():
    transformers = pytest.importorskip("transformers")
    return lambda x, y: transformers.BatchEncoding({"x": x, "y": y})


KINDS = {
    "tuple": lambda: lambda x, y: (x, y),
    "dictionary": lambda: lambda x, y: {"x": x, "y": y},
    "dataclass": lambda: Points,
    "nested": lambda: lambda x, y: Nested(Points(x, y), {"w": torch.ones(len(x), dtype=D)}),
    "BatchEncoding": encoding,
}


def inputs(batch):
    if isinstance(batch, Nested):
        return batch.points.x
    return batch[0] if isinstance(batch, tuple) else batch["x"] if hasattr(batch, "keys") else batch.x


def targets(batch):
    if isinstance(batch, Nested):
        return batch.points.y
    return batch[1] if isinstance(batch, tuple) else batch["y"] if hasattr(batch, "keys") else batch.y


def forward(params, batch):
    return inputs(batch) @ params["w"]


def loss(params, batch):
    return (forward(params, batch) - targets(batch)).square().mean()


X, Y = torch.randn(12, 3, dtype=D), torch.randn(12, 1, dtype=D)
PARAMS = {"w": torch.randn(3, 1, dtype=D)}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]()


def test_flatten_and_unflatten_give_a_batch_of_the_same_class(kind):
    batch = kind(X, Y)
    leaves, structure = batches.flatten(batch)
    again = structure.unflatten(leaves)
    assert type(again) is type(batch) and torch.equal(inputs(again), X) and torch.equal(targets(again), Y)
    assert batches.flatten(kind(X + 1, Y))[1] == structure
    assert optree.tree_leaves(Points(X, Y)) != [X, Y]  # only in a namespace of their own


def test_every_loop_takes_it_alike(kind):
    tx, want = bc.sghmc(0.05, temperature=0.01), (X, Y)
    step, state = bc.make_step(loss, tx), tx.init(PARAMS)
    expected = step(PARAMS, state, want)
    assert same(step(PARAMS, state, kind(X, Y))[:2], expected[:2])
    parts = bc.make_step(loss, tx, microbatches=4)(PARAMS, state, kind(X, Y))
    torch.testing.assert_close(parts[0], expected[0], rtol=1e-12, atol=1e-14)
    params = bc.stack([PARAMS, PARAMS])
    data = torch.stack([X, X + 1]), torch.stack([Y, Y])
    for loop in (False, True):
        chains = bc.parallel(step, 2, batch_dim=0, loop=loop)
        torch.manual_seed(0)
        many = chains.init(tx, params)
        if not isinstance(kind(X, Y), Nested):  # whose weights are not stacked here
            torch.testing.assert_close(chains(params, many, kind(*data))[0], chains(params, many, data)[0])
    fast = bc.capture(step, PARAMS, state, kind(X, Y), backend="eager")
    assert same(fast(PARAMS, state, kind(X, Y))[:2], expected[:2])
    with pytest.raises(ValueError, match="capture: batch"):
        fast(PARAMS, state, kind(X[:5], Y[:5]))
    draws = bc.sample(step, PARAMS, state, kind(X, Y), steps=3)
    assert same(draws.params, bc.sample(step, PARAMS, state, want, steps=3).params)
    assert torch.equal(draws.predict(forward, [kind(X, Y)]), draws.predict(forward, [want]))
    made = [] if isinstance(kind(X, Y), (Points, Nested)) else list(bc.epochs(kind(X, Y), 4, seed=1))  # tensors only
    assert all(same(inputs(a), inputs(b)) for a, b in zip(made, bc.epochs(want, 4, seed=1)))


def test_epochs_takes_a_dataclass_of_tensors():
    data = Points(X, Y, torch.arange(12))
    for a, b in zip(bc.epochs(data, 4, seed=1), bc.epochs((X, Y), 4, seed=1), strict=True):
        assert isinstance(a, Points) and torch.equal(a.x, b[0]) and torch.equal(a.y, b[1])
        assert torch.equal(X[a.name], a.x)


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_curvature_takes_inputs_and_targets_by_key_or_function(kind, structure):
    batch, likelihood = kind(X, Y), bc.likelihoods.gaussian()
    want = bc.curvature.ggn(forward, likelihood, structure)(PARAMS, (X, Y)).to_dense()
    ways = [targets] if isinstance(batch, (tuple, Nested)) else [targets, "y"]
    for way in ways:
        for make in (bc.curvature.ggn, bc.curvature.empirical_fisher, bc.curvature.hessian, bc.curvature.fisher):
            got = make(forward, likelihood, structure, targets=way)(PARAMS, batch).to_dense()
            if make in (bc.curvature.ggn, bc.curvature.hessian):
                torch.testing.assert_close(got, want)
            assert got.shape == want.shape


def test_a_module_takes_its_inputs_by_key():
    module = nn.Linear(3, 1).double()
    for batch in ({"x": X, "y": Y, "id": 3}, Points(X, Y)):
        forward, params, _ = bc.make_functional(module, inputs="x")
        assert torch.equal(forward(params, batch), module(X))
    ggn = bc.curvature.ggn
    for call, batch, words in (
        (bc.make_functional(module, inputs="z").forward, {"x": X}, r"has no 'z'; it has \['x'\]"),
        (ggn(forward, bc.likelihoods.gaussian(), targets="z"), Points(X, Y), "a Points, has no 'z'"),
        (ggn(forward, bc.likelihoods.gaussian()), {"x": X}, "targets=, the key"),
    ):
        with pytest.raises(ValueError, match=words):
            call(params, batch)
