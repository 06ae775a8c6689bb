"""Checkpoints by ``torch.distributed.checkpoint``: any number of ranks, any layout, and none of its silent losses.

``bc.save`` and ``bc.load``, at the end, write a file for each rank, which as many read.
"""

import os

import optree
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.runs import files
from tests.distributed.ranks import everywhere, mesh_of, message_of, on, run, world
from tests.distributed.toys import LAYOUTS, network, under

CHAINS = {"sghmc": bc.sghmc(0.1, temperature=0.05), "adam": bc.adam(0.01, temperature=0.05)}
TX = CHAINS["sghmc"]


def loss(params, batch):
    return sum((x**2).sum() for x in params.values()) / 4


def start(*n):
    g = torch.Generator().manual_seed(4)
    return {"w": torch.randn(*n, 6, 5, generator=g).double(), "b": torch.randn(*n, 3, generator=g).double()}


def tree_of(params, state):
    return {"params": params, "state": bc.state_dict(state)}


def step_of(n=None, shape=None, tx=TX):
    """A step: of one chain, or of ``n`` over the first axis of a mesh."""
    step = bc.make_step(loss, tx)
    mesh = mesh_of(*shape) if shape else mesh_of(world()[1]) if dist.is_initialized() else None
    return bc.parallel(step, n, loop=True, mesh=mesh["first"] if shape else mesh) if n else step


def gone_on(folder, before, after, steps, kind="sghmc", layout=None, n=None, shape=None):
    """A launch: one chain, or ``n`` over ranks; from a checkpoint or the start, some steps, the next checkpoint.

    ``layout``: matrices are DTensors over all ranks; ``shape``: over the second axis of a mesh of chains by shards.
    """
    tx, params = CHAINS[kind], start(*[n] if n else [])
    step, options = step_of(n, shape, tx), {}
    if n:
        params, options = step.mine(params), {"chains": step.numbers}
    if layout or shape:
        mesh, where = LAYOUTS[layout](world()[1]) if layout else (mesh_of(*shape)["second"], [Shard(1)])
        whole = [Replicate()] * mesh.ndim
        params = {k: distribute_tensor(x, mesh, where if k == "w" else whole) for k, x in params.items()}
    torch.manual_seed(12)
    state = step.init(tx, params, seed=1) if n else tx.init(params)
    if before:
        params = {name: torch.zeros_like(x) for name, x in params.items()}
        bc.distributed.load(folder / before, tree_of(params, state), **options)
    for _ in range(steps):
        params, state, _ = step(params, state, None)
    if after:
        bc.distributed.save(folder / after, tree_of(params, state), **options)
    return {name: x for name, x in params.items() if not layout and not shape}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_goes_from_any_layout_on_any_number_of_ranks_to_any_other_and_to_one_process(kind, tmp_path):
    run(gone_on, 2, tmp_path, None, "a", 3, kind, "fsdp")
    for size, before, after, layout in ((4, "a", "b", "columns"), (4, "b", "c", "hsdp"), (4, "c", "d", "both")):
        run(gone_on, size, tmp_path, before, after, 2, kind, layout)
    found, want = gone_on(tmp_path, "d", None, 3, kind), gone_on(tmp_path, None, None, 12, kind)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_chains_by_shards_go_on_on_another_mesh_and_in_one_process(tmp_path):
    run(gone_on, 4, tmp_path, None, "a", 3, n=4, shape=(2, 2))
    run(gone_on, 3, tmp_path, "a", "b", 3, n=4, shape=(1, 3))
    found, want = gone_on(tmp_path, "b", None, 3, n=4), gone_on(tmp_path, None, None, 9, n=4)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_chains_on_two_ranks_are_loaded_by_three_and_by_one(tmp_path):
    run(gone_on, 2, tmp_path, None, "a", 1, n=6)
    want = gone_on(tmp_path, None, None, 2, n=6)
    ranks = run(gone_on, 3, tmp_path, "a", None, 1, n=6)
    for found in (gone_on(tmp_path, "a", None, 1, n=6), {k: torch.cat([part[k] for part in ranks]) for k in want}):
        assert all(torch.equal(found[name], want[name]) for name in want)
    with pytest.raises(ValueError, match=r"no rank loads \[4, 5\]: run as many chains as were saved"):
        gone_on(tmp_path, "a", None, 1, n=4)
    with pytest.raises(ValueError, match="chain 6/params/w is missing"):
        gone_on(tmp_path, "a", None, 1, n=7)


