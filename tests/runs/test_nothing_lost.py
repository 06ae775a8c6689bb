"""Whatever ends a run, every finished draw is returned or on disk, and the run says so."""

import functools
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.runs import folder, store
from bayesopt_chain.runs.folder import Folder
from tests.runs import children
from tests.runs.toys import loss, sampled, started


def want(steps):
    return sampled(steps=steps).params["w"]


def failing(after, error):
    calls = itertools.count(1)

    def fn(params, batch):
        if next(calls) > after:
            raise error
        return loss(params, batch)

    fn.__qualname__, fn.__module__ = loss.__qualname__, loss.__module__
    return fn


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["committed", "uncommitted"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.filterwarnings("ignore:sample")
def test_an_exception_carries_the_finished_draws(tmp_path, on_disk, seconds):
    path = tmp_path / "run" if on_disk else None
    with pytest.raises(ZeroDivisionError) as caught:
        bc.sample(*started(fn=failing(9, ZeroDivisionError("x"))), steps=20, path=path, checkpoint_seconds=seconds)
    draws = caught.value.draws
    assert (
        torch.equal(draws.params["w"], want(9)) and not draws.complete and draws.why == "ZeroDivisionError in step 10"
    )
    if on_disk:
        kept = bc.Draws.open(path)
        assert torch.equal(kept.params["w"], want(9)) and not kept.complete and kept.why == draws.why
        assert torch.equal(bc.sample(*started(), steps=20, path=path).params["w"], want(20))


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("how", [torch.OutOfMemoryError, MemoryError])
def test_no_memory_is_the_error_that_is_raised_and_draws_of_a_full_device_are_read_by_the_machine(
    tmp_path, monkeypatch, on_disk, how
):
    """On a device that is full the draws cannot be stacked either; where the machine itself is full they are lost."""
    expected, real, calls = want(9), torch.stack, itertools.count()

    def full(rows):
        if next(calls) == 0 or how is MemoryError:
            raise how("out of memory")
        return real(rows)

    def last(it):
        if it.step == 9:
            patch.setattr(torch, "stack", full)

    with monkeypatch.context() as patch, pytest.raises(how) as caught:
        fn, path = failing(9, how("first")), tmp_path if on_disk else None
        bc.sample(*started(fn=fn), steps=20, path=path, checkpoint_seconds=1e9, callbacks=[last])
    assert str(caught.value) == "first"
    if how is torch.OutOfMemoryError:
        assert torch.equal(caught.value.draws.params["w"], expected)
        assert not on_disk or torch.equal(bc.Draws.open(tmp_path).params["w"], expected)


@pytest.mark.filterwarnings("ignore:sample")
def test_a_full_disk_leaves_the_draws_in_the_exception_and_the_run_goes_on_when_there_is_room(tmp_path, monkeypatch):
    whole, real, calls = sampled(steps=20), os.fsync, itertools.count()

    def full(descriptor):
        if next(calls) >= 20:
            raise OSError(28, "No space left on device")
        return real(descriptor)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device; what stood") as caught:
        patch.setattr(os, "fsync", full)
        sampled(tmp_path, 20)
    made, kept = caught.value.draws, bc.Draws.open(tmp_path)
    kept.verify()
    assert 3 < len(kept) <= len(made) < 20 and same(made, whole[: len(made)]) and same(kept, whole[: len(kept)])
    assert not [*tmp_path.glob(".*.tmp")]
    assert same(sampled(tmp_path, 20), whole)


def nan_at(step):
    """A finite loss whose gradient is NaN in one step."""
    calls = itertools.count(1)

    def fn(params, batch):
        x = params["w"].sum()
        return loss(params, batch) + (torch.sqrt(x - x.detach()) * 0.0 if next(calls) == step else 0.0)

    return fn


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_parameters_that_are_not_finite_end_the_run(tmp_path, on_disk):
    path = tmp_path if on_disk else None
    with pytest.warns(UserWarning, match="the parameters after step 6 are not finite"):
        draws = bc.sample(*started(fn=nan_at(6)), steps=6, path=path)
    assert len(draws) == 5 and not draws.complete and "step 6 are not finite" in draws.why
    assert torch.equal(draws.params["w"], want(5))
    if on_disk:
        kept = bc.Draws.open(path)
        assert len(kept) == 5 and kept.why == draws.why and not kept.complete


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("spread, rise, whole", [(1e-3, 40.0, True), (0.0, 50.0, True), (1e-3, 60.0, False)])
def test_a_rise_that_the_temperature_allows_is_no_explosion(spread, rise, whole):
    """T P / 2 is 0.5 here, and 100 of it is the bound above losses that hardly differed: as at a start in the minimum. The
    bound itself is allowed."""
    values = torch.cat([torch.linspace(0, spread, 10), torch.full((30,), rise)])
    tx, p = bc.sgld(0.01, temperature=0.01), torch.zeros(100)
    step = bc.make_step(lambda p, batch: 0.0 * p.sum() + batch[0], tx)
    draws = bc.sample(step, p, tx.init(p), list(values[:, None]), steps=40)
    assert draws.complete is whole and len(draws) == (40 if whole else 12)


@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("chains", [None, 3])
@pytest.mark.parametrize("before", [1, 2, 7, 40])
def test_an_explosion_ends_a_run_where_it_would_have_ended_without_an_interruption(before, chains, tmp_path):
    def run(steps, path=None):
        tx, params = bc.sgld(1.05, temperature=0.01), {"w": torch.ones(3)}
        step = bc.make_step(loss, tx)
        if chains is not None:
            step, params = bc.parallel(step, chains), bc.stack([params] * chains)
        init = (lambda: tx.init(params)) if chains is None else (lambda: step.init(tx, params, seed=1))
        torch.manual_seed(0)
        return bc.sample(step, params, init(), None, steps=steps, path=path)

    whole = run(400)
    assert not whole.complete and 45 < len(whole) < 380
    assert re.search(r"loss.* of step \d+ is .*, where the median of this run is .* T P / 2", whole.why)
    assert run(len(whole) + 1 - before, tmp_path).complete
    again, opened = run(400, tmp_path), bc.Draws.open(tmp_path)
    assert (len(opened), opened.why) == (len(again), again.why) == (len(whole), whole.why)
    assert torch.equal(again.params["w"], whole.params["w"])


@pytest.mark.filterwarnings("ignore:sample")  # the loss is another one
def test_a_run_goes_on_where_none_of_its_draws_lies_before_its_checkpoint(tmp_path):
    """Draws that were saved behind an exception lie behind the checkpoint, and are made again."""
    run = {"steps": 30, "burn_in": 10, "path": tmp_path}
    for made, seconds in ((5, 0.0), (9, 1e9)):
        with pytest.raises(ZeroDivisionError):
            bc.sample(*started(fn=failing(made, ZeroDivisionError())), checkpoint_seconds=seconds, **run)
    assert bc.Draws.open(tmp_path).steps.tolist() == [11, 12, 13, 14]
    draws = bc.sample(*started(), **run)
    assert draws.complete and torch.equal(draws.params["w"], want(30)[10:])


def outliers():
    batches = [torch.distributions.StudentT(1.5).sample((3,)) * 0.1 for _ in range(50)]
    batches[7] = torch.full((3,), 1e3)
    return batches


CALM = {  # transformation, start, targets
    "cold start": (bc.sgld(0.05, temperature=1e-4), 1e4, None),
    "warm start": (bc.sgld(0.05, temperature=0.05), 1e4, None),
    "temperature zero": (bc.sgld(0.05, temperature=0.0), 1e4, None),
    "temperature zero that explodes": (bc.sgd(1.02), 1.0, None),
    "outliers in batches": (bc.sgld(3e-4, temperature=1e-3), 0.0, outliers),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", CALM)
def test_cold_starts_outliers_and_runs_at_temperature_zero_explode_never(case):
    tx, value, targets = CALM[case]
    params = {"w": torch.full((3,), value)}
    step = bc.make_step(lambda p, batch: ((p["w"] - (0.0 if batch is None else batch)) ** 2).sum(), tx)
    assert bc.sample(step, params, tx.init(params), targets and targets(), steps=300).complete


def interrupted_run(path, seconds, connection):
    """A run that says when it has made 20 steps, and what it returned."""

    def slow(it):
        if it.step == 20:
            connection.send("ready")
        time.sleep(0.004)

    draws = bc.sample(*started(), steps=20000, path=path, checkpoint_seconds=seconds, callbacks=[slow])
    connection.send(len(draws))


def interrupted_twice(folder, trials, seed=0):
    """Two Ctrl-Cs 20 to 300 ms apart at random moments: for each pair whether a finished draw was neither returned nor on
    disk, and how many seconds later the run had ended."""
    g = torch.Generator().manual_seed(seed)
    for i in range(trials):
        path = folder / str(i)
        mine, theirs = multiprocessing.Pipe()
        process = children.started(interrupted_run, path, 1e9 if i % 2 else 0.05, theirs)
        assert mine.recv() == "ready"
        for least, more in ((0.0, 0.2), (0.02, 0.28)):
            time.sleep(least + more * float(torch.rand((), generator=g)))
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
        seconds = children.until_it_ends(process)
        kept = bc.Draws.open(path)
        kept.verify()
        told = mine.recv() if mine.poll() else 20
        yield len(kept) < told or not torch.equal(kept.params["w"], want(len(kept))), seconds


def test_two_interrupts_lose_nothing(tmp_path):
    assert [lost for lost, _ in interrupted_twice(tmp_path, 1)] == [False]


def test_large_draws_are_read_where_they_are_asked_for(tmp_path, monkeypatch):
    held = sampled(None, 12, size=1 << 17).params["w"]
    sampled(tmp_path, 12, size=1 << 17)
    (tmp_path / "draws-0000000000000099.safetensors").touch()  # merged into another one while the folder is listed
    ends = lambda name, kind=folder.DRAWS: ([x.unlink() for x in tmp_path.glob("*99.*")], kind.fullmatch(name))[1]  # noqa: E731
    monkeypatch.setattr(folder, "DRAWS", type("Ends", (), {"fullmatch": staticmethod(ends)}))
    draws, before = bc.Draws.open(tmp_path), children.read_so_far()
    assert torch.equal(draws[::5].params["w"], held[::5]) and torch.equal(draws[3]["w"], held[3])
    assert torch.equal(draws.column("params/w", slice(2, 4), slice(0, 7)), held[2:4, :7])
    assert children.read_so_far() - before < 7 * held[0].nbytes + (1 << 20)
    assert torch.equal(draws.column("params/w", elements=slice(5, 100)), held[:, 5:100])
    assert all(torch.equal(draw["w"], x) for draw, x in zip(draws, held))
    monkeypatch.setattr("bayesopt_chain.runs.draws.largest", lambda: 5 * held[0].nbytes)
    assert torch.equal(draws[:5].params["w"], held[:5])


# Runs where the machine is in the way: a full disk, one that is read only, little memory, forks, workers, clocks


def same(draws, want):
    return len(draws) == len(want) and torch.equal(draws.params["w"], want.params["w"])


@pytest.fixture
def disk(tmp_path):
    """A disk of 64 KiB, which ``mount`` changes."""

    def mount(*options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", tmp_path], capture_output=True)

    if mount("size=64k").returncode:
        pytest.skip("this user mounts nothing")
    yield tmp_path, mount
    subprocess.run(["umount", tmp_path], check=True)


def test_training_goes_on_beside_a_full_disk_and_its_draws_are_written_when_there_is_room(disk):
    (path, mount), model = disk, torch.nn.Linear(1000, 1, bias=False)
    keep = bc.collect(model, every=1, path=path, checkpoint_seconds=0.0)
    with pytest.warns(UserWarning, match="in memory only"):
        for _ in range(30):
            keep()
    mount("remount", "size=4m")
    keep.flush()
    assert bc.Draws.open(path).steps.tolist() == list(range(1, 31))


def test_a_disk_that_is_read_only_is_read_and_one_clear_error_where_it_is_written(disk):
    (path, mount), want = disk, sampled(steps=5)
    sampled(path, 5, seconds=1e9)
    mount("remount", "ro")
    assert same(bc.Draws.open(path), want)
    for place in (path, path / "new"):
        with pytest.raises(OSError, match="cannot write to"):
            sampled(place, 9)


def in_little_memory(path, connection):
    """Write and read draws of 320 MiB where 200 MiB more memory are all there is."""
    store.SHARD_BYTES = 1 << 23
    sampled()  # what is imported at a first step
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + (200 << 20),) * 2)
    made = sampled(path, 160, size=1 << 19, seconds=1e9)
    mean = sum(draw["w"].double() for draw in made) / len(made)
    predicted = made.predict(lambda p, x: x * p["w"].mean(), torch.ones(3), chunk=4)
    column = made.column("params/w", elements=slice(7, 9))
    connection.send((len(made), float(mean.mean() - predicted[0]), tuple(column.shape)))


@pytest.mark.slow
def test_draws_larger_than_the_memory_are_written_and_read(tmp_path):
    mine, theirs = torch.multiprocessing.Pipe()
    children.until_it_ends(children.started(in_little_memory, tmp_path, theirs))
    size, off, shape = mine.recv() if mine.poll() else (0, 1.0, ())
    assert size == 160 and abs(off) < 1e-6 and shape == (160, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sample")
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_living_workers_of_a_loader_hold_no_lock_and_change_no_draw(way, tmp_path):
    loader = functools.partial(torch.utils.data.DataLoader, torch.arange(12.0), batch_size=2)
    batches = loader(num_workers=1, persistent_workers=True, multiprocessing_context=way)
    run = functools.partial(sampled, steps=30, fn=lambda p, batch: ((p["w"] - batch.mean()) ** 2).sum())
    want = run(batches=loader())
    run(tmp_path, steps=9, batches=batches)  # the workers start while the lock is held, and live on
    assert same(run(tmp_path, batches=batches), want) and same(bc.Draws.open(tmp_path), want)


def test_a_forked_copy_writes_nothing_and_does_not_give_the_lock_away(tmp_path):
    sampled(tmp_path, 5)
    held, before = Folder(tmp_path), {p: p.read_bytes() for p in tmp_path.iterdir()}
    if not (child := os.fork()):
        try:
            held.set_head(held.head.metadata, {})
        except OSError as err:
            os._exit(0 if "forked copy" in str(err) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(RuntimeError, match="another process is writing"):
        Folder(tmp_path)
    held.close()
    Folder(tmp_path).close()


def test_a_clock_that_is_set_back_changes_nothing(tmp_path, monkeypatch):
    want = sampled(steps=30)
    for steps in (7, 8, 20, 30):
        monkeypatch.setattr(time, "time", lambda steps=steps: 1e9 - 1e6 * steps)
        made = sampled(tmp_path, steps)
        for file in tmp_path.iterdir():
            os.utime(file, (1e9 - 1e6 * steps,) * 2)
    assert same(made, want) and same(bc.Draws.open(tmp_path), want)


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    def unknown(fd, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unknown)
    with pytest.raises(OSError, match=f"cannot write to {tmp_path}: Operation not supported"):
        sampled(tmp_path)


def test_draws_are_read_from_where_they_lie_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    want, model = sampled(steps=6), torch.nn.Linear(2, 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    away = [lambda it: os.chdir(tmp_path / "elsewhere") if it.step == 3 else None]
    made = sampled("run[1]", 6, callbacks=away)  # brackets, which are no pattern
    monkeypatch.chdir(tmp_path)
    opened, keep = bc.Draws.open("run[1]"), bc.collect(model, every=1, path="collected")
    monkeypatch.chdir(tmp_path / "elsewhere")
    keep()
    keep.flush()
    assert same(made, want) and same(opened, want) and len(keep.draws) == 1 and not os.listdir(".")


@pytest.mark.skipif(os.getuid() == 0, reason="root writes to read-only directories")
def test_a_folder_of_others_is_one_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot write to"):
        sampled(tmp_path / "run")


MEASURED = "import json; from benchmarks.runs import growth; print(json.dumps(growth(1500, 5, warm_up=1 / 3)))"


@pytest.mark.slow
def test_memory_is_flat_over_a_long_run_to_disk():
    """Short form of ``python -m benchmarks.runs``: 1,500 steps and 300 draws, under 3 % growth behind the first third.

    In a process of its own: what other tests have left is freed, or is not, while this one measures.
    """
    figures = json.loads(subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, check=True).stdout)
    assert figures["draws"] == 300 and figures["growth"] < 0.03, figures


# A process that dies before or after any fsync, rename or deletion leaves the run as it was, or as it was to be


class Dead(BaseException):
    """From here on the process does nothing more to the disk."""


class Machine:
    """Dies before (an even number) or after (an odd one) the disk has done something for the time ``at // 2``."""

    def __init__(self, monkeypatch, at=None):
        self.calls, self.at, self.dead = 0, at, False
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))

    def watched(self, real):
        def call(*args, **more):
            mine, self.calls = self.calls, self.calls + 1
            self.dead = self.dead or mine * 2 == self.at
            if self.dead:
                raise Dead
            out = real(*args, **more)
            self.dead = mine * 2 + 1 == self.at
            if self.dead:
                raise Dead
            return out

        return call


def steps_read(path):
    """The draws on disk, each the number of its step and of the course that made it; ``None``: no run yet."""
    try:
        draws = bc.Draws.open(path)
    except FileNotFoundError as err:
        assert "there is no run in" in str(err)
        return None
    draws.verify()
    values = [int(x) for x in draws.params["weight"].flatten()] if len(draws) else []
    assert [value % 100 for value in values] == (draws.steps.tolist() if len(draws) else [])
    return values


class Loop:
    """A loop that goes back to earlier checkpoints of its own; the parameter says step and course."""

    def __init__(self, path):
        self.model, self.path, self.course, self.made, self.states = nn.Linear(1, 1, bias=False), path, 0, [], []
        self.states.append((None, []))
        self.keep = bc.collect(self.model, every=1, path=path, checkpoint_seconds=1e9)
        self.states.append(([], []))

    def to(self, step):
        while self.keep.step < step:
            with torch.no_grad():
                self.model.weight.fill_(100 * self.course + self.keep.step + 1)
            made = [*self.made, 100 * self.course + self.keep.step + 1]
            self.states.append((self.made, made))
            self.keep()
            self.keep.flush()
            self.made = made

    def back(self, step):
        self.states.append((self.made, self.made[:step]))
        self.keep.load_state_dict({"step": step})
        self.made, self.course = self.made[:step], self.course + 1


def life(path):
    """Commits, merges, a loop that goes back within a merged file, to the start of a file, and behind its own cut."""
    loop = Loop(path)
    with suppress(Dead):
        loop.to(6)
        loop.back(3)
        loop.to(8)
        loop.back(5)
        loop.back(2)
        loop.to(5)
    return loop


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(folder, "SMALL_FILES", 3)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # it takes most of the time, and a process that dies needs none
    monkeypatch.setattr("weakref.finalize", lambda *_: lambda: None)  # a process that dies lets go of nothing


def calls_of(path, monkeypatch):
    with monkeypatch.context() as patch:
        machine = Machine(patch)
        life(path)
        return 2 * machine.calls


def died(path, monkeypatch, at):
    """What the disk may hold after a death."""
    with monkeypatch.context() as patch:
        Machine(patch, at)
        loop = None
        with suppress(Dead):
            loop = life(path)
    return [None, []] if loop is None else loop.states[-1]


@pytest.mark.parametrize("each", [19, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_that_dies_anywhere_loses_no_draw_and_keeps_none_of_a_course_that_it_left(
    tmp_path, monkeypatch, few, each
):
    for at in range(0, calls_of(tmp_path / "whole", monkeypatch), each):
        path = tmp_path / str(at)
        allowed = died(path, monkeypatch, at)
        found = steps_read(path)
        assert found in allowed, (at, found, allowed)
        again = bc.collect(nn.Linear(1, 1, bias=False), every=1, path=path, checkpoint_seconds=1e9)
        back = max(0, min(again.step, len(found or [])) - at % 3)
        again.load_state_dict({"step": back})
        for step in range(back + 1, back + 4):
            nn.init.constant_(again.model.weight, 900 + step)
            again()
            again.flush()
        assert steps_read(path) == [*(found or [])[:back], *range(901 + back, 904 + back)], at
        names = {p.name for p in path.iterdir()}
        assert len(names) <= 2 + back + 4 and not any(name.endswith(".tmp") for name in names), (at, names)


@pytest.mark.slow
def test_a_loop_that_dies_twice_anywhere(tmp_path, monkeypatch, few):
    for i, (first, second) in enumerate(
        itertools.product(range(0, calls_of(tmp_path / "x", monkeypatch), 11), range(0, 40, 7))
    ):
        path = tmp_path / str(i)
        allowed = died(path, monkeypatch, first)
        with monkeypatch.context() as patch:
            Machine(patch, second)
            with suppress(Dead):
                again = bc.collect(nn.Linear(1, 1, bias=False), every=1, path=path, checkpoint_seconds=1e9)
                again.load_state_dict({"step": max(0, again.step - 1)})
                nn.init.constant_(again.model.weight, 901 + again.step)
                again()
                again.flush()
        found = steps_read(path)
        new = [*found[:-1], found[-1] % 100] if found and found[-1] > 900 else found
        same = [
            x for x in allowed if x is None or new is None or [v % 100 for v in new] == [v % 100 for v in x][: len(new)]
        ]
        assert same and (not found or all(a in (b, 900 + b % 100) for a, b in zip(found, same[-1] or found))), (
            first,
            second,
        )


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_dies_anywhere_ends_as_the_run_that_did_not(tmp_path, monkeypatch, few, each):
    want = sampled().params["w"]
    with monkeypatch.context() as patch:
        machine = Machine(patch)
        sampled(tmp_path / "whole")
    for at in range(0, 2 * machine.calls, each):
        path, before = tmp_path / str(at), 0
        with monkeypatch.context() as patch:
            Machine(patch, at)
            with suppress(Dead):
                sampled(path)
        with suppress(FileNotFoundError):
            draws = bc.Draws.open(path)
            before = len(draws)
            assert not before or torch.equal(draws.params["w"], want[:before]), at
        assert before >= at // 2 // 6 - 2, "steps that were committed are there"
        assert torch.equal(sampled(path).params["w"], want), at
        assert torch.equal(bc.Draws.open(path).params["w"], want), at
