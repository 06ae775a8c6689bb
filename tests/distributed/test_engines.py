"""Engines that hand plain tensors or shards to the optimizer, under torchrun: right, or refused.

One launch of two ranks runs every case, a function of the rank whose asserts hold on each: ``torchrun --nproc-per-node 2
test_engines.py FOLDER``. What a case fails with is written to the folder.
"""

import copy
import datetime
import os
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise, product
from pathlib import Path

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.core.link import Link, Traits
from bayesopt_chain.matching.response import Nonlinear
from bayesopt_chain.random.philox import draw_elements, whole_leaves
from bayesopt_chain.random.stream import leaf_numbers
from tests.distributed.ranks import everywhere, launched, message_of

CASES, ALONE, NEEDS = {}, {}, {"lightning_model_parallel": "lightning", "adapters": "peft"}
WHOLE, PARTS, CHAINS = "", ("under one key", "bc.distributed.part("), ("generator(seed, chain=rank)",)


def case(function):
    CASES[function.__name__] = function
    return function


def ends(steps, *words, last=False):
    """A case that returns steps and a refusal: after so many, in these words; ``last``: on the rank that comes last alone."""

    def decorate(function):
        def checked(rank):
            every = everywhere(function(rank))
            refused = [said for made, said in every if made == steps]
            assert refused if last else len(refused) == len(every), every
            assert all(word in said for said in refused for word in words) and (words or not any(refused)), every

        CASES[function.__name__] = checked
        return function

    return decorate


def network(seed=0, sizes=(3, 6, 5, 1)):
    torch.manual_seed(seed)
    layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def data(rank, n=8):
    """Other data on each rank."""
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(100 + rank))


BOTH = torch.cat([data(0), data(1)])


def sghmc(params, chain=0, seed=0):
    return bc.optim.SGHMC(params, 0.05, temperature=0.01, generator=bc.distributed.generator(seed, chain=chain))


def of_a_chain(params, chain=0, seed=0):
    tx = bc.sghmc(0.05, temperature=0.01, generator=bc.distributed.generator(seed, chain=chain))
    return bc.optim.Optimizer(params, lambda group: tx)


def train(model, optimizer, x, steps=6, backward=None):
    """Steps that were made before a refusal, and what it said."""
    for step in range(steps):
        optimizer.zero_grad()
        backward() if backward else model(x).square().mean().backward()
        try:
            optimizer.step()
        except ValueError as err:
            return step, str(err)
    return steps, ""


def weights(model):
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in full])


def alone(steps=6):
    """One process with the data of both ranks."""
    model = network()
    train(model, sghmc(model.named_parameters()), BOTH, steps)
    return weights(model)


def require_replicas(model):
    first, second = everywhere(weights(model))
    assert torch.equal(first, second)


def line():
    return init_device_mesh("cpu", (2,))


