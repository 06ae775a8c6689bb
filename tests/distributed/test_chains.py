"""Chain i is chain i, on any number of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import chain_seed
from tests.distributed.ranks import message_of, run

N = 8


def loss(params, batch):
    x, y = batch
    return ((torch.tanh(x @ params["w"] + params["b"]) - y) ** 2).mean() / 2 + 0.01 * (params["w"] ** 2).sum()


def data():
    g = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, generator=g), torch.randn(16, generator=g)


def starts():
    g = torch.Generator().manual_seed(1)
    return {"w": torch.randn(N, 3, generator=g), "b": torch.randn(N, generator=g)}


def make():
    return bc.sghmc(0.1, temperature=0.05)


def sampled(options, path=None, steps=14, seed=5, unseeded=False):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank() if unseeded else 0)  # ranks that were seeded in any way
    tx = make()
    chains = bc.parallel(bc.make_step(loss, tx), N, mesh=mesh, **options)
    params = chains.mine(starts())
    draws = bc.sample(chains, params, chains.init(tx, params, seed=seed), data(), steps=steps, burn_in=4, path=path)
    every = chains.gather(draws)
    return list(chains.numbers), every.params, every.loss, every.chains, every, len(draws), draws.chains


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"loop": True}, {"chunk": 2}])
def test_eight_chains_on_one_two_and_four_ranks_are_the_same_bit_for_bit(options, tmp_path):
    (alone,), two, four = (run(sampled, size, tmp_path, options) for size in (1, 2, 4))
    assert alone[1]["w"].shape == (10, N, 3) and len({tuple(x) for x in alone[1]["w"][-1].tolist()}) == N
    for ranks in (two, four):
        assert [n for numbers, *_ in ranks for n in numbers] == list(range(N))
        for _, params, losses, chains, every, size, mine in ranks:
            assert (chains, size, mine) == (N, 10, N // len(ranks))
            assert same(params, alone[1]) and torch.equal(losses, alone[2])
            assert same(bc.diagnostics.r_hat(every), bc.diagnostics.r_hat(alone[4]))


@pytest.mark.slow
def test_chains_all_at_once_differ_by_the_rounding_of_their_matrix_products_alone(tmp_path):
    (alone,), two = (run(sampled, size, tmp_path, {}) for size in (1, 2))
    for _, params, *_ in two:
        torch.testing.assert_close(params["w"], alone[1]["w"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_chains_that_do_not_divide_by_the_ranks_are_shared_out_and_gathered(tmp_path):
    (alone,), three = (run(sampled, size, tmp_path, {"loop": True}) for size in (1, 3))
    assert [len(numbers) for numbers, *_ in three] == [3, 3, 2]
    assert all(same(params, alone[1]) for _, params, *_ in three)


@pytest.mark.slow
def test_without_a_seed_the_first_rank_draws_one_for_all(tmp_path):
    ranks = run(sampled, 2, tmp_path, {"loop": True}, None, 14, None, True)
    (alone,) = run(sampled, 1, tmp_path, {"loop": True}, None, 14, None, True)
    assert same(ranks[0][1], alone[1]) and same(ranks[1][1], alone[1])


def test_a_seed_gives_the_same_chains_without_a_mesh(tmp_path):
    tx = make()
    chains = bc.parallel(bc.make_step(loss, tx), N, loop=True)
    state = chains.init(tx, starts(), seed=5)
    draws = bc.sample(chains, starts(), state, data(), steps=14, burn_in=4)
    (alone,) = run(sampled, 1, tmp_path, {"loop": True})
    assert same(draws.params, alone[1])


def test_the_keys_of_many_chains_differ_between_chains_and_seeds():
    seeds = [chain_seed(seed, chain) for seed in (-1, 0, 1, 2**63) for chain in range(25_000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63


def test_a_seed_leaves_torchs_generator_as_it_was():
    tx = make()
    before = torch.get_rng_state()
    bc.parallel(bc.make_step(loss, tx), N).init(tx, starts(), seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_in_the_chain_is_refused_beside_a_seed():
    tx = bc.chain(bc.inject_langevin_noise(0.1, generator=torch.Generator().manual_seed(0)), bc.scale_by_neg_lr(0.1))
    with pytest.raises(ValueError, match="generator of its own"):
        bc.parallel(bc.make_step(loss, tx), N).init(tx, starts(), seed=3)


def hyper():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    temperatures = torch.linspace(0.0, 0.7, N)
    tx = lambda temperature: bc.sghmc(0.1, temperature=temperature)  # noqa: E731
    chains = bc.parallel(
        lambda temperature: bc.make_step(loss, tx(temperature)),
        N,
        each={"temperature": temperatures},
        mesh=mesh,
        loop=True,
    )
    params = chains.mine(starts())
    state = chains.init(tx, params, seed=0)
    for _ in range(5):
        params, state, _ = chains(params, state, data())
    return params


@pytest.mark.slow
def test_every_chain_keeps_its_own_temperature(tmp_path):
    (alone,), two = (run(hyper, size, tmp_path) for size in (1, 2))
    assert torch.equal(torch.cat([params["w"] for params in two]), alone["w"])


def refused():
    mesh = init_device_mesh("cpu", (2,))
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("chains", "data"))
    step = bc.make_step(loss, make())
    return [
        message_of(lambda: bc.parallel(step, 1, mesh=mesh)),
        message_of(lambda: bc.parallel(step, 4, mesh=square)),
        message_of(lambda: bc.parallel(step, 4, mesh="cpu")),
    ]


def test_what_cannot_be_shared_out_is_refused(tmp_path):
    for few, square, text in run(refused, 2, tmp_path):
        assert "1 chains on 2 ranks leave some without one" in few
        assert 'mesh["chains"]' in square and "DeviceMesh" in text


# on the disk


def test_ranks_write_their_own_folders_and_the_draws_are_opened_together(tmp_path):
    path = tmp_path / "draws"
    ranks = run(sampled, 2, tmp_path, {"loop": True}, path)
    assert sorted(p.name for p in path.iterdir()) == [f"chains-{i:05d}-{i + 1:05d}" for i in range(N)]
    opened = bc.Draws.open(path)
    assert opened.complete and opened.chains == N and same(opened.params, ranks[0][1])
    assert torch.equal(opened.loss, ranks[0][2]) and opened.steps.tolist() == list(range(5, 15))
    assert same(bc.Draws.open(path, like=starts()).params, ranks[0][1])


@pytest.mark.slow
def test_a_run_of_ranks_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "draws"
    run(sampled, 2, tmp_path, {"loop": True}, path, 9)
    ranks = run(sampled, 2, tmp_path, {"loop": True}, path, 14)
    (alone,) = run(sampled, 1, tmp_path, {"loop": True})
    assert same(ranks[0][1], alone[1])


def test_a_missing_part_is_named(tmp_path):
    path = tmp_path / "draws"
    run(sampled, 2, tmp_path, {"loop": True}, path)
    (path / "chains-00004-00005").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no draws of chain 4 of 8"):
        bc.Draws.open(path)


def on_its_own(path, seed):
    """A rank that says nothing of a mesh: a chain of its own."""
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    tx, params = bc.sghmc(0.1, temperature=0.05), {"w": torch.zeros(3), "b": torch.zeros(())}
    step = bc.make_step(loss, tx)
    state = tx.init(params)
    bc.save(path.with_suffix(".safetensors"), (params, state), tx=tx)
    loaded = bc.load(path.with_suffix(".safetensors"), like=(params, state), tx=tx)
    draws = bc.sample(step, params, state, data(), steps=20, path=path)
    return draws.params["w"], state[1].key, loaded[1][1].key


def test_ranks_without_a_mesh_are_chains_of_their_own_on_the_disk(tmp_path):
    path = tmp_path / "draws"
    ranks = run(on_its_own, 2, tmp_path, path, None)
    opened = bc.Draws.open(path)
    assert opened.chains == 2
    for i, (w, key, loaded) in enumerate(ranks):
        assert torch.equal(opened.params["w"][:, i], w) and key == loaded
    assert ranks[0][1] != ranks[1][1]
    files = sorted(p.name for p in tmp_path.glob("draws.rank*.safetensors"))
    assert files == ["draws.rank-00000-of-00002.safetensors", "draws.rank-00001-of-00002.safetensors"]
    with pytest.raises(ValueError, match="neither alike nor of different chains"):
        bc.load(path.with_suffix(".safetensors"), like={"w": torch.zeros(3)})


def test_ranks_that_were_seeded_alike_are_found_out_when_their_draws_are_opened(tmp_path):
    path = tmp_path / "draws"
    run(on_its_own, 2, tmp_path, path, 3)
    with pytest.raises(ValueError, match="drew the same noise"):
        bc.Draws.open(path)


def loaded(path):
    return bc.load(path, like={"w": torch.zeros(3)})["w"]


def test_every_rank_loads_what_one_process_saved(tmp_path):
    path = tmp_path / "one.safetensors"
    bc.save(path, {"w": torch.ones(3)})
    assert all(torch.equal(w, torch.ones(3)) for w in run(loaded, 2, tmp_path, path))
