"""The command that counts how often the doctor is wrong: it runs, judges rightly, and goes on where it stopped."""

import json
from functools import partial

import pytest

from benchmarks import doctor
from benchmarks.measure import fill

pytestmark = pytest.mark.slow


def test_the_doctor_names_the_fault_of_a_wrong_run_and_leaves_a_right_one_alone():
    right, wrong = doctor.run("independent draws 1"), doctor.run("linear, nan")
    assert right["right"] and wrong["right"] and wrong["found"] == ["nonfinite"]
    runs = [bool(kinds) for kinds, _ in doctor.runs().values()]
    assert runs.count(False) >= 30 and runs.count(True) >= 30
    counts = doctor.table({"a 1": right, "b": wrong})
    assert counts["called wrong"] == 0 and counts["fault named"] == 1 and counts["held out"]["right runs"] == 1


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
