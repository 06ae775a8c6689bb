"""Runs on disk that several ranks share go on, on any number of ranks, as if nothing had happened."""

import fcntl
import itertools
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import bayesopt_chain as bc
from bayesopt_chain.distributed.ranks import answers, gather_objects
from bayesopt_chain.runs import files
from bayesopt_chain.runs.store import Store
from tests.distributed.ranks import mesh_of, message_of, on, refuses, run, whole, world
from tests.distributed.toys import (
    CTRL_C,
    KINDS,
    ROUNDING,
    STEPS,
    TX,
    N,
    data,
    elementwise,
    interrupt,
    loss,
    must_be,
    sampled,
    spread,
    start,
    under,
)
from tests.runs.test_callbacks import Sums

SQUARE, FIXED, EPOCHS, NOW = {"shape": (2, 2)}, {"order": "fixed"}, {"order": True}, {"seconds": 0.0}
COLUMNS, UNTIDY = {"layout": "columns"}, {"untidy": True}
OWN = {"order": "own", "inplace": True, "thinning": 2, "total": 31}  # parts of 16 and 15 data, of two batches and one
SPLIT = {"total": 12}
ADAM, VI = bc.adam(0.01, temperature=0.001), bc.vi.mean_field(bc.sgd(0.01), temperature=0.01)
ROWS = {"batch_dim": (1, None)}
CHUNKS = {"n": 8, "loop": False, "chunk": 2}
TWICE, WATCHED = {"layout": "twice"}, {"monitor": True, "check_finite": True}
CLIPPED = {**WATCHED, "clip": 0.1}  # below the norm of every step's gradient
START = {"burn_in": 0}

