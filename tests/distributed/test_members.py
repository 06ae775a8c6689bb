"""``bc.posterior_ensemble`` with its members over ranks: the same members and predictions as in one process."""

import pytest
import torch
from torch import nn

import bayesopt_chain as bc
from bayesopt_chain.ensemble import report
from tests.distributed.ranks import on, refuses, run, world
from tests.distributed.toys import line
from tests.ensemble.test_untidy import Net

SMALL = {"members": 3, "steps": 60, "lr": 0.03, "progress": False, "batch_size": 16}
# 60 steps in float32, whose matrix products round as the members in one call are many
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}  # modes have no loss
BITWISE = {"rtol": 0, "atol": 0, "equal_nan": True}


def data(n=48):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1]


def normed():
    """What ``vmap`` takes: BatchNorm and dropout."""
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 1))


def last_output(net, x):
    return net.out(net.lstm(x[..., None])[0][:, -1])


def recurrent():
    """What ``vmap`` refuses, so that members run one after the other."""
    return Net(last_output, lstm=nn.LSTM(1, 3, batch_first=True), out=nn.Linear(3, 1))


def call(module=normed, **changes):
    """What a call comes to: predictions, every network, and what the report counts."""
    given = {"data": data(), "mesh": line(), **SMALL, **changes}
    e = bc.posterior_ensemble(module, given.pop("data"), bc.likelihoods.gaussian(), **given)
    p = e.predict(data()[0])
    made = {"mean": p.mean, "log_prob": p.log_prob(data()[1]), "passes": e.report.passes}
    return {**made, "params": e.params, "buffers": e.buffers}


@pytest.mark.slow
@pytest.mark.parametrize("module", [normed, recurrent])
def test_uneven_members_over_ranks_are_those_of_one_process(module):
    """Bit for bit where they run one after the other. Else equal but for rounding, which is not asked of parameters, since a
    bias before BatchNorm is moved by rounding alone."""
    want, ranks = call(module), run(call, 2, module)
    torch.testing.assert_close(ranks[0], ranks[1], **BITWISE)
    assert all(x.shape[:2] == (1, 3) for x in ranks[0]["params"].values())
    names = ["mean", "log_prob", "passes"] if module is normed else [*want]
    how = CLOSE if module is normed else BITWISE
    torch.testing.assert_close([ranks[0][k] for k in names], [want[k] for k in names], **how)


def killed(path, step):
    """A call that dies on every rank, at a step of all runs together."""
    left = iter(range(step - 1))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(report.Progress, "__call__", lambda self, steps=1: next(left))
        call(path=path)


@pytest.mark.slow
@pytest.mark.parametrize("step, size", [(12, 2), (19, 2), (70, 2), (12, 1)])
def test_a_call_that_is_killed_goes_on_with_the_same_results_bit_for_bit_also_on_another_number_of_ranks(
    step, size, tmp_path
):
    """18 steps try rates, 60 train."""
    run(killed, 2, tmp_path / "kept", step)
    went_on, want, again = (run(call, size, path=path)[0] for path in (tmp_path / "kept", None, tmp_path / "kept"))
    names = [*want] if size == 2 else ["mean", "log_prob"]
    how = BITWISE if size == 2 else CLOSE
    torch.testing.assert_close([went_on[k] for k in names], [want[k] for k in names], **how)
    torch.testing.assert_close(again["mean"], went_on["mean"], **BITWISE)  # complete: it returns


@pytest.mark.slow
@on(2)
def test_what_ranks_cannot_share_out_is_refused_on_every_rank_and_that_training_diverges_is_said_there(tmp_path):
    (x, y), rank, path = data(), world()[0], tmp_path / "kept"
    call(path=path)
    refused = lambda **changes: lambda: call(**changes)  # noqa: E731
    refuses(
        {
            ("ValueError", "members=1 on 2 ranks"): refused(members=1),
            ("not given the same call: data differ",): refused(data=(x + rank, y)),
            ("seed", "starts differ"): refused(seed=rank),
            ("TypeError", "mesh must be a DeviceMesh"): refused(mesh="cpu"),
            ("holds another call",): refused(path=path, seed=5),
            ("diverged",): refused(lr=1e30),
        }
    )
