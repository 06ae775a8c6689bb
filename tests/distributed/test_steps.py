"""Steps and chains that several ranks share are those of one process; what would be silently wrong is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import chain_seed, chains_of
from tests.distributed.ranks import mesh_of, on, refuses, world
from tests.distributed.toys import TX, N, line, loss, one, start


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, TX), N).init(TX, start(N), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_of_ranks_the_first_run_one_chain_more():
    ranks = [SimpleNamespace(size=lambda: 4, get_local_rank=lambda i=i: i) for i in range(4)]
    assert [chains_of(6, rank) for rank in ranks] == [range(2), range(2, 4), range(4, 5), range(5, 6)]


# one chain, each rank with a part of every batch


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
    refuses(
        {
            ("1 chains on 2 ranks leave some without one",): lambda: bc.parallel(step, 1, mesh=mesh),
            ('mesh["first"]',): lambda: bc.parallel(step, 4, mesh=mesh_of(2, 1)),
            ("DeviceMesh",): lambda: bc.parallel(step, 4, mesh="cpu"),
            ("generator of its own",): lambda: bc.parallel(bc.make_step(loss, own), N).init(own, start(N), seed=3),
            ("no replicas", "state/1/key", "bc.distributed.broadcast"): lambda: noisy(params, TX.init(params), batch),
            ("with one seed, 3", "mesh="): lambda: bc.sample(noisy, *spread, parts, steps=4),
            ("no replicas", "params/w"): lambda: step(cold, still.init(cold), batch),
            ("two leaves are named a/b",): lambda: bc.distributed.require_replicas({"a/b": rank, "a": {"b": 0}}, mesh),
            ("5 and 12 entries",): lambda: plain(params, still.init(params), (*batch, torch.zeros(5))),
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
