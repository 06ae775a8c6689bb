"""Engines that hand plain tensors or shards to the optimizer: right on two ranks, or refused on both."""

import copy
import os
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.distributed.ranks import gather_objects
from bayesopt_chain.matching.response import Nonlinear
from tests.distributed.ranks import message_of, on, run, whole, world
from tests.distributed.toys import network, under

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Unit(Link):
    """Divides the gradient of each leaf by its norm, as the page on architecture says."""

    traits: Traits
    response = Nonlinear()

    def update(self, g, state, op, context):
        units = optree.tree_map(lambda x: x / x.norm(), context.tree(g))
        return op.put(g, context.leaves(units)), state


CHAINS = {
    "Optimizer": lambda noise: bc.sghmc(0.05, **noise),
    "a link of a user's own": lambda noise: bc.chain(
        bc.Chain((Unit(Traits(on_shards="tree")),)), bc.inject_langevin_noise(**noise), bc.scale_by_neg_lr(0.05)
    ),
}
WHOLE = bc.chain(bc.Chain((Unit(Traits()),)), bc.scale_by_neg_lr(0.05))
OPTIMIZERS = {
    "SGHMC": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD, cold": {"lr": 0.05, "momentum": 0.9},
    "SGLD": {"lr": 0.05},
    "Adam": {"lr": 0.01, "freeze_after": 3},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01, "freeze_after": 3},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.01},
    "IVON": {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1},
    **CHAINS,
}
ENGINES = ("ddp", "fsdp", "hsdp", "tp", "tp by fsdp")
# parts of FSDP1 and of ZeRO, which the optimizer is told of, and what else puts names in front of parameters
WRAPPED = (
    "fsdp1 original", "zero", "checkpoint", "compile", "compile+ddp", "checkpoint+ddp+compile", "checkpoint+fsdp"
)  # fmt: skip


def data(parts=True):
    """This rank's part of the data, or all of them."""
    every = torch.randn(12, 5, generator=torch.Generator().manual_seed(100), dtype=torch.float64)
    return every[world()[0] :: world()[1]] if parts else every


def noise(chain=0, seed=0):
    return {"temperature": 0.01, "generator": bc.distributed.generator(seed, chain=chain)}


def optimizer_of(params, name="SGHMC", chain=0, seed=0):
    if name in CHAINS:
        tx = CHAINS[name](noise(chain, seed))
        return bc.optim.Optimizer(params, lambda group: tx)
    make, _, cold = name.partition(", ")
    return getattr(bc.optim, make)(params, **({} if cold else noise(chain, seed)), **OPTIMIZERS[name])


def zero_of(model):
    return ZeroRedundancyOptimizer(model.parameters(), bc.optim.SGHMC, lr=0.05, **noise())


def train(model, optimizer, x=None, steps=9, backward=None):
    """Steps that were made before a refusal, and what it said; steps of one-line optimizers send no message."""
    x, messages = data() if x is None else x, CommDebugMode()
    for step in range(steps):
        optimizer.zero_grad()
        with getattr(optimizer, "sampled", nullcontext)():
            backward() if backward else model(x).square().mean().backward()
        try:
            with messages if step == 3 else nullcontext():
                optimizer.step()
        except ValueError as err:
            return step, str(err)
    assert isinstance(optimizer, ZeroRedundancyOptimizer | bc.optim.Optimizer) or messages.get_total_counts() == 0
    return steps, ""


def weights(model):
    with FullyShardedDataParallel.summon_full_params(model):
        return torch.cat([p.detach().flatten() for p in whole([*model.parameters()])])


def made(name, engine="", seed=0):
    """A model under an engine, and its optimizer."""
    model = network()
    for wrapper in filter(None, engine.split("+")):
        model = under(wrapper, model)
    params = [*model.named_parameters()]
    if "fsdp1" in engine or engine == "zero":
        params = bc.distributed.part(params, bc.distributed.flat_shards(model) if engine != "zero" else None)
    return model, zero_of(model) if engine == "zero" else optimizer_of(params, name, seed=seed)


def trained(name, engine="", flat=None, full=False):
    """Steps with a change of temperature on the way; with ``flat``, of another optimizer from a state dict of the first."""
    (model, optimizer), x = made(name, engine), data(engine in WRAPPED and "dp" in engine)
    assert train(model, optimizer, x, 4) == (4, ""), engine
    if flat is not None:
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
        saved = copy.deepcopy((dcp.get_optimizer_state_dict(model, optimizer, options=options), model.state_dict()))
        model, optimizer = made(name, engine, seed=1)
        model.load_state_dict(saved[1])
        # torch 2.13 loads no state dict that is both, of its own optimizers either (KeyError: 'param_groups.0.params.0')
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full and not flat)
        dcp.set_optimizer_state_dict(model, optimizer, saved[0], options=options)
    for group in optimizer.param_groups:
        group |= {"temperature": 2 * group["temperature"]} if "temperature" in group else {}
    assert train(model, optimizer, x, 2) == (2, "")
    for p, x in ((p, x) for p, state in optimizer.state.items() for x in state.values()):
        assert not torch.is_tensor(x) or x.ndim == 0 or getattr(p, "placements", 0) == getattr(x, "placements", 0)
    return weights(model)


