"""Steps and chains that several ranks share are those of one process; what would be silently wrong is refused."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import chain_seed
from tests.distributed.ranks import mesh_of, message_of, on, run, world
from tests.distributed.toys import TX, data, line, loss, start

N = 8
close = functools.partial(torch.testing.assert_close, rtol=0)
STEP = bc.make_step(loss, TX)


def warm(temperature):
    return bc.sghmc(0.1, temperature=temperature)


def warm_step(temperature):
    return bc.make_step(loss, warm(temperature))


def drawn(seed=5, unseeded=False, tx=TX, step=STEP, **options):
    """This rank's chains, draws of theirs and of all chains, of ranks that were seeded in any way."""
    torch.manual_seed(world()[0] if unseeded else 0)
    made = bc.parallel(step, N, mesh=line(), **options)
    params = made.mine(start(N))
    draws = bc.sample(made, params, made.init(tx, params, seed=seed), data(), steps=14, burn_in=4)
    return [*made.numbers], draws.chains, made.gather(draws) if line() else draws


# Options of chains, the numbers of ranks, and how far they may be off the chains of one process.
SHARED = {
    "one after the other": ({"loop": True}, (2, 4), 0.0),
    "in chunks": ({"chunk": 2}, (2, 4), 0.0),
    "all at once": ({}, (2,), 1e-12),  # the rounding of matrix products
    "numbers that do not divide": ({"loop": True}, (3,), 0.0),
    "at temperatures of their own": (
        {"step": warm_step, "tx": warm, "each": {"temperature": torch.linspace(0.0, 0.7, N)}, "loop": True},
        (2,),
        0.0,
    ),
    "without a seed": ({"loop": True, "seed": None, "unseeded": True}, (2,), 0.0),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", SHARED)
def test_chains_over_ranks_are_those_of_one_rank_whatever_their_number(case):
    options, sizes, rounding = SHARED[case]
    ((*_, alone),) = run(drawn, 1, **options)
    assert alone.params["w"].shape == (10, N, 3) and len({tuple(x) for x in alone.params["w"][-1].tolist()}) == N
    for size in sizes:
        for rank, (numbers, mine, every) in enumerate(run(drawn, size, **options)):
            before = sum(len(range(r, N, size)) for r in range(rank))
            assert numbers == [*range(before, before + len(range(rank, N, size)))]
            assert (mine, every.chains, len(every)) == (len(numbers), N, 10)
            close((every.params, every.loss), (alone.params, alone.loss), atol=rounding)
            close(bc.diagnostics.r_hat(every), bc.diagnostics.r_hat(alone), atol=1e6 * rounding)
    if case == "one after the other":  # a seed gives the same chains without a mesh
        assert torch.equal(drawn(**options)[2].params["w"], alone.params["w"])


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, TX), N).init(TX, start(N), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_in_the_chain_is_refused_beside_a_seed():
    tx = bc.chain(bc.inject_langevin_noise(0.1, generator=torch.Generator().manual_seed(0)), bc.scale_by_neg_lr(0.1))
    with pytest.raises(ValueError, match="generator of its own"):
        bc.parallel(bc.make_step(loss, tx), N).init(tx, start(N), seed=3)


@on(2)
def test_what_cannot_be_shared_out_is_refused():
    step = bc.make_step(loss, TX)
    for words, n, mesh in (
        ("1 chains on 2 ranks leave some without one", 1, mesh_of(2)),
        ('mesh["first"]', 4, mesh_of(2, 1)),
        ("DeviceMesh", 4, "cpu"),
    ):
        assert words in message_of(lambda n=n, mesh=mesh: bc.parallel(step, n, mesh=mesh))


# one chain, each rank with a part of every batch

TXS = {
    "sghmc": lambda: bc.sghmc(0.05, temperature=0.01),
    "adam": lambda: bc.adam(0.01, temperature=0.001),
    "skip": lambda: bc.skip_nonfinite(bc.sgld(0.05, temperature=0.01)),
    "vi": lambda: bc.vi.mean_field(bc.sgd(0.01), temperature=0.01),
}


def batches(steps=12, size=12):
    x, y = data(steps * size)
    return [*zip(x.split(size), y.split(size))]


def trajectory(kind, sizes=None, inplace=False):
    """Losses and parameters of a rank that gets ``sizes[rank]`` of the data of every batch, and the step."""
    (rank, _), mesh = world(), line() if sizes else None
    torch.manual_seed(rank if sizes else 0)  # as it happens
    tx, params, losses, first = TXS[kind](), start(), [], sum((sizes or [0])[:rank])
    step, state = bc.make_step(loss, tx, mesh=mesh, inplace=inplace), tx.init(params)
    if sizes:
        params, state = bc.distributed.broadcast((params, state), mesh)
    for batch in batches():
        mine = tuple(x[first : first + sizes[rank]] for x in batch) if sizes else batch
        params, state, info = step(params, state, mine)
        losses.append(info.loss)
    if sizes:
        bc.distributed.require_replicas((params, state), mesh)
    return torch.stack(losses).detach(), {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize(
    "kind, sizes, inplace",
    [
        ("sghmc", (6, 6), True),
        ("sghmc", (5, 7), False),
        ("sghmc", (3, 3, 6, 0), False),
        ("adam", (4, 8), False),
        ("skip", (6, 6), False),
        ("vi", (3, 9), False),
    ],
)
def test_ranks_with_parts_of_the_data_or_none_make_the_step_of_one_process_with_all_of_it(kind, sizes, inplace):
    ranks = run(trajectory, len(sizes), kind, sizes, inplace)
    close(ranks, [trajectory(kind)] * len(sizes), atol=1e-12)
    assert all(torch.equal(params["w"], ranks[0][1]["w"]) for _, params in ranks), "replicas are bit-identical"


@on(2)
def test_gradients_keep_their_dtypes():
    tx, params = bc.sgd(0.5), {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float64)}
    step = bc.make_step(lambda p, x: (p["w"].float() * x).sum(-1).mean() + p["b"].float(), tx, mesh=line())
    params, _, info = step(params, tx.init(params), torch.full((4, 3), 1.0 + world()[0]))
    assert params["w"].dtype == torch.bfloat16 and params["b"].dtype == torch.float64
    assert params["w"].tolist() == [0.25] * 3 and params["b"] == -0.5 and info.loss == 4.5


@on(2, 4)
def test_a_step_sends_one_message_of_the_gradient_and_two_numbers_and_the_noise_none():
    step = bc.make_step(loss, TX, mesh=line())
    params, state = bc.distributed.broadcast((start(), TX.init(start())), line())
    params, state, _ = step(params, state, batches(1)[0])
    with CommDebugMode() as messages:
        for batch in batches(5):
            params, state, _ = step(params, state, batch)
    ((name, count),) = messages.get_comm_counts().items()
    assert count == 5 and "allreduce" in str(name).replace("_", "")
    sent, real = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as noise:
        patch.setattr(dist, "all_reduce", lambda x, **options: (sent.append(x.numel()), real(x, **options))[1])
        step(params, state, batches(1)[0])
        before = noise.get_total_counts()
        TX.update(start(), state, params=params)
    assert sent == [sum(x.numel() for x in params.values()) + 2] and noise.get_total_counts() == before


@on(2)
def test_what_would_be_silently_wrong_is_refused_on_every_rank():
    rank, mesh = world()[0], line()
    torch.manual_seed(rank)
    params, batch, still = start(), batches(1)[0], bc.sgd(0.1)
    cold, stacked = ({k: p + rank for k, p in params.items()}, {k: torch.stack([p, p]) for k, p in params.items()})
    step = bc.make_step(loss, still, mesh=mesh)
    plain, many = bc.make_step(lambda p, b: loss(p, b[:2]), still, mesh=mesh), bc.parallel(step, 2)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    wrapped = lambda p, b: torch.func.functional_call(model, p, (b[0],)).square().mean()  # noqa: E731
    forward, inner, _ = bc.make_functional(model)
    inside, theta = bc.make_step(lambda p, b: forward(p, b).square().mean(), still), [*model.parameters()]
    outside, noisy, hot = bc.make_step(wrapped, still), bc.make_step(loss, TX, mesh=mesh), {"temperature": 0.1}
    for words, act in {
        ("no replicas", "state/1/key", "bc.distributed.broadcast"): lambda: noisy(params, TX.init(params), batch),
        ("no replicas", "params/w"): lambda: step(cold, still.init(cold), batch),
        ("5 and 12 entries",): lambda: plain(params, still.init(params), (*batch, torch.zeros(5))),
        ("loop=True",): lambda: many(stacked, many.init(still, stacked), batch),
        ("asks for curvature",): lambda: bc.make_step(loss, bc.laplace(), curvature=lambda p, b: None, mesh=mesh),
        ("DistributedDataParallel", "model.module", "mesh=mesh"): lambda: outside(weights, still.init(weights), batch),
        ("DistributedDataParallel", "model.module"): lambda: inside(inner, still.init(inner), batch),
        ("2 ranks run", "bc.distributed.generator(seed)"): lambda: bc.optim.SGHMC(theta, 0.1, **hot),
        ("2 ranks run", "bc.optim.SGD with generator=bc.distributed.generator(seed)"): lambda: bc.SGD(
            theta, 0.1, **hot
        ),
        ("2 ranks run", "generator"): lambda: bc.optim.Optimizer(theta, lambda group: bc.sghmc(0.1, **hot)),
    }.items():
        said = message_of(act)
        assert said is not None and all(word in said for word in words), (words, said)
    bc.SGD(theta, 0.1)  # draws nothing
