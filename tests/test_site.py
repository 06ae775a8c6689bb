"""The documentation is read without a warning, and its links lead somewhere; ``make docs`` writes and measures the pages."""

from pathlib import Path

import pytest

from tests.site import build, outside_links


@pytest.mark.slow
def test_the_site_is_read_and_every_reference_is_resolved_without_a_warning(tmp_path):
    assert build(tmp_path, "dummy") == ""


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
