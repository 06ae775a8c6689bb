"""The noise is a function of the state, normal, and different wherever it should be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import bayesopt_chain as bc
from bayesopt_chain.distributed import part
from bayesopt_chain.random import philox as philox_module
from bayesopt_chain.random.philox import box_muller, draw_elements, in_tensors, parts_of_leaves, philox
from bayesopt_chain.random.philox_cpu import normals_kernel
from bayesopt_chain.random.stream import Variables, draw_number, draw_numbers, leaf_numbers, splitmix64
from tests.random.draws import cut, leaf, leaf_in_tensors, parts, whole_leaves
from tests.refusals import refused


def words(values):
    return [torch.tensor([v], dtype=torch.int64) for v in values]


@pytest.mark.parametrize(
    "counter, key, want",
    [  # known answers of the Random123 distribution
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, want):
    assert [w.item() for w in philox(words(counter), words(key))] == want


def test_splitmix_gives_the_known_answers():
    assert [splitmix64(0), splitmix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize(("kind", "law"), [("gaussian", "norm"), ("uniform", "uniform")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_their_law_and_are_uncorrelated_between_steps_leaves_keys_and_neighbours(dtype, kind, law):
    """Kolmogorov-Smirnov and correlation tests at a false-alarm rate of 1e-4 each, on fixed keys; uniforms lie in [0, 1)."""

    def sample(key=7, step=3, draw=0):
        return leaf(torch.tensor(key), torch.tensor(step), 100_000, draw, dtype, kind).double()

    base = sample()
    assert stats.kstest(base.numpy(), law).pvalue > 1e-4 and (
        kind == "gaussian" or 0.0 <= base.min() <= base.max() < 1.0
    )
    neighbours = (base.roll(lag) for lag in (1, 2, 4, 7, 8, 63, 64))
    for other in (sample(step=4), sample(key=8), sample(draw=1), *neighbours):
        assert stats.pearsonr(base.numpy(), other.numpy()).pvalue > 1e-4


def test_philox_elements_do_not_depend_on_the_size_of_the_leaf():
    key, step = torch.tensor(5), torch.tensor(9)
    long = leaf(key, step, 103, 2, torch.float64)
    assert torch.equal(leaf(key, step, 10, 2, torch.float64), long[:10])
    single = leaf(key, step, 103, 2, torch.float32)
    torch.testing.assert_close(single.double(), long, rtol=0, atol=1e-6)


@pytest.mark.sweep(2)
@pytest.mark.skipif(normals_kernel() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_cpu_kernel_draws_what_tensor_operations_draw(dtype, tolerance, threads, monkeypatch, any_threads):
    """Every length around the kernel's runs, negative and large words, and one draw of all lengths together."""
    sizes = [0, 1, 5, 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 40_000]
    torch.set_num_threads(threads)
    for key, step in ((7692698082559361259, 3 + (5 << 33)), (-5, 2**62)):
        streams = torch.tensor(key), torch.tensor(step)
        draws = [(1 << 24 | i) * 0x9E3779B1 % 2**32 for i in range(len(sizes))]
        mine = draw_elements(*streams, whole_leaves(sizes, draws), dtype)
        with monkeypatch.context() as without:
            without.setattr(philox_module, "normals_kernel", lambda: None)
            wants = draw_elements(*streams, whole_leaves(sizes, draws), dtype)
        for i, (n, x, want) in enumerate(zip(sizes, mine, wants, strict=True)):
            assert x.shape == (n,) and x.dtype == dtype
            torch.testing.assert_close(x, want, rtol=0, atol=tolerance)
            assert torch.equal(x, leaf(*streams, n, draws[i], dtype))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("n", [6, 300])
def test_philox_under_vmap_draws_for_each_key_and_step_what_it_draws_alone(n, compiler, monkeypatch):
    if not compiler:
        monkeypatch.setattr(philox_module, "normals_kernel", lambda: None)
    keys, steps = torch.tensor([5, -7, 9]), torch.tensor([2, 3])

    def one(key, step):
        return leaf(key, step, n, 4, torch.float64)

    square = torch.vmap(lambda k: torch.vmap(lambda s: one(k, s))(steps))(keys)
    turned = torch.vmap(lambda s: torch.vmap(lambda k: one(k, s))(keys), out_dims=1)(steps)
    pairs = torch.vmap(one)(keys[:2], steps)
    for i, key in enumerate(keys):
        for j, step in enumerate(steps):
            assert torch.equal(square[i, j], one(key, step)) and torch.equal(turned[i, j], one(key, step))
    assert torch.equal(pairs, torch.stack([square[0, 0], square[1, 1]]))