DROPOUT = "a module with dropout, buffers and batches of two ranks"
# The kind of a run, and its launches: ranks (None: this process), the step at which it or each rank stops, what else is given.
LAUNCHES = {
    "chains in memory, one after the other": ("chains", (4, STEPS)),
    "chains in memory, in chunks": ("chains", (2, STEPS, CHUNKS)),
    "chains in memory, in one chunk": ("chains", (4, STEPS, CHUNKS)),
    "chains in memory, all at once": ("chains", (2, STEPS, {"loop": False})),
    "chains in memory, as many on no two ranks": ("chains", (3, STEPS, {"n": 8})),
    "chains in memory, at temperatures of their own": (
        "chains", (2, STEPS, {"tx": partial(bc.sghmc, 0.1), "each": {"temperature": torch.linspace(0.0, 0.7, N)}})
    ),
    "chains in memory, without a seed": ("chains", (2, STEPS, {"key": None})),
    "data in memory, in place": ("one", (2, STEPS, SPLIT | {"sizes": (6, 6), "inplace": True})),
    "data in memory, uneven": ("one", (2, STEPS, SPLIT | {"sizes": (5, 7)})),
    "data in memory, none on one rank": ("one", (4, STEPS, SPLIT | {"sizes": (3, 3, 6, 0)})),
    "data in memory, two moments": ("one", (2, STEPS, SPLIT | {"sizes": (4, 8), "tx": ADAM})),
    "data in memory, skipping": ("one", (2, STEPS, SPLIT | {"sizes": (6, 6), "tx": bc.skip_nonfinite(TX)})),
    "data in memory, variational": ("one", (2, STEPS, SPLIT | {"sizes": (3, 9), "tx": VI})),
    "chains that send no message": ("chains", (2, STEPS, {"quiet": True})),
    "one process goes on with chains of ranks": ("chains", (2, 9), (None, STEPS)),
    "chains from four ranks to two to one and to four": ("chains", (4, 6), (2, 9), (1, 11), (4, STEPS)),
    "chains of three ranks that are behind": ("chains", (3, [5, 9, 7]), (2, STEPS)),
    "chains of which some are far behind": ("chains", (2, [12, 5]), (1, STEPS)),
    "chains that are behind, on more ranks": ("chains", (2, [6, 11]), (3, STEPS)),
    "chains of which some are complete": ("chains", (2, [STEPS, 8]), (1, STEPS)),
    "chains with the batches of their step": ("chains", (2, [7, 5], EPOCHS), (None, STEPS, EPOCHS)),
    "chains with rows of their own": ("chains", (2, [6, 9], ROWS), (None, STEPS, ROWS)),
    "data split otherwise": ("one", (2, 7), (1, STEPS)),
    "data split over more ranks": ("one", (1, 7), (3, STEPS)),
    "batches that ranks share": ("one", (4, 8, {"order": "shared"}), (2, STEPS, {"order": "shared"})),
    "the place in the epochs": ("one", (2, 6, FIXED), (3, 9, FIXED), (None, STEPS, FIXED)),
    "chains by data": (
        "chains", (4, [5, 5, 6, 6], SQUARE), (None, 8), (4, [12, 12, 10, 10], SQUARE), (3, STEPS, {"shape": (1, 3)})
    ),
    "shards in one piece, each draw committed": ("shards", (2, STEPS, {"seconds": 0.0}),),
    "shards in one piece, in place": ("shards", (2, STEPS, {"seconds": 0.0, "inplace": True}),),
    "shards on one rank": ("shards", (2, 7), (1, 10, {**COLUMNS, "inplace": True}), (2, STEPS, COLUMNS)),
    "shards as replicas": ("shards", (3, 6, COLUMNS), (4, 11, {"layout": "hsdp"}), (2, STEPS)),
    "shards of two axes": ("shards", (3, 6, COLUMNS), (4, 11, {"layout": "both"}), (2, STEPS)),
    "shards of one axis twice": ("shards", (4, 6, TWICE), (2, 9, COLUMNS), (4, STEPS, TWICE)),
    "shards in memory, clipped by the norm of all ranks": ("shards", (2, STEPS, CLIPPED)),
    "shards in memory, clipped, in place": ("shards", (4, STEPS, CLIPPED | TWICE | {"inplace": True})),
    "shards in memory, skipping": ("shards", (4, STEPS, WATCHED | {"tx": bc.skip_nonfinite(TX), "layout": "both"})),
    "shards and the place in the batches": ("shards", (2, 5, EPOCHS), (1, STEPS, EPOCHS)),
    "chains by shards": ("chains_of_shards", (4, 6, SQUARE), (2, STEPS, {"shape": (1, 2)})),
    "a module": ("module", (2, 5), (1, 6), (2, STEPS)),
    DROPOUT: ("module", (2, 5, UNTIDY), (2, STEPS, UNTIDY)),
    # (victim, evaluation of its loss): that rank is killed there
    "one chain whose first rank is killed": ("one", (2, (0, 5), NOW), (2, STEPS)),
    "one chain whose second rank is killed": ("one", (2, (1, 10), NOW), (2, STEPS)),
    "chains whose second rank is killed": ("chains", (4, (1, 15), NOW), (2, STEPS)),
    "shards whose first rank is killed": ("shards", (2, (0, 10), NOW), (2, STEPS)),
    "shards whose second rank is killed": ("shards", (2, (1, 10), NOW), (2, STEPS)),
    "shards whose second rank is interrupted within a step": ("shards", (2, (1, 10, interrupt), NOW), (2, STEPS)),
    # (rank, evaluation, Ctrl-C)
    "shards interrupted on the first rank": ("shards", (2, (0, 6, CTRL_C), START | NOW), (3, STEPS, START), (1, STEPS, START)),
    "shards interrupted on the second rank": ("shards", (2, (1, 6, CTRL_C), START | NOW), (3, STEPS, START)),
    "chains interrupted while they catch up": ("chains", (2, [12, 5], START), (None, (0, 9, CTRL_C), START), (1, STEPS, START)),
    # beyond the limit of stability
    "shards that explode": ("shards", (2, 200, START | {"tx": bc.sgld(2.1, temperature=1e-3)})),
}  # fmt: skip
OF_RANKS = {"shape", "layout", "inplace", "seconds", "sizes", "quiet"}  # what is not of the run in one process
ROUNDED = {"chains by data": 1e-12, "chains in memory, all at once": 1e-12, DROPOUT: 0.0}  # of sums, matrix products
REFERENCE = {DROPOUT: 2, "chains in memory, without a seed": 1}  # ranks that draw dropout, or a key, as these do


