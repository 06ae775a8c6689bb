"""The runs are the elements that torch's placements give to each rank."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from bayesopt_chain.distributed import runs_of
from bayesopt_chain.distributed.parts import runs
from tests.random.draws import leaf, parts


def held(shape, mesh, coordinate, placements):
    """The numbers of the elements at a coordinate, by torch's own cutting of a tensor."""
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for size, place, placement in zip(mesh, coordinate, placements):
        if not isinstance(placement, Replicate):
            x = placement._split_tensor(x, size, with_padding=False)[0][place]
    return x.flatten().tolist()


def expanded(found):
    return [i for start, length in found for i in range(start, start + length)]


LAYOUTS = [
    ((7,), (3,), (Shard(0),)),
    ((2, 5), (4,), (Shard(0),)),  # two ranks hold nothing
    ((6, 5, 4), (2,), (Shard(1),)),
    ((6, 5, 4), (3,), (Shard(-1),)),
    ((8, 6), (2, 2), (Replicate(), Shard(0))),  # HSDP
    ((9, 6), (2, 3), (Shard(0), Shard(1))),  # FSDP x TP along different axes
    ((9, 6), (2, 2), (Shard(0), Shard(0))),
    ((12, 5), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))),  # FSDP x TP along one axis
    ((12, 5), (2, 3), (_StridedShard(1, split_factor=3), Shard(1))),
    ((7, 2), (3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((5, 3), (2, 2), (Replicate(), Replicate())),
    ((), (2,), (Replicate(),)),
    ((0, 3), (2,), (Shard(1),)),
]


@pytest.mark.parametrize("shape, mesh, placements", LAYOUTS, ids=str)
def test_the_runs_and_the_noise_of_every_rank_are_what_the_placements_give_it_of_one_process(shape, mesh, placements):
    key, step, n, seen = torch.tensor(11), torch.tensor(4), torch.Size(shape).numel(), set()
    for coordinate in product(*map(range, mesh)):
        found = runs(shape, mesh, coordinate, placements)
        mine = held(shape, mesh, coordinate, placements)
        assert sorted(expanded(found)) == sorted(mine) and all(length > 0 for _, length in found)
        assert all(a + n < b for (a, n), (b, _) in pairwise(found)), "runs that touch are one"
        seen |= {*mine}
        for kind in ("gaussian", "uniform"):
            whole = leaf(key, step, n, 8, torch.float64, kind)
            (drawn,) = parts(key, step, [found], [8], torch.float64, kind=kind)
            assert torch.equal(drawn, whole[mine].reshape(-1))
    assert len(seen) == n


@given(data=st.data())
def test_the_runs_are_the_placements_for_any_shape_and_mesh(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    dim = st.integers(0, len(shape) - 1)
    plain = st.one_of(st.just(Replicate()), dim.map(Shard))
    placements = tuple(data.draw(plain) for _ in mesh)
    for coordinate in product(*map(range, mesh)):
        assert expanded(runs(shape, mesh, coordinate, placements)) == held(shape, mesh, coordinate, placements)


def test_a_plain_tensor_is_one_run():
    assert runs_of(torch.zeros(3, 4)) == ((0, 12),)
    assert runs_of(torch.zeros(())) == ((0, 1),)
    assert runs_of(torch.zeros(0, 4)) == ()


def test_a_partial_sum_has_no_elements_of_its_own():
    with pytest.raises(ValueError, match="redistribute"):
        runs((4,), (2,), (0,), (Partial(),))
