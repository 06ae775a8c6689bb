"""A shard's noise is that part of the whole leaf's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bayesopt_chain.random.philox import in_tensors, parts_of_leaves
from tests.random.draws import cut, leaf, leaf_in_tensors, parts

KEY, STEP = torch.tensor(7692698082559361259), torch.tensor(3 + (5 << 33))


@st.composite
def some_runs(draw, size=1500):
    edges = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=12)))
    return tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2]))


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(runs=some_runs())
def test_a_piece_of_a_draw_is_cut_from_the_whole_draw_bit_for_bit(dtype, kind, runs):
    whole = leaf(KEY, STEP, 1500, 77, dtype, kind)
    (mine,) = parts(KEY, STEP, [runs], [77], dtype, kind=kind)
    assert mine.dtype == dtype and torch.equal(mine, cut(whole, runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(runs=some_runs())
def test_tensor_operations_and_the_kernel_draw_the_same_pieces(dtype, runs):
    slow = in_tensors(KEY, STEP, parts_of_leaves((runs,), (9,)), dtype)
    assert torch.equal(slow, cut(leaf_in_tensors(KEY, STEP, 1500, 9, dtype), runs))
    (fast,) = parts(KEY, STEP, [runs], [9], dtype)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_several_leaves_and_empty_shards_keep_their_places(kind):
    pieces = [((0, 3), (10, 2)), (), ((64, 65),), ()]
    out = parts(KEY, STEP, pieces, [1, 2, 3, 4], torch.float32, kind=kind)
    assert [len(x) for x in out] == [5, 0, 65, 0]
    for x, runs, draw in zip(out, pieces, [1, 2, 3, 4]):
        if runs:
            assert torch.equal(x, parts(KEY, STEP, [runs], [draw], torch.float32, kind=kind)[0])


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_stacked_chains_draw_the_pieces_that_each_draws_alone(kind):
    keys, steps, runs = torch.tensor([4, -7, 2**61]), torch.tensor([0, 1, 2**40]), ((3, 70), (300, 9))
    draw = lambda k, s: parts(k, s, [runs], [9], torch.float32, kind=kind)[0]  # noqa: E731
    alone = torch.stack([draw(k, s) for k, s in zip(keys, steps)])
    assert torch.equal(torch.vmap(draw)(keys, steps), alone)
    assert torch.equal(draw(keys, steps), alone)


def test_the_last_elements_that_the_counter_numbers_have_noise_of_their_own():
    last = 2**34
    (x,) = parts(KEY, STEP, [((0, 64), (last - 64, 64))], [9], torch.float32)
    assert len(set(x.tolist())) > 120
    slow = in_tensors(KEY, STEP, parts_of_leaves((((0, 64), (last - 64, 64)),), (9,)), torch.float32)
    torch.testing.assert_close(x, slow, rtol=0, atol=1e-6)


REFUSED = [
    (
        lambda: parts(KEY, STEP, [((2**34, 1),)], [9], torch.float32),
        r"pieces: a leaf has 17179869185 elements, .* 2\^34",
    ),
    (lambda: leaf(KEY, STEP, 2**34 + 1, 1, torch.float32), "Split the leaf"),
    (lambda: leaf(KEY, STEP, 2**34 + 1, 1, torch.float32, "uniform"), "Split the leaf"),
    (lambda: leaf_in_tensors(KEY, STEP, 2**34 + 1, 1, torch.float32), "Split the leaf"),
    *(
        (lambda runs=runs: parts(KEY, STEP, [runs], [1], torch.float32), "ascending")
        for runs in (((5, 2), (4, 3)), ((0, 0),), ((-1, 3),))
    ),
]


@pytest.mark.parametrize(("ask", "words"), REFUSED)
def test_what_the_counter_does_not_number_is_refused_before_anything_is_allocated(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()
