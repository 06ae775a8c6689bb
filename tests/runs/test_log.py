"""Numbers of a run for TensorBoard and wandb: read back from a file of events, exactly."""

import pytest
import torch

import bayesopt_chain as bc


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
        (r"writer must have add_scalar.* or log.* got list", lambda: bc.log_to([])),
        ("every", lambda: bc.log_to(Wandb(), every=0)),
        (r"takes an Iteration, what bc\.collect returned, or the number", lambda: bc.log_to(Wandb())("one")),
        ("loss must be a number", lambda: bc.log_to(Wandb())(1, loss="low")),
    ):
        with pytest.raises((TypeError, ValueError), match=says):
            act()
