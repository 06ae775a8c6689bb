"""Engines that hand plain tensors to the optimizer, under torchrun: what each of them does on this rank.

Run by ``test_engines.py``: ``torchrun --nproc-per-node 2 engines.py FOLDER``. Every case is a function of the rank; what it
returns, or the message of what it raises, is written to the folder.
"""

import copy
import datetime
import os
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import optree
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

CASES = {}
SIZES = (3, 6, 5, 1)


def case(function):
    CASES[function.__name__] = function
    return function


def network(seed=0, sizes=SIZES):
    torch.manual_seed(seed)
    layers = [module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def data(rank, n=8):
    """Other data on each rank."""
    g = torch.Generator().manual_seed(100 + rank)
    return torch.randn(n, 3, generator=g)


def sghmc(params, chain=0, seed=0, **settings):
    generator = bc.distributed.generator(seed, chain=chain)
    return bc.optim.SGHMC(params, 0.05, temperature=0.01, generator=generator, **settings)


def train(model, optimizer, x, steps=6):
    """Steps that were made before a refusal, and what it said."""
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        try:
            optimizer.step()
        except ValueError as err:
            return step, str(err)
    return steps, ""


def weights(model):
    return nn.utils.parameters_to_vector([p.detach() for p in model.parameters()])


# refused


@case
def fsdp1_flat(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    return train(model, sghmc(model.parameters()), data(rank))


@case
def fsdp1_original(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    return train(model, sghmc(model.named_parameters()), data(rank))


@case
def zero(rank):
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        bc.optim.SGHMC,
        lr=0.05,
        temperature=0.01,
        generator=bc.distributed.generator(0),
    )
    return train(model, optimizer, data(rank))


def stages(rank, names):
    """Two stages with a message between them, by hand: forward to the second, gradient back to the first."""
    stage = network(rank, sizes=(3, 4, 3) if rank == 0 else (3, 4, 1))
    optimizer = sghmc(names(stage))
    for step in range(4):
        optimizer.zero_grad()
        if rank == 0:
            out = stage(data(0))
            dist.send(out.detach(), 1)
            back = torch.empty_like(out)
            dist.recv(back, 1)
            out.backward(back)
        else:
            came = torch.empty(8, 3)
            dist.recv(came, 0)
            came.requires_grad_()
            stage(came).square().mean().backward()
            dist.send(came.grad, 0)
        try:
            optimizer.step()
        except ValueError as err:
            return step, str(err)
    return step + 1, ""


@case
def pipeline(rank):
    return stages(rank, lambda stage: stage.named_parameters())


@case
def ddp_with_two_keys(rank):
    model = DistributedDataParallel(network())
    return train(model, sghmc(model.parameters(), chain=rank), data(rank))


@case
def forgotten_chain_keys(rank):
    model = network()
    return train(model, sghmc(model.parameters()), data(rank))


@case
def forked_on_one_rank(rank):
    model = DistributedDataParallel(network())
    optimizer = sghmc(model.parameters())
    optimizer.watch(every=2)
    first = train(model, optimizer, data(rank), 3)
    if rank:
        for group in optimizer.param_groups:
            group["noise_key"] += 1
    return first, train(model, optimizer, data(rank))


@case
def forked_without_a_generator(rank):
    model = network()
    try:
        sghmc(model.parameters()).fork()
    except ValueError as err:
        return str(err)


@case
def uneven_batches_without_the_optimizer(rank):
    model = DistributedDataParallel(network())
    optimizer = sghmc(model.parameters())
    with model.join():
        train(model, optimizer, data(rank), 2 + 3 * rank)
    return optimizer.param_groups[0]["noise_count"], train(model, optimizer, data(rank), 12)


@case
def chains_optimizer(rank):
    model = network(rank)
    generator = bc.distributed.generator(0)
    optimizer = bc.optim.Optimizer(
        model.parameters(), lambda group: bc.sghmc(0.05, temperature=0.01, generator=generator)
    )
    return train(model, optimizer, data(rank))


# right


@case
def ddp(rank):
    model = DistributedDataParallel(network())
    said = train(model, sghmc(model.parameters()), data(rank), 9)
    return said, weights(model)


@case
def fsdp2(rank):
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return train(model, sghmc(model.named_parameters()), data(rank), 9)


@case
def hsdp(rank):
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    said = train(model, sghmc(model.named_parameters()), data(rank), 4)
    return said, torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


@case
def hsdp_forked(rank):
    """Each rank forks with a generator of its own, and the first one's key counts."""
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = sghmc(model.named_parameters())
    train(model, optimizer, data(rank), 3)
    optimizer.fork(bc.distributed.generator(5, chain=rank))
    said = train(model, optimizer, data(rank), 5)
    return said, torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


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


@case
def chains_with_dead_leaves(rank):
    model = Odd()
    return train(model, sghmc(model.named_parameters(), chain=rank), data(rank), 9)


@case
def ddp_with_dead_leaves(rank):
    model = DistributedDataParallel(Odd(), find_unused_parameters=True)
    return train(model, sghmc(model.named_parameters()), data(rank), 9)


@case
def chains(rank):
    """From one start, on the same data: their first gradients are equal, their keys are not."""
    model = network()
    return train(model, sghmc(model.parameters(), chain=rank), data(0), 9)


@case
def chains_of_an_optimizer_of_chains(rank):
    model = network()
    generator = bc.distributed.generator(0, chain=rank)
    optimizer = bc.optim.Optimizer(
        model.parameters(), lambda group: bc.sghmc(0.05, temperature=0.01, generator=generator)
    )
    return train(model, optimizer, data(0), 5)


@case
def on_purpose(rank):
    model = network(rank)
    optimizer = sghmc(model.parameters())
    optimizer.watch(first=False)
    return train(model, optimizer, data(rank))


@case
def uneven_batches(rank):
    model = DistributedDataParallel(network())
    optimizer = sghmc(model.parameters())
    with Join([model, optimizer]):
        train(model, optimizer, data(rank), 2 + 3 * rank)
    count = optimizer.param_groups[0]["noise_count"]
    return count, train(model, optimizer, data(rank), 9), weights(model)


@case
def fsdp1_original_with_parts(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    mine = bc.distributed.part(model.named_parameters(), bc.distributed.flat_shards(model))
    said = train(model, sghmc(mine), torch.cat([data(0), data(1)]), 6)
    with FullyShardedDataParallel.summon_full_params(model):
        return said, weights(model).clone()


@case
def fsdp1_flat_with_parts(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    mine = bc.distributed.part(model.named_parameters(), bc.distributed.flat_shards(model))
    optimizer = sghmc(mine)
    said = train(model, optimizer, data(rank), 3)
    return said, [optimizer.state[p]["noise"].clone() for _, p in mine]


@case
def zero_with_parts(rank):
    model = DistributedDataParallel(network())
    bc.distributed.part(model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), bc.optim.SGHMC, lr=0.05, temperature=0.01, generator=bc.distributed.generator(0)
    )
    said = train(model, optimizer, torch.cat([data(0), data(1)]), 6)
    return said, weights(model)


@case
def pipeline_with_parts(rank):
    return stages(rank, lambda s: bc.distributed.part(s.named_parameters(), lambda name, p: f"stage{rank}.{name}"))


def ivon(model, x, steps=8):
    """Steps of IVON, and the messages that draws and steps sent."""
    generator = bc.distributed.generator(0)
    optimizer = bc.optim.IVON(
        model.named_parameters(), 0.1, temperature=0.01, betas=(0.9, 0.95), weight_decay=0.1, generator=generator
    )
    sent = 0
    for _ in range(steps):
        optimizer.zero_grad()
        with CommDebugMode() as messages:
            draw = optimizer.sampled()
            draw.__enter__()
        sent += messages.get_total_counts()
        model(x).square().mean().backward()
        with CommDebugMode() as messages:
            draw.__exit__(None, None, None)
            optimizer.step()
        sent += messages.get_total_counts()
    tensors = [*model.parameters(), *optimizer.variances().values()]
    full = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
    return torch.cat([x.detach().flatten() for x in full]), sent


@case
def ivon_fsdp2(rank):
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return ivon(model, data(rank))


@case
def ivon_tensor_parallel(rank):
    model = network()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return ivon(model, torch.cat([data(0), data(1)]))


@case
def ivon_ddp(rank):
    return ivon(DistributedDataParallel(network()), data(rank))


class Dropping(nn.Module):
    """Dropout, and a buffer that moves."""

    def __init__(self):
        super().__init__()
        self.net, self.dropout, self.norm = network(), nn.Dropout(0.3), nn.BatchNorm1d(1)

    def forward(self, x):
        return self.norm(self.net(self.dropout(x)))


def as_step_under_ddp(folder, steps, pause=None):
    """Draws of one chain on two ranks, each with its part of every batch, and the bits of the replica in the end."""
    torch.manual_seed(dist.get_rank())  # as it happens
    model = DistributedDataParallel(Dropping())
    step = bc.optim.as_step(model, sghmc(model.parameters()), lambda model, x: model(x).square().mean())
    mesh = init_device_mesh("cpu", (2,))
    batches = bc.epochs(torch.cat([data(0), data(1)]), 8, seed=3, mesh=mesh)
    draws = bc.sample(
        step, step.params, step.state, batches, steps=steps, burn_in=2, path=folder, checkpoint_seconds=0.0
    )
    return draws.params["net.0.weight"].clone(), weights(model)


@case
def ddp_as_step(rank):
    whole, replica = as_step_under_ddp(FOLDER / "whole", 9)
    as_step_under_ddp(FOLDER / "parts", 5)
    parts, again = as_step_under_ddp(FOLDER / "parts", 9)
    return whole, replica, parts, again


@case
def fsdp1_as_step(rank):
    model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"), use_orig_params=True)
    try:
        bc.optim.as_step(model, sghmc(model.named_parameters()), lambda model, x: model(x).square().mean())
    except ValueError as err:
        return str(err)


def replicas_kept_as_chains(rank, name, averaged, chain=0):
    """A run on disk that is about to keep replicas as chains: after how many steps it ends, and why."""
    model, made = network(), []
    optimizer = sghmc(model.parameters(), chain=chain)
    forward = averaged(model)

    def loss(model, x):
        made.append(1)
        return forward(x).square().mean()

    step = bc.optim.as_step(model, optimizer, loss)
    try:
        bc.sample(step, step.params, step.state, [data(rank)], steps=6, path=FOLDER / name)
    except ValueError as err:
        return len(made), str(err)
    return len(made), ""


def by_hooks(model):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return model


@case
def one_chain_kept_as_two(rank):
    """Nothing tells the run that the ranks run one chain: the average is taken inside the loss, or by hooks, or not at all."""
    return {
        "ddp inside the loss": replicas_kept_as_chains(rank, "inside", DistributedDataParallel),
        "hooks": replicas_kept_as_chains(rank, "hooks", by_hooks),
        "one generator": replicas_kept_as_chains(rank, "generator", lambda model: model),
    }


@case
def chains_kept_as_chains(rank):
    said = replicas_kept_as_chains(rank, "chains", lambda model: model, chain=rank)
    dist.barrier()
    return said, bc.Draws.open(FOLDER / "chains").chains


@case
def epochs(rank):
    """This rank's part of two epochs of sorted data, and what is said of parts in one order."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.arange(24.0)
    batches = bc.epochs(x, 8, seed=3, mesh=mesh)
    parts = [*batches, *batches]
    tx, params = bc.sghmc(0.05, temperature=0.01), {"w": torch.zeros(())}
    params, state = bc.distributed.broadcast((params, tx.init(params)), mesh)
    step = bc.make_step(lambda p, x: (p["w"] - x).square().mean(), tx, mesh=mesh)
    try:
        bc.sample(step, params, state, bc.epochs(x[rank::2], 4, seed=3), steps=4)
    except ValueError as err:
        return parts, str(err)


@case
def lightning_model_parallel(rank):
    """Lightning's strategy for FSDP2, four epochs of one batch; ``None`` without Lightning."""
    try:
        import lightning
        from lightning.pytorch.strategies import ModelParallelStrategy
    except ImportError:
        return None

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
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return torch.cat([p.full_tensor().detach().flatten() for p in module.net.parameters()])


@case
def lora(rank):
    """Adapters of peft under FSDP2: how far their diagonal and Kronecker posteriors are off one process, and their names."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return None
    torch.manual_seed(0)
    settings = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, lora_dropout=0.5)
    model = get_peft_model(network(sizes=(3, 6, 2)).double(), settings).eval()
    x, y = torch.cat([data(0), data(1)]).double(), torch.arange(16) % 2
    likelihood, tx = bc.likelihoods.categorical(), bc.laplace()
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def posterior(increment, params):
        _, state = tx.update(params, tx.init(params), curvature=increment, inplace=False)
        return tx.posterior(state, params, prior_precision=2.0).marginal_variance

    forward = lambda p, batch: torch.func.functional_call(model, p, (batch[0],))  # noqa: E731
    wanted = {
        kind: posterior(bc.curvature.ggn(forward, likelihood, kind)(adapters, (x, y)), adapters)
        for kind in ("diagonal", "kronecker")
    }
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    batch, off = (x[rank::2], y[rank::2]), {}
    for kind in wanted:
        estimate = getattr(bc.curvature, f"{kind}_by_backward")(model, likelihood, mesh=mesh)
        params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        found = posterior(estimate(batch), params)
        off[kind] = max((found[name].full_tensor() - v).abs().max().item() for name, v in wanted[kind].items())
    return off, sorted(found)


# state dicts of torch.distributed.checkpoint

MADE = {
    "SGHMC": dict(lr=0.05),
    "SGD": dict(lr=0.05, momentum=0.9, nesterov=True),
    "Adam": dict(lr=0.01),
    "Optimizer": {},
}


def under(engine):
    """The network under an engine."""
    if engine == "ddp":
        return DistributedDataParallel(network())
    return fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))


def optimizer_of(name, model, seed=0):
    """An optimizer that draws."""
    generator = bc.distributed.generator(seed)
    if name == "Optimizer":
        tx = bc.sghmc(0.05, temperature=0.01, generator=generator)
        return bc.optim.Optimizer(model.named_parameters(), lambda group: tx)
    return getattr(bc.optim, name)(model.named_parameters(), temperature=0.01, generator=generator, **MADE[name])


def elements(model):
    """The elements of every parameter that are on this rank."""
    return torch.cat([getattr(p, "to_local", lambda p=p: p)().detach().flatten() for p in model.parameters()])


def through_a_state_dict(rank, engine, name, flat, full):
    """The weights after seven steps in one piece, and after four, a state dict, and three of an optimizer of another key."""
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full)
    model = under(engine)
    optimizer = optimizer_of(name, model)
    train(model, optimizer, data(rank), 4)
    saved = copy.deepcopy(dcp.get_optimizer_state_dict(model, optimizer, options=options))
    parameters = copy.deepcopy(model.state_dict())
    said = train(model, optimizer, data(rank), 3)
    straight, model = elements(model), under(engine)
    model.load_state_dict(parameters)
    optimizer = optimizer_of(name, model, seed=1)
    # torch 2.13 loads no state dict that is both, of its own optimizers either (KeyError: 'param_groups.0.params.0')
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=full and not flat)
    dcp.set_optimizer_state_dict(model, optimizer, saved, options=options)
    return said, train(model, optimizer, data(rank), 3), straight, elements(model)


@case
def optimizer_state_dicts(rank):
    every = product(("fsdp2", "ddp"), MADE, (False, True), (False, True))
    return {settings: through_a_state_dict(rank, *settings) for settings in every}


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


LINKS = {"nothing said": Unit, "tree": UnitOnShards, "elementwise": Sign}


def with_a_link(link, model):
    noise = bc.inject_langevin_noise(temperature=0.01, generator=bc.distributed.generator(0))
    tx = bc.chain(bc.Chain((link(),)), noise, bc.scale_by_neg_lr(0.05))
    return bc.optim.Optimizer(model.named_parameters(), lambda group: tx)


@case
def links_on_shards(rank):
    out = {}
    for name, link in LINKS.items():
        model = under("fsdp2")
        try:
            optimizer = with_a_link(link, model)
        except ValueError as err:
            out[name] = str(err)
            continue
        said = train(model, optimizer, data(rank))
        out[name] = said, torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    mesh = init_device_mesh("cpu", (2,))
    g = distribute_tensor(torch.tensor([0.6, 0.0, 0.0, 0.8]), mesh, [Shard(0)])
    tx = bc.chain(bc.Chain((UnitOnShards(),)), bc.scale_by_neg_lr(1.0))
    return out, tx.update(g, tx.init(g), params=g)[0].full_tensor()


# names that wrappers put in front


def wrapped(model, how):
    """The model under these wrappers, from the inside out."""
    for wrapper in how:
        if wrapper == "ddp":
            model = DistributedDataParallel(model)
        elif wrapper == "compile":
            model = torch.compile(model, backend="eager")
        elif wrapper == "fsdp2":
            model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        else:
            model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPERS = (
    (),
    ("ddp",),
    ("checkpoint",),
    ("compile",),
    ("compile", "ddp"),
    ("checkpoint", "ddp", "compile"),
    ("checkpoint", "fsdp2"),
)


def noise_under(how):
    """What the optimizer drew in its third step, and the names that it was given."""
    named = dict((model := wrapped(network(), how)).named_parameters())
    optimizer = sghmc(named.items())
    said = train(model, optimizer, data(0), 3)
    drawn = [optimizer.state[p]["noise"] for p in named.values()]
    return said, [getattr(x, "full_tensor", lambda x=x: x)().clone() for x in drawn], list(named)


@case
def wrappers(rank):
    return {how: noise_under(how) for how in WRAPPERS}


@case
def cost(rank):
    """The share of the processor's time of 300 steps that goes into six comparisons; a step is that of a small network.

    Each of the six counts as their median, since one that the operating system interrupts is longer than the others together.
    """
    model = DistributedDataParallel(network(sizes=(3, 512, 512, 1)))
    optimizer = sghmc(model.parameters())
    look, spent = optimizer._witness.look, []

    def timed(*args):
        start = time.process_time()
        look(*args)
        spent.append(time.process_time() - start)

    optimizer._witness.look = timed
    start = time.process_time()
    train(model, optimizer, data(rank, 128), 300)
    total = time.process_time() - start
    *rest, a, b, c, d, e, f = sorted(spent)
    return (sum(rest) + 6 * statistics.median((a, b, c, d, e, f))) / total


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    global FOLDER
    rank, folder = dist.get_rank(), Path(sys.argv[1])
    FOLDER = folder
    wanted = sys.argv[2:] or list(CASES)
    out = {}
    for name in wanted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out[name] = CASES[name](rank)
        dist.barrier()
    torch.save(out, folder / f"{rank}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # whatever threads of the groups are left


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
