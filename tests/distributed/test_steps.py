"""Steps and chains that several ranks share are those of one process; what would be silently wrong is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import chain_seed
from tests.distributed.ranks import mesh_of, message_of, on, run, world
from tests.distributed.toys import TX, N, chains, line, loss, must_be, one, sampled, start


def warm(temperature):
    return bc.sghmc(0.1, temperature=temperature)


# The numbers of ranks, how far they may be off the chains of one rank, and options of chains.
SHARED = {
    "one after the other": ((4,), 0.0, {}),
    "in chunks": ((2, 4), 0.0, {"n": 8, "loop": False, "chunk": 2}),
    "all at once": ((2,), 1e-12, {"loop": False}),  # the rounding of matrix products
    "numbers that do not divide": ((3,), 0.0, {"n": 8}),
    "at temperatures of their own": ((2,), 0.0, {"tx": warm, "each": {"temperature": torch.linspace(0.0, 0.7, N)}}),
    "without a seed": ((2,), 0.0, {"key": None}),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", SHARED)
def test_chains_over_ranks_are_those_of_one_rank_whatever_their_number(case):
    sizes, rounding, options = SHARED[case]
    (want,), n = run(sampled, 1, "chains", **options), options.get("n", N)
    assert want.params["w"].shape == (10, n, 3) and len({tuple(x) for x in want.params["w"][-1].tolist()}) == n
    for size in sizes:
        parts = run(sampled, size, "chains", **options)
        for part in parts:
            must_be(part, want, rounding)
        assert [part.numbers for part in parts] == [x.tolist() for x in torch.arange(n).tensor_split(size)]


def gathered():
    made, params, state, batches, _ = chains()
    draws = bc.sample(made, params, state, batches, steps=14, burn_in=4)
    every = made.gather(draws) if line() else draws
    return draws.chains, every.chains, every.params, every.loss, bc.diagnostics.r_hat(every)


def test_every_rank_gathers_the_chains_of_all():
    want = gathered()
    for rank, (mine, *every) in enumerate(run(gathered, 4)):
        assert mine == (2, 2, 1, 1)[rank]
        torch.testing.assert_close(every, [*want[1:]], rtol=0, atol=0)


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, TX), N).init(TX, start(N), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


# one chain, each rank with a part of every batch

TXS = {
    "sghmc": TX,
    "adam": bc.adam(0.01, temperature=0.001),
    "skip": bc.skip_nonfinite(bc.sgld(0.05, temperature=0.01)),
    "vi": bc.vi.mean_field(bc.sgd(0.01), temperature=0.01),
}


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
    options = {"tx": TXS[kind], "total": 12}
    want, parts = sampled("one", **options), run(sampled, len(sizes), "one", sizes=sizes, inplace=inplace, **options)
    for part in parts:
        must_be(part, want, 1e-12)
        assert all(torch.equal(x, parts[0].params[name]) for name, x in part.params.items()), (
            "replicas are bit-identical"
        )


@on(2)
def test_gradients_keep_their_dtypes():
    tx, params = bc.sgd(0.5), {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float64)}
    step = bc.make_step(lambda p, x: (p["w"].float() * x).sum(-1).mean() + p["b"].float(), tx, mesh=line())
    params, _, info = step(params, tx.init(params), torch.full((4, 3), 1.0 + world()[0]))
    assert params["w"].dtype == torch.bfloat16 and params["b"].dtype == torch.float64
    assert params["w"].tolist() == [0.25] * 3 and params["b"] == -0.5 and info.loss == 4.5


@on(2, 4)
def test_a_step_sends_one_message_of_the_gradient_and_two_numbers_and_the_noise_none():
    step, params, state, batch, _ = one()
    params, state, _ = step(params, state, batch)
    sent, real = [], dist.all_reduce
    with pytest.MonkeyPatch.context() as patch, CommDebugMode() as messages:
        patch.setattr(dist, "all_reduce", lambda x, **options: (sent.append(x.numel()), real(x, **options))[1])
        for _ in range(5):
            params, state, _ = step(params, state, batch)
        TX.update(start(), state, params=params)
    assert sent == 5 * [sum(x.numel() for x in params.values()) + 2] and messages.get_total_counts() == 5


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
    for words, act in {
        ("1 chains on 2 ranks leave some without one",): lambda: bc.parallel(step, 1, mesh=mesh),
        ('mesh["first"]',): lambda: bc.parallel(step, 4, mesh=mesh_of(2, 1)),
        ("DeviceMesh",): lambda: bc.parallel(step, 4, mesh="cpu"),
        ("generator of its own",): lambda: bc.parallel(bc.make_step(loss, own), N).init(own, start(N), seed=3),
        ("no replicas", "state/1/key", "bc.distributed.broadcast"): lambda: noisy(params, TX.init(params), batch),
        ("with one seed, 3", "mesh="): lambda: bc.sample(noisy, *spread, parts, steps=4),
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