def under(engine, model=None):
    """The network under an engine."""
    model = model or network()
    if engine == "ddp":
        return DistributedDataParallel(model)
    if engine.startswith("fsdp1"):
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=engine == "fsdp1 original"
        )
    if engine == "tp":
        return parallelize_module(model, line(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")) if engine == "hsdp" else line()
    return fully_shard(model, mesh=mesh)


# refused


@ends(1, *PARTS)
def fsdp1_flat(rank):
    return train(model := under("fsdp1"), sghmc(model.parameters()), data(rank))


@ends(1, *PARTS)
def fsdp1_original(rank):
    return train(model := under("fsdp1 original"), sghmc(model.named_parameters()), data(rank))


def zero_of(model):
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(0)}
    return ZeroRedundancyOptimizer(model.parameters(), bc.optim.SGHMC, lr=0.05, **noise)


@ends(1, *PARTS)
def zero(rank):
    return train(model := under("ddp"), zero_of(model), data(rank))


def stages(rank, names):
    """Two stages with a message between them, by hand: forward to the second, gradient back to the first."""
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

    return train(stage, sghmc(names(stage)), None, 4, backward)


@ends(1, *PARTS)
def pipeline(rank):
    return stages(rank, lambda stage: stage.named_parameters())


@ends(2, "noise of two keys", "generator=bc.distributed.generator(seed)")
def ddp_with_two_keys(rank):
    return train(model := under("ddp"), sghmc(model.parameters(), chain=rank), data(rank))


@ends(2, *CHAINS, last=True)
def forgotten_chain_keys(rank):
    return train(model := network(), sghmc(model.parameters()), data(rank))


@ends(1, *CHAINS, last=True)
def forgotten_keys_of_an_optimizer_of_chains(rank):
    return train(model := network(rank), of_a_chain(model.parameters()), data(rank))


@case
def a_comparison_now_and_then_finds_keys_that_part_later(rank):
    model = under("ddp")
    optimizer = sghmc(model.parameters())
    optimizer.watch(every=2)
    assert train(model, optimizer, data(rank), 3) == (3, "")
    optimizer.param_groups[0]["noise_key"] += rank
    assert "noise of two keys" in train(model, optimizer, data(rank))[1]


@case
def a_fork_asks_for_a_generator_where_several_ranks_run(rank):
    assert "fork: 2 ranks run" in message_of(sghmc(network().parameters()).fork)


@case
def unequal_numbers_of_steps(rank):
    model = under("ddp")
    optimizer = sghmc(model.parameters())
    with model.join():
        train(model, optimizer, data(rank), 2 + 3 * rank)
    assert optimizer.param_groups[0]["noise_count"] == 2 + 3 * rank
    (made, said), (_, same) = everywhere(train(model, optimizer, data(rank), 12))
    assert made == 1 and said == same and "have drawn 2 and 5 times" in said and "Join([model, optimizer])" in said


@case
def fsdp1_is_no_step_and_says_so(rank):
    model = under("fsdp1 original")
    said = message_of(
        lambda: bc.optim.as_step(model, sghmc(model.named_parameters()), lambda model, x: model(x).mean())
    )
    assert "under FullyShardedDataParallel (FSDP1)" in said


# right


@case
def replicas_stay_bit_identical(rank):
    for engine, forks in (("ddp", False), ("hsdp", False), ("hsdp", True)):
        model = under(engine)
        optimizer = sghmc(model.named_parameters())
        assert train(model, optimizer, data(rank), 4) == (4, "")
        if forks:  # each rank with a generator of its own, and the first one's key counts
            optimizer.fork(bc.distributed.generator(5, chain=rank))
        assert train(model, optimizer, data(rank), 5) == (5, "")
        require_replicas(model)


@ends(9)
def fsdp2(rank):
    return train(model := under("fsdp2"), sghmc(model.named_parameters()), data(rank), 9)


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


@ends(9)
def chains_with_dead_leaves(rank):
    return train(model := Odd(), sghmc(model.named_parameters(), chain=rank), data(rank), 9)


@ends(9)
def ddp_with_dead_leaves(rank):
    model = DistributedDataParallel(Odd(), find_unused_parameters=True)
    return train(model, sghmc(model.named_parameters()), data(rank), 9)


@ends(9)
def chains_from_one_start_on_the_same_data(rank):
    """Their first gradients are equal, their keys are not."""
    return train(model := network(), sghmc(model.parameters(), chain=rank), data(0), 9)


@ends(5)
def chains_of_an_optimizer_of_chains(rank):
    return train(model := network(), of_a_chain(model.parameters(), chain=rank), data(0), 5)


@ends(6)
def one_key_on_purpose(rank):
    optimizer = sghmc((model := network(rank)).parameters())
    optimizer.watch(first=False)
    return train(model, optimizer, data(rank))


@case
def joined_replicas_go_on_from_one_state(rank):
    model = under("ddp")
    optimizer = sghmc(model.parameters())
    with Join([model, optimizer]):
        train(model, optimizer, data(rank), 2 + 3 * rank)
    assert optimizer.param_groups[0]["noise_count"] == 5
    assert train(model, optimizer, data(rank), 9) == (9, "")
    require_replicas(model)


@case
def parts_of_fsdp1_and_of_zero_draw_the_noise_of_one_process(rank):
    model = under("fsdp1 original")
    mine = bc.distributed.part(model.named_parameters(), bc.distributed.flat_shards(model))
    assert train(model, sghmc(mine), BOTH) == (6, "")
    with FullyShardedDataParallel.summon_full_params(model):
        torch.testing.assert_close(weights(model), ALONE[6], rtol=0, atol=1e-6)
    model = under("ddp")
    bc.distributed.part(model.named_parameters())
    assert train(model, zero_of(model), BOTH) == (6, "")
    torch.testing.assert_close(weights(model), ALONE[6], rtol=0, atol=1e-6)


@case
def flattened_parts_draw_neighbouring_numbers_of_one_leaf(rank):
    model = under("fsdp1")
    ((_, mine),) = parts = bc.distributed.part(model.named_parameters(), bc.distributed.flat_shards(model))
    optimizer = sghmc(parts)
    assert train(model, optimizer, data(rank), 3) == (3, "")
    found = torch.cat(everywhere(optimizer.state[mine]["noise"].clone()))
    key = torch.randint(2**63 - 1, (), dtype=torch.int64, generator=bc.distributed.generator(0))
    whole = whole_leaves([found.numel()], leaf_numbers(("_flat_param",)))
    assert torch.equal(found, draw_elements(key, torch.tensor(2), whole, torch.float32)[0])


@ends(4)
def pipeline_with_parts(rank):
    return stages(rank, lambda s: bc.distributed.part(s.named_parameters(), lambda name, p: f"stage{rank}.{name}"))


def ivon(model, x, steps=8):
    """Means and variances after steps of IVON; draws and steps send no message."""
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(0)}
    optimizer = bc.optim.IVON(model.named_parameters(), 0.1, betas=(0.9, 0.95), weight_decay=0.1, **noise)
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
    variances = optimizer.variances().values()
    return weights(model), torch.cat([getattr(x, "full_tensor", lambda x=x: x)().detach().flatten() for x in variances])


