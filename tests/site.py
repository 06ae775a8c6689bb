"""``python -m tests.site FOLDER``: build the documentation, and photograph it.

The pages go to ``FOLDER/html``. Sphinx refuses links inside the site that lead nowhere, and pages that no table of contents
has; ``make links`` asks for those outside. Where Chromium is installed, the landing page and others are photographed at 1,280
and at 400 pixels (``FOLDER/PAGE_WIDTH.png``).
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PHOTOGRAPHED = (
    "index",
    "demo",
    "howto/many_ranks",
    "trainers",
    "minibatches",
    "theory",
    "laplace",
    "howto/check_a_run",
    "glossary",
)
WIDTHS = (1280, 400)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")


def build(out: Path, builder: str = "html") -> str:
    """Build the site into a folder; returns what Sphinx complains of, nothing if all is well."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def photograph(browser: str, out: Path) -> None:
    """Pictures of pages at both widths."""
    for page, width in itertools.product(PHOTOGRAPHED, WIDTHS):
        address = (out / "html" / f"{page}.html").resolve().as_uri()
        picture = out / f"{page.replace('/', '_')}_{width}.png"
        with tempfile.TemporaryDirectory() as profile:
            own = (f"--user-data-dir={profile}", f"--window-size={width},1600", f"--screenshot={picture}")
            subprocess.run([browser, *QUIET, *own, address], capture_output=True, check=True, timeout=120)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if sys.argv[1:] else "site")
    complaints = build(folder / "html")
    if browser := next(filter(None, map(shutil.which, BROWSERS)), None):
        photograph(browser, folder)
    sys.exit(complaints or 0)
