"""Parameters spread over ranks: their layout is known, and what needs whole ones refuses them by name."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bayesopt_chain as bc
from tests.distributed.ranks import message_of, run


def numbered(module):
    """The module with every parameter holding the numbers of its elements."""
    for p in module.parameters():
        with torch.no_grad():
            p.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape))
    return module


def elements(module):
    """By parameter: the numbers that this rank holds, and those that its runs name."""
    found = {}
    for name, p in module.named_parameters():
        runs = bc.distributed.runs_of(p)
        named = [i for start, length in runs for i in range(start, start + length)]
        found[name] = (p.to_local().flatten().long().tolist(), named, str(p.placements))
    return found


def network():
    return numbered(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)))


def fsdp():
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return elements(model)


def hsdp():
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return elements(model)


def fsdp_times_tp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return elements(model)


@pytest.mark.parametrize("layout, size", [(fsdp, 2), (fsdp, 3), (hsdp, 4), (fsdp_times_tp, 4)])
def test_the_runs_name_the_elements_that_fsdp2_and_tensor_parallelism_leave_on_a_rank(layout, size, tmp_path):
    ranks = run(layout, size, tmp_path)
    for name in ranks[0]:
        for found in ranks:
            assert found[name][0] == found[name][1], (name, found[name][2])
        assert {i for found in ranks for i in found[name][1]} == set(
            range(max(ranks[0][name][1] + ranks[-1][name][1]) + 1)
        )
    if layout is fsdp_times_tp:
        assert "_StridedShard" in ranks[0]["0.weight"][2] or "_S(" in ranks[0]["0.weight"][2]


def spread_over(mesh):
    return {"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])}


def refusals():
    """What is said of DTensors by what cannot take them, and whether anything moved."""
    mesh = init_device_mesh("cpu", (2,))
    params = spread_over(mesh)
    whole = {"w": distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])}
    loss = lambda p, batch: (p["w"] ** 2).sum()  # noqa: E731
    links, precision = {}, bc.precision.Dense(torch.eye(12), torch.tensor(1.0), params_like := {"w": torch.ones(4, 3)})
    for name, tx in {
        "sgfs": bc.samplers.sgfs(0.1, temperature=0.1, batch_size=4, dense=True),
        "precision": bc.chain(bc.scale_by_preconditioner(precision), bc.sghmc(0.1, temperature=0.1)),
        "vi": bc.vi.dense(bc.sgd(0.1), temperature=0.1),
        "swag": bc.swag(rank=2),
        "ekf": bc.ekf.dense(lr=1.0, prior_precision=1.0),
    }.items():
        links[name] = message_of(lambda tx=tx: tx.init(params))
        links[name + ", replicated"] = message_of(lambda tx=tx: tx.init(whole))
    del params_like
    said, cold = {}, bc.sgd(0.1)
    said["broadcast"] = message_of(lambda: bc.distributed.broadcast(params, mesh))
    step, state = bc.make_step(loss, cold), cold.init(params)
    said["capture"] = message_of(lambda: bc.capture(step, params, state, None))
    said["fused"] = message_of(lambda: step(params, cold.init(whole), None))
    stacked = {"w": torch.stack([params["w"]] * 2)}
    chains = bc.parallel(step, 2)
    said["vmap"] = message_of(lambda: chains(stacked, chains.init(cold, stacked), None))
    said["plain gradient"] = message_of(lambda: cold.update({"w": torch.ones(4, 3)}, state, params=params))
    said["prior"] = message_of(lambda: bc.links.add_localization({"w": torch.ones(4, 3)}, 0.1).init(params))
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    functional = lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean()  # noqa: E731
    sharded = dict(model.named_parameters())
    fsdp = {
        "functional_call": message_of(
            lambda: bc.make_step(functional, cold)(sharded, cold.init(sharded), torch.ones(2, 4))
        ),
        "make_functional": message_of(lambda: bc.make_functional(model)),
    }
    generator = bc.distributed.generator(0)
    model(torch.ones(2, 4)).square().mean().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = bc.optim.SGHMC(model.parameters(), 0.1, temperature=0.1, generator=generator)
        for _ in range(2):
            optimizer.step()
    held = all(type(p).__name__ == "DTensor" or hasattr(p, "placements") for p in optimizer.param_groups[0]["params"])
    unwatched = [str(w.message) for w in caught if "heat guard" in str(w.message)]
    return links, said, fsdp, not held, unwatched


def test_what_needs_whole_parameters_refuses_dtensors_by_name_before_anything_moves(tmp_path):
    for links, said, fsdp, changed, unwatched in run(refusals, 2, tmp_path):
        assert not changed
        assert len(unwatched) == 1 and "spread over ranks (DTensors)" in unwatched[0]
        for case, text in links.items():
            assert text is not None and text.startswith("ValueError: chain: "), (case, text)
            assert "['w'] is a DTensor" in text, (case, text)
        for case, text in said.items():
            assert text is not None and ("DTensor" in text or "spread" in text or "plain tensor" in text), (case, text)
        for case, text in fsdp.items():
            assert text is not None and "it by loss.backward() and an optimizer of bc.optim" in text, (case, text)


def trained(sharded):
    torch.manual_seed(0)
    model = network().double()
    for p in model.parameters():
        p.data.mul_(0.01)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = bc.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5)
    for _ in range(5):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.full_tensor().detach() if sharded else p.detach() for p in model.parameters()]


def test_temperature_zero_trains_under_fsdp2_as_in_one_process(tmp_path):
    (alone,), two = run(trained, 1, tmp_path, False), run(trained, 2, tmp_path, True)
    for found in two:
        for a, b in zip(alone, found):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
