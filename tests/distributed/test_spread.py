"""Runs on disk of parameters that are spread over ranks: the draws of one process, on any number of ranks, in any layout."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bayesopt_chain as bc
from bayesopt_chain.runs import files, writer
from tests.distributed.ranks import _one, message_of, run, server

STEPS = 14


def start():
    g = torch.Generator().manual_seed(1)
    return {"w": torch.randn(6, 5, generator=g).double(), "b": torch.randn(3, generator=g).double()}


def loss(params, batch):
    """Elementwise, so that its gradient has the same bits in every layout."""
    return 0.5 * ((params["w"] - batch) ** 2).sum() + 0.5 * (params["b"] ** 2).sum()


TX = bc.sghmc(0.1, temperature=0.05)
LAYOUTS = {
    "fsdp": lambda size: (init_device_mesh("cpu", (size,)), [Shard(0)]),
    "columns": lambda size: (init_device_mesh("cpu", (size,)), [Shard(1)]),
    "hsdp": lambda size: (init_device_mesh("cpu", (2, size // 2)), [Replicate(), Shard(0)]),
    "both": lambda size: (init_device_mesh("cpu", (2, size // 2)), [Shard(0), Shard(1)]),
}


def spread(layout):
    """The matrix in a layout, the vector on every rank."""
    mesh, placements = LAYOUTS[layout](dist.get_world_size())
    whole = start()
    everywhere = [Replicate()] * mesh.ndim
    w, b = (distribute_tensor(whole[name], mesh, how) for name, how in (("w", placements), ("b", everywhere)))
    return {"w": w, "b": b}


def sampled(params, path, steps=STEPS, burn_in=4, inplace=False, seconds=30.0, fn=loss, **more):
    torch.manual_seed(7)
    step, batches = bc.make_step(fn, TX, inplace=inplace), [torch.tensor(float(i)) for i in range(5)]
    state = TX.init(params)
    return bc.sample(
        step, params, state, batches, steps=steps, burn_in=burn_in, path=path, checkpoint_seconds=seconds, **more
    )


def whole(tree):
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tree.items()}


def ranked(path, layout, steps=STEPS, inplace=False, seconds=30.0, burn_in=4):
    """What a rank's draws are, as a whole, and how they lie."""
    draws = sampled(spread(layout), path, steps, burn_in, inplace, seconds)
    lies = all(isinstance(x, DTensor) for x in draws.params.values())
    return whole(draws.params), draws.steps, draws.loss, draws.complete, lies, whole(draws[0])


def require_the_run_of_one_process(path, ranks):
    want = sampled(start(), None)
    for params, steps, losses, complete, spread_too, first in ranks:
        assert complete and spread_too and torch.equal(steps, want.steps)
        torch.testing.assert_close(losses, want.loss, rtol=1e-12, atol=0)
        assert all(torch.equal(params[name], want.params[name]) for name in params)
        assert all(torch.equal(first[name], want[0][name]) for name in first)
    opened = bc.Draws.open(path, like=start())
    assert opened.complete and torch.equal(opened.steps, want.steps)
    assert all(torch.equal(x, want.params[name]) for name, x in opened.params.items())


@pytest.mark.sweep(1)
@pytest.mark.parametrize("inplace", [False, True])
def test_draws_on_disk_are_those_of_one_process_in_memory(inplace, tmp_path):
    path = tmp_path / "draws"
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "fsdp", STEPS, inplace, 0.0))
    said = [files.File(p).metadata for p in sorted(path.glob("draws-*"))]
    assert [x["step"] for x in said] == list(range(5, STEPS + 1)), "each draw was committed by itself"
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "fsdp", STEPS, inplace))  # complete: at once


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_in_another_layout(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, "fsdp", 7)
    run(ranked, 1, tmp_path, path, "columns", 10, True)
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "columns", STEPS, True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["hsdp", "both"])
def test_four_ranks_go_on_with_what_three_began_and_hand_it_to_two(layout, tmp_path):
    path = tmp_path / "draws"
    run(ranked, 3, tmp_path, path, "columns", 6)
    run(ranked, 4, tmp_path, path, layout, 11)
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "fsdp"))