@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("name", ["philox_normals", "philox_uniforms"])
def test_draws_of_chains_are_laid_out_as_torchs_compiler_is_told(name, compiler, monkeypatch):
    """It reads the memory of a result by the strides that it was told, so that one chain got the uniforms of another."""
    if not compiler:
        monkeypatch.setattr(philox_module, "normals_kernel", lambda: None)
    operation = getattr(torch.ops.bayesopt_chain, name).default
    given = (torch.tensor([5, -7, 9]), torch.tensor(2), [], [5], [1], torch.float32)
    torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))


def test_the_key_comes_from_the_generator_and_nothing_else_does():
    before, params = torch.random.get_rng_state(), [torch.zeros(3)]
    makes = [bc.sghmc(0.1, temperature=1.0, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    states = [tx.init(params) for tx in (*makes, makes[0])]  # of the first generator the second key is another
    makes[0].update(params, states[0], params=params, inplace=False)
    assert torch.equal(before, torch.random.get_rng_state())
    assert states[0][1].key == states[1][1].key != states[2][1].key


def test_a_chain_draws_from_the_stream_and_nowhere_else():
    """The noise of a flat loss, read off the update, is the stream's: leaf by leaf, step by step, in any group or mask."""
    params = {"a": torch.zeros(70), "b": torch.zeros(3)}
    tx = bc.partition({"all": bc.sgld(0.5, temperature=1.0, order=1)}, "all")
    state = tx.init(params)
    key = next(s.key for s in state if hasattr(s, "key"))
    for count in range(3):
        updates, state = tx.update(params, state, params=params, inplace=False)
        for name, number in zip(params, leaf_numbers(("['a']", "['b']"))):
            want = leaf(key, torch.tensor(count), params[name].numel(), number, torch.float32)
            torch.testing.assert_close(updates[name], -want, rtol=1e-6, atol=1e-6)


def test_runs_of_64_come_from_neighbouring_blocks():
    """Element 256 q + 64 l + r is normal l of block 64 q + r."""
    key, step = torch.tensor(11), torch.tensor(2)
    long = leaf(key, step, 1024, 0, torch.float64)
    blocks = torch.arange(256)
    w = philox([blocks, 0 * blocks, 0 * blocks + 2, 0 * blocks], [key, 0 * key])
    first, _ = box_muller(w[0], w[1], torch.float64)
    _, fourth = box_muller(w[2], w[3], torch.float64)
    pieces = long.view(4, 4, 64)
    torch.testing.assert_close(pieces[:, 0].flatten(), first, rtol=0, atol=1e-12)
    torch.testing.assert_close(pieces[:, 3].flatten(), fourth, rtol=0, atol=1e-12)


def test_box_muller_covers_the_plane_evenly_and_finitely():
    """The extreme words give finite normals, and the four quadrants of the angle are quarter turns of each other."""
    ends = torch.tensor([0, 0xFFFFFFFF])
    for real in (torch.float32, torch.float64):
        x, y = box_muller(ends, ends, real)
        assert torch.isfinite(x).all() and torch.isfinite(y).all()
        turns = torch.arange(4) << 30
        x, y = box_muller(0 * turns + 12345678, turns + 987654, real)
        assert torch.equal(x[1:], torch.stack([-y[0], -x[0], y[0]])) and torch.equal(
            y[1:], torch.stack([x[0], -y[0], -x[0]])
        )


def test_leaves_are_numbered_by_their_paths_and_collisions_are_refused(monkeypatch):
    a, b = leaf_numbers(("['a']", "['b']"))
    assert leaf_numbers(("['b']",)) == (b,) != (a,)
    with pytest.raises(ValueError, match=r"leaf same  would be one of leaf same,.* hashes of their paths are equal"):
        leaf_numbers(("same", "other", "same ", "other "), hashed=lambda path: len(path.strip()))


@pytest.mark.parametrize("apart", [1, 5, -5])
def test_a_draw_that_would_be_another_leafs_is_refused_however_late_it_comes(apart):
    """Leaf 2's number is leaf 0's draw ``apart``, so that they meet as soon as the earlier one draws that often."""
    leaves = (7, 12345, draw_number(7, apart))
    short, long = (abs(apart),) * 3, (abs(apart) + 1,) * 3
    assert len(set(draw_numbers(leaves, short))) == 3 * abs(apart)
    with pytest.raises(ValueError, match=r"leaf 2 would be one of leaf 0|leaf 0 would be one of leaf 2"):
        draw_numbers(leaves, long)
    templates = [torch.empty(1, 4)] * 3
    with pytest.raises(ValueError, match="would be one of leaf"):
        Variables(leaves, long).draw(torch.tensor(1), torch.tensor(0), templates)
    drawn = Variables(leaves, short).draw(torch.tensor(1), torch.tensor(0), templates)
    assert len(set(map(tuple, torch.stack([x for xs in drawn for x in xs]).tolist()))) == 3 * abs(apart)


KEY, STEP = torch.tensor(12345), torch.tensor(7)


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_shape_are_the_leafs(kind, dtype):
    like = [torch.empty(1, 3, dtype=dtype), torch.empty(1, dtype=dtype)]
    (a, b), (c,), none = Variables(each=(2, 1, 0), kind=kind).draw(KEY, STEP, [*like, like[0]])
    assert not none and a.shape == b.shape == (3,) and c.shape == () and {a.dtype, b.dtype, c.dtype} == {dtype}


# A shard's noise is that part of the whole leaf's


LARGE_KEY, LARGE_STEP = torch.tensor(7692698082559361259), torch.tensor(3 + (5 << 33))


@st.composite
def some_runs(draw, size=1500):
    edges = sorted(draw(st.sets(st.integers(0, size), min_size=2, max_size=12)))
    return tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2]))


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(runs=some_runs())
def test_a_piece_of_a_draw_is_cut_from_the_whole_draw_bit_for_bit(dtype, kind, runs):
    whole = leaf(LARGE_KEY, LARGE_STEP, 1500, 77, dtype, kind)
    (mine,) = parts(LARGE_KEY, LARGE_STEP, [runs], [77], dtype, kind=kind)
    assert mine.dtype == dtype and torch.equal(mine, cut(whole, runs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(runs=some_runs())
def test_tensor_operations_and_the_kernel_draw_the_same_pieces(dtype, runs):
    slow = in_tensors(LARGE_KEY, LARGE_STEP, parts_of_leaves((runs,), (9,)), dtype)
    assert torch.equal(slow, cut(leaf_in_tensors(LARGE_KEY, LARGE_STEP, 1500, 9, dtype), runs))
    (fast,) = parts(LARGE_KEY, LARGE_STEP, [runs], [9], dtype)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_several_leaves_and_empty_shards_keep_their_places(kind):
    pieces = [((0, 3), (10, 2)), (), ((64, 65),), ()]
    out = parts(LARGE_KEY, LARGE_STEP, pieces, [1, 2, 3, 4], torch.float32, kind=kind)
    assert [len(x) for x in out] == [5, 0, 65, 0]
    for x, runs, draw in zip(out, pieces, [1, 2, 3, 4]):
        if runs:
            assert torch.equal(x, parts(LARGE_KEY, LARGE_STEP, [runs], [draw], torch.float32, kind=kind)[0])


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_stacked_chains_draw_the_pieces_that_each_draws_alone(kind):
    keys, steps, runs = torch.tensor([4, -7, 2**61]), torch.tensor([0, 1, 2**40]), ((3, 70), (300, 9))
    draw = lambda k, s: parts(k, s, [runs], [9], torch.float32, kind=kind)[0]  # noqa: E731
    alone = torch.stack([draw(k, s) for k, s in zip(keys, steps)])
    assert torch.equal(torch.vmap(draw)(keys, steps), alone)
    assert torch.equal(draw(keys, steps), alone)


def test_the_last_elements_that_the_counter_numbers_have_noise_of_their_own():
    last = 2**34
    (x,) = parts(LARGE_KEY, LARGE_STEP, [((0, 64), (last - 64, 64))], [9], torch.float32)
    assert len(set(x.tolist())) > 120
    slow = in_tensors(LARGE_KEY, LARGE_STEP, parts_of_leaves((((0, 64), (last - 64, 64)),), (9,)), torch.float32)
    torch.testing.assert_close(x, slow, rtol=0, atol=1e-6)


REFUSED = [
    (
        lambda: parts(LARGE_KEY, LARGE_STEP, [((2**34, 1),)], [9], torch.float32),
        r"a leaf has 17179869185 elements, .* 2\^34",
    ),
    (lambda: leaf(LARGE_KEY, LARGE_STEP, 2**34 + 1, 1, torch.float32), "Split the leaf"),
    (lambda: leaf(LARGE_KEY, LARGE_STEP, 2**34 + 1, 1, torch.float32, "uniform"), "Split the leaf"),
    (lambda: leaf_in_tensors(LARGE_KEY, LARGE_STEP, 2**34 + 1, 1, torch.float32), "Split the leaf"),
    *(
        (lambda runs=runs, n=n: part([("w", torch.zeros(n))], {"w": ("leaf", runs)}), "ascend")
        for runs, n in ((((5, 2), (4, 3)), 5), (((0, 3), (5, -1)), 2), (((-1, 3),), 3))
    ),
]


test_what_the_counter_does_not_number_is_refused_before_anything_is_allocated = refused(REFUSED)
