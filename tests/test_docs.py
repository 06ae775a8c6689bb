"""Every page of the site shows something that runs, and is reached from the first one."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("choosing", "coming_from", "methods", "speed", "temperature")]
PAGES += [page for page in sorted((DOCS / "howto").glob("*.md")) if page.stem not in ("index", "digits_table")]
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
    lengths = {page.stem: len(page.read_text().splitlines()) for page in pages}
    assert {name: n for name, n in lengths.items() if n > TWO_SCREENS} == {}


def test_a_page_says_what_one_gets_before_anything_else():
    """Words and an example or a table stand before the second heading."""
    for page in PAGES:
        first = page.read_text().split("\n## ")[0]
        words = re.sub(r"```.*?```", "", first.partition("\n")[2], flags=re.S).split()
        assert len(words) >= 15, page.stem


def test_every_page_in_a_table_of_contents_is_there():
    for index in (DOCS / "index.md", DOCS / "howto" / "index.md"):
        for toctree in re.findall(r"```\{toctree\}\n(.*?)```", index.read_text(), re.S):
            for name in [line for line in toctree.split("\n") if line and not line.startswith(":")]:
                if name.startswith("notebooks/"):
                    assert (DOCS.parent / f"{name}.ipynb").exists(), name
                elif name not in MADE:
                    assert (index.parent / f"{name}.md").exists(), name


def test_every_page_stands_in_a_table_of_contents():
    listed = (DOCS / "index.md").read_text() + (DOCS / "howto" / "index.md").read_text()
    for page in [*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")]:
        if page.stem not in ("index", "results", "digits_table"):
            assert re.search(rf"^{page.stem}$", listed, re.M), page


def test_the_linked_documents_are_there():
    for page in [*DOCS.glob("*.md"), *(DOCS / "howto").glob("*.md")]:
        for link in re.findall(r"\{doc\}`([^`<]+)`", page.read_text()):
            target = (page.parent / link).resolve()
            # The build of the site writes two kinds of pages: the notebooks, and the results of the benchmarks.
            written = [DOCS.parent / "notebooks" / f"{target.name}.ipynb"]
            written += [DOCS.parent / "benchmarks" / "RESULTS.md"] * (target == DOCS / "results")
            places = [target.with_suffix(".md"), *written]
            assert any(p.exists() for p in places) or "/api/" in f"/{link}", (page.name, link)
