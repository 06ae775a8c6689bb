"""Callbacks with a state: it is in every checkpoint, so that a run that goes on ends with what an unbroken one has seen."""

import functools
import signal
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import bayesopt_chain as bc
from bayesopt_chain.runs.folder import Folder
from tests.runs.toys import TX, loss, sampled, started


class Sums:
    """Sums over all steps, as an observable keeps them."""

    def __init__(self, stop=None, fails=False):
        self.stop, self.fails, self.n, self.total = stop, fails, 0, torch.zeros(())

    def __call__(self, it):
        self.n, self.total = self.n + 1, self.total + it.params["w"].double().sum()
        if self.fails and it.step == self.stop:
            raise ZeroDivisionError
        return it.step == self.stop

    def state_dict(self):
        return {"n": self.n, "sums": (self.total, ["words", 1.5, None])}

    def load_state_dict(self, state):
        self.n, (self.total, rest) = state["n"], state["sums"]
        assert rest == ["words", 1.5, None]


run = functools.partial(sampled, steps=40)


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["each step", "at the end"])
@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
@pytest.mark.parametrize("stop", [1, 17, 40])
def test_a_run_that_goes_on_has_seen_every_step_once(tmp_path, fails, stop, seconds):
    unbroken, broken, resumed, again = Sums(), Sums(stop, fails), Sums(), Sums()
    run(None, callbacks=[unbroken])
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        run(tmp_path, callbacks=[broken], seconds=seconds)
    draws = run(tmp_path, callbacks=[resumed])
    assert draws.complete and (resumed.n, resumed.total) == (40, unbroken.total)
    run(tmp_path, callbacks=[again])  # a run that is complete says what was seen
    assert (again.n, again.total) == (40, unbroken.total)
    run(tmp_path, callbacks=[again], steps=50)
    assert again.n == 50


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([Sums(5)], [], r"for 5 steps with callbacks that have a state \(Sums; .* these are none"),
        ([Sums(5)], [Sums(), Sums()], "these are Sums, Sums"),
        ([lambda it: it.step == 5], [Sums()], r"\(none; .* these are Sums .* have not seen those steps"),
    ],
    ids=["left out", "another one", "added later"],
)
def test_callbacks_that_missed_steps_are_refused(tmp_path, before, after, said):
    run(tmp_path, callbacks=before)
    with pytest.raises(ValueError, match=said):
        run(tmp_path, callbacks=after)
    assert len(bc.Draws.open(tmp_path)) == 5


@pytest.mark.filterwarnings("ignore:sample")
def test_a_second_ctrl_c_ends_the_way_through_batches_that_were_seen(tmp_path):
    class Shuffled:
        """Batches that cannot say where they stand, behind which somebody loses patience."""

        def __init__(self, impatient=False):
            self.impatient, self.given = impatient, 0

        def __iter__(self):
            for _ in range(30):
                self.given += 1
                if self.impatient and self.given in (3, 4):
                    signal.raise_signal(signal.SIGINT)
                yield torch.ones(1)

    step, params, state, _ = started()
    run_on = lambda batches, steps: bc.sample(step, params, state, batches, steps=steps, path=tmp_path)  # noqa: E731
    run_on(Shuffled(), 20)
    with pytest.raises(KeyboardInterrupt):
        run_on(hurried := Shuffled(impatient=True), 30)
    assert hurried.given == 4 and len(run_on(Shuffled(), 30)) == 30


@pytest.mark.parametrize("seconds, kept, why", [(0.0, 1, "TypeError in step 2"), (1e9, 40, "TypeError after step 40")])
def test_what_no_file_can_hold_is_refused_and_the_draws_are_kept(tmp_path, seconds, kept, why):
    class Holds(Sums):
        def state_dict(self):
            return {"f": loss}

    with pytest.raises(TypeError, match="function cannot be saved") as caught:
        run(tmp_path, callbacks=[Holds()], seconds=seconds)
    assert len(caught.value.draws) == len(bc.Draws.open(tmp_path)) == kept and caught.value.draws.why == why


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_blocks_of_chains_that_catch_up_leave_what_was_seen(tmp_path, mesh, monkeypatch):
    """A commit that ended between two blocks of chains: those behind make their steps again, without the callbacks."""
    step = bc.parallel(bc.make_step(loss, TX), 3, mesh=mesh)

    def chains(path, callbacks):
        params = {"w": torch.ones(3, 3)}
        state = step.init(TX, params, seed=3)
        return bc.sample(step, params, state, None, steps=12, path=path, callbacks=callbacks, checkpoint_seconds=0.0)

    unbroken, resumed, write = Sums(), Sums(), Folder.set_head
    want = chains(None, [unbroken])

    def cut(folder, metadata, tensors):
        if metadata["step"] == 7 and metadata["numbers"] == [1, 2]:
            raise OSError("cut off")
        write(folder, metadata, tensors)

    monkeypatch.setattr(Folder, "set_head", cut)
    with pytest.raises(OSError, match="cut off"):
        chains(tmp_path / "run", [Sums()])
    monkeypatch.undo()
    got = chains(tmp_path / "run", [resumed])
    assert torch.equal(got.params["w"], want.params["w"]) and (resumed.n, resumed.total) == (12, unbroken.total)


def test_a_run_that_keeps_no_draw_hands_each_to_its_callbacks_and_goes_on(tmp_path):
    """``keep=False``: sums alone, the same bits, and a directory that holds no draw."""

    class Means(Sums):
        def __call__(self, it):
            return super().__call__(it) if it.is_draw else None

    def without(path, callback, steps=40, **more):
        return bc.sample(
            *started(), steps=steps, burn_in=10, thinning=3, path=path, keep=False, callbacks=[callback], **more
        )

    unbroken, broken, resumed = Means(), Means(19), Means()
    draws = bc.sample(*started(), steps=40, burn_in=10, thinning=3, callbacks=[unbroken])
    assert "callback" in without(tmp_path, broken, checkpoint_seconds=0.0).why
    found = without(tmp_path, resumed)
    assert found.complete and len(found) == len(bc.Draws.open(tmp_path)) == 0
    assert (resumed.n, resumed.total) == (10, unbroken.total)
    assert torch.equal(found.last[0]["w"], draws.last[0]["w"])
    with pytest.raises(ValueError, match="keep is False, here True"):
        bc.sample(*started(), steps=40, burn_in=10, thinning=3, path=tmp_path, callbacks=[Means()])


def test_the_bar_says_how_far_a_run_is_and_its_loss(capsys):
    step, params = bc.parallel(bc.make_step(loss, TX), 2), {"w": torch.ones(2, 3)}
    bc.sample(step, params, step.init(TX, params, seed=0), None, steps=30, progress=True)
    said = capsys.readouterr().err
    assert all(words in said for words in ("30/30", "loss=")), said