@case
def a_gaussian_posterior_on_shards_is_that_of_one_process_and_sends_no_message(rank):
    for engine, batch in (("fsdp2", data(rank)), ("tp", BOTH), ("ddp", data(rank))):
        torch.testing.assert_close(ivon(under(engine), batch), ALONE["ivon"], rtol=1e-4, atol=1e-5)


class Dropping(nn.Module):
    """Dropout, and a buffer that moves."""

    def __init__(self):
        super().__init__()
        self.net, self.dropout, self.norm = network(), nn.Dropout(0.3), nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(self.net(self.dropout(x)))


def as_step_under_ddp(folder, steps):
    """Draws of one chain on two ranks, each with its part of every batch, and the replica in the end."""
    torch.manual_seed(dist.get_rank())  # as it happens
    model = under("ddp", Dropping())
    step = bc.optim.as_step(model, sghmc(model.parameters()), lambda model, x: model(x).square().mean())
    batches, settings = bc.epochs(BOTH, 8, seed=3, mesh=line()), {"burn_in": 2, "checkpoint_seconds": 0.0}
    draws = bc.sample(step, step.params, step.state, batches, steps=steps, path=folder, **settings)
    return draws.params["net.0.weight"].clone(), weights(model)


@case
def one_chain_under_ddp_is_sampled_to_disk_and_goes_on_where_it_stopped(rank):
    """With dropout, buffers and the batches of both ranks: replicas and draws have the bits of a run in one piece."""
    whole, replica = as_step_under_ddp(FOLDER / "whole", 9)
    as_step_under_ddp(FOLDER / "parts", 5)
    (first, again), other = everywhere(as_step_under_ddp(FOLDER / "parts", 9))
    assert len(whole) == 7 and all(torch.equal(whole, x) for x in (first, other[0]))
    assert all(torch.equal(replica, x) for x in (again, other[1]))


def kept_as_chains(rank, name, averaged, chain=0):
    """A run on disk that is about to keep replicas as chains: after how many steps it ends, and why."""
    model, made = network(), []
    optimizer, forward = sghmc(model.parameters(), chain=chain), averaged(model)
    step = bc.optim.as_step(model, optimizer, lambda model, x: (made.append(1), forward(x).square().mean())[1])
    run = lambda: bc.sample(step, step.params, step.state, [data(rank)], steps=6, path=FOLDER / name)  # noqa: E731
    return message_of(run) or "", len(made)


def by_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


@case
def one_chain_that_a_run_would_keep_as_two_is_refused(rank):
    """Nothing tells the run that the ranks run one chain: the average is taken inside the loss, or by hooks, or not at all."""
    for name, averaged in (("inside", DistributedDataParallel), ("hooks", by_hooks)):
        said, steps = kept_as_chains(rank, name, averaged)
        assert steps == 2 and "they run one chain, and this run would keep it as two" in said
    every = everywhere(kept_as_chains(rank, "generator", lambda model: model))
    assert any(steps == 2 and "generator=bc.distributed.generator(seed, chain=rank)" in said for said, steps in every)
    assert kept_as_chains(rank, "chains", lambda model: model, chain=rank) == ("", 6)
    dist.barrier()
    assert bc.Draws.open(FOLDER / "chains").chains == 2


