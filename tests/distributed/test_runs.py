"""Runs on disk that several ranks share go on, on any number of ranks, as if nothing had happened."""

import fcntl
import os
import signal
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode

import bayesopt_chain as bc
from bayesopt_chain.runs import files
from tests.distributed import toys
from tests.distributed.ranks import killed, message_of, on, run, whole, world
from tests.distributed.toys import (
    ROUNDING,
    STEPS,
    TX,
    N,
    data,
    dies,
    elementwise,
    loss,
    matrices,
    must_be,
    sampled,
    spread,
)

SQUARE, FIXED, EPOCHS, NOW = {"shape": (2, 2)}, {"order": "fixed"}, {"order": True}, {"seconds": 0.0}
COLUMNS, UNTIDY = {"layout": "columns"}, {"untidy": True}
OWN = {"order": "own", "inplace": True, "thinning": 2, "total": 31}  # parts of 16 and 15 data, of two batches and one

# The kind of a run, and its launches: ranks (None: this process), the step at which it or each rank stops, what else is given.
LAUNCHES = {
    "one process goes on with chains of ranks": ("chains", (2, 9), (None, STEPS)),
    "chains from four ranks to two to one and to four": ("chains", (4, 6), (2, 9), (1, 11), (4, STEPS)),
    "chains of three ranks that are behind": ("chains", (3, [5, 9, 7]), (2, STEPS)),
    "chains of which some are far behind": ("chains", (2, [12, 5]), (1, STEPS)),
    "chains that are behind, on more ranks": ("chains", (2, [6, 11]), (3, STEPS)),
    "chains of which some are complete": ("chains", (2, [STEPS, 8]), (1, STEPS)),
    "chains with the batches of their step": ("chains", (2, [7, 5], EPOCHS), (None, STEPS, EPOCHS)),
    "chains with rows of their own": ("rows", (2, [6, 9]), (None, STEPS)),
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
    "shards and the place in the batches": ("shards", (2, 5, EPOCHS), (1, STEPS, EPOCHS)),
    "chains by shards": ("chains_of_shards", (4, 6, SQUARE), (2, STEPS, {"shape": (1, 2)})),
    "a module": ("module", (2, 5), (1, 6), (2, STEPS)),
    "a module with dropout, buffers and batches of two ranks": ("module", (2, 5, UNTIDY), (2, STEPS, UNTIDY)),
    # (victim, evaluation of its loss): that rank is killed there
    "one chain whose first rank is killed": ("one", (2, (0, 5), NOW), (2, STEPS)),
    "one chain whose second rank is killed": ("one", (2, (1, 10), NOW), (2, STEPS)),
    "shards whose first rank is killed": ("shards", (2, (0, 10), NOW), (2, STEPS)),
    "shards whose second rank is killed": ("shards", (2, (1, 10), NOW), (2, STEPS)),
}  # fmt: skip


@pytest.mark.sweep(4)
@pytest.mark.filterwarnings("ignore:epochs")
@pytest.mark.parametrize("case", LAUNCHES)
def test_a_run_goes_on_on_any_number_of_ranks_as_that_of_one_process(case, tmp_path):
    (kind, *launches), path = LAUNCHES[case], tmp_path / "draws"
    for size, steps, *options in launches:
        if isinstance(steps, tuple):
            assert killed(toys.fatal, size, steps[0], kind, path, STEPS, *steps, **dict(*options))
            # the first rank, which commits, may not have come to its last step
            assert steps[1] - files.File(path / "head.safetensors").metadata["step"] in (1, 1 + steps[0])
        else:
            parts = run(sampled, size, kind, path, steps, **dict(*options))
    untidy = UNTIDY in options
    alone = {"order": options[0]["order"]} if options and "order" in options[0] else {}
    (want, *_) = run(sampled, 2, kind, **UNTIDY) if untidy else [sampled(kind, **alone)]
    rounding = 0.0 if untidy else ROUNDING.get(kind, 1e-12 if case == "chains by data" else 0.0)
    for part in parts:
        must_be(part, want, rounding)
        assert part.spread == (size is not None and not untidy and kind in ("shards", "chains_of_shards", "module"))
    opened, folders = bc.Draws.open(path), sorted(p.name for p in path.iterdir())
    assert opened.complete and torch.equal(opened.steps, want.steps)
    torch.testing.assert_close(dict(opened.params), want.params, rtol=0, atol=rounding)
    if want.numbers:
        assert opened.chains == len(want.numbers) and {i for part in parts for i in part.numbers} == {*want.numbers}
        assert size is None or [name for name in folders if name.startswith("chains-")] == [
            f"chains-{i:05d}-{i + 1:05d}" for i in want.numbers
        ]
    if "committed" in case:
        assert [files.File(p).metadata["step"] for p in sorted(path.glob("draws-*"))] == list(range(5, STEPS + 1))
    if len(launches) in (1, 4):  # a complete run returns at once, from where it lies
        for part in run(sampled, size, kind, path, STEPS, **dict(*options)):
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
}  # fmt: skip


