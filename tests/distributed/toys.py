"""Runs that ranks share in every way, on small problems: those that launches begin, stop and go on with."""

import collections
import contextlib
import functools
import itertools
import signal

import torch
import torch.distributed as dist
import torchopt
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from tests.distributed.ranks import mesh_of, whole, world

# The package imports a file when a name in it is first asked for: here, so that processes are forked with all of them.
N, STEPS = 6, 14
TX = bc.sghmc(0.1, temperature=0.05)


def data(n=24):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=g).double(), torch.randn(n, generator=g).double()


def start(*n):
    g = torch.Generator().manual_seed(1)
    return {"w": torch.randn(*n, 3, generator=g).double(), "b": torch.randn(n, generator=g).double()}


def loss(params, batch):
    x, y = batch
    return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean() / 2 + 0.01 * (params["w"] ** 2).sum()


def elementwise(params, batch):
    """Its gradient has the same bits in every layout."""
    return 0.5 * ((params["w"] - batch) ** 2).sum() + 0.5 * (params["b"] ** 2).sum()


def network(*sizes, seed=0, dtype=torch.float64):
    """Layers of these sizes, with tanh between them; of 5, 8 and 3 by default."""
    torch.manual_seed(seed)
    sizes = sizes or (5, 8, 3)
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


