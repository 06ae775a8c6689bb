"""Steps, chains and the members of an ensemble that ranks share are those of one process; what would be wrong is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import chain_seed, chains_of
from bayesopt_chain.ensemble import report
from tests.distributed.ranks import mesh_of, on, refuses, run, world
from tests.distributed.toys import TX, N, line, loss, one, start
from tests.ensemble.test_untidy import Net


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, TX), N).init(TX, start(N), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rank, chains", [*enumerate([range(2), range(2, 4), range(4, 5), range(5, 6)])])
def test_of_ranks_the_first_run_one_chain_more(rank, chains):
    assert chains_of(6, SimpleNamespace(size=lambda: 4, get_local_rank=lambda: rank)) == chains


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


# members of one call

SMALL = {"members": 3, "steps": 60, "lr": 0.03, "progress": False, "batch_size": 16}
# 60 steps in float32, whose matrix products round as the members in one call are many
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}  # modes have no loss
BITWISE = {"rtol": 0, "atol": 0, "equal_nan": True}


def data(n=48):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1]


def normed():
    """What ``vmap`` takes: BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


def last_output(net, x):
    return net.out(net.lstm(x[..., None])[0][:, -1])


def recurrent():
    """What ``vmap`` refuses, so that members run one after the other."""
    return Net(last_output, lstm=nn.LSTM(1, 3, batch_first=True), out=nn.Linear(3, 1))


def call(module=normed, **changes):
    """What a call comes to: predictions, every network, and what the report counts."""
    given = {"data": data(), "mesh": line(), **SMALL, **changes}
    e = bc.posterior_ensemble(module, given.pop("data"), bc.likelihoods.gaussian(), **given)
    p = e.predict(data()[0])
    made = {"mean": p.mean, "log_prob": p.log_prob(data()[1]), "passes": e.report.passes}
    return {**made, "params": e.params, "buffers": e.buffers}


def agree(found, want, bitwise):
    """In all that a call comes to, or in what it predicts, but for rounding."""
    names = [*want] if bitwise else ["mean", "log_prob"]
    torch.testing.assert_close([found[k] for k in names], [want[k] for k in names], **(BITWISE if bitwise else CLOSE))


@pytest.mark.slow
@pytest.mark.parametrize("module", [normed, recurrent])
def test_uneven_members_over_ranks_are_those_of_one_process(module):
    """Bit for bit where they run one after the other. Else equal but for rounding, which is not asked of parameters, since a
    bias before BatchNorm is moved by rounding alone."""
    want, (one, other) = call(module), run(call, 2, module)
    torch.testing.assert_close(one, other, **BITWISE)
    assert all(x.shape[:2] == (1, 3) for x in one["params"].values()) and one["passes"] == want["passes"]
    agree(one, want, bitwise=module is recurrent)


def killed(path, step):
    """A call that dies on every rank, at a step of all runs together."""
    left = iter(range(step - 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(report.Progress, "__call__", lambda self, steps=1: next(left))
        call(path=path)


@pytest.mark.slow
@pytest.mark.parametrize("step, size", [(12, 2), (19, 2), (70, 2), (12, 1)])
def test_a_call_that_is_killed_goes_on_with_the_same_results_bit_for_bit_also_on_another_number_of_ranks(
    step, size, tmp_path
):
    """18 steps try rates, 60 train."""
    run(killed, 2, tmp_path / "kept", step)
    went_on, want, again = (run(call, size, path=path)[0] for path in (tmp_path / "kept", None, tmp_path / "kept"))
    agree(went_on, want, bitwise=size == 2)
    torch.testing.assert_close(again["mean"], went_on["mean"], **BITWISE)  # complete: it returns


@pytest.mark.slow
@on(2)
def test_what_ranks_cannot_share_out_is_refused_on_every_rank_and_that_training_diverges_is_said_there(tmp_path):
    (x, y), rank, path = data(), world()[0], tmp_path / "kept"
    call(path=path)
    refused = lambda **changes: lambda: call(**changes)  # noqa: E731
    refuses(
        {
            ("ValueError", "members=1 on 2 ranks"): refused(members=1),
            ("not given the same call: data differ",): refused(data=(x + rank, y)),
            ("seed", "starts differ"): refused(seed=rank),
            ("TypeError", "mesh must be a DeviceMesh"): refused(mesh="cpu"),
            ("holds another call",): refused(path=path, seed=5),
            ("diverged",): refused(lr=1e30),
        }
    )
