"""Draws: slices, merging, prediction, and what ArviZ makes of them."""

import copy
import functools
import math
import pickle

import optree
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

import bayesopt_chain as bc
from tests.runs.toys import TX, sampled


def made(n=6, chains=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    lead = () if chains is None else (chains,)
    trees = [
        {"a": {"w": torch.randn(*lead, 3, generator=g)}, "b": torch.randn((*lead,), generator=g)} for _ in range(n)
    ]
    return trees, bc.Draws.from_trees(trees, chains=chains)


def forward(params, x):
    return x @ params["a"]["w"] + params["b"]


def test_a_slice_is_draws_and_a_number_is_a_tree():
    trees, draws = made()
    assert torch.equal(draws[2]["a"]["w"], trees[2]["a"]["w"]) and torch.equal(draws[-1]["b"], trees[-1]["b"])
    assert draws[1:4].params["b"].shape == (3,) and torch.equal(draws.thin(2).params["b"], draws.params["b"][::2])
    assert [torch.equal(d["b"], t["b"]) for d, t in zip(draws, trees)] == [True] * 6


def test_draws_pickle_in_memory_and_on_disk(tmp_path):
    for draws in (made()[1], sampled(tmp_path)):
        again = pickle.loads(pickle.dumps(draws))
        for a, b in zip(again, draws):
            assert all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


@pytest.mark.parametrize("chains", [None, 2])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_predictions_are_averages_over_draws_and_chains(chains, chunk):
    trees, draws = made(chains=chains)
    xs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    single = trees if chains is None else [
        {"a": {"w": t["a"]["w"][i]}, "b": t["b"][i]} for t in trees for i in range(chains)
    ]  # fmt: skip
    each = torch.stack([torch.cat([forward(t, x) for x in xs]) for t in single])
    torch.testing.assert_close(draws.predict(forward, xs, chunk=chunk), each.mean(0))
    torch.testing.assert_close(draws.predict(forward, xs, reduce="stack", chunk=chunk), each)
    torch.testing.assert_close(
        draws.predict(forward, xs, transform=torch.nn.functional.logsigmoid, reduce="log_mean_exp", chunk=chunk),
        each.sigmoid().mean(0).log(),
    )


def test_the_log_of_a_mean_of_tiny_probabilities_does_not_underflow():
    draws = bc.Draws.from_trees([torch.tensor(-2000.0), torch.tensor(-2001.0)])
    got = draws.predict(lambda w, x: x + w, [torch.zeros(1)], reduce="log_mean_exp", chunk=1)
    assert math.isclose(got.item(), -2000 + math.log((1 + math.exp(-1)) / 2), rel_tol=1e-6)


def test_a_model_that_vmap_refuses_runs_draw_by_draw():
    def stubborn(params, x):
        return x + params["b"] if params["b"].item() > 0 else x - params["b"]

    trees, draws = made()
    want = torch.stack([t["b"].abs() for t in trees]).mean()
    torch.testing.assert_close(draws.predict(stubborn, [torch.zeros(1)]), want[None])


def test_arviz_sees_chains_then_draws_and_arviz_1_the_same_numbers_as_a_tree_of_data_sets(monkeypatch):
    """ArviZ 1 has no InferenceData: its functions, which arviz-stats holds, take trees of xarray."""
    arviz = pytest.importorskip("arviz")
    pytest.importorskip("arviz_stats")
    pytest.importorskip("arviz_base")
    from arviz_stats.loo import loo

    trees, draws = made(50, chains=3)
    log_likelihood = torch.randn(50, 3, 7)
    old = draws.to_arviz(log_likelihood=log_likelihood)
    assert old.posterior["a.w"].shape == (3, 50, 3)
    assert float(old.posterior["b"][1, 4]) == pytest.approx(trees[4]["b"][1].item())
    monkeypatch.delattr(arviz, "InferenceData")
    new = draws.to_arviz(log_likelihood=log_likelihood)
    assert new.posterior["a.w"].equals(old.posterior["a.w"]) and set(new.children) == {*old.groups()}
    assert loo(new).elpd == pytest.approx(arviz.loo(old).elpd_loo, rel=1e-6)


def test_arviz_reads_large_leaves_on_disk_when_it_looks_at_them(tmp_path, monkeypatch):
    pytest.importorskip("arviz")
    monkeypatch.setattr("bayesopt_chain.runs.draws.LAZY", 0)
    tx = bc.sghmc(0.1, temperature=1.0)
    chains = bc.parallel(bc.make_step(lambda p, batch: p["w"].square().sum(), tx), 2)
    start = {"w": torch.ones(2, 3)}
    draws = bc.sample(chains, start, chains.init(tx, start), None, steps=6, path=tmp_path, progress=False)
    seen, whole = draws.to_arviz()["posterior"]["w"], draws.params["w"]
    assert seen.shape == (2, 6, 3) and not seen.variable._in_memory
    for found, wanted in ((seen[1, 2:4], whole[2:4, 1]), (seen[:, 3], whole[3]), (seen, whole.transpose(0, 1))):
        assert torch.equal(torch.from_numpy(found.to_numpy().copy()), wanted)


def test_a_step_in_place_from_a_draw_leaves_the_draws_as_they_are():
    draws = bc.Draws.from_trees([{"w": torch.ones(2)}] * 2)
    step = bc.make_step(lambda p, batch: p["w"].sum(), bc.sgd(0.1), inplace=True)
    for params in (draws[-1], *draws):
        step(params, step.init(params), None)
    assert torch.equal(draws.params["w"], torch.ones(2, 2))


@pytest.mark.parametrize("chunk", [1, 32])
def test_draws_of_half_precision_are_added_up_in_float32(chunk):
    """As models under autocast give them; in bfloat16 a sum of 1,000 numbers of 6 stops at 2,048."""
    draws = bc.Draws.from_trees([{"w": torch.tensor(float(i % 7))} for i in range(700)])
    outputs = lambda p, batch: (p["w"] + torch.tensor([[0.0, 3.0]])).bfloat16()  # noqa: E731
    every = draws.predict(outputs, [torch.zeros(1)], reduce="stack").double()
    for reduce, wanted in (("mean", every.mean(0)), ("log_mean_exp", every.logsumexp(0) - math.log(700))):
        found = draws.predict(outputs, [torch.zeros(1)], chunk=chunk, reduce=reduce)
        torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=0)
    likelihood, blocks = bc.likelihoods.categorical(), every.bfloat16()
    wanted = likelihood.mixture(every)
    for found in (likelihood.pooled(blocks), likelihood.mixture(blocks)):
        torch.testing.assert_close(found.probabilities, wanted.probabilities.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.epistemic, wanted.epistemic.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chains", [None, 2])
def test_the_log_likelihood_is_that_of_every_datum_under_every_draw(chains):
    trees, draws = made(6, chains=chains)
    x, y, noise = torch.randn(5, 3), torch.randn(5), bc.likelihoods.gaussian(0.7)
    said = draws.log_likelihood(forward, [(x[:2], y[:2]), (x[2:], y[2:])], noise)
    flat = trees if chains is None else [optree.tree_map(lambda v, c=c: v[c], t) for t in trees for c in range(chains)]
    squares = torch.stack([(y - forward(t, x)).square() for t in flat])
    want = -(squares / 0.7 + math.log(2 * math.pi * 0.7)) / 2
    want = want if chains is None else want.reshape(6, 2, 5)
    torch.testing.assert_close(said, want)
    torch.testing.assert_close(draws.log_likelihood(forward, (x, y), noise), want)
    with pytest.raises(TypeError, match=r"pairs \(inputs, targets\), got Tensor"):
        draws.log_likelihood(forward, [x], noise)


NO_DRAW = r"draws\[i\]: i must be a number of one of the 2 draws, or a slice, got"


def row(x):
    return bc.Draws.from_trees([{"w": x}])


def test_errors_say_what_to_do():
    predict = made()[1].predict
    for says, act, *args in (
        ("reduce must be", functools.partial(predict, reduce="sum"), forward, []),
        ("batches is empty", predict, forward, []),
        ("no trees", bc.Draws.from_trees, []),
        ("differ in w", bc.Draws.from_trees, [{"w": torch.ones(1)}, {"w": torch.ones(1).double()}]),
        ("shapes or dtypes", row(torch.ones(1)).stack_chains, row(torch.ones(2))),
        ("shapes or dtypes", row(torch.ones(1)).stack_chains, row(torch.ones(1).double())),
        *((NO_DRAW, made(2)[1].__getitem__, at) for at in (2, -3, [0, 1], "w")),
    ):
        with pytest.raises((IndexError, TypeError, ValueError), match=says):
            act(*args)


@pytest.mark.parametrize(
    "params",
    [{"a": [torch.ones(2), None], "b": torch.ones(1)}, {"a": torch.ones(2), "a/b": torch.ones(1)}, {"": torch.ones(0)}],
    ids=["an absent parameter", "a path that begins another", "no element"],
)
def test_a_tree_of_any_shape_comes_back_from_the_disk(params, tmp_path):
    tx = bc.sghmc(0.1, temperature=0.1)
    step = bc.make_step(lambda p, batch: sum(x.square().sum() for x in optree.tree_leaves(p)), tx)
    draws, held = (bc.sample(step, params, tx.init(params), None, steps=3, seed=1, path=x) for x in (tmp_path, None))
    for found in (draws, bc.Draws.open(tmp_path, like=params), bc.Draws.open(tmp_path)):
        assert all(map(torch.equal, optree.tree_leaves(found.params), optree.tree_leaves(held.params)))
    assert optree.tree_structure(draws[0]) == optree.tree_structure(params) == optree.tree_structure(held.params)
    again = bc.Draws.from_trees([*held])
    assert optree.tree_structure(again.params) == optree.tree_structure(params)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Draws of two chains on disk in folders of their own, in several files, and the same in memory."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        params = {"w": torch.randn(3, 4), "b": torch.randn(())}
        step = bc.make_step(lambda p, batch: p["w"].square().sum() + p["b"].square(), bc.sghmc(0.1, temperature=0.1))
        bc.sample(step, params, step.tx.init(params), None, steps=30, path=path / name, checkpoint_seconds=0.0)
    draws = bc.Draws.open([path / "a", path / "b"])
    return draws, draws._made(draws._columns(), chains=2, complete=True, why="")


def test_elements_are_read_out_of_the_chains_that_hold_them(stored):
    memory = stored[1]
    for low, high in ((0, 24), (10, 14), (0, 3), (12, 24), (23, 24), (5, 5)):
        mine, theirs = (x.column("params/w", slice(4, 20), slice(low, high)) for x in stored)
        assert torch.equal(mine, theirs) and torch.equal(theirs, memory.params["w"][4:20].flatten(1)[:, low:high])


def test_diagnostics_read_a_run_that_is_larger_than_the_memory_a_part_at_a_time(stored, monkeypatch):
    def found(draws):
        return bc.diagnostics.r_hat(draws), bc.diagnostics.ess(draws)

    disk, memory = stored
    want, told = found(memory), bc.diagnostics.doctor(memory)
    monkeypatch.setattr("bayesopt_chain.diagnostics.convergence.AT_ONCE", 8 * 30 * 2 * 5)  # five elements
    monkeypatch.setattr("bayesopt_chain.runs.draws.AT_ONCE", 4 * 3 * 4 * 2 * 2)  # three draws
    monkeypatch.setattr("bayesopt_chain.runs.draws.largest", lambda: 10 * 4 * 13 * 2)
    with pytest.raises(ValueError, match=r"30 draws on disk are .* GiB, more than half .*draws\.column\('params/"):
        _ = disk.params
    torch.testing.assert_close(found(disk), want, rtol=1e-12, atol=0)
    assert str(bc.diagnostics.doctor(disk)).splitlines() == str(told).splitlines()


def test_statistics_of_draws_on_disk_are_computed_a_block_at_a_time(tmp_path, monkeypatch):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double().eval()
    forward, params, _ = bc.make_functional(module)
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = bc.make_step(lambda p, batch: sum(v.square().sum() for v in p.values()), bc.sghmc(0.1, temperature=0.1))
    bc.sample(step, params, step.tx.init(params), None, steps=20, path=tmp_path, checkpoint_seconds=0.0)
    disk = bc.Draws.open(tmp_path)
    memory = disk._made(disk._columns(), chains=None, complete=True, why="")
    want = bc.refresh_batch_norm(module, memory, [x[:12], x[12:]])
    monkeypatch.setattr("bayesopt_chain.runs.draws.AT_ONCE", 3 * sum(p.nbytes for p in params.values()))
    monkeypatch.setattr("bayesopt_chain.runs.draws.largest", lambda: 8 * sum(p.nbytes for p in params.values()))
    some = disk[2:19]
    got = bc.refresh_batch_norm(module, some, iter([x[:12], x[12:]]))
    for name, b in want.buffers.items():
        torch.testing.assert_close(got.buffers[name], b[2:19], rtol=1e-12, atol=1e-12)
    assert got._pieces[0].parts and torch.equal(got.steps, some.steps)
    torch.testing.assert_close(got.predict(forward, [x], chunk=4), want[2:19].predict(forward, [x]))


@pytest.mark.parametrize("batch", [torch.ones(3, 2, dtype=torch.float64), torch.ones(3, 5), torch.ones(3, 2).numpy()])
def test_batches_that_the_model_cannot_take_are_named(batch):
    module = torch.nn.Linear(2, 1)
    draws = bc.Draws.from_trees([bc.make_functional(module).params] * 2)
    with pytest.raises((TypeError, ValueError), match=r"(?s)predict: batches: the model cannot take it \("):
        draws.predict(module, [(batch, None)])


# Fresh statistics for every draw, against torch's own recomputation and against the definition


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3)]
    return nn.Sequential(*layers).double()