def test_replicas_are_saved_once_and_go_on_exactly_on_any_number_of_ranks(tmp_path):
    run(gone_on, 2, tmp_path, None, "a", 4)
    want = gone_on(tmp_path, None, None, 5)
    for found in [gone_on(tmp_path, "a", None, 1), *run(gone_on, 3, tmp_path, "a", None, 1)]:
        assert all(torch.equal(found[name], want[name]) for name in want)
    size = sum(x.nbytes for x in [*start().values(), *bc.state_dict(TX.init(start())).values()])
    assert sum(p.stat().st_size for p in (tmp_path / "a").glob("*.distcp")) < 2 * size + 20_000


@on(2)
@pytest.mark.slow
def test_checkpoints_of_a_chain_on_shards_are_saved_from_a_callback(tmp_path):
    def sampled(steps, before=None):
        params = {"w": distribute_tensor(start()["w"], mesh_of(2), [Shard(0)])}
        torch.manual_seed(12)
        state = TX.init(params)
        if before:
            bc.distributed.load(tmp_path / before, tree_of(params, state))

        def keep(it):
            if it.step == 3 and before is None:
                bc.distributed.save(tmp_path / "3", tree_of(it.params, it.state))

        draws = bc.sample(bc.make_step(loss, TX), params, state, None, steps=steps, callbacks=[keep])
        return draws.params["w"].full_tensor()

    assert torch.equal(sampled(8)[3:], sampled(5, "3"))


@on(2)
def test_what_torch_keeps_of_one_rank_alone_and_files_of_one_rank_are_refused(tmp_path):
    rank = world()[0]
    params = {"w": torch.full((2,), float(rank)), "b": torch.zeros(1)}
    optimizer = bc.optim.SGD([nn.Parameter(params["w"])], 0.1)
    dcp.save({"w": params["w"]}, checkpoint_id=str(tmp_path / "torch"))
    dcp.load(there := {"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "torch"))
    assert there["w"].tolist() == [0.0, 0.0], "of two ranks' tensors of one name torch keeps the first, for both"
    shards = {"w": distribute_tensor(torch.ones(4, 3), mesh_of(2), [Shard(0)])}
    for words, tree, options in (
        (("params/w differ from rank to rank", "chains=chains.numbers"), {"params": params}, {}),
        (("opt/param_groups/0/", " is int; only tensors", "bc.state_dict(state)"), {"opt": optimizer.state_dict()}, {}),
        (("tensor is SGD",), optimizer, {}),
        (("spread as (Shard(dim=0),)",), shards, {"chains": range(4)}),
    ):
        said = message_of(lambda tree=tree, options=options: bc.distributed.save(tmp_path / "ours", tree, **options))
        assert all(word in said for word in words), said
    said = message_of(lambda: bc.save(tmp_path / "w.safetensors", shards))
    assert "leaf w is a DTensor" in said and "bc.distributed.save(folder, tree)" in said
    dist.barrier()
    assert os.listdir(tmp_path) == ["torch"]


@on(4)
def test_replicas_that_differ_on_some_ranks_are_refused_on_all_of_them(tmp_path):
    part = torch.ones(2, 3) + (world()[0] == 2)  # ranks 0 and 2 hold the same half
    w = DTensor.from_local(part, mesh_of(2, 2), [Replicate(), Shard(0)], run_check=False)
    assert "w (elements ((0, " in message_of(lambda: bc.distributed.save(tmp_path / "step", {"w": w}))
    assert not (tmp_path / "step").exists()


def test_a_state_is_a_tree_of_tensors(tmp_path):
    with pytest.raises(TypeError, match="tree is NoneType; only tensors"):
        bc.distributed.save(tmp_path / "step", None)
    states = [TX.init(start()), TX.init(start())]
    states[0][0].trace[0].fill_(3.0)
    bc.distributed.save(tmp_path / "step", {"state": states[0]})
    bc.distributed.load(tmp_path / "step", {"state": states[1]})
    assert all(map(torch.equal, optree.tree_leaves(states[1]), optree.tree_leaves(states[0])))


def under_fsdp(kind, before, after, sharded=True):
    model = network(5, 8, 3)
    if sharded:
        under("fsdp", model)
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(0)}
    tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(**noise), bc.scale_by_neg_lr(0.05))
    optimizer = (
        bc.optim.SGHMC(model.parameters(), 0.05, **noise)
        if kind == "sghmc"
        else bc.optim.Optimizer(model.parameters(), lambda group: tx)
    )
    if before:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(before))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for _ in range(4 if before or after else 12):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)).square().mean().backward()
        optimizer.step()
    if after:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(after))
    return [p.detach() for p in model.parameters() if not sharded]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["sghmc", "chain"])