def refusal(*args, **options):
    return message_of(lambda: sampled(*args, **options))


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:epochs")
@pytest.mark.parametrize("case", REFUSED)
def test_another_run_is_refused_on_every_rank_and_nothing_is_written(case, tmp_path):
    (kind, size, steps, *options), (ranks, then, *other), words = REFUSED[case]
    path = tmp_path / "draws"
    run(sampled, size, kind, path, steps, **dict(*options))
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")}
    assert all(words in said for said in run(refusal, ranks, kind, path, then, **dict(*other)))
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*.safetensors")} == before


def test_a_part_that_is_missing_or_that_is_still_written_is_named_and_run_from_its_start(tmp_path):
    path = tmp_path / "draws"
    run(sampled, 2, "chains", path, 9)
    with open(path / "chains-00003-00004" / "lock", "a") as file:  # as a rank of the earlier launch has it
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"another process is writing to .*chains-00003-00004"):
            sampled("chains", path)
    for file in path.glob("chains-0000[345]*/*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=f"no draws of chain 3 of {N}"):
        bc.Draws.open(path)
    must_be(sampled("chains", path), sampled("chains"))


@on(2)
@pytest.mark.slow
def test_no_draw_yet_is_no_draw_to_lose_and_chains_send_no_message(tmp_path):
    path = tmp_path / "draws"
    with CommDebugMode() as counted:
        assert sampled("chains", path, callbacks=[lambda it: it.step == 2], seconds=0.0) is None
    dist.barrier()
    assert len(bc.Draws.open(path)) == 0 and counted.get_total_counts() == 0
    dist.barrier()
    must_be(sampled("chains", path)._replace(numbers=None), sampled("chains"))


@pytest.mark.slow
def test_ctrl_c_while_chains_catch_up_keeps_what_there_is(tmp_path):
    path = tmp_path / "draws"
    run(sampled, 2, "chains", path, [12, 5], 0)
    ends = dies(loss, 0, 9, signal.SIGINT)  # within the third step of three chains
    part = sampled("chains", path, STEPS, 0, fn=ends)
    assert not part.complete and part.why == "interrupted after step 8"
    assert torch.equal(part.params["w"], sampled("chains", None, 8, 0).params["w"])
    must_be(sampled("chains", path, STEPS, 0), sampled("chains", None, STEPS, 0))


# ranks without a mesh


def on_its_own(path, seed=None):
    torch.manual_seed(world()[0] if seed is None else seed)
    params = {"w": torch.zeros(3).double(), "b": torch.zeros(()).double()}
    state, file = TX.init(params), path.with_suffix(".safetensors")
    bc.save(file, (params, state), tx=TX)
    loaded = bc.load(file, like=(params, state), tx=TX)
    draws = bc.sample(bc.make_step(loss, TX), params, state, data(), steps=20, path=path)
    return draws.params["w"], state[1].key, loaded[1][1].key


def missing(path):
    return message_of(lambda: bc.load(path, like={"w": torch.zeros(3)}))


def test_ranks_without_a_mesh_are_chains_of_their_own_on_the_disk(tmp_path):
    path = tmp_path / "draws"
    ranks, opened = run(on_its_own, 2, path), bc.Draws.open(path)
    assert opened.chains == 2 and ranks[0][1] != ranks[1][1]
    for i, (w, key, loaded) in enumerate(ranks):
        assert torch.equal(opened.params["w"][:, i], w) and key == loaded
    files = sorted(tmp_path.glob("draws.rank*.safetensors"))
    assert [file.name for file in files] == [f"draws.rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    whole, like = path.with_suffix(".safetensors"), {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"2 ranks saved .* and 1 load it"):
        bc.load(whole, like=like)
    bc.save(whole, like)
    with pytest.raises(ValueError, match="by 1 and by 2 ranks, and which is newer no file says: remove"):
        bc.load(whole, like=like)
    whole.unlink()
    files[1].rename(tmp_path / "second.safetensors")
    assert "00001-of-00002.safetensors is missing: save on" in run(missing, 2, whole)[1]
    files[0].unlink()
    params = {"w": torch.zeros(3).double(), "b": torch.zeros(()).double()}
    assert bc.load(tmp_path / "second.safetensors", like=(params, TX.init(params)), tx=TX)[1][1].key == ranks[1][1]
    (said,) = run(message_of, 1, on_its_own, path)
    assert "a run of 2 ranks, and 1 run now" in said and "bc.parallel(step, n, mesh=mesh)" in said
    run(on_its_own, 2, tmp_path / "alike", 3)
    with pytest.raises(ValueError, match="drew the same noise"):
        bc.Draws.open(tmp_path / "alike")


# one chain on several ranks

LONG = {"chains": 400, "one": 300, "shards": 200}  # steps for each launch, so that a run outlives all of them


def _behind_a_commit(path, wait):
    """Whether so many seconds have gone by since a launch that begins now was first seen to have committed."""
    began, seen = time.time(), []

    def now():
        if not seen and any(head.stat().st_mtime > began for head in path.rglob("head.safetensors")):
            seen.append(time.time())
        return bool(seen) and time.time() > seen[0] + wait

    return now


def killed_at_random(path, kills, seed, kind, sizes=(1, 2, 4)):
    """Kill a run on one of these numbers of ranks, never on as many as before, a random rank of them at a random moment behind
    a commit of its launch; then let it end, and compare with the run in one process that nobody killed.

    A number of ``None`` is a process that knows of no ranks. Returns how many launches still ran when they were killed.
    """
    g, size, hit, steps = torch.Generator().manual_seed(seed), 1, 0, LONG[kind] * kills
    options = {"n": 4} if kind == "chains" else {}
    given = {"thinning": 7, "seconds": 0.02, **options}
    for _ in range(kills):
        others = [s for s in sizes if s != size] or sizes
        size = others[int(torch.randint(len(others), (), generator=g))]
        victim, wait = int(torch.randint(size or 1, (), generator=g)), 0.15 * float(torch.rand((), generator=g))
        hit += killed(sampled, size, victim, kind, path, steps, now=_behind_a_commit(path, wait), **given)
        with suppress(FileNotFoundError):  # of a chain whose rank had not begun
            bc.Draws.open(path).verify()
    want = sampled(kind, None, steps, thinning=7, **options)
    for part in run(sampled, None if size is None else 2, kind, path, steps, thinning=7, **options):
        must_be(part, want, 1e-6 if kind == "one" and size else 0.0)
    return hit


@pytest.mark.slow
@pytest.mark.parametrize("kind, sizes", [*((kind, (1, 2, 4)) for kind in LONG), ("one", (None,))])
def test_a_run_that_is_killed_on_changing_numbers_of_ranks_or_alone_is_the_uninterrupted_run(kind, sizes, tmp_path):
    assert killed_at_random(tmp_path / "draws", 4, 11, kind, sizes) >= 2


# shards


@on(2)
@pytest.mark.slow
def test_draws_are_opened_in_any_layout_and_by_one_rank_alone(tmp_path):
    want, columns = sampled("shards", tmp_path).params, spread(matrices(), "columns")
    draws = bc.Draws.open(tmp_path, like=columns)
    assert world()[0] or torch.equal(bc.Draws.open(tmp_path).params["w"], want["w"]), "one rank may read alone"
    assert draws.params["w"].placements == tuple(Shard(p.dim + 1) for p in columns["w"].placements)
    third, every = whole([draws[3], dict(draws.params)])
    assert all(torch.equal(every[k], x) and torch.equal(third[k], x[3]) for k, x in want.items())


def removed(file):
    """Removed by the first rank, while the others wait."""
    dist.barrier()
    if world()[0] == 0:
        file.unlink()
    dist.barrier()


@pytest.mark.slow
@on(2)
def test_what_ranks_cannot_go_on_with_is_refused_on_every_rank(tmp_path):
    path, rank = tmp_path / "draws", world()[0]
    said = message_of(lambda: sampled("shards", tmp_path / f"rank-{rank}"))
    assert "the ranks name 2 directories" in said and not (tmp_path / f"rank-{rank}").exists()
    sampled("shards", path, 9)
    only = {"w": spread(matrices(), "fsdp")["w"]}
    step = bc.make_step(lambda p, batch: 0.5 * ((p["w"] - batch) ** 2).sum(), TX)
    settings = {"steps": STEPS, "burn_in": 4, "path": path}
    said = message_of(lambda: bc.sample(step, only, TX.init(only), [torch.tensor(1.0)], **settings))
    assert "holds another run: tree" in said
    removed(path / "draws-0000000000000000.safetensors")
    said = message_of(lambda: bc.Draws.open(path).params)
    assert "lacks the draws after steps 1 to 9: restore draws-0000000000000000" in said
    path = tmp_path / "headless"
    sampled("shards", path, 6)
    removed(path / "head.safetensors")
    assert "holds draws but no head.safetensors" in refusal("shards", path)


@pytest.mark.filterwarnings("ignore:sample")
@on(2)
def test_a_loss_that_is_not_finite_on_one_rank_ends_the_run_on_all():
    bad = lambda p, x: elementwise(p, x) * (float("nan") if world()[0] and x == 2.0 else 1.0)  # noqa: E731
    with pytest.warns(UserWarning, match="diverged"):
        part = sampled("shards", None, burn_in=0, fn=bad)
    assert not part.complete and len(part.steps) == 2


def cut_off(path, where):
    """A run that an error ends: in a step of all ranks, or behind a step of one of them, whose loss the other waits for."""
    rank = world()[0]

    def fails(params, batch):
        if batch == 3.0 and where in ("all", 1 - rank):  # steps 4 and 9
            raise ZeroDivisionError("in the loss")
        return elementwise(params, batch)

    def callback(it):
        if where == rank and it.step == 8:
            raise ZeroDivisionError("in a callback")

    sampled("shards", path, 4, 0)
    fails.__qualname__, fails.__module__ = elementwise.__qualname__, elementwise.__module__
    with pytest.raises(ZeroDivisionError) as caught:
        sampled("shards", path, STEPS, 0, fn=fails, callbacks=[callback])
    made = len(caught.value.draws)
    assert made == 8 if rank == 0 else 4 <= made <= 8
    assert "on disk" in str(getattr(caught.value, "__notes__", "on disk"))


def interrupted(path, victim):
    """Ctrl-C on one rank alone, in the middle of the run."""

    def ask(it):
        if it.step == 6 and world()[0] == victim:
            os.kill(os.getpid(), signal.SIGINT)

    part = sampled("shards", path, burn_in=0, seconds=0.02, callbacks=[ask])
    return len(part.steps), part.complete, part.why


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize(
    "how, where", [(cut_off, "all"), (cut_off, 0), (cut_off, 1), (interrupted, 0), (interrupted, 1)]
)
def test_what_ranks_drew_before_an_error_or_ctrl_c_is_on_disk_and_they_go_on(how, where, tmp_path):
    path, want = tmp_path / "draws", sampled("shards", burn_in=0)
    said, other = run(how, 2, path, where)
    kept = bc.Draws.open(path)
    if how is interrupted:
        made, complete, why = said
        assert other == said and not complete and made >= 6 and why.startswith("interrupted after step")
    assert not kept.complete and kept.steps.tolist() == list(range(1, 1 + (8 if how is cut_off else made)))
    kept.verify()
    assert all(torch.equal(kept.params[name], x[: len(kept)]) for name, x in want.params.items())
    for size in (3, 1):
        for part in run(sampled, size, "shards", path, burn_in=0):
            must_be(part, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
def test_a_loss_of_dtensors_that_explodes_ends_the_run_where_that_of_one_process_ends(tmp_path):
    """Beyond the limit of stability."""
    explode = {"steps": 200, "burn_in": 0, "tx": bc.sgld(2.1, temperature=1e-3)}
    want = sampled("shards", **explode)
    assert 10 < len(want.steps) < 190 and "T P / 2" in want.why
    for part in run(sampled, 2, "shards", tmp_path / "draws", **explode):
        must_be(part, want)
    assert part.why == want.why == bc.Draws.open(tmp_path / "draws").why
