"""Chains on parameters that are spread over ranks: the trajectory of one process, in every layout, or a refusal by name."""

import optree
import pytest
import torch
import torch.distributed as dist
import torchopt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bayesopt_chain as bc
from tests.distributed.layouts import layouts, leaves, local, parts, spread
from tests.distributed.ranks import run
from tests.registry import POSTERIORS, TRANSFORMS

STEPS = 4
REFUSED = {  # rows with a link that mixes elements, or asks for the shape of a whole leaf
    "links.add_gaussian_prior, fan-in",
    "samplers.mclmc",
    "samplers.scale_by_stein_kernel",
    "samplers.langevin_with_precision",
    "samplers.sgfs, dense",
    "samplers.svgd",
    "samplers.replica_exchange",
    *[str(row) for row in POSTERIORS if not str(row).startswith(("vi.mean_field", "vi.ivon", "laplace"))],
} - {"ekf.diagonal, mixed rows"}  # that of the other row of the filter has plain rows


def trajectory(tx, params, inplace, batches, seed):
    """The parameters after some steps, each with the gradient of a quadratic loss and a batch's noise."""
    torch.manual_seed(seed)
    state = tx.init(params)
    for batch in batches:
        grads = {name: 0.5 * p + 0.1 * batch[name] for name, p in params.items()}
        updates, state = tx.update(grads, state, params=params, inplace=inplace)
        params = {name: p + updates[name] for name, p in params.items()}
    return params, state


def compared(inplace, chosen):
    """By row and layout: the largest difference to one process, or what the refusal says."""
    found, batches = {}, [leaves(10 + step) for step in range(STEPS)]
    known = {name: layout for name, layout in layouts().items() if chosen is None or name in chosen}
    here = {name: [spread(batch, layout) for batch in batches] for name, layout in known.items()}
    for row in TRANSFORMS:
        tx = row.build(0.1)
        if str(row) not in REFUSED:
            whole, _ = trajectory(tx, leaves(0), inplace, batches, 3)
        for name, layout in known.items():
            try:  # the ranks are seeded as it happens: the first one's key is all ranks'
                got, state = trajectory(tx, spread(leaves(0), layout), inplace, here[name], 3 + dist.get_rank())
            except ValueError as err:
                found[str(row), name] = str(err)
                continue
            off = [
                (a - b).abs().max().item()
                for a, b in zip(*map(values, (parts(whole, layout), local(got))))
                if a.numel()
            ]
            found[str(row), name] = max(off)
            sizes = {tuple(x.shape) for x in optree.tree_leaves(state) if x.ndim > 1 and not isinstance(x, DTensor)}
            assert not sizes & {(10, 6), (3, 7)}, "memory of a leaf is spread as the leaf is"
    return found


def values(tree):
    return [tree[name] for name in sorted(tree)]


@pytest.mark.slow
@pytest.mark.parametrize("inplace, chosen", [(True, None), (False, ["Shard(0), uneven and empty", "FSDP x TP"])])
def test_every_transform_makes_the_steps_of_one_process_in_every_layout_or_refuses_by_name(inplace, chosen, tmp_path):
    ranks = run(compared, 4, tmp_path, inplace, chosen)
    for found in ranks:
        for (row, layout), off in found.items():
            if row in REFUSED:
                assert isinstance(off, str) and "is a DTensor, of which each rank has a part" in off, (row, layout, off)
            else:
                assert off <= 1e-12, (row, layout, off)
    assert len(ranks[0]) == len(chosen or range(5)) * len(TRANSFORMS)


# torch's optimizers, under torch's own ways to spread a module


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def under_fsdp(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))


def under_hsdp(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def under_tp(model):
    parallelize_module(model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def under_both(model):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])


WAYS = (under_fsdp, under_hsdp, under_tp, under_both)

OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGLD": {"lr": 0.05},
    "SGHMC": {"lr": 0.05},
    "Adam": {"lr": 0.01, "freeze_after": 3},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.01},
    "Optimizer": {},
}


def optimizer_of(name, model):
    generator = bc.distributed.generator(0)
    if name == "Optimizer":
        return bc.optim.Optimizer(
            model.parameters(),
            lambda group: bc.sghmc(0.05, temperature=0.01, generator=generator),
        )
    make = getattr(bc.optim, name)
    return make(model.named_parameters(), temperature=0.01, generator=generator, **OPTIMIZERS[name])


