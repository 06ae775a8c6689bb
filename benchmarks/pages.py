"""Write the numbers of the records into the pages: ``python -m benchmarks.pages``.

Behind a number stands, unseen on the page, where it comes from: ``1.52<!-- cpu.json: rows > work=CNN > ratio -->`` names a
record and the keys that lead to the number in it. It is written with as many digits as stand there, and without its sign. A
passage between ``<!-- table -->`` and ``<!-- end of table -->`` is what that function of :mod:`benchmarks.table` returns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.measure import RESULTS, ROOT
from benchmarks.table import fits, machines, table

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "howto").glob("*.md"),
]
NUMBER = re.compile(r"([\d,]*\.?\d+)( %)?<!-- (\w+\.json): (.*?) -->")
PASSAGES: dict[str, Callable[[], str]] = {"table": table, "machines": machines, "fits": fits}


def recorded(file: str, keys: str, change: Callable[[str], str] = str) -> Any:
    """The value in a record that some keys lead to, where ``change`` has changed its text.

    A key is that of a dictionary, a number in a list, or what an entry of a list begins with: ``class=Adam & leaves=3``.
    """
    at = json.loads(change((RESULTS / file).read_text()))
    for key in keys.split(" > "):
        if isinstance(at, dict):
            at = at[key]
        elif key.isdigit():
            at = at[int(key)]
        else:
            wanted = [part.split("=") for part in key.split(" & ")]
            at = next(x for x in at if all(str(x.get(name)).startswith(text) for name, text in wanted))
    return at


def filled(page: str, change: Callable[[str], str] = str) -> str:
    """The text of a page with the numbers and passages of the records."""

    def number(mark: re.Match[str]) -> str:
        written, percent, file, keys = mark.groups()
        value = abs(recorded(file, keys, change)) * (100 if percent else 1)
        commas = "," if "," in written else ""
        new = f"{value:{commas}.{len(written.partition('.')[2])}f}"
        new = new.removeprefix("0") if written[0] == "." else new
        return mark[0].replace(written, new, 1)

    page = NUMBER.sub(number, page)
    for name, make in PASSAGES.items():
        page = re.sub(
            f"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)",
            lambda m, make=make: m[1] + make() + m[2],
            page,
            flags=re.S,
        )
    return page


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(filled(file.read_text()))