CUT = {"0": ColwiseParallel(), "2": RowwiseParallel()}
ENGINES = {  # of a model and the number of ranks
    "ddp": lambda model, size: DistributedDataParallel(model),
    "zero": lambda model, size: DistributedDataParallel(model),
    "compile": lambda model, size: torch.compile(model, backend="eager"),
    "checkpoint": lambda model, size: nn.Sequential(checkpoint_wrapper(model[0]), *model[1:]),
    "fsdp1": lambda model, size: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp1 original": lambda model, size: FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    ),
    "fsdp": lambda model, size: fully_shard(model, mesh=mesh_of(size)),
    "hsdp": lambda model, size: fully_shard(model, mesh=mesh_of(2, size // 2)),
    "tp": lambda model, size: parallelize_module(model, mesh_of(size), CUT),
    "tp by fsdp": lambda model, size: fully_shard(
        parallelize_module(model, mesh_of(2, size // 2)["second"], CUT), mesh=mesh_of(2, size // 2)["first"]
    ),
}


def under(engine, model=None):
    """The model under an engine, over all ranks."""
    return ENGINES[engine](model or network(), world()[1])


def line():
    """All ranks in a row; ``None`` in one process."""
    return mesh_of(world()[1]) if dist.is_initialized() else None


# runs: a step, parameters, state, batches, and the numbers of this rank's chains where there are several


def chains(n=N, fn=loss, shape=None, order=None, seed=3, tx=TX, key=5, each=None, **options):
    """Chains over the first axis of a mesh, on the data of the second one; ``order``: batches by epochs.

    Without a ``key`` ranks are seeded as it happens; ``each``: arguments of ``tx``, of which every chain has its own.
    """
    torch.manual_seed(world()[0])
    square = mesh_of(*shape) if shape and dist.is_initialized() else None
    mesh, within = (square["first"], square["second"]) if square else (line(), None)
    rows = slice(within.get_local_rank(), None, within.size()) if within else slice(None)
    batches = tuple(x[rows] for x in data())
    make = lambda **given: bc.make_step(fn, tx(**given) if given else tx, mesh=within)  # noqa: E731
    made = bc.parallel(make if each else make(), n, mesh=mesh, each=each, **{"loop": True, **options})
    params = made.mine(start(n))
    if "batch_dim" in options:  # every chain has inputs of its own
        batches = torch.stack([batches[0] + i for i in made.numbers], 1), batches[1]
    batches = bc.epochs(batches, 5, seed=seed) if order else batches
    return made, params, made.init(tx, params, seed=key), batches, list(made.numbers)


def one(fn=loss, order=None, total=24, inplace=False, tx=TX, sizes=None):
    """One chain on the data of all ranks: all of each rank's, or ``order`` of batches: shared, of its part, of its own seed.

    ``sizes``: how many data each rank has.
    """
    (rank, size), every, mesh = world(), data(total), line() if world()[1] > 1 else None
    where = slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) if mesh and sizes else slice(rank, None, size)
    mine = tuple(x[where] for x in every)
    batches = {
        None: lambda: mine,
        "shared": lambda: bc.epochs(every, 8, seed=5, mesh=mesh),
        "fixed": lambda: bc.epochs(mine, 6 // size, order="fixed"),
        "own": lambda: bc.epochs(mine, 8, seed=rank),
    }[order]()
    torch.manual_seed(3 + rank)  # the first rank's key is all ranks'
    params = start()
    state = tx.init(params)
    if mesh:
        params, state = bc.distributed.broadcast((params, state), mesh)
    return bc.make_step(fn, tx, mesh=mesh, inplace=inplace), params, state, batches, None


LAYOUTS = {
    "fsdp": lambda size: (mesh_of(size), [Shard(0)]),
    "columns": lambda size: (mesh_of(size), [Shard(1)]),
    "hsdp": lambda size: (mesh_of(2, size // 2), [Replicate(), Shard(0)]),
    "both": lambda size: (mesh_of(2, size // 2), [Shard(0), Shard(1)]),
    "twice": lambda size: (mesh_of(2, size // 2), [_StridedShard(0, split_factor=size // 2), Shard(0)]),
}


def distributed(tree, mesh, ways):
    """Every leaf on a mesh in a way of its own, without a message; ``None``: as it is."""
    put = functools.partial(distribute_tensor, device_mesh=mesh, src_data_rank=None)
    return {name: x if ways[name] is None else put(x, placements=ways[name]) for name, x in tree.items()}


def spread(tree, layout):
    """Every matrix in a layout, and the vectors on every rank; the tree itself in one process."""
    if not dist.is_initialized():
        return tree
    mesh, placements = LAYOUTS[layout](world()[1])
    return distributed(
        tree, mesh, {name: placements if x.ndim == 2 else [Replicate()] * mesh.ndim for name, x in tree.items()}
    )


def shards(layout="fsdp", fn=elementwise, order=None, seed=3, tx=TX, clip=None, **options):
    """One chain of DTensors; ``order``: over epochs of data that every rank has; ``clip``: the largest norm of a gradient."""
    tx = bc.chain(torchopt.clip_grad_norm(clip), tx) if clip else tx
    params, batches = spread(start(6), layout), [torch.tensor(float(i)) for i in range(5)]
    if order:
        batches = bc.epochs(torch.arange(12.0).double(), 3, seed=seed)
        fn = lambda p, batch: elementwise(p, batch.mean())  # noqa: E731
    torch.manual_seed(7)
    return bc.make_step(fn, tx, **options), params, tx.init(params), batches, None


def chains_of_shards(shape=None):
    """Chains on ranks of their own, each of DTensors on the ranks of its row."""
    mesh = mesh_of(*shape) if shape else None
    made = bc.parallel(bc.make_step(elementwise, TX), 4, loop=True, mesh=mesh and mesh["first"])
    params = bc.stack([start(6)] * made.n)
    if mesh:
        params = distributed(params, mesh["second"], {"w": [Shard(1)], "b": [Replicate()]})
    return made, params, made.init(TX, params, seed=3), torch.tensor(0.5), list(made.numbers)


def module(untidy=False):
    """A module under ``fully_shard``, each rank with its part of the data; ``untidy``: replicas with dropout and buffers."""
    (rank, size), model = world(), network(4, 6, 2)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    batches = bc.epochs(x, 4, seed=3, mesh=line()) if untidy else x[rank::size]
    if untidy:
        model = under("ddp", nn.Sequential(nn.Dropout(0.3), *model, nn.BatchNorm1d(2).double()))
    elif dist.is_initialized():
        under("fsdp", model)
    noise = {"temperature": 0.01, "generator": bc.distributed.generator(0)}
    optimizer = bc.optim.SGHMC(model.named_parameters(), lr=0.05, **noise)
    torch.manual_seed(3 + rank)  # the first rank's key is everyone's
    step = bc.optim.as_step(model, optimizer, lambda m, x: m(x).square().mean())
    return step, step.params, step.state, batches, None


KINDS = {f.__name__: f for f in (chains, one, shards, chains_of_shards, module)}
ROUNDING = {"one": 1e-12, "module": 1e-10}  # of sums over ranks; the other kinds are bit for bit

Part = collections.namedtuple("Part", "numbers norms chains params loss steps complete why velocity spread")


def sampled(
    kind, path=None, steps=STEPS, burn_in=4, thinning=1, seconds=30.0, callbacks=(), quiet=False, ends=None, **options
):
    """What this rank has of a run in the end, which sends no message where it is ``quiet``; ``steps`` may say how far each rank
    gets, and ``ends`` on which one, in which evaluation of its loss, and in which way the run is ended."""
    if ends:
        options["fn"] = dies(elementwise if kind == "shards" else loss, *ends)
    step, params, state, batches, numbers = KINDS[kind](**options)
    norms = [] if options.get("monitor") else None
    with CommDebugMode() if quiet else contextlib.nullcontext() as messages:
        draws = bc.sample(
            step, params, state, batches, steps=steps if isinstance(steps, int) else steps[world()[0]],
            burn_in=burn_in, thinning=thinning, path=path, checkpoint_seconds=seconds,
            callbacks=[*callbacks, lambda it: None if norms is None else norms.append(whole(it.info.gradient_norm))],
        )  # fmt: skip
    assert not quiet or messages.get_total_counts() == 0
    if numbers and path is None and line():  # chains in memory: every rank gathers those of all
        draws, numbers = draws if step.mesh is None else draws.gather(step.mesh), None
    lies = any(isinstance(x, DTensor) for x in draws.params.values())
    velocity = None if lies or kind == "module" or draws.last is None else getattr(draws.last[1][0], "trace", [None])[0]
    params = {name: x.detach() for name, x in whole(dict(draws.params)).items()}
    return Part(
        numbers, norms, draws.chains, params, draws.loss, draws.steps, draws.complete, draws.why, velocity, lies
    )  # fmt: skip


def must_be(part, want, rounding=0.0):
    """A part of a run is what the run in one process has there."""
    assert part.complete == want.complete and torch.equal(part.steps, want.steps)
    assert part.chains == (len(part.numbers) if part.numbers else want.chains)
    mine = slice(None) if part.numbers is None else (slice(None), part.numbers)
    close = functools.partial(torch.testing.assert_close, rtol=0, atol=rounding)
    close(part.norms, want.norms, atol=1e-12)
    close(part.params, {name: x[mine] for name, x in want.params.items()})
    close(part.loss, want.loss[mine], rtol=1e-12 + rounding)
    if part.velocity is not None:
        close(part.velocity, want.velocity if part.numbers is None else want.velocity[part.numbers])


KILL, CTRL_C = (functools.partial(signal.raise_signal, x) for x in (signal.SIGKILL, signal.SIGINT))


def interrupt():
    """As a second Ctrl-C does, in the middle of a step or a callback."""
    raise KeyboardInterrupt


def dies(fn, victim, calls, way=KILL):
    """The loss ``fn``, under its own name, whose evaluation number ``calls`` ends the rank ``victim`` in this way."""
    count = iter(range(1, 10**6))

    @functools.wraps(fn)
    def fatal(params, batch):
        if next(count) == calls and world()[0] == victim:
            way()
        return fn(params, batch)

    return fatal
