"""Chains on parameters that are spread over ranks: the trajectory of one process, in every layout, or a refusal by name."""

import functools
import hashlib
import itertools
import os
import pickle
import random
import warnings
from contextlib import nullcontext

import optree
import pytest
import torch
import torch.distributed as dist
import torchopt
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import bayesopt_chain as bc
from bayesopt_chain.distributed.checkpoint import DIGESTS
from bayesopt_chain.distributed.parts import runs, runs_of
from bayesopt_chain.distributed.shards import local_tree
from tests.distributed.ranks import mesh_of, message_of, on, refuses, run, whole, world
from tests.distributed.toys import KINDS, LAYOUTS, TX, distributed, network, start, under
from tests.random import draws
from tests.registry import POSTERIORS, TRANSFORMS
from tests.registry.samplers import variational

close = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-12)

# a tree of parameters, spread over four ranks in every way that torch knows

STRIDED = (_StridedShard(0, split_factor=2), Shard(0))


def layouts():
    """By name: the mesh, and the placements of every leaf; ``None`` for a plain tensor."""
    line, square = mesh_of(4), mesh_of(2, 2)
    alike = {"scale": (Replicate(),), "bias": (Replicate(),)}
    return {
        "Shard(0), uneven and empty": (
            line,
            {"weight": (Shard(0),), "bias": (Shard(0),), "scale": (Replicate(),), "head": (Shard(0),)},
        ),
        "Shard(1)": (line, {"weight": (Shard(1),), "head": (Shard(1),), **alike}),
        "HSDP": (
            square,
            {
                "weight": (Replicate(), Shard(0)),
                "bias": (Replicate(), Shard(0)),
                "scale": (Replicate(), Replicate()),
                "head": (Replicate(), Shard(0)),
            },
        ),
        "TP": (line, {"weight": (Shard(0),), "bias": (Shard(0),), "scale": None, "head": (Shard(1),)}),
        "FSDP x TP": (
            square,
            {
                "weight": STRIDED,
                "bias": STRIDED,
                "scale": (Replicate(), Replicate()),
                "head": (Shard(0), Shard(1)),
            },
        ),
    }