@case
def batches_of_ranks_are_together_those_of_one_process_and_parts_in_one_order_are_refused(rank):
    mesh, x = line(), torch.arange(24.0)
    batches, whole = bc.epochs(x, 8, seed=3, mesh=mesh), bc.epochs(x, 8, seed=3)
    for *parts, both in zip(*everywhere([*batches, *batches]), [*whole, *whole], strict=True):
        assert torch.equal(torch.cat(parts), both)
    tx, params = bc.sghmc(0.05, temperature=0.01), {"w": torch.zeros(())}
    params, state = bc.distributed.broadcast((params, tx.init(params)), mesh)
    step = bc.make_step(lambda p, x: (p["w"] - x).square().mean(), tx, mesh=mesh)
    said = message_of(lambda: bc.sample(step, params, state, bc.epochs(x[rank::2], 4, seed=3), steps=4))
    assert "with one seed, 3" in said and "mesh=" in said


@case
def lightning_model_parallel(rank):
    """Lightning's strategy for FSDP2, four epochs of one batch."""
    import lightning
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
            return sghmc(self.net.named_parameters())

    every = torch.stack([data(0), data(1)], 1).flatten(0, 1)  # of which Lightning gives each rank every other row
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(every), batch_size=8)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    where = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_steps": 4, **dict.fromkeys(quiet, False)}
    lightning.Trainer(**where).fit(module := Module(), loader)
    torch.testing.assert_close(weights(module.net), ALONE[4], rtol=0, atol=1e-6)


