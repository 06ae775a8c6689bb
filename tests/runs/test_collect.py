"""Draws of a loop that somebody else owns: with BatchNorm's statistics, over restarts, and as a callback of trainers."""

import copy
import functools
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from tests.failing import failing
from tests.walk import descend


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=g), torch.randint(2, (8,), generator=g)


class Loop:
    """A training loop with checkpoints of its own."""

    def __init__(self, path=None, temperature=1e-3, **more):
        self.model = network()
        self.optimizer = bc.optim.SGHMC(
            self.model.parameters(), lr=0.01, temperature=temperature, generator=torch.Generator().manual_seed(1)
        )
        self.keep = bc.collect(self.model, self.optimizer, every=3, after=4, path=path, **more)
        self.seen = []

    def train(self, start, stop):
        for step in range(start + 1, stop + 1):
            x, y = batch(step)
            descend(self.optimizer, nn.functional.cross_entropy(self.model(x), y))
            self.seen.append(copy.deepcopy(self.model))

    def saved(self):
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.keep.state_dict()))

    def restored(self, saved):
        for x, state in zip((self.model, self.optimizer, self.keep), saved):
            x.load_state_dict(state)


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_draws_hold_the_buffers_of_their_steps_and_predict_with_them(tmp_path, on_disk):
    loop = Loop(tmp_path if on_disk else None)
    loop.train(0, 20)
    draws, x = loop.keep.draws, batch(99)[0]
    assert draws.steps.tolist() == [7, 10, 13, 16, 19]
    models = [loop.seen[s - 1].eval() for s in draws.steps.tolist()]
    want = torch.stack([m(x).softmax(-1) for m in models]).mean(0)
    got = loop.keep.predict([x], transform=lambda y: y.softmax(-1))
    torch.testing.assert_close(got, want)
    assert loop.model.training and torch.equal(draws.buffers["1.running_var"][2], models[2][1].running_var)
    assert (got - loop.model.eval()(x).softmax(-1)).abs().max() > 0


@pytest.mark.parametrize("stop", [5, 11, 13])
def test_a_restart_goes_on_and_makes_later_draws_again(tmp_path, stop):
    whole = Loop()
    whole.train(0, 20)
    loop = Loop(tmp_path, checkpoint_seconds=0.0)
    loop.train(0, stop)
    saved = loop.saved()
    loop.train(stop, 17)  # lost with the process
    loop.keep.flush()
    del loop
    again = Loop(tmp_path)
    again.restored(saved)
    again.train(stop, 20)
    again.keep.flush()
    opened = bc.Draws.open(tmp_path)
    opened.verify()
    for draws in (again.keep.draws, opened):
        assert draws.steps.tolist() == whole.keep.draws.steps.tolist()
        for name, x in whole.keep.draws._columns().items():
            assert torch.equal(x, draws._columns()[name])


def test_a_loop_that_does_not_say_where_it_goes_on_is_refused_and_a_folder_that_was_removed_is_named(tmp_path):
    loop = Loop(tmp_path / "draws")
    loop.train(0, 10)
    loop.keep.flush()
    with pytest.raises(ValueError, match=r"^path: .*temperature is 0\.001, here 0\.01"):
        Loop(tmp_path / "draws", temperature=1e-2)
    again = Loop(tmp_path / "draws")
    with pytest.raises(ValueError, match="holds draws up to step 10: say where this loop goes on"):
        again.train(0, 1)
    with pytest.raises(ValueError, match="those between are missing"):
        again.keep.load_state_dict({"step": 17})
    again.keep.load_state_dict({"step": 10})
    shutil.rmtree(tmp_path / "draws")
    again.train(10, 20)
    with pytest.raises(OSError, match=r"^path: .*draws has been removed"):
        again.keep.flush()


def test_draws_are_neither_doubled_nor_lost_by_a_write_that_fails(tmp_path, monkeypatch):
    for at in range(1, 8):
        loop = Loop(tmp_path / str(at))
        loop.train(0, 10)

        with monkeypatch.context() as patched, suppress(OSError):
            patched.setattr(os, "fsync", failing(os.fsync, at, OSError(5, "I/O error")))
            loop.keep.flush()
        loop.train(10, 20)
        loop.keep.flush()
        for draws in (loop.keep.draws, bc.Draws.open(tmp_path / str(at))):
            assert draws.steps.tolist() == [7, 10, 13, 16, 19], at


def test_draws_without_statistics_predict_with_a_warning():
    loop = Loop()
    loop.train(0, 12)
    model = loop.model.eval()
    trees = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in loop.seen[6::3]]
    forward = bc.make_functional(model).forward
    with pytest.warns(UserWarning, match="BatchNorm.*bc.collect"):
        bc.Draws.from_trees(trees).predict(forward, [batch(99)[0]])
    whole = bc.Draws.from_trees(loop.seen[6::3])
    assert torch.equal(whole.buffers["1.running_mean"], loop.keep.draws.buffers["1.running_mean"])


