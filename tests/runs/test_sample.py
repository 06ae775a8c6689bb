"""Runs: what is drawn, what is kept on disk, and that an interrupted run is the uninterrupted one."""

import functools
import os
import signal
import stat

import pytest
import torch
from torch.utils.data import DataLoader

import bayesopt_chain as bc
from bayesopt_chain.runs.run import ResumableBatches

TX = bc.sghmc(0.1, temperature=0.05)


def loss(params, batch):
    return ((batch @ params["w"] - 1) ** 2).mean() + params["b"] ** 2


def start():
    torch.manual_seed(0)
    params = {"w": torch.ones(2), "b": torch.tensor(1.0)}
    return params, TX.init(params)


def batches():
    return [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def by_hand(steps, burn_in, thinning, data=None):
    (params, state), data, kept = start(), data or batches(), []
    step = bc.make_step(loss, TX)
    for n in range(1, steps + 1):
        params, state, info = step(params, state, data[(n - 1) % len(data)])
        if n > burn_in and (n - burn_in) % thinning == 0:
            kept.append((n, params, info.loss))
    return kept


def same(draws, kept):
    return (
        draws.steps.tolist() == [n for n, *_ in kept]
        and torch.equal(draws.params["w"], torch.stack([p["w"] for _, p, _ in kept]))
        and torch.equal(draws.params["b"], torch.stack([p["b"] for _, p, _ in kept]))
        and torch.equal(draws.loss, torch.stack([x for *_, x in kept]))
    )


STEPS = {
    "pure": lambda: bc.make_step(loss, TX),
    "in place": lambda: bc.make_step(loss, TX, inplace=True),
    "captured": lambda: bc.capture(bc.make_step(loss, TX), *start(), batches()[0], backend="eager"),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_draws_come_after_the_burn_in_at_every_thinning(tmp_path, kind, on_disk):
    draws = bc.sample(
        STEPS[kind](), *start(), batches(), steps=20, burn_in=5, thinning=3, path=tmp_path if on_disk else None
    )
    assert draws.complete and draws.steps.tolist() == [8, 11, 14, 17, 20]
    if kind == "pure":
        assert same(draws, by_hand(20, 5, 3))
    else:
        torch.testing.assert_close(draws.params["w"], torch.stack([p["w"] for _, p, _ in by_hand(20, 5, 3)]))


def test_iterate_yields_every_step():
    steps = list(bc.iterate(bc.make_step(loss, TX), *start(), batches(), steps=7, burn_in=2, thinning=2))
    assert [it.step for it in steps] == list(range(1, 8)) and [it.step for it in steps if it.is_draw] == [4, 6]
    assert torch.equal(steps[3].params["w"], by_hand(4, 0, 1)[-1][1]["w"])


def stopping(step, after):
    """A step that fails with an IndexError behind so many calls."""
    left = list(range(after))

    def limited(params, state, batch):
        left.pop()
        return step(params, state, batch)

    return limited


def with_dropout(params, batch):
    return loss(params, torch.nn.functional.dropout(batch, 0.5))


def loader():
    return torch.utils.data.DataLoader(torch.cat(batches()), batch_size=4)


RESUMED = {  # a loss, batches, and seconds between commits
    "commits every step": (loss, batches, 0.0),
    "commits at the end": (loss, batches, 1e9),
    "random numbers of torch": (with_dropout, batches, 0.0),
    "a loader that cannot say where it stands": (loss, loader, 0.0),
}


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("case", RESUMED)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path, case, recwarn):
    fn, made, interval = RESUMED[case]
    run = {"steps": 20, "burn_in": 5, "thinning": 3}
    step = bc.make_step(fn, TX)
    want = bc.sample(step, *start(), made(), **run)
    for after in (1, 4, 9):
        with pytest.raises(IndexError, match="pop from empty list"):
            bc.sample(stopping(step, after), *start(), made(), path=tmp_path, checkpoint_seconds=interval, **run)
        torch.manual_seed(after)  # another process
    for draws in (bc.sample(step, *start(), made(), path=tmp_path, **run), bc.Draws.open(tmp_path, like=start()[0])):
        assert torch.equal(draws.params["w"], want.params["w"]) and torch.equal(draws.loss, want.loss)
        assert fn is with_dropout or same(draws, by_hand(20, 5, 3))
    skipped = [w for w in recwarn if "batches are read and skipped" in str(w.message)]
    assert bool(skipped) == (made is loader)


def test_a_complete_run_returns_at_once_and_a_longer_one_goes_on(tmp_path):
    def never(params, state, batch):
        raise AssertionError

    run = {"burn_in": 5, "thinning": 3, "path": tmp_path}
    bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=20, **run)
    assert same(bc.sample(never, *start(), batches(), steps=20, **run), by_hand(20, 5, 3))
    assert same(bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=29, **run), by_hand(29, 5, 3))


def test_a_missing_shard_is_named(tmp_path):
    run = {"steps": 6, "path": tmp_path, "checkpoint_seconds": 0.0}
    bc.sample(bc.make_step(loss, TX), *start(), batches(), **run)
    shard = sorted(tmp_path.glob("draws-*"))[2]
    shard.unlink()
    for read in (
        lambda: bc.Draws.open(tmp_path),
        lambda: bc.sample(bc.make_step(loss, TX), *start(), batches(), **run),
    ):
        with pytest.raises(FileNotFoundError, match=shard.name):
            read()