def draws_of(module, n, chains=None):
    _, params, _ = bc.make_functional(module)
    shape = () if chains is None else (chains,)
    g = torch.Generator().manual_seed(1)
    trees = [
        {k: p + torch.randn(*shape, *p.shape, generator=g, dtype=p.dtype) for k, p in params.items()} for _ in range(n)
    ]
    return bc.Draws.from_trees(trees, chains=chains)


def data(sizes):
    return [torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in sizes]


def test_the_statistics_of_every_draw_are_those_torch_recomputes_and_other_buffers_stay():
    module, loader = network(), data([8, 8, 8])
    module.register_buffer("shift", torch.tensor(3.0))
    kept, draws = copy.deepcopy(module.state_dict()), draws_of(module, 3)
    fresh = bc.refresh_batch_norm(module, draws, [{"features": x, "labels": None} for x in loader], inputs="features")
    for i in range(3):
        other = copy.deepcopy(module)
        bc.write_back(other, draws[i])
        for layer in other:
            layer.train(isinstance(layer, nn.BatchNorm1d))
        other[2].p = 0.0  # torch's turns dropout on
        update_bn(loader, other)
        for name, b in other.named_buffers():
            torch.testing.assert_close(fresh.buffers[name][i], b, rtol=1e-12, atol=1e-14)
    assert all(torch.equal(kept[k], v) for k, v in module.state_dict().items())