@pytest.mark.parametrize(
    "begin",
    [lambda keep, told: keep.on_train_begin(None, told, None), lambda keep, told: keep.on_train_start(told, None)],
)
def test_a_trainer_says_where_its_optimizer_goes_on(begin, tmp_path):
    """Its optimizer steps before the trainer's own count of steps is told."""

    def trained(path, start, stop):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = bc.optim.SGHMC(model.parameters(), lr=0.01, temperature=1e-3)
        keep = bc.collect(model, optimizer, every=2, after=1, path=path)
        begin(keep, SimpleNamespace(global_step=start))
        for _ in range(start, stop):
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
        keep.on_train_end()
        return keep.draws.steps.tolist()

    assert trained(tmp_path, 0, 8) == [3, 5, 7]
    assert trained(tmp_path, 6, 12) == [3, 5, 7, 9, 11]
    with pytest.raises(ValueError, match=r"say where this loop goes on.*callbacks=\[keep\]"):
        trained(tmp_path, 0, 2)  # a new training in the folder of an old one
    assert trained(None, 6, 12) == [7, 9, 11]  # in memory: counted by the trainer too


def generator():
    return torch.Generator().manual_seed(1)


def by_lightning(folder, steps, path, resume):
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(2, (32,)))

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return bc.optim.SGHMC(self.parameters(), lr=0.01, temperature=1e-3, generator=generator())

    keep = bc.collect(model := Net(), every=2, after=1, path=path)
    trainer = lightning.Trainer(
        max_epochs=steps // 3, accelerator="cpu", callbacks=[keep], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(
        model, torch.utils.data.DataLoader(data, batch_size=11), ckpt_path=folder / "6.ckpt" if resume else None
    )
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return keep.draws


def by_transformers(folder, steps, path, resume, hooked=False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(11, (32, 8))]
    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = bc.optim.SGHMC(model.parameters(), lr=0.01, temperature=1e-4, generator=generator())
    keep = bc.collect(model, *[optimizer] * hooked, every=2, after=1, path=path)
    arguments = transformers.TrainingArguments(
        str(folder / "run"), max_steps=steps, per_device_train_batch_size=8, max_grad_norm=0.0, save_steps=6,
        lr_scheduler_type="constant", use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=[keep])
    trainer.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-6") if resume else None)
    return keep.draws


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trained", [by_lightning, by_transformers, functools.partial(by_transformers, hooked=True)])
def test_it_is_a_callback_of_trainers_over_a_restart(trained, tmp_path):
    whole = trained(tmp_path, 12, None, False)
    trained(tmp_path, 6, tmp_path / "draws", False)
    again = trained(tmp_path, 12, tmp_path / "draws", True)
    assert again.steps.tolist() == whole.steps.tolist() == [3, 5, 7, 9, 11]
    assert all(map(torch.equal, (again.params | again.buffers).values(), (whole.params | whole.buffers).values()))


@pytest.mark.parametrize("way", ["hook", "transformers", "lightning"])
def test_of_an_optimizer_of_means_draws_of_its_posterior_are_kept(way):
    """The spread of 400 draws of 24 parameters within five of its own deviations (false alarms 6e-7; the seed is fixed)."""
    model = nn.Linear(6, 4, bias=False)
    g = torch.Generator().manual_seed(3)
    given = {"temperature": 0.02, "betas": (0.9, 1.0), "init_hessian": 3.7, "generator": g}
    optimizer = bc.optim.IVON(model.named_parameters(), 0.0, **given)
    mean = model.weight.detach().clone()
    keep = bc.collect(model, optimizer if way == "hook" else None, every=1)
    for step in range(1, 401):
        with optimizer.sampled():
            model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        state = SimpleNamespace(global_step=step, optimizers=[optimizer])
        if way == "transformers":
            keep.on_step_end(None, state, None, optimizer=SimpleNamespace(optimizer=optimizer), model=model)
        elif way == "lightning":
            keep.on_train_batch_end(state, model, None, None, 0)
        assert torch.equal(model.weight, mean)
        if step % 100 == 0:
            with optimizer.sampled(draw=step):
                assert torch.equal(keep.draws[-1]["weight"], model.weight) and not torch.equal(mean, model.weight)
    apart = (keep.draws.params["weight"] - mean).square().mean() / (0.02 / 3.7)
    assert abs(apart - 1) < 5 * (2 / (400 * 24)) ** 0.5


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: without torch's constructor, and so without hooks."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_the_steps_of_an_optimizer_that_a_trainer_wraps_are_seen():
    loop = Loop()
    keep = bc.collect(loop.model, Wrapped(loop.optimizer), every=10)
    loop.train(0, 20)
    assert keep.draws.steps.tolist() == [10, 20]


def test_it_predicts_with_models_whose_outputs_are_no_tensors():
    class Net(nn.Linear):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x), cache=object())

    model = Net(3, 2)
    keep = bc.collect(model, every=1)
    for step in range(1, 4):
        keep(step)
    x = torch.randn(5, 3)
    torch.testing.assert_close(keep.predict([x]), model(x).logits)
    torch.testing.assert_close(keep.draws.predict(model, [x]), model(x).logits)


