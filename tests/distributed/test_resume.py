"""A run that several ranks began goes on, on any number of ranks, as if nothing had happened."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import bayesopt_chain as bc
from tests.distributed.ranks import _one, message_of, run, server

N, STEPS = 6, 14


def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(12, 3, generator=g), torch.randn(12, generator=g)


def starts(n=N):
    g = torch.Generator().manual_seed(1)
    return {"w": torch.randn(n, 3, generator=g), "b": torch.randn(n, generator=g)}


def loss(params, batch):
    x, y = batch
    return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean() / 2 + 0.01 * (params["w"] ** 2).sum()


def chains_of(n, mesh=None, fn=loss):
    tx = bc.sghmc(0.1, temperature=0.05)
    chains = bc.parallel(bc.make_step(fn, tx), n, mesh=mesh, loop=True)
    params = chains.mine(starts(n)) if mesh is not None else starts(n)
    return chains, params, chains.init(tx, params, seed=5)


def alone(path=None, steps=STEPS, n=N, batches=None, burn_in=4):
    """The run in one process, without a mesh."""
    chains, params, state = chains_of(n)
    return bc.sample(chains, params, state, batches or data(), steps=steps, burn_in=burn_in, path=path)


def ranked(path, steps, n=N, burn_in=4, batches=None):
    """A rank of the run; ``steps`` may say how far each rank gets."""
    size, rank = dist.get_world_size(), dist.get_rank()
    chains, params, state = chains_of(n, init_device_mesh("cpu", (size,)))
    upto = steps if isinstance(steps, int) else steps[rank]
    draws = bc.sample(chains, params, state, batches or data(), steps=upto, burn_in=burn_in, path=path)
    return list(chains.numbers), draws.params, draws.loss, draws.steps, draws.complete, draws.last[1]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def require_the_uninterrupted_run(path, ranks, steps=STEPS, n=N, burn_in=4, batches=None):
    """What the ranks returned and what stands on the disk is what one process draws, bit for bit."""
    want = alone(steps=steps, n=n, burn_in=burn_in, batches=batches)
    assert [i for numbers, *_ in ranks for i in numbers] == list(range(n))
    for numbers, params, losses, when, complete, state in ranks:
        assert complete and torch.equal(when, want.steps)
        assert same(params, {name: x[:, numbers] for name, x in want.params.items()})
        assert torch.equal(losses, want.loss[:, numbers])
        assert torch.equal(state[0].trace[0], want.last[1][0].trace[0][numbers])
    opened = bc.Draws.open(path)
    assert opened.complete and opened.chains == n and torch.equal(opened.steps, want.steps)
    assert same(opened.params, want.params) and torch.equal(opened.loss, want.loss)


# chains over ranks


def test_two_ranks_run_is_gone_on_with_by_one_process_without_a_mesh(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, 9)
    draws, want = alone(path), alone()
    assert same(draws.params, want.params) and torch.equal(draws.loss, want.loss) and draws.complete
    assert same(bc.Draws.open(path, like=starts()).params, want.params)


def refused(path):
    return message_of(ranked, path, STEPS)


def test_a_run_of_one_process_without_a_mesh_is_not_shared_out(tmp_path):
    path = tmp_path / "draws"
    alone(path, steps=8)
    before = sorted(p.name for p in path.iterdir())
    for said in run(refused, 3, tmp_path, path):
        assert "holds a run of one process, and 3 run now in another layout: go on as it began" in said
    assert sorted(p.name for p in path.iterdir()) == before


@pytest.mark.slow
def test_a_run_goes_from_four_ranks_to_two_to_one_and_back_to_four(tmp_path):
    path = tmp_path / "draws"
    for size, steps in ((4, 6), (2, 9), (1, 11)):
        run(ranked, size, tmp_path, path, steps)
    ranks = run(ranked, 4, tmp_path, path, STEPS)
    require_the_uninterrupted_run(path, ranks)
    before = sorted(p.name for p in path.iterdir())
    again = run(ranked, 4, tmp_path, path, STEPS)
    require_the_uninterrupted_run(path, again)
    assert sorted(p.name for p in path.iterdir()) == before, "as many ranks as before go on in their own folders"


@pytest.mark.slow
@pytest.mark.parametrize("size, stopped", [(2, [5, 9, 7]), (1, [10, 3, 12]), (3, [6, 11]), (1, [STEPS, 8])])
def test_chains_that_are_behind_catch_up_and_all_are_the_uninterrupted_run(size, stopped, tmp_path):
    path = tmp_path / "draws"
    run(ranked, len(stopped), tmp_path, path, stopped, N, 0)
    require_the_uninterrupted_run(path, run(ranked, size, tmp_path, path, STEPS, N, 0), burn_in=0)


def test_a_part_that_was_never_committed_is_run_from_its_start(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, 9)
    for file in path.glob("chains-0000[345]*/*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"no draws of chain 3 of {N}"):
        bc.Draws.open(path)
    assert same(alone(path).params, alone().params)


def test_chains_go_on_with_the_batches_of_their_step(tmp_path):
    path = tmp_path / "draws"
    batches = bc.epochs(data(), 5, seed=3)
    run(ranked, 2, tmp_path, path, [7, 5], N, 0, batches)
    draws = alone(path, batches=bc.epochs(data(), 5, seed=3), burn_in=0)
    assert same(draws.params, alone(batches=bc.epochs(data(), 5, seed=3), burn_in=0).params)


def test_other_batches_are_refused_when_chains_go_on_elsewhere(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, 7, N, 0, bc.epochs(data(), 5, seed=3))
    with pytest.raises(ValueError, match="seed is 3, here 4"):
        alone(path, batches=bc.epochs(data(), 5, seed=4), burn_in=0)


def rows_of_their_own(path, steps, sizes=None):
    """Every chain has its own data: axis 1 of the inputs counts chains."""
    mesh = None if sizes is None else init_device_mesh("cpu", (dist.get_world_size(),))
    tx = bc.sgld(0.1, temperature=0.05)
    step = bc.make_step(lambda p, batch: (p["w"] - batch[0]).square().mean() + batch[1] * p["w"].sum(), tx)
    chains = bc.parallel(step, 4, mesh=mesh, loop=True, batch_dim=(1, None))
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    batch = inputs[:, list(chains.numbers)], torch.tensor(0.1)
    params = {"w": torch.zeros(chains.n, 3)}
    upto = steps if sizes is None else sizes[dist.get_rank()]
    return bc.sample(chains, params, chains.init(tx, params, seed=1), batch, steps=upto, path=path).params["w"]


def test_a_chain_that_catches_up_takes_its_own_rows_of_a_batch(tmp_path):
    path = tmp_path / "draws"
    run(rows_of_their_own, 2, tmp_path, path, None, [3, 6])
    assert torch.equal(rows_of_their_own(path, 8), rows_of_their_own(None, 8))


@pytest.mark.slow
def test_no_draw_yet_is_no_draw_to_lose(tmp_path):
    path = tmp_path / "draws"
    run(stopped_before_the_first_draw, 2, tmp_path, path)
    assert len(bc.Draws.open(path)) == 0
    assert same(alone(path).params, alone().params)


def stopped_before_the_first_draw(path):
    chains, params, state = chains_of(N, init_device_mesh("cpu", (2,)))
    stop = [lambda it: it.step == 2]
    bc.sample(chains, params, state, data(), steps=STEPS, burn_in=4, path=path, callbacks=stop)


def test_another_number_of_chains_is_refused(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, 9)
    with pytest.raises(ValueError, match="6 chains by 2 ranks, and 5 are to be run now"):
        alone(path, n=5)
    chains, params, state = chains_of(N)
    with pytest.raises(ValueError, match="thinning is 1, here 2"):
        bc.sample(chains, params, state, data(), steps=STEPS, burn_in=4, thinning=2, path=path)
    with pytest.raises(ValueError, match="has made 9 steps already"):
        alone(path, steps=8)


def on_its_own(path):
    tx, params = bc.sghmc(0.1, temperature=0.05), {"w": torch.zeros(3), "b": torch.zeros(())}
    torch.manual_seed(dist.get_rank())
    return message_of(lambda: bc.sample(bc.make_step(loss, tx), params, tx.init(params), data(), steps=9, path=path))


def test_chains_without_numbers_are_not_shared_out_anew(tmp_path):
    path = tmp_path / "draws"
    assert run(on_its_own, 2, tmp_path, path) == [None, None]
    (said,) = run(on_its_own, 1, tmp_path, path)
    assert "a run of 2 ranks, and 1 run now" in said and "bc.parallel(step, n, mesh=mesh)" in said


def test_a_rank_of_the_earlier_launch_that_still_writes_is_noticed(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, 9)
    child = server().Process(target=_holding, args=(str(path / "chains-00003-00004" / "lock"),), daemon=True)
    child.start()
    try:
        end = time.monotonic() + 60
        while not (path / "held").exists() and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match=r"another process is writing to .*chains-00003-00004"):
            alone(path)
    finally:
        child.kill()
        child.join()
    assert same(alone(path).params, alone().params)


def _holding(lock):
    import fcntl
    from pathlib import Path

    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (Path(lock).parents[1] / "held").touch()
        time.sleep(120)


@pytest.mark.slow
def test_ctrl_c_while_chains_catch_up_keeps_what_there_is(tmp_path):
    path = tmp_path / "draws"
    run(ranked, 2, tmp_path, path, [12, 5], N, 0)
    calls = iter(range(10**6))

    @functools.wraps(loss)
    def interrupted(params, batch):
        if next(calls) == 8:  # within the third step of three chains
            os.kill(os.getpid(), signal.SIGINT)
        return loss(params, batch)

    chains, params, state = chains_of(N, fn=interrupted)
    draws = bc.sample(chains, params, state, data(), steps=STEPS, path=path)
    assert not draws.complete and draws.why == "interrupted after step 8" and len(draws) == 8
    assert same(draws.params, {name: x[:8] for name, x in alone(burn_in=0).params.items()})
    assert same(alone(path, burn_in=0).params, alone(burn_in=0).params)


def messages_of_chains(path):
    """What the ranks of a run of chains send to each other while they sample, on the disk and in memory."""
    mesh = init_device_mesh("cpu", (2,))
    chains, params, state = chains_of(N, mesh)
    with CommDebugMode() as counted:
        bc.sample(chains, params, state, data(), steps=6, path=path, checkpoint_seconds=0.0)
        bc.sample(chains, params, state, data(), steps=6)
    return counted.get_total_counts()


@pytest.mark.slow
def test_chains_over_ranks_send_no_message(tmp_path):
    assert run(messages_of_chains, 2, tmp_path, tmp_path / "draws") == [0, 0]


# one chain on the data of several ranks


def column(params, batch):
    x, y = batch
    return ((torch.tanh(x @ params["w"]) - y) ** 2).mean() / 2


def regression(size=24):
    g = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, generator=g, dtype=torch.float64), torch.randn(size, generator=g, dtype=torch.float64)


def spread(path, steps, fn=column, loader=False, seconds=30.0, total=24):
    """One chain on all ranks, each with its part of the data."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    x, y = regression(total)
    mine = x[rank::size], y[rank::size]
    batches = bc.epochs(mine, 6 // size, order="fixed") if loader else mine
    torch.manual_seed(3)
    tx, params = bc.sghmc(0.1, temperature=0.01), {"w": torch.zeros(3, dtype=torch.float64)}
    step = bc.make_step(fn, tx, mesh=mesh)
    draws = bc.sample(step, params, tx.init(params), batches, steps=steps, path=path, checkpoint_seconds=seconds)
    if mesh is not None:
        bc.distributed.require_replicas(draws.last, mesh)
    return draws.params["w"], draws.steps


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_one_chain_goes_on_with_its_data_split_otherwise(sizes, tmp_path):
    path = tmp_path / "draws"
    for size, steps in zip(sizes, (7, 12)):
        ranks = run(spread, size, tmp_path, path, steps)
    want, when = spread(None, 12)
    for w, steps in ranks:
        assert torch.equal(steps, when)
        torch.testing.assert_close(w, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(bc.Draws.open(path).params["w"], want, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:epochs")
def test_the_place_in_the_epochs_of_two_ranks_is_a_place_in_those_of_three_and_of_one(tmp_path):
    path = tmp_path / "draws"
    run(spread, 2, tmp_path, path, 6, column, True)  # epochs of 4 batches of 3 data for each of two ranks
    run(spread, 3, tmp_path, path, 9, column, True)
    got, _ = spread(path, 11, loader=True)
    want, _ = spread(None, 11, loader=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:epochs")
def test_batches_of_other_data_are_refused_where_they_are_shared_out_anew(tmp_path):
    path = tmp_path / "draws"
    run(spread, 2, tmp_path, path, 6, column, True)
    with pytest.raises(ValueError, match=r"the batches of 2 ranks were together of data=24 \(here 30\)"):
        spread(path, 9, loader=True, total=30)


def on_a_square(path, steps, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("chains", "data"))
    x, y = regression()
    rows = slice(mesh["data"].get_local_rank(), None, shape[1])
    tx = bc.sghmc(0.1, temperature=0.01)
    chains = bc.parallel(bc.make_step(column, tx, mesh=mesh["data"]), 4, loop=True, mesh=mesh["chains"])
    params = {"w": torch.zeros(chains.n, 3, dtype=torch.float64)}
    upto = steps[mesh["chains"].get_local_rank()]
    draws = bc.sample(chains, params, chains.init(tx, params, seed=2), (x[rows], y[rows]), steps=upto, path=path)
    return list(chains.numbers), draws.params["w"]


def in_one_process(path, steps):
    tx = bc.sghmc(0.1, temperature=0.01)
    chains = bc.parallel(bc.make_step(column, tx), 4, loop=True)
    params = {"w": torch.zeros(4, 3, dtype=torch.float64)}
    return bc.sample(chains, params, chains.init(tx, params, seed=2), regression(), steps=steps, path=path).params["w"]


@pytest.mark.slow
def test_a_mesh_of_chains_and_data_goes_on_in_one_process_and_on_other_meshes(tmp_path):
    path = tmp_path / "draws"
    run(on_a_square, 4, tmp_path, path, (5, 3), (2, 2))
    torch.testing.assert_close(in_one_process(path, 8), in_one_process(None, 8), rtol=0, atol=1e-12)
    for shape, steps in (((2, 2), (12, 10)), ((1, 3), (14,))):
        ranks = run(on_a_square, shape[0] * shape[1], tmp_path, path, steps, shape)
        for numbers, w in ranks:
            want = in_one_process(None, len(w))
            torch.testing.assert_close(w, want[:, numbers], rtol=0, atol=1e-12)


# killed


def fatal_chains(path, steps, n, victim, calls):
    """Chains on ranks, one of which is killed when it evaluates the loss for the time ``calls``."""
    chains, params, state = chains_of(n, init_device_mesh("cpu", (dist.get_world_size(),)), _fatal(loss, victim, calls))
    bc.sample(chains, params, state, data(), steps=steps, path=path, checkpoint_seconds=0.004)


def fatal_spread(path, steps, n, victim, calls):
    spread(path, steps, _fatal(column, victim, calls), seconds=0.004)


def _fatal(fn, victim, calls):
    count = iter(range(1, 10**6))

    @functools.wraps(fn)
    def dying(params, batch):
        if next(count) == calls and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return fn(params, batch)

    return dying


def killed(function, size, folder, *args):
    """Launch ranks; when the first one is dead, kill the others as ``torchrun`` does. Whether the victim killed itself."""
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    files = [folder / f"{meeting.name}-{rank}.pt" for rank in range(size)]
    start = server().Process
    ranks = [start(target=_one, args=(function, r, size, meeting, files[r], args), daemon=True) for r in range(size)]
    for process in ranks:
        process.start()
    end = time.monotonic() + 120
    # a rank that has finished leaves the others to run on
    while time.monotonic() < end and None in (codes := [process.exitcode for process in ranks]) and not any(codes):
        time.sleep(0.002)
    *_, victim, _ = args
    ranks[victim].join(5)  # the end of another rank, which lost its connection, may be known first
    died = ranks[victim].exitcode == -signal.SIGKILL
    for process in ranks:
        process.kill()
        process.join()
    return died


def killed_twenty_times(function, folder, path, steps, n):
    """Twenty launches on 1, 2 or 4 ranks, never on as many as before, each killed at a random step of a random rank.

    Every launch has at least ``steps`` steps to go, so that every one is killed.
    """
    g = torch.Generator().manual_seed(11)
    hit, size = 0, 1
    for launch in range(1, 21):
        size = [s for s in (1, 2, 4) if s != size][int(torch.randint(2, (), generator=g))]
        victim, calls = int(torch.randint(size, (), generator=g)), int(torch.randint(1, steps + 1, (), generator=g))
        hit += killed(function, size, folder, path, steps * launch, n, victim, calls)
    return hit


@pytest.mark.slow
def test_chains_killed_twenty_times_on_changing_numbers_of_ranks_are_the_uninterrupted_run(tmp_path):
    path, n = tmp_path / "draws", 4
    assert killed_twenty_times(fatal_chains, tmp_path, path, 6, n) == 20
    assert len(list(path.glob("chains-*/head.safetensors"))) >= 4
    require_the_uninterrupted_run(path, run(ranked, 2, tmp_path, path, 130, n, 0), 130, n, 0)


@pytest.mark.slow
def test_one_chain_killed_twenty_times_on_changing_numbers_of_ranks_is_the_uninterrupted_run(tmp_path):
    path = tmp_path / "draws"
    assert killed_twenty_times(fatal_spread, tmp_path, path, 6, 1) == 20
    want, _ = spread(None, 130)
    for w, _ in run(spread, 2, tmp_path, path, 130):
        torch.testing.assert_close(w, want, rtol=0, atol=1e-6)
