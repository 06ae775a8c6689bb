"""Engines that hand plain tensors or shards to the optimizer: right on two ranks, or refused on both."""

import copy
import functools
import os
from dataclasses import dataclass
from itertools import product

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.matching.response import Nonlinear
from bayesopt_chain.random.philox import draw_elements, whole_leaves
from bayesopt_chain.random.stream import leaf_numbers
from tests.distributed import toys
from tests.distributed.ranks import everywhere, mesh_of, message_of, on, run, whole, world

pytestmark = pytest.mark.slow
close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6)


def network(seed=0, sizes=(3, 6, 5, 1)):
    return toys.network(*sizes, seed=seed, dtype=torch.float32)


def under(engine, model=None):
    return toys.under(engine, model or network())


def data(rank=None, n=8):
    """Other data on each rank."""
    rank = world()[0] if rank is None else rank
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(100 + rank))


BOTH = torch.cat([data(0), data(1)])


def noise(chain=0, seed=0):
    return {"temperature": 0.01, "generator": bc.distributed.generator(seed, chain=chain)}


def sghmc(params, chain=0, seed=0):
    return bc.optim.SGHMC(params, 0.05, **noise(chain, seed))


def of_a_chain(params, chain=0, seed=0):
    tx = bc.sghmc(0.05, **noise(chain, seed))
    return bc.optim.Optimizer(params, lambda group: tx)


def train(model, optimizer, x=None, steps=6, backward=None):
    """Steps that were made before a refusal, and what it said."""
    x = data() if x is None else x
    for step in range(steps):
        optimizer.zero_grad()
        backward() if backward else model(x).square().mean().backward()
        try:
            optimizer.step()
        except ValueError as err:
            return step, str(err)
    return steps, ""


def weights(model):
    return torch.cat([p.detach().flatten() for p in whole([*model.parameters()])])


@functools.cache
def alone(steps=6):
    """One process with the data of both ranks."""
    model = network()
    train(model, sghmc(model.named_parameters()), BOTH, steps)
    return weights(model)


def zero_of(model):
    return ZeroRedundancyOptimizer(model.parameters(), bc.optim.SGHMC, lr=0.05, **noise())


def stages(names):
    """Two stages with a message between them, by hand: forward to the second, gradient back to the first."""
    rank = world()[0]
    stage = network(rank, sizes=(3, 4, 3) if rank == 0 else (3, 4, 1))

    def backward():
        if rank == 0:
            out = stage(data(0))
            dist.send(out.detach(), 1)
            dist.recv(back := torch.empty_like(out), 1)
            out.backward(back)
        else:
            dist.recv(came := torch.empty(8, 3), 0)
            stage(came.requires_grad_()).square().mean().backward()
            dist.send(came.grad, 0)

    return train(stage, sghmc(names(stage, rank)), None, 4, backward)


