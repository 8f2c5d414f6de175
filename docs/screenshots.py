"""Photographs the embedded model's report: light, dark and on a narrow screen. Needs Chromium.

python docs/screenshots.py [RUN]   # a run folder; without one, runs/screenshots is made by `headwise demo` if need be
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHOTS = {  # file -> what the visitor's screen is like
    "report-light.png": dict(width=1280, height=1000, scheme="light"),
    "report-dark.png": dict(width=1280, height=1000, scheme="dark"),
    "report-360.png": dict(width=360, height=1320, scheme="light"),
}
COLOURS = 128  # enough for a page of few colours, and a third of the bytes


def report(folder: Path) -> Path:
    """The report of a run folder, which is made first if it is not there."""
    if not (folder / "verdict.json").exists():
        subprocess.run([sys.executable, "-m", "headwise", "demo", "--out", str(folder)], check=True)
    subprocess.run([sys.executable, "-m", "headwise", "report", str(folder)], check=True)
    return folder / "report.html"


def photograph(browser: Browser, page: Path, width: int, height: int, scheme: str) -> bytes:
    """The first screen as a small PNG."""
    size = {"width": width, "height": height}
    visit = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1.5)  # type: ignore[arg-type]
    visit.goto(page.resolve().as_uri())
    image = Image.open(io.BytesIO(visit.screenshot())).convert("RGB")
    visit.close()
    small = io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def chromium() -> str:
    """Where the browser is."""
    found = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
    return found or sys.exit("no Chromium was found; type: make browser")


def main() -> None:
    """Write every picture."""
    page = report(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs") / "screenshots")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for name, screen in SHOTS.items():
            content = photograph(browser, page, **screen)  # type: ignore[arg-type]
            (DOCS / name).write_bytes(content)
            print(f"docs/{name}: {len(content):,} bytes")
        browser.close()


if __name__ == "__main__":
    main()
