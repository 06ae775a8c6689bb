"""What a step refuses: what is not finite, and trees that no gradient can be taken in; each by call and leaf."""

import copy

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.testing import assert_bitwise_equal

NAN, INF = float("nan"), float("inf")


def loss(params, batch):
    return ((params["w"] - batch["x"]) ** 2).sum() + params["b"] ** 2


def setup():
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.zeros(3), "b": torch.ones(())}
    return tx, params, tx.init(params), {"x": torch.ones(3)}


@pytest.mark.parametrize("inplace", [False, True])
def test_a_bad_batch_is_named_with_call_and_leaf_and_nothing_is_written(inplace):
    tx, params, state, batch = setup()
    step = bc.make_step(loss, tx, inplace=inplace, check_finite=True)
    params, state, info = step(params, state, batch)
    assert info.finite.dtype == torch.bool and info.finite
    before = copy.deepcopy((params, state))
    with pytest.raises(FloatingPointError) as caught:
        step(params, state, {"x": torch.tensor([1.0, NAN, NAN])})
    words = str(caught.value)
    assert words.startswith("call 2 of this step: the loss is nan, the gradient['w'] has nan in 2 of 3 entries")
    assert "not finite before the step: batch['x'] has nan in 2 of 3 entries" in words and "skip_nonfinite" in words
    assert_bitwise_equal((params, state), before)


def test_what_was_bad_before_the_step_and_a_gradient_that_is_bad_alone_are_named():
    tx, params, state, batch = setup()
    infinite = {**params, "w": torch.tensor([0.0, INF, 0.0])}
    for function, given, words in (
        (loss, infinite, r"before the step: params\['w'\] has inf in 1 of 3 entries\."),
        (
            lambda p, b: p["w"].abs().sqrt().sum() + p["b"],
            params,
            r"step: the gradient\['w'\] has .*; params, state and batch are finite",
        ),
    ):
        with pytest.raises(FloatingPointError, match=words):
            bc.make_step(function, tx, check_finite=True)(given, state, batch)


def test_unasked_nothing_is_checked():
    tx, params, state, _ = setup()
    params, _, info = bc.make_step(loss, tx)(params, state, {"x": torch.full((3,), NAN)})
    assert info.finite == () and torch.isnan(params["w"]).all()


@pytest.mark.parametrize("steps", [1, 2])
def test_under_capture_it_is_a_flag(steps):
    tx, params, state, batch = setup()
    step = bc.make_step(loss, tx, check_finite=True)
    many = {"x": torch.ones(2, 3)} if steps == 2 else batch
    fast = bc.capture(step, params, state, many, steps=steps, batch_dim=0 if steps == 2 else None, backend="eager")
    assert fast(params, state, many)[2].finite.tolist() == ([True, True] if steps == 2 else True)
    bad = (
        {"x": torch.tensor([[1.0, 1.0, 1.0], [1.0, INF, 1.0]])} if steps == 2 else {"x": torch.tensor([1.0, INF, 1.0])}
    )
    assert fast(params, state, bad)[2].finite.tolist() == ([True, False] if steps == 2 else False)


def test_stacked_chains_have_a_flag_each():
    tx, params, _, _ = setup()
    chains = bc.parallel(bc.make_step(loss, tx, check_finite=True), 2, batch_dim=0)
    params = bc.stack([params, params])
    batch = {"x": torch.tensor([[1.0, 1.0, 1.0], [1.0, NAN, 1.0]])}
    _, _, info = chains(params, chains.init(tx, params), batch)
    assert info.finite.tolist() == [True, False]


def test_a_variational_step_is_checked_too_and_captured():
    tx, params = bc.vi.mean_field(bc.adam(0.05), temperature=0.1, n_samples=2), torch.zeros(3)
    step, state = bc.make_step(lambda p, b: ((p - b) ** 2).sum(), tx, check_finite=True), tx.init(torch.zeros(3))
    assert step(params, state, torch.ones(3))[2].finite
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        step(params, state, torch.full((3,), NAN))
    info = bc.capture(step, params, state, torch.ones(3), steps=2, backend="eager")(params, state, torch.ones(3))[2]
    assert info.finite.tolist() == [True, True] and info.negative_elbo.shape == (2,) and info.draws == ()


MODEL = nn.Linear(2, 1)


@pytest.mark.parametrize(
    "params, words",
    [
        ({"w": torch.ones(2), "lr": 0.1}, r"leaf \['lr'\] is 0.1 \(float\), not a tensor"),
        ({"w": torch.ones(2), "name": "x"}, r"leaf \['name'\] is 'x' \(str\)"),
        ({"w": torch.ones(2), "n": torch.arange(2)}, r"leaf \['n'\] is torch.int64, in which no gradient"),
        (
            nn.ParameterDict({"w": torch.ones(2)}),
            r"leaf \(the bare tensor\) is a module, ParameterDict.*dict\(params.items\(\)\)",
        ),
        (
            {"head": MODEL, "w": torch.ones(2)},
            r"leaf \['head'\] is a module, Linear.*dict\(module.named_parameters\(\)\)",
        ),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_leaves_that_no_gradient_can_be_taken_in_are_named(params, words, inplace):
    tx = bc.sgd(0.1)
    with pytest.raises(TypeError, match=f"params: {words}"):
        bc.make_step(lambda p, b: p["w"].sum(), tx, inplace=inplace)(params, tx.init({"w": torch.ones(2)}), ())


def embedding_loss(layer):
    return lambda params, batch: torch.func.functional_call(layer, params, (batch,)).square().sum()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "tx", [bc.sgd(0.1), bc.sghmc(0.1, temperature=0.1), bc.adam(0.1)], ids=["sgd", "sghmc", "adam"]
)
def test_sparse_gradients_are_refused_by_name(tx, inplace):
    layer = nn.Embedding(5, 2, sparse=True)
    params = {k: p.detach().clone() for k, p in layer.named_parameters()}
    state = tx.init(params)
    before = copy.deepcopy((params, state))
    with pytest.raises(ValueError, match=r"gradient of leaf \['weight'\] is sparse.*sparse=False"):
        bc.make_step(embedding_loss(layer), tx, inplace=inplace)(params, state, torch.tensor([1, 3]))
    assert_bitwise_equal((params, state), before)


def test_a_sparse_gradient_handed_to_a_sampler_is_refused():
    tx, params = bc.sgld(0.1, temperature=1.0), [torch.ones(3, 2)]
    g = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    with pytest.raises(ValueError, match="leaf 0 is sparse"):
        tx.update([g], tx.init(params), params=params)
