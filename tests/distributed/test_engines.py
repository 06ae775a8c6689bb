"""Engines that hand plain tensors or shards to the optimizer: right on two ranks, or refused on both."""

import copy
import functools
import os
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.distributed.ranks import chains_of, gather_objects
from bayesopt_chain.ensemble.stages import Stages
from bayesopt_chain.matching.response import Nonlinear
from bayesopt_chain.random.stream import chain_seed
from tests.distributed.ranks import mesh_of, message_of, on, refuses, run, whole, world
from tests.distributed.toys import TX, N, line, loss, network, one, start, under
from tests.ensemble.test_untidy import packed

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
    "NAdam": {"lr": 0.01, "freeze_after": 3},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.01},
    "IVON": {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1},
    **CHAINS,
}
ENGINES = ("ddp", "fsdp", "hsdp", "tp", "tp by fsdp")
# parts of ZeRO, which the optimizer is told of, and what else puts names in front of parameters
WRAPPED = (
    "zero", "checkpoint", "compile", "compile+ddp", "checkpoint+ddp+compile", "checkpoint+fsdp"
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
    return torch.cat([p.detach().flatten() for p in whole([*model.parameters()])])


def made(name, engine="", seed=0):
    """A model under an engine, and its optimizer."""
    model = network()
    for wrapper in filter(None, engine.split("+")):
        model = under(wrapper, model)
    params = [*model.named_parameters()]
    if engine == "zero":
        return bc.distributed.part(params) and (model, zero_of(model))
    return model, optimizer_of(params, name, seed=seed)


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
    of shards, products of matrices that ranks share and means over parts of the data round otherwise.

    One class under all engines, the others under three, of which the last one, and the kind of state dict, take turns."""
    want, kinds, turn = (
        trained(name),
        [(False, True), (True, False), (False, False), (True, True)],
        [*OPTIMIZERS].index(name),
    )
    for engine in (*ENGINES, *WRAPPED) if name == "SGHMC" else (*ENGINES[:2], ENGINES[2 + turn % 3]):
        found, rounding = trained(name, engine), 0.0 if engine in ("ddp", "zero", "checkpoint", "compile") else 1e-12
        torch.testing.assert_close(found, want, rtol=0, atol=rounding, msg=lambda said: f"{engine}: {said}")  # noqa: B023
        if engine in ("ddp", "fsdp") and name != "Adagrad":  # torch does not read what begins before the first step
            flat, full = kinds[(turn + (engine == "fsdp")) % 4]
            again, rounding = trained(name, engine, flat, full), 1e-9 if name == "NAdam" else 0.0
            torch.testing.assert_close(again, found, rtol=0, atol=rounding)  # it reads mu_product, float32, as float64


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
    assert train(model, optimizer, steps=3) == (3, "")
    optimizer.param_groups[0]["noise_key"] += rank
    return train(model, optimizer, steps=20)


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


def bare(tx, start=0.0):
    """A loop of steps on shards of a leaf beside one that is whole on every rank."""
    params, made = (
        {"w": distribute_tensor(torch.ones(4), mesh_of(2), [Shard(0)]), "b": torch.full((2,), float(start))},
        [],
    )
    steps = bc.iterate(bc.make_step(lambda p, x: (p["w"] ** 2).sum(), tx), params, tx.init(params), None, steps=20)
    said = message_of(lambda: [made.append(1) for _ in steps])
    return len(made), said or ""


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
    optimizer.watch(watched)
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
    "ddp with keys that part later": (13, ("noise of two keys",), parting_later),
    "replicas of unequal numbers of steps": (1, ("have drawn 2 and 5 times", "DistributedSampler"), joined),
    "chains without keys": (2, KEYS, lambda rank, path: trains(network())),
    **{
        f"a chain at {name} on shards": (steps, (f"with {field} = {values}",), lambda rank, path, make=make: train(
            model := under("fsdp"), bc.optim.Optimizer(model.parameters(), lambda group: make(rank))
        ))
        for name, (steps, field, values, make) in {
            "another rate": (1, "Scale.step_size of link 2", "0.05 and 0.1", lambda r: bc.sghmc(0.05 * (1 + r), **noise())),
            "another schedule": (
                1, "Scale.step_size of link 2", "0.025", lambda r: bc.sghmc(lambda n: 0.05 / (1 + n * (1 + r)), **noise())
            ),
        }.items()
    },
    "steps on shards": (20, (), lambda rank, path: bare(bc.sghmc(0.1, **noise()))),
    "steps on shards, without noise on one rank": (0, ("init: ", "other links draw noise;"), lambda rank, path: (
        0, message_of(bare, bc.sghmc(0.1, temperature=0.1 * rank))
    )),
    **{
        f"steps on shards, another {name}": (steps, ("make_step: ranks step one chain with other " + words,), (
            lambda rank, path, make=make: bare(make(1 + rank))
        ))
        for name, (steps, words, make) in {
            "rate": (0, "Scale.step_size of link 2 (0.1, 0.2);", lambda r: bc.sghmc(0.1 * r, **noise())),
            "rate, cold": (0, "Scale.step_size of link 0 (0.1, 0.2);", lambda r: bc.sgd(0.1 * r)),
            "temperature": (0, "LangevinNoise.temperature of link 1 (0.1, 0.2);", lambda r: bc.sghmc(0.1, temperature=0.1 * r)),
            "temperature in a tensor": (
                0, "LangevinNoise.temperature of link 1 (0.5, 1.0);", lambda r: bc.sghmc(0.1, temperature=torch.tensor(r / 2))
            ),
            "momentum": (0, "Momentum.momentum of link 0 (0.25, 0.5);", lambda r: bc.sgd(0.1, r / 4)),
            "decay": (0, "AddDecayedWeights.weight_decay of link 0 (0.5, 1.0);", lambda r: bc.sgd(0.1, weight_decay=r / 2)),
            "average": (0, "ScaleByAdam.b2 of link 0 (0.25, 0.5);", lambda r: bc.adam(0.1, betas=(0.5, r / 4))),
            "schedule": (1, "Scale.step_size of link 0 (0.25, 0.5);", lambda r: bc.sgd(lambda n: 0.5 / (1 + n * (r - 1)))),
            "chain": (0, "links;", lambda r: bc.sgd(0.1, 0.9) if r == 1 else bc.sgd(0.1)),
        }.items()
    },
    "steps on shards with another whole leaf": (
        0, ("params/b differ between ranks that hold parts of one chain",), lambda rank, path: bare(bc.sgd(0.1), rank)
    ),
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
    step = optimizer._witness.step
    optimizer._witness.step = lambda claims, params: step(lambda: (calls.append(1), claims())[1], params)
    assert train(model, optimizer, steps=300) == (300, "") and len(calls) == 6


# Steps, chains and the members of an ensemble that ranks share are those of one process; what would be wrong is refused


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, TX), N).init(TX, start(N), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rank, chains", [*enumerate([range(2), range(2, 4), range(4, 5), range(5, 6)])])
def test_of_ranks_the_first_run_one_chain_more(rank, chains):
    assert chains_of(6, SimpleNamespace(size=lambda: 4, get_local_rank=lambda: rank)) == chains


@on(2)
def test_a_rank_outside_of_the_mesh_of_the_parameters_begins_a_chain_without_noise():
    params = {"w": distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])}
    assert bc.sgd(0.1, momentum=0.9).init(params)[0].trace[0].to_local().numel() == 4 * (world()[0] == 0)


# one chain, each rank with a part of every batch


@on(2)
def test_gradients_keep_their_dtypes():
    tx, params = bc.sgd(0.5), {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float64)}
    step = bc.make_step(lambda p, x: (p["w"].float() * x).sum(-1).mean() + p["b"].float(), tx, mesh=line())
    params, _, info = step(params, tx.init(params), torch.full((4, 3), 1.0 + world()[0]))
    assert params["w"].dtype == torch.bfloat16 and params["b"].dtype == torch.float64
    assert params["w"].tolist() == [0.25] * 3 and params["b"] == -0.5 and info.loss == 4.5


@on(2, 4)
def test_a_step_sends_one_message_of_the_gradient_and_two_numbers_and_the_noise_none_and_comparisons_two_numbers_each():
    step, params, state, batch, _ = one()
    sent, real = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as messages:
        patch.setattr(
            dist, "all_reduce", lambda x, *way, **options: (sent.append(x.numel()), real(x, *way, **options))[1]
        )
        for _ in range(9):
            params, state, _ = step(params, state, batch)
        TX.update(start(), state, params=params)
    mean, compared = [sum(x.numel() for x in params.values()) + 2], [2, 2]  # chains, and what they start a step from
    assert sent == 2 * [*compared, *mean] + mean + compared + 6 * mean and messages.get_total_counts() == len(sent)


@on(2)
def test_what_would_be_silently_wrong_is_refused_on_every_rank():
    rank, mesh = world()[0], line()
    torch.manual_seed(rank)
    noisy, *spread, batch, _ = one()
    params, still, seeded = start(), bc.sgd(0.1), torch.Generator().manual_seed(0)
    own = bc.chain(bc.inject_langevin_noise(0.1, generator=seeded), bc.scale_by_neg_lr(0.1))
    cold, stacked = ({k: p + rank for k, p in params.items()}, {k: torch.stack([p, p]) for k, p in params.items()})
    step = bc.make_step(loss, still, mesh=mesh)
    plain, many = bc.make_step(lambda p, b: loss(p, b[:2]), still, mesh=mesh), bc.parallel(step, 2)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    wrapped = lambda p, b: torch.func.functional_call(model, p, (b[0],)).square().mean()  # noqa: E731
    forward, inner, _ = bc.make_functional(model)
    inside, theta = bc.make_step(lambda p, b: forward(p, b).square().mean(), still), [*model.parameters()]
    outside, hot, parts = bc.make_step(wrapped, still), {"temperature": 0.1}, bc.epochs(batch, 4, seed=3)
    refuses(
        {
            ("1 chains on 2 ranks leave some without one",): lambda: bc.parallel(step, 1, mesh=mesh),
            ('mesh["first"]',): lambda: bc.parallel(step, 4, mesh=mesh_of(2, 1)),
            ("DeviceMesh",): lambda: bc.parallel(step, 4, mesh="cpu"),
            ("generator of its own",): lambda: bc.parallel(bc.make_step(loss, own), N).init(own, start(N), seed=3),
            ("no replicas", "state/1/key", "bc.distributed.broadcast"): lambda: noisy(params, TX.init(params), batch),
            ("with one seed, 3", "mesh="): lambda: bc.sample(noisy, *spread, parts, steps=4),
            ("no replicas", "params/w"): lambda: step(cold, still.init(cold), batch),
            ("make_step: ", "other Scale.step_size of link 0 (0.1, 0.2)"): lambda: bc.make_step(
                loss, bc.sgd(0.1 + 0.1 * rank), mesh=mesh
            )(params, still.init(params), batch),
            ("no replicas", "tensor differ"): lambda: bc.distributed.require_replicas(
                torch.zeros(2, dtype=(torch.float32, torch.float64)[rank]), mesh
            ),
            ("two leaves are named a/b",): lambda: bc.distributed.require_replicas({"a/b": rank, "a": {"b": 0}}, mesh),
            ("lengths [5, 12]",): lambda: plain(params, still.init(params), (*batch, torch.zeros(5))),
            ("loop=True",): lambda: many(stacked, many.init(still, stacked), batch),
            ("asks for curvature",): lambda: bc.make_step(loss, bc.laplace(), curvature=lambda p, b: None, mesh=mesh),
            ("DistributedDataParallel", "model.module", "mesh=mesh"): lambda: outside(
                weights, still.init(weights), batch
            ),
            ("DistributedDataParallel", "model.module"): lambda: inside(inner, still.init(inner), batch),
            ("2 ranks run", "bc.distributed.generator(seed)"): lambda: bc.optim.SGHMC(theta, 0.1, **hot),
            ("2 ranks run", "bc.optim.SGD with generator=bc.distributed.generator(seed)"): lambda: bc.SGD(
                theta, 0.1, **hot
            ),
            ("2 ranks run", "generator"): lambda: bc.optim.Optimizer(theta, lambda group: bc.sghmc(0.1, **hot)),
        }
    )
    bc.SGD(theta, 0.1)  # draws nothing


# members of one call

SMALL = {"members": 3, "steps": 60, "lr": 0.03, "progress": False, "batch_size": 16}
# 60 steps in float32, whose matrix products round as the members in one call are many
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}  # modes have no loss
BITWISE = {"rtol": 0, "atol": 0, "equal_nan": True}


def points(n=48):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1]


def normed():
    """BatchNorm and dropout, which ``vmap`` takes."""
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


def call(module=normed, **changes):
    """What a call comes to: predictions, every network, and what the report counts."""
    given = {"data": points(), "mesh": line(), **SMALL, **changes}
    e = bc.posterior_ensemble(module, given.pop("data"), bc.likelihoods.gaussian(), **given)
    p = e.predict(points()[0])
    made = {"mean": p.mean, "log_prob": p.log_prob(points()[1]), "passes": e.report.passes}
    return {**made, "params": e.params, "buffers": e.buffers}


def agree(found, want, bitwise):
    """In all that a call comes to, or in what it predicts, but for rounding."""
    names = [*want] if bitwise else ["mean", "log_prob"]
    torch.testing.assert_close([found[k] for k in names], [want[k] for k in names], **(BITWISE if bitwise else CLOSE))


@pytest.mark.slow
@pytest.mark.parametrize("module", [normed, packed])
def test_uneven_members_over_ranks_are_those_of_one_process(module):
    """Bit for bit where ``vmap`` refuses the module, so that they run one after the other. Else equal but for rounding, which
    is not asked of parameters, since a bias before BatchNorm is moved by rounding alone."""
    want, (one, other) = call(module), run(call, 2, module)
    torch.testing.assert_close(one, other, **BITWISE)
    assert all(x.shape[:2] == (1, 3) for x in one["params"].values()) and one["passes"] == want["passes"]
    agree(one, want, bitwise=module is packed)


@functools.cache
def undisturbed(size):
    return run(call, size)[0]


def killed(path, step):
    """A call that dies on every rank, at a step of all runs together."""
    left = iter(range(step - 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(Stages, "advance", lambda self: next(left))
        call(path=path)


@pytest.mark.slow
@pytest.mark.parametrize("step, size", [(12, 2), (19, 2), (70, 2), (12, 1)])
def test_a_call_that_is_killed_goes_on_with_the_same_results_bit_for_bit_also_on_another_number_of_ranks(
    step, size, tmp_path
):
    """18 steps try rates, 60 train."""
    run(killed, 2, tmp_path / "kept", step)
    went_on, again = (run(call, size, path=tmp_path / "kept")[0] for _ in "ab")
    agree(went_on, undisturbed(size), bitwise=size == 2)
    torch.testing.assert_close(again["mean"], went_on["mean"], **BITWISE)  # complete: it returns


@pytest.mark.slow
@on(2)
def test_what_ranks_cannot_share_out_is_refused_on_every_rank_and_that_training_diverges_is_said_there(tmp_path):
    (x, y), rank, path = points(), world()[0], tmp_path / "kept"
    call(path=path)
    refused = lambda **changes: lambda: call(**changes)  # noqa: E731
    refuses(
        {
            ("ValueError", "members: 1 chains on 2 ranks"): refused(members=1),
            ("not given the same call: data differ",): refused(data=(x + rank, y)),
            ("not given the same call: seed differ",): refused(seed=rank),
            ("TypeError", "mesh must be a DeviceMesh"): refused(mesh="cpu"),
            ("holds another call",): refused(path=path, seed=5),
            ("diverged",): refused(lr=1e30),
        }
    )