def slow(path, layout):
    """A run that tells how far it has come, for a test that kills it."""
    told = lambda it: (path.parent / f"step-{it.step}").touch() if it.step > 8 else time.sleep(0.02)  # noqa: E731
    sampled(spread(layout), path, seconds=0.0, callbacks=[lambda it: bool(told(it)) or time.sleep(0.05)])


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_loses_nothing_that_was_committed(victim, tmp_path):
    path, context = tmp_path / "draws", server()
    meeting = tmp_path / "meeting"
    ranks = [
        context.Process(
            target=_one, args=(slow, rank, 2, meeting, tmp_path / f"{rank}.pt", (path, "fsdp")), daemon=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 120
    while not (tmp_path / "step-10").exists() and time.monotonic() < end:
        time.sleep(0.005)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    for rank in ranks:
        rank.kill()
        rank.join()
    assert files.File(path / "head.safetensors").metadata["step"] < STEPS
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "columns"))


def opened(path, layout):
    params = spread(layout)
    draws = bc.Draws.open(path, like=params)
    assert dist.get_rank() or whole_alone(path), "one rank may read alone"
    stacked = draws.params["w"]
    assert stacked.placements == tuple(Shard(p.dim + 1) for p in params["w"].placements)
    return whole(draws[3]), stacked.full_tensor(), draws.steps


def whole_alone(path):
    return bc.Draws.open(path).params["w"].shape == (STEPS - 4, 6, 5)


@pytest.mark.slow
def test_draws_are_opened_in_any_layout_and_by_one_rank_alone(tmp_path):
    path, want = tmp_path / "draws", sampled(start(), None)
    run(ranked, 2, tmp_path, path, "fsdp")
    for one, every, steps in run(opened, 2, tmp_path, path, "columns"):
        assert torch.equal(every, want.params["w"]) and torch.equal(steps, want.steps)
        assert all(torch.equal(x, want[3][name]) for name, x in one.items())
    draws = bc.Draws.open(path)
    assert torch.equal(draws.thin(2).params["w"], want.thin(2).params["w"])
    assert [int(s) for s in draws[2:4].steps] == [7, 8]
    predicted = draws.predict(lambda p, x: p["w"] @ x, [torch.ones(5, dtype=torch.float64)])
    torch.testing.assert_close(predicted, want.params["w"].sum(-1).mean(0))
    draws.verify()


# refusals


def refusals(path):
    said = {"thinning": message_of(lambda: sampled(spread("fsdp"), path, thinning=2))}
    said["steps"] = message_of(lambda: sampled(spread("fsdp"), path, steps=6))
    other = {"w": spread("fsdp")["w"]}
    said["tree"] = message_of(
        lambda: sampled(other, path, fn=lambda p, batch: 0.5 * ((p["w"] - batch) ** 2).sum(), steps=STEPS)
    )
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "draws-0000000000000000.safetensors").unlink()
    dist.barrier()
    said["damaged"] = message_of(lambda: bc.Draws.open(path).params)
    return said


@pytest.mark.slow
def test_another_run_is_refused_on_every_rank(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, "fsdp", 9)
    for said in run(refusals, 2, tmp_path, path):
        assert "thinning is 1, here 2" in said["thinning"] and "has made 9 steps already" in said["steps"]
        assert "holds another run: tree" in said["tree"]
        assert "lacks the draws after steps 1 to 9: restore draws-0000000000000000" in said["damaged"]
    with pytest.raises(ValueError, match="a run of DTensors, and plain tensors are given"):
        sampled(start(), path)


def with_epochs(path, steps, seed, size):
    """A run over epochs of data that every rank has."""
    torch.manual_seed(7)
    data = bc.epochs(torch.arange(12.0, dtype=torch.float64), 3, seed=seed)
    fn = lambda p, batch: loss(p, batch.mean())  # noqa: E731
    params = spread("columns") if size else start()
    draws = bc.sample(bc.make_step(fn, TX), params, TX.init(params), data, steps=steps, path=path)
    return whole(draws.params)


