"""Many small chains in lanes and blocks make the steps that stacked ones make."""

import copy
import ctypes
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import bayesopt_chain as bc
from bayesopt_chain.loop.capture import kernels, lane_kernels, lanes, replays
from bayesopt_chain.loop.capture.lanes import Lanes
from tests.distributed.ranks import run
from tests.loop.beside import COMPILED, assert_close, follow

pytestmark = COMPILED
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
N, D, SIZE = 60, 11, 13  # none of them a multiple of a vector


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, generator=g), torch.rand(N, generator=g).round()


def loss(params, batch):
    x, y, rows = batch
    prior = params["w"].square().sum() / (2 * N)
    return nn.functional.binary_cross_entropy_with_logits(x[rows] @ params["w"] + params["b"], y[rows]) + prior


def make(n, tx=None, **options):
    tx = tx or bc.sghmc(0.1, temperature=1 / N)
    chains = bc.parallel(bc.make_step(loss, tx), n, batch_dim=(None, None, 0), **options)
    g = torch.Generator().manual_seed(1)
    params = {"w": torch.randn(n, D, generator=g), "b": torch.randn(n, generator=g)}
    return chains, params, chains.init(tx, params, seed=3)


def rows_of(n, k, seed=2):
    return torch.randint(-N, N, (k, n, SIZE), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def few_chains(monkeypatch):
    """Lanes for fewer chains than they pay for."""
    monkeypatch.setattr(lanes, "FEWEST", 64)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 chains, whatever they take."""
    monkeypatch.setattr(lanes, "_cache", lambda: 1)


@pytest.mark.parametrize("temperature", [1 / N, 0.0])
def test_ragged_blocks_equal_stacked_chains_and_results_are_contiguous(small_blocks, temperature):
    n = 150  # three blocks of 64, of which the last one shares 42 chains with the second
    chains, params, state = make(n, bc.sghmc(0.1, temperature=temperature))
    x, y = data()
    fast = bc.capture(chains, params, state, (x, y, rows_of(n, 1)[0]))
    assert isinstance(fast._program.replay, Lanes) and fast._program.replay.block == 64
    batches = [(x, y, rows) for rows in rows_of(n, 4)]
    mine, got = follow(chains, fast, (params, state), batches, **CLOSE)
    results: Any = (mine, got.loss)
    assert all(leaf.is_contiguous() for leaf in optree.tree_leaves(results))


def test_a_row_out_of_range_changes_nothing(small_blocks):
    n = 150
    chains, params, state = make(n)
    x, y = data()
    fast = bc.capture(chains, params, state, (x, y, rows_of(n, 1)[0]))
    params, state, _ = fast(params, state, (x, y, rows_of(n, 1)[0]))
    now: Any = (params, state)
    before = copy.deepcopy(now)
    for wrong in (N, -N - 1, 2**40):
        rows = rows_of(n, 1)[0]
        rows[-1, -1] = wrong  # of a chain of the last block
        with pytest.raises(IndexError, match=f"row {wrong} of the batch is out of range for a table of {N} rows"):
            fast(params, state, (x, y, rows))
        torch.testing.assert_close(optree.tree_leaves(now), optree.tree_leaves(before), rtol=0, atol=0)


def test_several_steps_with_temperatures_of_their_own_and_draws(small_blocks):
    n, steps = 80, 3
    temperature = torch.linspace(0.0, 0.1, n)

    def tx(temperature):
        return bc.sghmc(0.1, temperature=temperature)

    def step(temperature):
        return bc.make_step(loss, tx(temperature))

    chains = bc.parallel(step, n, batch_dim=(None, None, 0), each={"temperature": temperature}, chunk=40)
    x, y = (leaf.expand(steps, *leaf.shape) for leaf in data())
    _, params, _ = make(n)
    state, rows = chains.init(tx, params, seed=4), rows_of(n, steps)
    batch = (x, y, rows)
    fast = bc.capture(chains, params, state, batch, steps=steps, batch_dim=0, draws=True)
    assert isinstance(fast._program.replay, Lanes)
    for _ in range(2):
        follow(chains, fast, (params, state), [batch], steps, split=True, **CLOSE)
        temperature.mul_(2.0)  # read anew at every replay


def test_tables_are_read_where_and_as_they_are_now(small_blocks):
    n = 70
    x, y = data()
    table = x.clone()

    def closed(params, rows):
        return loss(params, (table, y, rows))

    tx = bc.sghmc(0.1, temperature=1 / N)
    chains = bc.parallel(bc.make_step(closed, tx), n, batch_dim=0)
    _, params, _ = make(n)
    state, rows = chains.init(tx, params, seed=5), rows_of(n, 1)[0]
    fast = bc.capture(chains, params, state, rows)
    assert isinstance(fast._program.replay, Lanes)
    turned: Any = (x * 2).t().contiguous().t()
    elsewhere: Any = x.clone()
    for change in (lambda: table.mul_(3.0), lambda: table.set_(turned), lambda: table.set_(elsewhere)):
        change()
        follow(chains, fast, (params, state), [rows], **CLOSE)


def network(width, n=64):
    def loss(params, batch):
        x, y = batch
        hidden = torch.tanh(x @ params["a"] + params["b"])
        return ((hidden @ params["c"]).squeeze(-1) - y).square().mean()

    g = torch.Generator().manual_seed(6)
    params = {"a": torch.randn(n, 6, width, generator=g), "b": torch.zeros(n, width)}
    params["c"] = torch.randn(n, width, 1, generator=g) / width**0.5
    batch = torch.randn(n, 7, 6, generator=g), torch.randn(n, 7, generator=g)
    tx = bc.sghmc(0.05, temperature=1e-3)
    chains = bc.parallel(bc.make_step(loss, tx), n, batch_dim=0)
    return chains, params, chains.init(tx, params, seed=7), batch


def test_small_networks_of_many_chains_run_in_lanes():
    chains, params, state, batch = network(5)
    fast = bc.capture(chains, params, state, batch)
    assert isinstance(fast._program.replay, Lanes)
    follow(chains, fast, (params, state), [batch] * 3, **CLOSE)


@pytest.fixture
def uncompiled(monkeypatch):
    """Traces and chooses, and compiles nothing."""
    monkeypatch.setattr(replays.Compiled, "__init__", lambda self, *args: None)


def test_large_products_stay_stacked(uncompiled):
    chains, params, state, batch = network(300)
    assert type(bc.capture(chains, params, state, batch)._program.replay) is replays.Compiled


@pytest.mark.parametrize("steps", [1, 3])
def test_a_captured_step_takes_the_batches_of_its_chains_from_epochs_and_moves_their_position(small_blocks, steps):
    n = 70
    tx = bc.sghmc(0.1, temperature=1 / N)

    def regression(params, batch):
        x, y = batch
        return loss(params, (x, y, torch.arange(len(y))))

    chains = bc.parallel(bc.make_step(regression, tx), n, batch_dim=0)
    _, params, state = make(n, tx)
    source = bc.epochs(data(), SIZE, seed=3, chains=n)  # 4 batches an epoch
    fast = bc.capture(chains, params, state, source, steps=steps)
    assert source.state_dict()["offset"] == 0
    eager = mine = (params, state)
    for k in range(6 // steps):
        *mine, _ = fast(*mine, source)
        for i in range(k * steps, (k + 1) * steps):
            *eager, _ = chains(*eager, source.batch(*divmod(i, 4)))
        assert_close(mine, eager, **CLOSE)
    assert (source.epoch, source.offset) == (1, 2)
    if steps == 1:  # wherever it stands
        source.seek(0)
        assert_close(fast(params, state, source)[0], chains(params, state, source.batch(0, 0))[0], **CLOSE)
    with pytest.raises(ValueError, match="takes its batches from epochs"):
        fast(params, state, bc.epochs(data(), SIZE, seed=3, chains=n))


@pytest.mark.parametrize("why", ["few chains", "loop", "rows of another operation"])
def test_what_lanes_cannot_do_keeps_the_old_way(why, uncompiled, monkeypatch):
    monkeypatch.setattr(lanes, "FEWEST", 4)
    n = 3 if why == "few chains" else 4
    chains, params, state = make(n, None, loop=why == "loop")
    step = chains
    if why == "rows of another operation":  # which fails for a row out of range, after a block has moved

        def embedded(params, batch):
            x, y, rows = batch
            return loss(params, (nn.functional.embedding(rows, x), y[rows], torch.arange(SIZE)))

        step = bc.parallel(
            bc.make_step(embedded, bc.sghmc(0.1, temperature=1 / N)),
            n,
            batch_dim=(None, None, 0),
        )
    x, y = data()
    fast = bc.capture(step, params, state, (x, y, rows_of(n, 1)[0].abs() % N))
    assert type(fast._program.replay) is replays.Compiled


def test_a_chain_sees_its_own_part_of_any_leaf():
    """Blocks of 33 of 70 chains, the last of which overlaps: a leaf comes into lanes, and a report goes out of them."""
    for shape in ((70, 3), (70,), (70, 2, 9), (70, 0)):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8):
            own, out = torch.randint(0, 200, shape).to(dtype), torch.zeros(shape, dtype=dtype)
            room, none = lane_kernels.in_lanes(own, 33), lane_kernels.addresses([])
            batch, report = lane_kernels.leaves([own], [room]), lane_kernels.leaves([out], [room])
            at, here = ctypes.addressof, lane_kernels.addresses([room])
            thread = lane_kernels.Thread(*map(at, (none, here, none, here, none)))
            given = lane_kernels.Given(*map(at, (batch, none, none)))
            plan = lane_kernels.Plan(*map(at, (none, report, none, none)), 0, 1, 1, 0, 0, 0, 1, 70, 33)
            lane_kernels.library().run_blocks(*map(ctypes.byref, (plan, thread, given)), 0, 1, 1, None)
            assert torch.equal(room, own[37:])
            assert torch.equal(out, own)


def test_a_program_that_does_more_than_to_call_kernels_stays_stacked(monkeypatch):
    monkeypatch.setattr(kernels, "_CALLS", frozenset())  # nothing is known to be harmless
    chains, params, state, batch = network(5)
    fast = bc.capture(chains, params, state, batch)
    assert isinstance(fast._program.replay, replays.Compiled)
    follow(chains, fast, (params, state), [batch] * 2, **CLOSE)


def lanes_of(n: int, mesh: Any = None) -> tuple[list[int], Any, str]:
    """Numbers, parameters after three captured steps, and the way they were made: of ``n`` chains, or of this rank's."""
    lanes.FEWEST, lanes._cache = (
        64,
        lambda: 1,
    )  # on a rank, in a process of its own; elsewhere the fixtures put them back
    tx = bc.sghmc(0.1, temperature=1 / N)
    chains = bc.parallel(bc.make_step(loss, tx), n, batch_dim=(None, None, 0), mesh=mesh)
    g = torch.Generator().manual_seed(1)
    every = {"w": torch.randn(n, D, generator=g), "b": torch.randn(n, generator=g)}
    params = every if mesh is None else chains.mine(every)
    numbers = list(chains.numbers)
    rows = rows_of(n, 3)[:, numbers]
    state = chains.init(tx, params, seed=3)
    fast = bc.capture(chains, params, state, (*data(), rows[0]))
    for k in range(3):
        params, state, _ = fast(params, state, (*data(), rows[k]))
    return numbers, {name: p.clone() for name, p in params.items()}, type(fast._program.replay).__name__


def lanes_on_rank(n: int) -> tuple[list[int], Any, str]:
    return lanes_of(n, init_device_mesh("cpu", (dist.get_world_size(),)))


@pytest.mark.slow
def test_chains_of_several_ranks_in_lanes_are_those_of_one_process(small_blocks):
    n = 128  # a block on each rank, whose program is the one of two blocks here
    alone, ranks = lanes_of(n), run(lanes_on_rank, 2, n)
    assert {way for *_, way in (alone, *ranks)} == {"Lanes"}
    assert [i for numbers, *_ in ranks for i in numbers] == list(range(n))
    for name, whole in alone[1].items():
        assert torch.equal(torch.cat([params[name] for _, params, _ in ranks]), whole)


def test_two_threads_make_the_bits_of_one(small_blocks, any_threads):
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        _, found[threads], way = lanes_of(300)
        assert way == "Lanes"
    assert all(torch.equal(found[1][name], found[2][name]) for name in found[1])