@on(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_makes_the_steps_of_one_process_under_every_engine_and_goes_on_from_its_state_dicts(name):
    """Bit for bit under DistributedDataParallel, whose average is of equal gradients of all data, and from state dicts. Steps
    of shards, products of matrices that ranks share and means over parts of the data round otherwise."""
    want, kinds = trained(name), [(False, True), (True, False), (False, False), (True, True)]
    for engine in (*ENGINES, *WRAPPED) if name == "SGHMC" else ENGINES:
        found, rounding = trained(name, engine), 0.0 if engine in ("ddp", "zero", "checkpoint", "compile") else 1e-12
        torch.testing.assert_close(found, want, rtol=0, atol=rounding, msg=lambda said: f"{engine}: {said}")  # noqa: B023
        for flat, full in kinds if name == "SGHMC" else kinds[:2]:
            if engine in ("ddp", "fsdp") and name != "Adagrad":  # torch does not read what begins before the first step
                again, rounding = trained(name, engine, flat, full), 1e-9 if name == "NAdam" else 0.0
                torch.testing.assert_close(
                    again, found, rtol=0, atol=rounding
                )  # it reads mu_product, float32, as float64


# what is refused, by words, or goes on


def stages(names):
    """Two stages with a message between them, by hand: forward to the second, gradient back to the first."""
    rank = world()[0]
    stage = network(*((5, 4, 3) if rank == 0 else (3, 4, 1)), seed=rank)

    def backward():
        if rank == 0:
            out = stage(data())
            dist.send(out.detach(), 1)
            dist.recv(back := torch.empty_like(out), 1)
            out.backward(back)
        else:
            dist.recv(came := torch.empty(6, 3, dtype=torch.float64), 0)
            stage(came.requires_grad_()).square().mean().backward()
            dist.send(came.grad, 0)

    return train(stage, optimizer_of(names(stage, rank)), None, 3, backward)


def odd():
    """A layer of dead units, whose gradients are zero, a leaf that is frozen, and one that nothing uses."""
    model = network()
    nn.init.constant_(model[0].bias, -100.0)
    model[2].weight.requires_grad_(False)
    model.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    return model


def parting_later(rank, path):
    optimizer = optimizer_of((model := under("ddp")).parameters())
    optimizer.watch(every=2)
    assert train(model, optimizer, steps=3) == (3, "")
    optimizer.param_groups[0]["noise_key"] += rank
    return train(model, optimizer)


def joined(rank, path):
    model, optimizer = made("SGHMC", "ddp")
    with model.join():
        train(model, optimizer, steps=2 + 3 * rank)
    return train(model, optimizer)


def forked(rank, path):
    """Each rank has a generator of its own, and the first one's key counts."""
    model, optimizer = made("SGHMC", "hsdp")
    train(model, optimizer, steps=4)
    optimizer.fork(bc.distributed.generator(5, chain=rank))
    made_, said = train(model, optimizer)
    return made_, said or "" if torch.equal(*gather_objects(weights(model), None)) else "drifted"


def by_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


def kept_as_chains(path, averaged=lambda model: model, chain=0):
    """A run of two chains as it seems, on ranks that run one: its average is taken inside the loss, by hooks, or not at all."""
    model, made = network(), []
    optimizer, forward = optimizer_of(model.parameters(), chain=chain), averaged(model)
    step = bc.optim.as_step(model, optimizer, lambda model, x: (made.append(1), forward(x).square().mean())[1])
    said = message_of(lambda: bc.sample(step, step.params, step.state, [data()], steps=6, path=path))
    dist.barrier()
    assert said or bc.Draws.open(path).chains == 2
    return len(made), said or ""


def trains(model, name="SGHMC", x=None, names=nn.Module.parameters, watched=True, **options):
    optimizer = optimizer_of(names(model), name, **options)
    optimizer.watch(first=watched)
    return train(model, optimizer, x)


named, seen = nn.Module.named_parameters, {"find_unused_parameters": True}
PARTS, KEYS = (
    ("under one key", "bc.distributed.part("),
    ("last", "generator=bc.distributed.generator(seed, chain=rank)"),
)
KEPT = ("they run one chain, and this run would keep it as two",)
# After how many steps training ends, and the words it is refused in; where they begin with "last", on the rank that comes last.
ENDS = {
    "fsdp1": (1, PARTS, lambda rank, path: trains(under("fsdp1"))),
    "fsdp1, original": (1, PARTS, lambda rank, path: trains(under("fsdp1 original"), names=named)),
    "fsdp1 as a step": (0, ("under FullyShardedDataParallel (FSDP1)",), lambda rank, path: (
        0, message_of(bc.optim.as_step, *made("SGHMC", "fsdp1 original"), lambda model, x: model(x).mean())
    )),
    "zero": (1, PARTS, lambda rank, path: train(model := under("ddp"), zero_of(model))),
    "pipeline": (1, PARTS, lambda rank, path: stages(lambda stage, rank: named(stage))),
    "ddp with two keys": (
        2, ("noise of two keys", "=bc.distributed.generator(seed)"), lambda rank, path: trains(under("ddp"), chain=rank)
    ),
    "ddp with keys that part later": (2, ("noise of two keys",), parting_later),
    "replicas of unequal numbers of steps": (1, ("have drawn 2 and 5 times", "DistributedSampler"), joined),
    "chains without keys": (2, KEYS, lambda rank, path: trains(network())),
    "an optimizer of chains without keys": (1, KEYS, lambda rank, path: trains(network(seed=rank), "Optimizer")),
    "a fork without keys": (0, ("fork: 2 ranks run",), lambda rank, path: (0, message_of(made("SGHMC")[1].fork))),
    "a link that says nothing of shards": (0, ("needs whole leaves, and [0] is a DTensor",), lambda rank, path: (
        0, message_of(bc.optim.Optimizer, under("fsdp").parameters(), lambda group: WHOLE)
    )),
    "chains with dead leaves": (9, (), lambda rank, path: trains(odd(), names=named, chain=rank)),
    "ddp with dead leaves": (9, (), lambda rank, path: trains(DistributedDataParallel(odd(), **seen), names=named)),
    "hsdp with a fork": (9, (), forked),
    "chains from one start on the same data": (9, (), lambda rank, path: trains(network(), x=data(False), chain=rank)),
    "chains of an optimizer of chains": (9, (), lambda rank, path: trains(network(), "Optimizer", data(False), chain=rank)),
    "one chain kept as two, averaged in its loss": (2, KEPT, lambda rank, path: kept_as_chains(path, DistributedDataParallel)),
    "one chain kept as two, averaged by hooks": (2, KEPT, lambda rank, path: kept_as_chains(path, by_hooks)),
    "chains without keys that are kept": (2, KEYS, lambda rank, path: kept_as_chains(path)),
    "chains that are kept": (6, (), lambda rank, path: kept_as_chains(path, chain=rank)),
    "one key on purpose": (9, (), lambda rank, path: trains(network(seed=rank), watched=False)),
    "pipeline with parts": (
        3, (), lambda rank, path: stages(lambda s, r: bc.distributed.part(named(s), lambda name, p: f"stage{r}.{name}"))
    ),
}  # fmt: skip


@on(2)
@pytest.mark.parametrize("case", ENDS)
def test_training_under_an_engine_goes_on_or_is_refused_on_every_rank(case, tmp_path):
    steps, words, make = ENDS[case]
    last, every = "last" in words, gather_objects(make(world()[0], tmp_path), None)
    refused = [said for made, said in every if made == steps]
    assert refused if last else len(refused) == len(every), every
    assert all(word in said for said in refused for word in words if word != "last"), every
    assert words or not any(refused), every


def test_flattened_parts_draw_on_two_ranks_what_the_whole_draws_on_one():
    (one,), two = (run(trained, size, "SGHMC", "fsdp1") for size in (1, 2))
    torch.testing.assert_close(two, [one, one], rtol=0, atol=1e-12)


@on(2)
def test_lightnings_strategy_for_fsdp2_makes_the_steps_of_one_process():
    """Four epochs of one batch."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return optimizer_of(named(self.net))

    (rank, size), module = world(), Module()
    module.net = network()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    where = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": 4, **dict.fromkeys(quiet, False)}
    launch = {  # of torchrun
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0,
    }  # fmt: skip
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launch.items()}):
        lightning.Trainer(**where).fit(module, torch.utils.data.DataLoader(data(False), batch_size=6))
    model, optimizer = made("SGHMC")
    train(model, optimizer, data(False), 4)
    torch.testing.assert_close(weights(module.net), weights(model), rtol=0, atol=1e-12)


@on(2)
def test_what_comparisons_cost_is_six_in_three_hundred_steps():
    (model, optimizer), calls = made("SGHMC", "ddp"), []
    look = optimizer._witness.look
    optimizer._witness.look = lambda claims, of: look(lambda: (calls.append(1), claims())[1], of)
    assert train(model, optimizer, steps=300) == (300, "") and len(calls) == 6
