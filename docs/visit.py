"""Opens every page of the built site in Chromium, on a wide and on a narrow screen, and tells what is wrong.

python docs/visit.py                 # after `make docs`
python docs/visit.py --shots FOLDER  # with pictures of all pages

Exit code 1 if a page is wider than its screen, logs an error, loads something that is not there, or has a serious
violation of accessibility (axe-core), or if the search finds nothing in pages that are opened as files.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import threading
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright
from screenshots import chromium

SITE = Path(__file__).parents[1] / "site"
WIDTHS = (1280, 360)
PATIENCE = 300_000  # ms: a machine may have other work
SERIOUS = ("serious", "critical")
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def visited(browser: Browser, address: str, width: int, scheme: str, shot: Path | None) -> list[str]:
    """What is wrong with a page on a screen of this width."""
    size = {"width": width, "height": 900}
    page = browser.new_page(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("requestfailed", lambda asked: wrong.append(f"not loaded: {asked.url}"))
    page.on("response", lambda got: wrong.append(f"{got.status}: {got.url}") if got.status >= 400 else None)
    page.goto(address, wait_until="load")
    if (over := page.evaluate(WIDER)) > 0:
        wrong.append(f"{over} px wider than the screen")
    for found in Axe().run(page).response["violations"]:
        if found["impact"] in SERIOUS:
            places = "; ".join(node["html"][:120] for node in found["nodes"][:3])
            wrong.append(f"axe {found['id']} ({len(found['nodes'])}): {places}")
    if shot:
        page.screenshot(path=shot, full_page=True)
    page.close()
    return wrong


def searched(browser: Browser, words: str) -> list[str]:
    """Titles of the pages that the search finds, as on a machine without a server."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto((SITE / "index.html").as_uri())
    page.locator(".md-search__input").press_sequentially(words)
    page.locator(".md-search-result__item").first.wait_for(state="attached")
    found = page.locator(".md-search-result__item h1").all_inner_texts()
    page.close()
    return found


def _named(path: Path, only: str) -> bool:
    return any(part in str(path) for part in only.split(","))


def main() -> None:
    """Visit every page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shots", type=Path)
    parser.add_argument("--only", default="", help="pages whose path contains one of these, with commas")
    parser.add_argument("--dark", action="store_true")
    asked = parser.parse_args()
    pages = sorted(path.relative_to(SITE) for path in SITE.rglob("*.html") if _named(path, asked.only))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bad = 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for path in pages:
            for width in WIDTHS:
                name = f"{str(path.with_suffix('')).replace('/', '-')}-{width}.png"
                address = f"http://127.0.0.1:{server.server_port}/{path}"
                shot = asked.shots / name if asked.shots else None
                wrong = visited(browser, address, width, "dark" if asked.dark else "light", shot)
                bad += bool(wrong)
                for one in dict.fromkeys(wrong):
                    print(f"{path} at {width}: {one}", flush=True)
        found = searched(browser, "does it hold at 32k")
        bad += "Questions" not in found
        print(f"the search finds {', '.join(found[:3])}")
        browser.close()
    print(f"{len(pages)} pages at {' and '.join(map(str, WIDTHS))} px; something is wrong with {bad} of these views")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
