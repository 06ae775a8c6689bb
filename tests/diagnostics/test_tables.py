"""Commands that fill a record cell by cell: they run, judge rightly, and go on where they stopped."""

import json
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import curvature_fit, doctor, heat_guard
from benchmarks.measure import fill
from benchmarks.networks import mlp

pytestmark = pytest.mark.slow


def test_the_doctor_names_the_fault_of_a_wrong_run_and_leaves_a_right_one_alone():
    right, wrong = doctor.run("independent draws 1"), doctor.run("linear, nan")
    assert right["right"] and wrong["right"] and wrong["found"] == ["nonfinite"]
    runs = [bool(kinds) for kinds, _ in doctor.runs().values()]
    assert runs.count(False) >= 30 and runs.count(True) >= 30
    counts = doctor.table({"a 1": right, "b": wrong})
    assert counts["called wrong"] == 0 and counts["fault named"] == 1 and counts["held out"]["right runs"] == 1


def test_what_the_guard_said_is_counted_against_the_truth():
    """A cold run that it warned of, a hot one that it warned of and one that it missed, and one that is neither."""
    truths = [(1.0, 0.0, 93), (5.0, 0.5, 213), (3.0, 0.1, None), (2.1, 0.5, None)]
    rows = {
        str(row): {"kind": "wines", "truth": row[0], "error": row[1], "delay": row[2], "said": [""] * bool(row[2])}
        for row in truths
    }
    assert heat_guard.table(rows)[-1] == ("all", 1, 1, 2, 1, "213, 213, 213, 213, inf", 1)


def test_a_record_is_filled_where_it_lacks_something_and_what_it_has_stays(tmp_path):
    path = tmp_path / "record.json"

    def filled(*words):
        cells = [(("lengths", word[0], word), partial(len, word)) for word in words]
        return fill(path, cells, lambda record: {"letters": len(record["lengths"])})

    assert filled("a", "bb")["lengths"] == {"a": {"a": 1}, "b": {"bb": 2}}
    with pytest.raises(TypeError):  # what came before it is kept
        fill(path, [(("lengths", "c", "cc"), partial(len, "cc")), (("lengths", "d", "dd"), partial(len, 2))])
    record = json.loads(path.read_text())
    record["lengths"]["a"]["a"] = 7  # not worked out again
    path.write_text(json.dumps(record))
    assert filled("a", "cc", "dd")["lengths"] == {"a": {"a": 7}, "b": {"bb": 2}, "c": {"cc": 2}, "d": {"dd": 2}}
    assert json.loads(path.read_text())["letters"] == 4


def test_a_record_of_other_settings_is_not_filled(tmp_path):
    path = tmp_path / "record.json"
    cells = [(("lengths", "a"), partial(len, "a"))]
    assert fill(path, cells, rounds=3)["rounds"] == 3
    with pytest.raises(SystemExit, match="rounds"):
        fill(path, [(("lengths", "bb"), partial(len, "bb"))], rounds=1)
    assert fill(path, cells, rounds=3)["lengths"] == {"a": 1}


def test_each_phase_of_a_fit_is_timed_and_what_fails_says_so(monkeypatch):
    monkeypatch.setitem(curvature_fit.CONTENDERS, "absent", partial(__import__, "no_such_library"))
    data = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))
    case = curvature_fit.Case(mlp(4, 5, 3), DataLoader(data, 10), torch.randn(2, 4), "all", "kronecker")
    rows = curvature_fit.compare(case, 1)
    assert rows["bayesopt_chain"].keys() == {"factors", "fit", "tune", "predict"}
    assert rows["passes alone"].keys() == {"factors", "fit", "predict"}
    assert all(row["ms"] > 0 for row in rows["bayesopt_chain"].values())
    assert "not possible" in rows["absent"]["start"]