def test_batches_weigh_by_their_size_and_prediction_uses_each_draws_own():
    module, loader = network().eval(), data([4, 12])
    forward, _, _ = bc.make_functional(module)
    draws = draws_of(module, 4)
    fresh = bc.refresh_batch_norm(module, draws, [loader[0][:0], *loader])
    x = torch.cat(loader) @ draws.params["0.weight"].mT + draws.params["0.bias"][:, None]
    torch.testing.assert_close(fresh.buffers["1.running_mean"], x.mean(1), rtol=1e-12, atol=1e-14)
    variance = (4 * x[:, :4].var(1) + 12 * x[:, 4:].var(1)) / 16
    torch.testing.assert_close(fresh.buffers["1.running_var"], variance, rtol=1e-12, atol=1e-14)
    got = fresh.predict(forward, [loader[0]], reduce="stack", chunk=3)
    for i in range(4):
        bc.write_back(module, fresh[i], {name: b[i] for name, b in fresh.buffers.items()})
        torch.testing.assert_close(got[i], module(loader[0]), rtol=1e-12, atol=1e-14)


def test_stacked_chains_have_statistics_each():
    module, loader = network(), data([6, 6])
    draws = draws_of(module, 3, chains=2)
    fresh = bc.refresh_batch_norm(module, draws, loader)
    assert fresh.chains == 2 and fresh.buffers["1.running_mean"].shape == (3, 2, 4)
    one = bc.refresh_batch_norm(module, bc.Draws.from_trees([{k: p[2, 1] for k, p in draws.params.items()}]), loader)
    for name, b in one.buffers.items():
        torch.testing.assert_close(fresh.buffers[name][2, 1], b[0], rtol=1e-12, atol=1e-14)
    assert fresh.predict(bc.make_functional(module.eval()).forward, loader).shape == (12, 3)
    assert len(fresh[1:].thin(2)) == 1 and fresh[1:].buffers["1.running_mean"].shape[0] == 2
    assert torch.equal(fresh.steps, draws.steps)


