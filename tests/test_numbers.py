"""Numbers in documents are those of the records: behind a number stands, unseen on the page, where it comes from.

    a step takes 0.245<!-- cpu.json: rows > work=SGHMC, 60 > ratios > ours=fused & theirs=posteriors > ratio --> of the time

The keys lead through ``benchmarks/results/cpu.json``: a key of a dictionary, or ``key=text`` for the first entry of a list
whose texts begin so. The number is compared without its sign, with as many digits as it is written with; per cent are
hundredths.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "howto").glob("*.md"),
]
MARKED = re.compile(r"([\d,]*\.?\d+)( %)?<!-- (\w+\.json): (.*?) -->")


def recorded(file, keys):
    """The value in a record that some keys lead to."""
    at = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    for key in keys.split(" > "):
        wanted = [part.split("=") for part in key.split(" & ")]
        fits = lambda x, wanted=wanted: all(str(x.get(name)).startswith(text) for name, text in wanted)  # noqa: E731
        at = at[key] if isinstance(at, dict) else next(x for x in at if fits(x))
    return at


def wrong(text):
    """What a text says, and what the records say, where they differ."""
    found = []
    for number, percent, file, keys in MARKED.findall(text):
        value = abs(recorded(file, keys)) * (100 if percent else 1)
        digits = len(number.partition(".")[2])
        if f"{value:.{digits}f}" != f"{float(number.replace(',', '')):.{digits}f}":
            found.append((number + percent, f"{file}: {keys}", value))
    return found


def test_every_marked_number_is_that_of_its_record():
    texts = {page.name: page.read_text() for page in PAGES}
    marks = {name: len(MARKED.findall(text)) for name, text in texts.items()}
    assert sum(marks.values()) >= 16 and marks == {name: text.count(".json: ") for name, text in texts.items()}
    assert not [found for text in texts.values() for found in wrong(text)]


def test_the_numbers_of_the_readme_are_marked():
    table = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ") and "0." in line]
    assert table and all(MARKED.search(line) or "to 1e-10" in line for line in table), table


@pytest.mark.parametrize(
    "text", ["281 kills<!-- x -->", "401<!-- soak.json: kills > kills -->", "1.0 %<!-- soak.json: kills > kills -->"]
)
def test_a_number_that_differs_is_seen(text):
    assert len(wrong(text)) == text.count(".json")
