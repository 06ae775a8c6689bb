"""The commands that count how often guard and doctor are wrong: they run, judge rightly, and go on where they stopped."""

import json

import pytest

from benchmarks import doctor, heat_guard
from benchmarks.measure import work_out

pytestmark = pytest.mark.slow


def test_a_cold_and_a_hot_loop_are_told_apart_by_guard_and_truth(monkeypatch):
    monkeypatch.setattr(heat_guard, "STEPS", 400)
    monkeypatch.setattr(heat_guard, "LEAST", 200)
    monkeypatch.setitem(heat_guard.CHAINS, "linear", 8)
    hot = heat_guard.run(heat_guard.Case("linear", 0.05, 0.9, 32, "independent", "", 0))
    cold = heat_guard.run(heat_guard.Case("linear", 0.6, 0.9, None, "independent", "", 0))
    assert hot["warned"] and hot["truth"] - 2 * hot["standard_error"] > 2 and not cold["warned"]
    counts = heat_guard.table([{**hot, "cell": "hot"}, {**cold, "cell": "cold"}])
    assert (counts["cold runs"], counts["hot runs"], counts["misses"], counts["false alarms"]) == (1, 1, [], [])


def test_the_loops_of_the_guard_have_names_of_their_own():
    names = [str(case) for case in heat_guard.cases(2)]
    assert len(set(names)) == len(names) > 200


def test_the_doctor_names_the_fault_of_a_wrong_run_and_leaves_a_right_one_alone():
    right, wrong = doctor.run("independent draws 1"), doctor.run("linear, nan")
    assert right["right"] and wrong["right"] and wrong["found"] == ["nonfinite"]
    runs = [bool(kinds) for kinds, _ in doctor.runs().values()]
    assert runs.count(False) >= 30 and runs.count(True) >= 30
    counts = doctor.table([{**right, "cell": "a 1"}, {**wrong, "cell": "b"}])
    assert counts["called wrong"] == 0 and counts["fault named"] == 1 and counts["held out"]["right runs"] == 1


def length(cell):
    if cell == "bad":
        raise ValueError("no such cell")
    return {"length": len(cell)}


def test_a_table_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "record.json"
    rows = work_out(length, ["a", "bad", "ccc"], path, summary=len)
    assert [row.get("length") for row in rows] == [1, None, 3] and "no such cell" in rows[1]["failed"]
    record = json.loads(path.read_text())
    record["rows"][0]["length"] = 7  # not worked out again
    path.write_text(json.dumps(record))
    rows = work_out(length, ["a", "ccc", "dd"], path, summary=len)
    assert [row["length"] for row in rows] == [7, 3, 2]
    assert [row["cell"] for row in work_out(length, ["dd"], path, summary=len)] == [
        "dd",
        "a",
        "ccc",
    ]  # none is lost