@pytest.mark.parametrize(
    "bad, says",
    [
        ({"steps": 0}, "steps must be"),
        ({"steps": 5, "burn_in": 5}, "ends before the first draw"),
        ({"steps": 5, "thinning": 0}, "thinning must be"),
        ({"steps": 5, "burn_in": -1}, "burn_in must be"),
        ({"steps": 5, "chains": 3}, r"chains=3 counts axis 0 .* bc.parallel\(step, 3\)"),
    ],
)
def test_arguments_that_make_no_run_are_refused(bad, says):
    with pytest.raises(ValueError, match=says):
        bc.sample(bc.make_step(loss, TX), *start(), batches(), **bad)
    with pytest.raises(ValueError, match="only once"):
        bc.sample(bc.make_step(loss, TX), *start(), iter(batches()), steps=3)


@pytest.mark.filterwarnings("error::UserWarning")
def test_epochs_inside_of_a_loader_go_on_at_the_batch_that_was_used_last(tmp_path):
    """Also with the same loader, whose epochs have moved on, as where a cell of a notebook is run again."""
    data = torch.randn(22, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(data, batch_sampler=bc.epochs(range(22), 4))
    want = by_hand(12, 0, 1, [bc.epochs(data, 4, seed=0).batch(*divmod(i, 5)) for i in range(12)])
    for steps in (3, 7, 12):
        draws = bc.sample(bc.make_step(loss, TX), *start(), loader, steps=steps, path=tmp_path)
        assert same(draws, want[:steps])


def test_a_handler_in_c_stays_in_place(monkeypatch):
    """As where Python runs inside of another program; what cannot be put back is not replaced."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", None)
    assert len(bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=2)) == 2


def test_a_second_ctrl_c_inside_a_commit_waits_for_its_end(tmp_path, monkeypatch):
    """Both come while the first draws are pushed to the disk, where an exception would leave a commit half made."""
    real, pushed, goes_on = os.fsync, [], []

    def interrupted(fd):
        pushed.append(fd)
        if len(pushed) == 3:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)
            goes_on.append(True)
        return real(fd)

    monkeypatch.setattr(os, "fsync", interrupted)
    draws = bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=20, path=tmp_path, checkpoint_seconds=0.0)
    assert goes_on and not draws.complete and draws.why.startswith("interrupted after step")
    monkeypatch.undo()
    assert same(draws, by_hand(int(draws.why.split()[-1]), 0, 1))
    assert same(bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=20, path=tmp_path), by_hand(20, 0, 1))


def test_a_file_that_is_put_in_place_is_pushed_to_the_disk_and_then_its_folder(tmp_path, monkeypatch):
    """Without the folder's own fsync a power loss forgets the new name."""
    done, fsync, replace = [], os.fsync, os.replace

    def pushed(fd):
        found = os.fstat(fd)
        done.append(("folder" if stat.S_ISDIR(found.st_mode) else "file", found.st_ino))
        return fsync(fd)

    def put(source, to, **more):
        done.append(("put", os.stat(source).st_ino))
        return replace(source, to, **more)

    monkeypatch.setattr(os, "fsync", pushed)
    monkeypatch.setattr(os, "replace", put)
    bc.sample(bc.make_step(loss, TX), *start(), batches(), steps=4, path=tmp_path)
    places = [i for i, (what, _) in enumerate(done) if what == "put"]
    assert places
    for i in places:
        assert ("file", done[i][1]) in done[:i]
        assert ("folder", tmp_path.stat().st_ino) in done[i:]


@pytest.mark.filterwarnings("error")
def test_means_of_a_variational_fit_are_no_draws_and_a_warning_says_so():
    tx, w = bc.skip_nonfinite(bc.vi.ivon(0.1, temperature=0.1)), torch.zeros(2)
    step = bc.parallel(bc.make_step(lambda w, batch: w.square().sum(), tx), 2)
    start = torch.stack([w, w])
    run = functools.partial(bc.sample, step, start, step.init(tx, start), None, steps=4)
    with pytest.warns(UserWarning, match="means along the way are no draws"):
        run()
    assert len(run(burn_in=3)) == 1 and len(run(keep=False)) == 0


@pytest.mark.parametrize("own, ranks", [(False, 2), (True, 3)])
def test_the_place_of_another_rank_or_of_other_ranks_is_gone_to_by_how_many_batches_they_have_seen(own, ranks):
    """Of 8 data, five batches of two are an epoch and one more; of 6 data an epoch and two."""
    theirs, mine = (ResumableBatches(bc.epochs(torch.arange(n), 2, order="fixed")) for n in (8, 6))
    theirs.whole, mine.whole = ({"ranks": n, "data": 14, "batch": 4, "order": "fixed"} for n in (ranks, 2))
    [theirs.next() for _ in range(5)]
    mine.seek(theirs.state(), own)
    assert mine.next().tolist() == [4, 5]
