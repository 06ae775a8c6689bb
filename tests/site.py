"""``python -m tests.site FOLDER``: build the documentation, and photograph it.

The pages go to ``FOLDER/html``. Sphinx refuses links inside the site that lead nowhere, and pages that no table of contents
has; ``make links`` asks for those outside. Where
Chromium is installed, the landing page and six others are photographed at 1,280 and at 400 pixels
(``FOLDER/PAGE_WIDTH.png``), and no page may be wider than the window, so that nothing but code has to be scrolled sideways.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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
MEASURE = """<iframe id="page" style="border:0;width:{width}px;height:2000px" src="/{page}.html"></iframe>
<p id="width"></p><script>
document.getElementById("page").onload = e => document.getElementById("width").textContent =
  "width=" + e.target.contentDocument.documentElement.scrollWidth + ";"</script>"""


def build(out: Path, builder: str = "html") -> str:
    """Build the site into a folder; returns what Sphinx complains of, nothing if all is well."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", builder, str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def outside_links(text: str) -> set[str]:
    """The addresses outside the project that a page names; this machine's own are none."""
    found = re.findall(r"https?://[^\s)\"'`<>\\]+", text)
    return {
        link.rstrip(".,;") for link in found if not link.startswith(("http://127.0.0.1", "https://repository.invalid"))
    }


def chromium() -> str | None:
    """The browser, if there is one."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _browse(*arguments: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        command = [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-background-networking", f"--user-data-dir={profile}", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


class _Served(SimpleHTTPRequestHandler):
    """The site, and for ``/measure/WIDTH/PAGE`` a page that writes down how wide that one is."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"/measure/(\d+)/(.+)", self.path)
        if asked is None:
            return super().do_GET()
        body = MEASURE.format(width=asked[1], page=asked[2]).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def widths(site: Path, pages: tuple[str, ...] = PHOTOGRAPHED) -> Iterator[tuple[str, int, int]]:
    """Page, width of the window, width of the page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Served, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for page in pages:
            for width in WIDTHS:
                url = f"http://127.0.0.1:{server.server_port}/measure/{width}/{page}"
                found = re.search(r"width=(\d+);", _browse("--virtual-time-budget=5000", "--dump-dom", url))
                yield page, width, int(found[1]) if found else -1
    finally:
        server.shutdown()


def photograph(site: Path, out: Path, pages: tuple[str, ...] = PHOTOGRAPHED) -> None:
    """Pictures of pages at both widths."""
    for page in pages:
        for width in WIDTHS:
            picture = out / f"{page.replace('/', '_')}_{width}.png"
            _browse(
                f"--window-size={width},1600", f"--screenshot={picture}", (site / f"{page}.html").resolve().as_uri()
            )


def main() -> None:
    out = Path(sys.argv[1] if sys.argv[1:] else "site")
    site = out / "html"
    complaints = [line for line in build(site).splitlines() if line]
    if chromium() is None:
        print("no Chromium: no pictures, and widths are not looked at")
    else:
        photograph(site, out)
        narrow = [(page, width, wide) for page, width, wide in widths(site) if not 0 < wide <= width]
        complaints += [f"{page} is {wide} pixels wide in {width}" for page, width, wide in narrow]
    print("\n".join(complaints) or f"{len([*site.rglob('*.html')])} pages, nothing to complain of")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