def leaves(seed, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    shapes = {"weight": (10, 6), "bias": (5,), "scale": (), "head": (3, 7)}
    return {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}


def cut(x, mesh, coordinate, placements):
    """What a rank at a coordinate of a mesh of this shape holds of a tensor, by torch's own cutting."""
    for size, place, placement in zip(mesh, coordinate, placements or ()):
        if not isinstance(placement, Replicate):
            x = placement._split_tensor(x, size, with_padding=False)[0][place]
    return x.contiguous().clone()


# chains on such trees

REFUSED = {  # rows with a link that mixes elements, or asks for the shape of a whole leaf
    "samplers.mclmc",
    "samplers.scale_by_stein_kernel",
    "samplers.langevin_with_precision",
    "samplers.svgd",
    "samplers.replica_exchange",
    *[str(row) for row in POSTERIORS if not str(row).startswith(("vi.mean_field", "vi.ivon", "laplace"))],
}


ADAM, MORE = torchopt.adam(1e-2), {"weight_decay": 0.1}
FAMILIES = {
    "mean_field, clipped": lambda t: bc.vi.mean_field(
        bc.chain(torchopt.clip_grad_norm(0.3), bc.adam(1e-2)), temperature=t
    ),
    "mean_field, four draws": lambda t: bc.vi.mean_field(ADAM, temperature=t, n_samples=4, antithetic=True, **MORE),
    "ivon, two draws": lambda t: bc.vi.ivon(0.1, temperature=t, n_samples=2, betas=(0.9, 0.9), **MORE),
}
ROWS = (*TRANSFORMS, *(variational(name, build) for name, build in FAMILIES.items()))
SENDS = {  # what needs a sum over all elements: thermostats, energies, norms, and whether all of them are finite
    "samplers.sgnht", "samplers.badodab", "samplers.scale_by_contour", "samplers.contour_sgld", "samplers.samadams",
    "skip_nonfinite", "vi.mean_field, clipped",
}  # fmt: skip


HARD = ("Shard(0), uneven and empty", "FSDP x TP")


def trajectory(tx, params, inplace, batches, seed):
    """Parameters and state after some steps, each with the gradient of a quadratic loss and a batch's noise, and how many
    messages were sent in the last one."""
    torch.manual_seed(seed)
    state, messages = tx.init(params), CommDebugMode()
    for batch in batches:
        grads = {name: 0.5 * p + 0.1 * batch[name] for name, p in params.items()}
        with messages if batch is batches[-1] else nullcontext():
            updates, state = tx.update(grads, state, params=params, inplace=inplace)
        params = {name: p + updates[name] for name, p in params.items()}
    return params, state, messages.get_total_counts()


@on(4)
@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_every_transform_makes_the_steps_of_one_process_in_its_layouts_or_refuses_by_name(part):
    """Every row in both of the layouts that cut every leaf another way, in one of them in place, and in one of the others, by
    turns."""
    batches, known, sent = [leaves(10 + step) for step in range(3)], layouts(), set()
    here = {name: [distributed(batch, *layout) for batch in batches] for name, layout in known.items()}
    simple = [name for name in known if name not in HARD]
    for number, row in list(enumerate(ROWS))[part::2]:
        tx, refused = row.build(0.1), str(row) in REFUSED
        want = None if refused else trajectory(tx, leaves(0), True, batches, 3)[0]
        for turn, name in enumerate((*HARD, simple[number % len(simple)])):
            layout, inplace = known[name], (turn + number // 2) % 2 == 0
            # the ranks are seeded as it happens: the first one's key is all ranks'
            go = lambda: trajectory(tx, distributed(leaves(0), *layout), inplace, here[name], 3 + world()[0])  # noqa: B023, E731
            if refused:
                said = message_of(go)
                assert "is a DTensor, of which each rank has a part" in said, (row, name)
                assert "bc.vi.mean_field" in said or not str(row).startswith(("vi.", "ekf.")), (row, said)
                continue
            got, state, messages = go()
            plain = {tuple(x.shape) for x in optree.tree_leaves(state) if x.ndim > 1 and not isinstance(x, DTensor)}
            assert not plain & {(10, 6), (3, 7)}, (row, name, "a state is spread as its leaf")
            sent |= {str(row)} if messages else set()
            close(local_tree(got), local_tree(distributed(want, *layout)), msg=lambda said: f"{row}, {name}: {said}")  # noqa: B023
    assert sent == SENDS & {str(row) for row in ROWS[part::2]}, sent ^ SENDS


# the runs are the elements that torch's placements give to each rank


AXES = (Replicate(), Shard(0), Shard(1), Shard(2))
PARTS = [
    ((7,), (3,), (Shard(0),)),
    ((2, 5), (4,), (Shard(0),)),  # two ranks hold nothing
    ((6, 5, 4), (2,), (Shard(1),)),
    ((6, 5, 4), (3,), (Shard(-1),)),
    ((8, 6), (2, 2), (Replicate(), Shard(0))),  # HSDP
    ((9, 6), (2, 3), (Shard(0), Shard(1))),  # FSDP x TP along different axes
    ((9, 6), (2, 2), (Shard(0), Shard(0))),
    ((12, 5), (2, 3), (_StridedShard(0, split_factor=3), Shard(0))),  # FSDP x TP along one axis
    ((12, 5), (2, 3), (_StridedShard(1, split_factor=3), Shard(1))),
    ((7, 2), (3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((5, 3), (2, 2), (Replicate(), Replicate())),
    ((), (2,), (Replicate(),)),
    ((0, 3), (2,), (Shard(1),)),
    *(((5, 9, 3), (a, b), (x, y)) for a, b in ((3, 2), (4, 4), (1, 3)) for x, y in itertools.product(AXES, AXES)),
]


@pytest.mark.parametrize("shape, mesh, placements", PARTS, ids=str)
def test_the_runs_and_the_noise_of_every_rank_are_what_the_placements_give_it_of_one_process(shape, mesh, placements):
    key, step, n, seen = torch.tensor(11), torch.tensor(4), torch.Size(shape).numel(), set()
    assert runs_of(torch.zeros(shape)) == (((0, n),) if n else ()), "a plain tensor is one run"
    for coordinate in itertools.product(*map(range, mesh)):
        found = runs(shape, mesh, coordinate, placements)
        mine = (
            cut(torch.arange(n).reshape(shape), mesh, coordinate, placements).flatten().tolist()
        )  # torch's own cutting
        assert sorted(i for start, length in found for i in range(start, start + length)) == sorted(mine)
        assert all(length > 0 for _, length in found)
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(found)), "runs that touch are one"
        seen |= {*mine}
        for kind in ("gaussian", "uniform"):
            whole = draws.leaf(key, step, n, 8, torch.float64, kind)
            (drawn,) = draws.parts(key, step, [found], [8], torch.float64, kind=kind)
            assert torch.equal(drawn, whole[mine].reshape(-1))
    assert len(seen) == n


# gradients that are sums, and what needs whole parameters


@on(4)
def test_partial_gradients_are_summed_and_those_that_are_not_finite_on_one_rank_are_left_out_on_all():
    layout, tx, ones = layouts()["FSDP x TP"], bc.sgd(1.0), {k: torch.ones_like(x) for k, x in leaves(0).items()}
    params = distributed(leaves(0), *layout)
    sums = {k: DTensor.from_local(x, layout[0], [Partial()] * 2) for k, x in ones.items()}
    updates, _ = tx.update(sums, tx.init(params), params=params, inplace=False)
    assert all((x.to_local() == -4.0).all() for x in updates.values())
    ones["weight"][0, 0] = torch.nan
    skipping, grads = bc.skip_nonfinite(tx), distributed(ones, *layout)
    updates, _ = skipping.update(grads, skipping.init(params), params=params, inplace=False)
    assert all((x.to_local() == 0.0).all() for x in updates.values())


@on(2)
def test_what_needs_whole_parameters_refuses_dtensors_by_name_before_anything_moves():
    mesh, cold, model = mesh_of(2), bc.sgd(0.1), nn.Linear(4, 2)
    params, replicas = ({"w": distribute_tensor(torch.ones(4, 3), mesh, [way])} for way in (Shard(0), Replicate()))
    step, state = bc.make_step(lambda p, batch: (p["w"] ** 2).sum(), cold), cold.init(params)
    stacked, chains, plain = {"w": torch.stack([params["w"]] * 2)}, bc.parallel(step, 2), {"w": torch.ones(4, 3)}
    fully_shard(model, mesh=mesh)
    functional = lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean()  # noqa: E731
    one, fed = torch.tensor(1.0), lambda x: LAPLACE.update(params, LAPLACE.init(params), curvature=x, inplace=False)
    sharded, backward = dict(model.named_parameters()), "it by loss.backward() and an optimizer of bc.optim"
    refuses(
        {
            ("redistribute",): lambda: runs((4,), (2,), (0,), (Partial(),)),  # a sum has no elements of its own
            ("bc.curvature.diagonal_by_backward",): lambda: fed(bc.precision.Root(plain, one)),
            ("is not spread",): lambda: fed(bc.precision.Diagonal(plain, one)),
            # replicas are DTensors, too
            ("ValueError: chain: ", "['w'] is a DTensor"): lambda: bc.swag(rank=2).init(replicas),
            ("w are DTensors", "the mesh of the ranks that hold the same ones"): lambda: bc.distributed.broadcast(
                params, mesh
            ),
            ("params or state hold a DTensor",): lambda: bc.capture(step, params, state, None),
            ("params: ", "spread as (Shard(dim=0),)"): lambda: step(params, cold.init(replicas), None),
            ("is a plain tensor",): lambda: chains(stacked, chains.init(cold, stacked), None),
            ("updates: ", "is a plain tensor"): lambda: cold.update(plain, state, params=params),
            ("center: ", "is not spread"): lambda: bc.links.add_localization(plain, 0.1).init(params),
            ("loss: ", backward): lambda: bc.make_step(functional, cold)(sharded, cold.init(sharded), torch.ones(2, 4)),
            (backward,): lambda: bc.make_functional(model),
        }
    )
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer = bc.optim.SGHMC(model.parameters(), 0.1, temperature=0.1, generator=bc.distributed.generator(0))
    with pytest.warns(UserWarning, match=r"heat guard.*spread over ranks \(DTensors\)") as caught:
        for _ in range(9):
            optimizer.step()
    assert sum("heat guard" in str(w.message) for w in caught) == 1


# Gaussian posteriors

CATEGORICAL, LAPLACE = bc.likelihoods.categorical(), bc.laplace()


def labelled(n=8):
    g = torch.Generator().manual_seed(5)
    return torch.randn(n, 3, generator=g).double(), torch.randint(2, (n,), generator=g)


def partly_frozen():
    """As of a model with adapters: a leaf is not trained, and has no variance."""
    model = network(3, 4, 2)
    model[0].bias.requires_grad_(False)
    return model


def params_of(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@on(4)
@pytest.mark.slow
def test_diagonal_laplace_of_a_sharded_model_is_that_of_one_process_and_is_added_up_without_messages():
    """A draw is one draw in every layout; random signs estimate the diagonal.

    The relative variance of one probe is at most 2, that of 100 at most 0.02: 22 entries stay within 5 deviations but for
    1.3e-5 of all seeds; seeds are fixed. Without the factor for the average over ranks they would be a sixteenth.
    """
    (x, y), one, drawn, rank = labelled(), partly_frozen(), {}, world()[0]
    params = params_of(one)
    forward = lambda p, batch: torch.func.functional_call(one, p, (batch[0],))  # noqa: E731
    increment = bc.curvature.ggn(forward, CATEGORICAL, "diagonal")(params, (x, y))
    _, there = LAPLACE.update(params, LAPLACE.init(params), curvature=increment, inplace=False)
    want = LAPLACE.posterior(there, params, prior_precision=2.0)
    evidence = LAPLACE.log_evidence(there, params, -3.0, prior_precision=2.0)
    for way in ("fsdp", "tp"):
        # under FSDP ranks have data of their own
        mesh, mine = (None, slice(None)) if way == "tp" else (mesh_of(4), slice(2 * rank, 2 * rank + 2))
        under(way, model := partly_frozen())
        model(x[mine]).sum().backward()  # a gradient that stays
        before = [p.grad for p in model.parameters()]
        increment = bc.curvature.diagonal_by_backward(model, CATEGORICAL, mesh=mesh)((x[mine], y[mine]))
        assert all(p.grad is g for p, g in zip(model.parameters(), before))
        here = params_of(model)
        state = LAPLACE.init(here)  # compares the ranks
        with CommDebugMode() as messages:
            _, state = LAPLACE.update(here, state, curvature=increment, inplace=False)
        q = LAPLACE.posterior(state, here, prior_precision=2.0)
        close(whole(q.marginal_variance), want.marginal_variance, atol=1e-10)
        close(LAPLACE.log_evidence(state, here, -3.0, prior_precision=2.0), evidence, atol=1e-10)
        close(q.log_prob(here), want.log_prob(params), atol=1e-10)
        torch.manual_seed(7 + world()[0])  # the first rank's key is all ranks'
        draws = whole(q.sample((2,)))
        close(draws, drawn.setdefault("draws", draws), rtol=1e-12)
        assert all(len(x) == 2 and x.std() > 0.0 for x in draws.values())
        generator = torch.Generator().manual_seed(world()[0] if mesh else 0)
        estimate = bc.curvature.diagonal_by_backward(model, CATEGORICAL, probes=100, mesh=mesh, generator=generator)
        probed = estimate((x[mine], y[mine]))
        ratios = optree.tree_map(lambda a, b: (a / b - 1).abs().max(), whole(probed.values), whole(increment.values))
        assert 0.0 < max(optree.tree_leaves(ratios)) <= 5 * 0.02**0.5
        assert messages.get_total_counts() == 0 and increment.count == probed.count == 8


# Checkpoints by ``torch.distributed.checkpoint``: any number of ranks, any layout, and none of its silent losses


def gone_on(folder, before, after, steps, kind="shards", **options):
    """A launch: from a checkpoint or the start, some steps, the next checkpoint; the parameters, where they are no DTensors."""
    step, params, state, batch, numbers = KINDS[kind](**options)
    chains = {"chains": range(numbers[0], numbers[-1] + 1)} if numbers else {}
    told = bc.state_dict if kind == "shards" else tuple  # a state is a tree of tensors
    if before:
        params = {name: torch.zeros_like(x) for name, x in params.items()}
        bc.distributed.load(folder / before, {"params": params, "state": told(state)}, **chains)
    for _ in range(steps):
        params, state, _ = step(params, state, batch[0] if kind == "shards" else batch)
    if after:
        bc.distributed.save(folder / after, {"params": params, "state": told(state)}, **chains)
    return {name: x for name, x in params.items() if not isinstance(x, DTensor)}


FSDP, COLUMNS, HSDP, BOTH, TWICE = ({"layout": layout} for layout in LAYOUTS)
MOMENTS = {"tx": bc.adam(0.01, temperature=0.05)}
ROUTES = {  # the kind of a run, how far it may be off one process, and launches: ranks, steps, and what else is given
    "any layout to any other": (
        "shards", 1e-12, (2, 3, FSDP), (4, 2, COLUMNS), (4, 2, HSDP), (4, 2, BOTH), (4, 2, TWICE), (None, 3)
    ),
    "two moments": (
        "shards", 1e-12, (2, 3, FSDP | MOMENTS), (4, 2, COLUMNS | MOMENTS), (4, 2, BOTH | MOMENTS), (None, 3, MOMENTS)
    ),
    "chains by shards": ("chains_of_shards", 1e-12, (4, 3, {"shape": (2, 2)}), (3, 3, {"shape": (1, 3)}), (None, 3)),
    "chains on three ranks": ("chains", 0.0, (2, 1), (3, 1)),
    "chains in one process": ("chains", 0.0, (2, 1), (None, 1)),
    "replicas on three ranks": ("one", 1e-12, (2, 4), (3, 1)),
    "replicas in one process": ("one", 1e-12, (2, 4), (None, 1)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_a_chain_goes_on_in_any_layout_on_any_number_of_ranks(route, tmp_path):
    kind, rounding, *launches = ROUTES[route]
    for i, (size, steps, *options) in enumerate(launches):
        ranks = run(gone_on, size, tmp_path, str(i) if i else None, str(i + 1), steps, kind, **dict(*options))
    want = gone_on(
        tmp_path, None, None, sum(steps for _, steps, *_ in launches), kind, **(MOMENTS if "two" in route else {})
    )
    for found in [{k: torch.cat([part[k] for part in ranks]) for k in want}] if kind == "chains" else ranks:
        torch.testing.assert_close(found, want, rtol=0, atol=rounding)


@on(2)
def test_replicas_are_written_once_and_the_row_of_a_chain_alone(tmp_path):
    w, rank = torch.zeros(8, 10_000), world()[0]
    bc.distributed.save(tmp_path / "replicas", {"w": w})
    bc.distributed.save(tmp_path / "chains", {"w": w}, chains=range(8 * rank, 8 * rank + 8))
    for folder, times in (("replicas", 1), ("chains", 2)):
        written = sum(p.stat().st_size for p in (tmp_path / folder).glob("*.distcp"))
        assert times * w.nbytes <= written <= 1.2 * times * w.nbytes


@on(4)
def test_what_torch_keeps_of_one_rank_alone_files_of_one_rank_and_its_rate_are_refused_on_all_of_them(tmp_path):
    """Of ranks' tensors of one name torch keeps the first, for all of them."""
    rank = world()[0]
    params = {"w": torch.full((2,), float(rank)), "b": torch.zeros(1)}
    optimizer = bc.optim.SGD([nn.Parameter(params["w"])], 0.1)
    shards = {"w": distribute_tensor(torch.ones(4, 3), mesh_of(4), [Shard(0)])}
    half = torch.ones(2, 3) + (rank == 2)  # ranks 0 and 2 hold the same half
    replicas = DTensor.from_local(half, mesh_of(2, 2), [Replicate(), Shard(0)], run_check=False)
    save = lambda tree, **options: lambda: bc.distributed.save(tmp_path / "ours", tree, **options)  # noqa: E731
    refuses(
        {
            ("params/w differ from rank to rank", "chains=chains.numbers"): save({"params": params}),
            ("opt/param_groups/0/", " is int; only dense tensors", "bc.state_dict(state)"): save(
                {"opt": optimizer.state_dict()}
            ),
            ("tensor is SGD",): save(optimizer),
            ("spread as (Shard(dim=0),)",): save(shards, chains=range(4)),
            ("w (elements ((0, ",): save({"w": replicas}),
            # of two meshes some ranks alone see that they differ
            ("with other Scale.step_size of link 0 (0.1, 0.2)",): functools.partial(
                lambda p, tx, line: bc.make_step(lambda p, x: (p["w"] ** 2).sum() * x.mean(), tx, mesh=line)(
                    p, tx.init(p), torch.ones(3)
                ),
                {"w": distribute_tensor(torch.ones(4), mesh_of(2, 2)["second"], [Shard(0)])},
                bc.sgd(0.1 + 0.1 * (rank == 2)),
                mesh_of(2, 2)["first"],
            ),
            ("given other steps (10, 11)",): functools.partial(
                lambda p, tx, line: bc.sample(
                    bc.make_step(lambda p, x: (p["w"] ** 2).sum() * x.mean(), tx, mesh=line),
                    *(p, tx.init(p), torch.ones(3)),
                    steps=10 + (rank == 2),
                ),
                {"w": distribute_tensor(torch.ones(4), mesh_of(2, 2)["second"], [Shard(0)])},
                bc.sgd(0.1),
                mesh_of(2, 2)["first"],
            ),
            ("leaf w is a DTensor", "bc.distributed.save(folder, tree)"): lambda: bc.save(
                tmp_path / "w.safetensors", shards
            ),
        }
    )
    dist.barrier()
    assert not os.listdir(tmp_path)
    dist.barrier()
    (tmp_path / "ours").touch()
    refuses({("OSError: save: ", "ours cannot be written", "FileExistsError"): save(shards)})


def loaded(folder, **tensors):
    """What a load leaves in tensors that were 9 before, and its error or warnings."""
    tree = {name: torch.full_like(x, 9) for name, x in tensors.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said = message_of(bc.distributed.load, folder, tree)
    if said is None:
        return tree, " ".join(str(x.message) for x in caught)
    assert all(bool((x == 9).all()) for x in tree.values()), "a refusal leaves the tensors as they were"
    return None, said


def misfit(folder, tx=TX, **changed):
    """What a load into the parameters and the state of a chain says."""
    tensors = {f"state/{name}": x for name, x in bc.state_dict(tx.init(start(6))).items()}
    return loaded(folder / "a", **tensors, **{f"params/{name}": x for name, x in (start(6) | changed).items()})[1]


MISFITS = {  # what is said, and what is done with the checkpoint of a chain, or of six chains
    "fewer chains": ("no rank loads [4, 5]: run as many chains", lambda f: message_of(gone_on, f, "c", None, 1, "chains", n=4)),
    "more chains": ("chain 6/params/w is missing", lambda f: message_of(gone_on, f, "c", None, 1, "chains", n=7)),
    "another chain": ("state/0.Momentum.trace['b'] is not expected", lambda f: misfit(f, bc.sgld(0.1, temperature=0.05))),
    "two moments": ("is missing", lambda f: misfit(f, bc.adam(0.1, temperature=0.05))),
    "another shape": ("b is torch.float64 (6,), expected torch.float64 (4,)", lambda f: misfit(f, b=torch.ones(4).double())),
    "another dtype": ("params/b is torch.float64 (6,), expected torch.float32 (6,)", lambda f: misfit(f, b=torch.ones(6))),
    "a folder that is taken": ("holds a checkpoint already", lambda f: message_of(gone_on, f, None, "a", 3)),
    "no table": ("not written to its end", lambda f: message_of(gone_on, f, "b", None, 1)),
    "two of one name": (
        "two leaves are named a/b",
        lambda f: message_of(bc.distributed.save, f / "b", {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}),
    ),
    "no tree": ("tree is NoneType; only dense tensors", lambda f: message_of(bc.distributed.save, f / "b", None)),
    "sparse": (
        "w is torch.sparse_coo on cpu", lambda f: message_of(bc.distributed.save, f / "b", {"w": torch.eye(2).to_sparse()})
    ),
    "no numbers": ("on meta; only dense", lambda f: message_of(bc.distributed.save, f / "b", torch.ones(2, device="meta"))),
    "a number of chains": (
        "chains must be a range of numbers", lambda f: message_of(bc.distributed.save, f / "b", torch.ones(2), chains=2)
    ),
    "a path of a shell": ("with ~ written out", lambda f: message_of(bc.distributed.save, "~/b", torch.ones(2))),
    "one element in several places": (
        "b has one element in several places",
        lambda f: message_of(
            bc.distributed.load,
            f / "a",
            {"params": start(6) | {"b": torch.ones(1).double().expand(6)}, "state": bc.state_dict(TX.init(start(6)))},
        ),
    ),
    "no stack": (
        "w is of shape (3,); with chains= axis 0 of every tensor counts the 2 chains",
        lambda f: message_of(bc.distributed.save, f / "b", {"w": torch.ones(3)}, chains=range(2)),
    ),
}  # fmt: skip


def test_what_does_not_fit_a_checkpoint_is_refused_and_nothing_is_written(tmp_path):
    gone_on(tmp_path, None, "a", 2)
    gone_on(tmp_path, None, "c", 1, "chains", n=6)
    for case, (words, act) in MISFITS.items():
        assert words in act(tmp_path), case


# what was damaged, cut, or written by somebody else

TREE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(7.0),
    "none": torch.zeros(0, 2),
    "chain 1/w": torch.ones(1),
}
FILES = (".metadata", "__0_0.distcp", DIGESTS)


@pytest.fixture
def folder(tmp_path):
    bc.distributed.save(tmp_path / "step", TREE)
    return tmp_path / "step"


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_refused(file, folder):
    raw = (folder / file).read_bytes()
    for seed in range(25):
        where, changed = random.Random(seed), bytearray(raw)
        changed[where.randrange(len(raw))] ^= 1 << where.randrange(8)
        (folder / file).write_bytes(bytes(changed))
        tree, said = loaded(folder, **TREE)
        assert tree is None and "damaged" in said, (seed, said)


def table(change):
    """Change the table of contents."""

    def spoil(folder):
        change(about := pickle.loads((folder / ".metadata").read_bytes()))
        (folder / ".metadata").write_bytes(pickle.dumps(about))

    return spoil


def places(**changed):
    """Other places of all pieces."""
    return table(lambda about: [vars(x).update(changed) for x in about.storage_data.values()])


def shortened(file):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-1])


def raw(content, file=".metadata"):
    return lambda folder: (folder / file).write_bytes(content)


def instead(file, make):
    """Something else by the name of a file."""

    def spoil(folder):
        (folder / file).unlink()
        make(folder / file)

    return spoil


HARM = "damaged, or was made to do harm"
CRAFTED = {  # with right digests, as somebody would who knows the format: what is done, and what is said
    "an attribute of a class": (raw(b"\x80\x04cpathlib\nPosixPath\n(N}\x8c\x04openNst\x86b."), HARM),
    "a memo of two thousand million entries": (raw(b"\x80\x04r\xff\xff\xff\x7f."), HARM),
    "bytes beyond all memory": (raw(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."), HARM),
    "tuples in tuples": (raw(b"\x80\x04" + b"(" * 100_000 + b"t" * 100_000 + b"."), HARM),
    "a command": (raw(b"\x80\x04cos\nsystem\n(\x8c\x04truetR."), HARM),
    "no table": (raw(b""), HARM),
    "an unfinished table": (raw(b"\x80\x04"), HARM),
    "a plan that is a command": (table(lambda about: setattr(about, "planner_data", os.system)), "posix.system"),
    "bytes that would be unpickled": (
        table(lambda about: about.state_dict_metadata.update(x=BytesStorageMetadata())),
        "would be unpickled",
    ),
    "a file elsewhere": (places(relative_path="../step/__0_0.distcp"), "which is no file of pieces"),
    "a file of the machine": (places(relative_path="/etc/passwd"), "which is no file of pieces"),
}
OURS = {
    "files of a save on more ranks that was cut off": (raw(b"x", "__7_0.distcp"), None),
    **{f"{file}, cut": (shortened(file), "damaged") for file in FILES},
    **{f"{file}, empty": (raw(b"", file), "damaged") for file in FILES},
    **{f"{file}, a pipe": (instead(file, os.mkfifo), "step") for file in FILES},
    **{f"{file}, endless": (instead(file, lambda path: path.symlink_to("/dev/zero")), "step") for file in FILES},
    **{f"{file}, a folder": (instead(file, os.mkdir), "step") for file in FILES},
    **{f"{file}, gone": (lambda folder, file=file: (folder / file).unlink(), "step") for file in FILES},
}


@pytest.mark.parametrize("case", [*CRAFTED, *OURS])
def test_a_checkpoint_that_was_damaged_or_crafted_is_refused(case, folder):
    spoil, words = (CRAFTED | OURS)[case]
    spoil(folder)
    if case in CRAFTED:
        sums = [f"{hashlib.sha256((folder / file).read_bytes()).hexdigest()}  {file}\n" for file in FILES[:2]]
        (folder / DIGESTS).write_text("".join(sums))
    tree, said = loaded(folder, **TREE)
    assert all(map(torch.equal, tree.values(), TREE.values())) if words is None else tree is None and words in said


def test_without_digests_nothing_is_read(folder):
    (folder / DIGESTS).unlink()
    assert "has no digests" in loaded(folder, **TREE)[1]