class Odd(nn.Module):
    """A unit that is dead, a row of an embedding that nobody looks up, a leaf that is frozen, one that nothing uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.last = nn.Embedding(5, 3), nn.Linear(3, 4), nn.Linear(4, 1)
        self.unused, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(4), requires_grad=False)
        self.dead = nn.Parameter(torch.ones(1))
        nn.init.constant_(self.first.bias, -100.0)

    def forward(self, x):
        words = (x[:, 0] > 0).long()
        return self.last(torch.relu(self.first(self.table(words))) * self.frozen) + 0.0 * self.dead


def on_purpose(rank):
    optimizer = sghmc((model := network(rank)).parameters())
    optimizer.watch(first=False)
    return train(model, optimizer)


def trains(model, make=sghmc, x=None, steps=9, names=nn.Module.parameters, **options):
    return train(model, make(names(model), **options), x, steps)


named, seen = nn.Module.named_parameters, {"find_unused_parameters": True}
PARTS, CHAINS = ("under one key", "bc.distributed.part("), ("generator(seed, chain=rank)",)
# After how many steps training ends, and the words it is refused in; where they begin with "last", on the rank that comes last.
ENDS = {
    "fsdp1": (1, PARTS, lambda rank: trains(under("fsdp1"))),
    "fsdp1, original": (1, PARTS, lambda rank: trains(under("fsdp1 original"), names=named)),
    "zero": (1, PARTS, lambda rank: train(model := under("ddp"), zero_of(model))),
    "pipeline": (1, PARTS, lambda rank: stages(lambda stage, rank: named(stage))),
    "ddp with two keys": (
        2, ("noise of two keys", "=bc.distributed.generator(seed)"), lambda rank: trains(under("ddp"), chain=rank)
    ),
    "chains without keys": (2, ("last", *CHAINS), lambda rank: trains(network())),
    "an optimizer of chains without keys": (1, ("last", *CHAINS), lambda rank: trains(network(rank), of_a_chain)),
    "fsdp": (9, (), lambda rank: trains(under("fsdp"), names=named)),
    "chains with dead leaves": (9, (), lambda rank: trains(Odd(), names=named, chain=rank)),
    "ddp with dead leaves": (9, (), lambda rank: trains(DistributedDataParallel(Odd(), **seen), names=named)),
    "chains from one start on the same data": (9, (), lambda rank: trains(network(), x=data(0), chain=rank)),
    "chains of an optimizer of chains": (9, (), lambda rank: trains(network(), of_a_chain, data(0), chain=rank)),
    "one key on purpose": (6, (), on_purpose),
    "pipeline with parts": (
        4, (), lambda rank: stages(lambda s, r: bc.distributed.part(named(s), lambda name, p: f"stage{r}.{name}"))
    ),
}  # fmt: skip


@on(2)
@pytest.mark.parametrize("case", ENDS)
def test_training_under_an_engine_goes_on_or_is_refused_on_every_rank(case):
    steps, words, make = ENDS[case]
    last, every = "last" in words, everywhere(make(world()[0]))
    refused = [said for made, said in every if made == steps]
    assert refused if last else len(refused) == len(every), every
    assert all(word in said for said in refused for word in words if word != "last"), every
    assert words or not any(refused), every


@on(2)
def test_a_comparison_now_and_then_finds_keys_that_part_later():
    optimizer = sghmc((model := under("ddp")).parameters())
    optimizer.watch(every=2)
    assert train(model, optimizer, steps=3) == (3, "")
    optimizer.param_groups[0]["noise_key"] += world()[0]
    assert "noise of two keys" in train(model, optimizer)[1]


@on(2)
def test_replicas_of_unequal_numbers_of_steps_are_refused():
    optimizer, uneven = sghmc((model := under("ddp")).parameters()), 2 + 3 * world()[0]
    with model.join():
        train(model, optimizer, steps=uneven)
    (made, said), other = everywhere(train(model, optimizer, steps=9))
    assert made == 1 and other[1] == said and "have drawn 2 and 5 times" in said and "DistributedSampler" in said


@on(2)
def test_what_engines_cannot_do_says_so():
    model, loss = under("fsdp1 original"), lambda model, x: model(x).mean()
    said = message_of(lambda: bc.optim.as_step(model, sghmc(named(model)), loss))
    assert "under FullyShardedDataParallel (FSDP1)" in said
    assert "fork: 2 ranks run" in message_of(sghmc(network().parameters()).fork)


@on(2)
@pytest.mark.parametrize("engine, forks", [("ddp", False), ("hsdp", False), ("hsdp", True)])
def test_replicas_stay_bit_identical(engine, forks):
    optimizer = sghmc(named(model := under(engine)))
    assert train(model, optimizer, steps=4) == (4, "")
    if forks:  # each rank with a generator of its own, and the first one's key counts
        optimizer.fork(bc.distributed.generator(5, chain=world()[0]))
    assert train(model, optimizer, steps=5) == (5, "") and torch.equal(*everywhere(weights(model)))


@on(2)
def test_parts_of_fsdp1_and_of_zero_draw_the_noise_of_one_process():
    model = under("fsdp1 original")
    mine = bc.distributed.part(named(model), bc.distributed.flat_shards(model))
    assert train(model, sghmc(mine), BOTH) == (6, "")
    with FullyShardedDataParallel.summon_full_params(model):
        close(weights(model), alone())
    model = under("ddp")
    bc.distributed.part(named(model))
    assert train(model, zero_of(model), BOTH) == (6, "")
    close(weights(model), alone())


@on(2)
def test_flattened_parts_draw_neighbouring_numbers_of_one_leaf():
    model = under("fsdp1")
    ((_, mine),) = parts = bc.distributed.part(named(model), bc.distributed.flat_shards(model))
    optimizer = sghmc(parts)
    assert train(model, optimizer, steps=3) == (3, "")
    found = torch.cat(everywhere(optimizer.state[mine]["noise"].clone()))
    key = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=bc.distributed.generator(0))
    leaves = whole_leaves([found.numel()], leaf_numbers(("_flat_param",)))
    assert torch.equal(found, draw_elements(key, torch.tensor(2), leaves, torch.float32)[0])


def ivon(model, x, steps=8):
    """Means and variances after steps of IVON; draws and steps send no message."""
    optimizer = bc.optim.IVON(named(model), 0.1, betas=(0.9, 0.95), weight_decay=0.1, **noise())
    for _ in range(steps):
        optimizer.zero_grad()
        with CommDebugMode() as drawing:
            draw = optimizer.sampled()
            draw.__enter__()
        model(x).square().mean().backward()
        with CommDebugMode() as stepping:
            draw.__exit__(None, None, None)
            optimizer.step()
        assert drawing.get_total_counts() == stepping.get_total_counts() == 0
    return weights(model), torch.cat([x.detach().flatten() for x in whole([*optimizer.variances().values()])])


@on(2)
def test_a_gaussian_posterior_on_shards_is_that_of_one_process_and_sends_no_message():
    want = ivon(network(), BOTH)
    for engine, batch in (("fsdp", data()), ("tp", BOTH), ("ddp", data())):
        close(ivon(under(engine), batch), want, rtol=1e-4, atol=1e-5)


class Dropping(nn.Module):
    """Dropout, and a buffer that moves."""

    def __init__(self):
        super().__init__()
        self.net, self.dropout, self.norm = network(), nn.Dropout(0.3), nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(self.net(self.dropout(x)))


@on(2)
def test_one_chain_under_ddp_is_sampled_to_disk_and_goes_on_where_it_stopped(tmp_path):
    """With dropout, buffers and the batches of both ranks: replicas and draws have the bits of a run in one piece."""

    def sampled(name, steps):
        torch.manual_seed(world()[0])  # as it happens
        model, batches = under("ddp", Dropping()), bc.epochs(BOTH, 8, seed=3, mesh=mesh_of(2))
        step = bc.optim.as_step(model, sghmc(model.parameters()), lambda model, x: model(x).square().mean())
        settings = {"burn_in": 2, "checkpoint_seconds": 0.0, "path": tmp_path / name}
        draws = bc.sample(step, step.params, step.state, batches, steps=steps, **settings)
        return draws.params["net.0.weight"].clone(), weights(model)

    straight = sampled("whole", 9)
    sampled("parts", 5)
    for other in everywhere(sampled("parts", 9)):
        assert len(straight[0]) == 7 and all(map(torch.equal, straight, other))


def by_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


@on(2)
def test_one_chain_that_a_run_would_keep_as_two_is_refused(tmp_path):
    """Nothing tells the run that the ranks run one chain: the average is taken inside the loss, or by hooks, or not at all."""

    def kept_as_chains(name, averaged, chain=0):
        model, made = network(), []
        optimizer, forward = sghmc(model.parameters(), chain=chain), averaged(model)
        step = bc.optim.as_step(model, optimizer, lambda model, x: (made.append(1), forward(x).square().mean())[1])
        run = lambda: bc.sample(step, step.params, step.state, [data()], steps=6, path=tmp_path / name)  # noqa: E731
        return message_of(run) or "", len(made)

    for name, averaged in (("inside", DistributedDataParallel), ("hooks", by_hooks)):
        said, steps = kept_as_chains(name, averaged)
        assert steps == 2 and "they run one chain, and this run would keep it as two" in said
    every = everywhere(kept_as_chains("generator", lambda model: model))
    assert any(steps == 2 and "generator=bc.distributed.generator(seed, chain=rank)" in said for said, steps in every)
    assert kept_as_chains("chains", lambda model: model, chain=world()[0]) == ("", 6)
    dist.barrier()
    assert bc.Draws.open(tmp_path / "chains").chains == 2


@on(2)
def test_parts_of_the_data_in_one_order_are_refused():
    mesh, x = mesh_of(2), torch.arange(24.0)
    tx, params = bc.sghmc(0.05, temperature=0.01), {"w": torch.zeros(())}
    params, state = bc.distributed.broadcast((params, tx.init(params)), mesh)
    step, parts = bc.make_step(lambda p, x: (p["w"] - x).square().mean(), tx, mesh=mesh), x[world()[0] :: 2]
    said = message_of(lambda: bc.sample(step, params, state, bc.epochs(parts, 4, seed=3), steps=4))
    assert "with one seed, 3" in said and "mesh=" in said


@on(2)
def test_lightnings_strategy_for_fsdp2_makes_the_steps_of_one_process():
    """Four epochs of one batch."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def configure_model(self):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return sghmc(named(self.net))

    rank, size = world()
    every = torch.stack([data(0), data(1)], 1).flatten(0, 1)  # of which Lightning gives each rank every other row
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(every), batch_size=8)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    where = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": 4, **dict.fromkeys(quiet, False)}
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    launch |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}  # of torchrun
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launch.items():
            patch.setitem(os.environ, name, str(value))
        lightning.Trainer(**where).fit(module := Module(), loader)
    close(weights(module.net), alone(4))


