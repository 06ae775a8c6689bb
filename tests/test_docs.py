"""Every page of the site shows something that runs."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("choosing", "coming_from", "methods", "speed", "temperature")]
PAGES += [page for page in sorted((DOCS / "howto").glob("*.md")) if page.stem != "digits_table"]
MADE = ("api/index", "results")  # written when the site is built
# whole programs, by tests/optim/test_trainers.py and tests/lora
RUN_ELSEWHERE = {"lightning", "hugging_face", "pyro", "adapters"}
LOOKED_UP = {"architecture", "theory", "from_posteriors"}  # a drawing of all rooms, a proof, a list of names
TWO_SCREENS = 120  # lines of source


def test_a_page_has_an_example_that_runs_and_says_what_can_go_wrong():
    for page in PAGES:
        text = page.read_text()
        assert ">>> " in text or (page.stem in RUN_ELSEWHERE and "```python" in text), page.stem
        assert "## What can go wrong" in text, page.stem


def test_a_page_is_at_most_two_screens_long():
    """What is looked up and not read may be longer."""
    pages = [
        page for page in [*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")] if page.stem not in LOOKED_UP | {*MADE}
    ]
    assert len(pages) > 40
    texts = {page.stem: re.sub(r"```\{toctree\}.*?```", "", page.read_text(), flags=re.S) for page in pages}
    lengths = {name: len(text.strip().splitlines()) for name, text in texts.items()}
    assert {name: n for name, n in lengths.items() if n > TWO_SCREENS} == {}


def test_a_page_says_what_one_gets_before_anything_else():
    """Words and an example or a table stand before the second heading."""
    for page in PAGES:
        first = page.read_text().split("\n## ")[0]
        words = re.sub(r"```.*?```", "", first.partition("\n")[2], flags=re.S).split()
        assert len(words) >= 15, page.stem


def test_the_sidebar_fits_on_a_screen():
    tables = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.S)
    entries = [line for table in tables for line in table.split("\n") if line and not line.startswith(":")]
    assert len(entries) <= 25
