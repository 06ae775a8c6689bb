"""Files of trees: what is saved comes back, and what is foreign or damaged is refused by name."""

import os
from typing import NamedTuple

import optree
import pytest
import torch

import bayesopt_chain as bc


class Pair(NamedTuple):
    left: tuple
    right: torch.Tensor


def tree():
    shared = torch.arange(6.0)
    return {
        "transposed": shared.view(2, 3).t(),
        "same storage": shared,
        "pair": Pair((torch.tensor(3), torch.zeros(0)), torch.ones(2, dtype=torch.bfloat16)),
        "flag": torch.tensor(True),
        "number": 3,
        "nothing": None,
        "text": "a",
    }


def equal(a, b):
    return optree.tree_structure(a, none_is_leaf=True) == optree.tree_structure(b, none_is_leaf=True) and all(
        torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y
        for x, y in zip(optree.tree_leaves(a, none_is_leaf=True), optree.tree_leaves(b, none_is_leaf=True))
    )


def test_a_tree_comes_back_as_it_was(tmp_path):
    bc.save(tmp_path / "tree", tree())
    assert equal(bc.load(tmp_path / "tree", like=tree()), tree())


def test_a_sampler_resumes_bit_for_bit_in_the_file_and_another_chain_is_refused(tmp_path):
    tx, params = bc.sghmc(0.1, temperature=0.1), {"w": torch.ones(3)}
    step = bc.make_step(lambda p, batch: (p["w"] ** 2).sum(), tx)
    state = tx.init(params)
    params, state, _ = step(params, state, None)
    bc.save(tmp_path / "run", (params, state), tx=tx)
    params, state, _ = step(params, state, None)
    again, its_state = bc.load(tmp_path / "run", like=({"w": torch.zeros(3)}, tx.init(params)), tx=tx)
    again, its_state, _ = step(again, its_state, None)
    assert equal((again, its_state), (params, state))
    with pytest.raises(ValueError, match="another chain"):
        bc.load(tmp_path / "run", like=(params, state), tx=bc.sghmc(0.2, temperature=0.1))


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t | {"flag": torch.tensor(1.0)}, "flag is torch.bool .*expected torch.float32"),
        (lambda t: t | {"transposed": torch.zeros(2, 2)}, r"transposed is torch.float32 \(3, 2\), expected .*\(2, 2\)"),
        (lambda t: t | {"new": torch.ones(1)}, "new is missing"),
        (
            lambda t: t | {"pair": Pair((torch.tensor(3), torch.ones(1)), t["pair"].right)},
            "pair/left/1 is torch.float32",
        ),
        (lambda t: {k: v for k, v in t.items() if k != "number"}, "number is not expected"),
    ],
)
def test_a_tree_of_another_kind_is_refused_by_leaf(tmp_path, change, says):
    bc.save(tmp_path / "tree", tree())
    with pytest.raises(ValueError, match=says):
        bc.load(tmp_path / "tree", like=change(tree()))


def test_a_file_of_another_library_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(ValueError, match="not written by bayesopt_chain"):
        bc.load(tmp_path / "x", like={"x": torch.ones(1)})
    with pytest.raises(FileNotFoundError, match="no file"):
        bc.load(tmp_path / "none", like=())


def test_what_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(TypeError, match="leaf a/1 is object"):
        bc.save(tmp_path / "x", {"a": [torch.ones(1), object()]})
    with pytest.raises(ValueError, match="two leaves are named a/1"):
        bc.save(tmp_path / "x", {"a": [torch.ones(1), torch.ones(1)], "a/1": torch.ones(1)})
    assert not list(tmp_path.iterdir())
    for leaf in (torch.ones(2).to_sparse(), torch.ones(2, device="meta"), torch.nested.nested_tensor([torch.ones(1)])):
        with pytest.raises(TypeError, match=r"save: leaf b.*cannot be written; make it dense"):
            bc.save(tmp_path / "x", {"b": leaf})


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "tree"
    bc.save(file, tree())
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device; what stood there is untouched"):
        bc.save(file, {"x": torch.ones(1)})
    assert file.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["tree"]