def test_what_cannot_be_refreshed_or_predicted_is_refused_by_name():
    module, loader = network(), data([8])
    draws = draws_of(module, 2)
    fresh = bc.refresh_batch_norm(module, draws, loader)
    for says, act, *args in (
        ("the loader has no batches", bc.refresh_batch_norm, module, draws, []),
        (r"train mode.*module\.eval\(\)", fresh.predict, bc.make_functional(module).forward, loader),
        (r"BatchNorm1d\) is in training mode", draws.predict, module, loader),
        ("hold buffers of their own", fresh.predict, lambda params, batch: batch, loader),
    ):
        with pytest.raises(ValueError, match=says):
            act(*args)
    assert fresh.predict(lambda params, batch, buffers: batch + buffers["1.running_mean"][:2], loader).shape == (8, 2)


@pytest.mark.parametrize(
    "batch, words",
    [
        (
            torch.ones(1, 2, dtype=torch.float64),
            r"loader, a batch of 1 \(drop_last=True .*more than 1 value per channel",
        ),
        (torch.ones(3, 2, dtype=torch.int64), "loader.* the model cannot take it"),
        (torch.ones(3, 5, dtype=torch.float64), "loader.* the model cannot take it .*shapes"),
    ],
)
def test_batches_that_the_model_cannot_take_are_refused_by_name(batch, words):
    module = network()
    with pytest.raises(ValueError, match="refresh_batch_norm: " + words):
        bc.refresh_batch_norm(module, draws_of(module, 2), [batch])


def test_parameters_of_another_width_are_no_parameters_of_these_draws(tmp_path):
    """Of stacked chains those of one chain, or of any number of them, say which tree and which device are meant."""
    params = {"w": torch.zeros(3, 2)}
    chains = bc.parallel(bc.make_step(lambda p, batch: (p["w"] ** 2).sum(), TX), 3)
    bc.sample(chains, params, chains.init(TX, params, seed=0), None, steps=2, path=tmp_path)
    for like in (torch.zeros(2), torch.zeros(3, 2), torch.zeros(7, 2)):
        assert bc.Draws.open(tmp_path, like={"w": like}).params["w"].shape == (2, 3, 2)
    for like in (torch.zeros(5), torch.zeros(3, 5), torch.zeros(2, 3, 2), torch.zeros(())):
        with pytest.raises(ValueError, match=r"holds w of shape \(2,\), like has"):
            bc.Draws.open(tmp_path, like={"w": like})
