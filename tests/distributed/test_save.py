"""``bc.save`` and ``bc.load`` where several ranks run: a file for each, an index, and another number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import bayesopt_chain as bc
from tests.distributed.ranks import message_of, run

N = 6


def loss(params, batch):
    return (params["w"] ** 2).sum() / 2


TX = bc.sghmc(0.1, temperature=0.05)


def made(n, mesh, steps, seed=5):
    """Chains after some steps: what is to be saved."""
    chains = bc.parallel(bc.make_step(loss, TX), n, mesh=mesh, loop=True)
    params = chains.mine({"w": torch.arange(3.0 * n).view(n, 3)})
    state = chains.init(TX, params, seed=seed)
    for _ in range(steps):
        params, state, _ = chains(params, state, None)
    return params, state


def ranked(what, path, steps=4, shape=None):
    """Save the chains of this rank, or load those that it would have."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", shape or (size, 1), mesh_dim_names=("chains", "data"))["chains"]
    if what == "save":
        bc.save(path, made(N, mesh, steps), tx=TX)
        return None
    loaded = bc.load(path, like=made(N, mesh, 0, seed=9), tx=TX)
    return loaded[0]["w"], loaded[1][0].trace[0], loaded[1][1].key


def require_all_chains(ranks, steps=4):
    params, state = made(N, None, steps)
    for i, want in enumerate((params["w"], state[0].trace[0], state[1].key)):
        assert torch.equal(torch.cat([rank[i] for rank in ranks]), want)


def alone(path):
    params, state = bc.load(path, like=made(N, None, 0, seed=9), tx=TX)
    return [(params["w"], state[0].trace[0], state[1].key)]


@pytest.mark.slow
def test_chains_that_two_ranks_saved_are_loaded_by_one_process_and_by_three_ranks(tmp_path):
    path = tmp_path / "run.safetensors"
    run(ranked, 2, tmp_path, "save", path)
    assert sorted(p.name for p in tmp_path.glob("run*")) == [
        "run.index.safetensors", "run.rank-00000-of-00002.safetensors", "run.rank-00001-of-00002.safetensors",
    ]  # fmt: skip
    require_all_chains(alone(path))
    require_all_chains(run(ranked, 3, tmp_path, "load", path))
    require_all_chains(run(ranked, 2, tmp_path, "load", path))


def test_chains_that_one_process_saved_are_shared_out_over_ranks(tmp_path):
    path = tmp_path / "run.safetensors"
    bc.save(path, made(N, None, 4), tx=TX)
    require_all_chains(run(ranked, 2, tmp_path, "load", path))


@pytest.mark.slow
def test_ranks_that_share_chains_saved_them_once_each(tmp_path):
    path = tmp_path / "run.safetensors"
    run(ranked, 4, tmp_path, "save", path, 4, (2, 2))
    require_all_chains(alone(path))
    require_all_chains(run(ranked, 2, tmp_path, "load", path))


def test_the_newest_save_is_loaded_whatever_the_number_of_ranks_before_it(tmp_path):
    path = tmp_path / "run.safetensors"
    bc.save(path, made(N, None, 1), tx=TX)
    run(ranked, 2, tmp_path, "save", path, 2)
    require_all_chains(alone(path), 2)
    bc.save(path, made(N, None, 3), tx=TX)
    require_all_chains(alone(path), 3)
    require_all_chains(run(ranked, 2, tmp_path, "load", path), 3)


def replica(path, value):
    tree = {"w": torch.full((3,), value) + (dist.get_rank() if value < 0 else 0), "n": 2}
    bc.save(path, tree)


def reading(path):
    return bc.load(path, like={"w": torch.zeros(3), "n": 0})["w"]


def test_replicas_are_loaded_by_any_number_of_ranks(tmp_path):
    path = tmp_path / "run.safetensors"
    run(replica, 2, tmp_path, path, 1.0)
    assert torch.equal(reading(path), torch.ones(3))
    assert all(torch.equal(w, torch.ones(3)) for w in run(reading, 3, tmp_path, path))


def test_what_differs_between_ranks_and_is_no_chain_is_loaded_by_as_many(tmp_path):
    path = tmp_path / "run.safetensors"
    run(replica, 2, tmp_path, path, -5.0)
    first, second = run(reading, 2, tmp_path, path)
    assert first.tolist() == [-5.0] * 3 and second.tolist() == [-4.0] * 3
    with pytest.raises(ValueError, match=r"2 ranks saved .* and 1 load it: .*run.rank-00000-of-00002.safetensors"):
        reading(path)
    assert torch.equal(reading(tmp_path / "run.rank-00001-of-00002.safetensors"), second)


def first_rank_alone(path):
    if dist.get_rank() == 0:
        bc.save(path, {"w": torch.zeros(3), "n": 0})
    dist.barrier()
    return message_of(reading, path)


def test_a_save_that_some_rank_left_out_is_noticed(tmp_path):
    path = tmp_path / "run.safetensors"
    mine, others = run(first_rank_alone, 2, tmp_path, path)
    assert mine is None and "no file" in others
    with pytest.raises(FileNotFoundError, match=r"run.rank-00001-of-00002.safetensors is missing: save on every rank"):
        reading(path)


def test_chains_of_two_saves_with_one_key_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    run(ranked, 2, tmp_path, "save", path)
    bc.save(tmp_path / "later.safetensors", made(3, None, 9), tx=TX)
    (tmp_path / "later.safetensors").rename(tmp_path / "run.rank-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match="neither alike nor of different chains"):
        alone(path)


def test_a_damaged_index_is_named(tmp_path):
    path = tmp_path / "run.safetensors"
    (tmp_path / "run.index.safetensors").write_text("x")
    with pytest.raises(ValueError, match=r"run.index.safetensors is truncated or damaged"):
        reading(path)
