"""Checkpoints by ``torch.distributed.checkpoint``: any number of ranks, any layout, and none of its silent losses."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import bayesopt_chain as bc
from tests.distributed.ranks import message_of, run


def loss(params, batch):
    return (params["w"] ** 2).sum() / 2 + params["b"].sum()


def start(rows=()):
    g = torch.Generator().manual_seed(4)
    return {"w": torch.randn(*rows, 6, 5, generator=g), "b": torch.randn(*rows, 3, generator=g)}


TX = bc.sghmc(0.1, temperature=0.05)


def after(steps, seed=0):
    torch.manual_seed(seed)
    params, step = start(), bc.make_step(loss, TX)
    state = TX.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, None)
    return params, state


def tree_of(params, state):
    return {"params": params, "state": bc.state_dict(state)}


def saved(path, steps):
    bc.distributed.save(path, tree_of(*after(steps)))


def loaded(path):
    params, state = after(0, seed=9)
    bc.distributed.load(path, tree_of(params, state))
    params, state, _ = bc.make_step(loss, TX)(params, state, None)
    return params


def test_replicas_are_saved_once_and_go_on_exactly_on_any_number_of_ranks(tmp_path):
    run(saved, 2, tmp_path, tmp_path / "two", 4)
    want, _ = after(5)
    for params in [loaded(tmp_path / "two"), *run(loaded, 3, tmp_path, tmp_path / "two")]:
        assert all(torch.equal(params[name], want[name]) for name in want)
    sizes = [sum(x.nbytes for x in bc.state_dict(after(0)[1]).values()) + sum(x.nbytes for x in start().values())]
    assert sum(p.stat().st_size for p in (tmp_path / "two").glob("*.distcp")) < 2 * sizes[0] + 20_000


# chains over ranks


def on_a_mesh(n):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    chains = bc.parallel(bc.make_step(loss, TX), n, mesh=mesh, loop=True)
    params = chains.mine(start((n,)))
    return chains, params, chains.init(TX, params, seed=1)


def saved_chains(path, n):
    chains, params, state = on_a_mesh(n)
    params, state, _ = chains(params, state, None)
    bc.distributed.save(path, tree_of(params, state), chains=chains.numbers)


def loaded_chains(path, n):
    chains, params, state = on_a_mesh(n)
    params = {name: torch.zeros_like(x) for name, x in params.items()}
    bc.distributed.load(path, tree_of(params, state), chains=chains.numbers)
    params, state, _ = chains(params, state, None)
    return params["w"]


@pytest.mark.slow
def test_chains_on_two_ranks_are_loaded_by_three_and_by_one(tmp_path):
    path, n = tmp_path / "step", 6
    run(saved_chains, 2, tmp_path, path, n)
    chains, params, state = on_a_mesh(n)
    for _ in range(2):
        params, state, _ = chains(params, state, None)
    assert torch.equal(torch.cat(run(loaded_chains, 3, tmp_path, path, n)), params["w"])
    assert torch.equal(loaded_chains(path, n), params["w"])
    with pytest.raises(ValueError, match=r"no rank loads \[4, 5\]: run as many chains as were saved"):
        loaded_chains(path, 4)
    with pytest.raises(ValueError, match="chain 6/params/w is not there"):
        loaded_chains(path, 7)


# shards


def layout(kind):
    size = dist.get_world_size()
    if kind == "fsdp":
        return init_device_mesh("cpu", (size,)), [Shard(0)]
    if kind == "columns":
        return init_device_mesh("cpu", (size,)), [Shard(1)]
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
    return mesh, [Replicate(), Shard(0)] if kind == "hsdp" else [Shard(0), Shard(1)]


def spread_out(tree, kind):
    """The tree with every matrix in a layout, and the rest as it is."""
    mesh, placements = layout(kind)
    return {name: distribute_tensor(x, mesh, placements) if x.ndim == 2 else x for name, x in tree.items()}


def saved_shards(path, kind):
    params, state = after(4)
    bc.distributed.save(path, {"params": spread_out(params, kind), "state": spread_out(bc.state_dict(state), kind)})


def loaded_shards(path, kind):
    params, state = after(0, seed=9)
    there = {"params": spread_out(params, kind), "state": spread_out(bc.state_dict(state), kind)}
    bc.distributed.load(path, there)
    whole = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    return {f"{part}/{name}": whole(x) for part, tree in there.items() for name, x in tree.items()}


@pytest.mark.slow
def test_shards_of_two_ranks_are_loaded_by_four_in_another_layout_and_by_one_process(tmp_path):
    want = {f"{part}/{name}": x for part, tree in tree_of(*after(4)).items() for name, x in tree.items()}
    run(saved_shards, 2, tmp_path, tmp_path / "fsdp", "fsdp")
    for kind in ("columns", "both", "hsdp"):
        for got in run(loaded_shards, 4, tmp_path, tmp_path / "fsdp", kind):
            assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want), kind
    run(saved_shards, 4, tmp_path, tmp_path / "both", "both")
    params, _ = after(5)
    for path in ("fsdp", "both"):
        got = loaded(tmp_path / path)
        assert all(torch.equal(got[name], params[name]) for name in params)


CHAINS = {
    "sghmc": lambda: bc.sghmc(0.1, temperature=0.05),
    "adam": lambda: bc.adam(0.01, temperature=0.05),
}
KEY = 12


def moved(kind, params, state, steps):
    """Steps on parameters in any layout, with the gradient of a quadratic loss."""
    tx = CHAINS[kind]()
    for _ in range(steps):
        updates, state = tx.update({name: 0.5 * x for name, x in params.items()}, state, params=params, inplace=False)
        params = {name: x + updates[name] for name, x in params.items()}
    return params, state


def begun(kind, layout=None):
    params = {name: x.double() for name, x in start().items()}
    params = spread_out(params, layout) if layout else params
    torch.manual_seed(KEY)
    return params, CHAINS[kind]().init(params)


def gone_on(folder, before, after, layout, steps):
    """A launch: the chains of a checkpoint on DTensors, some steps, the next checkpoint."""
    for kind in CHAINS:
        params, state = begun(kind, layout)
        if before is not None:
            bc.distributed.load(folder / kind / before, tree_of(params, state))
        params, state = moved(kind, params, state, steps)
        bc.distributed.save(folder / kind / after, tree_of(params, state))


@pytest.mark.slow
def test_a_chain_on_shards_goes_from_fsdp_on_two_ranks_to_tensor_parallelism_on_four_to_one_process(tmp_path):
    run(gone_on, 2, tmp_path, tmp_path, None, "a", "fsdp", 3)
    run(gone_on, 4, tmp_path, tmp_path, "a", "b", "columns", 3)
    run(gone_on, 4, tmp_path, tmp_path, "b", "c", "both", 3)
    for kind in CHAINS:
        params, state = begun(kind)
        bc.distributed.load(tmp_path / kind / "c", tree_of(params, state))
        got, _ = moved(kind, params, state, 3)
        want, _ = moved(kind, *begun(kind), 12)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=0, atol=1e-12)


def on_chains_and_shards(folder, before, after, shape):
    """Chains over one axis of a mesh, each on shards over the other."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("chains", "shards")) if shape else None
    tx, n = CHAINS["sghmc"](), 4
    step = bc.make_step(lambda p, batch: (p["w"] ** 2).sum() / 4, tx)
    chains = bc.parallel(step, n, loop=True, mesh=mesh and mesh["chains"])
    one = start()["w"].double()
    one = one if mesh is None else distribute_tensor(one, mesh["shards"], [Shard(0)])
    params = chains.mine(bc.stack([{"w": one}] * n))
    state = chains.init(tx, params, seed=1)
    if before is not None:
        bc.distributed.load(folder / before, tree_of(params, state), chains=chains.numbers)
    for _ in range(3):
        params, state, _ = chains(params, state, None)
    if after is not None:
        bc.distributed.save(folder / after, tree_of(params, state), chains=chains.numbers)
    return params["w"] if mesh is None else None


