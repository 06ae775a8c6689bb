"""``bc.save`` and ``bc.load`` where several ranks run: a file for each, and as many to read them."""

import pytest
import torch
import torch.distributed as dist

import bayesopt_chain as bc
from bayesopt_chain.runs import files
from tests.distributed.ranks import message_of, run


def saving(path, value):
    bc.save(path, {"w": torch.full((3,), value) + dist.get_rank(), "n": dist.get_rank()})


def reading(path):
    tree = bc.load(path, like={"w": torch.zeros(3), "n": 0})
    return tree["w"].tolist(), tree["n"]


def both(path):
    """What each rank reads of what it saved, then with a rank's file away, then with a whole file beside them."""
    saving(path, 5.0)
    dist.barrier()
    own = reading(path)
    dist.barrier()
    if dist.get_rank() == 0:
        path.with_name("run.rank-00001-of-00002.safetensors").rename(path.with_name("away"))
    dist.barrier()
    missing = message_of(reading, path)
    dist.barrier()
    if dist.get_rank() == 0:
        path.with_name("away").rename(path.with_name("run.rank-00001-of-00002.safetensors"))
        files.write(path.with_name("one.safetensors"), {"w": torch.ones(3)}, {"scalars": {"n": 7}, "chain": None})
    dist.barrier()
    return own, missing, reading(path.with_name("one.safetensors"))


def test_each_rank_reads_what_it_saved_and_as_many_ranks_read(tmp_path):
    path = tmp_path / "run.safetensors"
    first, second = run(both, 2, tmp_path, path)
    assert first[0] == ([5.0] * 3, 0) and second[0] == ([6.0] * 3, 1)
    assert first[1] is None and "run.rank-00001-of-00002.safetensors is missing: save on every rank" in second[1]
    assert first[2] == second[2] == ([1.0] * 3, 7)
    assert sorted(p.name for p in tmp_path.glob("run*")) == [
        "run.rank-00000-of-00002.safetensors", "run.rank-00001-of-00002.safetensors",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"2 ranks saved .* and 1 load it: .*run.rank-0000\d-of-00002.safetensors"):
        reading(path)
    assert reading(tmp_path / "run.rank-00001-of-00002.safetensors") == second[0]
    bc.save(path, {"w": torch.zeros(3), "n": 0})
    with pytest.raises(ValueError, match="by 1 and by 2 ranks, and which is newer no file says: remove"):
        reading(path)
