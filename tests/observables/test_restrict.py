"""A loss of some entries alone: its chain is that of the free entries, and no other entry has gradient, noise or state."""

import pytest
import torch

import bayesopt_chain as bc

A = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)


def loss(params, batch):
    return (A * (params["w"].reshape(-1) - 1.0) ** 2).sum() / 2 + params["block.b"].square().sum()


PARAMS = {"w": torch.zeros(2, 3, dtype=torch.float64), "block.b": torch.ones(4, dtype=torch.float64)}
MASK = torch.tensor([[True, False, False], [False, True, True]])


def test_loss_and_gradient_are_those_of_the_free_entries():
    part, free, fill = bc.restrict(loss, PARAMS, {"w": MASK, "block": None})
    assert {name: tuple(x.shape) for name, x in free.items()} == {"w": (3,), "block.b": (4,)}
    moved = {"w": torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64), "block.b": 2 * free["block.b"]}
    want = {"w": torch.tensor([[5.0, 0, 0], [0, 6.0, 7.0]], dtype=torch.float64), "block.b": 2 * PARAMS["block.b"]}
    assert all(torch.equal(fill(moved)[name], want[name]) for name in want) and part(moved, None) == loss(want, None)
    gradient = torch.func.grad(loss)(want, None)
    found = torch.func.grad(part)(moved, None)
    assert torch.equal(found["w"], gradient["w"][MASK]) and torch.equal(found["block.b"], gradient["block.b"])


@pytest.mark.parametrize("run", ["plain", "parallel", "captured"])
def test_a_chain_of_free_entries_is_the_chain_of_a_smaller_model(run):
    """Bit for bit, alone, of several at once and captured: neither noise nor state knows of the entries that stay."""
    part, free, fill = bc.restrict(loss, PARAMS, {"w": MASK})

    curvature, stays = A[MASK.reshape(-1)], A[~MASK.reshape(-1)].sum() / 2 + 4.0

    def small(params, batch):
        return (curvature * (params["w"] - 1.0) ** 2).sum() / 2 + stays

    def end(of):
        tx = bc.sghmc(0.1, temperature=0.1, generator=torch.Generator().manual_seed(3))
        step, params = bc.make_step(of, tx), free
        if run == "parallel":
            step, params = bc.parallel(step, 2), bc.stack([free, free])
            state = step.init(bc.sghmc(0.1, temperature=0.1), params, seed=1)
        else:
            state = tx.init(params)
        assert max(x.numel() for x in torch.utils._pytree.tree_leaves(state)) == 3 * (1 + (run == "parallel"))
        if run == "captured":
            step = bc.capture(step, params, state, None, backend="eager")
        for _ in range(20):
            params, state, _ = step(params, state, None)
        return params["w"].clone()

    assert torch.allclose(end(part), end(small), rtol=0, atol=1e-15)
    if run == "plain":
        assert torch.equal(fill({"w": end(part)})["w"][~MASK], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("where", "error", "said"),
    [
        ({"v": None}, ValueError, "no parameter is called 'v'.*there are block.b, w"),
        ({"blo": None}, ValueError, "nor begins with it and a dot"),
        ({"w": MASK[0]}, ValueError, r"mask of w has the shape \[3\], and the parameter \[2, 3\]"),
        ({"w": torch.zeros(2, 3, dtype=torch.bool)}, ValueError, "no entry free"),
        ({"w": MASK.float()}, ValueError, "masks of dtype bool"),
        (MASK, TypeError, "where must be a dictionary"),
    ],
)
def test_what_frees_nothing_is_refused_by_name(where, error, said):
    with pytest.raises(error, match=said):
        bc.restrict(loss, PARAMS, where)


def test_the_longer_of_two_names_holds_and_a_tensor_is_called_parameters():
    tree = {"a": {"w": torch.zeros(2), "v": torch.zeros(3)}}
    _, free, _ = bc.restrict(lambda p, b: 0.0, tree, {"a": None, "a.v": torch.tensor([True, False, False])})
    assert {name: len(x) for name, x in free.items()} == {"a.v": 1, "a.w": 2}
    part, free, fill = bc.restrict(lambda p, b: p.sum(), torch.ones(2), {"parameters": torch.tensor([True, False])})
    assert part({"parameters": torch.tensor([4.0])}, None) == 5.0 and fill(free).tolist() == [1.0, 1.0]