@pytest.mark.sweep(8)
@pytest.mark.filterwarnings("ignore:epochs", "ignore:sample")
@pytest.mark.parametrize("case", LAUNCHES)
def test_a_run_goes_on_on_any_number_of_ranks_as_that_of_one_process(case, tmp_path):
    (kind, *launches), path = LAUNCHES[case], None if "in memory" in case else tmp_path / "draws"
    _, steps, *options = launches[-1]
    alone = {name: x for name, x in dict(*options).items() if name not in OF_RANKS}
    want, *_ = run(sampled, REFERENCE.get(case), kind, None, steps, **alone)
    rounding = ROUNDED.get(case, ROUNDING.get(kind, 1e-12 if "monitor" in alone else 0.0))
    for size, steps, *options in launches:
        launch = partial(run, sampled, size, kind, path, **dict(*options))
        if not isinstance(steps, tuple):
            parts = launch(steps)
        elif CTRL_C in steps:
            parts, kept = launch(ends=steps), bc.Draws.open(path)
            made = len(kept)
            assert all(len(part.steps) == made and part.why == f"interrupted after step {made}" for part in parts)
            assert all(torch.equal(kept.params[name], x[:made]) for name, x in want.params.items())
        else:
            with pytest.raises(BaseExceptionGroup):
                launch(ends=steps)
            # the first rank, which commits, may not have come to its last step
            head = path / ("chains-00002-00003" if kind == "chains" else "") / "head.safetensors"
            assert steps[1] - files.File(head).metadata["step"] * (1 + (kind == "chains")) in (1, 1 + steps[0])
    for part in parts:
        must_be(part, want, rounding)
        assert part.spread == (
            size is not None and case != DROPOUT and kind in ("shards", "chains_of_shards", "module")
        )
        assert part.why == want.why and part.complete == (steps == STEPS)
        assert part.numbers or all(torch.equal(x, parts[0].params[n]) for n, x in part.params.items()), "replicas"
    if path is not None:
        opened, folders = bc.Draws.open(path), sorted(p.name for p in path.iterdir())
        assert opened.complete == want.complete and torch.equal(opened.steps, want.steps)
        torch.testing.assert_close(dict(opened.params), want.params, rtol=0, atol=rounding)
        if want.numbers:
            assert opened.chains == len(want.numbers) and {i for part in parts for i in part.numbers} == {*want.numbers}
            assert size is None or [name for name in folders if name.startswith("chains-")] == [
                f"chains-{i:05d}-{i + 1:05d}" for i in want.numbers
            ]
        if "committed" in case:
            assert [files.File(p).metadata["step"] for p in sorted(path.glob("draws-*"))] == list(range(5, STEPS + 1))
        if len(launches) in (1, 4):  # a complete run returns at once, from where it lies
            for part in run(sampled, size, kind, path, steps, **dict(*options)):
                must_be(part, want, rounding)
            assert sorted(p.name for p in path.iterdir()) == folders


# What is begun (kind, ranks, steps, options), with what it is to go on (ranks, steps, options), and what is said on each rank.
REFUSED = {
    "a run of one process": (
        ("chains", None, 8), (3, STEPS), "run of one process, and 3 run now in another layout: go on as it began"
    ),
    "other batches": (("chains", 2, 7, EPOCHS), (None, STEPS, {**EPOCHS, "seed": 4}), "seed is 3, here 4"),
    "another number of chains": (("chains", 2, 9), (None, STEPS, {"n": 5}), "6 chains by 2 ranks, and 5 are to be run now"),
    "another thinning": (("chains", 2, 9), (None, STEPS, {"thinning": 2}), "thinning is 1, here 2"),
    "fewer steps": (("chains", 2, 9), (None, 8), "has made 9 steps already"),
    "fewer steps of one chain": (("one", 2, STEPS, OWN), (2, 7, OWN), "has made 14 steps already"),
    "other data": (
        ("one", 2, 6, FIXED), (None, 9, {**FIXED, "total": 30}), "the batches of 2 ranks were together of data=24 (here 30)"
    ),
    "another thinning of shards": (("shards", 2, 9), (2, STEPS, {"thinning": 2}), "thinning is 1, here 2"),
    "fewer steps of shards": (("shards", 2, 9), (2, 6), "has made 9 steps already"),
    "other batches of shards": (("shards", 2, 6, EPOCHS), (2, 9, {**EPOCHS, "seed": 4}), "data.seed is 3, here 4"),
    "plain tensors": (("shards", 2, 9), (None, STEPS), "a run of DTensors, and plain tensors are given"),
    # files that are removed
    "no head": (("shards", 2, 6), (2, STEPS), "holds draws but no head.safetensors", "head.safetensors"),
    "no draws": (
        ("shards", 2, 9), (2, STEPS), "lacks the draws after steps 1 to 9: restore draws-0000000000000000",
        "draws-0000000000000000.safetensors",
    ),
}  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:epochs")
@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused_on_every_rank_and_nothing_is_written(case, tmp_path):
    (kind, size, steps, *options), (ranks, then, *other), words, *removed = REFUSED[case]
    path = tmp_path / "draws"
    run(sampled, size, kind, path, steps, **dict(*options))
    for name in removed:
        (path / name).unlink()
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")}
    assert all(words in said for said in run(message_of, ranks, sampled, kind, path, then, **dict(*other)))
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")} == before


