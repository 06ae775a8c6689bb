"""One chain on several ranks, each with a part of every batch."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import bayesopt_chain as bc
from bayesopt_chain.runs.files import File
from tests.distributed.ranks import message_of, run


def loss(params, batch):
    x, y = batch
    return ((torch.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean() / 2


def start(dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    return {"w": torch.randn(3, 5, generator=g, dtype=dtype), "v": torch.randn(5, generator=g, dtype=dtype)}


def batches(steps=12, size=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, generator=g, dtype=dtype), torch.randn(size, generator=g, dtype=dtype))
        for _ in range(steps)
    ]


CHAINS = {
    "sghmc": lambda: bc.sghmc(0.05, temperature=0.01),
    "philox": lambda: bc.sghmc(0.05, temperature=0.01),
    "adam": lambda: bc.adam(0.01, temperature=0.001),
    "skip": lambda: bc.skip_nonfinite(bc.sgld(0.05, temperature=0.01)),
    "vi": lambda: bc.vi.mean_field(bc.sgd(0.01), temperature=0.01),
}


def trajectory(kind, sizes, inplace):
    """Parameters, losses, state and messages of a rank that gets ``sizes[rank]`` of the data of every batch."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(rank)  # the ranks are seeded as it happens
    tx = CHAINS[kind]()
    step = bc.make_step(loss, tx, mesh=mesh, inplace=inplace)
    params = start()
    if rank == 0:
        torch.manual_seed(0)
    params, state = bc.distributed.broadcast((params, tx.init(params)), mesh)
    losses, first = [], sum(sizes[:rank])
    for x, y in batches():
        mine = (x[first : first + sizes[rank]], y[first : first + sizes[rank]])
        params, state, info = step(params, state, mine)
        losses.append(info.loss)
    bc.distributed.require_replicas((params, state), mesh)
    return {k: v.detach() for k, v in params.items()}, torch.stack(losses), step.ranks.messages


@pytest.mark.parametrize(
    "kind, sizes, inplace",
    [
        ("sghmc", (6, 6), True),
        ("philox", (5, 7), False),
        ("adam", (4, 8), False),
        ("skip", (6, 6), False),
        ("vi", (3, 9), False),
    ],
)
def test_ranks_with_parts_of_the_data_make_the_step_of_one_process_with_all_of_it(kind, sizes, inplace, tmp_path):
    ranks = run(trajectory, len(sizes), tmp_path, kind, sizes, inplace)
    torch.manual_seed(0)
    tx, params = CHAINS[kind](), start()
    step, state, losses = bc.make_step(loss, tx), tx.init(start()), []
    for batch in batches():
        params, state, info = step(params, state, batch)
        losses.append(info.loss)
    for mine, seen, messages in ranks:
        torch.testing.assert_close(seen, torch.stack(losses), rtol=0, atol=1e-12)
        for name in params:
            torch.testing.assert_close(mine[name], params[name], rtol=0, atol=1e-12)
            assert torch.equal(mine[name], ranks[0][0][name]), "replicas are bit-identical"
        assert messages == 12, "one message a step"


@pytest.mark.slow
def test_four_ranks_one_of_them_without_data_make_the_same_steps(tmp_path):
    two = run(trajectory, 2, tmp_path, "sghmc", (6, 6), False)
    four = run(trajectory, 4, tmp_path, "sghmc", (3, 3, 6, 0), False)
    for mine, _, _ in four:
        torch.testing.assert_close(mine["w"], two[0][0]["w"], rtol=0, atol=1e-12)
        assert torch.equal(mine["w"], four[0][0]["w"])


def in_half_precision():
    mesh = init_device_mesh("cpu", (2,))
    tx, params = bc.sgd(0.5), {"w": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.float64)}
    step = bc.make_step(lambda p, x: (p["w"].float() * x).sum(-1).mean() + p["b"].float(), tx, mesh=mesh)
    x = torch.full((4, 3), 1.0 + dist.get_rank())
    params, _, info = step(params, tx.init(params), x)
    return params, info.loss