def trained(name, model):
    """The optimizer after six steps of the model, with the temperature changed on the way."""
    optimizer = optimizer_of(name, model)
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).view(12, 5)
    for step in range(6):
        if step == 4:
            for group in optimizer.param_groups:
                group["temperature"] = 0.02
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def optimized():
    """By optimizer and way: the largest difference to one process."""
    found = {}
    for name in OPTIMIZERS:
        alone = network()
        trained(name, alone)
        for way in WAYS:
            model = network()
            way(model)
            optimizer = trained(name, model)
            mine = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
            found[name, way.__name__] = max((a - b).abs().max().item() for a, b in zip(alone.parameters(), mine))
            for p, state in optimizer.state.items():
                for x in state.values():
                    assert not torch.is_tensor(x) or x.ndim == 0 or isinstance(p, DTensor) == isinstance(x, DTensor)
                    assert not isinstance(x, DTensor) or x.placements == p.placements
            assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"]))
    return found


@pytest.mark.slow
def test_every_optimizer_steps_under_fsdp2_and_tensor_parallelism_as_in_one_process(tmp_path):
    for found in run(optimized, 4, tmp_path):
        assert len(found) == len(OPTIMIZERS) * len(WAYS)
        assert max(found.values()) <= 1e-9, found


# whole steps


def loss(params, batch):
    hidden = torch.tanh(batch @ params["weight"].T)
    return (hidden**2).mean() + (params["bias"] ** 2).sum() * params["scale"] + params["head"].sin().mean()


def chain_of(kind):
    sampler = bc.sghmc(0.05, temperature=0.01, generator=bc.distributed.generator(1))
    if kind == "clipped":  # below the norm of every step's gradient
        return bc.chain(torchopt.clip_grad_norm(0.1), sampler)
    return bc.skip_nonfinite(sampler) if kind == "skipping" else sampler


def stepped():
    """By kind, layout and mode: the largest difference to one process of parameters, loss and norm; the messages of a step."""
    found, batch = {}, torch.linspace(-1, 1, 72, dtype=torch.float64).view(12, 6)
    for kind, inplace in [("plain", True), ("plain", False), ("clipped", True), ("clipped", False), ("skipping", True)]:
        options = {"inplace": inplace, "monitor": True, "check_finite": True}
        step, params = bc.make_step(loss, tx := chain_of(kind), **options), leaves(0)
        state = tx.init(params)
        for _ in range(4):
            params, state, info = step(params, state, batch)
        for name, (mesh, placements) in layouts().items():
            whole = [Replicate()] * mesh.ndim
            layout = mesh, {leaf: whole if p is None else p for leaf, p in placements.items()}
            step, mine = bc.make_step(loss, tx := chain_of(kind), **options), spread(leaves(0), layout)
            state = tx.init(mine)
            seen = DTensor.from_local(batch, mesh, whole, run_check=False)
            for _ in range(4):
                mine, state, there = step(mine, state, seen)
            off = [
                (a - b).abs().max().item()
                for a, b in zip(*map(values, (parts(params, layout), local(mine))))
                if a.numel()
            ]
            off += [abs(info.loss - there.loss).item(), abs(info.gradient_norm - there.gradient_norm).item()]
            found[kind, name, inplace] = max(off)
    return found


@pytest.mark.slow
def test_whole_steps_on_spread_parameters_are_those_of_one_process_clipped_by_the_norm_of_all_ranks(tmp_path):
    for found in run(stepped, 4, tmp_path):
        assert max(found.values()) <= 1e-12, found


def messages():
    """Those of five updates of a sampler, and of a step with a gradient to be summed over the ranks."""
    layout = layouts()["FSDP x TP"]
    params, batch = spread(leaves(0), layout), spread(leaves(1), layout)
    tx = bc.sghmc(0.05, temperature=0.01, generator=bc.distributed.generator(1))
    state = tx.init(params)
    with CommDebugMode() as counted:
        for _ in range(5):
            updates, state = tx.update(batch, state, params=params, inplace=False)
    sums = {
        k: DTensor.from_local(torch.ones(x.shape, dtype=x.dtype), layout[0], [Partial()] * 2)
        for k, x in leaves(0).items()
    }
    updates, _ = bc.sgd(1.0).update(sums, bc.sgd(1.0).init(params), params=params, inplace=False)
    return counted.get_total_counts(), [x.to_local() for x in updates.values()]


def test_noise_on_spread_parameters_sends_nothing_and_partial_gradients_are_summed(tmp_path):
    for count, moves in run(messages, 4, tmp_path):
        assert count == 0
        assert all((x == -4.0).all() for x in moves)
