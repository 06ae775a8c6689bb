"""The documentation builds without a warning, and its links lead somewhere."""

from pathlib import Path

import pytest

from tests.site import build, chromium, outside_links, widths


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_pages_fit_a_telephone(tmp_path):
    """Without a browser all is read and every reference resolved, and no page written."""
    assert build(tmp_path, "html" if chromium() else "dummy") == ""
    if chromium():
        assert [found for found in widths(tmp_path, ("index", "theory")) if not 0 < found[2] <= found[1]] == []


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