def test_a_part_that_is_missing_or_that_is_still_written_is_named_and_run_from_its_start(tmp_path):
    path = tmp_path / "draws"
    run(sampled, 2, "chains", path, 9)
    with open(path / "chains-00003-00004" / "lock", "a") as file:  # as a rank of the earlier launch has it
        fcntl.flock(file, fcntl.LOCK_EX)
        assert re.search(
            "RuntimeError.* another process is writing to .*chains-00003-00004", message_of(sampled, "chains", path)
        )
    for file in path.glob("chains-0000[345]*/*"):
        file.unlink()
    assert f"no draws of chain 3 of {N}" in message_of(bc.Draws.open, path)
    must_be(sampled("chains", path), sampled("chains"))


# ranks without a mesh


ZEROS = {"w": torch.zeros(3).double(), "b": torch.zeros(()).double()}


def on_its_own(path):
    torch.manual_seed(world()[0])
    params = {name: x.clone() for name, x in ZEROS.items()}
    state, file = TX.init(params), path.with_suffix(".safetensors")
    bc.save(file, (params, state), tx=TX)
    loaded = bc.load(file, like=(params, state), tx=TX)
    draws = bc.sample(bc.make_step(loss, TX), params, state, data(), steps=20, path=path)
    return draws.params["w"], state[1].key, loaded[1][1].key


missing = partial(message_of, bc.load, like=ZEROS)