@pytest.mark.slow
def test_chains_times_shards_go_on_on_another_mesh_and_in_one_process(tmp_path):
    run(on_chains_and_shards, 4, tmp_path, tmp_path, None, "a", (2, 2))
    run(on_chains_and_shards, 3, tmp_path, tmp_path, "a", "b", (1, 3))
    got = on_chains_and_shards(tmp_path, "b", "c", None)
    for before, after in ((None, "d"), ("d", "e"), ("e", None)):
        want = on_chains_and_shards(tmp_path, before, after, None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def sampled(folder, before):
    """Draws of a chain on shards, with a checkpoint every three steps."""
    params, tx = spread_out({"w": start()["w"].double()}, "fsdp"), CHAINS["sghmc"]()
    torch.manual_seed(KEY)
    state = tx.init(params)
    if before is not None:
        bc.distributed.load(folder / before, tree_of(params, state))

    def keep(it):
        if it.step % 3 == 0 and before is None:
            bc.distributed.save(folder / f"{it.step}", tree_of(it.params, it.state))

    step, steps = bc.make_step(lambda p, batch: (p["w"] ** 2).sum() / 4, tx), 8 if before is None else 5
    draws = bc.sample(step, params, state, None, steps=steps, callbacks=[keep])
    return draws.params["w"].full_tensor()


@pytest.mark.slow
def test_checkpoints_of_a_chain_on_shards_are_saved_from_a_callback(tmp_path):
    straight = run(sampled, 2, tmp_path, tmp_path, None)
    resumed = run(sampled, 2, tmp_path, tmp_path, "3")
    for a, b in zip(straight, resumed):
        assert len(b) == 5 and torch.equal(a[3:], b)


def into_files(folder):
    mesh = init_device_mesh("cpu", (2,))
    params = {"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])}
    return message_of(lambda: bc.save(folder / "w.safetensors", params))


def test_shards_are_not_written_into_the_files_of_one_rank(tmp_path):
    for saving in run(into_files, 2, tmp_path, tmp_path / "out"):
        assert "leaf w is a DTensor" in saving and "bc.distributed.save(folder, tree)" in saving
    assert not (tmp_path / "out").exists()


# what torch.distributed.checkpoint loses without a word


def lost(path):
    """What torch's own functions do with two chains on two ranks, and what is said of it here."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    params = {"w": torch.full((2,), float(rank)), "b": torch.zeros(1)}
    state = TX.init(params)
    dcp.save({"w": params["w"]}, checkpoint_id=str(path / "torch"))
    dcp.load(there := {"w": torch.zeros(2)}, checkpoint_id=str(path / "torch"))
    said = {
        "one name": message_of(lambda: bc.distributed.save(path / "a", {"params": params})),
        "tuple": message_of(lambda: bc.distributed.save(path / "b", {"opt": state})),
        "class": message_of(lambda: bc.distributed.save(path / "c", {"opt": bc.SGD([params["w"]], 0.1).state_dict()})),
        "nothing": message_of(lambda: bc.distributed.save(path / "d", state)),
    }
    return there["w"].tolist(), said, sorted(os.listdir(path))


def test_what_torch_keeps_of_one_rank_alone_is_refused(tmp_path):
    for kept, said, files in run(lost, 2, tmp_path, tmp_path / "saved"):
        assert kept == [0.0, 0.0], "of two ranks' tensors of one name torch keeps the first, for both"
        assert "params/w differ from rank to rank" in said["one name"] and "chains=chains.numbers" in said["one name"]
        assert "opt is State" in said["tuple"] and "bc.state_dict(state)" in said["tuple"]
        assert "opt is tuple" in said["class"] and "tree must be a dictionary" in said["nothing"]
        assert files == ["torch"]


def on_a_module(kind, seed):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    theta, noise = model.parameters(), {"temperature": 0.01, "generator": bc.distributed.generator(seed)}
    if kind == "chain":
        link = bc.inject_langevin_noise(**noise)
        tx = bc.chain(bc.add_momentum(0.9), link, bc.scale_by_neg_lr(0.05))
        return model, bc.optim.Optimizer(theta, lambda group: tx)
    made = {
        "sgld": lambda: bc.optim.SGLD(theta, 0.05, **noise),
        "sghmc": lambda: bc.optim.SGHMC(theta, 0.05, **noise),
        "nesterov": lambda: bc.optim.SGD(theta, 0.05, momentum=0.9, nesterov=True, **noise),
        "adam": lambda: bc.optim.Adam(theta, 0.01, **noise),
        "rmsprop": lambda: bc.optim.RMSprop(theta, 0.01, momentum=0.5, **noise),
        "nadam": lambda: bc.optim.NAdam(theta, 0.01, freeze_after=3, **noise),
    }
    return model, made[kind]()


def trained(model, optimizer, steps):
    x = torch.linspace(-1, 1, 15).view(5, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["sgld", "sghmc", "nesterov", "adam", "rmsprop", "nadam", "chain"])
def test_an_optimizer_goes_on_exactly_from_torchs_own_checkpoint_before_its_first_step(kind, tmp_path):
    model, optimizer = on_a_module(kind, 0)
    trained(model, optimizer, 5)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path / "step"))
    want = trained(model, optimizer, 5)
    model, optimizer = on_a_module(kind, 1)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    weights, state = get_state_dict(model, optimizer)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before), "asking for the state moves nothing"
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path / "step"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(trained(model, optimizer, 5), want)


def network(sharded, kind="sghmc"):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(0)}
    if kind == "sghmc":
        return model, bc.optim.SGHMC(model.parameters(), 0.05, **noise)
    tx = bc.chain(bc.add_momentum(0.9), bc.inject_langevin_noise(**noise), bc.scale_by_neg_lr(0.05))
    return model, bc.optim.Optimizer(model.parameters(), lambda group: tx)


def stepped(model, optimizer, steps):
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(4, 5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def under_fsdp(kind, before, after, steps, sharded=True):
    model, optimizer = network(sharded, kind)
    if before is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(before))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    stepped(model, optimizer, steps)
    if after is not None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(after))
    return [p.detach() for p in model.parameters()] if not sharded else None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["sghmc", "chain"])
def test_an_optimizer_under_fsdp2_on_two_ranks_goes_on_under_four_and_in_one_process(kind, tmp_path):
    run(under_fsdp, 2, tmp_path, kind, None, tmp_path / "a", 4)
    run(under_fsdp, 4, tmp_path, kind, tmp_path / "a", tmp_path / "b", 4)
    got, want = under_fsdp(kind, tmp_path / "b", None, 4, False), under_fsdp(kind, None, None, 12, False)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def messages_on_shards():
    """What noise and chains send: an optimizer's step under FSDP2, an update of a chain on DTensors."""
    model, optimizer = network(True)
    stepped(model, optimizer, 2)
    params, state = begun("sghmc", "fsdp")
    grads = {name: 0.5 * x for name, x in params.items()}
    with CommDebugMode() as counted:
        optimizer.step()
        CHAINS["sghmc"]().update(grads, state, params=params)
    return counted.get_total_counts()


def test_noise_on_shards_sends_no_message(tmp_path):
    assert run(messages_on_shards, 2, tmp_path) == [0, 0]


@pytest.mark.parametrize(
    "other, says",
    [
        (bc.sgld(0.1, temperature=0.05), r"state/0.Momentum.trace\['b'\] is not expected"),
        (bc.adam(0.1, temperature=0.05), "is not there"),
    ],
)
def test_the_state_of_another_chain_is_refused_and_nothing_is_written(other, says, tmp_path):
    saved(tmp_path / "step", 2)
    params = {name: torch.zeros_like(x) for name, x in start().items()}
    with pytest.raises(ValueError, match=says):
        bc.distributed.load(tmp_path / "step", tree_of(params, other.init(params)))
    assert not params["w"].any()


def test_other_shapes_and_dtypes_are_refused(tmp_path):
    bc.distributed.save(tmp_path / "step", {"w": torch.ones(3), "v": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(
        ValueError, match=r"w is torch.float32 \(3,\), expected torch.float32 \(4,\); v is torch.float64"
    ):
        bc.distributed.load(tmp_path / "step", {"w": torch.zeros(4), "v": torch.zeros(2)})


def test_a_checkpoint_is_whole_or_none_and_is_not_written_over(tmp_path):
    saved(tmp_path / "step", 2)
    with pytest.raises(FileExistsError, match="holds a checkpoint already"):
        saved(tmp_path / "step", 3)
    (tmp_path / "step" / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="not written to its end"):
        loaded(tmp_path / "step")


def test_a_row_of_many_chains_is_written_alone(tmp_path):
    bc.distributed.save(tmp_path / "step", {"w": torch.zeros(8, 10_000)}, chains=range(8))
    assert sum(p.stat().st_size for p in (tmp_path / "step").glob("*.distcp")) < 8 * 10_000 * 4 + 8 * 4_000


def test_with_chains_every_tensor_has_their_axis(tmp_path):
    with pytest.raises(ValueError, match=r"w is of shape \(3,\); with chains= axis 0 .* counts the 2 chains"):
        bc.distributed.save(tmp_path / "step", {"w": torch.ones(3)}, chains=range(2))
    assert all("spread as (Shard(dim=0),)" in said for said in run(chains_cut, 2, tmp_path, tmp_path / "cut"))


def chains_cut(path):
    x = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    return message_of(lambda: bc.distributed.save(path, {"w": x}, chains=range(2)))