def other_batches(path):
    return message_of(lambda: with_epochs(path, 9, 4, True))


@pytest.mark.slow
def test_the_place_in_the_batches_is_kept_on_another_number_of_ranks(tmp_path):
    path, want = tmp_path / "draws", with_epochs(None, 9, 3, False)
    run(with_epochs, 2, tmp_path, path, 5, 3, True)
    for said in run(other_batches, 2, tmp_path, path):
        assert "data.seed is 3, here 4" in said
    for params in run(with_epochs, 1, tmp_path, path, 9, 3, True):
        assert all(torch.equal(params[name], want[name]) for name in params)


def in_directories_of_their_own(root):
    return message_of(lambda: sampled(spread("fsdp"), root / f"rank-{dist.get_rank()}"))


@pytest.mark.slow
def test_ranks_that_name_several_directories_are_refused(tmp_path):
    for said in run(in_directories_of_their_own, 2, tmp_path, tmp_path / "draws"):
        assert "the ranks name 2 directories" in said
    assert not (tmp_path / "draws").exists()


def without_its_head(path):
    sampled(spread("fsdp"), path, steps=6)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "head.safetensors").unlink()
    dist.barrier()
    return message_of(lambda: sampled(spread("fsdp"), path))


@pytest.mark.slow
def test_draws_without_a_head_are_refused_on_every_rank(tmp_path):
    for said in run(without_its_head, 2, tmp_path, tmp_path / "draws"):
        assert "holds draws but no head.safetensors" in said


def not_finite_on_one_rank(path):
    bad = lambda p, batch: loss(p, batch) * (float("nan") if dist.get_rank() and batch == 2.0 else 1.0)  # noqa: E731
    with pytest.warns(UserWarning, match="diverged"):
        draws = sampled(spread("fsdp"), path, burn_in=0, fn=bad)
    return draws.complete, draws.why, len(draws)


@pytest.mark.filterwarnings("ignore:sample")
def test_a_loss_that_is_not_finite_on_one_rank_ends_the_run_on_all(tmp_path):
    ranks = run(not_finite_on_one_rank, 2, tmp_path, None)
    assert [(complete, n) for complete, _, n in ranks] == [(False, 2)] * 2 and len({why for _, why, _ in ranks}) <= 2


