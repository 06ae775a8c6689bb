"""The one call with its members over ranks: the same members and predictions as in one process."""

from pathlib import Path

import pytest
import torch

from tests.distributed import members
from tests.distributed.ranks import launched as under_torchrun
from tests.distributed.ranks import run

CLOSE = {
    "rtol": 1e-4,
    "atol": 1e-5,
}  # 40 steps in float32, whose matrix products round as the members in one call are many


def same(mine, alone):
    """Equal but for rounding; of parameters this is not asked, since a bias before BatchNorm is moved by rounding alone."""
    if isinstance(mine, dict):
        mine, alone = ({k: x for k, x in tree.items() if k not in ("params", "buffers")} for tree in (mine, alone))
    torch.testing.assert_close(mine, alone, **CLOSE, equal_nan=True)  # modes have no loss


@pytest.mark.slow
def test_uneven_members_over_forked_ranks_are_those_of_one_process(tmp_path):
    alone = members.result(members.call())
    ranks = run(members.over_ranks, 2, tmp_path)
    for mine in ranks:
        same(mine, alone)
        assert all(x.shape[:2] == (1, 3) for x in mine["params"].values())
    torch.testing.assert_close(ranks[0], ranks[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_members_that_run_one_after_the_other_are_bit_for_bit_those_of_one_process(tmp_path):
    alone = members.result(members.call(members.Recurrent))
    for mine in run(members.over_ranks, 2, tmp_path, members.Recurrent):
        torch.testing.assert_close(mine, alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [{"stage": "training", "every": True}, {"step": 12, "every": True}, {"step": 70, "every": True}],
    ids=str,
)
def test_a_call_that_is_killed_goes_on_with_the_same_results_bit_for_bit(kill, tmp_path):
    wanted = run(members.over_ranks, 2, tmp_path)
    path = tmp_path / "kept"
    assert run(members.killed, 2, tmp_path, path, *[kill.get(k) for k in ("stage", "step", "every")]) == ["killed"] * 2
    went_on = run(members.over_ranks, 2, tmp_path, members.Normed, path)
    torch.testing.assert_close(went_on, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_a_call_that_is_killed_goes_on_on_another_number_of_ranks(tmp_path):
    alone, path = members.result(members.call()), tmp_path / "kept"
    run(members.killed, 2, tmp_path, path, None, 12, True)
    (one,) = run(members.over_ranks, 1, tmp_path, members.Normed, path)
    same(one["log_prob"], alone["log_prob"])


@pytest.mark.slow
def test_what_ranks_cannot_share_out_is_refused_on_every_rank(tmp_path):
    members.call(path=tmp_path / "kept")
    for few, data, seed, text, path in run(members.refused, 2, tmp_path, tmp_path / "kept"):
        assert few.startswith("ValueError") and "members=1 on 2 ranks" in few
        assert "not given the same call: data differ" in data
        assert "seed" in seed and "starts differ" in seed
        assert text.startswith("TypeError") and "mesh must be a DeviceMesh" in text
        assert "holds another call" in path


def test_all_ranks_say_that_training_diverges(tmp_path):
    for said in run(members.diverging, 2, tmp_path):
        assert "diverged" in said


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What every case of ``members.py`` gave on both ranks, of one launch."""
    return under_torchrun(Path(members.__file__), tmp_path_factory.mktemp("members"))


@pytest.mark.slow
def test_under_torchrun_members_and_predictions_are_those_of_one_process(launched):
    for mine in launched:
        same(mine["normed"]["log_prob"], members.result(members.call())["log_prob"])
        bitwise = members.result(members.call(members.Recurrent))
        torch.testing.assert_close(mine["recurrent"], bitwise, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine["kept"]["mean"], mine["normed"]["mean"])  # a path changes nothing
        assert torch.equal(mine["again"]["mean"], mine["normed"]["mean"])  # and a complete call returns