def test_ranks_without_a_mesh_are_chains_of_their_own_on_the_disk(tmp_path):
    path = tmp_path / "draws"
    ranks, opened = run(on_its_own, 2, path), bc.Draws.open(path)
    assert opened.chains == 2 and ranks[0][1] != ranks[1][1]
    for i, (w, key, loaded) in enumerate(ranks):
        assert torch.equal(opened.params["w"][:, i], w) and key == loaded
    files = sorted(tmp_path.glob("draws.rank*.safetensors"))
    assert [file.name for file in files] == [f"draws.rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    whole = path.with_suffix(".safetensors")
    assert "another number of ranks than the 1 that load it" in missing(whole)
    bc.save(whole, ZEROS)
    assert all("remove what is older" in said for said in (missing(whole), *run(missing, 2, whole)))
    whole.unlink()
    files[1].rename(tmp_path / "second.safetensors")
    assert "no file" in (said := run(missing, 2, whole)[1]) and said.endswith("00001-of-00002.safetensors")
    files[0].unlink()
    assert bc.load(tmp_path / "second.safetensors", like=(ZEROS, TX.init(ZEROS)), tx=TX)[1][1].key == ranks[1][1]
    (said,) = run(message_of, 1, on_its_own, path)
    assert "a run of 2 ranks, and 1 run now" in said and "bc.parallel(step, n, mesh=mesh)" in said


# shards


@on(2)
@pytest.mark.slow
def test_draws_are_opened_in_any_layout_and_by_one_rank_alone(tmp_path):
    want, columns = sampled("shards", tmp_path).params, spread(start(6), "columns")
    draws = bc.Draws.open(tmp_path, like=columns)
    assert world()[0] or torch.equal(bc.Draws.open(tmp_path).params["w"], want["w"]), "one rank may read alone"
    assert draws.params["w"].placements == tuple(Shard(p.dim + 1) for p in columns["w"].placements)
    third, every = whole([draws[3], dict(draws.params)])
    assert all(torch.equal(every[k], x) and torch.equal(third[k], x[3]) for k, x in want.items())


OTHER = {"steps": 15, "burn_in": 5, "thinning": 2, "seed": 1, "keep": False, "path": None}


@on(4)
@pytest.mark.parametrize("kind", [("one", {}), ("shards", {"layout": "both"})])
def test_ranks_that_share_a_chain_and_are_given_other_numbers_are_refused_by_name(kind, tmp_path):
    name, options = kind
    for (other, x), path in [*itertools.product(OTHER.items(), (tmp_path / "draws", None))][
        :-1
    ]:  # the last one is alike
        given = {"steps": STEPS, "path": path} | ({other: x} if world()[0] == 2 else {})
        assert re.search(
            f"were given other {other}( [(][0-9, ]+[)])?;", message_of(bc.sample, *KINDS[name](**options)[:4], **given)
        )
    _, *given = KINDS[name](**options)[:4]
    step, *_ = KINDS[name](tx=bc.sghmc(0.1 + 0.1 * (world()[0] == 2), temperature=0.05), **options)
    assert "were given other chains, rates, temperatures" in message_of(bc.sample, step, *given, steps=STEPS)
    assert not (tmp_path / "draws").exists()


@on(2)
def test_chains_of_ranks_that_begin_together_at_other_temperatures_are_refused_on_one_of_them(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        restore = Store.restore
        patch.setattr(Store, "restore", lambda store: (dist.barrier(), restore(store))[1])
        said = message_of(sampled, "chains", tmp_path, tx=bc.sghmc(0.1, temperature=0.1 + world()[0]))
    assert any("LangevinNoise.temperature is" in (said or "") for said in gather_objects(said, None))


class Total(Sums):
    """Adds up what it looks at."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __call__(self, it):
        self.total = self.total + self.look(it.params["w"].detach())


def watched(who, path):
    """A checkpoint would not hold what a callback of one rank saw, or hand it to ranks that did not."""
    return sampled("one", path, callbacks=[Total(torch.sum)] * (world()[0] == who))


OTHERS = {  # what is given otherwise, and what each rank calls
    "path": lambda rank, path: sampled("shards", path / f"rank-{rank}"),
    "callbacks with a state": lambda rank, path: watched(0, path),
    "callbacks with a state; on the second": lambda rank, path: watched(1, path),
    "every": lambda rank, path: bc.collect(under("fsdp"), every=2 + rank)(),
    "after": lambda rank, path: bc.collect(under("fsdp"), every=2, after=2 + rank)(),
}


@on(2)
@pytest.mark.parametrize("case", OTHERS)
def test_ranks_that_share_a_chain_and_are_given_other_paths_callbacks_or_counts_are_refused_by_name(case, tmp_path):
    said = message_of(OTHERS[case], world()[0], tmp_path)
    assert re.search(f"were given other {case.partition(';')[0]}( [(][0-9, ]+[)])?;", said) and not [
        *tmp_path.iterdir()
    ]


@pytest.mark.slow
@on(2)
def test_what_callbacks_have_seen_of_whole_leaves_goes_on_and_of_a_rank_s_part_is_refused(tmp_path):
    begins = lambda look: lambda: sampled("shards", tmp_path / "refused", callbacks=[Total(look)])  # noqa: E731
    refuses(
        {
            ("the states of callbacks (Total: ",): begins(lambda x: x.to_local().clone()),
            ("DTensor cannot be saved", "x.full_tensor()"): begins(lambda x: x.clone()),
        }
    )
    _, resumed, unbroken = every = [Total(DTensor.full_tensor) for _ in range(3)]
    for steps, path, total in zip((9, STEPS, STEPS), (tmp_path / "draws", tmp_path / "draws", None), every):
        sampled("shards", path, steps, callbacks=[total])
    assert torch.equal(resumed.total, unbroken.total)


@pytest.mark.filterwarnings("ignore:sample", "ignore:iterate")
@on(2)
@pytest.mark.parametrize("extra", [1e9, float("inf")])
@pytest.mark.parametrize("way", ["sample", "iterate"])
def test_a_loss_that_leaves_its_bounds_on_one_replica_ends_the_run_on_all_after_the_same_draw(way, extra):
    """Each rank under DistributedDataParallel has the loss of its own data: a run that one of them ends alone hangs."""
    calls, model = itertools.count(1), under("ddp")
    bad = lambda model, x: model(x).square().mean() + (extra if world()[0] and next(calls) > 10 else 0.0)  # noqa: E731
    noise = {"temperature": 1e-6, "generator": bc.distributed.generator(0)}
    step = bc.optim.as_step(model, bc.optim.SGHMC(model.parameters(), lr=1e-3, **noise), bad)
    draws = getattr(bc, way)(step, step.params, step.state, torch.ones(4, 5).double() + world()[0], steps=30)
    kept = len(draws if way == "sample" else [*draws])
    assert {*gather_objects(kept, None)} == {10 if extra == float("inf") else 12}


@on(2)
def test_a_directory_that_only_the_first_rank_sees_is_refused_before_the_first_step(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        if world()[0]:
            patch.setattr("bayesopt_chain.runs.store.head_of", lambda path: None)
        said = message_of(sampled, "one", tmp_path, callbacks=[error])
    assert "all ranks have to see the directory of the run" in said


@pytest.mark.filterwarnings("ignore:sample")
@on(2)
@pytest.mark.parametrize("of", ["loss", "gradient"])
def test_a_loss_or_parameters_that_are_not_finite_on_one_rank_end_the_run_on_all(of):
    def bad(params, x):
        nan = float("nan") if world()[0] and x == 2.0 else 1.0
        if of == "gradient":
            params["w"].register_hook(lambda g: g * nan)
        return elementwise(params, x) * (nan if of == "loss" else 1.0)

    with pytest.warns(UserWarning, match="diverged"):
        part = sampled("shards", None, burn_in=0, fn=bad)
    assert not part.complete and len(part.steps) == 2


def error():
    raise ZeroDivisionError


@on(4)
def test_a_rank_of_one_row_of_a_mesh_that_fails_is_named_by_its_number_among_all():
    rank, row = world()[0], mesh_of(2, 2)["second"]
    said = message_of(answers, row, lambda: rank == 3 and int("x"))
    assert (said is None) == (rank < 2) and (rank != 2 or "rank 3 failed: ValueError: invalid literal" in said)


def cut_off(path):
    """A run that ends in an error in a step of all ranks."""
    rank = world()[0]
    sampled("shards", path, 4, 0)
    with pytest.raises(ZeroDivisionError) as caught:
        sampled("shards", path, STEPS, 0, ends=(rank, 5, error))  # in step 9
    made = len(caught.value.draws)
    assert made == 8 if rank == 0 else 4 <= made <= 8
    assert "on disk" in " ".join(caught.value.__notes__)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
def test_what_ranks_drew_before_an_error_is_on_disk_and_they_go_on(tmp_path):
    path, want = tmp_path / "draws", sampled("shards", burn_in=0)
    run(cut_off, 2, path)
    kept = bc.Draws.open(path)
    kept.verify()
    assert not kept.complete and kept.steps.tolist() == list(range(1, 9))
    assert all(torch.equal(kept.params[name], x[:8]) for name, x in want.params.items())
    for size in (3, 1):
        for part in run(sampled, size, "shards", path, burn_in=0):
            must_be(part, want)


def ended(kind, path, where, ends):
    """What a run comes to whose callback is asked after step 6 on one rank, which alone has callbacks."""
    callbacks = [lambda it: it.step == 6 and ends()] if world()[0] == where else []
    return sampled(kind, path, callbacks=callbacks, **NOW)


@pytest.mark.filterwarnings("ignore:sample")
@on(2)
@pytest.mark.parametrize("kind", ["one", "shards", "module"])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_callback_that_ends_a_run_on_one_rank_ends_it_on_all(kind, on_disk, where, tmp_path):
    """On disk it goes on. What a callback raises is raised on all of them, but for a second Ctrl-C."""
    ways, want = (
        [(lambda: True, "a callback ended it"), (CTRL_C, "interrupted"), (interrupt, "interrupted")],
        sampled(kind),
    )
    for ends, why in ways:
        path = tmp_path / why / ends.__class__.__name__ if on_disk else None
        part = ended(kind, path, where, ends)
        assert part.steps.tolist() == [5, 6] and part.why == f"{why} after step 6"
        if on_disk:
            must_be(sampled(kind, path), want)
    path = tmp_path / "raised" if on_disk else None
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        ended(kind, path, where, error)
    if world()[0] != where:
        assert str(caught.value) == f"rank {where} failed: ZeroDivisionError: "
    assert world()[0] or caught.value.draws.steps.tolist() == [5, 6]