# state dicts of torch.distributed.checkpoint

MADE = {
    "SGLD": {"lr": 0.05},
    "SGHMC": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "NAdam": {"lr": 0.01, "freeze_after": 3},
    "Optimizer": None,
}


def optimizer_of(name, model, seed=0):
    """An optimizer that draws."""
    if name == "Optimizer":
        return of_a_chain(named(model), seed=seed)
    return getattr(bc.optim, name)(named(model), **noise(seed=seed), **MADE[name])


@on(2)
@pytest.mark.parametrize("name", MADE)
def test_flattened_and_full_state_dicts_go_on_bit_for_bit(name):
    """Three steps behind a state dict, of an optimizer of another key, are those of one that goes on."""
    for engine, flat, full in [*product(["fsdp"], (False, True), (False, True)), ("ddp", False, True)]:
        optimizer = optimizer_of(name, model := under(engine))
        train(model, optimizer, steps=4)
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
        saved, parameters = dcp.get_optimizer_state_dict(model, optimizer, options=options), model.state_dict()
        saved, parameters = copy.deepcopy(saved), copy.deepcopy(parameters)
        said = train(model, optimizer, steps=3)
        straight, model = weights(model), under(engine)
        model.load_state_dict(parameters)
        optimizer, before = optimizer_of(name, model, seed=1), weights(model)
        # torch 2.13 loads no state dict that is both, of its own optimizers either (KeyError: 'param_groups.0.params.0')
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full and not flat)
        dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert torch.equal(weights(model), before), "loading a state moves nothing"
        assert said == train(model, optimizer, steps=3) == (3, "")
        assert torch.equal(weights(model), straight), (engine, flat, full)


