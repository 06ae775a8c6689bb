"""The README's figures are those of the files that the benchmarks wrote."""

from pathlib import Path

from benchmarks.table import table, when

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_table_of_speed_is_the_measured_one():
    assert table() in README, "run `python -m benchmarks.table` and put its output into the README"


def test_machine_and_date_are_those_of_the_measurement():
    assert when() in README.replace("\n", " ")