def cut_off(path, where):
    """A run that an error ends: in a step of all ranks, or behind a step of one of them, whose loss the other waits for."""

    def fails(params, batch):
        if batch == 3.0 and where in ("all", 1 - dist.get_rank()):  # steps 4 and 9
            raise ZeroDivisionError("in the loss")
        return loss(params, batch)

    def callback(it):
        if where == dist.get_rank() and it.step == 8:
            raise ZeroDivisionError("in a callback")

    sampled(spread("fsdp"), path, 4, burn_in=0)
    fails.__qualname__, fails.__module__ = loss.__qualname__, loss.__module__
    with pytest.raises(ZeroDivisionError) as caught:
        sampled(spread("fsdp"), path, 14, burn_in=0, fn=fails, callbacks=[callback])
    draws = caught.value.draws
    assert len(draws) == 8 if dist.get_rank() == 0 else 4 <= len(draws) <= 8
    return str(getattr(caught.value, "__notes__", "on disk"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("where", ["all", 0, pytest.param(1, marks=pytest.mark.slow)])
def test_draws_of_ranks_that_an_error_cut_off_are_on_disk(where, tmp_path):
    path, want = tmp_path / "draws", sampled(start(), None, 14, burn_in=0)
    assert all("on disk" in note for note in run(cut_off, 2, tmp_path, path, where))
    kept = bc.Draws.open(path)
    assert not kept.complete and kept.steps.tolist() == list(range(1, 9))
    kept.verify()
    assert all(torch.equal(kept.params[name], want.params[name][:8]) for name in want.params)
    for params, steps, *_ in run(ranked, 3, tmp_path, path, "fsdp", 14, False, 30.0, 0):
        assert steps.tolist() == list(range(1, 15)) and all(torch.equal(params[k], want.params[k]) for k in params)


def exploding(path):
    """A run beyond its limit of stability."""
    tx = bc.sgld(2.1, temperature=1e-3)
    torch.manual_seed(7)
    params = spread("fsdp") if dist.is_initialized() else start()
    with pytest.warns(UserWarning, match="diverged"):
        draws = bc.sample(bc.make_step(loss, tx), params, tx.init(params), torch.tensor(0.0), steps=200, path=path)
    return len(draws), draws.complete, draws.why


@pytest.mark.slow
def test_a_loss_of_dtensors_that_explodes_ends_the_run_where_that_of_one_process_ends(tmp_path):
    want = exploding(None)
    assert 10 < want[0] < 190 and "T P / 2" in want[2]
    assert run(exploding, 2, tmp_path, tmp_path / "draws") == [want] * 2
    assert bc.Draws.open(tmp_path / "draws").why == want[2]


def two_chains_on_meshes_of_their_own(path):
    """Ranks 0 and 1 hold a chain, ranks 2 and 3 another one: torch would keep one of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("chains", "shards"))
    chain = mesh["chains"].get_local_rank()
    x = distribute_tensor(torch.full((4, 3), float(chain)), mesh["shards"], [Shard(0)])
    alike = distribute_tensor(torch.ones(4, 3), mesh["shards"], [Shard(0)])
    bc.distributed.save(path / "alike", {"x": alike})
    return message_of(lambda: bc.distributed.save(path / "chains", {"x": x}))


@pytest.mark.slow
def test_chains_on_meshes_of_their_own_are_not_taken_for_replicas(tmp_path):
    for said in run(two_chains_on_meshes_of_their_own, 4, tmp_path, tmp_path):
        assert "x differ from rank to rank" in said and "chains=chains.numbers" in said


# diagnostics

CHAINS = {
    "sghmc": TX,
    "decay": bc.sgd(0.1, 0.9, weight_decay=0.2, temperature=0.05),
    "Adam": bc.adam(0.02, temperature=0.05),
}


def read(name):
    """Kinetic and configurational temperatures of a run, on ranks or in one process."""
    torch.manual_seed(7)
    tx, params = CHAINS[name], spread("fsdp") if dist.is_initialized() else start()
    meter = bc.diagnostics.Thermometer(tx)
    draws = bc.sample(
        bc.make_step(loss, tx), params, tx.init(params), [torch.tensor(1.0)], steps=40, thinning=4, callbacks=[meter]
    )
    if name == "Adam":
        return [meter.estimates[leaf].value for leaf in "wb"]
    report = bc.diagnostics.temperatures(draws, tx, loss, [torch.tensor(1.0)], thermometer=meter)
    return [part[leaf].value for part in report for leaf in "wb"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("name", CHAINS)
def test_temperatures_are_those_of_one_process(name, tmp_path):
    for values in run(read, 2, tmp_path, name):
        assert values == pytest.approx(read(name), rel=1e-10)


# modules


def fully_sharded(path, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = bc.optim.SGHMC(
        model.named_parameters(), lr=0.05, temperature=0.01, generator=bc.distributed.generator(0)
    )
    rows = slice(dist.get_rank(), None, dist.get_world_size()) if dist.is_initialized() else slice(None)
    data = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)[rows]
    torch.manual_seed(3 + (dist.get_rank() if dist.is_initialized() else 0))  # the first rank's key is everyone's
    step = bc.optim.as_step(model, optimizer, lambda m, x: m(x).square().mean())
    draws = bc.sample(step, step.params, step.state, data, steps=steps, path=path)
    return whole(draws.params), draws.loss


@pytest.mark.slow
def test_a_fully_sharded_module_goes_on_with_its_run_on_another_number_of_ranks(tmp_path):
    path = tmp_path / "draws"
    for size, steps in ((2, 4), (1, 6)):
        run(fully_sharded, size, tmp_path, path, steps)
    want, losses = fully_sharded(None, 9)
    for params, seen in run(fully_sharded, 2, tmp_path, path, 9):
        torch.testing.assert_close(seen, losses, rtol=1e-10, atol=0)
        for name, x in params.items():
            torch.testing.assert_close(x, want[name], rtol=1e-10, atol=1e-12)


def on_a_mesh(path, steps, shape, seconds=30.0):
    """Chains on ranks of their own, each of DTensors on the ranks of its row."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("chains", "shards"))
    chains = bc.parallel(bc.make_step(loss, TX), 4, loop=True, mesh=mesh["chains"])
    start_, tx = start(), TX
    params = {
        "w": distribute_tensor(torch.stack([start_["w"]] * chains.n), mesh["shards"], [Shard(1)]),
        "b": distribute_tensor(torch.stack([start_["b"]] * chains.n), mesh["shards"], [Replicate()]),
    }
    draws = bc.sample(
        chains,
        params,
        chains.init(tx, params, seed=3),
        torch.tensor(0.5),
        steps=steps,
        path=path,
        checkpoint_seconds=seconds,
    )
    return list(chains.numbers), whole(draws.params)


def on_no_mesh():
    chains = bc.parallel(bc.make_step(loss, TX), 4, loop=True)
    params = bc.stack([start()] * 4)
    return bc.sample(chains, params, chains.init(TX, params, seed=3), torch.tensor(0.5), steps=9).params


@pytest.mark.slow
def test_chains_over_ranks_of_dtensors_go_on_on_another_mesh(tmp_path):
    path, want = tmp_path / "draws", on_no_mesh()
    run(on_a_mesh, 4, tmp_path, path, 4, (2, 2))
    assert sorted(p.name for p in path.glob("chains-*")) == [f"chains-{i:05d}-{i + 1:05d}" for i in range(4)]
    for numbers, params in run(on_a_mesh, 2, tmp_path, path, 9, (1, 2)):
        assert all(torch.equal(x, want[name][:, numbers]) for name, x in params.items())
    opened = bc.Draws.open(path)
    assert opened.chains == 4 and all(torch.equal(opened.params[name], x) for name, x in want.items())


@pytest.mark.slow
def test_draws_of_dtensors_are_compacted_by_the_run_and_by_one_process(tmp_path):
    path = tmp_path / "draws"
    ranks = run(compacted_by_ranks, 2, tmp_path, path)
    require_the_run_of_one_process(path, ranks)
    assert len(list(path.glob("draws-*"))) < 8
    writer.compact(path)
    assert len(list(path.glob("draws-*"))) == 1
    require_the_run_of_one_process(path, run(ranked, 2, tmp_path, path, "columns"))


def compacted_by_ranks(path):
    writer.SMALL_FILES = 4
    return ranked(path, "fsdp", seconds=0.0)


def interrupted(path, victim):
    """Ctrl-C on one rank alone, in the middle of the run."""

    def ask(it):
        if it.step == 6 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGINT)

    draws = sampled(spread("fsdp"), path, seconds=0.02, burn_in=0, callbacks=[ask])
    return len(draws), draws.complete, draws.why


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_on_one_rank_ends_all_after_the_same_step_and_loses_nothing(victim, tmp_path):
    path = tmp_path / "draws"
    (made, complete, why), other = run(interrupted, 2, tmp_path, path, victim)
    assert other == (made, complete, why) and not complete and made >= 6 and why.startswith("interrupted after step")
    assert len(bc.Draws.open(path)) == made
    for size in (2, 1):
        for draws in run(uninterrupted, size, tmp_path, path):
            assert all(torch.equal(x, sampled(start(), None, burn_in=0).params[name]) for name, x in draws.items())


def uninterrupted(path):
    return whole(sampled(spread("fsdp"), path, burn_in=0).params)