def test_an_optimizer_under_fsdp2_on_two_ranks_goes_on_under_four_and_in_one_process(kind, tmp_path):
    run(under_fsdp, 2, kind, None, tmp_path / "a")
    run(under_fsdp, 4, kind, tmp_path / "a", tmp_path / "b")
    found, want = under_fsdp(kind, tmp_path / "b", None, False), under_fsdp(kind, None, None, False)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "other, says",
    [
        (bc.sgld(0.1, temperature=0.05), r"state/0.Momentum.trace\['b'\] is not expected"),
        (bc.adam(0.1, temperature=0.05), "is missing"),
    ],
)
def test_the_state_of_another_chain_is_refused_and_nothing_is_written(other, says, tmp_path):
    gone_on(tmp_path, None, "a", 2)
    params = {name: torch.zeros_like(x) for name, x in start().items()}
    with pytest.raises(ValueError, match=says):
        bc.distributed.load(tmp_path / "a", tree_of(params, other.init(params)))
    assert not params["w"].any()


def test_other_shapes_and_dtypes_are_refused(tmp_path):
    bc.distributed.save(tmp_path / "step", {"w": torch.ones(3), "v": torch.ones(2, dtype=torch.float64)})
    says = r"v is torch.float64 .*; w is torch.float32 \(3,\), expected torch.float32 \(4,\)"
    with pytest.raises(ValueError, match=says):
        bc.distributed.load(tmp_path / "step", {"w": torch.zeros(4), "v": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"w is of shape \(3,\); with chains= axis 0 .* counts the 2 chains"):
        bc.distributed.save(tmp_path / "cut", {"w": torch.ones(3)}, chains=range(2))


def test_a_checkpoint_is_whole_or_none_and_is_not_written_over(tmp_path):
    gone_on(tmp_path, None, "a", 2)
    with pytest.raises(FileExistsError, match="holds a checkpoint already"):
        gone_on(tmp_path, None, "a", 3)
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="not written to its end"):
        gone_on(tmp_path, "a", None, 1)


def test_a_row_of_many_chains_is_written_alone(tmp_path):
    bc.distributed.save(tmp_path / "step", {"w": torch.zeros(8, 10_000)}, chains=range(8))
    assert sum(p.stat().st_size for p in (tmp_path / "step").glob("*.distcp")) < 8 * 10_000 * 4 + 8 * 4_000


# files of ranks


def reading(path):
    tree = bc.load(path, like={"w": torch.zeros(3), "n": 0})
    return tree["w"].tolist(), tree["n"]


@on(2)
def test_each_rank_reads_what_it_saved_and_as_many_ranks_read(tmp_path):
    path, rank = tmp_path / "run.safetensors", world()[0]
    names = [f"run.rank-0000{r}-of-00002.safetensors" for r in range(2)]
    bc.save(path, {"w": torch.full((3,), 5.0) + rank, "n": rank})
    dist.barrier()
    assert reading(path) == ([5.0 + rank] * 3, rank) and sorted(os.listdir(tmp_path)) == names
    everywhere(0)
    if rank == 1:
        (tmp_path / names[1]).rename(tmp_path / "away")
        assert f"{names[1]} is missing: save on every rank" in message_of(reading, path)
        files.write(tmp_path / "one.safetensors", {"w": torch.ones(3)}, {"scalars": {"n": 7}, "chain": None})
    dist.barrier()
    assert reading(tmp_path / "one.safetensors") == ([1.0] * 3, 7), "any rank reads a whole file"


def test_as_many_ranks_read_as_have_saved_and_a_file_of_one_rank_by_its_name(tmp_path):
    path, parts = tmp_path / "run.safetensors", [tmp_path / f"run.rank-0000{r}-of-00002.safetensors" for r in range(2)]
    for n, part in enumerate(parts):
        files.write(part, {"w": torch.ones(3)}, {"scalars": {"n": n}, "chain": None})
    with pytest.raises(ValueError, match=r"2 ranks saved .* and 1 load it: .*run.rank-0000\d-of-00002.safetensors"):
        reading(path)
    assert reading(parts[1]) == ([1.0] * 3, 1)
    bc.save(path, {"w": torch.zeros(3), "n": 0})
    with pytest.raises(ValueError, match="by 1 and by 2 ranks, and which is newer no file says: remove"):
        reading(path)