def gone_on(name, engine, before, after):
    """Four steps of an optimizer between torch's own checkpoints of it."""
    optimizer = optimizer_of(name, model := under(engine) if engine else network())
    if before:  # else torch would make the first state by a step
        there, state = dcp.get_state_dict(model, optimizer)
        load({"model": there, "optimizer": state}, checkpoint_id=str(before))
        dcp.set_state_dict(model, optimizer, model_state_dict=there, optim_state_dict=state)
    assert train(model, optimizer, BOTH, 4) == (4, "")
    save(dict(zip(("model", "optimizer"), dcp.get_state_dict(model, optimizer))), checkpoint_id=str(after))
    return weights(model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["SGHMC", "Optimizer"])
def test_an_optimizer_under_fsdp2_on_two_ranks_goes_on_under_four_and_in_one_process(name, tmp_path):
    run(gone_on, 2, name, "fsdp", None, tmp_path / "a")
    run(gone_on, 4, name, "fsdp", tmp_path / "a", tmp_path / "b")
    train(model := network(), optimizer_of(name, model), BOTH, 12)
    close(gone_on(name, None, tmp_path / "b", tmp_path / "c"), weights(model))


# links of a user's own


@dataclass(frozen=True)
class Unit(Link):
    """Divides the gradient of each leaf by its norm, as the page on architecture says, and says nothing of shards."""

    @property
    def response(self):
        return Nonlinear()

    def update(self, g, state, op, context):
        return op.put(g, [x / x.norm() for x in g]), state

    def __str__(self):
        return "unit()"