CHANGES = [
    None,
    lambda model: model.weight.requires_grad_(False),
    lambda model: model.double(),
    lambda model: model.register_buffer("later", torch.ones(1)),
    lambda model: setattr(model.weight, "data", torch.ones(1, 1, 1)),
]


@pytest.mark.parametrize("steps, change", [(0, None), *((5, change) for change in CHANGES)])
def test_what_is_let_go_of_is_written_and_a_collector_that_nobody_held_is_said(tmp_path, steps, change):
    """Also where the model has changed, and a draw of it was refused."""
    model = nn.Linear(1, 1)
    keep = bc.collect(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, path=tmp_path)
    for step in range(1, steps + 1):
        keep(step)
    with pytest.raises(ValueError, match=r"^draws: the draw of step 6 has other leaves") if change else nullcontext():
        _ = change and (change(model), keep())
    with (
        nullcontext()
        if steps
        else pytest.warns(UserWarning, match=r"nothing was kept in .*keep = bc.collect\(\.\.\.\)")
    ):
        del keep
    assert len(bc.Draws.open(tmp_path)) == steps // 2


def test_a_cell_that_is_run_again_finds_the_draws_that_the_first_still_held(tmp_path):
    model = nn.Linear(1, 1)
    for again in (False, True):
        keep = bc.collect(model, path=tmp_path, every=1)
        for _ in range(3):
            with pytest.raises(ValueError, match="holds draws up to step 3: say where") if again else nullcontext():
                keep()
    assert len(bc.Draws.open(tmp_path)) == 3


ENDS = """
import multiprocessing, sys, torch
import bayesopt_chain as bc

def train(path):
    global keep  # held until the process ends
    model = torch.nn.Linear(1, 1)
    optimizer = bc.optim.SGD(model.parameters(), lr=0.1)
    keep = bc.collect(model, optimizer, every=1, path=path)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

train(sys.argv[1] + "/main")
child = multiprocessing.get_context("fork").Process(target=train, args=(sys.argv[1] + "/child",))
child.start()
child.join()
"""


@pytest.mark.slow
def test_a_process_that_ends_while_a_collector_is_held_writes_its_draws(tmp_path):
    assert not subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, capture_output=True).stderr
    assert [len(bc.Draws.open(tmp_path / name)) for name in ("main", "child")] == [5, 5]


# Numbers of a run for TensorBoard and wandb: read back from a file of events, exactly


class Wandb(list):
    def log(self, numbers, step):
        self.append((step, numbers))


def test_a_run_of_chains_stands_in_a_file_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    step = bc.make_step(lambda w, batch: (w**2).sum() / 2, bc.sgld(0.5, temperature=0.1), monitor=True)
    chains, start = bc.parallel(step, 2), torch.tensor([[1.0], [2.0]])
    losses = []
    with SummaryWriter(str(tmp_path)) as writer:
        callbacks = [bc.log_to(writer, every=2, prefix="run/"), lambda it: losses.append(it.info.loss.tolist())]
        state = chains.init(step.tx, start, seed=0)
        bc.sample(chains, start, state, None, steps=6, burn_in=3, callbacks=callbacks)
    read = EventAccumulator(str(tmp_path)).Reload()
    curve = lambda name: [(e.step, e.value) for e in read.Scalars(f"run/{name}")]  # noqa: E731
    assert [x for x, _ in curve("loss")] == [2, 4, 6]
    for i in range(2):
        assert [v for _, v in curve(f"loss/{i}")] == pytest.approx([losses[t - 1][i] for t in (2, 4, 6)], rel=1e-6)
    assert curve("draws") == [(2, 0.0), (4, 1.0), (6, 3.0)]
    assert [v for _, v in curve("temperature")] == pytest.approx([0.1] * 3)


def test_a_loop_of_ones_own_logs_what_it_names():
    model, table = torch.nn.Linear(2, 1), Wandb()
    optimizer = bc.optim.SGHMC(model.parameters(), lr=0.01, temperature=0.1)
    keep, log = bc.collect(model, optimizer, every=2, after=1), bc.log_to(table)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        optimizer.step()
        log(keep, loss=loss)
    assert [(step, numbers["draws"]) for step, numbers in table] == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)]
    assert table[-1][1]["loss"] == loss.item() and len(keep.draws) == 2
    log(9, rate=0.1)
    assert table[-1] == (9, {"rate": 0.1})


def test_what_is_no_writer_no_step_or_no_number_is_refused():
    for says, act in (
        (r"writer must be .*add_scalar.* or log.*, got \[\]", lambda: bc.log_to([])),
        ("every", lambda: bc.log_to(Wandb(), every=0)),
        (r"takes an Iteration, what bc\.collect returned, or the number", lambda: bc.log_to(Wandb())("one")),
        ("loss must be a number", lambda: bc.log_to(Wandb())(1, loss="low")),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            act()