@case
def adapters(rank):
    """The diagonal and Kronecker posteriors of peft's adapters under FSDP2 are those of one process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, lora_dropout=0.5)
    model = get_peft_model(network(sizes=(3, 6, 2)).double(), settings).eval()
    x, y, likelihood, tx = BOTH.double(), torch.arange(16) % 2, bc.likelihoods.categorical(), bc.laplace()
    trained = lambda: {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}  # noqa: E731
    whole, kinds = trained(), ("diagonal", "kronecker")

    def variances(increment, params):
        _, state = tx.update(params, tx.init(params), curvature=increment, inplace=False)
        return tx.posterior(state, params, prior_precision=2.0).marginal_variance

    forward = lambda p, batch: torch.func.functional_call(model, p, (batch[0],))  # noqa: E731
    wanted = [variances(bc.curvature.ggn(forward, likelihood, kind)(whole, (x, y)), whole) for kind in kinds]
    mesh = line()
    fully_shard(model, mesh=mesh)
    for kind, want in zip(kinds, wanted):
        estimate = getattr(bc.curvature, f"{kind}_by_backward")(model, likelihood, mesh=mesh)
        found = {name: v.full_tensor() for name, v in variances(estimate((x[rank::2], y[rank::2])), trained()).items()}
        torch.testing.assert_close(found, want, rtol=0, atol=1e-10)
    assert len(found) == 4 and all("lora_" in name for name in found)


# state dicts of torch.distributed.checkpoint

MADE = {
    "SGHMC": {"lr": 0.05},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "Optimizer": None,
}


def optimizer_of(name, model, seed=0):
    """An optimizer that draws."""
    if name == "Optimizer":
        return of_a_chain(model.named_parameters(), seed=seed)
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(seed)}
    return getattr(bc.optim, name)(model.named_parameters(), **noise, **MADE[name])


@case
def flattened_and_full_state_dicts_go_on_bit_for_bit(rank):
    """Three steps behind a state dict, of an optimizer of another key, are those of one that goes on."""
    for engine, name, flat, full in product(("fsdp2", "ddp"), MADE, (False, True), (False, True)):
        model = under(engine)
        optimizer = optimizer_of(name, model)
        train(model, optimizer, data(rank), 4)
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
        saved, parameters = dcp.get_optimizer_state_dict(model, optimizer, options=options), model.state_dict()
        saved, parameters = copy.deepcopy(saved), copy.deepcopy(parameters)
        said = train(model, optimizer, data(rank), 3)
        straight, model = weights(model), under(engine)
        model.load_state_dict(parameters)
        optimizer = optimizer_of(name, model, seed=1)
        # torch 2.13 loads no state dict that is both, of its own optimizers either (KeyError: 'param_groups.0.params.0')
        options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full and not flat)
        dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
        assert said == train(model, optimizer, data(rank), 3) == (3, "")
        assert torch.equal(weights(model), straight), (engine, name, flat, full)


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


@dataclass(frozen=True)
class Sign(Unit):
    """The sign of each element."""

    traits = Traits(on_shards="elementwise")

    def update(self, g, state, op, context):
        return op.put(g, [torch.sign(x) for x in g]), state


def with_a_link(link, model, x):
    noise = bc.inject_langevin_noise(temperature=0.01, generator=bc.distributed.generator(0))
    tx = bc.chain(bc.Chain((link(),)), noise, bc.scale_by_neg_lr(0.05))
    assert train(model, bc.optim.Optimizer(model.named_parameters(), lambda group: tx), x) == (6, "")
    return weights(model)


@case
def a_link_of_a_users_own_is_refused_on_shards_unless_it_says_that_it_takes_them(rank):
    said = message_of(lambda: with_a_link(Unit, under("fsdp2"), data(rank)))
    assert "unit() needs whole leaves, and [0] is a DTensor" in said
    for link in (UnitOnShards, Sign):
        torch.testing.assert_close(with_a_link(link, under("fsdp2"), data(rank)), ALONE[link], rtol=0, atol=1e-6)
    g = distribute_tensor(torch.tensor([0.6, 0.0, 0.0, 0.8]), line(), [Shard(0)])
    tx = bc.chain(bc.Chain((UnitOnShards(),)), bc.scale_by_neg_lr(1.0))
    move = tx.update(g, tx.init(g), params=g)[0].full_tensor()
    torch.testing.assert_close(move, torch.tensor([-0.6, 0.0, 0.0, -0.8]))  # over the norm of the whole leaf


# names that wrappers put in front

WRAPPERS = ("", "ddp", "checkpoint", "compile", "compile ddp", "checkpoint ddp compile", "checkpoint fsdp2")


def noise_under(how):
    """What the optimizer draws in its third step under these wrappers, from the inside out; the names that it is given."""
    model = network()
    for wrapper in how.split():
        if wrapper == "checkpoint":
            model[0] = checkpoint_wrapper(model[0])
        else:
            model = torch.compile(model, backend="eager") if wrapper == "compile" else under(wrapper, model)
    named = dict(model.named_parameters())
    optimizer = sghmc(named.items())
    assert train(model, optimizer, data(0), 3) == (3, ""), how
    drawn = [optimizer.state[p]["noise"] for p in named.values()]
    return [getattr(x, "full_tensor", lambda x=x: x)().clone() for x in drawn], list(named)


@case
def names_of_wrappers_leave_the_noise_alone(rank):
    names = set()
    for how in WRAPPERS:
        drawn, (first, *_) = noise_under(how)
        assert len(drawn) == len(ALONE["noise"]) == 6 and all(map(torch.equal, drawn, ALONE["noise"])), how
        names.add(first)
    assert {"module.0.weight", "_orig_mod.module.0._checkpoint_wrapped_module.weight"} <= names


@case
def cost(rank):
    """Six comparisons take less than a hundredth of the processor's time of 300 steps of a small network.

    Each of the six counts as their median, since one that the operating system interrupts is longer than the others together.
    """
    model = under("ddp", network(sizes=(3, 512, 512, 1)))
    optimizer = sghmc(model.parameters())
    look, spent, clock = optimizer._witness.look, [], time.process_time
    timed = lambda *args: spent.append(-clock() + (look(*args), clock())[1])  # noqa: E731
    optimizer._witness.look = timed
    start = clock()
    train(model, optimizer, data(rank, 128), 300)
    *rest, a, b, c, d, e, f = sorted(spent)
    assert (sum(rest) + 6 * statistics.median((a, b, c, d, e, f))) / (clock() - start) < 0.01


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What the cases failed with on both ranks, of one launch."""
    return launched(Path(__file__), tmp_path_factory.mktemp("engines"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_engines_under_torchrun(name, failures):
    if not find_spec(NEEDS.get(name, "torch")):
        pytest.skip(f"needs {NEEDS[name]}")
    said = [mine[name] for mine in failures if mine[name]]
    assert not said, "\n".join(said)


def main():
    ALONE.update({4: alone(4), 6: alone(), "ivon": ivon(network(), BOTH), "noise": noise_under("")[0]})
    ALONE.update({link: with_a_link(link, network(), BOTH) for link in (UnitOnShards, Sign)})
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    global FOLDER
    rank, FOLDER, out = dist.get_rank(), Path(sys.argv[1]), {}
    for name in sys.argv[2:] or CASES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                out[name] = CASES[name](rank) if find_spec(NEEDS.get(name, "torch")) else None
            except Exception:
                out[name] = traceback.format_exc()
        dist.barrier()
    torch.save(out, FOLDER / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # whatever threads of the groups are left


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