@dataclass(frozen=True)
class UnitOnShards(Unit):
    """The same of DTensors, whose norms are those of whole leaves."""

    traits = Traits(on_shards="tree")

    def update(self, g, state, op, context):
        units = optree.tree_map(lambda x: x / x.norm(), context.tree(g))
        return op.put(g, context.leaves(units)), state


def with_a_link(link, model, x):
    tx = bc.chain(bc.Chain((link(),)), bc.inject_langevin_noise(**noise()), bc.scale_by_neg_lr(0.05))
    assert train(model, bc.optim.Optimizer(named(model), lambda group: tx), x) == (6, "")
    return weights(model)


@on(2)
def test_a_link_of_a_users_own_is_refused_on_shards_unless_it_says_that_it_takes_them():
    said = message_of(lambda: with_a_link(Unit, under("fsdp"), data()))
    assert "unit() needs whole leaves, and [0] is a DTensor" in said
    close(with_a_link(UnitOnShards, under("fsdp"), data()), with_a_link(UnitOnShards, network(), BOTH))
    g = distribute_tensor(torch.tensor([0.6, 0.0, 0.0, 0.8]), mesh_of(2), [Shard(0)])
    tx = bc.chain(bc.Chain((UnitOnShards(),)), bc.scale_by_neg_lr(1.0))
    move = tx.update(g, tx.init(g), params=g)[0].full_tensor()
    close(move, torch.tensor([-0.6, 0.0, 0.0, -0.8]))  # over the norm of the whole leaf


def noise_under(how):
    """What the optimizer draws in its third step under these wrappers, from the inside out; the first name it is given."""
    model = network()
    for wrapper in how.split():
        if wrapper == "checkpoint":
            model[0] = checkpoint_wrapper(model[0])
        else:
            model = torch.compile(model, backend="eager") if wrapper == "compile" else under(wrapper, model)
    optimizer = sghmc((leaves := dict(named(model))).items())
    assert train(model, optimizer, data(0), 3) == (3, ""), how
    return whole([optimizer.state[p]["noise"].clone() for p in leaves.values()]), next(iter(leaves))


@on(2)
def test_names_that_wrappers_put_in_front_leave_the_noise_alone():
    (want, _), names = noise_under(""), set()
    for how in ("ddp", "checkpoint", "compile", "compile ddp", "checkpoint ddp compile", "checkpoint fsdp"):
        drawn, first = noise_under(how)
        assert len(drawn) == len(want) == 6 and all(map(torch.equal, drawn, want)), how
        names.add(first)
    assert {"module.0.weight", "_orig_mod.module.0._checkpoint_wrapped_module.weight"} <= names


@on(2)
def test_what_comparisons_cost_is_six_in_three_hundred_steps():
    optimizer, made = sghmc((model := under("ddp")).parameters()), []
    look = optimizer._witness.look
    optimizer._witness.look = lambda claims, of: look(lambda: (made.append(1), claims())[1], of)
    assert train(model, optimizer, steps=300) == (300, "") and len(made) == 6
