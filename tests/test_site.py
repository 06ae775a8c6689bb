"""The documentation builds without a warning, and its links lead somewhere."""

from pathlib import Path

import pytest

from tests.site import broken_links, build, chromium, outside_links, widths


@pytest.mark.slow
def test_the_site_builds_without_a_warning_every_link_leads_somewhere_and_pages_fit_a_telephone(tmp_path):
    assert build(tmp_path) == ""
    assert broken_links(tmp_path) == []
    if chromium():
        assert [found for found in widths(tmp_path, ("index", "theory")) if not 0 < found[2] <= found[1]] == []


def test_a_link_to_a_page_or_an_anchor_that_is_missing_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="a.html#here"></a><a href="#there"></a><a href="b.html"></a></p>'
    )
    assert broken_links(tmp_path) == ["a.html: #there", "a.html: b.html"]


def test_every_address_outside_stands_on_one_page():
    """So that whoever checks them from time to time has one page to read."""
    root = Path(__file__).parents[1]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "docs" / "howto").glob("*.md")]
    sources = outside_links((root / "docs" / "references.md").read_text())
    assert len(sources) > 30
    assert {
        page.name: outside_links(page.read_text()) - sources
        for page in pages
        if outside_links(page.read_text()) - sources
    } == {}