def test_gradients_keep_their_dtypes(tmp_path):
    for params, value in run(in_half_precision, 2, tmp_path):
        assert params["w"].dtype == torch.bfloat16 and params["b"].dtype == torch.float64
        assert params["w"].tolist() == [0.25] * 3 and params["b"] == -0.5 and value == 4.5


def counted():
    """The messages of five steps behind the first, by torch's own count."""
    mesh = init_device_mesh("cpu", (2,))
    tx = bc.sghmc(0.05, temperature=0.01)
    step = bc.make_step(loss, tx, mesh=mesh)
    params, state = bc.distributed.broadcast((start(), tx.init(start())), mesh)
    params, state, _ = step(params, state, batches(1)[0])
    with CommDebugMode() as messages:
        for batch in batches(5):
            params, state, _ = step(params, state, batch)
    return {str(op): n for op, n in messages.get_comm_counts().items()}


def test_a_step_sends_one_message_and_the_noise_none(tmp_path):
    for counts in run(counted, 2, tmp_path):
        assert list(counts.values()) == [5] and "allreduce" in next(iter(counts)).replace("_", "")


def sizes_of_messages():
    """How many numbers a step sends, and what is sent besides."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tx = bc.sghmc(0.05, temperature=0.01)
    step = bc.make_step(loss, tx, mesh=mesh)
    params, state = bc.distributed.broadcast((start(), tx.init(start())), mesh)
    params, state, _ = step(params, state, batches(1)[0])
    sent, real = [], dist.all_reduce
    dist.all_reduce = lambda x, **options: (sent.append(x.numel()), real(x, **options))[1]
    try:
        step(params, state, batches(1)[0])
        with CommDebugMode() as noise:
            tx.update(start(), state, params=params)
    finally:
        dist.all_reduce = real
    return sent, noise.get_total_counts()


@pytest.mark.parametrize("size", [2, 4])
def test_the_message_of_a_step_is_the_gradient_and_two_numbers_on_any_number_of_ranks(size, tmp_path):
    parameters = sum(x.numel() for x in start().values())
    assert run(sizes_of_messages, size, tmp_path) == [([parameters + 2], 0)] * size


# chains times data


def on_a_square(n):
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("chains", "data"))
    part = mesh["data"].get_local_rank()
    torch.manual_seed(dist.get_rank())
    tx = bc.sghmc(0.05, temperature=0.01)
    chains = bc.parallel(bc.make_step(loss, tx, mesh=mesh["data"]), n, loop=True, mesh=mesh["chains"])
    params = chains.mine({k: v.expand(n, *v.shape).clone() for k, v in start().items()})
    state = chains.init(tx, params, seed=7)
    size = 12 // mesh["data"].size()
    for x, y in batches():
        rows = slice(part * size, (part + 1) * size)
        params, state, _ = chains(params, state, (x[rows], y[rows]))
    return list(chains.numbers), params


@pytest.mark.slow
def test_a_mesh_of_chains_and_data_runs_the_chains_of_one_process(tmp_path):
    four = run(on_a_square, 4, tmp_path, 4)
    tx = bc.sghmc(0.05, temperature=0.01)
    chains = bc.parallel(bc.make_step(loss, tx), 4, loop=True)
    params = {k: v.expand(4, *v.shape).clone() for k, v in start().items()}
    state = chains.init(tx, params, seed=7)
    for batch in batches():
        params, state, _ = chains(params, state, batch)
    assert [numbers for numbers, _ in four] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for numbers, mine in four:
        torch.testing.assert_close(mine["w"], params["w"][numbers], rtol=0, atol=1e-12)


# on the disk


def from_one_stream(path, steps, ranks):
    """A run whose ranks take their parts of the batches of one process."""
    torch.manual_seed(0)
    tx, params = bc.sghmc(0.05, temperature=0.01), start()
    if ranks == 1:
        return bc.sample(
            bc.make_step(loss, tx), params, tx.init(params), bc.epochs(batches(1, 48)[0], 8, seed=5), steps=steps
        ).params["w"]
    mesh = init_device_mesh("cpu", (ranks,))
    loader = bc.epochs(batches(1, 48)[0], 8, seed=5, mesh=mesh)
    step = bc.make_step(loss, tx, mesh=mesh)
    return bc.sample(step, params, tx.init(params), loader, steps=steps, path=path).params["w"]


@pytest.mark.slow
def test_a_run_on_shared_batches_is_that_of_one_process_and_goes_on_on_another_number_of_ranks(tmp_path):
    whole = from_one_stream(None, 14, 1)
    run(from_one_stream, 4, tmp_path, tmp_path / "draws", 8, 4)
    for mine in run(from_one_stream, 2, tmp_path, tmp_path / "draws", 14, 2):
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-12)


def parts_in_one_order(path):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    tx, params = bc.sghmc(0.05, temperature=0.01), start()
    params, state = bc.distributed.broadcast((params, tx.init(params)), mesh)
    x, y = batches(1, 48)[0]
    loader = bc.epochs((x[rank::2], y[rank::2]), 8)
    step = bc.make_step(loss, tx, mesh=mesh)
    return message_of(lambda: bc.sample(step, params, state, loader, steps=4, path=path))


def test_parts_of_the_data_in_one_order_are_refused_on_every_rank(tmp_path):
    for said in run(parts_in_one_order, 2, tmp_path, tmp_path / "draws"):
        assert said is not None and "with one seed, 0" in said and "mesh=" in said


def to_disk(path, steps):
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    tx, params = bc.sghmc(0.05, temperature=0.01), start()
    (x, y), data = batches(1, 48)[0], slice(rank * 24, rank * 24 + 24)
    loader = bc.epochs((x[data], y[data]), 8, seed=rank)
    step = bc.make_step(loss, tx, mesh=mesh, inplace=True)
    draws = bc.sample(step, params, tx.init(params), loader, steps=steps, path=path, thinning=2)
    return draws.params["w"], len(draws), params["w"]


def test_of_ranks_with_one_chain_the_first_writes_and_all_resume_together(tmp_path):
    straight = run(to_disk, 2, tmp_path, tmp_path / "straight", 14)
    run(to_disk, 2, tmp_path, tmp_path / "resumed", 8)
    resumed = run(to_disk, 2, tmp_path, tmp_path / "resumed", 14)
    assert not list((tmp_path / "resumed").glob("part-*"))
    for (w, n, last), (v, m, end) in zip(straight, resumed):
        assert (n, m) == (7, 7) and torch.equal(w, v) and torch.equal(last, end)
        assert torch.equal(w, straight[0][0]) and torch.equal(w[-1], last)
    assert torch.equal(bc.Draws.open(tmp_path / "resumed").params["w"], straight[0][0])


def dying(path, step, rank):
    """The run to disk, of which a rank is killed within a step; every step is committed."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    tx, params = bc.sghmc(0.05, temperature=0.01), start()
    (x, y), data = batches(1, 48)[0], slice(dist.get_rank() * 24, dist.get_rank() * 24 + 24)
    loader, seen = bc.epochs((x[data], y[data]), 8, seed=dist.get_rank()), []

    def fatal(params, batch):
        seen.append(batch)
        if dist.get_rank() == rank and len(seen) == step:
            os._exit(1)
        return loss(params, batch)

    # the relaunch has the loss that does not kill: of the same name, or it would be another run
    fatal.__module__, fatal.__qualname__ = loss.__module__, loss.__qualname__
    made = bc.make_step(fatal, tx, mesh=mesh, inplace=True)
    bc.sample(made, params, tx.init(params), loader, steps=14, path=path, thinning=2, checkpoint_seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("rank, step", [(0, 5), (1, 10)])
def test_a_killed_rank_ends_all_and_a_relaunch_makes_the_run_that_it_would_have_been(rank, step, tmp_path):
    path = tmp_path / "draws"
    with pytest.raises(AssertionError):
        run(dying, 2, tmp_path, path, step, rank)
    assert File(path / "head.safetensors").metadata["step"] == step - 1
    ranks = run(to_disk, 2, tmp_path, path, 14)
    straight = run(to_disk, 2, tmp_path, tmp_path / "straight", 14)
    assert torch.equal(ranks[0][0], straight[0][0]) and torch.equal(ranks[1][2], straight[0][2])


def another_run(path):
    return message_of(to_disk, path, 14), message_of(to_disk, path, 7)


@pytest.mark.slow
def test_a_directory_that_is_refused_is_refused_on_every_rank(tmp_path):
    run(to_disk, 2, tmp_path, tmp_path / "draws", 14)
    for longer, shorter in run(another_run, 2, tmp_path, tmp_path / "draws"):
        assert longer is None and "has made 14 steps already" in shorter


# refusals


def refusals():
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    torch.manual_seed(rank)
    tx, params = bc.sghmc(0.05, temperature=0.01), start()
    batch = batches(1)[0]
    step = bc.make_step(loss, tx, mesh=mesh)
    said = {"unseeded": message_of(lambda: step(params, tx.init(params), batch))}
    cold = {name: p + rank for name, p in params.items()}
    still = bc.sgd(0.1)
    said["starts"] = message_of(lambda: bc.make_step(loss, still, mesh=mesh)(cold, still.init(cold), batch))
    ragged = (batch[0], batch[1], torch.zeros(5))
    plain = bc.make_step(lambda p, b: loss(p, b[:2]), still, mesh=mesh)
    said["ragged"] = message_of(lambda: plain(params, still.init(params), ragged))
    many = bc.parallel(bc.make_step(loss, still, mesh=mesh), 2)
    stacked = {name: torch.stack([p, p]) for name, p in params.items()}
    said["vmap"] = message_of(lambda: many(stacked, many.init(still, stacked), batch))
    said["curvature"] = message_of(lambda: bc.make_step(loss, bc.laplace(), curvature=lambda p, b: None, mesh=mesh))
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    wrapped = lambda p, b: torch.func.functional_call(model, p, (b[0],)).square().mean()  # noqa: E731
    said["ddp"] = message_of(lambda: bc.make_step(wrapped, still)(weights, still.init(weights), batch))
    forward, inner, _ = bc.make_functional(model)
    said["functional"] = message_of(
        lambda: bc.make_step(lambda p, b: forward(p, b).square().mean(), still)(inner, still.init(inner), batch)
    )
    theta = model.parameters()
    said["optim"] = message_of(lambda: bc.optim.SGHMC(theta, 0.1, temperature=0.1))
    said["class"] = message_of(lambda: bc.SGD(list(model.parameters()), 0.1, temperature=0.1))
    said["cold class"] = message_of(lambda: bc.SGD(list(model.parameters()), 0.1)) or "nothing"
    said["chain"] = message_of(
        lambda: bc.optim.Optimizer(model.parameters(), lambda group: bc.sghmc(0.1, temperature=0.1))
    )
    return said


def test_what_would_be_silently_wrong_is_refused_on_every_rank(tmp_path):
    for said in run(refusals, 2, tmp_path):
        for case, words in {
            "unseeded": ("no replicas", "state/1/key", "bc.distributed.broadcast"),
            "starts": ("no replicas", "params/w"),
            "ragged": ("5 and 12 entries",),
            "vmap": ("loop=True",),
            "curvature": ("asks for curvature",),
            "ddp": ("DistributedDataParallel", "model.module", "mesh=mesh"),
            "functional": ("DistributedDataParallel", "model.module"),
            "optim": ("2 ranks run", "bc.distributed.generator(seed)"),
            "class": ("2 ranks run", "take bc.optim.SGD with generator=bc.distributed.generator(seed)"),
            "cold class": ("nothing",),
            "chain": ("2 ranks run", "generator"),
        }.items():
            assert said[case] is not None, case
            assert all(word in said[case] for word in words), (case, said[case])


# torch's own data parallelism


def under_ddp():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(3, 1))
    torch.manual_seed(rank)  # as it happens
    optimizer = bc.optim.SGHMC(model.parameters(), 0.05, temperature=0.01, generator=bc.distributed.generator(0))
    x = torch.randn(8, 3)
    for _ in range(10):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_replicas_under_ddp_stay_bit_identical_with_one_generator(tmp_path):
    a, b = run(under_ddp, 2, tmp_path)
    assert torch.equal(a, b)
